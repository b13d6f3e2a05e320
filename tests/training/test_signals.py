"""kvgpt/training/signals.py: the signals that stop a run."""

import os
import signal

import pytest

from helpers import run, unix
from kvgpt.training.dist import Ranks
from kvgpt.training.signals import StopSignals

pytestmark = unix


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_a_number_to_poll(name, restored_signals):
    stop, number = StopSignals(Ranks()), getattr(signal, name)
    assert stop.poll() == 0
    os.kill(os.getpid(), number)
    assert stop.poll() == stop.poll() == number


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_that_is_ignored_on_purpose_stays_so(name, restored_signals):
    """nohup ignores SIGHUP, and a shell script SIGINT for a command that ends with &."""
    number = getattr(signal, name)
    signal.signal(number, signal.SIG_IGN)
    stop = StopSignals(Ranks())
    os.kill(os.getpid(), number)
    assert stop.poll() == 0


def test_the_first_of_several_signals_counts(restored_signals):
    """The exit code of a run is that of the signal that stopped it."""
    stop = StopSignals(Ranks())
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.poll() == signal.SIGTERM


def test_a_second_signal_ends_the_process_at_once():
    code = """
import os, signal
from kvgpt.training.dist import Ranks
from kvgpt.training.signals import StopSignals
stop = StopSignals(Ranks())
os.kill(os.getpid(), signal.SIGTERM)
print(stop.poll(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still here", flush=True)
"""
    result = run("-c", code)
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, f"{int(signal.SIGTERM)}\n")


def test_nohup_keeps_a_run_alive(restored_signals):
    """nohup makes the process ignore SIGHUP. A handler would undo that, and the run would end with the terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignals(Ranks())
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.poll() == 0
