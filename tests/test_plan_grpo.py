"""The plan of train_flow_grpo.py: closed forms of its counts, on the published model's shape and on the tiny world."""

import dataclasses
import sys

import plan_run
import pytest
import torch
import yaml
from conftest import ROOT

from rewardfl import config, costs, flow, lora, plan, plan_grpo, sde
from rewardfl.backbones.wan import load as wan_load
from rewardfl.costs import Adapter

ADAPTER = Adapter(32, tuple(lora.target_modules("q,k,v,o,ffn.0,ffn.2")))
SIGMAS = tuple(flow.linear_sigmas(8, 5.0).tolist())
EXPERTS = ("high_noise",) * 3 + ("low_noise",) * 5  # at boundary 0.9
RUN = plan_grpo.GrpoRun(
    sigmas=SIGMAS, experts=EXPERTS, active=(3, 4, 5), trained=("low_noise",), kl=False, levers=plan_grpo.GrpoLevers(),
    group_size=4, groups=6, drawn=True, windows=((3, 4), (4, 5)), steps=2,
)  # fmt: skip
TINY, FULL = "configs/tiny_flow_grpo.yaml", "configs/wan22_flow_grpo.yaml"
SIX = ["grpo.groups=6", "grpo.same_noise_in_group=false", "grpo.window_bounds=null"]  # overrides of TINY
PRESETS = ("flow_grpo", "flow_grpo_fast", "dance_grpo", "guard")


def changed(run=RUN, **fields):
    """The run with other fields, of itself or of its levers."""
    own = {name for name in fields if name in {field.name for field in dataclasses.fields(run)}}
    levers = dataclasses.replace(run.levers, **{name: fields[name] for name in fields if name not in own})
    return dataclasses.replace(run, levers=levers, **{name: fields[name] for name in own})


@pytest.fixture(scope="module")
def published():
    """The published model in bfloat16, 480x832x17."""
    return costs.measure(wan_load.PUBLISHED, torch.bfloat16, 480, 832, 17, ADAPTER)


# ---- compute ----


def test_work_of_a_sample(published):
    expert = published.experts["low_noise"]
    work = plan_grpo.work(published, RUN)
    assert work == pytest.approx(
        {
            "rollout": 3 * expert.forward_frozen + 5 * expert.forward,
            "decode": sum(chunk.forward for chunk in published.chunks),
            "replay forward": 2 * expert.forward,
            "replay recompute": 2 * expert.forward,
            "replay backward": 2 * expert.backward,
            "reference": 0,
        }
    )
    # the same parts cost what they cost in reward feedback learning
    other = plan.Run(
        sigmas=SIGMAS, experts=EXPERTS, active=(3, 4), trained=("low_noise",), coupled=True, kl=True,
        fixed_trajectory=False, levers=plan.Levers(),
    )  # fmt: skip
    same = plan.work(published, other)
    assert {name: same[name] for name in work if name != "reference"} == pytest.approx(
        {name: amount for name, amount in work.items() if name != "reference"}
    )
    # an expert that is not trained answers without an adapter in the rollout; this one is, at its own steps
    high = plan_grpo.work(published, changed(trained=("high_noise",), windows=((0, 1),)))
    assert high["rollout"] == pytest.approx(3 * expert.forward + 5 * expert.forward_frozen)


def test_settings_change_the_work(published):
    expert, base = published.experts["low_noise"], plan_grpo.work(published, RUN)

    def difference(**fields):
        after = plan_grpo.work(published, changed(**fields))
        return {name: after[name] - base[name] for name in base if after[name] != pytest.approx(base[name])}

    replays = {name: base[name] for name in ("replay forward", "replay recompute", "replay backward")}
    assert difference(kl=True) == pytest.approx({"reference": 2 * expert.forward_frozen})
    assert difference(guided=True) == pytest.approx(replays | {"rollout": base["rollout"]})  # doubled
    assert difference(inner_epochs=2) == pytest.approx(replays)
    assert difference(inner_epochs=3, guided=True, kl=True)["reference"] == pytest.approx(12 * expert.forward_frozen)
    assert difference(checkpointing=False) == pytest.approx({"replay recompute": -2 * expert.forward})
    assert difference(updates_per_epoch=3, batch=4, samples_on="cpu", processes=2) == {}
    # by epoch: a window of two steps and twice one of one
    mixed = plan_grpo.work(published, changed(windows=((3, 4), (5,), (5,))))
    assert mixed["replay backward"] == pytest.approx(4 / 3 * expert.backward)


