"""Both scripts as `accelerate launch` starts them with each file of configs/accelerate, on the CPU.

One process with accumulation, two under DDP and two under DeepSpeed ZeRO-2 with its optimizer in host memory are one
run: the same gradients and losses to rounding, the same weights on every process, and checkpoints that any of them
continues. Every launch is asked what it really was.
"""

import csv
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import ROOT
from runs import CACHE, WORLD, metrics

from rewardfl import checkpoint, distributed, lora

YAMLS = ROOT / "configs" / "accelerate"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: no ZeRO-2 run"
)
pytestmark = pytest.mark.timeout(900)  # a test may come with the runs that it is compared with
KINDS = ["ddp", pytest.param("zero2_offload", marks=needs_deepspeed)]
REALLY = {  # by yaml: what must have run
    "cpu": {"type": "NO", "processes": 1, "wrapper": "Experts"},
    "ddp": {"type": "MULTI_CPU", "processes": 2, "wrapper": "DistributedDataParallel"},
    "zero2_offload": {"type": "DEEPSPEED", "processes": 2, "wrapper": "DeepSpeedEngine"},
}
COMMON = [
    "lora.lora_rank=4", "run.cpu_threads=1", "run.sample_videos=0", "run.log_with=none", "train.learning_rate=1e-4",
    "train.warmup_steps=0", f"data.cache_dir={CACHE}", "run.save_steps=2", "train.max_grad_norm=0.01",
]  # fmt: skip
# three replayed steps, the first of them the other expert's, whose adapter no other backward touches; and the KL whose
# chain takes a gradient outside of `backward`
REWARD_FL = [
    "train_reward_fl.py", "--config", "configs/tiny_face.yaml", *COMMON, "sample.num_inference_steps=4",
    "sample.mid_timestep=1", "sample.final_timestep=3", "sample.gradient_mode=chain", "model.trainable_models=dit,dit2",
    "reward.kl_gradient=fixed_trajectory", "train.per_device_train_batch_size=1",
]  # fmt: skip
# two updates an epoch, of two groups of two each
GRPO = [
    "train_flow_grpo.py", "--config", "configs/tiny_flow_grpo.yaml", *COMMON, "sample.num_inference_steps=5",
    "grpo.groups=4", "grpo.group_size=2", "grpo.window_size=2",
    "grpo.updates_per_epoch=2", "train.per_device_train_batch_size=2", "reward.name=colour",
    "reward.motion_weight=0", "grpo.window_bounds=null", "grpo.same_noise_in_group=false",
    "reward.reward_model_path=null", "reward.held_out_model_path=null", "reward.coverage_weight=0",
    "reward.motion_weight=0", "evaluation.eval_clips=null",
    "evaluation.eval_inference_steps=2",
]  # fmt: skip


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def command(kind, *arguments, options=(), port=None):
    """accelerate launch with a yaml of configs/accelerate."""
    processes = 1 if kind in ("cpu", "single_gpu") else 2
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(YAMLS / f"{kind}.yaml"),
        "--num_processes", str(processes), "--main_process_port", str(port or free_port()), *options, *arguments,
    ]  # fmt: skip


def environment(kind, **more):
    # DDP's yaml is for GPUs: without one accelerate takes gloo. DeepSpeed on a CPU must not be told
    cpu = {"ACCELERATE_USE_CPU": "true"} if kind == "ddp" else {}
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | cpu | more


