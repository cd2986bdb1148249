"""The estimate of train_flow_grpo.py: closed forms of its counts, on the published model's shape and the tiny world."""

import dataclasses

import pytest
import torch
from conftest import ROOT, measured_before
from pipelines import I2V
from test_needs import TINY as TINY_VIDEO
from test_needs import VIDEO as LONG_VIDEO
from test_needs import at_root, planned, tool  # noqa: F401

from rewardfl import config, group_plan, sde
from rewardfl.backbones.protocol import Adapter
from rewardfl.backbones.wan import model as wan
from rewardfl.estimate import needs, report
from rewardfl.estimate.rates import RATES, parse_rates
from rewardfl.training import plan, workload

pytestmark = pytest.mark.slow(150)

SIGMAS = wan.schedule(8, 5.0, I2V.experts, 0.9).sigmas  # three steps of high noise, five of low
TINY, TINY_MODEL = "tests/grpo.yaml", TINY_VIDEO.backbone
SIX = ["grpo.groups=6", "grpo.same_noise_in_group=false", "grpo.window.within=null"]  # overrides of TINY
VIDEO = dataclasses.replace(LONG_VIDEO, num_frames=17)
PLAIN = [
    *SIX, "grpo.group_size=4", "train.per_device_train_batch_size=1", "train.memory.use_gradient_checkpointing=true",
    "evaluation.eval_clips=null", "reward.held_out_model_path=null", "reward.reward_model_path=nowhere",
    "grpo.objective=guard", "grpo.kl_weight=0", "train.max_steps=36",
]  # fmt: skip


def work_of(*overrides, steps=None, clips=None, processes=1, windows=((3, 4), (4, 5))):
    """The work of the tiny configuration, six groups of four, as if of the published model; `windows` in turn."""
    cfg = config.load(ROOT / TINY, [*PLAIN, f"train.max_steps={steps or 'null'}", *overrides])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.FlowGrpoPlan, "draw_windows", lambda *_: list(windows))
        work = planned(cfg, TINY_MODEL, clips, processes)
    return dataclasses.replace(work, video=VIDEO)


RUN = work_of()


@pytest.fixture(scope="module")
def published():
    """The published model in bfloat16, 480x832x17."""
    return measured_before(VIDEO)


# ---- compute ----


def test_work_of_a_sample(published):
    expert = published.experts["low_noise"]
    assert needs.flops(published, RUN) == pytest.approx(
        {
            "rollout": 3 * expert.forward_frozen + 5 * expert.forward,
            "decode": sum(chunk.forward for chunk in published.chunks),
            "replay forward": 2 * expert.forward,
            "replay recompute": 2 * expert.forward,
            "replay backward": 2 * expert.backward,
            "reference": 0,
        }
    )
    # an expert that is not trained runs without an adapter in the rollout; this one is, at its own steps
    high = needs.flops(published, work_of("model.trainable_models=dit", windows=((0, 1),)))
    assert high["rollout"] == pytest.approx(3 * expert.forward + 5 * expert.forward_frozen)