@pytest.mark.parametrize(
    "processes, batch, spread, clips, passes",
    [
        (1, 1, "contiguous", 6, 6),  # six groups of four, a group at a time
        (1, 4, "contiguous", 6, 6),
        (1, 8, "contiguous", 6, 3),  # two groups at a time
        (3, 2, "contiguous", 2, 2),
        (4, 1, "contiguous", 2, 3),  # six samples: a group and half another; new ones come at passes 0, 2 and 4
        (4, 1, "spread", 6, 6),  # one member of each group: nothing is shared
        (2, 2, "spread", 6, 6),
    ],
)
def test_members_of_one_start_share_the_steps_before_the_window(published, processes, batch, spread, clips, passes):
    run = changed(same_noise=True, processes=processes, batch=batch, spread=spread)
    samples = 24 // processes
    if (processes, spread) == (4, "contiguous"):  # the pass at which another process meets a new group counts as well
        clips = passes
    assert plan_grpo.rollout_counts(run, (3, 4)) == [(clips, passes)] * 3 + [(samples, samples // batch)] * 5
    assert plan_grpo.rollout_counts(run, (0, 4)) == [(samples, samples // batch)] * 8
    assert plan_grpo.rollout_counts(changed(run, same_noise=False), (3, 4)) == [(samples, samples // batch)] * 8
    expert = published.experts["low_noise"]
    rolled = plan_grpo.work(published, changed(run, windows=((3, 4), (4, 5))))["rollout"]
    share = clips / samples
    assert rolled == pytest.approx(3 * share * expert.forward_frozen + (4.5 + 0.5 * share) * expert.forward)


def test_copies_count_where_nothing_hides_them(published):
    """An infinitely fast GPU shows every copy; a slow one none but the rounding of 8 bits, in its own memory."""
    expert, fast, slow = published.experts["low_noise"], 1e12, 100

    def shown(tflops, **fields):
        return sum(plan_grpo.exposed_seconds(published, changed(**fields), tflops))

    swapped = expert.weights / 50e9
    assert shown(fast) == 0
    assert shown(fast, untrained="cpu_swap") == pytest.approx(3 * swapped, rel=1e-3)
    assert shown(fast, untrained="cpu_swap", batch=4, guided=True) == pytest.approx(2 * 3 * swapped / 4, rel=1e-3)
    assert shown(fast, untrained="cpu_swap", same_noise=True) == pytest.approx(3 * swapped / 4, rel=1e-3)
    half = expert.forward_frozen / (0.5 * swapped) / 1e12  # a clip takes half as long as the copy
    assert shown(half, untrained="cpu_swap") == pytest.approx(3 * 0.5 * swapped)
    assert shown(half, untrained="cpu_swap", batch=4) == 0
    assert shown(fast, offload_inputs=True, inner_epochs=2, guided=True) == pytest.approx(
        2 * 4 * 2 * expert.stored / 50e9, rel=1e-3
    )  # there and back, two inner epochs of two graphs, two steps
    kept = plan_grpo.kept_bytes(published, changed(samples_on="cpu")) / 50e9
    assert shown(fast, samples_on="cpu", inner_epochs=3) == pytest.approx(4 * kept, rel=1e-3)
    for fields in ({"untrained": "cpu_swap"}, {"offload_inputs": True}, {"samples_on": "cpu"}):
        assert shown(slow, **fields) == 0
    assert shown(slow, untrained="fp8", batch=2) == pytest.approx(3 * 3 * expert.weights_fp8 / 3e12 / 2)
    seconds = plan_grpo.seconds(published, changed(untrained="cpu_swap"), fast)
    work = sum(plan_grpo.work(published, RUN).values()) / (fast * 1e12)
    assert seconds == pytest.approx(work + shown(fast, untrained="cpu_swap"))


# ---- memory and disk ----


def test_memory(published):
    expert, latents = published.experts["low_noise"], 16 * 5 * 60 * 104 * 4
    needs = plan_grpo.memory(published, RUN)
    assert needs.resident["LoRA, gradient, Adam"] == 16 * expert.adapter_parameters
    assert needs.resident["averaged LoRA"] == 4 * expert.adapter_parameters
    conditioning = 512 * 4096 * 2 + 20 * 5 * 60 * 104 * 4
    assert plan_grpo.kept_bytes(published, RUN) == (3 + 2) * latents + conditioning  # x 3, 4, 5; two means
    assert needs.resident["the epoch's samples"] == 24 * (5 * latents + conditioning)
    assert plan_grpo.kept_bytes(published, changed(guarded=False)) == 3 * latents + conditioning
    apart = changed(windows=((3,), (3, 5)))  # x 3, 4, 5, 6, two means, in the widest window
    assert plan_grpo.kept_bytes(published, apart) == (4 + 2) * latents + conditioning
    host = plan_grpo.memory(published, changed(samples_on="cpu", processes=2, untrained="cpu_swap"))
    assert host.host == {  # a step's own x and x_next, and its mean
        "expert that is swapped": expert.weights, "the epoch's samples": 12 * (6 * latents + conditioning),
    }  # fmt: skip
    assert "the epoch's samples" not in host.resident
    assert needs.host == {}
    pixels, steady = 3 * 17 * 480 * 832, published.chunks[-1]
    assert needs.phases["decode"] == {
        "one chunk, its caches and the next's": steady.caches_in + steady.peak,
        "frames by chunk and in one": 2 * 2 * pixels,
    }
    assert needs.phases["reward"] == {"frames, also float32": (2 + 4) * pixels}
    assert needs.phases["rollout"] == {"one block, no graph": 2 * expert.block_input + expert.block_peak_frozen}
    assert needs.phases["replay"] == {
        "block inputs": expert.stored, "recompute and backward of one": expert.block_peak,
    }  # fmt: skip
    assert list(needs.by_phase) == ["rollout", "decode", "reward", "replay", "encode"]  # no VJP of the decoder
    for phase, parts in plan_grpo.memory(published, changed(batch=4)).phases.items():
        assert parts == {name: 4 * amount for name, amount in needs.phases[phase].items()}
    guided = plan_grpo.memory(published, changed(guided=True)).phases
    assert guided["replay"]["block inputs"] == 2 * expert.stored  # both graphs live until the backward pass
    assert guided["replay"]["recompute and backward of one"] == expert.block_peak
    assert guided["rollout"] == needs.phases["rollout"]  # one pass after the other
    offloaded = plan_grpo.memory(published, changed(guided=True, offload_inputs=True, batch=2))
    assert offloaded.host == {"block inputs": 2 * 2 * expert.stored}
    assert offloaded.phases["replay"]["two block inputs"] == 2 * 2 * expert.block_input
    kept = plan_grpo.memory(published, changed(guided=True, checkpointing=False)).phases["replay"]
    assert kept["all blocks, saved"] == 2 * expert.layers * expert.block_saved


@pytest.mark.parametrize("window", [(3, 4), (3, 5), (0, 1, 2, 6)])
def test_what_is_kept_is_what_a_rollout_leaves(published, window):
    """The bytes of its tensors, each storage once: where they were made, and after they have moved."""
    kernel = sde.Kernel("flow", 0.7, torch.tensor(SIGMAS))
    x = torch.zeros(1, *published.shape)
    _, steps = sde.rollout(lambda x, step: x, x, kernel, window, lambda step: torch.ones_like(x))

    def nbytes(steps):
        tensors = [tensor for step in steps for tensor in (step.x, step.x_next, step.mean)]
        return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())

    for place, moved in (("gpu", steps.values()), ("cpu", [step.to("meta") for step in steps.values()])):
        kept = plan_grpo.kept_bytes(published, changed(windows=(window,), samples_on=place))
        assert kept - published.text_bytes - published.image_bytes == nbytes(moved)


def test_placement_of_the_other_expert(published):
    """As in reward feedback learning."""
    expert, base = published.experts["high_noise"], plan_grpo.memory(published, RUN).peak
    fp8 = plan_grpo.memory(published, changed(untrained="fp8")).peak
    assert base - fp8 == expert.weights - expert.weights_fp8
    swap = plan_grpo.memory(published, changed(untrained="cpu_swap")).peak
    assert base - swap == expert.weights - expert.other_weights - 2 * expert.block_weights


def test_disk(published):
    adapter = 4 * published.experts["low_noise"].adapter_parameters
    # the averaged adapter; Adam's moments, the last weights, the average
    assert plan_grpo.checkpoint_bytes(published, RUN) == (adapter, 4 * adapter)
    run = changed(updates_per_epoch=2, inner_epochs=2, save_steps=6, steps=20)  # five epochs of four updates
    assert (run.updates, run.epochs) == (4, 5)
    assert plan_grpo.epochs_due(run, 6) == {2, 3, 5}  # updates 6, 12, 18
    assert plan_grpo.epochs_due(run, 40) == {5}
    assert plan_grpo.epochs_due(changed(steps=None), 6) is None
    text = plan_grpo.report(published, dataclasses.replace(run, clips=10), 400, None)
    assert f"3 in 20 steps: {plan.size(15 * adapter)}" in text
    assert "of 10 clips: 66.9 MB" in text


# ---- what to switch on ----

RUNS = [
    RUN,
    changed(batch=12, checkpointing=False),
    changed(guided=True, batch=2, groups=600),
    changed(trained=("high_noise", "low_noise"), windows=((2, 3),)),
]


def test_every_option_is_a_setting():
    """Each key and value is one that the configuration takes, and reading it gives the options' own run."""
    keys = set()
    for run in RUNS:
        for option in run.options():
            levers = {
                plan.KEYS[field.name]: getattr(run.levers, field.name) for field in dataclasses.fields(run.levers)
            }
            settings = levers | option.settings | {"grpo.groups": 15}
            read = config.load(
                ROOT / FULL, [f"{key}={yaml.safe_dump(value).split()[0]}" for key, value in settings.items()]
            )
            assert plan_grpo.run_of(read, wan_load.PUBLISHED, None, 2, 1).levers == option.on(run).levers
            keys |= set(option.settings)
    assert keys == {plan.KEYS[field.name] for field in dataclasses.fields(plan_grpo.GrpoLevers)}
    assert [option.settings for option in RUNS[1].options() if "batch" in option.fields] == [
        {"train.per_device_train_batch_size": 6}  # half of it: groups and samples stay
    ]
    assert not any("untrained" in option.fields for option in RUNS[3].options())  # there is none


@pytest.mark.parametrize("run", RUNS, ids=range(len(RUNS)))
@pytest.mark.parametrize("memory", [45, 66, 80])
def test_recommendation(published, run, memory):
    chosen = plan.recommend(published, run, memory * 1e9, 400)
    fit = plan_grpo.fits(published, plan.with_options(run, chosen), memory * 1e9)
    if fit and chosen:
        assert not plan_grpo.fits(published, run, memory * 1e9)
        for option in chosen:
            rest = [other for other in chosen if other is not option]
            assert not plan_grpo.fits(published, plan.with_options(run, rest), memory * 1e9)
    text = plan_grpo.report(published, run, 400, memory * 1e9)
    assert ("does not fit" in text) == (not plan_grpo.fits(published, run, memory * 1e9))
    assert ("no setting makes it fit" in text) == (not fit)
    for option in chosen:
        for key, value in option.settings.items():
            assert f"{key}: {str(value).lower()}" in text


def test_what_is_recommended(published):
    def settings(run, memory, tflops=400):
        chosen = plan.recommend(published, run, memory * 1e9, tflops)
        assert plan_grpo.fits(published, plan.with_options(run, chosen), memory * 1e9)
        return {key: value for option in chosen for key, value in option.settings.items()}

    assert settings(RUN, 80) == {}
    assert settings(changed(groups=600), 80) == {"grpo.samples_on": "cpu"}
    assert settings(changed(batch=12), 80) == {
        "train.use_gradient_checkpointing_offload": True, "train.per_device_train_batch_size": 3,
        "grpo.samples_on": "cpu",
    }  # fmt: skip
    assert settings(RUN, 45) == {"experts.untrained": "cpu_swap"}
    # what computes the same numbers comes before what is faster, on a GPU that has to wait for the host
    assert settings(RUN, 60, 1e6)["experts.untrained"] == "cpu_swap"


# ---- the configuration ----


def test_run_of_a_configuration(monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = [
        "sample.guidance_scale=3.5", "grpo.kl_weight=0.1", "grpo.spread=spread", "grpo.same_noise_in_group=true",
        "grpo.updates_per_epoch=3", "grpo.inner_epochs=2", "grpo.sde=dance", "grpo.noise_level=0.3", "grpo.window=list",
        "grpo.window_steps=[4,6]", "grpo.samples_on=cpu", "experts.untrained=fp8", "train.max_steps=12",
        "train.use_gradient_checkpointing=true", "train.use_gradient_checkpointing_offload=true", "run.save_steps=9",
        "evaluation.eval_noises=2", "evaluation.eval_inference_steps=4", "evaluation.eval_steps=5",
        "train.per_device_train_batch_size=2",
    ]  # fmt: skip
    packs = (ROOT / "assets/tiny_world/faces" / name for name in ("reward", "judge"))
    pipeline = ROOT / "assets/tiny_world/pipeline"
    run = plan_grpo.run_of(config.load(TINY, [*SIX, *settings]), pipeline, 48, 12, 4)
    assert run == plan_grpo.GrpoRun(
        sigmas=SIGMAS, experts=EXPERTS, active=(4, 6), trained=("low_noise",), kl=True,
        levers=plan_grpo.GrpoLevers("fp8", True, True, 2, "cpu"), save_steps=9, steps=12, clips=48,
        pack_bytes=sum(file.stat().st_size for pack in packs for file in pack.glob("*.onnx")),
        group_size=8, groups=6, processes=4, spread="spread", same_noise=True, updates_per_epoch=3, inner_epochs=2,
        sde="dance", noise_level=0.3, guided=True, drawn=False, windows=((4, 6), (4, 6)),
        eval_experts=("high_noise",) * 2 + ("low_noise",) * 2, eval_videos=48, eval_steps=5,
    )  # fmt: skip
    drawn = plan_grpo.run_of(config.load(TINY, SIX), pipeline, None, None, 1)  # nothing known of its length
    assert drawn.drawn and drawn.active == (3, 4, 5, 6) and drawn.epochs is None
    assert set(drawn.windows) == {(3, 4), (4, 5), (5, 6)} and len(drawn.windows) == 100
    with pytest.raises(config.ConfigError, match="grpo.window: .*model.trainable_models"):  # the tie is not low noise's
        plan_grpo.run_of(
            config.load(TINY, [*SIX, "sample.shift=3", "sample.num_inference_steps=4", "grpo.window=list",
            "grpo.window_steps=[1]", "grpo.window_bounds=null"]), ROOT / "assets/tiny_world/pipeline", 4, 2, 1,
        )  # fmt: skip
    window = plan.windows(config.load(TINY, SIX), EXPERTS)
    assert drawn.windows == tuple(window(epoch) for epoch in range(100))
    without = ["evaluation.eval_clips=null", "grpo.window_bounds=[4,6]"]
    without = plan_grpo.run_of(config.load(TINY, without), pipeline, None, 1, 1)
    assert without.eval_experts == () and without.eval_videos is None and without.active == (4, 5)


def test_total_steps():
    passes = ["train.max_steps=null", "train.num_train_epochs=2", "grpo.updates_per_epoch=3", "grpo.inner_epochs=2"]
    cfg = config.load(ROOT / TINY, [*SIX, *passes])
    assert plan_grpo.total_steps(cfg, 20) == 7 * 6  # 40 visits of clips by 6 groups at a time: 7 epochs
    assert plan_grpo.total_steps(cfg, None) is None
    assert plan_grpo.total_steps(config.load(ROOT / TINY), None) == 40


def test_overview(monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = ["grpo.updates_per_epoch=2", "grpo.inner_epochs=2", "sample.guidance_scale=2", "data.num_frames=9"]
    cfg = config.load(TINY, [*SIX, *settings, "train.per_device_train_batch_size=4"])
    text = plan_grpo.overview(cfg, plan_grpo.run_of(cfg, ROOT / "assets/tiny_world/pipeline", 48, 40, 3))
    assert text.startswith(config.dump(cfg))
    assert "6 groups x 8 = 48 samples = 4 forwards x 4 batch x 3 processes\n" in text
    assert "per process 64 forwards without gradient: 4 batches x 8 steps x 2 (guidance)\n" in text
    assert "an update: 24 samples; per process 8 forwards with gradient: 2 batches x 2 window steps x 2" in text
    assert "updates: 2 per epoch x 2 inner epochs = 4\n" in text
    assert "the run: 40 updates = 10 epochs = 60 groups = 1.25 x 48 clips\n" in text
    assert "SDE: flow, noise level 0.7, window 2 of [3, 4, 5, 6], drawn in each epoch: [4, 5], [3, 4], [5, 6], " in text


def test_forwards_of_a_shared_start_are_a_mean_over_the_windows():
    run = changed(same_noise=True, batch=2)  # twelve batches; six groups; three or four steps once per group
    assert "per process 75 forwards without gradient" in plan_grpo.arithmetic(run)[1]  # 6 * 3.5 + 12 * 4.5


# ---- the table ----


def cells(run, step):
    return plan_grpo.sigma_table(run)[1 + step].split()


def test_sigma_table():
    """step, sigma, timestep, expert, window, and (std, weight, noise) of flow, dance and cps."""
    assert cells(RUN, 0) == [
        "0", "1.0000", "1000.000", "high_noise", "-", "0.7000", "0.0397", "1.038", "0.1167", "0.2381", "1.000",
        "0.8663", "0.0481", "1.000",
    ]  # fmt: skip
    step = (SIGMAS[6], SIGMAS[7], 0.7, SIGMAS[1])
    for i, kind in enumerate(("flow", "dance", "cps")):
        functions = (flow.transition_std, flow.gradient_weight, flow.noise_scale_error)
        expected = [function(kind, *step) for function in functions]
        assert [float(cell) for cell in cells(RUN, 6)[5 + 3 * i : 8 + 3 * i]] == pytest.approx(expected, abs=6e-4)
    assert [cells(RUN, i)[13] for i in range(7)] == ["1.000"] * 7  # cps leaves the noise that it should
    assert cells(RUN, 7)[5:] == ["0.3819", "1.3584", "-", "0.4518", "1.2384", "-", "0.0000", "-", "-"]
    assert [cells(RUN, i)[4] for i in range(8)] == ["-"] * 3 + ["drawn"] * 3 + ["-"] * 2
    assert cells(changed(drawn=False), 3)[4] == "trained"
    assert cells(changed(noise_level=1.2), 0)[5] == "1.2000"
    assert cells(changed(noise_level=1.2), 0)[11:] == ["-"] * 3  # there is no such cps


def test_costs_in_words(published):
    run = changed(
        groups=60, processes=2, updates_per_epoch=2, inner_epochs=2, steps=8, eval_experts=EXPERTS, eval_videos=5
    )
    run = changed(run, eval_steps=4)
    per_sample, seconds = sum(plan_grpo.work(published, run).values()), plan_grpo.seconds(published, run, 400)
    text = "\n".join(plan_grpo.work_table(published, run, 400))

    def line(start):
        (found,) = [line for line in text.splitlines() if line.startswith(start)]
        return found

    update = f"{60 * per_sample / 1e15:.4g} PFLOP, {30 * seconds:.4g} s"  # 240 samples, four updates; two processes
    assert line("one update of 120 samples").endswith(update)
    assert f"{240 * per_sample / 1e15:.4g} PFLOP, {120 * seconds:.4g} s" in line("one epoch of 240 samples")
    assert f"{480 * per_sample / 1e15:.4g} PFLOP" in line("the run of 2 epochs, without its evaluations")
    expert = published.experts["low_noise"]
    video = 3 * expert.forward_frozen + 5 * expert.forward + sum(chunk.forward for chunk in published.chunks)
    assert plan_grpo.evaluation_flops(published, run) == video
    spent = f"{5 * video / 1e15:.4g} PFLOP, {3 * video / 4e14:.4g} s; 3 in the run"  # three on one of the processes
    assert line("an evaluation of 5 videos (8 steps)").endswith(spent)
    assert "evaluation of" not in "\n".join(plan_grpo.work_table(published, RUN, 400))
    unknown = "\n".join(plan_grpo.work_table(published, changed(run, steps=None, eval_videos=None), 400))
    assert "the run of" not in unknown and f"a video of the evaluation (8 steps): {video / 1e15:.4g} PFLOP" in unknown
    long = plan_grpo.work_table(published, run, 1)
    assert any(f"{240 * seconds * 400 / 3600:.4g} GPU hours" in each for each in long)


# ---- the tool ----


def tool(monkeypatch, capsys, *arguments):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["plan_run.py", "--config", *arguments])
    code = plan_run.main()
    out = capsys.readouterr()
    return code, out.out, out.err


def test_tiny_config(monkeypatch, capsys):
    code, out, _ = tool(monkeypatch, capsys, TINY)
    assert code == 0 and "fits: 2.2 GB of 80.0 GB" in out
    assert "4 groups x 8 = 32 samples = 4 forwards x 8 batch x 1 process\n" in out
    assert "the run: 40 updates = 40 epochs = 160 groups = 3.33 x 48 clips" in out
    first = next(line.split() for line in out.splitlines() if line.startswith("   0  1.0000"))
    assert first[5] == "0.7000" and first[13] == "1.000"  # std of Flow-SDE is the noise level there, cps is exact
    assert "an evaluation of 24 videos (8 steps)" in out and "; 5 in the run" in out
    code, out, _ = tool(monkeypatch, capsys, TINY, "--processes", "2")
    assert code == 0 and "2 forwards x 8 batch x 2 processes\n" in out
    code, out, _ = tool(monkeypatch, capsys, TINY, "--gpu-memory", "2.1")
    assert code == 2 and "does not fit: 2.2 GB of 2.1 GB" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--processes", "5"), "do not divide into forward passes of world 5 x batch 8 = 40; the nearest that do"),
        (("grpo.updates_per_epoch=5",), "grpo.updates_per_epoch must divide the 4 forward passes"),
        (("grpo.window_bounds=[0,3]",), "no 2 steps in a row among the usable []"),
        (("data.height=70",), "multiple of 16"),
    ],
)
def test_what_cannot_work(monkeypatch, capsys, arguments, message):
    code, out, error = tool(monkeypatch, capsys, TINY, *arguments)
    assert code == 2 and error.startswith("error: ") and message in error and out == ""


def test_processes(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        tool(monkeypatch, capsys, TINY, "--processes", "0")
    assert stop.value.code == 2 and "--processes must be at least 1" in capsys.readouterr().err
    # of train_reward_fl.py they make fewer and larger updates: 48 clips, 4 per GPU
    arguments = ("configs/tiny_face.yaml", "train.max_steps=null", "train.num_train_epochs=2")
    for processes, steps in ((1, 24), (3, 8)):
        code, out, _ = tool(monkeypatch, capsys, *arguments, "--processes", str(processes))
        assert code == 0 and f" in {steps} steps" in out


# ---- the files ----

NEEDS = dict.fromkeys([FULL, *(f"configs/presets/{name}.yaml" for name in PRESETS)], 80) | {
    "configs/presets/dance_grpo.yaml": 141
}


@pytest.mark.parametrize("file, memory", NEEDS.items())
def test_the_files_fit_the_gpus_that_they_name(monkeypatch, capsys, file, memory):
    code, out, _ = tool(monkeypatch, capsys, file, "--processes", "8", "--gpu-memory", str(memory))
    assert code == 0 and "\nfits: " in out
    assert f"{memory} GB" in (ROOT / file).read_text()
    assert "published; no configurations" in out and "high_noise" in out
    if memory != 80:
        smaller = ["lora.lora_rank=32", "lora.lora_alpha=64", "train.use_gradient_checkpointing_offload=true"]
        assert all(setting in (ROOT / file).read_text() for setting in smaller)
        code, _, _ = tool(monkeypatch, capsys, file, *smaller, "--processes", "8")
        assert code == 0


def idle_keys(written, cfg):
    """The keys of a file that do nothing, given what the others say."""
    section, several = cfg.grpo, sum(term.weight > 0 for term in cfg.reward.others.values()) > 0
    works = {
        "grpo.window_steps": section.window == "list",
        "grpo.window_size": section.window == "random",
        "grpo.window_fraction": section.window == "fraction",
        "grpo.window_bounds": section.window != "list",
        "grpo.advantage_of": several or bool(cfg.reward.coverage_weight or cfg.reward.motion_weight),
        "sample.negative_prompt": cfg.sample.guidance_scale != 1,
        "model.distill_lora_mode": bool(cfg.model.distill_lora_high or cfg.model.distill_lora_low),
        "data.height": cfg.data.max_pixels is None,
        "data.width": cfg.data.max_pixels is None,
        "train.num_train_epochs": cfg.train.max_steps is None,
        "train.use_gradient_checkpointing_offload": cfg.train.use_gradient_checkpointing,
        "reward.settings": cfg.reward.name != "face_identity",
        **{f"evaluation.{key}": cfg.evaluation.eval_clips is not None for key in written.get("evaluation", ())},
    }
    return [key for part, keys in written.items() for key in (f"{part}.{k}" for k in keys) if not works.get(key, True)]


@pytest.mark.parametrize("file", [TINY, *NEEDS])
def test_no_key_does_nothing(file):
    written = yaml.safe_load((ROOT / file).read_text())
    cfg = config.load(ROOT / file)
    assert isinstance(cfg, config.FlowGrpoConfig) and idle_keys(written, cfg) == []
    assert all(keys for keys in written.values())


def test_idle_keys_are_found():
    written = {"grpo": {"window_size": 2, "group_size": 8}, "evaluation": {"eval_steps": 5}}
    changes = [*SIX, "grpo.window=list", "grpo.window_steps=[3]", "evaluation.eval_clips=null"]
    assert idle_keys(written, config.load(ROOT / TINY, changes)) == ["grpo.window_size", "evaluation.eval_steps"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_recipes_numbers_have_a_source(name):
    """Every number of grpo, and of how it is optimised and sampled, says where it is from."""
    section = None
    for line in (ROOT / "configs" / "presets" / f"{name}.yaml").read_text().splitlines():
        if line and not line.startswith((" ", "#")):
            section = line.rstrip(":")
        key = line.strip().partition(":")[0]
        ours = ("groups", "max_steps", "per_device_train_batch_size", "window", "samples_on", "window_bounds")
        if section in ("grpo", "train", "sample") and line.startswith("  ") and key not in ours:
            assert any(word in line for word in ("# repo", "# lora", "# the paper", "# Wan2.2")), line
