"""The estimate against figures that were measured and calculated independently, and against real tensors on the CPU.

The expected figures of the published model are those of the project's study of Wan2.2-I2V-A14B (reference/wan.md, its
section in brackets): its own hooks and counters on the meta device, and arithmetic by hand, written before this code.
"""

import dataclasses
import gc
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, measured_before, run_tool
from pipelines import FRAMES, HEIGHT, I2V, LAYERS, WIDTH, random_variant
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import UMT5EncoderModel

from rewardfl import backbones, config, lora, machine
from rewardfl.backbones.protocol import Adapter, Experts, Source
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan.model import expert_on_meta
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.estimate import measure, needs, report
from rewardfl.estimate.rates import OPERATIONS
from rewardfl.estimate.report import Machine, smaller_settings
from rewardfl.training.plan import resolve
from rewardfl.training.workload import Span, Video, Workload, make_workload
from rewardfl_tools import plan_run

pytestmark = pytest.mark.slow(110)

TARGETS = tuple(LAYERS)
ADAPTER = Adapter(32, TARGETS)
BLOCKS = ["WanTransformerBlock"]


def described(path="", dtype="bfloat16"):
    return backbones.describe("wan2_2", Source(model_paths=str(path), dtype=dtype))


PUBLISHED = described()
PIPELINE = ROOT / "assets" / "tiny_world" / "pipeline"
TINY = Video(backbone=described(PIPELINE, "float32"), height=64, width=64, num_frames=9, adapter=Adapter(16, TARGETS))
BF16 = torch.bfloat16


VIDEO = Video(backbone=PUBLISHED, height=480, width=832, num_frames=81, adapter=ADAPTER)
LAST_FOUR = {"low_noise": 4}  # of 8 steps, of which the low-noise expert has 5 at boundary 0.9
RUN = Workload(
    video=VIDEO,
    trained=("low_noise",), untrained="high_noise",
    rollout={"high_noise": 3, "low_noise": 5}, replay=LAST_FOUR, backward_passes=LAST_FOUR, reference=LAST_FOUR,
    reward_gradient=True,
)  # fmt: skip


def with_levers(run=RUN, **fields):
    return dataclasses.replace(run, **fields)


@pytest.fixture(scope="module")
def published():
    """adapter -> Costs of the published model in bfloat16, 480x832x81."""
    measured = {ADAPTER: measured_before(VIDEO)}

    def get(adapter):
        if adapter not in measured:
            forms = PUBLISHED.on_meta(480, 832, 81).experts["low_noise"]
            expert = measure.measure_expert(forms, BF16, PUBLISHED.block_classes, adapter)
            experts = {"high_noise": expert, "low_noise": expert}
            measured[adapter] = dataclasses.replace(measured[ADAPTER], experts=experts)
        return measured[adapter]

    return get


# ---- the published model ----


def test_flops_of_the_parts(published):
    """In TFLOP [section 5, 3]."""
    bare = published(None)
    expert = bare.experts["low_noise"]
    assert expert.tokens == 32760
    assert expert.forward_frozen / 1e12 == pytest.approx(1678, rel=0.02)
    assert expert.backward / 1e12 == pytest.approx(3018, rel=0.02)
    assert sum(chunk.forward for chunk in bare.chunks) / 1e12 == pytest.approx(274, rel=0.02)
    # no convolution is computed again
    assert sum(chunk.backward for chunk in bare.chunks) / 1e12 == pytest.approx(274, rel=0.02)
    assert bare.image.forward / 1e12 == pytest.approx(162, rel=0.02)
    adapted = published(ADAPTER).experts["low_noise"]
    assert 1 < adapted.forward / adapted.forward_frozen < 1.02  # "LoRA r32 adds ~1-2 %"


def test_flops_of_a_clip(published):
    """In PFLOP [section 5]."""
    measured = published(ADAPTER)
    work = needs.flops(measured, RUN)
    encode = measured.image.forward  # the table has it in the step
    assert (sum(work.values()) + encode) / 1e15 == pytest.approx(46.6, rel=0.02)
    graph = sum(work.values()) - work["replay forward"]  # the rollout's own forward passes have the graph then
    assert (graph + encode) / 1e15 == pytest.approx(39.9, rel=0.02)
    assert work["reference"] / work["rollout"] == pytest.approx(0.5, rel=0.01)  # 4 and 8 passes without a graph
    assert work["replay forward"] == work["replay recompute"]


def test_an_anchor_costs_a_replayed_step_for_each_draw(published):
    """And nothing else; supervised fine-tuning costs only its draws."""
    measured = published(ADAPTER)
    anchored = with_levers(anchor={"low_noise": 2})
    plain, work = needs.flops(measured, RUN), needs.flops(measured, anchored)
    step = sum(plain[f"replay {part}"] for part in ("forward", "recompute", "backward")) / 4
    assert work.pop("data anchor") == pytest.approx(2 * step) and work == plain
    assert needs.memory(measured, anchored) == needs.memory(measured, RUN)
    more = needs.flops(measured, dataclasses.replace(anchored, anchor_to_reference=True))
    assert more["data anchor"] == pytest.approx(2 * step + plain["reference"] / 2)
    alone = ["reward.terms.score.weight=0", "reward.motion_weight=0", "reward.others={}", "reward.kl_weight=0"]
    supervised = configured(*alone, "anchor.target=data", "anchor.draws=2")
    assert {name for name, amount in needs.flops(measured, supervised).items() if amount} == {"data anchor"}


