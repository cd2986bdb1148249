"""tools/doctor.py on the tiny world: the checks that pass, and faults that they report."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_tool
from runs import CONFIG, SMALL

from rewardfl.doctor import checks
from rewardfl.memory import attention
from rewardfl.rewards.face import parity
from rewardfl_tools import doctor


def check(monkeypatch, *arguments, expect=0):
    """Return what the tool prints about a check, by name."""
    monkeypatch.chdir(ROOT)  # configurations name their files from there
    text = run_tool(doctor.main, "--config", CONFIG, "--device", "cpu", *SMALL, *arguments, expect=expect)
    return dict(line.split(": ", 1) for line in text.splitlines())


def test_the_tiny_world_passes(monkeypatch):
    lines = check(monkeypatch, "model.attention_backend=_native_math")
    assert list(lines) == ["environment", "attention", "faces"]
    assert all(line.startswith("ok: ") for line in lines.values())
    assert f"torch {torch.__version__}" in lines["environment"] and "of host memory" in lines["environment"]
    assert "_native_math: its output and gradients on cpu in float32" in lines["attention"]
    for key in ("reward.reward_model_path", "reward.held_out_model_path"):
        assert f"{key}: face parity with insightface" in lines["faces"]


def test_an_error_of_one_check_leaves_the_others(monkeypatch):
    def wrong_gradient(name, dtype, device):
        raise attention.BackendError(f"{name} in {dtype} on {device} is wrong; set it to native")

    def out_of_memory(identity, video):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(attention, "check_backward", wrong_gradient)
    monkeypatch.setattr(parity, "check", out_of_memory)
    lines = check(monkeypatch, "model.attention_backend=_native_math", expect=1)
    assert lines["environment"].startswith("ok: ")
    assert lines["attention"] == "differs: _native_math in torch.float32 on cpu is wrong; set it to native"
    assert lines["faces"] == "differs: CUDA out of memory. Tried to allocate 9 GiB"


def test_a_driver_that_this_torch_cannot_use_differs(monkeypatch):
    run, result = subprocess.run, SimpleNamespace(returncode=0, stdout="550.54.15\n550.54.15\n")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60e9, 80e9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        subprocess, "run", lambda command, **how: result if command[0] == "nvidia-smi" else run(command, **how)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "2 x H200, driver 550.54.15, 60.0 of 80.0 GB free" in checks.describe_machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cannot use the driver 550.54.15; renew one of them, see pytorch.org"):
        checks.describe_machine()
