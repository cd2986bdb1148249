"""A signal during training is noted until the next step; a second one ends the process."""

import os
import signal
import time

import pytest

from rewardfl.training.signals import ECHO, Interruption


@pytest.fixture(autouse=True)
def without_nohup():
    """The suite may itself have been started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_noted_and_agreed_on(number):
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert signal.getsignal(number) == before
        interruption.listen()
        assert not interruption.any_signal(lambda received: received)
        os.kill(os.getpid(), number)
        assert interruption.received == number
        assert interruption.any_signal(lambda received: received)
        assert interruption.number == number
    assert signal.getsignal(number) == before


def test_a_signal_of_another_process_stops_this_one():
    interruption, calls = Interruption(), []

    def largest(received):
        calls.append(received)
        return 15

    assert interruption.any_signal(largest) and interruption.received == 0 and interruption.number == 15
    assert interruption.any_signal(largest) and calls == [0]  # no collective after all have agreed


def test_a_hangup_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as interruption:
        interruption.listen()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.received == signal.SIGTERM


def test_ctrl_c_before_the_first_step_is_one_line(capsys):
    with pytest.raises(SystemExit, match="130"), Interruption():
        raise KeyboardInterrupt
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ZeroDivisionError), Interruption():  # other exceptions pass
        raise ZeroDivisionError


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    """But not the launcher's copy of the first one, which comes soon after it."""
    codes, times = [], iter([10.0, 10.0 + ECHO / 2, 10.0 + 2 * ECHO])
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    interruption = Interruption()
    for ends in ([], [], [143]):
        interruption._note(signal.SIGTERM, None)
        assert codes == ends
