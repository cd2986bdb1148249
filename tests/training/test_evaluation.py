"""How many steps the deployed sampler takes."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from rewardfl import config
from rewardfl.backbones.protocol import Experts
from rewardfl.training.evaluation import DeployedSampler


@pytest.mark.parametrize("method, steps", [("generate", 3), ("base", 8)])
def test_base_videos_take_as_many_steps_as_a_rollout(method, steps):
    def schedule(steps, *_):
        raise RuntimeError(f"{steps} steps")

    conditions = SimpleNamespace(
        read_or_substitute=lambda *_, skip: (0, {}), latent_shape=lambda _: (1, 1, 2, 2),
        backbone=SimpleNamespace(schedule=schedule),
    )  # fmt: skip
    plan = config.load(ROOT / "tests" / "grpo.yaml", ["evaluation.eval_inference_steps=3"])  # has a plan's sections
    sampler = DeployedSampler(
        plan=plan, model=Experts({}), decoder=None, conditions=conditions, negative=None, device=torch.device("cpu")
    )
    with pytest.raises(RuntimeError, match=f"^{steps} steps"):
        getattr(sampler, method)([SimpleNamespace(row=SimpleNamespace(id="0"))], 0, 0)
