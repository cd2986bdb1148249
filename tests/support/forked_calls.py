"""Calls of tools in forks of a process that has imported what they need, so that no call pays for torch.

    python forked_calls.py CALLS.json RESULTS.json AT_ONCE

A call is {arguments, folder}. `arguments` is its sys.argv, with a module for the program; `folder` is where it works
and has its output, in stdout.txt and stderr.txt. A module's first call warms up: its imports serve the next ones.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

SECONDS, BYTES = 20, 2 * 10**9  # processor time and memory for a call


def run_calls(calls, folder, at_once=2, timeout=1800):
    """Return {code, seconds, bytes} of each call; `code` is negative after a signal. folder: for its own files."""
    from conftest import ROOT, run_python  # here: the process that forks needs no pytest
    from runs import environment

    (folder / "calls.json").write_text(json.dumps(calls))
    arguments = [__file__, folder / "calls.json", folder / "results.json", at_once]
    run = run_python(arguments, timeout=timeout, cwd=ROOT, env=environment())
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


def main():
    import torch

    torch.set_num_threads(1)  # a fork has only the thread that forks
    calls, at_once = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[3])
    results, running, imported = {}, {}, set()
    for number, call in enumerate(calls):
        module = call["arguments"][0]
        running[fork(**call, first=module not in imported)] = number
        while len(running) >= (1 if module not in imported else at_once):
            wait(running, results)
        if module not in imported:
            imported.add(module)
            for name in Path(call["folder"], "modules.txt").read_text().split():
                with contextlib.suppress(ImportError):  # a package may put other names into sys.modules
                    importlib.import_module(name)
    while running:
        wait(running, results)
    Path(sys.argv[2]).write_text(json.dumps([results[number] for number in range(len(calls))]))


def fork(arguments, folder, *, first):
    """Start a call and return its process id."""
    process = os.fork()
    if process == 0:
        os.chdir(folder)
        signal.alarm(600 if first else 6 * SECONDS)  # the first call imports; the machine may be busy
        try:
            code = run(arguments, 4 * BYTES if first else BYTES)  # what the first call imports takes more
            sys.stdout.flush()
        except BaseException:  # as the interpreter ends: a traceback and exit code 1
            traceback.print_exc()
            code = 1
        Path("modules.txt").write_text("\n".join(sys.modules))
        os._exit(code)
    return process


def run(arguments, most):
    """Return the exit code of a tool's main."""
    for stream, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + most
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    sys.argv = arguments
    if arguments[0].endswith("serve_reward"):
        from rewardfl.reward_server.server import RewardServer

        RewardServer.run = lambda _: os.kill(os.getpid(), signal.SIGTERM)  # it has its port by then
    try:
        return importlib.import_module(arguments[0]).main() or 0
    except SystemExit as stop:  # the parser's
        return stop.code or 0


def wait(running, results):
    process, status, usage = os.wait4(-1, 0)
    code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    results[running.pop(process)] = {"code": code, "seconds": seconds, "bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    main()
