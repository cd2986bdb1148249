"""Processes of the tests that are Python from their start, without the seconds that importing torch takes.

A server has imported what the scripts import, and forks: `Process(arguments)` is what
`subprocess.Popen([sys.executable, *arguments])` is, a real process with a number, signals at their default, an
environment, output and an exit code of its own. It runs a file, `-m` a module or `-c` code as `__main__`; when that is
a launcher, the Python processes that it starts are forked likewise.

The first pytest process starts the server (`start`), and all its workers use it. The real start stays tested: by
test_golden.py with `python`, and by test_launch.py with `accelerate launch`.
"""

import contextlib
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESS = "REWARDFL_TEST_ZYGOTE"  # of the environment: the socket's path
LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run")
# what a run imports when it gets there
LATER = (
    "diffusers.pipelines.wan.pipeline_wan_i2v", "diffusers.training_utils", "torch.distributed.fsdp",
    "torch.utils.checkpoint", "transformers.models.umt5.modeling_umt5",
)  # fmt: skip
server = None


class Process:
    """A forked Python process. With stdout or stderr None they are this process's own."""

    def __init__(self, arguments, cwd=None, env=None, stdout=None, stderr=None, start_new_session=None):
        self.args, self.returncode = [sys.executable, *map(str, arguments)], None
        self.files = [open_output(stream) for stream in (stdout, stderr)]
        out = self.files[0] or 1
        errors = out if stderr == subprocess.STDOUT else self.files[1] or 2
        request = {
            "arguments": self.args[1:], "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env),
            "session": start_new_session,
        }  # fmt: skip
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(os.environ[ADDRESS])
        streams = [stream if isinstance(stream, int) else stream.fileno() for stream in (out, errors)]
        socket.send_fds(self.connection, [json.dumps(request).encode()], streams)
        self.pid = int(self.connection.recv(32))

    def wait(self, timeout=None):
        if self.returncode is None:
            self.connection.settimeout(timeout)
            try:
                self.returncode = int(self.connection.recv(32))
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(self.args, timeout) from error
            self.connection.close()
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """(standard output, standard error) as text, when it has ended; None for what was not to be kept."""
        self.wait(timeout)
        return tuple(self._text(stream) for stream in self.files)

    def _text(self, stream):
        if stream is None or isinstance(stream, int):
            return None
        stream.seek(0)
        return stream.read().decode()


def open_output(stream):
    """A file for a pipe: it takes any amount while nobody reads."""
    return tempfile.TemporaryFile() if stream == subprocess.PIPE else stream


def run(arguments, timeout=280, **settings):
    """What `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)` gives."""
    process = Process(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)
    try:
        out, errors = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def start():
    """Start the server, which imports at the first request; it ends by `stop`, or soon after this process."""
    global server
    folder = tempfile.mkdtemp(prefix="zygote-", dir="/tmp")  # such an address has 107 characters at most
    os.environ[ADDRESS] = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(os.environ[ADDRESS])
        listening.listen(64)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, str(listening.fileno()), str(os.getpid())]
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[listening.fileno()],
            start_new_session=True,
        )  # fmt: skip


def stop():
    if server is not None:
        server.kill()
        server.wait()
        shutil.rmtree(Path(os.environ[ADDRESS]).parent)


# -- the server


def serve(listening, parent):
    """Fork for every request a process that tells how the one ends that it forks. Returns in that one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that tell
    listening.settimeout(5)
    imported = False
    while os.getppid() == parent:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        imported = imported or import_all()
        if os.fork():
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        content, streams, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        pid = os.fork()
        if not pid:
            connection.close()
            listening.close()
            return json.loads(content), streams
        with contextlib.suppress(OSError):  # the client may have ended
            connection.sendall(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    shutil.rmtree(Path(os.environ[ADDRESS]).parent, ignore_errors=True)
    os._exit(0)


def import_all():
    sys.path.insert(0, str(ROOT))
    errors = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # what libraries say when they are imported, a process would say to itself
    try:
        for name in ("train_reward_fl", "train_flow_grpo", *LAUNCHERS, *LATER):
            __import__(name)
    finally:
        os.dup2(errors, 2)
        os.close(errors)
    del sys.path[0]
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"importing has started threads, whose locks a fork would hold forever: {threads}"
    gc.collect()
    gc.freeze()  # so that a child's garbage collection does not copy all of it
    return True


def become(request, streams):
    """Of a forked process: what a new one would be."""
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.modules["numpy"].random.seed()  # what starts by itself from the system's entropy


def execute(words):
    """Run what follows `python` on a command line: a file, -m and a module or -c and code."""
    first, *rest = words[1:] if words[0] == "-u" else words
    if first == "-m":
        name, *rest = rest
        if name in LAUNCHERS:
            launch_by_forking()
            del sys.modules[name]
        sys.argv, sys.path[0] = [name, *rest], os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *rest = rest
        sys.argv, sys.path[0] = [first, *rest], ""
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = [first, *rest], os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


def launch_by_forking():
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    started = subprocess.Popen

    def forked(args, **settings):
        return Process(args[1:], **settings) if args[0] == sys.executable else started(args, **settings)

    subprocess.Popen = subprocess_handler.Popen = forked


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        asked, outputs = serve(requests, int(sys.argv[2]))
    become(asked, outputs)
    execute(asked["arguments"])
