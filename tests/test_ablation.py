"""The rewards and points of benchmarks/ablation."""

import pytest
import torch
import yaml
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


def test_every_point_is_a_configuration(monkeypatch):
    monkeypatch.chdir(ROOT)
    points = yaml.safe_load((FILE.parent / "points.yaml").read_text())
    known = [config.load(ROOT / "configs" / "tiny_face.yaml", point["overrides"]) for point in points]
    assert len({str(config.to_dict(one)) for one in known}) == len(points) == 12
    flow = {
        str(one.reward.others.get("flow"))
        for one, point in zip(known, points, strict=True)
        if point["name"] != "hacked"
    }
    assert len(flow) == 1  # what another reward's overrides say of it is what the configuration says


def test_who_is_further_away_is_smaller():
    """A square of 20 pixels becomes one of 10, on the ground; what is around it goes on."""
    frames = torch.full((2, 40, 40, 3), 50, dtype=torch.uint8)
    frames[:, 20:, 10:30] = 200
    seen = further_away(frames, 0.5)
    assert seen.shape == frames.shape and seen.dtype == torch.uint8
    inside = (seen > 125).any(-1)
    assert inside[:, 30:, 15:25].all() and inside.sum() == 2 * 100 and (seen[:, :28] == 50).all()