def run(kind, out, script, *overrides, **more):
    """A run into out/run, each process's account of it; it must have been what REALLY says."""
    nobody_on = "3" if script is REWARD_FL else "-1"  # so in every update of four clips, on one of two processes
    watcher = [str(ROOT / "tests" / "distributed_worker.py"), str(out / "ranks"), *script]
    shutil.rmtree(out / "ranks", ignore_errors=True)
    done = subprocess.run(
        command(kind, *watcher, *overrides, f"run.output_dir={out / 'run'}"),
        cwd=ROOT, env=environment(kind, NOBODY_ON=nobody_on, **more), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    files = sorted((out / "ranks").glob("rank-*.json"))
    assert len(files) == REALLY[kind]["processes"], done.stdout[-2000:] + done.stderr[-4000:]
    ranks = [json.loads(file.read_text()) for file in files]
    for rank in ranks:
        assert rank["code"] == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert {name: rank[name] for name in REALLY[kind]} == REALLY[kind]
    # all processes hold the same weights after every update, and no gradient is left over
    first, *others = [[(u["digest"], u["gradients_left"]) for u in rank["updates"]] for rank in ranks]
    assert all(other == first for other in others) and all(left == 0 for _, left in first)
    return ranks


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Four clips."""
    folder = tmp_path_factory.mktemp("clips")
    with (WORLD / "train" / "metadata.csv").open() as file:
        rows = list(csv.reader(file))[:5]
    (folder / "videos").mkdir()
    for video, _ in rows[1:]:
        shutil.copy(WORLD / "train" / video, folder / video)
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder / "metadata.csv"


@pytest.fixture(scope="module")
def one(clips, tmp_path_factory):
    """Four updates of four clips each by one process."""
    out = tmp_path_factory.mktemp("one")
    run("cpu", out, REWARD_FL, f"data.file_name={clips}", "train.gradient_accumulation_steps=4", "train.max_steps=4")
    return out / "run"


@pytest.fixture(scope="module", params=KINDS)
def two(request, clips, tmp_path_factory):
    """(how, the first two of these updates by two processes of two micro-batches each)."""
    out = tmp_path_factory.mktemp(request.param)
    settings = [f"data.file_name={clips}", "train.gradient_accumulation_steps=2", "train.max_steps=2"]
    run(request.param, out, REWARD_FL, *settings)
    return request.param, out / "run"


def assert_same_lines(mine, theirs, keys, rel=1e-4):
    for a, b in zip(mine, theirs, strict=True):
        for key in keys:
            assert a[key] == pytest.approx(b[key], rel=rel), (a["step"], key)


def assert_same_adapter(mine, theirs, step, experts=("transformer", "transformer_2")):
    """Adam's first steps divide rounding by rounding; gradients that were not reduced would be 1 apart."""
    for expert in experts:
        files = [run / "checkpoints" / f"step-{step:06d}" / expert / lora.WEIGHTS_NAME for run in (mine, theirs)]
        a, b = (lora.read_adapter(file)[0] for file in files)
        moved = torch.cat([b[name].flatten() for name in b if "lora_B" in name])
        apart = torch.cat([(a[name] - b[name]).flatten() for name in b if "lora_B" in name])
        assert moved.norm() > 0 and apart.norm() < 1e-2 * moved.norm()


FL_KEYS = ("grad_norm", "actor/loss", "actor/face_score", "reward/valid_fraction", "lr")


def test_two_processes_are_one_with_more_accumulation(one, two):
    kind, run_dir = two
    mine, theirs = metrics(run_dir), metrics(one)[:2]
    assert [line["reward/valid_fraction"] for line in mine] == [0.75, 0.75]  # on one process
    assert_same_lines(mine[:1], theirs[:1], FL_KEYS, rel=1e-5)
    assert_same_lines(mine, theirs, FL_KEYS)
    assert_same_adapter(run_dir, one, 2)
    states = [checkpoint.load_state(path / "checkpoints" / "step-000002")["optimizer"] for path in (run_dir, one)]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for i, theirs in states[1]["state"].items():
        assert states[0]["state"][i]["step"] == theirs["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(states[0]["state"][i][name], theirs[name], rtol=1e-2, atol=1e-2 * float(
                theirs[name].abs().max()))  # fmt: skip
    a, b = ({k: v for k, v in state["param_groups"][0].items()} for state in states)
    assert a.keys() == b.keys() and a["params"] == b["params"] and a["lr"] == b["lr"]


