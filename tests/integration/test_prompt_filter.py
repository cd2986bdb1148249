"""Groups that differ too little are left out: what is trained is a run whose epochs have only the others."""

import itertools
import shutil
from dataclasses import replace

import pytest
import torch
from runs import assert_same_run, launch_forward, launch_grpo, metrics, watch

from rewardfl import group_plan, grpo
from rewardfl.training import checkpoint

pytestmark = pytest.mark.slow(90)

COMMON = ["train.warmup_steps=0", "run.sample_videos=0"]
POLICY = ("grpo", launch_grpo, ["grpo.kl_weight=0.1", "grpo.advantage.std=max_group", "grpo.clip_range=0.1"])
RVM, NFT, AWM, BEST = (
    ("forward", launch_forward, [f"forward.objective={objective}", "forward.base_anchor=0.1"])
    for objective in ("rvm", "nft", "awm", "best")
)  # fmt: skip


@pytest.mark.parametrize("section, launch, settings", [POLICY, RVM, NFT, AWM, BEST])
def test_an_update_is_that_of_the_groups_that_are_left(monkeypatch, tmp_path, section, launch, settings):
    """Groups of two in passes of four: one may mix those left out with others. Two updates on one epoch."""
    spreads, plan, runs = [], group_plan.plan, []

    def plan_left(epoch, rank, geometry, *more):
        members = itertools.chain(*plan(epoch, rank, replace(geometry, groups=4), *more))
        return [[m._replace(group_id=left.index(m.group_id)) for m in members if m.group_id in left]]

    def train(groups, limit):
        words = [*settings, f"{section}.groups={groups}", f"{section}.advantage.smallest_spread={limit}", *COMMON]
        words += [f"{section}.inner_epochs=2", "train.max_steps=2", "train.per_device_train_batch_size=4"]
        launch(f"run.output_dir={tmp_path / str(len(runs))}", *words)
        runs.append(metrics(tmp_path / str(len(runs))))

    watch(monkeypatch, grpo, "wide_groups", lambda _, rewards, *__: spreads.append(rewards.amax(1) - rewards.amin(1)))
    train(4, 0)
    _, low, high, _ = sorted(spreads[0].flatten().tolist())
    left = [group for group, spread in enumerate(spreads[0]) if spread >= high]
    train(4, (low + high) / 2)
    monkeypatch.setattr(group_plan, "plan", plan_left)
    train(2, 0)
    for line, expected in zip(*runs[1:], strict=True):
        keys = [
            key for key in expected if key.startswith(("policy/", "actor/", "grad_norm")) and "deviation" not in key
        ]
        assert [line[key] for key in keys] == pytest.approx([expected[key] for key in keys], rel=1e-4, abs=1e-12)
        assert line["group/left_out"] == 0.5 and line["grad_norm"] > 0


def keep(monkeypatch, *counts):
    """Keep so many groups of each epoch."""
    left = iter(counts)
    monkeypatch.setattr(grpo, "wide_groups", lambda rewards, *_: torch.arange(len(rewards)) < next(left))


@pytest.mark.parametrize("section, launch, settings", [POLICY, NFT])
def test_an_update_with_nothing_left_is_skipped(monkeypatch, tmp_path, section, launch, settings):
    """It leaves weights, averages and moments. A run that resumes after it is the same to the bit."""
    words = [*COMMON, *settings, f"{section}.advantage.smallest_spread=1", "run.save_steps=1", "train.max_steps=3"]
    straight, run = tmp_path / "straight", tmp_path / "run"
    keep(monkeypatch, 2, 0, 1)
    done = launch(f"run.output_dir={straight}", *words)
    assert "step 2: no group's best and worst differ by advantage.smallest_spread 1: nothing to learn" in done.stdout
    lines = metrics(straight)
    assert [line["group/left_out"] for line in lines] == [0, 1, 0.5]
    assert [line["train/no_signal"] for line in lines] == [line["grad_norm"] == 0 for line in lines] == [0, 1, 0]
    states = [checkpoint.load_state(straight / "checkpoints" / f"step-00000{n}") for n in (1, 2, 3)]
    first, second, third = ([state[key] for key in ("parameters", "average", "optimizer")] for state in states)
    assert repr(first) == repr(second) != repr(third)
    shutil.copytree(straight, run, symlinks=True)
    shutil.rmtree(run / "checkpoints" / "step-000003")
    (run / "checkpoints" / "latest").unlink()
    keep(monkeypatch, 1)
    launch(f"run.output_dir={run}", *words)
    assert_same_run(run, straight, 3)


@pytest.mark.parametrize("section, launch, settings", [POLICY, NFT])
def test_the_data_anchor_sees_every_row(monkeypatch, tmp_path, section, launch, settings):
    words, lines = [*COMMON, *settings, f"{section}.advantage.smallest_spread=1", "train.max_steps=1"], []
    for groups in (2, 1, 0):
        keep(monkeypatch, groups)
        launch(f"run.output_dir={tmp_path / str(groups)}", *words, "anchor.weight=0.5")
        lines += metrics(tmp_path / str(groups))
    assert [line["actor/anchor_loss"] for line in lines] == pytest.approx([lines[0]["actor/anchor_loss"]] * 3)
    assert [line["group/left_out"] for line in lines] == [0, 0.5, 1] and lines[2]["grad_norm"] > 0
    assert lines[2]["actor/loss"] == pytest.approx(0.5 * lines[2]["actor/anchor_loss"])
