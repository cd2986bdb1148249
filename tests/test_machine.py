"""Memory and cores of the machine or its container, and that OpenMP's threads sleep while they wait."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from rewardfl import machine

CORES = 8
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def write_groups(root, files):
    """Write the files of control groups, below `root`."""
    groups = {"proc/self/cgroup": "4:cpu,cpuacct:/jobs/run\n7:memory:/jobs/run\n3:pids:/\n0::/jobs/run\n"}
    for name, text in (groups | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("files, cores", [
    ({}, CORES), ({"cpu.max": "150000 100000\n"}, 1), ({"jobs/cpu.max": "20000 100000\n"}, 1),
    ({"jobs/run/cpu.max": "9900000 100000\n"}, CORES),
    ({"cpu/jobs/cpu.cfs_quota_us": "-1\n", "cpu/jobs/cpu.cfs_period_us": "100000\n"}, CORES),
    ({"cpu/jobs/cpu.cfs_quota_us": "100000\n", "cpu/jobs/cpu.cfs_period_us": "100000\n"}, 1),
])  # fmt: skip
def test_cores_are_limited_by_both_versions_of_control_groups(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(CORES))
    write_groups(tmp_path, files)
    assert machine.usable_cores(tmp_path) == cores


@pytest.mark.parametrize("folder, name", [("", "memory.max"), ("memory/", "memory.limit_in_bytes")])
@pytest.mark.parametrize("limits, expected", [
    ({"jobs/run": "max\n"}, MEMORY), ({"jobs/run": "max\n", "jobs": "4096\n"}, 4096),
    ({"jobs": "4096\n", ".": "1024\n"}, 1024),  # a container sees its limit as the top's
])  # fmt: skip
def test_memory_is_limited_by_both_versions_of_control_groups(tmp_path, folder, name, limits, expected):
    write_groups(tmp_path, {f"{folder}{group}/{name}": text for group, text in limits.items()})
    assert machine.usable_memory(tmp_path) == expected


def test_a_process_takes_its_share(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    assert [machine.threads_of_process(None, processes) for processes in (1, 2, 4, 8)] == [6, 3, 1, 1]
    assert machine.threads_of_process(5, 8) == 5


@pytest.mark.slow(12)
def test_threads_soon_sleep_while_they_wait():
    """libgomp prints what it has read, when torch loads it: the variables are set before."""
    environment = {key: value for key, value in os.environ.items() if key not in THREADS}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    code = "import train_flow_grpo, torch; print(torch.get_num_threads())"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "GOMP_SPINCOUNT = '3000'" in run.stderr and run.stdout.split()[-1] == str(machine.usable_cores())


def test_a_users_setting_of_the_threads_stays():
    for name in THREADS:
        environment = {name: "7"}
        machine.set_thread_defaults(environment)
        assert environment[name] == "7" and len(environment) == 2
