"""The rewards and points of benchmarks/ablation."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from face_nets import SIZE, clip, magenta_pack

from benchmarks.ablation.two_people import further_away
from rewardfl import config, rewards

pytestmark = pytest.mark.usefixtures("trusts_code")
FILE = ROOT / "benchmarks" / "ablation" / "rewards.py"
VIDEO = clip([(3, 3), (4, 3), (4, 4), (3, 4)])


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return {"pack_dir": str(magenta_pack(tmp_path_factory.mktemp("pack"))), "det_size": SIZE}


def test_one_reference_is_the_given_image(settings):
    ours, theirs = (rewards.build(name, settings) for name in ("face_identity", f"{FILE}:OneReference"))
    whole, one = ours.reference(VIDEO), theirs.reference(VIDEO)
    (still,) = ours.reference(VIDEO[:, [0, 0]])["embeddings"]
    assert len(whole["embeddings"]) == 3 and torch.equal(one["embeddings"], still[None])
    assert {name: one[name] for name in ("cap", "speed")} == {name: whole[name] for name in ("cap", "speed")}
    assert theirs.reference(clip([None, (3, 3)])) is None


def test_swapped_colours_are_those_of_another_clip(settings):
    """The detector, too, would see another face in swapped frames; here magenta stays magenta."""
    ours, theirs = (rewards.build(name, settings) for name in ("face_identity", f"{FILE}:SwappedColours"))
    swapped, plain = theirs.reference(VIDEO), ours.reference(VIDEO)
    assert not torch.allclose(swapped["embeddings"], plain["embeddings"], atol=1e-3)
    assert torch.allclose(swapped["embeddings"], ours.reference(VIDEO.flip(0))["embeddings"], atol=1e-5)


def test_every_point_is_a_configuration_and_what_is_judged_is_left_alone(tmp_path, monkeypatch):
    """The script's own commands, started by a `python` that writes them down."""
    monkeypatch.chdir(ROOT)
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@" END >> "$CALLS"\n')
    stub.chmod(0o755)
    (tmp_path / "out/no_kl/seed7/evaluation").mkdir(parents=True)
    (tmp_path / "out/no_kl/seed7/evaluation/report.json").touch()
    places = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    subprocess.run([FILE.parent / "points.sh", tmp_path / "out", "7"], env=os.environ | places, check=True)
    calls = [call.split("\0") for call in (tmp_path / "calls").read_text().split("END\0")[:-1]]
    training = [call[4:-1] for call in calls if call[0] == "train_reward_fl.py"]
    assert len(training) == 13 and len(calls) == 26
    known = {}
    for overrides in training:
        cfg = config.load("configs/tiny_face.yaml", overrides)
        known[Path(cfg.run.output_dir).parent.name] = cfg
    assert len(known) == 13 and "no_kl" not in known
    # what another reward's overrides say of it is what the configuration says
    assert len({str(cfg.reward.others.get("flow")) for name, cfg in known.items() if name != "hacked"}) == 1


def test_who_is_further_away_is_smaller():
    """A square of 20 pixels becomes one of 10, on the ground; what is around it goes on."""
    frames = torch.full((2, 40, 40, 3), 50, dtype=torch.uint8)
    frames[:, 20:, 10:30] = 200
    seen = further_away(frames, 0.5)
    assert seen.shape == frames.shape and seen.dtype == torch.uint8
    inside = (seen > 125).any(-1)
    assert inside[:, 30:, 15:25].all() and inside.sum() == 2 * 100 and (seen[:, :28] == 50).all()
