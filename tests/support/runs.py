"""Runs of the training scripts on the tiny world, in this process or in others."""

import atexit
import contextlib
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import run_python
from lora_dialects import read_adapter

import train_flow_grpo
import train_forward_rl
import train_reward_fl
from rewardfl import data, lora
from rewardfl.rewards.face import parity as face_parity

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "assets" / "tiny_world"
CONFIG = str(ROOT / "tests" / "face.yaml")
GRPO_CONFIG = str(ROOT / "tests" / "grpo.yaml")
FORWARD_CONFIG = str(ROOT / "tests" / "forward.yaml")
YAMLS = ROOT / "configs" / "accelerate"
PACKS = {"reward_model_path": "reward", "held_out_model_path": "judge"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: no ZeRO-2 run"
)
# what is computed of the clips, once for all tests of this process
CACHE = tempfile.mkdtemp(prefix="rewardfl-test-cache-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)


check_parity, checked_packs = face_parity.check, {}


def check_parity_once(identity, video):
    """Let runs in this process compare the world's own networks with insightface once for each setting."""
    if not all(Path(file).resolve().is_relative_to(WORLD) for file in identity.files):
        return check_parity(identity, video)
    key = (identity.files, identity.detector.det_size, face_parity.MAX_COSINE_DISTANCE)
    if key not in checked_packs:
        checked_packs[key] = check_parity(identity, video)
    return checked_packs[key]


face_parity.check = check_parity_once


def table(path, part, clips):
    """Write a metadata.csv of the first `clips` of the world's train or eval; return its path.

    It names them through a link next to it: noise is drawn by these names, so that no test depends on the checkout.
    """
    head, *rows = (WORLD / part / "metadata.csv").read_text().splitlines()[: clips + 1]
    link = Path(path).parent / "world"
    if not link.is_symlink():
        link.symlink_to(WORLD)
    Path(path).write_text("\n".join([head, *(f"world/{part}/{row}" for row in rows)]) + "\n")
    return path


def pair_table(path, people):
    """Write a table of pairs: the first clips of the world, and the same growing dark; return its path.

    The noise is drawn by names next to the table.
    """
    rows = [line.split(",", 1) for line in (WORLD / "train" / "metadata.csv").read_text().splitlines()[1 : people + 1]]
    for name, _ in rows:
        (Path(path).parent / "videos").mkdir(exist_ok=True)
        shutil.copy(WORLD / "train" / name, Path(path).parent / name)
        dark = data.read_video(WORLD / "train" / name)
        dark[1:] //= 3
        data.write_video(Path(path).parent / f"{name}.dark.mp4", dark, fps=8)
    lines = ["chosen,rejected,prompt", *(f"{name},{name}.dark.mp4,{prompt}" for name, prompt in rows)]
    Path(path).write_text("\n".join(lines) + "\n")
    return path


# a quarter of the world's own size: faces are found in it, and no claim is about the size
SMALL = ["data.height=32", "data.width=32", "data.num_frames=5"]
FACE_ALONE = ["reward.motion_weight=0", "reward.others={}"]
# with another rate no length may change
CONSTANT_RATE = ["train.lr_scheduler_type=constant", "train.learning_rate=1e-3"]
QUICK = [
    "lora.lora_rank=4", "run.cpu_threads=1", "run.sample_videos=1", "run.log_with=none", f"data.cache_dir={CACHE}",
    *SMALL, *FACE_ALONE, *CONSTANT_RATE,
    f"data.file_name={table(f'{CACHE}/metadata.csv', 'train', 6)}",
]  # fmt: skip
# four sampling steps, two of them replayed, one clip at a time
FAST = [
    *QUICK, "sample.num_inference_steps=4", "sample.mid_timestep=2", "sample.final_timestep=3",
    "train.gradient_accumulation_steps=1", "train.per_device_train_batch_size=1", "reward.kl_weight=9",
]  # fmt: skip
# an evaluation on two people
HELD_OUT = f"evaluation.eval_clips={table(f'{CACHE}/held_out.csv', 'eval', 2)}"
SWAPPED = [  # the blocks of both experts wait in host memory
    "train.memory.trained=cpu_swap", "train.memory.untrained=cpu_swap", "train.memory.use_gradient_checkpointing=true",
]  # fmt: skip
COLOUR = f"{ROOT}/examples/toys.py:Colour"
RED = [f"reward.terms.score.name={COLOUR}", "reward.reward_model_path=null", "reward.held_out_model_path=null"]
# five sampling steps, of which the third and fourth are the window; two groups of two; the colour is a black box
GRPO_FAST = [
    *QUICK, "sample.num_inference_steps=5", "grpo.groups=2", "grpo.group_size=2", "grpo.window.size=2",
    "train.per_device_train_batch_size=2", "--trust-code", *RED, "evaluation.eval_clips=null",
    "grpo.window.within=null", "grpo.same_noise_in_group=false",
]  # fmt: skip
# the same groups and black box
FORWARD_FAST = [
    *QUICK, "sample.num_inference_steps=4", "forward.groups=2", "forward.group_size=2",
    "train.per_device_train_batch_size=2", "--trust-code", *RED,
]  # fmt: skip
# dpo from a table of three pairs, without a rollout
PAIRS = [
    "forward.objective=dpo", "forward.beta=100", "reward.terms={score: {name: motion, weight: 0}}",
    "train.per_device_train_batch_size=1", f"data.file_name={pair_table(f'{CACHE}/pairs.csv', 3)}",
]  # fmt: skip


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def _launch(script, config, fast, *overrides, processes=1, check=True):
    """Run a script with its fast settings: one process is this one."""
    arguments = [f"{script.__name__}.py", "--config", config, "--trust-code", *fast, *overrides]
    if processes > 1:  # gloo may abort at exit after all is done; the files tell
        start = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
        return run_python([*start, *arguments], cwd=ROOT, env=environment())
    return _here(script, arguments, check)


launch = partial(_launch, train_reward_fl, CONFIG, FAST)
launch_grpo = partial(_launch, train_flow_grpo, GRPO_CONFIG, GRPO_FAST)
launch_forward = partial(_launch, train_forward_rl, FORWARD_CONFIG, FORWARD_FAST)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def launcher(name, *arguments, options=(), port=None):
    """Python's arguments: accelerate launch with a yaml of configs/accelerate."""
    processes = 1 if name in ("cpu", "single_gpu") else 2
    return [
        "-m", "accelerate.commands.launch", "--config_file", str(YAMLS / f"{name}.yaml"),
        "--num_processes", str(processes), "--main_process_port", str(port or free_port()), *options, *arguments,
    ]  # fmt: skip


def launch_environment(name, **more):
    # DDP's yaml is for GPUs: without one accelerate takes gloo. DeepSpeed on a CPU must not be told
    cpu = {"ddp": {"ACCELERATE_USE_CPU": "true"}, "fsdp2": {"FSDP_ON_CPU": "true"}}.get(name, {})
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | cpu | more


def command(script, *overrides):
    """Arguments of Python: a script with its fast settings."""
    config, fast = {
        "train_reward_fl.py": (CONFIG, FAST), "train_flow_grpo.py": (GRPO_CONFIG, GRPO_FAST),
        "train_forward_rl.py": (FORWARD_CONFIG, FORWARD_FAST),
    }[script]  # fmt: skip
    return [script, "--config", config, *fast, *overrides]


def _here(script, arguments, check):
    out, err, argv = io.StringIO(), io.StringIO(), mock.patch.object(sys, "argv", arguments)
    with contextlib.chdir(ROOT), argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = script.main()
    assert code == 0 or not check, err.getvalue()[-3000:]
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def adapter(run, step):
    """Return the tensors of the low-noise expert's adapter."""
    return read_adapter(run / "checkpoints" / f"step-{step:06d}" / "transformer_2" / lora.WEIGHTS_NAME)


def equal_tensors(actual, expected):
    """Return whether two adapters have the same names and bits."""
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


def assert_same_run(run, straight, step):
    """Assert equal metrics and adapters, to the last bit."""
    assert metrics(run) == metrics(straight)
    assert equal_tensors(adapter(run, step), adapter(straight, step))


def watch(monkeypatch, owner, name, record):
    """Give `record` the result and the arguments of each call of owner.name."""
    function = getattr(owner, name)

    def watched(*arguments, **settings):
        result = function(*arguments, **settings)
        record(result, *arguments, **settings)
        return result

    monkeypatch.setattr(owner, name, watched)


def _call(script, config, monkeypatch, capsys, *arguments):
    """Return the exit code, standard output and error of a script's main in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", "--config", config, *arguments])
    code = script.main()
    out = capsys.readouterr()
    return code, out.out, out.err


call = partial(_call, train_reward_fl, CONFIG)
call_grpo = partial(_call, train_flow_grpo, GRPO_CONFIG)
call_forward = partial(_call, train_forward_rl, FORWARD_CONFIG)