# bytes per token and channel, GB [section 4]
@pytest.mark.parametrize("adapter, per_element, expected", [(None, 41.6, 6.98), (ADAPTER, 53.2, 8.93)])
def test_saved_bytes_of_a_block(published, adapter, per_element, expected):
    expert = published(adapter).experts["low_noise"]
    assert expert.block_saved / 1e9 == pytest.approx(expected, rel=0.01)
    assert expert.block_saved / expert.block_input * 2 == pytest.approx(per_element, rel=0.01)
    # "one block recompute + bwd ~9+4 | ~5+2.5": what the backward pass and the forward's own temporaries add
    assert 1.2 < expert.block_peak / expert.block_saved < 1.55


def test_activations(published):
    """In GB [section 4: block inputs; section 3]."""
    measured = published(ADAPTER)
    steady = measured.chunks[-1]
    assert measured.experts["low_noise"].stored / 1e9 == pytest.approx(13.4, rel=0.01)
    assert steady.caches_in / 1e9 == pytest.approx(1.89, rel=0.01)
    assert needs.decode_caches(measured.chunks, "keep")[0] / 1e9 == pytest.approx(36.8, rel=0.01)
    assert 2 * steady.caches_in < steady.peak_vjp


def test_weights(published):
    measured = published(ADAPTER)
    expert = measured.experts["low_noise"]
    assert expert.weights / 1e9 == pytest.approx(28.64, rel=0.001)  # [section 5]
    assert expert.weights_fp8 / 1e9 == pytest.approx(14.3, rel=0.03)  # [section 4]
    assert expert.adapter_parameters / 1e6 == pytest.approx(153.4, rel=0.001)  # [section 2]
    assert needs.memory(measured, RUN).resident["LoRA, gradient, Adam"] / 1e9 == pytest.approx(2.5, rel=0.02)
    assert measured.vae_weights / 1e9 == pytest.approx(0.25, rel=0.02)
    assert measured.text_weights / 1e9 == pytest.approx(11.4, rel=0.01)


def test_peak_memory_of_the_plans(published):
    """In GB [section 5]; "high on CPU, segment VAE": its caches are in the host here."""
    swapped = with_levers(untrained_placement="cpu_swap", decode_caches="offload")
    for run, expected in ((RUN, 113), (swapped, 58)):
        assert needs.memory(published(ADAPTER), run).peak / 1e9 == pytest.approx(expected, rel=0.1)


