"""Blocks that torch compiles compute what they computed, to rounding, wherever their weights are."""

import json

import pytest
import torch
from runs import adapter, launch, launch_grpo, metrics
from test_swap import DEVICE, expert, gradients, inputs, velocity

from rewardfl import lora
from rewardfl.memory import compiling, offload
from rewardfl.memory.attention import BackendError

BLOCKS = ["WanTransformerBlock"]


@pytest.fixture
def graphs():
    """How many torch has compiled; it begins with none."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters["stats"]


def compiled(model):
    compiling.compile_blocks(model, BLOCKS)


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["gpu", "cpu_swap"])
def test_gradients_and_references_are_the_same(where, graphs):
    checkpoints = [offload.checkpointing(DEVICE, inputs_on_host=on_host) for on_host in (False, True)]
    plain = expert(where, checkpoints[0])
    expected = gradients(plain)
    for checkpoint in checkpoints:
        model = expert(where, checkpoint, change=compiled)
        for _ in range(2):
            actual = gradients(model)
            assert actual.keys() == expected.keys() and len(actual) > 50
            for name, gradient in expected.items():
                assert (actual[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        with lora.reference(model), lora.reference(plain):  # reward.kl_gradient: exact
            pulls = []
            for network in (model, plain):
                x, text = inputs(network)
                (pull,) = torch.autograd.grad(velocity(network, x.requires_grad_(), text).square().sum(), x)
                pulls.append(pull)
            assert (pulls[0] - pulls[1]).norm() <= 1e-5 * pulls[1].norm()
        with torch.no_grad():
            rolled = velocity(model, *inputs(model))
            with lora.reference(model), lora.reference(plain):
                assert torch.allclose(
                    velocity(model, *inputs(model)), velocity(plain, *inputs(plain)), rtol=1e-4, atol=1e-5
                )
        assert torch.allclose(rolled, velocity(model, *inputs(model)), rtol=1e-5, atol=1e-6)  # replay
    assert 0 < graphs["unique_graphs"] < 12  # of two models; not one for every block


@pytest.mark.nightly
def test_runs_are_the_same_to_rounding(tmp_path, graphs):
    def run(start, name, *settings):
        common = [
            "train.max_steps=2",
            "train.memory.use_gradient_checkpointing=true",
            f"run.output_dir={tmp_path / name}",
        ]
        start(*common, *settings)
        return metrics(tmp_path / name), adapter(tmp_path / name, 2)

    for start, name in ((launch, "fl"), (launch_grpo, "grpo")):
        (plain, before), (lines, after) = (
            run(start, f"{name}{on}", f"train.compile_blocks={json.dumps(on)}") for on in (False, True)
        )
        for line, other in zip(lines, plain, strict=True):
            for key in ("reward/mean", "grad_norm"):
                assert line[key] == pytest.approx(other[key], rel=1e-3), (name, key)
        assert before.keys() == after.keys() and graphs["unique_graphs"] >= 3, name
        graphs.clear()
        for key, value in before.items():  # AdamW divides by the gradient: elements near zero move by rounding
            assert (after[key] - value).norm() <= 1e-2 * value.norm(), (name, key)


@pytest.mark.long
def test_more_forms_than_are_allowed_end_the_run(graphs, monkeypatch):
    """torch would continue without compiling, and log a warning."""
    monkeypatch.setattr(compiling, "FORMS", 1)
    model = expert(change=compiled)
    gradients(model)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        velocity(model, *inputs(model))


def test_a_machine_without_a_compiler_is_refused(monkeypatch):
    """The message names what is missing, and the way out."""

    def cannot(function):
        def failing(*arguments):
            raise RuntimeError("InvalidCxxCompiler: no working C++ compiler\nmore")

        return failing

    monkeypatch.setattr(torch, "compile", cannot)
    with pytest.raises(BackendError, match=r"^train.compile_blocks: .* cpu .*InvalidCxxCompiler.*compiler; .*false$"):
        compiling.check_compiler(DEVICE)