@pytest.mark.parametrize(
    "processes, batch, clips, passes",
    [
        (1, 1, 6, 6),  # six groups of four, a group at a time
        (1, 8, 6, 3),  # two groups at a time
        (4, 1, 3, 3),  # six samples: a group and half another; new ones come at passes 0, 2 and 4
    ],
)
def test_members_of_one_start_share_the_steps_before_the_window(published, processes, batch, clips, passes):
    geometry = group_plan.Geometry(group_size=4, groups=6, world=processes, batch=batch, same_noise=True)
    samples = 24 // processes
    after, apart = (samples, samples // batch), dataclasses.replace(geometry, same_noise=False)
    assert group_plan.rollout_counts(geometry, 8, (3, 4)) == [(clips, passes)] * 3 + [after] * 5
    assert group_plan.rollout_counts(geometry, 8, (0, 4)) == [after] * 8
    assert group_plan.rollout_counts(apart, 8, (3, 4)) == [after] * 8
    expert, settings = published.experts["low_noise"], ["grpo.same_noise_in_group=true"]
    run = work_of(*settings, f"train.per_device_train_batch_size={batch}", processes=processes)
    share = clips / samples
    assert needs.flops(published, run)["rollout"] == pytest.approx(
        3 * share * expert.forward_frozen + (4.5 + 0.5 * share) * expert.forward
    )


# ---- memory ----


def test_memory(published):
    expert, latents = published.experts["low_noise"], 16 * 5 * 60 * 104 * 4
    memory = needs.memory(published, RUN)
    assert memory.resident["LoRA, gradient, Adam"] == 16 * expert.adapter_parameters
    assert memory.resident["averaged LoRA"] == 4 * expert.adapter_parameters
    conditioning = 512 * 4096 * 2 + 20 * 5 * 60 * 104 * 4
    assert needs.kept_bytes(published, RUN) == (3 + 2) * latents + conditioning  # x 3, 4, 5; two means
    assert memory.resident["the epoch's samples"] == 24 * (5 * latents + conditioning)
    assert needs.kept_bytes(published, work_of("grpo.objective=clip")) == 3 * latents + conditioning
    apart = work_of(windows=((3,), (3, 5)))  # x 3, 4, 5, 6, two means, in the widest window
    assert needs.kept_bytes(published, apart) == (4 + 2) * latents + conditioning
    host = needs.memory(
        published, work_of("train.memory.samples_on=cpu", "train.memory.untrained=cpu_swap", processes=2)
    )
    assert host.host == {  # a step's own x and x_next, and its mean
        "swapped experts": expert.weights - expert.other_weights,
        "the epoch's samples": 12 * (6 * latents + conditioning),
    }  # fmt: skip
    assert "the epoch's samples" not in host.resident
    assert memory.host == {}
    pixels, steady = 3 * 17 * 480 * 832, published.chunks[-1]
    assert memory.phases["decode"] == {
        "one chunk, its caches and the next's": steady.caches_in + steady.peak,
        "frames by chunk": 2 * pixels,
    }
    assert memory.phases["reward"] == {"frames, also float32": (2 + 4) * pixels}
    block = 2 * expert.block_input + expert.shared + expert.nested + expert.block_peak_frozen
    assert memory.phases["rollout"] == {"one block, no graph": block}
    assert memory.phases["replay"] == {
        "block inputs": expert.stored + expert.nested, "recompute and backward of one": expert.block_peak,
    }  # fmt: skip
    # no VJP of the decoder
    assert list(memory.by_phase) == ["rollout", "decode", "reward", "replay", "encode text", "encode clip"]
    guided = needs.memory(published, work_of("sample.guidance_scale=2")).phases
    both = 2 * (expert.stored + expert.nested)  # graphs, which live until the backward pass
    assert guided["replay"]["block inputs"] == both
    stored = needs.memory(published, dataclasses.replace(RUN, graphs=2, checkpointing=False)).phases["replay"]
    assert stored["all blocks, saved"] == 2 * (expert.saved + expert.shared + expert.nested)


@pytest.mark.parametrize("window", [(3, 4), (0, 1, 2, 6)])
def test_what_is_kept_is_what_a_rollout_leaves(published, window):
    """The bytes of its tensors, each storage once: where they were made, and after they have moved."""
    kernel = sde.Kernel("flow", 0.7, SIGMAS)
    x = torch.zeros(1, *published.shape)
    _, steps = sde.rollout(lambda x, step: x, x, kernel, window, lambda step: torch.ones_like(x))

    def nbytes(steps):
        tensors = [tensor for step in steps for tensor in (step.x, step.x_next, step.mean)]
        return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())

    for place, moved in (("gpu", steps.values()), ("cpu", [step.to("meta") for step in steps.values()])):
        stored = needs.kept_bytes(published, work_of(f"train.memory.samples_on={place}", windows=(window,)))
        assert stored - sum(published.cached.values()) == nbytes(moved)


# ---- the configuration ----


