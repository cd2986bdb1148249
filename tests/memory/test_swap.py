"""Weights that come from host memory for a block's turn: the same numbers, the order of the copies, their number."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from pipelines import LAYERS as TARGETS

from rewardfl import lora
from rewardfl.memory import offload
from rewardfl.memory.swap import BlockSwap, pack_block
from tiny_world.video import new_expert

DEVICE, LAYERS = torch.device("cpu"), 5


def expert(where="gpu", checkpoint=None, layers=LAYERS, change=lambda model: None):
    """With an adapter that is not zero, checkpointed by `checkpoint` (by torch's own where it is None)."""
    torch.manual_seed(0)
    model = new_expert(layers, 2, 12).requires_grad_(requires_grad=False).eval()
    change(model)
    lora.inject(model, 2, 2, TARGETS, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)
    model.enable_gradient_checkpointing(*([checkpoint] if checkpoint else []))
    return offload.move_expert(model, where, DEVICE, ["WanTransformerBlock"])


def inputs(model):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, model.config.in_channels, 3, 8, 8, generator=generator)
    return x, torch.randn(1, 512, model.config.text_dim, generator=generator)


def velocity(model, x, text):
    return model(x, torch.tensor([950.0]), text, return_dict=False)[0]


def gradients(model):
    """By the adapter's names, and by the latents."""
    model.zero_grad()
    x, text = inputs(model)
    velocity(model, x.requires_grad_(), text).square().sum().backward()
    actual = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return actual | {"x": x.grad}


@pytest.fixture
def watched(monkeypatch):
    """What happens, in order: ("send", block) and ("turn", block); the most copies that lived at once."""
    happened, alive = [], weakref.WeakSet()
    fetch, begin = BlockSwap.fetch, BlockSwap.begin

    def sending(swap, turn):
        memory, there = fetch(swap, turn)
        happened.append(("send", turn))
        alive.add(memory.untyped_storage())
        watched.most = max(watched.most, len(alive))
        return memory, there

    def watched():
        actual, happened[:] = list(happened), []
        return actual

    watched.most, watched.alive = 0, alive
    monkeypatch.setattr(BlockSwap, "fetch", sending)
    monkeypatch.setattr(BlockSwap, "begin", lambda swap, turn: (happened.append(("turn", turn)), begin(swap, turn))[1])
    return watched


@pytest.mark.parametrize("layers", [1, 2, LAYERS])
@pytest.mark.parametrize("checkpoint", [None, offload.InputsOnHost(DEVICE)], ids=["device", "host"])
def test_gradients_are_the_same_to_the_last_bit(checkpoint, layers):
    plain, swapped = gradients(expert(layers=layers)), expert("cpu_swap", checkpoint, layers)
    for _ in range(2):
        actual = gradients(swapped)
        assert plain.keys() == actual.keys() and len(plain) > 10 * layers
        assert all(torch.equal(plain[name], actual[name]) for name in plain)
    with torch.no_grad(), lora.reference(swapped):
        reference = velocity(swapped, *inputs(swapped))
    with torch.no_grad():
        bare = expert(layers=layers)
        with lora.reference(bare):
            assert torch.equal(reference, velocity(bare, *inputs(bare)))
        assert not torch.equal(reference, velocity(swapped, *inputs(swapped)))


def sent_ahead(happened):
    """The blocks whose weights were sent for before their turn came."""
    return [block for i, (what, block) in enumerate(happened) if what == "send" and ("turn", block) in happened[i:]]


def test_copies_run_one_block_ahead_in_both_directions(watched):
    model = expert("cpu_swap")
    for _ in range(2):
        gradients(model)
        up, down = range(LAYERS), range(LAYERS - 2, -1, -1)
        # the first block's weights must be waited for; the last block's stay for its recomputation
        first = [("turn", 0), ("send", 0), ("send", 1)]
        going_up = [pair for turn in up[1:-1] for pair in (("turn", turn), ("send", turn + 1))] + [("turn", LAYERS - 1)]
        going_down = [("turn", LAYERS - 1)] + [pair for turn in down for pair in (("send", turn), ("turn", turn))]
        assert watched() == first + going_up + going_down
        assert watched.most == 2 and not watched.alive
    for _ in range(2):  # without a graph nothing is computed again
        with torch.no_grad():
            velocity(model, *inputs(model))
        assert watched() == first + going_up
    assert not watched.alive  # between the passes


def test_another_order_is_slower_and_not_wrong(watched):
    """A reference pass after a policy's whose graph still lives, as guidance with both gradients does it."""
    plain, swapped = expert(), expert("cpu_swap")

    def both(model):
        x, text = inputs(model)
        out = velocity(model, x.requires_grad_(), text) + 2 * velocity(model, x, text.flip(1))
        return torch.autograd.grad(out.square().sum(), x)[0]

    assert torch.equal(both(plain), both(swapped))
    assert len(sent_ahead(watched())) >= 3 * LAYERS


def test_a_pass_that_breaks_off_leaves_nothing_wrong(watched):
    plain, swapped = gradients(expert()), expert("cpu_swap")
    broken = swapped.blocks[2].register_forward_pre_hook(lambda module, inputs: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            gradients(swapped)
    broken.remove()
    actual = gradients(swapped)
    assert all(torch.equal(plain[name], actual[name]) for name in plain)


def test_between_its_turns_a_block_lies_in_one_piece_of_host_memory():
    model = expert("cpu_swap")
    states = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(value, states[name]) for name, value in expert().state_dict().items())
    gradients(model)
    assert all(torch.equal(value, states[name]) for name, value in model.state_dict().items())
    for block in model.blocks:
        frozen, trained = ([p for p in block.parameters() if p.requires_grad == trains] for trains in (False, True))
        assert len({p.untyped_storage().data_ptr() for p in frozen}) == 1
        assert len({p.untyped_storage().data_ptr() for p in trained}) == len(trained)
        assert not any(p.untyped_storage().data_ptr() == frozen[0].untyped_storage().data_ptr() for p in trained)


def test_parameters_of_several_dtypes_begin_where_kernels_can_read_them():
    values = [torch.ones(3, dtype=torch.bfloat16), torch.full((2, 5), 2.0), torch.full((1,), 3.0, dtype=torch.float64)]
    parameters = torch.nn.ParameterList([torch.nn.Parameter(value.clone(), requires_grad=False) for value in values])
    packed = pack_block(parameters, DEVICE)
    assert [parameter.data_ptr() % 64 for parameter in parameters] == [0, 0, 0] and len(packed.host) == 3 * 64
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True))


class FakeCudart:
    """Page-locked memory, {address: bytes}."""

    def __init__(self):
        self.locked = {}

    def cudaHostRegister(self, address, size, flags):
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges) and self.locked.pop(address)
        return 0


def test_memory_is_unlocked_before_its_addresses_are_reused(monkeypatch):
    """A swapped expert is dropped and the next is loaded."""
    cudart = FakeCudart()
    for name, fake in (("cudart", lambda: cudart), ("check_error", lambda code: None), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    for _ in range(2):
        block = torch.nn.Linear(512, 512).requires_grad_(requires_grad=False)
        packed = pack_block(block, torch.device("cuda"))
        assert cudart.locked == {packed.host.data_ptr(): len(packed.host)}
        del packed
        assert len(cudart.locked) == 1  # the parameters are in it
        del block
        gc.collect()
        assert not cudart.locked
