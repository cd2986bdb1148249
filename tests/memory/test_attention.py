"""Attention backends: what a run may ask for, and what is refused before weights load."""

import pytest
import torch
from diffusers import SD3Transformer2DModel, WanTransformer3DModel
from runs import launch, metrics

from rewardfl.memory import attention
from rewardfl.memory.attention import BackendError, check_backward, check_name

pytestmark = pytest.mark.slow(6)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["native", "_native_flash", "_native_math"])
def test_backends_with_a_gradient_are_taken(name, dtype):
    check_backward(name, dtype, CPU)


@pytest.mark.parametrize("name", ["sage", "flex", "_native_efficient"])
def test_what_cannot_train_on_this_machine_is_refused(name):
    """Not installed, or without a backward pass on a CPU."""
    with pytest.raises(BackendError, match=f"model.attention_backend {name} .*native"):
        check_backward(name, torch.float32, CPU)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda out: out.detach(), "does not require grad"),
        (lambda out: 1.01 * out, "output that is"),
        (lambda out: out.detach() + 0.9 * (out - out.detach()), "gradient that is"),
        (lambda out: out * torch.nan, "output that is"),
    ],
    ids=["none", "output", "gradient", "nan"],
)
def test_a_backend_that_is_wrong_is_refused(monkeypatch, broken, words):
    real = attention.dispatch_attention_fn
    monkeypatch.setattr(attention, "dispatch_attention_fn", lambda *inputs: broken(real(*inputs)))
    with pytest.raises(BackendError, match=words):
        check_backward("_native_math", torch.float32, CPU)


def test_a_backend_that_would_not_be_used_is_refused(monkeypatch):
    with torch.device("meta"):
        wan, sd3 = WanTransformer3DModel(num_layers=1), SD3Transformer2DModel(num_layers=1)
    check_name("_native_math", wan)
    check_name("native", sd3)
    refusals = [("flesh", wan, "none of diffusers'"), ("flash_hub", wan, "would be downloaded")]
    for name, network, words in [*refusals, ("_native_math", sd3, "JointAttnProcessor2_0")]:
        with pytest.raises(BackendError, match=words):
            check_name(name, network)
    monkeypatch.setenv(attention.VARIABLE, "sage")  # diffusers would take it without a word
    check_name("sage", wan)
    with pytest.raises(BackendError, match="set only one"):
        check_name("native", wan)


def test_a_run_uses_the_configured_backend(tmp_path, native_again):
    short = ["train.max_steps=1", "run.sample_videos=0", f"data.cache_dir={tmp_path / 'cache'}"]
    norms = []
    for name in ("native", "_native_math"):
        launch(f"run.output_dir={tmp_path / name}", f"model.attention_backend={name}", *short)
        norms += [line["grad_norm"] for line in metrics(tmp_path / name)]
    assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=1e-3)  # another kernel rounds otherwise
    refused = launch(f"run.output_dir={tmp_path / 'no'}", "model.attention_backend=sage", *short, check=False)
    assert refused.returncode == 2 and "model.attention_backend sage" in refused.stderr
