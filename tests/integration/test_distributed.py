"""The scripts as `accelerate launch` starts them with each file of configs/accelerate, on the CPU.

One process with accumulation, and two under data parallelism, FSDP2 or DeepSpeed ZeRO-2 with its optimizer in host
memory, are one run: the same gradients and losses to rounding, the same weights on every process, and checkpoints that
any of them continues. Every launch is asked what it really was. FSDP2's is accelerate's own, made to believe in GPUs.
"""

import dataclasses
import json
import os
import shutil

import pytest
import runs
import torch
from conftest import ROOT, run_python
from lora_dialects import read_adapter
from runs import CACHE, FACE_ALONE, RED, SMALL, launch, launch_environment, launcher, metrics, needs_deepspeed, table

from rewardfl import lora
from rewardfl.training import checkpoint, setup_data

# the first test of a launcher also makes the runs that it is compared with
pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow(240)]
# DeepSpeed compiles its optimizer where it has not run before: minutes
LAUNCHERS = [
    "ddp", pytest.param("fsdp2", marks=pytest.mark.long),
    pytest.param("zero2_offload", marks=[needs_deepspeed, pytest.mark.nightly]),
]  # fmt: skip
REALLY = {  # by yaml: what must have run
    "cpu": {"type": "NO", "processes": 1, "wrapper": "Experts"},
    "ddp": {"type": "MULTI_CPU", "processes": 2, "wrapper": "Experts"},
    "fsdp2": {"type": "FSDP", "processes": 2, "wrapper": "FSDPExperts"},
    "zero2_offload": {"type": "DEEPSPEED", "processes": 2, "wrapper": "DeepSpeedEngine"},
}
COMMON = [
    "lora.lora_rank=4", *SMALL, *FACE_ALONE, "run.cpu_threads=1", "run.sample_videos=1", "run.log_with=none",
    "train.lr_scheduler_type=constant", "train.learning_rate=1e-4", "train.warmup_steps=0", "train.max_grad_norm=0.01",
    f"data.cache_dir={CACHE}", f"data.file_name={table(f'{CACHE}/four.csv', 'train', 4)}",
]  # fmt: skip
ANCHOR = ["anchor.weight=0.5", "anchor.draws=2", "anchor.measured_clips=3"]
# two replayed steps, one of each expert, so that neither adapter takes part in every backward; and the KL whose
# gradient is taken outside of `backward`, through the wrapped model with the adapter off. The second update has an
# infinite gradient on the last process, and in none of them is there anybody to be seen in the fourth clip
REWARD_FL = [
    "train_reward_fl.py", "--config", "tests/face.yaml", *COMMON, "sample.num_inference_steps=3",
    "sample.mid_timestep=1", "sample.final_timestep=2", "sample.gradient_mode=chain", "model.trainable_models=dit,dit2",
    "reward.kl_gradient=exact", "train.per_device_train_batch_size=1", "run.save_steps=1",
    "reward.held_out_model_path=null", "reward.kl_weight=9", *ANCHOR,
]  # fmt: skip
# two updates an epoch, each of a group of four whose members are on both processes
GRPO = [
    "train_flow_grpo.py", "--config", "tests/grpo.yaml", *COMMON, "sample.num_inference_steps=4",
    "grpo.groups=2", "grpo.group_size=4", "grpo.window.size=2", "grpo.kl_weight=0.01",
    "grpo.updates_per_epoch=2", "train.per_device_train_batch_size=1", "--trust-code", *RED,
    "grpo.window.within=[1, 3]", "grpo.same_noise_in_group=true", "run.save_steps=2",
    "reward.terms.score.parts.coverage=0",
    "evaluation.eval_inference_steps=2", "train.max_steps=2", "model.trainable_models=dit,dit2",
    f"evaluation.eval_clips={table(f'{CACHE}/one.csv', 'eval', 1)}", *ANCHOR,
]  # fmt: skip
# two epochs of two updates; the old policy, the base and the clips hold the policy. Every update draws all steps:
# DeepSpeed moves an expert without a gradient by its momentum, and torch's AdamW does not
FORWARD = [
    "train_forward_rl.py", "--config", "tests/forward.yaml", *COMMON, "sample.num_inference_steps=4",
    "forward.objective=nft", "forward.groups=2", "forward.group_size=4",
    "forward.updates_per_epoch=2", "forward.draws=4", "forward.old_policy.rate=0.1", "forward.old_policy.anchor=0.1",
    "forward.base_anchor=0.1",
    "train.per_device_train_batch_size=1", "--trust-code", *RED, "reward.motion_weight=0", "run.save_steps=2",
    "train.max_steps=4", "model.trainable_models=dit,dit2", *ANCHOR,
]  # fmt: skip
# a best video may be on either process, and is trained on by one of them
BEST = [
    *FORWARD, "forward.objective=best", "forward.groups=4", "forward.group_size=2", "forward.old_policy.rate=0.001",
    "forward.old_policy.anchor=0", "train.memory.use_gradient_checkpointing=true",
]  # fmt: skip