def test_what_sharding_leaves_on_a_gpu(published, processes=8):
    """In parts: 16 bytes of 153.4 million under fsdp2, and 27.9 GB of blocks; zero2 takes the moments away."""
    measured, run = published(ADAPTER), with_levers(processes=processes)
    by_sharding = {
        name: needs.memory(measured, dataclasses.replace(run, sharding=name)) for name in ("none", "zero2", "fsdp2")
    }
    expert, lora = "low_noise expert", "LoRA, gradient, Adam"
    trained = measured.experts["low_noise"].adapter_parameters
    block = measured.experts["low_noise"].block_weights
    assert by_sharding["none"].resident[lora] == 16 * trained and by_sharding["none"].host == {}
    assert by_sharding["zero2"].resident[lora] == 8 * trained + 200_000_000
    assert by_sharding["zero2"].host == {"optimizer": 16 * trained // processes}
    assert by_sharding["zero2"].resident[expert] == by_sharding["none"].resident[expert]
    assert by_sharding["fsdp2"].resident[lora] == 16 * trained // processes + 4 * trained
    assert by_sharding["fsdp2"].resident[expert] == 40 * block // processes + 2 * block + (28637218944 - 40 * block)
    assert (
        by_sharding["fsdp2"].peak < by_sharding["zero2"].peak < by_sharding["none"].peak
        and by_sharding["fsdp2"].host == {}
    )
    untrained = {name: need.resident["high_noise expert (gpu)"] for name, need in by_sharding.items()}
    assert len(set(untrained.values())) == 1  # is not in the module that is prepared


def test_one_expert_costs_what_its_placement_says(published):
    measured = published(ADAPTER)

    def resident(place):
        return sum(needs.memory(measured, with_levers(untrained_placement=place)).resident.values()) / 1e9

    assert resident("gpu") - resident("boundary_cache") == pytest.approx(28.64, rel=0.001)
    assert resident("fp8") - resident("boundary_cache") == pytest.approx(14.3, rel=0.03)
    expert = measured.experts["high_noise"]
    assert resident("cpu_swap") - resident("boundary_cache") == pytest.approx(expert.other_weights / 1e9)  # embeddings
    places = [with_levers(untrained_placement="cpu_swap", trained_placement=at) for at in ("gpu", "cpu_swap")]
    swapped = [needs.memory(measured, run) for run in places]
    blocks = 28637218944 - expert.other_weights
    assert [need.host for need in swapped] == [{"swapped experts": blocks}, {"swapped experts": 2 * blocks}]
    for need in swapped:  # the block at work and the next, of either expert
        assert need.phases["rollout"]["two blocks' weights"] == 2 * expert.block_weights == blocks // 20
        assert "two blocks' weights" not in need.phases["decode VJP"]
    assert [need.phases["replay"].get("two blocks' weights") for need in swapped] == [None, 2 * expert.block_weights]
    assert swapped[0].of("decode") - swapped[1].of("decode") == blocks
    both = needs.memory(measured, with_levers(trained=("high_noise", "low_noise"), untrained=None)).resident
    assert sum(both.values()) / 1e9 == pytest.approx(2 * (28.64 + 2.45) + 0.25, rel=0.01)


# ---- reality ----


def test_peak_counts_what_lives_at_once():
    x = torch.ones(1000)  # 4000 bytes

    def run():
        y = x * 2
        z = y[10:].view(-1) * 2  # a view takes no memory
        del y
        return z + x[:990]

    assert measure.without_graph(run, [x]).peak == 4000 + 3960
    assert measure.without_graph(lambda: (x * 2, x.add_(1)), [x]).peak == 4000
    assert measure.without_graph(lambda: x.view(-1), []).peak == 0  # older memory
    leaf = x.clone().requires_grad_()

    def peak(graph, **how):
        leaf.grad = None  # else the gradient is added to memory that is there
        return measure.with_graph(graph, [leaf], [x], **how).peak

    def exp():
        return [(leaf * x).exp()]  # which keeps its result; x and the leaf are given

    assert measure.with_graph(exp, [leaf], [leaf, x]).saved == 4000
    # with it the cotangent, and a gradient made from another, when the graph has let go of the result
    assert (peak(exp), peak(exp, keep=False)) == (4 * 4000, 3 * 4000)


def hooked_bytes(forward, external):
    """What `measure.with_graph` counts as saved, of real tensors and by their addresses."""
    ignored, saved = {tensor.untyped_storage().data_ptr() for tensor in external}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = forward()
    del graph  # it had to be alive until all was counted
    return sum(saved.values())


def counted(run):
    """FLOPs as torch's own counter has them on the CPU, with its CPU attention, and what `run` gives."""
    with FlopCounterMode(display=False, custom_mapping=measure.FUSED) as counter:
        result = run()
    return counter.get_total_flops(), result


def by_operator(run):
    """FLOPs by operation, of torch's own counter and its names of operators."""
    with FlopCounterMode(display=False, custom_mapping=measure.FUSED) as counter:
        run()
    sums = dict.fromkeys(OPERATIONS, 0)
    names = {"mm": "matmul", "addmm": "matmul", "bmm": "matmul", "convolution": "convolution"}
    for operator, amount in counter.get_flop_counts()["Global"].items():
        sums[names.get(str(operator).removeprefix("aten.").removesuffix("_backward"), "attention")] += amount
    return sums


def test_real_expert(pipe):
    """Saved bytes and FLOPs of real tensors, whose attention is torch's own choice, equal those on the meta device."""
    model = pipe.transformer_2  # of two blocks
    shape = (model.config.in_channels, 2, 8, 10)
    lora.inject(model, 4, 4, list(TARGETS), seed=0)
    expert = expert_on_meta(model.config, torch.float32, shape, I2V)
    predicted = measure.measure_expert([expert], torch.float32, BLOCKS, Adapter(4, TARGETS))
    assert predicted.tokens == 40
    x = torch.randn(1, *shape, requires_grad=True)
    text = torch.randn(1, wan.TEXT_LENGTH, model.config.text_dim)
    real = dataclasses.replace(
        expert, x=x, run=lambda model: model(x, torch.tensor([500.0]), text, return_dict=False)[0]
    )
    inputs, _ = measure.block_arguments(real, model, model.blocks[0])
    shared = [value for value in tree_leaves(inputs) if not value.requires_grad]
    assert hooked_bytes(lambda: model.blocks[0](**inputs), [*model.parameters(), *shared]) == predicted.block_saved
    outputs = []
    forward = by_operator(lambda: outputs.append(real.run(model).sum()))
    for name, flops in (("forward", forward), ("backward", by_operator(outputs[0].backward))):
        assert {each: predicted.total(name, each) for each in OPERATIONS} == flops
        assert all(flops.values()) and sum(flops.values()) == getattr(predicted, name)
    with lora.reference(model), torch.no_grad():
        assert counted(lambda: real.run(model))[0] == predicted.forward_frozen
    parts = [*model.parameters(), *model.buffers()]
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert predicted.adapter_parameters == adapter
    assert predicted.weights == measure.nbytes(parts) - 4 * adapter


SHORT = ("wan2_2", "wan2_2_ti2v")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in VARIANTS]
)
def test_real_variant(name, tmp_path):
    """Conditioning, latents, decoder and a network of each variant's folder, as they come out of the real code."""
    stock = random_variant(name)
    stock.save_pretrained(tmp_path)
    source = Source(model_paths=str(tmp_path), dtype="float32")
    predicted = measure.measure(
        Video(backbone=backbones.describe(name, source), height=HEIGHT, width=WIDTH, num_frames=FRAMES, adapter=None)
    )
    backbone, cpu = backbones.open(name, source), torch.device("cpu")
    shape, schedule = backbone.latent_shape(HEIGHT, WIDTH, FRAMES), backbone.schedule(4, 5.0, None)
    assert predicted.shape == shape
    clip = stock.image_encoder if VARIANTS[name].clip else None
    assert predicted.vision_weights == (measure.nbytes(clip.parameters()) if clip else 0)
    image = torch.zeros(3, HEIGHT, WIDTH)
    work, conditioning = counted(
        lambda: backbone.text_encoder(cpu)("a person") | backbone.image_encoder(cpu)(image, FRAMES)
    )
    if name == "wan2_2":  # whose image is encoded as a clip
        assert work == predicted.text.forward + predicted.image.forward
    assert {part: measure.nbytes([value]) for part, value in conditioning.items()} == predicted.cached
    x = torch.randn(1, *shape)
    for i, expert in enumerate(schedule.experts):
        model = Experts({expert: backbone.load_expert(expert)})
        with torch.no_grad():
            work, _ = counted(lambda model=model, i=i: backbone.velocity(model, x, i, schedule, conditioning))
        assert work == predicted.experts[expert].forward_frozen
        assert measure.nbytes([*model.parameters(), *model.buffers()]) == predicted.experts[expert].weights
    work, decoded = counted(lambda: backbone.load_decoder(cpu).decode_with_caches(x, conditioning=conditioning))
    assert work == sum(chunk.forward for chunk in predicted.chunks)
    assert decoded.video.numel() == predicted.num_pixels
    held = [[cache for cache in caches if isinstance(cache, torch.Tensor)] for caches in decoded.caches.values()]
    assert [measure.nbytes(caches) for caches in held] == [chunk.caches_in for chunk in predicted.chunks]


