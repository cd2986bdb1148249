"""Attention backends: what a run may ask for, and what is refused before weights load."""

import pytest
import torch
from pipelines import random_pipeline
from runs import launch, metrics

from rewardfl.memory import attention
from rewardfl.memory.attention import BackendError, check_backward, check_name

pytestmark = pytest.mark.slow(6)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def expert():
    return random_pipeline().transformer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["native", "_native_flash", "_native_math"])
def test_backends_with_a_gradient_are_taken(name, dtype):
    check_backward(name, dtype, CPU)


@pytest.mark.parametrize("name", ["flash", "_flash_3", "sage", "xformers", "flex", "_native_efficient"])
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
    monkeypatch.setattr(attention, "dispatch_attention_fn", lambda *given: broken(real(*given)))
    with pytest.raises(BackendError, match=words):
        check_backward("_native_math", torch.float32, CPU)


def test_names(expert, monkeypatch):
    check_name("_native_math", expert, may_download=False)
    check_name("flash_hub", expert, may_download=True)
    for name, words in (("flesh", "none of diffusers'"), ("flash_hub", "model.allow_download")):
        with pytest.raises(BackendError, match=words):
            check_name(name, expert, may_download=False)
    monkeypatch.setenv(attention.VARIABLE, "sage")  # diffusers would take it without a word
    check_name("sage", expert, may_download=False)
    for name in ("native", "_native_math"):
        with pytest.raises(BackendError, match="unset"):
            check_name(name, expert, may_download=False)


def test_a_network_that_would_not_use_it_is_refused():
    from diffusers import SD3Transformer2DModel

    with torch.device("meta"):
        network = SD3Transformer2DModel(num_layers=1)
    with pytest.raises(BackendError, match="JointAttnProcessor2_0"):
        check_name("_native_math", network, may_download=False)
    check_name("native", network, may_download=False)


def test_a_run_uses_it_and_one_that_cannot_says_so(tmp_path, native_again):
    short = ["train.max_steps=1", "run.sample_videos=0", f"data.cache_dir={tmp_path / 'cache'}"]
    done = {}
    for name in ("native", "_native_math"):
        launch(f"run.output_dir={tmp_path / name}", f"model.attention_backend={name}", *short)
        (done[name],) = metrics(tmp_path / name)
    math, native = done["_native_math"]["grad_norm"], done["native"]["grad_norm"]
    assert math != native and math == pytest.approx(native, rel=1e-3)  # another kernel, which rounds otherwise
    refused = launch(f"run.output_dir={tmp_path / 'no'}", "model.attention_backend=sage", *short, check=False)
    assert refused.returncode == 2 and "model.attention_backend sage" in refused.stderr
    assert not (tmp_path / "no/metrics.jsonl").exists()