# groups of two that differ too little are left out, on one process more than on the other
FEW = {"groups": 4, "group_size": 2, "updates_per_epoch": 1}
FILTERED = {
    name: [
        *words, *(f"{name}.{key}={value}" for key, value in FEW.items()), "train.max_steps=2",
        f"{name}.advantage.smallest_spread={limit}", "train.memory.use_gradient_checkpointing=true",
    ]
    for name, words, limit in (("grpo", GRPO, 0.02), ("forward", FORWARD, 0.009))
}  # fmt: skip


def chosen_runs(out, start):
    """Return best's run, and dpo's from rollouts and from a table. Its reference is best's adapter in `start`."""
    dpo = [*BEST, "forward.objective=dpo", f"lora.init_from={start / 'best' / 'checkpoints' / 'latest'}"]
    settings = {"best": BEST, "dpo": dpo, "pairs": [*dpo, *runs.PAIRS]}
    return [[*words, f"run.output_dir={out / name}"] for name, words in settings.items()]


def run(name, out, *runs, **more):
    """Run scripts in the same processes, into out/<script> or their output_dir; return all processes' accounts of each.

    Check that they were what REALLY says.
    """
    watcher = [str(ROOT / "tests" / "support" / "distributed_worker.py"), str(out / "ranks")]
    for script, *arguments in runs:
        named = any(argument.startswith("run.output_dir=") for argument in arguments)
        watcher += ["--", script, *arguments, *([] if named else [f"run.output_dir={out / script}"])]
    done = run_python(launcher(name, *watcher), cwd=ROOT, env=launch_environment(name, **more), timeout=1200)
    files = sorted((out / "ranks").glob("rank-*.json"))
    assert len(files) == REALLY[name]["processes"], done.stdout[-2000:] + done.stderr[-4000:]
    accounts = list(zip(*(json.loads(file.read_text()) for file in files), strict=True))
    for ranks in accounts:
        for rank in ranks:
            assert rank["code"] == 0, done.stdout[-2000:] + done.stderr[-4000:]
            assert {key: rank[key] for key in REALLY[name]} == REALLY[name]
        # all processes hold the same weights after every update, and no gradient is left over
        first, *others = [[(u["digest"], u["gradients_left"]) for u in rank["updates"]] for rank in ranks]
        assert all(other == first for other in others) and all(left == 0 for _, left in first)
    assert len(accounts) == len(runs)
    return accounts


# -- every place of the boundary among the active steps, on a bfloat16 base