@pytest.mark.parametrize("chunks", [0, 2, 9])
def test_kept_chunks_take_the_planned_bytes_until_the_vjp(chunks):
    measured, source = measure.measure(TINY), Source(model_paths=str(PIPELINE), dtype="float32")
    decoder = backbones.open("wan2_2", source).load_decoder(torch.device("cpu"))
    latents = torch.randn(1, *measured.shape)
    with measure.Living([*decoder.vae.parameters(), latents]) as living:
        decoded = decoder.decode_with_caches(latents, kept_chunks=chunks)
    planned = needs.memory(measured, with_levers(kept_chunks=chunks)).phases["reward"]
    held = sum(amount for part, amount in planned.items() if not part.startswith("frames"))
    assert living.now - measure.nbytes([decoded.video]) == pytest.approx(held, rel=0.01)


# ---- what the settings do ----


def test_settings_take_from_the_phase_they_are_for(published):
    measured = published(ADAPTER)

    def change(measured, phase, **fields):
        """GB that a phase takes less with these settings."""
        return (needs.memory(measured, RUN).of(phase) - needs.memory(measured, with_levers(**fields)).of(phase)) / 1e9

    assert change(measured, "replay", offload_inputs=True) == pytest.approx(38 * 0.3355, rel=0.001)  # 2 of 40 stay
    for caches, chunks in (("offload", 2), ("segment", 1)):  # while a chunk's are there, the next are on their way
        assert change(measured, "decode VJP", decode_caches=caches) == pytest.approx(36.8 - chunks * 1.89, rel=0.01)
    # 21 chunks in segments of 5: the caches of chunks 0 (none), 5, 10, 15, 20, and of four others
    host = [needs.memory(measured, with_levers(decode_caches=at)).host for at in ("offload", "segment")]
    assert [need["decoder caches"] / 1e9 for need in host] == pytest.approx([36.8, 8 * 1.89], rel=0.01)
    without = change(measured, "replay", checkpointing=False)  # 40 blocks' saved bytes for 40 inputs and one block's
    assert without == pytest.approx(13.4 - 39 * 8.91, rel=0.01)
    for phase in ("rollout", "decode", "reward", "decode VJP", "replay"):
        plain = needs.memory(measured, RUN)
        activations = plain.of(phase) - sum(plain.resident.values())
        assert change(measured, phase, batch=3) == pytest.approx(-2 * activations / 1e9)
    for phase, graphs in (("decode", 3), ("reward", 3), ("decode VJP", 2)):  # the VJP has one of its own
        more = -change(measured, phase, kept_chunks=3) + 2 * 1.89  # GB; they have the first chunk's caches
        assert more == pytest.approx(graphs * 3.36, rel=0.01)
    frames = needs.memory(measured, RUN).phases["reward"]["frames, also float32, and gradient"]
    assert frames == 3 * 81 * 480 * 832 * (2 + 4 + 4)
    both = with_levers(offload_inputs=True, decode_caches="offload", batch=2)
    host = needs.memory(measured, both).host  # the inputs wait where the caches waited
    assert {name: size / 1e9 for name, size in host.items()} == pytest.approx({"decoder caches": 2 * 36.8}, rel=0.01)
    host = needs.memory(measured, dataclasses.replace(both, decode_caches="keep")).host
    assert {name: size / 1e9 for name, size in host.items()} == pytest.approx({"block inputs": 2 * 13.4}, rel=0.01)
    host = needs.memory(measured, dataclasses.replace(both, kept_steps=4, active_experts=("low_noise",) * 4)).host
    assert host["block inputs"] / 1e9 == pytest.approx(2 * 4 * (13.4 + 0.72), rel=0.01)
    assert host["decoder caches"] / 1e9 == pytest.approx(2 * 36.8, rel=0.01)
    assert needs.memory(measured, RUN).host == {}


