"""Groups that differ too little are left out: what is trained is a run whose epochs have only the others."""

import itertools
import shutil
from dataclasses import replace

import pytest
import torch
from runs import assert_same_run, launch_forward, launch_grpo, metrics

from rewardfl import group_plan, grpo
from rewardfl.training import checkpoint

pytestmark = pytest.mark.slow(90)

GRPO = ["grpo.kl_weight=0.1", "grpo.advantage.std=max_group", "grpo.clip_range=0.1"]
RVM, NFT, AWM, BEST, DPO = (
    ["forward.base_anchor=0.1", f"forward.objective={x}"] for x in ("rvm", "nft", "awm", "best", "dpo")
)


def train(run, settings, groups, limit, *more):
    """Return standard output and the metrics of a run."""
    section, launch = ("grpo", launch_grpo) if settings is GRPO else ("forward", launch_forward)
    words = [f"{section}.groups={groups}", f"{section}.advantage.smallest_spread={limit}", "run.sample_videos=0"]
    words += [word.replace("SECTION", section) for word in more]
    return launch(f"run.output_dir={run}", *settings, *words, "train.warmup_steps=0").stdout, metrics(run)


@pytest.mark.parametrize("settings", [GRPO, RVM, NFT, AWM, BEST, DPO])
def test_an_update_is_that_of_the_groups_that_are_left(monkeypatch, tmp_path, settings):
    """Groups of two in passes of four, half of each left out. Two updates on one epoch."""
    left, plan = [1, 2], group_plan.plan
    more = ["SECTION.inner_epochs=2", "train.max_steps=2", "train.per_device_train_batch_size=4"]

    def plan_left(epoch, rank, geometry, *arguments):
        members = itertools.chain(*plan(epoch, rank, replace(geometry, groups=4), *arguments))
        return [[m._replace(group_id=left.index(m.group_id)) for m in members if m.group_id in left]]

    monkeypatch.setattr(grpo, "wide_groups", lambda *_: torch.tensor([False, True, True, False]))
    _, lines = train(tmp_path / "filtered", settings, 4, 1, *more)
    monkeypatch.undo()
    monkeypatch.setattr(group_plan, "plan", plan_left)
    for line, expected in zip(lines, train(tmp_path / "few", settings, 2, 0, *more)[1], strict=True):
        keys = [
            key for key in expected if key.startswith(("policy/", "actor/", "grad_norm")) and "deviation" not in key
        ]
        assert [line[key] for key in keys] == pytest.approx([expected[key] for key in keys], rel=1e-4, abs=1e-12)
        assert line["group/left_out"] == 0.5 and line["grad_norm"] > 0


def leave(monkeypatch, *counts):
    """Leave so many groups of each epoch."""
    left = iter(counts)
    monkeypatch.setattr(grpo, "wide_groups", lambda rewards, *_: torch.arange(len(rewards)) < next(left))


@pytest.mark.parametrize("settings", [GRPO, NFT, DPO])
def test_an_update_with_nothing_left_is_skipped(monkeypatch, tmp_path, settings):
    """It leaves weights, averages and moments. A run that resumes after it is the same to the bit."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    leave(monkeypatch, 2, 0, 1)
    printed, lines = train(straight, settings, 2, 1, "run.save_steps=1", "train.max_steps=3")
    assert "step 2: no group's best and worst differ by advantage.smallest_spread 1: nothing to learn" in printed
    assert [line["group/left_out"] for line in lines] == [0, 1, 0.5]
    assert [line["train/no_signal"] for line in lines] == [line["grad_norm"] == 0 for line in lines] == [0, 1, 0]
    states = [checkpoint.load_state(straight / "checkpoints" / f"step-00000{n}") for n in (1, 2, 3)]
    first, second, third = ([state[key] for key in ("parameters", "average", "optimizer")] for state in states)
    assert repr(first) == repr(second) != repr(third)
    shutil.copytree(straight, run, symlinks=True)
    shutil.rmtree(run / "checkpoints" / "step-000003")
    (run / "checkpoints" / "latest").unlink()
    leave(monkeypatch, 1)
    train(run, settings, 2, 1, "run.save_steps=1", "train.max_steps=3")
    assert_same_run(run, straight, 3)


@pytest.mark.parametrize("settings", [GRPO, NFT, DPO])
def test_the_data_anchor_sees_every_row(monkeypatch, tmp_path, settings):
    leave(monkeypatch, 2, 1, 0)
    runs = [train(tmp_path / name, settings, 2, 1, "train.max_steps=1", "anchor.weight=0.5") for name in "abc"]
    lines = [line for _, (line,) in runs]
    assert [line["actor/anchor_loss"] for line in lines] == pytest.approx([lines[0]["actor/anchor_loss"]] * 3)
    assert [line["group/left_out"] for line in lines] == [0, 0.5, 1] and lines[2]["grad_norm"] > 0
    assert lines[2]["actor/loss"] == pytest.approx(0.5 * lines[2]["actor/anchor_loss"])