def test_one_process_goes_on_from_two(one, two, clips, tmp_path):
    _, run_dir = two
    shutil.copytree(run_dir, tmp_path / "run", symlinks=True)
    settings = [f"data.file_name={clips}", "train.gradient_accumulation_steps=4", "train.max_steps=4"]
    run("cpu", tmp_path, REWARD_FL, *settings, "run.resume_from_checkpoint=auto")
    assert_same_lines(metrics(tmp_path / "run"), metrics(one), FL_KEYS, rel=1e-3)
    assert_same_adapter(tmp_path / "run", one, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_from_one(kind, one, clips, tmp_path):
    shutil.copytree(one, tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    settings = [f"data.file_name={clips}", "train.gradient_accumulation_steps=2", "train.max_steps=4"]
    run(kind, tmp_path, REWARD_FL, *settings, "run.resume_from_checkpoint=auto")
    assert_same_lines(metrics(tmp_path / "run")[2:], metrics(one)[2:], FL_KEYS)
    assert_same_adapter(tmp_path / "run", one, 4)


def test_another_global_batch_is_refused(one, clips, tmp_path):
    shutil.copytree(one, tmp_path / "run", symlinks=True)
    watcher = [*REWARD_FL, f"data.file_name={clips}", "train.gradient_accumulation_steps=3", "train.max_steps=5"]
    arguments = [*watcher, f"run.output_dir={tmp_path / 'run'}", "run.resume_from_checkpoint=auto"]
    done = subprocess.run(
        command("cpu", *arguments), cwd=ROOT, env=environment("cpu"), capture_output=True, text=True, timeout=280
    )
    assert done.returncode != 0 and "trained on 4 clips per update" in done.stderr and "now give 3;" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_on_one_process_is_skipped_by_all(kind, clips, tmp_path):
    """The second of three updates; the third is as if it had not been."""
    settings = [
        f"data.file_name={clips}", "train.gradient_accumulation_steps=2", "train.max_steps=3", "run.save_steps=9",
        "sample.gradient_mode=last", "model.trainable_models=dit2",
    ]  # fmt: skip
    ranks = run(kind, tmp_path, REWARD_FL, *settings, BREAK_GRADIENT="1:1")
    for rank in ranks:
        assert [update["moved"] for update in rank["updates"]] == [True, False, True]
        finite = [torch.isfinite(torch.tensor(update["norm"])).item() for update in rank["updates"]]
        assert finite == [True, False, True]
    assert metrics(tmp_path / "run")[1]["grad_norm"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_policy_updates_do_not_depend_on_the_processes(kind, grpo_one, tmp_path):
    run(kind, tmp_path, GRPO, "train.max_steps=2")
    mine, theirs = metrics(tmp_path / "run"), metrics(grpo_one)
    assert len(mine) == 2 and all(line["policy/ratio"] == pytest.approx(1, abs=1e-4) for line in mine)
    assert_same_lines(mine[:1], theirs[:1], ("grad_norm", "reward/mean", "reward/std_in_group"), rel=1e-5)
    assert_same_lines(mine, theirs, ("grad_norm", "reward/mean", "reward/std_in_group"))
    assert_same_adapter(tmp_path / "run", grpo_one, 2, ["transformer_2"])  # the averaged weights
    states = [checkpoint.load_state(path / "checkpoints" / "step-000002") for path in (tmp_path / "run", grpo_one)]
    for mine, theirs in zip(*(state["average"]["shadow_params"] for state in states), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-2 * 1e-4 + 1e-6)
    assert states[0]["average"]["optimization_step"] == states[1]["average"]["optimization_step"] == 2


@pytest.fixture(scope="module")
def grpo_one(tmp_path_factory):
    out = tmp_path_factory.mktemp("grpo")
    run("cpu", out, GRPO, "train.max_steps=2")
    return out / "run"


# -- the yaml files


def test_every_yaml_keeps_the_adapter_in_float32():
    files = sorted(YAMLS.glob("*.yaml"))
    assert [file.stem for file in files] == [
        "cpu", "ddp", "fsdp2", "multi_node_zero2", "single_gpu", "zero2_offload"
    ]  # fmt: skip
    for file in files:
        assert yaml.safe_load(file.read_text())["mixed_precision"] == "no"


DRY = ["train_reward_fl.py", "--config", "configs/tiny_face.yaml", "--dry-run"]


@pytest.mark.parametrize("kind, processes", [("cpu", 1), ("single_gpu", 1), ("ddp", 2)])
def test_dry_run(kind, processes):
    """single_gpu.yaml asks for no more than its process here: without a GPU accelerate takes the CPU."""
    done = subprocess.run(
        command(kind, *DRY), cwd=ROOT, env=environment(kind), capture_output=True, text=True, timeout=280
    )
    assert f"x {processes} processes = " in done.stdout, done.stderr[-3000:]


@needs_deepspeed
def test_dry_run_of_two_machines():
    """Two launches of a process each meet, as on two machines."""
    port = free_port()
    launches = [
        subprocess.Popen(
            command("multi_node_zero2", *DRY, options=["--machine_rank", machine], port=port), cwd=ROOT,
            env=environment("multi_node_zero2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for machine in ("0", "1")
    ]  # fmt: skip
    outputs = [launch.communicate(timeout=280) for launch in launches]
    for printed, errors in outputs:  # each machine's first process speaks
        assert "x 2 processes = " in printed, errors[-3000:]


def test_fsdp_without_gpus_is_refused():
    """accelerate would start two processes that know nothing of each other."""
    done = subprocess.run(
        command("fsdp2", *DRY), cwd=ROOT, env=environment("fsdp2"), capture_output=True, text=True, timeout=280
    )
    assert done.returncode != 0 and "FSDP needs GPUs" in done.stderr and "processes = " not in done.stdout


def test_replay_under_fully_shard(tmp_path):
    """FSDP2 as torch has it, without accelerate: replay's gradients of two sharded processes are those of one."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    done = subprocess.run(
        [*start, str(ROOT / "tests" / "fsdp_worker.py"), str(tmp_path)],
        cwd=ROOT, env=environment("ddp"), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert (tmp_path / "error.txt").is_file(), done.stderr[-3000:]
    world, error = (tmp_path / "error.txt").read_text().split()
    assert world == "2" and float(error) < 1e-12


@pytest.mark.parametrize(
    "arguments", [["--cpu", "--num_processes", "2"], ["--config_file", str(YAMLS / "cpu.yaml"), "--num_processes=2"]]
)
def test_one_process_where_two_were_asked_for_is_refused(arguments):
    start = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *arguments, *DRY]
    done = subprocess.run(start, cwd=ROOT, env=environment("cpu"), capture_output=True, text=True, timeout=280)
    assert done.returncode != 0 and "asked for 2 processes and started one" in done.stderr


# -- what is refused, without a launch


def test_processes_that_a_command_line_asks_for(tmp_path):
    (tmp_path / "a.yaml").write_text("num_processes: 3\n")
    (tmp_path / "b.yaml").write_text("use_cpu: true\n")
    launch = ["python", "/usr/bin/accelerate", "launch"]
    assert distributed.asked_processes([*launch, "--num_processes", "2", "x.py"]) == 2
    assert distributed.asked_processes([*launch, "--num-processes=4", "x.py"]) == 4
    assert distributed.asked_processes([*launch, "--config_file", str(tmp_path / "a.yaml"), "x.py"]) == 3
    assert distributed.asked_processes([*launch, "--config_file", str(tmp_path / "b.yaml"), "x.py"]) == 1
    assert distributed.asked_processes(["bash", "--num_processes", "2"]) == 1
    assert distributed.asked_processes([]) == 1


def test_mixed_precision_is_refused():
    with pytest.raises(distributed.LaunchError, match="mixed_precision is bf16.* model.dtype"):
        distributed.check_environment({"ACCELERATE_MIXED_PRECISION": "bf16"}, [])
    distributed.check_environment({"ACCELERATE_MIXED_PRECISION": "no"}, [])


def test_an_old_deepspeed_is_refused(monkeypatch):
    monkeypatch.setattr(distributed.metadata, "version", lambda name: "0.18.9")
    with pytest.raises(distributed.LaunchError, match=r"deepspeed is 0\.18\.9, 0\.19\.8 or later"):
        distributed.check_environment({"ACCELERATE_USE_DEEPSPEED": "true"}, [])
