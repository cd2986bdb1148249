"""Weights that come from host memory for a block's turn: the same numbers, the order of the copies, their number."""

import os
import weakref
from pathlib import Path

import numpy
import pytest
import torch
import zygote
from conftest import ROOT
from host import apart
from pipelines import LAYERS as TARGETS

from rewardfl import lora, offload
from rewardfl.run import invariants
from rewardfl.swap import BlockSwap, Borrower, Lender, NotShared, Room, pack_block
from rewardfl_tools.tiny_world.video import new_expert

DEVICE, LAYERS = torch.device("cpu"), 5


def expert(where="gpu", checkpoint=None, layers=LAYERS, change=lambda model: None):
    """With an adapter that answers, checkpointed by `checkpoint` (by torch's own where it is None)."""
    torch.manual_seed(0)
    model = new_expert(layers, 2, 12).requires_grad_(False).eval()
    change(model)
    lora.inject(model, 2, 2, TARGETS, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=generator)
    model.enable_gradient_checkpointing(*([checkpoint] if checkpoint else []))
    return offload.place(model, where, DEVICE, ["WanTransformerBlock"])


def inputs(model):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, model.config.in_channels, 3, 8, 8, generator=generator)
    return x, torch.randn(1, 512, model.config.text_dim, generator=generator)


def answer(model, x, text):
    return model(x, torch.tensor([950.0]), text, return_dict=False)[0]


def gradients(model):
    """By the adapter's names, and by the latents."""
    model.zero_grad()
    x, text = inputs(model)
    answer(model, x.requires_grad_(), text).square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found | {"x": x.grad}


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
        found, happened[:] = list(happened), []
        return found

    watched.most, watched.alive = 0, alive
    monkeypatch.setattr(BlockSwap, "fetch", sending)
    monkeypatch.setattr(BlockSwap, "begin", lambda swap, turn: (happened.append(("turn", turn)), begin(swap, turn))[1])
    return watched


@pytest.mark.parametrize("layers", [1, 2, LAYERS])
@pytest.mark.parametrize("checkpoint", [None, offload.InputsOnHost(DEVICE)], ids=["kept", "host"])
def test_gradients_are_the_same_to_the_last_bit(checkpoint, layers):
    plain, swapped = gradients(expert(layers=layers)), expert("cpu_swap", checkpoint, layers)
    for _ in range(2):
        found = gradients(swapped)
        assert plain.keys() == found.keys() and len(plain) > 10 * layers
        assert all(torch.equal(plain[name], found[name]) for name in plain)
    with torch.no_grad(), lora.reference(swapped):
        reference = answer(swapped, *inputs(swapped))
    with torch.no_grad():
        bare = expert(layers=layers)
        with lora.reference(bare):
            assert torch.equal(reference, answer(bare, *inputs(bare)))
        assert not torch.equal(reference, answer(swapped, *inputs(swapped)))


def by_the_definition(weight):
    """A matrix rounded to whole 127ths of each row's largest, by numpy, in float64."""
    exact = weight.double().numpy()
    scales = (numpy.abs(exact).max(1, keepdims=True) / 127).astype(numpy.float32).astype(numpy.float64)
    whole = numpy.rint(numpy.divide(exact, scales, out=numpy.zeros_like(exact), where=scales > 0))
    return torch.from_numpy(whole * scales).to(weight.dtype)


@pytest.mark.parametrize("checkpoint", [None, offload.InputsOnHost(DEVICE)], ids=["kept", "host"])
def test_in_8_bits_it_is_the_network_of_rounded_weights(checkpoint):
    def without_a_scale(model):
        model.blocks[0].ffn.net[2].weight[3].zero_()

    rounded, swapped = (
        expert(where, one, layers=2, change=without_a_scale)
        for where, one in (("gpu", None), ("cpu_swap_int8", checkpoint))
    )
    exact = gradients(rounded)
    matrices = [name for name, value in rounded.blocks.named_parameters() if value.dim() == 2 and "lora" not in name]
    assert len(matrices) == 2 * 10
    for name in matrices:
        weight = rounded.blocks.get_parameter(name)
        weight.data = by_the_definition(weight.data)
    plain = gradients(rounded)
    for _ in range(2):
        found = gradients(swapped)
        assert plain.keys() == found.keys() and all(torch.equal(plain[name], found[name]) for name in plain)
    away = (found["x"] - exact["x"]).norm() / exact["x"].norm()
    assert 1e-4 < away < 0.05


@pytest.mark.parametrize("where", ["cpu_swap", "cpu_swap_int8"])
@pytest.mark.parametrize(
    "in_host, keep", [(False, False), (True, False), (False, True)], ids=["", "inputs", "attention"]
)
def test_only_copies_read_memory_of_the_host(monkeypatch, where, in_host, keep):
    """A graph that kept a block's own parameters would find them in the host, where a GPU cannot read them."""
    with apart(monkeypatch) as seen:
        model = expert(where, offload.checkpointing(DEVICE, in_host, keep), layers=2)
        seen.copied = 0
        gradients(model)
        with torch.no_grad(), lora.reference(model):
            answer(model, *inputs(model))
    # up, and down for the first alone, and up; inputs leave and come back
    assert seen.copied >= 2 + 1 + 2 + 4 * in_host


