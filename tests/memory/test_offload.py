"""Placement of experts and activations: where things live must not change what is computed."""

import weakref

import pytest
import test_swap
import torch
from pipelines import experts_of, random_pipeline
from test_swap import DEVICE, gradients, inputs
from torch import nn

from rewardfl.memory import host_pool, offload
from rewardfl.memory.host_pool import HostPool, OffloadedTensors
from rewardfl.memory.swap import BlockSwap

BLOCKS, LAYERS = ["WanTransformerBlock"], 4


def velocity(model):
    x, text = (value.to(model.dtype) for value in inputs(model))
    return test_swap.velocity(model, x, text)


def adapted(checkpoint=None):
    """An expert with an adapter that is not zero, checkpointed by `checkpoint`."""
    return test_swap.expert(checkpoint=checkpoint, layers=LAYERS)


@pytest.fixture
def traffic(monkeypatch):
    """What went to the host and was sent for, in order, by block; all that is in the host."""
    log, order, alive = [], {}, weakref.WeakSet()
    put, fetch, take = OffloadedTensors.put, OffloadedTensors.fetch, OffloadedTensors.take

    def noting(what, act):
        def noted(waiting, *arguments):
            alive.add(waiting)
            log.append((what, order.setdefault(id(waiting), len(order))))
            return act(waiting, *arguments)

        return noted

    for name, act in (("put", put), ("fetch", fetch), ("take", take)):
        monkeypatch.setattr(OffloadedTensors, name, noting(name, act))
    return log, alive


def test_the_blocks_inputs_alone_go_to_the_host_and_come_back_ahead_of_their_turn(traffic):
    log, alive = traffic
    out = velocity(adapted(offload.InputsOnHost(DEVICE)))
    # text and time with the first block, which cannot know that the others take the same
    assert log == [("put", 0)] * 3 + [("put", block) for block in range(1, LAYERS)]
    assert len(alive) == LAYERS
    tokens = (1, 3 * 4 * 4, 2 * 12)  # of 4 x 4 patches in 3 frames
    assert all(waiting.layouts[0] == (tokens, torch.float32, [0, 1, 2]) for waiting in alive)
    log.clear()
    out.square().sum().backward()
    last = LAYERS - 1
    assert log[:4] == [("take", last), ("fetch", last), ("fetch", last - 1), ("take", last - 1)]
    taken = [block for what, block in log if what == "take"]
    assert taken == [3, 2, 1, 0, 0, 0]
    for block in range(last):
        assert log.index(("fetch", block)) < log.index(("take", block))


def test_a_graph_is_walked_back_twice():
    model = adapted(offload.InputsOnHost(DEVICE))
    out = velocity(model).square().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    once, again = (torch.autograd.grad(out, parameters, retain_graph=retain) for retain in (True, False))
    assert all(map(torch.equal, once, again))


def test_two_blocks_inputs_are_back_on_the_device_at_once(traffic, monkeypatch):
    _, alive = traffic
    held, begin = [], BlockSwap.begin
    monkeypatch.setattr(BlockSwap, "begin", lambda swap, turn: (held.append(back(alive)), begin(swap, turn))[1])
    gradients(offload.move_expert(adapted(offload.InputsOnHost(DEVICE)), "cpu_swap", DEVICE, BLOCKS))
    # when a block is computed anew its own have been taken, and the block before it has its own
    assert held == [0] * LAYERS + [1] * (LAYERS - 2) + [3, 0]


def back(alive):
    return sum(len(waiting.back) for waiting in alive)


def test_what_waits_dies_with_its_graph_and_leaves_its_room_to_the_next(traffic, monkeypatch):
    _, alive = traffic
    monkeypatch.setattr(host_pool, "PAGE_BYTES", 64)  # bytes
    checkpoint = offload.InputsOnHost(DEVICE)
    pool = checkpoint.pool = HostPool(DEVICE)
    model = adapted(checkpoint)
    gradients(model)
    once = pool.size
    gradients(model)
    assert not alive
    velocity(model)  # a graph that nobody goes back through
    assert not alive and pool.size == once
    first, second = velocity(model), velocity(model)  # two that live together
    assert len(alive) == 2 * LAYERS and pool.size == 2 * once
    del first, second
    gradients(model)
    assert not alive and pool.size == 2 * once == sum(map(len, pool.free))


def test_fp8_rounds_the_blocks_linear_weights_alone():
    model = random_pipeline().transformer.to(torch.bfloat16)
    rounded = random_pipeline().transformer.to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    for name, module in rounded.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("blocks."):
            for parameter in module.parameters():
                parameter.data = parameter.data.to(torch.float8_e4m3fn).to(torch.bfloat16)
    with torch.no_grad():
        before, expected = velocity(model), velocity(rounded)
        placed = offload.move_expert(model, "fp8", DEVICE, BLOCKS)
        assert torch.equal(velocity(placed), expected)
        assert not torch.equal(expected, before)
    dtypes = {name: p.dtype for name, p in placed.named_parameters()}
    assert dtypes["blocks.0.attn1.to_q.weight"] == torch.float8_e4m3fn
    assert dtypes["blocks.0.norm2.weight"] != torch.float8_e4m3fn
    assert dtypes["condition_embedder.time_embedder.linear_1.weight"] != torch.float8_e4m3fn


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
            arguments = inputs | {"timestep": timestep}
            assert torch.equal(outside(name, **arguments), inside(name, **arguments))
