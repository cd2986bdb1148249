"""SIGTERM, SIGINT and SIGHUP, noted until a place at which nothing is lost by stopping. No torch here."""

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

ECHO = 1.0  # seconds: a launcher passes on what a batch system or a terminal has sent to its children, too


class Interruption:
    """Within `with`, once `listen` was called: the first signal is noted, a second one ends the process at once."""

    def __init__(self):
        self.noted = 0  # what this process was sent
        self.number = 0  # what all processes agreed on
        self._noted_at = 0.0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "Interruption":
        return self

    def listen(self) -> None:
        """Until here a signal ends the process at once: there is nothing to save yet. Main thread only.

        A SIGHUP that is ignored stays so: nohup has asked for that.
        """
        taken = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in taken}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.noted:
            self.noted, self._noted_at = number, time.monotonic()
        elif time.monotonic() - self._noted_at > ECHO:
            os._exit(128 + number)

    def __exit__(self, kind: type[BaseException] | None, *_exception) -> None:
        if not self._before and kind is KeyboardInterrupt:  # one line, as of any other end
            print("SIGINT: stopped before the first step; the same command starts again", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT)
        for number, before in self._before.items():
            signal.signal(number, before)

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
