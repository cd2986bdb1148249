"""The number of CPU threads by quota, cores and configuration, and that OpenMP's threads sleep while they wait."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from rewardfl import cpu

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, CORES),
        ({"cpu.max": "max 100000\n"}, CORES),
        ({"cpu.max": "150000 100000\n"}, min(CORES, 1)),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_usable_cores_are_the_containers_quota(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu.usable_cores(tmp_path) == cores


def test_a_process_takes_its_share(monkeypatch):
    monkeypatch.setattr(cpu, "usable_cores", lambda: 6)
    assert [cpu.threads_of_process(None, processes) for processes in (1, 2, 4, 8)] == [6, 3, 1, 1]
    assert cpu.threads_of_process(5, 8) == 5


@pytest.mark.parametrize("entry", ["import train_reward_fl", "import train_flow_grpo", "import rewardfl, torch"])
@pytest.mark.parametrize("threads", [None, "1"])
def test_threads_sleep_while_they_wait(entry, threads):
    """libgomp prints what it has read, when torch loads it: the variables are set before, and a user's own stays."""
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({"OMP_NUM_THREADS": threads} if threads else {})
    code = f"{entry}; import torch; print(torch.get_num_threads())"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "GOMP_SPINCOUNT = '0'" in run.stderr
    assert run.stdout.split()[-1] == (threads or str(cpu.usable_cores()))
