"""Placement of experts and activations: where things live must not change what is computed."""

import pytest
import torch
from pipelines import experts_of, random_pipeline
from torch import nn

from rewardfl import lora, offload

DEVICE, BLOCKS = torch.device("cpu"), ["WanTransformerBlock"]


def answer(expert):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, expert.config.in_channels, 3, 8, 8, generator=generator)
    text = torch.randn(1, 512, expert.config.text_dim, generator=generator)
    return expert(x.to(expert.dtype), torch.tensor([950.0]), text.to(expert.dtype), return_dict=False)[0]


def test_checkpointing_on_the_host_gives_the_same_gradients(monkeypatch):
    expert = random_pipeline().transformer_2
    lora.inject(expert, 2, 2, ["to_q", "ffn.net.2"], seed=0)
    for name, parameter in expert.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))

    def gradients():
        expert.zero_grad()
        answer(expert).square().sum().backward()
        return {name: p.grad.clone() for name, p in expert.named_parameters() if p.requires_grad}

    plain = gradients()
    waiting, kinds = [], torch.autograd.graph.saved_tensors_hooks

    def recording(pin_memory):
        assert not pin_memory  # there is no GPU to copy from
        return kinds(lambda t: waiting.append(tuple(t.shape)) or t.clone(), lambda t: t)

    monkeypatch.setattr(offload, "save_on_cpu", recording)
    expert.enable_gradient_checkpointing(offload.checkpoint_on_host)
    offloaded = gradients()
    assert plain.keys() == offloaded.keys() and plain
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)
    tokens = (1, 3 * 4 * 4, expert.config.num_attention_heads * expert.config.attention_head_dim)
    assert waiting.count(tokens) == expert.config.num_layers  # the blocks' inputs, and of what is in a block nothing
    assert len(waiting) == 3 * expert.config.num_layers  # beside them the text and the timestep


def test_an_expert_swapped_from_the_host_answers_the_same():
    expert = random_pipeline().transformer
    with torch.no_grad():
        expected = answer(expert)
        assert torch.equal(answer(offload.place(expert, "cpu_swap", DEVICE, BLOCKS)), expected)


def test_fp8_rounds_the_blocks_linear_weights_alone():
    expert = random_pipeline().transformer.to(torch.bfloat16)
    rounded = random_pipeline().transformer.to(torch.bfloat16)
    rounded.load_state_dict(expert.state_dict())
    for name, module in rounded.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("blocks."):
            for parameter in module.parameters():
                parameter.data = parameter.data.to(torch.float8_e4m3fn).to(torch.bfloat16)
    with torch.no_grad():
        before, expected = answer(expert), answer(rounded)
        placed = offload.place(expert, "fp8", DEVICE, BLOCKS)
        assert torch.equal(answer(placed), expected)
        assert not torch.equal(expected, before)
    kinds = {name: p.dtype for name, p in placed.named_parameters()}
    assert kinds["blocks.0.attn1.to_q.weight"] == torch.float8_e4m3fn
    assert kinds["blocks.0.norm2.weight"] != torch.float8_e4m3fn
    assert kinds["condition_embedder.time_embedder.linear_1.weight"] != torch.float8_e4m3fn


def test_unknown_places_are_refused():
    with pytest.raises(ValueError, match="gpu, cpu_swap or fp8, got 'disk'"):
        offload.place(random_pipeline().transformer, "disk", DEVICE, BLOCKS)


def test_experts_outside_the_module_answer_and_are_not_seen():
    pipe = random_pipeline()
    inside, outside = (experts_of(pipe, outside) for outside in ((), ("high_noise",)))
    assert len(list(outside.parameters())) == len(list(pipe.transformer_2.parameters()))
    generator = torch.Generator().manual_seed(2)
    inputs = {
        "hidden_states": torch.randn(1, 34, 3, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(1, 512, pipe.transformer.config.text_dim, generator=generator),
    }
    for name, timestep in (("high_noise", torch.tensor([950.0])), ("low_noise", torch.tensor([500.0]))):
        with torch.no_grad():
            given = inputs | {"timestep": timestep}
            assert torch.equal(outside(name, **given), inside(name, **given))