ONE_UPDATE = [
    "sample.num_inference_steps=4", "train.max_steps=1", "model.dtype=bfloat16", "run.sample_videos=0",
    "train.max_grad_norm=1.0", "train.memory.use_gradient_checkpointing=true",
]  # fmt: skip
ONE_GROUP = [
    "grpo.groups=1", "grpo.updates_per_epoch=1", "grpo.clip_range=1e-2", "evaluation.eval_clips=null",
]  # fmt: skip
BOTH = "model.trainable_models=dit,dit2"
# steps 0 and 1 are the high-noise expert's. A frozen expert's step before the first trained one is refused
REWARD_PLACES = {
    "low": ["model.trainable_models=dit2", "sample.mid_timestep=2", "sample.final_timestep=3"],
    "high": ["model.trainable_models=dit", "sample.mid_timestep=0", "sample.final_timestep=1"],
    "frozen last": ["model.trainable_models=dit", "sample.mid_timestep=1", "sample.final_timestep=3"],
    "both": [BOTH, "sample.mid_timestep=1", "sample.final_timestep=2"],
    "both, apart": [BOTH, "sample.active_steps=[0,3]", "sample.final_timestep=3", "sample.gradient_mode=drtune"],
    "one step": [
        "model.trainable_models=dit2", "sample.gradient_mode=last", "sample.final_timestep=3", "sample.mid_timestep=4",
    ],
    "endpoint": [
        "model.trainable_models=dit2", "sample.gradient_mode=endpoint", "sample.final_timestep=3",
        "reward.kl_weight=0", "reward.kl_gradient=reference_constant", "train.ema_decay=0.5", "train.max_steps=3",
        "sample.mid_timestep=4",
    ],
}  # fmt: skip
REWARD_PLACES["verdict"] = [
    *REWARD_PLACES["endpoint"], "sample.endpoint_length=[0.003,0.02]", "sample.verdict={tau: 0.01, keep: 2}",
]  # fmt: skip
GUIDED = ["sample.guidance_scale=3", "sample.negative_prompt=a blurred picture"]
REWARD_PLACES |= {
    "guided": [*REWARD_PLACES["both"], *GUIDED],
    "guided, half": [*REWARD_PLACES["both"], *GUIDED, "sample.guidance_gradient=conditional"],
}
POLICY_PLACES = {
    "high": ["model.trainable_models=dit", "grpo.window.within=[0, 2]"], "both": [BOTH], "guided": [BOTH, *GUIDED],
}  # fmt: skip
# by default one of those that went wrong before; `make chaos` runs all
ALL_PLACES = [*(f"reward, {name}" for name in REWARD_PLACES), *(f"policy, {name}" for name in POLICY_PLACES)]
PLACES = os.environ.get("PLACES", "reward, both; reward, verdict").split("; ")
PLACES = ALL_PLACES if PLACES == ["all"] else PLACES


def placed_runs(folder, accumulation):
    """The filtered runs, and one for each place, into folder/<place>."""
    runs = [[*words, f"run.output_dir={folder / name}"] for name, words in FILTERED.items()]
    for place in PLACES:
        script, _, name = place.partition(", ")
        if script == "reward":
            words = [*REWARD_FL, *ONE_UPDATE, f"train.gradient_accumulation_steps={accumulation}", *REWARD_PLACES[name]]
        else:
            words = [*GRPO, *ONE_UPDATE, *ONE_GROUP, *POLICY_PLACES[name]]
        runs.append([*words, f"run.output_dir={folder / place}"])
    return runs