def test_processes_that_share_a_clip_divide_the_experts_part(published):
    measured, two = published(ADAPTER), with_levers(processes_per_clip=2)
    for phase, share in (("rollout", 0.5), ("decode VJP", 1), ("replay", 0.5)):
        full, half = (sum(needs.memory(measured, run).phases[phase].values()) for run in (RUN, two))
        assert half == pytest.approx(share * full)
    full, half = needs.flops(measured, RUN), needs.flops(measured, two)
    assert {name: half[name] / full[name] for name in full} == dict.fromkeys(full, 0.5) | {"decode": 1, "decode VJP": 1}


def test_settings_change_the_work(published):
    measured = published(ADAPTER)
    expert, base = measured.experts["low_noise"], needs.flops(measured, RUN)

    def difference(run):
        after = needs.flops(measured, run)
        return {name: after[name] - base[name] for name in base if after[name] != base[name]}

    assert difference(with_levers(reference={})) == {"reference": -4 * expert.forward_frozen}
    assert difference(with_levers(backward_passes={"low_noise": 7})) == {
        "replay recompute": 3 * expert.forward, "replay backward": 3 * expert.backward,
    }  # fmt: skip
    assert difference(with_levers(untrained_placement="boundary_cache")) == {"rollout": -3 * expert.forward_frozen}
    assert difference(with_levers(checkpointing=False)) == {"replay recompute": -4 * expert.forward}
    assert difference(with_levers(decode_caches="segment")) == {"decode VJP": base["decode"]}
    forwards = [chunk.forward for chunk in measured.chunks]
    assert difference(with_levers(kept_chunks=2)) == {"decode VJP": -sum(forwards[-2:])}
    assert difference(with_levers(kept_chunks=99)) == {"decode VJP": -base["decode"]}
    assert difference(with_levers(decode_caches="segment", kept_chunks=2)) == {
        "decode VJP": base["decode"] - 2 * sum(forwards[-2:]),
    }  # fmt: skip
    with_graphs = with_levers(kept_steps=3, active_experts=("low_noise",) * 4, offload_inputs=True)
    assert difference(with_graphs) == {"replay forward": -3 * expert.forward}
    assert needs.memory(measured, with_graphs).host == {"block inputs": 3 * (expert.stored + expert.saved_outside)}
    on_device, before = (
        needs.memory(measured, dataclasses.replace(with_graphs, offload_inputs=False, kept_steps=k)) for k in (3, 0)
    )
    more = {phase: on_device.of(phase) - before.of(phase) for phase in before.phases}
    outside, stored = 3 * expert.saved_outside, expert.stored + expert.nested
    replay, waiting = 2 * (stored + expert.saved_outside), 3 * stored + outside
    rollout = (
        waiting - expert.saved_outside - 2 * expert.block_input - expert.shared - expert.nested
    )  # of its own graph
    assert more == dict.fromkeys(before.phases, waiting) | {"replay": replay, "rollout": rollout}
    assert difference(with_levers(untrained_placement="cpu_swap", decode_caches="offload", offload_inputs=True)) == {}


# ---- the levers ----


def planned(cfg, backbone, clips=None, processes=1, sharding="none"):
    """The work of a configuration; `clips` rows of the usual size."""
    rows = None if clips is None else [SimpleNamespace(size=None, offers=("clip",), rejected=None)] * clips
    return make_workload(resolve(cfg, backbone, processes, here=False), backbone, rows, sharding)


def configured(*overrides):
    replayed = ["train.memory.active_graphs=replay", "train.memory.kept_chunks=0", "reward.kl_steps=null", *overrides]
    return planned(config.load(ROOT / "configs" / "wan22_face.yaml", replayed), PUBLISHED)


