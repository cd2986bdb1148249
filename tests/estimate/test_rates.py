"""Seconds of the plan: FLOPs by operation against torch's own counter, copies against those that a benchmark counts."""

import dataclasses
import math
from argparse import ArgumentTypeError
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, measured_before, run_tool
from test_needs import RUN as WITHOUT_ANCHOR
from test_needs import VIDEO, by_operator, planned

from benchmarks import reward_step
from rewardfl import backbones, config, lora
from rewardfl.backbones.protocol import Experts
from rewardfl.estimate import measure, needs, report
from rewardfl.estimate.rates import OPERATIONS, RATES, Rates, parse_rates
from rewardfl.training import model_files, plan
from rewardfl_tools import plan_run

pytestmark = pytest.mark.slow(40)

H100 = RATES["H100"]
RUN = dataclasses.replace(WITHOUT_ANCHOR, anchor={"low_noise": 1})
PLACES = {"trained_placement": "cpu_swap", "untrained_placement": "cpu_swap", "decode_caches": "offload"}
IN_HOST = dataclasses.replace(RUN, **PLACES, offload_inputs=True)


@pytest.fixture(scope="module")
def costs():
    return measured_before(VIDEO)


def test_operations_of_an_image_model():
    """Its first block has no gradient of the text: with four blocks that is 4 % of the matrix products."""
    cfg = config.load(ROOT / "configs" / "tiny_words_sft.yaml", [])
    backbone = plan.open_model(cfg)
    run_plan = plan.resolve(cfg, backbone, 1)
    predicted = measure.measure(planned(cfg, backbone).video).experts["transformer"]
    network, shape = backbone.load_expert("transformer"), backbone.latent_shape(32, 96, 1)
    lora.inject(network, 16, 16, list(run_plan.targets), seed=0)
    conditioning = backbone.collate([backbone.text_encoder(torch.device("cpu"))('the word "ABC" in red on white')])
    model, x, outputs = Experts({"transformer": network}), torch.randn(1, *shape, requires_grad=True), []
    schedule = run_plan.schedule(shape)
    forward = by_operator(lambda: outputs.append(backbone.velocity(model, x, 0, schedule, conditioning).sum()))
    assert {each: predicted.total("forward", each) for each in OPERATIONS} == forward
    backward = {each: predicted.total("backward", each) for each in OPERATIONS}
    assert backward == pytest.approx(by_operator(outputs[0].backward), rel=0.05)
    assert predicted.backward == 81_657_856  # as in torch's counter


def test_operations_of_the_published_model(costs):
    """In TFLOP: the study of the model has 785.5 in linear layers and 892.9 in attention, and 2.5 times that back."""
    expert = costs.experts["low_noise"]
    assert expert.total("forward_frozen", "matmul") / 1e12 == pytest.approx(785.5, rel=1e-3)
    assert expert.total("forward_frozen", "attention") / 1e12 == pytest.approx(892.9, rel=1e-3)
    assert expert.total("backward", "attention") == 2.5 * expert.total("forward", "attention")
    convolutions = sum(chunk.total("forward", "convolution") for chunk in costs.chunks)
    assert 0.99 < convolutions / sum(chunk.forward for chunk in costs.chunks) < 1


def test_seconds_are_flops_by_the_rates(costs):
    flops, even = needs.flops(costs, RUN), needs.seconds(costs, RUN, parse_rates("400"))
    assert even == {part: (pytest.approx(amount / 400e12), 0, 0) for part, amount in flops.items()}
    endless = dict.fromkeys((*OPERATIONS, "copies"), math.inf)
    matmul, attention, convolution = (needs.seconds(costs, RUN, Rates(**endless | {each: 100})) for each in OPERATIONS)
    vjp = [spent["decode VJP"][0] for spent in (matmul, attention, convolution)]
    assert vjp[0] == 0 < vjp[1] < 0.01 * vjp[2] and sum(vjp) == pytest.approx(4 * even["decode VJP"][0])
    # the house's own study expects this of an H100, within a quarter
    assert sum(total for total, _, _ in needs.seconds(costs, RUN, H100).values()) == pytest.approx(110, rel=0.25)


def test_copies_of_weights_inputs_and_caches(costs):
    """40 blocks of 0.7 GB come for each pass, without the last one for a backward pass, which has it."""
    expert, blocks = costs.experts["low_noise"], 40 * costs.experts["low_noise"].block_weights
    back, caches = blocks - expert.block_weights, needs.decode_caches(costs.chunks, "offload")[2]
    assert needs.copies(costs, IN_HOST) == {
        "rollout": (8 * blocks, 0), "decode": (0, caches), "decode VJP": (caches, 0),
        "data anchor": (blocks + back + expert.stored, expert.stored),
        "replay forward": (4 * blocks, 4 * expert.stored), "replay backward": (4 * (back + expert.stored), 0),
        "reference": (4 * blocks, 0),
    }  # fmt: skip
    batch = needs.copies(costs, dataclasses.replace(IN_HOST, batch=2))
    assert batch["rollout"] == (4 * blocks, 0) and batch["replay forward"][1] == 4 * expert.stored
    kept = dataclasses.replace(IN_HOST, trained_placement="gpu", active_experts=4 * ("low_noise",), kept_steps=3)
    with_graphs, outside = needs.copies(costs, kept), 3 * expert.saved_outside  # of the kept graphs, there and back
    assert with_graphs["rollout"] == (3 * blocks, 3 * expert.stored + outside)
    assert with_graphs["replay forward"] == (0, expert.stored)
    segments = needs.copies(costs, dataclasses.replace(RUN, decode_caches="segment"))
    steady = costs.chunks[-1].caches_in  # of the chunks 0, which has none, 5, 10, 15 and 20 of 21
    assert segments["decode"] == (0, 4 * steady)
    assert segments["decode VJP"] == (caches + 4 * steady, caches - 4 * steady)
    assert not any(map(sum, needs.copies(costs, RUN).values()))


