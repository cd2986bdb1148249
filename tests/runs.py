"""Runs of train_reward_fl.py on the tiny world, in a process of their own or in this one."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile

from conftest import ROOT

import train_reward_fl
from rewardfl import lora

WORLD = ROOT / "assets" / "tiny_world"
CONFIG = str(ROOT / "configs" / "tiny_face.yaml")
PACKS = {"reward_model_path": "reward", "held_out_model_path": "judge"}
# what is computed of the clips, once for all tests of this process
CACHE = tempfile.mkdtemp(prefix="rewardfl-test-cache-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
# four sampling steps, two of them replayed, one clip at a time
FAST = [
    "sample.num_inference_steps=4", "sample.mid_timestep=2", "sample.final_timestep=3", "lora.lora_rank=4",
    "train.gradient_accumulation_steps=1", "train.per_device_train_batch_size=1",
    "run.cpu_threads=1", "run.sample_videos=1", "run.log_with=none", f"data.cache_dir={CACHE}",
]  # fmt: skip


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def launch(*overrides, processes=1, check=True):
    """Run the script with FAST settings as its own process(es)."""
    start = [sys.executable] + (
        ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"] if processes > 1 else []
    )
    command = [*start, "train_reward_fl.py", "--config", CONFIG, *FAST, *overrides]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)
    if check and processes == 1:  # gloo may abort at exit after all is done; the files tell
        assert run.returncode == 0, run.stderr[-3000:]
    return run


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def adapter(run, step):
    return lora.read_adapter(run / "checkpoints" / f"step-{step:06d}" / "transformer_2" / lora.WEIGHTS_NAME)[0]


def call(monkeypatch, capsys, *arguments):
    """The script's main in this process: exit code, standard output and error."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train_reward_fl.py", "--config", CONFIG, *arguments])
    code = train_reward_fl.main()
    out = capsys.readouterr()
    return code, out.out, out.err