FL, PG, FORWARD_RL = "train_reward_fl.py", "train_flow_grpo.py", "train_forward_rl.py"  # folders with runs


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return account and folder of one process: four updates of four clips each, two by policy gradient, and one for
    each place of the boundary, of two clips."""
    out = tmp_path_factory.mktemp("one")
    rewards = [*REWARD_FL, "train.gradient_accumulation_steps=4", "train.max_steps=4"]
    places = [*chosen_runs(out, out), *placed_runs(out, accumulation=2)]
    accounts = run("cpu", out, rewards, GRPO, FORWARD, *places, NOBODY_ON="3", BREAK_GRADIENT="0:1")
    return accounts[0][0], out


@pytest.fixture(scope="module", params=LAUNCHERS)
def double(request, single, tmp_path_factory):
    """Return the launcher, the accounts by run, and the folder of two processes of two micro-batches each.

    They make the second and third of these updates, from one process's checkpoint, with kept graphs, all by policy
    gradient, and all places, of one clip each. Under data parallelism the blocks of the places wait in host memory.
    """
    out = tmp_path_factory.mktemp(request.param)
    shutil.copytree(single[1] / FL, out / FL, symlinks=True)
    for step in (2, 3, 4):
        shutil.rmtree(out / FL / "checkpoints" / f"step-{step:06d}")
    graphs = [
        "train.memory.active_graphs=keep_on_device",
        f"train.memory.kept_steps={1 if request.param == 'ddp' else 2}",
    ]
    rewards = [*REWARD_FL, *graphs, "train.gradient_accumulation_steps=2", "train.max_steps=3"]
    places = [*chosen_runs(out, single[1]), *placed_runs(out, accumulation=1)]
    if request.param == "ddp":  # the same numbers, whose weights wait in host memory
        places = [[*words, "train.memory.trained=cpu_swap"] for words in places]
    accounts = run(request.param, out, rewards, GRPO, FORWARD, *places, NOBODY_ON="3", BREAK_GRADIENT="1:0")
    return request.param, accounts, out


def assert_same_lines(actual, expected, keys, rel=1e-4):
    for a, b in zip(actual, expected, strict=True):
        for key in keys:
            assert a[key] == pytest.approx(b[key], rel=rel), (a["step"], key)


def assert_same_adapter(actual, expected, step, moved_by=1e-2, whole_by=1e-5):
    """To rounding; what moved is less alike, because Adam's first steps divide rounding by rounding.

    Gradients that were not reduced would put it 1 apart.
    """
    files = sorted((expected / "checkpoints" / step).glob(f"*/{lora.WEIGHTS_NAME}"))
    assert files
    for file in files:
        b = read_adapter(file)
        a = read_adapter(actual / file.relative_to(expected))
        apart = {name: a[name] - b[name] for name in b}
        moved = [name for name in b if "lora_B" in name]
        assert norm(apart.values()) <= whole_by * norm(b.values()), file
        change, size = (norm(each[name] for name in moved) for each in (apart, b))
        assert size > 0 and change < moved_by * size, file


def norm(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).norm()


def assert_same_moments(folders, step):
    """Compare the optimizers' states of two runs."""
    ours, right = (checkpoint.load_state(folder / "checkpoints" / step)["optimizer"] for folder in folders)
    assert ours["state"].keys() == right["state"].keys()
    for i, moments in right["state"].items():
        assert ours["state"][i]["step"] == moments["step"] and ours["state"][i]["step"].shape == ()
        for name in ("exp_avg", "exp_avg_sq"):
            tolerance = 1e-2 * float(moments[name].abs().max())
            torch.testing.assert_close(ours["state"][i][name], moments[name], rtol=1e-2, atol=tolerance)
    (a,), (b,) = ours["param_groups"], right["param_groups"]
    assert a.keys() == b.keys() and a["params"] == b["params"] and a["lr"] == b["lr"]


FL_KEYS = (
    "grad_norm", "actor/loss", "actor/anchor_loss", "actor/data_loss", "actor/face_score", "reward/valid_fraction",
    "lr",
)  # fmt: skip


def test_two_processes_are_one_with_more_accumulation(single, double):
    """They take up its checkpoint, skip what it skips, and leave what it leaves."""
    (account, right), ranks, folder = (single[0], single[1] / FL), double[1][0], double[2] / FL
    actual, expected = metrics(folder), metrics(right)
    assert [line["step"] for line in actual] == [1, 2, 3] and actual[0] == expected[0]
    assert [line["reward/valid_fraction"] for line in expected] == [0.75] * 4  # so on one of two processes
    assert actual[1]["grad_norm"] is None and expected[1]["grad_norm"] is None
    assert_same_lines(actual[1:2], expected[1:2], FL_KEYS[1:], rel=1e-5)
    assert_same_lines(actual[2:], expected[2:3], FL_KEYS)
    assert [update["moved"] for update in account["updates"]] == [True, False, True, True]
    for rank in ranks:
        assert [update["moved"] for update in rank["updates"]] == [False, True]
        clips, replayed = 2 * 2, 1 if double[0] == "ddp" else 0  # the other active steps have kept their graphs
        assert rank.get("replayed", 0) == clips * replayed
    assert account["replayed"] == 4 * 4 * 2
    assert_same_adapter(folder, right, "step-000003")
    assert_same_moments((folder, right), "step-000003")
    assert len(list((folder / "samples" / "step-000003").iterdir())) == 1


