"""What a signal does between two step boundaries: in this process, and in one of its own."""

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
        interruption.listen()
        assert not interruption.any_signal(lambda own: own)
        os.kill(os.getpid(), number)
        assert interruption.received == number
        assert interruption.any_signal(lambda own: own)
        assert interruption.exit_code == 128 + number and interruption.name == signal.Signals(number).name
    assert signal.getsignal(number) == before


def test_another_process_was_sent_one():
    interruption, asked = Interruption(), []

    def largest(own):
        asked.append(own)
        return 15

    assert interruption.any_signal(largest) and interruption.received == 0 and interruption.exit_code == 143
    assert interruption.any_signal(largest) and asked == [0]  # no collective after all have agreed


def test_before_listening_a_signal_does_what_it_always_does():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            interruption.listen()
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)  # comes later, and is seen
            assert interruption.received == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


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


def test_other_exceptions_before_the_first_step_pass():
    with pytest.raises(ZeroDivisionError), Interruption():
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
