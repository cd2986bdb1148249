"""What `accelerate launch` starts with each file of configs/accelerate, and what is refused."""

import subprocess
import sys

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import ROOT, run_python
from runs import free_port, launch_environment, launcher, needs_deepspeed

from rewardfl.training.distributed import Distributed
from rewardfl.training.launch import LaunchError, check_fsdp

pytestmark = pytest.mark.slow(170)


DRY = ["train_reward_fl.py", "--config", "configs/tiny_face.yaml", "--dry-run"]


@pytest.mark.long
@needs_deepspeed
def test_dry_run_of_two_machines():
    """Two launches of a process each meet, as on two machines."""
    port = free_port()
    launches = [
        subprocess.Popen(
            [sys.executable, *launcher("multi_node_zero2", *DRY, options=["--machine_rank", machine], port=port)],
            cwd=ROOT, env=launch_environment("multi_node_zero2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for machine in ("0", "1")
    ]  # fmt: skip
    outputs = [launch.communicate(timeout=280) for launch in launches]
    for printed, errors in outputs:  # each machine's first process prints
        assert "x 2 processes = " in printed, errors[-3000:]


def test_fsdp_without_gpus_is_refused():
    """accelerate would start processes that do not know each other."""
    environment = launch_environment("cpu", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    done = run_python(DRY, cwd=ROOT, env=environment)
    assert done.returncode == 2 and "FSDP needs GPUs" in done.stderr and "processes = " not in done.stdout


def test_a_step_clips_or_skips_and_forgets_the_gradient():
    job = Distributed(max_grad_norm=0.5, cpu_threads=1)
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = job.accelerator.prepare(torch.optim.SGD([parameter], lr=1.0))
    for gradient, norm, expected in [(3.0, 6.0, -0.25), (0.1, 0.2, -0.35), (torch.inf, torch.inf, -0.35)]:
        parameter.grad = torch.full((4,), gradient)
        assert job.step(optimizer, [parameter], 0.5) == pytest.approx(norm)
        torch.testing.assert_close(parameter.detach(), torch.full((4,), expected), rtol=1e-5, atol=0)
        assert parameter.grad is None


def test_the_processes_of_a_clip_are_gathered_once():
    job = Distributed(max_grad_norm=0.5, cpu_threads=1, processes_per_clip=2)
    job.world, job.accelerator.gather = 4, lambda tensors: tensors
    assert job.gather({"row": torch.arange(8)})["row"].tolist() == [0, 1, 4, 5]


def test_mixed_precision_of_the_launcher_has_no_effect():
    code = "from rewardfl.training.distributed import Distributed; print(Distributed(1.0).accelerator.mixed_precision)"
    done = run_python(["-c", code], cwd=ROOT, env=launch_environment("cpu", ACCELERATE_MIXED_PRECISION="bf16"))
    assert done.stdout == "no\n", done.stderr


@pytest.mark.parametrize("settings, message", [
    ({"fsdp_version": 1}, "fsdp_version is 1; set fsdp_version: 2"),
    ({"reshard_after_forward": False}, "fsdp_reshard_after_forward is False"),
    ({"activation_checkpointing": True}, "fsdp_activation_checkpointing and"),
    ({"cpu_ram_efficient_loading": True}, "fsdp_cpu_ram_efficient_loading must be false"),
])  # fmt: skip
def test_other_fsdp_is_refused(settings, message):
    plugin = {"fsdp_version": 2, "cpu_ram_efficient_loading": False}
    check_fsdp(FullyShardedDataParallelPlugin(**plugin))
    with pytest.raises(LaunchError, match=message):
        check_fsdp(FullyShardedDataParallelPlugin(**plugin | settings))