LARGE = needs.Memory(resident={"expert": 90e9}, phases={"replay": {"blocks": 10e9}}, encode={}, host={"caches": 6e9})


def test_settings_that_take_less():
    large = with_levers(checkpointing=False, batch=2, kept_chunks=3, kept_steps=2, samples_in_flight=24)
    assert list(smaller_settings(large).items()) == [
        ("train.memory.samples_on", "cpu"), ("train.memory.untrained", "cpu_swap"), ("train.memory.decode_caches",
        "offload"),
        ("train.memory.use_gradient_checkpointing", True), ("train.memory.use_gradient_checkpointing_offload", True),
        ("train.per_device_train_batch_size", 1), ("train.memory.trained", "cpu_swap"), ("train.memory.kept_chunks", 0),
        ("train.memory.active_graphs", "replay"),
    ]  # fmt: skip
    assert "train.memory.trained" not in smaller_settings(with_levers(sharding="fsdp2"))
    assert "train.memory.untrained" not in smaller_settings(with_levers(untrained=None))
    text = "\n".join(report.fit_verdict(LARGE, RUN, Machine(80e9, 500e9)))
    assert text.startswith("does not fit: ") and "\n  train.memory.decode_caches: offload\n" in text
    assert report.fit_verdict(LARGE, RUN, Machine(141e9))[0].startswith("fits: ")


def test_a_run_fits_with_its_reserve_and_all_processes():
    assert LARGE.peak == 100e9 and Machine(102e9).gpu_fits(LARGE) and not Machine(101e9).gpu_fits(LARGE)
    assert Machine(None, 12e9, 2).host_fits(LARGE) and not Machine(None, 12e9, 3).host_fits(LARGE)


# ---- train_forward_rl.py, on the tiny world ----


def forward_workload(*settings, processes=1):
    return planned(config.load(ROOT / "tests" / "forward.yaml", settings), TINY.backbone, processes=processes)


def test_a_video_costs_its_rollout_and_its_draws():
    """8 steps, of which the low-noise expert has 5; two draws, each with its recomputation under checkpointing."""
    costs = measured_before(forward_workload().video)
    high, low = costs.experts["high_noise"], costs.experts["low_noise"]
    work = needs.flops(costs, forward_workload("train.memory.use_gradient_checkpointing=true"))
    assert work["rollout"] == 3 * high.forward_frozen + 5 * low.forward
    assert work["replay forward"] == work["replay recompute"] == 2 * low.forward
    assert work["replay backward"] == 2 * low.backward and work["reference"] == 0
    best = needs.flops(costs, forward_workload("forward.objective=best", "anchor.weight=1"))
    assert best["replay forward"] == 2 * low.forward / 8 and best["replay backward"] == 2 * low.backward / 8
    assert best["rollout"] == work["rollout"] and best["data anchor"] == (low.forward + low.backward) / 8
    dpo = needs.flops(costs, forward_workload("forward.objective=dpo"))  # two of eight videos
    assert dpo["replay backward"] == 2 * low.backward / 4 and dpo["rollout"] == work["rollout"]
    assert dpo["reference"] == 4 * low.forward_frozen / 4  # its errors and the reference's
    assert forward_workload("forward.objective=dpo", "lora.init_from=anywhere").averages == 3
    table = ["reward.terms={score: {weight: 0}}", "forward.group_size=2", "train.per_device_train_batch_size=1"]
    pairs = needs.flops(costs, forward_workload("forward.objective=dpo", *table))
    assert pairs["rollout"] == pairs["decode"] == 0 and pairs["replay backward"] == 2 * low.backward
    nft = forward_workload("forward.objective=nft", "forward.base_anchor=1", "forward.inner_epochs=2")
    nft = needs.flops(costs, nft)
    assert nft["rollout"] == work["rollout"] + 4 * low.forward  # by the old policy, at each draw
    assert nft["replay forward"] == 4 * low.forward and nft["reference"] == 4 * low.forward_frozen


def test_memory_holds_two_averages_and_the_draws_of_an_update():
    run = forward_workload("forward.updates_per_epoch=2", processes=2)
    costs, latents = measured_before(run.video), 16 * 5 * 20 * 20 * 4
    resident = needs.memory(costs, run).resident
    low = costs.experts["low_noise"]
    assert resident["averaged LoRA"] == 2 * 4 * low.adapter_parameters
    assert resident["the update's latents"] == 8 * 2 * 2 * latents  # 8 of a process's 16 videos: with noise, and target
    assert needs.kept_bytes(costs, run) == latents + sum(costs.cached.values())
    anchors = ["forward.old_policy.anchor=1", "forward.base_anchor=1"]
    more = forward_workload("forward.updates_per_epoch=2", *anchors, processes=2)
    assert needs.memory(costs, more).resident["the update's latents"] == 8 * 2 * 4 * latents


# ---- the tool ----


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # configurations name their files from there


def tool(*arguments, expect=0):
    return run_tool(plan_run.main, "--host-gb", 1000, "--config", *arguments, expect=expect)