@pytest.mark.parametrize("dtype, relative", [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)])
def test_no_weight_is_further_off_than_half_a_step(dtype, relative):
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameters = [torch.nn.Parameter(value, requires_grad=False) for value in (weight, weight[0].clone())]
    block = torch.nn.ParameterList(parameters)
    packed = pack_block(block, Room(), in_8_bits=True)
    assert parameters[0].dtype == torch.int8 and len(packed.host) < 40 * 300 + 40 * 4 + 300 * 4 + 3 * 64
    assert packed.host[40 * 300 : 12032].eq(0).all()  # nothing but zeros between two of them
    packed.work_from(packed.host.clone())
    matrix, row = block
    half = weight.float().abs().amax(1, keepdim=True) / 254
    off = (matrix.float() - weight.float()).abs()
    assert matrix.dtype == dtype and (off <= half * (1 + 1e-5) + relative * weight.float().abs()).all()
    assert off.max() > 0.9 * half.min() and torch.equal(row, weight[0])  # what is no matrix is as it was
    packed.rest()
    assert all(mine is own for mine, own in zip(block, parameters, strict=True))
    assert block[0].dtype == torch.int8 and block[0].abs().amax(1).eq(127).all()


def test_what_waits_in_8_bits_is_watched(watched):
    model = expert("cpu_swap_int8", layers=2)
    gradients(model)
    assert watched.most == 2 and not watched.alive
    weight = model.blocks[1].attn2.to_v.weight
    before = invariants.bit_sums([weight])
    weight.data[2, 1] += 1
    assert weight.dtype == torch.int8 and (invariants.bit_sums([weight]) != before).all()


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
    for _ in range(2):  # without a graph nothing is computed again
        with torch.no_grad():
            answer(model, *inputs(model))
        assert watched() == first + going_up
    assert not watched.alive  # between the passes


def test_another_order_is_slower_and_not_wrong(watched):
    """A reference pass after a policy's whose graph still lives, as guidance with both gradients does it."""
    plain, swapped = expert(), expert("cpu_swap")

    def both(model):
        x, text = inputs(model)
        out = answer(model, x.requires_grad_(), text) + 2 * answer(model, x, text.flip(1))
        return torch.autograd.grad(out.square().sum(), x)[0]

    assert torch.equal(both(plain), both(swapped))
    assert len(sent_ahead(watched())) >= 3 * LAYERS


def test_at_most_two_blocks_are_on_the_device(watched):
    model = expert("cpu_swap")
    for _ in range(2):
        gradients(model)
        assert watched.most == 2 and not watched.alive


def test_a_pass_that_breaks_off_leaves_nothing_wrong(watched):
    plain, swapped = gradients(expert()), expert("cpu_swap")
    broken = swapped.blocks[2].register_forward_pre_hook(lambda module, given: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            gradients(swapped)
    broken.remove()
    found = gradients(swapped)
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_between_its_turns_a_block_lies_in_one_piece_of_host_memory():
    model = expert("cpu_swap")
    states = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(value, states[name]) for name, value in expert().state_dict().items())
    gradients(model)
    assert all(torch.equal(value, states[name]) for name, value in model.state_dict().items())
    for block in model.blocks:
        frozen, trained = ([p for p in block.parameters() if p.requires_grad == kind] for kind in (False, True))
        assert len({p.untyped_storage().data_ptr() for p in frozen}) == 1
        assert len({p.untyped_storage().data_ptr() for p in trained}) == len(trained)
        assert not any(p.untyped_storage().data_ptr() == frozen[0].untyped_storage().data_ptr() for p in trained)


def test_parameters_of_several_dtypes_begin_where_kernels_can_read_them():
    values = [torch.ones(3, dtype=torch.bfloat16), torch.full((2, 5), 2.0), torch.full((1,), 3.0, dtype=torch.float64)]
    parameters = torch.nn.ParameterList([torch.nn.Parameter(value.clone(), requires_grad=False) for value in values])
    packed = pack_block(parameters, Room(), in_8_bits=False)
    assert [parameter.data_ptr() % 64 for parameter in parameters] == [0, 0, 0] and len(packed.host) == 3 * 64
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True))


def mapped(parameter):
    """What of this process's memory a parameter lies in: the last word of its line in /proc/self/maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= parameter.data_ptr() < end:
            return line.split(maxsplit=5)[-1]
    raise AssertionError("no memory")


def borrow(process, files, change, in_8_bits):
    """In another process: an equal expert, whose blocks' weights are the first process's. Prints what became of it."""
    model = expert(layers=2)
    if change:
        with torch.no_grad():
            model.blocks[1].ffn.net[2].weight[3, 1] += 0.01 if in_8_bits else 1e-6
    try:
        BlockSwap(list(model.blocks), DEVICE, Borrower(process, files), in_8_bits)
    except NotShared as error:
        print(error)
        return
    weight = model.blocks[1].ffn.net[2].weight
    print(mapped(weight))
    weight.data[3, 1] = 7  # one memory: the other process sees it


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_processes_of_a_machine_have_one_copy(in_8_bits):
    model, lender = expert(layers=2), Lender()
    BlockSwap(list(model.blocks), DEVICE, lender, in_8_bits)
    assert len(lender.files) == 2 and "memfd:rewardfl" in mapped(model.blocks[0].attn1.to_q.weight)
    for change, wrong in ((True, False), (False, True), (False, False)):
        files = [10_000 + file for file in lender.files] if wrong else lender.files
        words = f"import test_swap; test_swap.borrow({os.getpid()}, {files}, {change}, {in_8_bits})"
        done = zygote.run(["-c", words], cwd=ROOT / "tests")
        assert done.returncode == 0, done.stderr
        if change:
            assert "not those that the first process" in done.stdout
        elif wrong:
            assert "No such file" in done.stdout and "cpu_swap" in done.stdout
        else:
            assert "memfd:rewardfl" in done.stdout
    assert model.blocks[1].ffn.net[2].weight[3, 1] == 7
    lender.close()
    assert not lender.files
