"""Arms and their names, other tools' videos, batches, and what a run's folder says."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rewardfl import data, lora
from rewardfl.config.schema import SampleConfig
from rewardfl.evaluation.arms import Arm, Sampler, batches, find_videos, make_arms, unique_names
from rewardfl.weights.shards import InputError


def make_rows(count, id="{}"):
    return [data.Row(index=i, line=i + 2, id=id.format(i), video=None, prompt="x") for i in range(count)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_latents_that_are_not_finite_name_arm_and_row(value):
    """A model of one step whose velocity is a constant."""
    rows, schedule = make_rows(2), SimpleNamespace(sigmas=torch.tensor([1.0, 0.0]))
    velocity = torch.tensor([0.0, value]).view(2, 1, 1, 1, 1)
    backbone = SimpleNamespace(
        collate=lambda items: {}, latent_shape=lambda *size: (1, 1, 2, 2), schedule=lambda *steps: schedule,
        velocity=lambda model, x, *step: velocity.expand_as(x),
    )  # fmt: skip
    sampler = Sampler(
        sampling=SampleConfig(num_inference_steps=8), num_frames=1, backbone=backbone, experts=torch.nn.Identity(),
        decoder=None, conditioning={row.id: {} for row in rows}, sizes={row.id: (2, 2) for row in rows},
        device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(InputError, match="latest: the latents of line 3, noise 7, are not finite"):
        sampler.sample([(row, 7) for row in rows], Arm(name="latest", steps=1, adapter=Path("x")))


def test_batches_hold_clips_of_one_size():
    rows = make_rows(5)
    jobs = [(row, seed) for seed in (0, 1) for row in rows]
    assert batches(jobs, dict.fromkeys("01234", (64, 64)), 4) == [jobs[:4], jobs[4:8], jobs[8:]]
    sizes = {"0": (64, 64), "1": (64, 80), "2": (64, 64), "3": (64, 80), "4": (64, 64)}
    mixed = [[(row.id, seed) for row, seed in batch] for batch in batches(jobs, sizes, 4)]
    assert mixed[:2] == [[("0", 0), ("2", 0), ("4", 0), ("0", 1)], [("2", 1), ("4", 1)]] and len(mixed[2]) == 4


def test_arms_are_named_by_what_tells_them_apart(tmp_path):
    first, second = tmp_path / "a" / "latest", tmp_path / "b" / "latest"
    for folder in (first, second):
        (folder / "transformer").mkdir(parents=True)
        (folder / "transformer" / lora.WEIGHTS_NAME).touch()
    arms = make_arms([(first, 1.0), (first, 0.5), (second, 1.0)], None, [8, 20], 8, [], tmp_path)
    names = ["base", "a_latest", "a_latest_x0.5", "b_latest"]
    assert [arm.name for arm in arms] == [*names, *(f"{name}_20steps" for name in names)]
    assert arms[5].steps == 20 and arms[2].strength == 0.5
    for adapters, strengths, steps, videos in (
        ([first, first], None, [8], []), ([first], [1, 1], [8], []), ([first], None, [8, 8], []),
        ([first], None, [8], [first]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is there twice"):
            make_arms([(path, 1.0) for path in adapters], strengths, steps, 8, videos, tmp_path)
    assert unique_names([tmp_path / "base"]) != ["base"] and unique_names([tmp_path / "start"]) != ["start"]
    arms = make_arms([(first, 1.0)], [0.5, 1.0], [8, 20], 8, [], tmp_path, str(second))
    names = ["base", "start", "latest_x0.5", "latest"]
    assert [arm.name for arm in arms] == [*names, *(f"{name}_20steps" for name in names)]
    assert [arm.origin for arm in arms[:3]] == ["", str(second), ""] and arms[1].adapter == second


def test_a_folders_videos_are_named_by_place_or_id(tmp_path):
    rows = make_rows(3, "clips/{}.mp4#ab")
    ignored = ("notes.mp4", "007.mp4", ".mp4", "0\n0.mp4", "_seed1.mp4")
    for name in ("000.mp4", "1_seed1.mp4", "1.mp4", "clips_2.mp4_ab.mp4", *ignored):
        (tmp_path / name).touch()
    assert {key: path.name for key, path in find_videos(tmp_path, rows).items()} == {
        (rows[0].id, 0): "000.mp4", (rows[1].id, 0): "1.mp4", (rows[1].id, 1): "1_seed1.mp4",
        (rows[2].id, 0): "clips_2.mp4_ab.mp4",
    }  # fmt: skip
    with pytest.raises(ValueError, match="line 5"):
        find_videos(tmp_path, make_rows(4, "clips/{}.mp4#ab"))
    (tmp_path / "002.mp4").touch()
    with pytest.raises(ValueError, match="002.mp4"):
        find_videos(tmp_path, rows)