# {configuration: (GPUs, GB of one), in its first comment}
NAMED = {
    file: match.groups("1")
    for file in sorted((ROOT / "configs").rglob("*.yaml"))
    if (match := re.search(r"(?:(\d+) )?GPUs? of (\d+) GB", file.read_text().replace("\n# ", " ")))
}
SMALLER = ["lora.lora_rank=32", "lora.lora_alpha=64", "train.memory.use_gradient_checkpointing_offload=true"]


@pytest.mark.long
@pytest.mark.parametrize("file", NAMED, ids=lambda file: file.stem)
def test_the_files_fit_the_gpus_that_they_name(file):
    processes, memory = NAMED[file]
    arguments = (str(file), "--processes", processes, "--gpu-memory")
    out = tool(*arguments, memory)
    assert "\nfits: " in out and "published; no configurations" in out
    if file.stem == "dance_grpo":  # its comment names what 80 GB take
        assert all(setting in file.read_text() for setting in SMALLER)
        tool(*arguments, 80, *SMALLER)


def test_run_of_a_configuration():
    settings = [
        "sample.num_inference_steps=4", "sample.shift=3", "sample.final_timestep=2", "sample.mid_timestep=0",
        "train.memory.kept_chunks=13",
        "sample.gradient_mode=drtune", "reward.kl_weight=0", "reward.kl_steps=null",
        "model.trainable_models=dit,dit2", "model.min_timestep_boundary=0.8", "run.save_steps=7",
        "reward.reward_model_path=assets/tiny_world/faces/reward", "reward.held_out_model_path=null",
        "train.gradient_accumulation_steps=8", "train.max_steps=12", "lora.lora_rank=8",
        "lora.lora_target_modules=q,ffn.0", "data.num_frames=49",
    ]  # fmt: skip
    files = Path("assets/tiny_world/faces/reward")  # as the configuration has it
    pack = sum(file.stat().st_size for file in files.glob("*.onnx"))
    cfg = config.load(ROOT / "configs" / "wan22_face.yaml", settings)
    run = planned(cfg, PUBLISHED, 30, 2, "zero2")
    assert run == Workload(
        video=Video(
            backbone=PUBLISHED, height=480, width=480, num_frames=49, adapter=Adapter(8, ("to_q", "ffn.net.0.proj"))
        ), trained=("high_noise", "low_noise"),
        untrained=None, rollout={"high_noise": 2, "low_noise": 1}, replay={"high_noise": 2, "low_noise": 1},
        backward_passes={"high_noise": 2, "low_noise": 1}, reward_gradient=True, steps=12,
        reward_bytes=pack, processes=2, sharding="zero2", anchor={"high_noise": 2 / 3, "low_noise": 1 / 3},
        anchor_to_reference=True, spans=(Span("one update of 8 clips per GPU", 8, 8),),
        active_experts=("high_noise", "high_noise", "low_noise"), kept_steps=3, kept_chunks=13, latents_of_update=10,
    )  # fmt: skip
    assert needs.memory(measured_before(TINY), run).resident["reward networks' weights"] == pack > 1e6


def test_guidance_and_a_kl_of_its_own_add_passes():
    guided, eight = "sample.guidance_scale=5", {"low_noise": 8}
    assert configured("data.max_pixels=null").video == RUN.video
    plain, both = configured(), configured(guided)
    half = configured(guided, "sample.guidance_gradient=conditional")  # the other pass has no graph
    assert [run.rollout["low_noise"] for run in (plain, both, half)] == [5, 10, 14]
    assert [run.graphs for run in (plain, both, half)] == [1, 2, 1]
    assert [run.reference for run in (plain, both, half)] == [LAST_FOUR, eight, eight]
    for run, passes in ((plain, LAST_FOUR), (both, eight), (half, LAST_FOUR)):
        assert run.replay == run.backward_passes == passes
    apart = "reward.kl_gradient=exact"  # one more backward pass for each coupled step
    assert (configured(apart).replay, configured(apart).backward_passes) == (LAST_FOUR, {"low_noise": 7})
    assert configured(apart, "sample.gradient_mode=drtune").backward_passes == LAST_FOUR
    assert configured(apart, guided).backward_passes == {"low_noise": 14}


def test_a_verdict_adds_decodings_and_a_pass(published):
    """Of x0, of each move, and of one sample of an update after its step."""
    endpoint = ["sample.gradient_mode=endpoint", "train.ema_decay=0.5", "reward.kl_weight=0"]
    many = ["sample.verdict={}", "sample.endpoint_length=[0.1,0.2,0.4]", "train.gradient_accumulation_steps=2"]
    plain, verified = configured(*endpoint), configured(*endpoint, *many)
    measured = published(ADAPTER)
    (before, after), expert = [needs.flops(measured, run) for run in (plain, verified)], measured.experts["low_noise"]
    assert after["decode"] == pytest.approx((1 + 4 + 0.5) * before["decode"])
    assert after["rollout"] - before["rollout"] == pytest.approx(0.5 * expert.forward)
    assert (verified.samples_in_flight, verified.latents_kept["gpu"], plain.samples_in_flight) == (2, 4, 0)


