"""Processes of the tests that are Python from their start, without the ten seconds that importing torch takes.

A server has imported what the scripts import, and forks: `Process(arguments)` is what
`subprocess.Popen([sys.executable, *arguments])` is, a real process with a number, signals at their default, an
environment, output and an exit code of its own. It runs a file, `-m` a module or `-c` code as `__main__`; when that is
a launcher, the Python processes that it starts are forked likewise.

The first pytest process starts the server (`start`), and all its workers use it. The real start stays tested: by
test_golden.py with `python`, and by test_launch.py with `accelerate launch`.
"""

import gc
import json
import os
import runpy
import selectors
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


class Process:
    """A forked Python process. With stdout or stderr None they are this process's own."""

    def __init__(self, arguments, cwd=None, env=None, stdout=None, stderr=None, start_new_session=False):
        self.args, self.returncode = [sys.executable, *map(str, arguments)], None
        # files, not pipes: they take any amount while nobody reads
        self.files = [kept() if stream == subprocess.PIPE else stream for stream in (stdout, stderr)]
        out = self.files[0] if self.files[0] is not None else 1
        errors = out if stderr == subprocess.STDOUT else self.files[1] if self.files[1] is not None else 2
        request = {
            "arguments": self.args[1:], "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env),
            "session": start_new_session,
        }  # fmt: skip
        content = json.dumps(request).encode()
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(os.environ[ADDRESS])
        streams = [stream if isinstance(stream, int) else stream.fileno() for stream in (out, errors)]
        socket.send_fds(self.connection, [len(content).to_bytes(8)], streams)
        self.connection.sendall(content)
        self.pid = int.from_bytes(self._receive())

    def _receive(self):
        answer = self.connection.recv(8)
        assert len(answer) == 8, "the process that forks is gone"
        return answer

    def wait(self, timeout=None):
        if self.returncode is None:
            self.connection.settimeout(timeout)
            try:
                self.returncode = int.from_bytes(self._receive(), signed=True)
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(self.args, timeout) from error
            self.connection.close()
        return self.returncode

    def poll(self):
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

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


def kept():
    return tempfile.TemporaryFile()


def run(arguments, timeout=280, **settings):
    """What `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)` gives."""
    process = Process(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)
    try:
        out, errors = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def start():
    """Start the server, which imports at the first request; it ends with this process, or by `stop`."""
    global server
    folder = tempfile.mkdtemp(prefix="zygote-", dir="/tmp")  # such an address has 107 characters at most
    os.environ[ADDRESS] = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.environ[ADDRESS])
        listening.listen(64)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, str(listening.fileno())]
        # its standard input is closed with the last process that holds the other end: this one
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, pass_fds=[listening.fileno()],
            start_new_session=True,
        )  # fmt: skip


server = None


def stop():
    if server is not None:
        server.communicate()


# -- the server


def serve(listening):
    """Fork a process for every request. Returns in that process, with the request."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children, events = {}, selectors.DefaultSelector()
    for source in (listening, sys.stdin, woken):
        events.register(source, selectors.EVENT_READ)
    imported = False
    while True:
        ready = {key.fileobj for key, _ in events.select()}
        if sys.stdin in ready:  # nobody asks any more
            os.unlink(listening.getsockname())
            os.rmdir(os.path.dirname(listening.getsockname()))
            os._exit(0)
        if woken in ready:
            woken.recv(4096)
            report(children)
        if listening in ready:
            imported = imported or import_all()
            connection, _ = listening.accept()
            if (asked := read(connection)) is None:
                continue
            request, streams = asked
            pid = os.fork()
            if pid:
                children[pid] = connection
                for stream in streams:
                    os.close(stream)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            take_streams(streams)
            if request["session"]:
                os.setsid()
            connection.sendall(os.getpid().to_bytes(8))
            for other in (listening, wake, woken, events, connection, *children.values()):
                other.close()
            return request


def report(children):
    """Tell who asked for them of the children that have ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as connection:
            code = os.waitstatus_to_exitcode(status)
            try:
                connection.sendall(code.to_bytes(8, signed=True))
            except (BrokenPipeError, ConnectionResetError):
                continue  # whoever asked has ended


def read(connection):
    """(the request, its streams); None when whoever asked has ended meanwhile."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 2)
    content = b""
    while len(content) < int.from_bytes(size):
        if not (more := connection.recv(1 << 20)):
            break
        content += more
    if len(size) == 8 and len(content) == int.from_bytes(size):
        return json.loads(content), streams
    connection.close()
    for stream in streams:
        os.close(stream)
    return None


def import_all():
    """A process with threads could not be forked: a lock that one of them holds would be held forever."""
    sys.path.insert(0, str(ROOT))
    errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # what libraries say when they are imported, a process of its own would say to itself
    try:
        for name in ("train_reward_fl", "train_flow_grpo", *LAUNCHERS, *LATER):
            __import__(name)
    finally:
        os.dup2(errors, 2)
        os.close(errors)
        os.close(nowhere)
    del sys.path[0]
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"importing has started threads: {threads}"
    gc.collect()
    gc.freeze()  # so that a child's garbage collection does not copy all of it
    return True


def take_streams(streams):
    nothing = os.open(os.devnull, os.O_RDONLY)
    for new, number in zip((nothing, *streams), (0, 1, 2), strict=True):
        os.dup2(new, number)
        os.close(new)


def become(request):
    """Of a forked process: what a new one would be."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.modules["numpy"].random.seed()  # what starts by itself from the system's entropy


def execute(words):
    """Run what follows `python` on a command line: options, then a file or -m and a module."""
    options = [word for word in words[:2] if word in ("-u",)]
    first, *rest = words[len(options) :]
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
        wanted = serve(requests)
    become(wanted)
    execute(wanted["arguments"])