def test_one_process_resumes_two(single, double, tmp_path, monkeypatch):
    shutil.copytree(double[2] / FL, tmp_path / "run", symlinks=True)
    find = setup_data.find_samples

    def faceless(*arguments, **settings):
        samples = find(*arguments, **settings)
        if samples:  # none are held out
            samples[3] = dataclasses.replace(samples[3], references=(None,))
        return samples

    monkeypatch.setattr(setup_data, "find_samples", faceless)
    again = ["train.gradient_accumulation_steps=4", "train.max_steps=4", f"run.output_dir={tmp_path / 'run'}"]
    launch(*REWARD_FL[1:], *again)
    assert_same_lines(metrics(tmp_path / "run")[3:], metrics(single[1] / FL)[3:], FL_KEYS, rel=1e-3)
    assert_same_adapter(tmp_path / "run", single[1] / FL, "step-000004")


def test_policy_updates_do_not_depend_on_the_processes(single, double):
    folders = [double[2] / PG, single[1] / PG]
    actual, expected = map(metrics, folders)
    assert [line["step"] for line in actual] == [0, 1, 2]
    assert all(line["policy/ratio"] == pytest.approx(1, abs=1e-4) for line in actual[1:])
    keys = ("grad_norm", "reward/mean", "reward/std_in_group", "actor/anchor_loss", "actor/loss", "policy/kl")
    assert_same_lines(actual[1:2], expected[1:2], keys[:4], rel=1e-5)
    assert_same_lines(actual[2:], expected[2:], keys, rel=1e-3)
    assert_same_lines(actual[::2], expected[::2], ["eval/score"])  # the second: by averaged weights
    assert_same_adapter(*folders, "step-000002")  # the averaged weights
    states = [checkpoint.load_state(path / "checkpoints" / "step-000002") for path in folders]
    for a, b in zip(*(state["parameters"] + state["average"]["shadow_params"] for state in states), strict=True):
        assert type(a) is torch.Tensor
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * 1e-4 + 1e-6)
    assert_same_moments(folders, "step-000002")
    assert states[0]["average"]["optimization_step"] == states[1]["average"]["optimization_step"] == 2


@pytest.mark.parametrize("name", [FORWARD_RL, "best", "dpo", "pairs"])
def test_forward_updates_do_not_depend_on_the_processes(single, double, name):
    folders = [double[2] / name, single[1] / name]
    actual, expected = map(metrics, folders)
    # without policy/deviation, for which a process keeps one batch
    keys = ["grad_norm", "actor/loss", "actor/anchor_loss", "policy/misfit_positive"]
    keys += ["reward/mean"] * (name != "pairs")
    assert_same_lines(actual[:1], expected[:1], keys, rel=1e-4)
    distances = ["policy/from_old", "policy/from_base"][name != FORWARD_RL :]
    assert_same_lines(actual[1:], expected[1:], [*keys, *distances], rel=1e-2)
    assert name != FORWARD_RL or actual[3]["policy/from_old"] < actual[3]["policy/from_base"]
    states = [checkpoint.load_state(path / "checkpoints" / "step-000004") for path in folders]
    for a, b in zip(*(state["old_policy"] for state in states), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * 1e-4 + 1e-6)
    if name in ("dpo", "pairs"):
        assert all(map(torch.equal, *(state["start_policy"] for state in states)))
        assert_same_lines(actual[1:], expected[1:], ["policy/rejected_change", "policy/chosen_change"], rel=5e-2)


@pytest.mark.parametrize("name, shares", [("grpo", [0.75, 0.5]), ("forward", [0.5, 0.5])])
def test_what_is_left_does_not_depend_on_the_processes(single, double, name, shares):
    actual, expected = (metrics(folder / name)[-2:] for folder in (double[2], single[1]))
    assert [line["group/left_out"] for line in actual] == [line["group/left_out"] for line in expected] == shares
    assert_same_lines(actual, expected, ("grad_norm", "actor/loss", "actor/anchor_loss", "reward/mean"), rel=1e-3)
    assert_same_adapter(double[2] / name, single[1] / name, "step-000002")


def test_the_place_of_the_boundary_does_not_matter(single, double):
    """Two processes of one clip each against one of two: the same forward passes, so only the sum's order differs."""
    folder = double[2]
    for place in PLACES:
        assert_same_adapter(folder / place, single[1] / place, "latest", whole_by=1e-6)
