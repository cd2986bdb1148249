"""Note SIGTERM, SIGINT and SIGHUP until training can stop without loss. This module does not import torch."""

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO = 1.0  # seconds within which a launcher may pass on a signal that the process got itself


class Interruption:
    """A context that notes the first signal after `listen`. A second signal ends the process at once."""

    def __init__(self):
        self.received = 0  # signal of this process
        self.number = 0  # signal that all processes agreed on
        self._noted_at = 0.0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "Interruption":
        return self

    def listen(self) -> None:
        """Handle signals from here on, but a SIGHUP that nohup ignores. Call it on the main thread."""
        ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else []
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS if number not in ignored}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._noted_at = number, time.monotonic()
        elif time.monotonic() - self._noted_at > ECHO:
            os._exit(128 + number)

    def __exit__(self, error: type[BaseException] | None, *_exception) -> None:
        if not self._before and error is KeyboardInterrupt:  # one line instead of a traceback
            print("SIGINT: stopped before the first step; the same command starts again", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT)
        for number, before in self._before.items():
            signal.signal(number, before)

    def any_signal(self, largest: Callable[[int], int]) -> bool:
        """Tell whether any process got a signal. Collective. largest: the maximum over all processes."""
        self.number = self.number or largest(self.received)
        return self.number != 0
