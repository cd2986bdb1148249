"""The checks of tools/doctor.py, a line each: the machine, attention's gradients, face packs."""

import argparse
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from rewardfl import command_line, config, data, machine
from rewardfl.backbones.protocol import DTYPES
from rewardfl.config.schema import ModelConfig, SharedRewardConfig
from rewardfl.files import escape_control
from rewardfl.memory import attention
from rewardfl.rewards.face import FaceIdentity, parity
from rewardfl.training import setup_run
from rewardfl.training.clip_scan import load_sized_example
from rewardfl.training.run_folder import git_commit, library_versions

LIBRARIES = (*setup_run.VERSIONED, "insightface", "onnxruntime", "onnxruntime-gpu")


def run_checks(args: argparse.Namespace) -> int:
    """Run the checks, print a line about each, and return the exit code: 1 after an error of a check."""
    cfg = config.load(args.config, args.overrides)
    device = torch.device(command_line.resolve_device(args.device))
    checks: dict[str, Callable[[], str]] = {
        "environment": describe_machine,
        "attention": partial(check_attention, cfg.model, device),
        "faces": partial(check_faces, cfg.reward, cfg.data, cfg.run.seed, device),
    }
    code = 0
    for name, check in checks.items():
        try:
            line = f"ok: {check()}"
        except (ValueError, OSError, torch.OutOfMemoryError, torch.AcceleratorError) as error:
            line, code = f"differs: {(str(error).splitlines() or [type(error).__name__])[0]}", 1
        print(escape_control(f"{name}: {line}"), flush=True)
    return code


def describe_machine() -> str:
    """Return versions, GPU, driver, memory and disk. Raise ValueError for a driver that this torch cannot use."""
    driver = ""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True)
        driver = "" if result.returncode else result.stdout.split("\n")[0].strip()
    gpu = "no GPU"
    if torch.cuda.is_available():
        free, total = (number / 1e9 for number in torch.cuda.mem_get_info())
        gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver {driver}, "
        gpu += f"{free:.1f} of {total:.1f} GB free on the first"
    elif driver:
        version = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
        raise ValueError(f"{version} cannot use the driver {driver}; renew one of them, see pytorch.org")
    versions = [f"{name} {version}" for name, version in library_versions(LIBRARIES).items()]
    host = f"{machine.usable_cores()} cores, {machine.usable_memory() / 1e9:.0f} GB of host memory"
    disk = f"{shutil.disk_usage('.').free / 1e9:.0f} GB free here"
    commit = f"commit {git_commit(Path(__file__).parent)}"
    return ", ".join([gpu, host, disk, f"python {platform.python_version()}", *versions, commit])


def check_attention(model: ModelConfig, device: torch.device) -> str:
    """Compare the configured backend's output and gradients with plain products. Raise BackendError if they differ."""
    name = model.attention_backend
    if name == attention.NATIVE:
        return f"{name}: torch's kernels need no check"
    attention.check_backward(name, DTYPES[model.dtype], device)
    return f"{name}: its output and gradients on {device.type} in {model.dtype} equal plain matrix products"


def check_faces(reward: SharedRewardConfig, settings: config.DataConfig, seed: int, device: torch.device) -> str:
    """Compare the face packs with their published code on the first row. Raise FaceParityError if they differ."""
    packs = {
        f"reward.{key}": FaceIdentity(folder, reward.det_size, second_pack_dir=second).to(device)
        for key, second in {"reward_model_path": reward.second_model_path, "held_out_model_path": None}.items()
        if (folder := getattr(reward, key))
    }
    if not packs:
        return "the configuration names no pack"
    (row,) = data.assign_images(data.load_metadata(settings.file_name)[:1], seed)
    return "; ".join(parity.check_packs(packs, load_sized_example(settings, row).reference.to(device)))
