"""SIGTERM, SIGINT and SIGHUP, noted until a place at which nothing is lost by stopping. No torch here."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO = 1.0  # seconds: a launcher passes on what a batch system or a terminal has sent to its children, too


class Interruption:
    """Within `with`, once `listen` was called: the first signal is noted, a second one ends the process at once.

    A thread of its own receives them, because Python runs a handler only between two of the main thread's
    instructions: a process that waits in a collective for a rank that is gone would never see the second one.
    """

    def __init__(self):
        self.noted = 0  # what this process was sent
        self.number = 0  # what all processes agreed on
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Interruption":
        return self

    def listen(self) -> None:
        """Until here a signal ends the process at once: there is nothing to save yet. Main thread only.

        A SIGHUP that is ignored stays so: nohup has asked for that.
        """
        taken = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in taken}
        self._wakeup_before = signal.set_wakeup_fd(self._write.fileno())  # the C handler writes the number there
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        first = 0.0
        while received := self._read.recv(1):
            if received[0] not in SIGNALS:
                continue
            if not self.noted:
                self.noted, first = received[0], time.monotonic()
            elif time.monotonic() - first > ECHO:
                os._exit(128 + received[0])

    def __exit__(self, kind: type[BaseException] | None, *_exception) -> None:
        if self._thread is None:
            if kind is KeyboardInterrupt:  # one line, as of any other end
                print("SIGINT: stopped before the first step; the same command starts again", file=sys.stderr)
                raise SystemExit(128 + signal.SIGINT)
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, before in self._before.items():
            signal.signal(number, before)
        self._write.close()  # ends the thread
        self._thread.join()
        self._read.close()

    def agreed(self, largest: Callable[[int], int]) -> bool:
        """Whether any process was sent a signal. To be called by all of them at the same place.

        largest: the maximum of a number over all processes. Once agreed, it stays so without asking again.
        """
        self.number = self.number or largest(self.noted)
        return self.number != 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell counts."""
        return 128 + self.number
