"""The estimate of train_forward_rl.py: closed forms of its counts, on the tiny world."""

import pytest
from conftest import ROOT, measured_before

from rewardfl import backbones, config
from rewardfl.backbones.protocol import Source
from rewardfl.estimate import needs
from rewardfl.estimate.report import smaller_settings
from rewardfl.training.plan import resolve
from rewardfl.training.workload import make_workload

pytestmark = pytest.mark.slow(10)

PIPELINE = str(ROOT / "assets" / "tiny_world" / "pipeline")
BACKBONE = backbones.describe("wan2_2", Source(model_paths=PIPELINE, dtype="float32"))


def workload(*settings, processes=1):
    cfg = config.load(ROOT / "tests" / "forward.yaml", settings)
    return make_workload(resolve(cfg, BACKBONE, processes, here=False), BACKBONE, rows=None)


def test_a_video_costs_its_rollout_and_its_draws():
    """8 steps, of which the low-noise expert has 5; two draws, each with its recomputation under checkpointing."""
    costs = measured_before(workload().video)
    high, low = costs.experts["high_noise"], costs.experts["low_noise"]
    work = needs.flops(costs, workload("train.memory.use_gradient_checkpointing=true"))
    assert work["rollout"] == 3 * high.forward_frozen + 5 * low.forward
    assert work["replay forward"] == work["replay recompute"] == 2 * low.forward
    assert work["replay backward"] == 2 * low.backward and work["reference"] == 0
    best = needs.flops(costs, workload("forward.objective=best", "anchor.weight=1"))
    assert best["replay forward"] == 2 * low.forward / 8 and best["replay backward"] == 2 * low.backward / 8
    assert best["rollout"] == work["rollout"] and best["data anchor"] == (low.forward + low.backward) / 8
    nft = needs.flops(costs, workload("forward.objective=nft", "forward.base_anchor=1", "forward.inner_epochs=2"))
    assert nft["rollout"] == work["rollout"] + 4 * low.forward  # by the old policy, at each draw
    assert nft["replay forward"] == 4 * low.forward and nft["reference"] == 4 * low.forward_frozen


def test_advice_names_the_forward_section():
    assert smaller_settings(workload())["train.memory.samples_on"] == "cpu"


def test_memory_holds_two_averages_and_the_draws_of_an_update():
    run = workload("forward.updates_per_epoch=2", processes=2)
    costs, latents = measured_before(run.video), 16 * 5 * 20 * 20 * 4
    resident = needs.memory(costs, run).resident
    low = costs.experts["low_noise"]
    assert resident["averaged LoRA"] == 2 * 4 * low.adapter_parameters
    assert resident["the update's latents"] == 8 * 2 * 2 * latents  # 8 of a process's 16 videos: with noise, and target
    assert needs.kept_bytes(costs, run) == latents + sum(costs.cached.values())
    more = workload("forward.updates_per_epoch=2", "forward.old_policy.anchor=1", "forward.base_anchor=1", processes=2)
    assert needs.memory(costs, more).resident["the update's latents"] == 8 * 2 * 4 * latents
