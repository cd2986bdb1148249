"""Adapters: injected without effect, switched off exactly, saved so that stock diffusers loads them."""

import json

import pytest
import torch
from peft import LoraConfig
from pipelines import LAYERS, random_pipeline, save_adapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rewardfl import lora
from rewardfl.backbones.wan import variants
from rewardfl.weights.shards import InputError

pytestmark = pytest.mark.slow(60)

TARGETS = LAYERS


def randomise(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


def inputs(dtype):
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 34, 3, 8, 8, generator=generator), torch.randn(1, 6, 32, generator=generator)
    return x.to(dtype), torch.tensor([500.0]), text.to(dtype)


def velocity(model):
    return model(*inputs(torch.float32), return_dict=False)[0]


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(pipe):
    model = pipe.transformer_2
    before = velocity(model).detach()
    lora.inject(model, 4, 8.0, TARGETS, seed=3)
    assert torch.equal(velocity(model).detach(), before)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # 2 blocks x (8 attention projections + 2 of the feed-forward) x A and B
    assert len(trained) == 40 and all("lora_" in name for name in trained)
    assert all(p.dtype == torch.float32 for p in trained.values())
    for seed in (3, 4):
        again = random_pipeline().transformer_2
        lora.inject(again, 4, 8.0, TARGETS, seed=seed)
        pairs = zip(lora.adapter_state(again).values(), lora.adapter_state(model).values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs) == (seed == 3)


def adapter_gradients(model, arguments):
    """Return the velocity, and the gradients of its square by the adapter."""
    output = model(*arguments, return_dict=False)[0]
    output.float().square().sum().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_computes_what_pefts_own_does(dtype, monkeypatch):
    """On a float32 base to the last bit, on a bfloat16 one up to its rounding."""
    results = []
    for compute_as in (lambda *arguments: None, lora._compute_as):
        monkeypatch.setattr(lora, "_compute_as", compute_as)
        model = random_pipeline().transformer_2.to(dtype)
        lora.inject(model, 4, 8.0, TARGETS, seed=3)
        randomise(model)
        results.append(adapter_gradients(model, inputs(dtype)))
    (expected, expected_gradients), (actual, gradients) = results
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    apart = [(expected_gradients[name] - gradients[name]).flatten() for name in gradients]
    if dtype == torch.float32:
        assert torch.equal(expected, actual) and not any(difference.any() for difference in apart)
        return
    assert (expected.float() - actual.float()).norm() < 0.02 * expected.float().norm()
    total = torch.cat([value.flatten() for value in expected_gradients.values()])
    assert 0 < torch.cat(apart).norm() < 0.03 * total.norm()


def test_no_layer_keeps_a_float32_copy_of_its_input():
    """q, k and v keep their input, once; tensors with the adapter's rank for their last axis are small."""
    model = random_pipeline().transformer_2.to(torch.bfloat16)
    lora.inject(model, 4, 8.0, TARGETS, seed=3)
    attention, saved = model.blocks[0].attn1, []
    x = torch.randn(1, 5, attention.to_q.in_features, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = [layer(x) for layer in (attention.to_q, attention.to_k, attention.to_v)]
    assert all(value.dtype == torch.bfloat16 for value in out)
    rows = [tensor for tensor in saved if 5 in tensor.shape]
    assert {tensor.dtype for tensor in rows} == {torch.bfloat16}
    assert sum(tensor.data_ptr() == x.data_ptr() for tensor in rows) == 3
    assert all(4 in tensor.shape for tensor in rows if tensor.data_ptr() != x.data_ptr())


def test_reference_is_the_base_and_keeps_another_adapter(pipe):
    model = pipe.transformer_2
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS), adapter_name=lora.DISTILLED)
    randomise(model, seed=5)
    model.requires_grad_(requires_grad=False)
    base = velocity(model).detach()
    lora.inject(model, 4, 8.0, TARGETS, seed=3)
    randomise(model, seed=6)
    policy = velocity(model).detach()
    assert not torch.allclose(policy, base, atol=1e-3)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    with lora.reference(model):
        assert torch.equal(velocity(model).detach(), base)
    assert torch.equal(velocity(model).detach(), policy)
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="inside"), lora.reference(model):
        raise RuntimeError("inside")
    assert torch.equal(velocity(model).detach(), policy)


def test_load_adapter_is_exact_and_refuses_what_does_not_fit(tmp_path, pipe):
    model = pipe.transformer_2
    lora.inject(model, 4, 6.0, TARGETS, seed=0)
    randomise(model)
    save_adapter(model, tmp_path)
    saved = lora.adapter_state(model)

    again = random_pipeline().transformer_2
    lora.inject(again, 4, 6.0, TARGETS, seed=1)
    lora.load_adapter(again, tmp_path)
    loaded = lora.adapter_state(again)
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[n], loaded[n]) for n in saved)

    for rank, alpha, targets, message in (
        (8, 6.0, TARGETS, "rank 4 and alpha 6 "),
        (4, 4.0, TARGETS, "lora.lora_alpha 4;"),
        (4, 6.0, ["to_q"], "has other layers"),
    ):
        other = random_pipeline().transformer_2
        lora.inject(other, rank, alpha, targets, seed=0)
        with pytest.raises(ValueError, match=message):
            lora.load_adapter(other, tmp_path)
    with pytest.raises(InputError, match="no LoRA at"):
        lora.load_adapter(again, tmp_path / "nowhere")


def test_equal_adapters_are_equal_files(pipe, tmp_path):
    """Whatever the seed of safetensors' hashes, by which its maps are ordered."""
    lora.inject(pipe.transformer_2, 2, 2.0, TARGETS, seed=0)
    save_adapter(pipe.transformer_2, tmp_path)
    file = tmp_path / lora.WEIGHTS_NAME
    state = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = json.loads(opened.metadata()["lora_adapter_metadata"])
    for _ in range(8):  # each has another order
        save_file(state, file, {"lora_adapter_metadata": json.dumps(metadata), "format": "pt"})
        lora.order_metadata(file)
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert list(header["__metadata__"]) == ["format", "lora_adapter_metadata"]
        assert all(torch.equal(t, state[name]) for name, t in load_file(file).items())


def test_targets_are_checked_by_the_layers_names():
    layers = ["blocks.0.attn1.to_q", "blocks.0.attn1.to_out.0", "blocks.0.ffn.net.2"]
    lora.check_targets(lora.target_modules("q,o,ffn.2,attn1.to_q", variants.LAYERS), layers, variants.LAYERS)
    for names in ("q,to_qq", "q,", "0.attn1", "attn1.to_out", "blocks.0.attn1.to_q_"):
        with pytest.raises(InputError, match=f"lora.lora_target_modules: '{names.split(',')[-1]}'"):
            lora.check_targets(lora.target_modules(names, variants.LAYERS), layers, variants.LAYERS)
