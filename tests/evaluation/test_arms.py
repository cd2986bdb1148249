"""rewardfl/evaluation/arms.py: latents that are not finite are refused, and run.json of earlier versions is read."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rewardfl.config.schema import SampleConfig
from rewardfl.evaluation.arms import Arm, Sampler, read_run_file
from rewardfl.weights.shards import InputError


class Backbone:
    """A model of one step whose velocity is a constant."""

    def __init__(self, value):
        self.value = value

    def collate(self, items):
        return {}

    def latent_shape(self, *size):
        return (1, 1, 2, 2)

    def schedule(self, steps, shift, shape):
        schedule = SimpleNamespace(sigmas=torch.tensor([1.0, 0.0]))
        schedule.until = lambda last: schedule
        return schedule

    def velocity(self, model, x, step, schedule, conditioning):
        return x.new_tensor([0.0, self.value]).view(2, 1, 1, 1, 1).expand_as(x)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_latents_that_are_not_finite_name_arm_and_row(value):
    decoder = SimpleNamespace(decode=lambda x0, conditioning: x0.clamp(-1, 1))
    rows = [SimpleNamespace(id=name, line=line) for name, line in (("a", 2), ("b", 3))]
    sampler = Sampler(
        sampling=SampleConfig(num_inference_steps=8), num_frames=1, backbone=Backbone(value),
        experts=torch.nn.Identity(), decoder=decoder, conditioning=lambda row: {},
        sizes={row.id: (2, 2) for row in rows}, device=torch.device("cpu"),
    )  # fmt: skip
    arm, jobs = Arm(name="latest", steps=1, adapter=Path("x")), [(row, 7) for row in rows]
    if value == 0:
        assert sampler.sample(jobs, arm).isfinite().all()
        return
    with pytest.raises(InputError, match="latest: the latents of line 3, noise 7, are not finite"):
        sampler.sample(jobs, arm)


def test_a_run_of_an_earlier_version_is_read_without_the_keys_that_went(tmp_path):
    sections = {"train": {"keep_attention": False, "max_steps": 3}, "run": {"output_dir": "x"}}
    (tmp_path / "run.json").write_text(json.dumps({"config": sections}))
    assert read_run_file(tmp_path).config == {"train": {"max_steps": 3}, "run": {"output_dir": "x"}}


def test_a_missing_run_is_named_in_full_and_says_what_the_wheel_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = f"--run: {tmp_path}/nowhere/run.json is missing; .* scripts and configs/ are not in the wheel"
    with pytest.raises(FileNotFoundError, match=words):
        read_run_file(Path("nowhere"))