def test_computing_hides_copies(costs):
    """All but a pass's first block where computing takes longer; where copying does, the rest is exposed."""
    computing = {part: total for part, (total, _, _) in needs.seconds(costs, RUN, H100).items()}
    quick, slow = (needs.seconds(costs, IN_HOST, dataclasses.replace(H100, copies=rate)) for rate in (50, 1))
    assert quick["rollout"][2] == pytest.approx(8 * costs.experts["low_noise"].block_weights / 50e9, rel=0.03)
    assert quick["decode VJP"][2] == pytest.approx(quick["decode VJP"][1] / 21)
    assert quick["decode"][2] == 0 < quick["decode"][1]
    for part in computing.keys() - {"replay recompute", "decode"}:
        total, copied, exposed = slow[part]
        hidden = computing[part] + (computing["replay recompute"] if part == "replay backward" else 0)
        assert total == pytest.approx(computing[part] + exposed) and exposed == pytest.approx(copied - hidden)


@pytest.mark.parametrize("mode, clips", [("swap", 2), ("keep_on_host", 1)])
def test_a_benchmark_counts_the_planned_copies(mode, clips):
    """One update on the tiny model. The first active step's latents have no gradient, which the plan does not know."""
    settings = ["data.height=32", "data.width=32", "data.num_frames=5", f"train.per_device_train_batch_size={clips}"]
    cfg = config.load(ROOT / "tests/face.yaml", [*settings, *reward_step.EXACT, *reward_step.MODES[mode]])
    backbone = backbones.describe(cfg.model.model_name, model_files.model_source(cfg.model))
    size, work = reward_step.make_size(cfg, backbone, torch.device("cpu")), reward_step.plan_work(cfg, backbone)
    figures, _ = reward_step.measure(mode, size, cfg, 1, H100)
    planned = [clips * sum(amounts) for amounts in zip(*needs.copies(size.costs, work).values(), strict=True)]
    if mode == "keep_on_host":  # and the weight that these latents meet, of 192 channels
        planned = [amount - 4 * 34 * (math.prod(size.latents.shape[2:]) + 192 * 4) for amount in planned]
    assert [figures["copied_in"], figures["copied_out"]] == planned
    seconds = sum(total for total, _, _ in needs.seconds(size.costs, work, H100).values())
    assert figures["rows"][-1]["plan_seconds"] == pytest.approx(clips * seconds)
    rollout, line = figures["rows"][0], [*reward_step.by_phase(figures | {"norm": 0.0})][3]
    expected = f"{rollout['plan_seconds']:.3g} | {rollout['seconds'] / rollout['plan_seconds']:.2f}"
    assert line.startswith(f"| rollout | {rollout['seconds']:.3g} | {expected} |")


def test_rates_of_a_text_and_of_this_machine(monkeypatch):
    assert parse_rates("RTX 4090,copies=12") == dataclasses.replace(RATES["RTX 4090"], copies=12)
    assert parse_rates("attention=370,convolution=1e2") == dataclasses.replace(H100, attention=370, convolution=100)
    assert parse_rates("400") == Rates(matmul=400, attention=400, convolution=400, copies=H100.copies)
    for text in ("A100", "attention=0", "attention=", "speed=3", "", "H100;copies=2"):
        with pytest.raises(ArgumentTypeError, match="must "):
            parse_rates(text)
    for name, gpu in (("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA H100 80GB HBM3", "H100"), ("A100", "H100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert report.rates_on(SimpleNamespace(type="cuda")) == RATES[gpu]


def test_the_tool_prints_operations_and_exposed_copies():
    in_host = ["--config", "tests/face.yaml", "train.memory.trained=cpu_swap"]
    in_host.append("train.memory.use_gradient_checkpointing=true")
    texts = [run_tool(plan_run.main, *in_host, *more) for more in ((), ("--rates", "RTX 4090,copies=1"))]
    assert "one video at TFLOP/s: matmul 130, attention 150, convolution 20; 1 GB/s" in texts[1]
    rows = [{line[:18].strip(): line[18:].split() for line in text.splitlines()} for text in texts]
    first, second = (list(map(float, table["total"])) for table in rows)
    assert first[:4] == second[:4] and 0 < first[6] < second[6] < second[4]
    assert sum(first[1:4]) == pytest.approx(first[0], rel=1e-2)
    assert "matmul 400, attention 400, convolution 400" in run_tool(plan_run.main, *in_host, "--rates", 400)
