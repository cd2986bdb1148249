"""A signal during training is noted until the next step; a second one ends the process."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from rewardfl.training.signals import ECHO, Interruption

pytestmark = pytest.mark.slow(5)


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
        assert interruption.exit_code == 128 + number and interruption.name == signal.Signals(number).name
    assert signal.getsignal(number) == before


def test_a_signal_of_another_process_stops_this_one():
    interruption, calls = Interruption(), []

    def largest(received):
        calls.append(received)
        return 15

    assert interruption.any_signal(largest) and interruption.received == 0 and interruption.exit_code == 143
    assert interruption.any_signal(largest) and calls == [0]  # no collective after all have agreed


def test_a_hangup_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as interruption:
        interruption.listen()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.received == signal.SIGTERM


STARTING = """
import os, signal
from rewardfl.training.signals import Interruption
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started this may ignore it
with Interruption():
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_before_the_first_step_is_one_line():
    done = subprocess.run([sys.executable, "-c", STARTING], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr.count("\n") == 1 and "SIGINT" in done.stderr
    with pytest.raises(ZeroDivisionError), Interruption():  # other exceptions pass
        raise ZeroDivisionError


BUSY = """
import time
from rewardfl.training.signals import Interruption
with Interruption() as interruption:
    interruption.listen()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_second_signal_ends_the_process_at_once():
    process = subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)  # the launcher's copy of the first one
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5 * ECHO)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