def test_run_of_a_configuration():
    settings = [
        "sample.guidance_scale=3.5", "grpo.kl_weight=0.1", "grpo.same_noise_in_group=true",
        "grpo.updates_per_epoch=3", "grpo.inner_epochs=2", "grpo.sde=dance", "grpo.noise_level=0.3",
        "grpo.window={steps: [4, 6]}", "train.memory.samples_on=cpu", "train.memory.untrained=fp8",
        "train.max_steps=12",
        "train.memory.use_gradient_checkpointing=true", "train.memory.use_gradient_checkpointing_offload=true",
        "run.save_steps=9",
        "train.per_device_train_batch_size=2",
    ]  # fmt: skip
    packs = (ROOT / "assets/tiny_world/faces" / name for name in ("reward", "judge"))
    cfg = config.load(TINY, [*SIX, *settings])
    run = planned(cfg, TINY_MODEL, 48, 4, "fsdp2")
    # guided; two members of a group on each process share the four steps before the window
    passes = {"low_noise": 2 * 2 * 2}  # of two steps, two inner epochs, guided
    adapter = Adapter(cfg.lora.lora_rank, VIDEO.adapter.targets)
    assert run == workload.Workload(
        video=workload.Video(backbone=TINY_MODEL, height=80, width=80, num_frames=9, adapter=adapter),
        trained=("low_noise",), untrained="high_noise",
        rollout={"high_noise": 1.5, "low_noise": 8.5}, replay=passes, backward_passes=passes,
        reference=passes, graphs=2, averages=1, samples_in_flight=12, latents_kept={"gpu": 6, "cpu": 6},
        spans=(
            workload.Span("one update of 16 samples, with its share of the rollouts", 8, 2),
            workload.Span("one epoch of 48 samples", 48, 12),
            workload.Span("the run of 2 epochs, without its evaluations", 96, 24),
        ),
        steps=12,
        reward_bytes=sum(file.stat().st_size for pack in packs for file in pack.glob("*.onnx")),
        processes=4, sharding="fsdp2", untrained_placement="fp8", offload_inputs=True, batch=2, samples_on="cpu",
    )  # fmt: skip
    cfg = config.load(TINY, [*SIX, "evaluation.eval_clips=null", "train.max_steps=null"])  # its length is not known
    drawn, windows = planned(cfg, TINY_MODEL), plan.resolve(cfg, TINY_MODEL, 1).draw_windows(None)
    assert len(drawn.spans) == 2 and drawn.replay == pytest.approx({"low_noise": 2})
    assert set(windows) == {(3, 4), (4, 5), (5, 6)} and len(windows) == 100


def test_costs_in_words(published):
    settings = ["grpo.groups=60", "grpo.updates_per_epoch=2", "grpo.inner_epochs=2"]
    run = work_of(*settings, processes=2, steps=8)
    per_sample = sum(needs.flops(published, run).values())
    seconds = per_sample / 400e12
    text = "\n".join(report.work_table(published, run, parse_rates("400")))

    def line(start):
        (match,) = [line for line in text.splitlines() if line.startswith(start)]
        return match

    update = f"{60 * per_sample / 1e15:.4g} PFLOP, {30 * seconds:.4g} s"  # 240 samples, four updates; two processes
    assert line("one update of 120 samples").endswith(update)
    assert f"{240 * per_sample / 1e15:.4g} PFLOP, {120 * seconds:.4g} s" in line("one epoch of 240 samples")
    assert f"{480 * per_sample / 1e15:.4g} PFLOP" in line("the run of 2 epochs, without its evaluations")
    assert "the run of" not in "\n".join(report.work_table(published, work_of(*settings, processes=2), RATES["H100"]))
    (epoch,) = [each for each in report.work_table(published, run, parse_rates("1")) if each.startswith("one epoch")]
    assert f"({240 * seconds * 400 / 3600:.4g} GPU hours)" in epoch


# ---- the tool ----


def test_tiny_config():
    out = tool(TINY)
    assert "fits: 2.4 GB of 80.0 GB" in out
    assert "4 groups x 8 = 32 samples = 4 forwards x 8 batch x 1 process\n" in out
    assert "the run: 40 updates = 40 epochs = 160 groups = 3.33 x 48 clips" in out
    out = tool(TINY, "--processes", 2, "--gpu-memory", 2.1, expect=2)
    assert "2 forwards x 8 batch x 2 processes\n" in out and " GB of 2.1 GB on the GPU" in out