# ---- the host's memory ----


def test_plan_run_judges_the_host(monkeypatch, published):
    monkeypatch.setattr(report, "measure", lambda video: published(ADAPTER))
    arguments = ["configs/wan22_face.yaml", "train.memory.untrained=cpu_swap", "train.memory.decode_caches=offload"]
    arguments += ["train.memory.active_graphs=replay", "train.memory.kept_chunks=0"]
    for host, processes, code in (("70", "1", 0), ("60", "1", 2), ("520", "8", 0), ("510", "8", 2)):
        out = tool(*arguments, "--host-gb", host, "--processes", processes, expect=code)
        assert ("\nfits: " in out) == (code == 0) and ("\ndoes not fit: " in out) == (code == 2)
        assert "published; no configurations" in out and "data: not there yet" in out
        assert f" of {host}.0 GB in host memory" in out
    assert out.endswith("\n  start fewer processes, or keep more on the GPU\n")
    monkeypatch.setattr(machine, "usable_memory", lambda: 24e9)
    out = run_tool(plan_run.main, "--config", *arguments, expect=2)  # of this machine
    assert "of 24.0 GB in host memory" in out


def test_a_run_that_cannot_work_is_refused():
    for option in ("--rates", "--gpu-memory", "--host-gb", "--processes"):
        (line,) = tool("configs/tiny_face.yaml", f"{option}=0", expect=2).splitlines()
        assert line.startswith(f"error: {option}: must be ")
    (line,) = tool("configs/wan22_face.yaml", "data.max_pixels=null", "data.height=500", expect=2).splitlines()
    assert line.startswith("error: ") and "multiple of 16" in line


def test_rewards_are_there_while_prompts_and_clips_are_encoded(tmp_path):
    """All weights that a reward's settings name, of one format each; they are loaded before the encoders."""
    model, judge = tmp_path / "model", tmp_path / "judge.pt"
    model.mkdir()
    for name, size in (("model.safetensors", 5000), ("pytorch_model.bin", 5000), ("config.json", 70)):
        (model / name).write_bytes(bytes(size))
    judge.write_bytes(bytes(300))
    hps = {"name": "hpsv2", "weight": 1, "settings": {"checkpoint": str(judge), "tokenizer_dir": "nowhere"}}
    pick = {"name": "pickscore", "weight": 1, "settings": {"model_dir": str(model)}}
    others = f"reward.others={json.dumps({'hps': hps, 'pick': pick})}"
    run = configured("reward.reward_model_path=nowhere", "reward.held_out_model_path=null", others)
    assert run.reward_bytes == 5300
    measured = measured_before(TINY)
    more, none = (needs.memory(measured, with_levers(reward_bytes=n)).by_phase for n in (5300, 0))
    assert {phase: more[phase] - none[phase] for phase in more} == dict.fromkeys(more, 5300)
    assert {"encode text", "encode clip"} < more.keys()


def test_the_text_encoder_is_gone_before_the_vae_comes():
    """By its last reference, not by a collection of garbage."""
    backbone = backbones.open("wan2_2", Source(model_paths=str(PIPELINE), dtype="float32"))

    def encoders():
        return [value for value in gc.get_objects() if type(value) is UMT5EncoderModel]

    gc.collect()
    gc.disable()
    try:
        before, encode = len(encoders()), backbone.text_encoder(torch.device("cpu"))
        encode("a person")
        assert len(encoders()) == before + 1
        del encode
        assert len(encoders()) == before
    finally:
        gc.enable()


def test_videos_of_the_base_model_before_training(published):
    """Those of rows without a clip: passes of each step and one decoding, without an adapter."""
    cfg = config.load(ROOT / "configs" / "wan22_face.yaml", ["reward.base_noises=3", "train.max_steps=1"])
    rows = [
        SimpleNamespace(size=None, offers=offers, rejected=None) for offers in (("clip",), ("picture",), ("picture",))
    ]
    work = make_workload(resolve(cfg, PUBLISHED, 4, here=False), PUBLISHED, rows)
    costs = published(ADAPTER)
    expert = costs.experts["low_noise"]
    each = 8 * expert.forward_frozen + sum(chunk.forward for chunk in costs.chunks)
    assert work.base_videos == 6 and sum(needs.flops(costs, needs.of_base_video(work)).values()) == pytest.approx(each)
    (line,) = [line for line in report.work_table(costs, work, report.RATES["H100"]) if "videos of the base" in line]
    assert line.startswith(f"before training, 6 videos of the base model: {6 * each / 1e15:.4g} PFLOP, ")
    every = config.load(ROOT / "configs" / "wan22_face.yaml", ["reward.motion_reference=base", "train.max_steps=1"])
    assert make_workload(resolve(every, PUBLISHED, 1, here=False), PUBLISHED, rows).base_videos == 3 * 2
