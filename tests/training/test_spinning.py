"""kvgpt/training/spinning.py: waiting threads spin on an idle machine and sleep on a busy one."""

import os
import subprocess
import sys

import pytest

from helpers import linux, ok, run
from kvgpt.training.spinning import num_holders

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
pytestmark = [linux, pytest.mark.skipif(CORES < 2, reason="one thread waits for nobody")]

CHILD = """
import os, resource, time
from threading import Event, Thread
import torch
from kvgpt.training import spinning
torch.set_num_threads(len(os.sched_getaffinity(0)))
x = torch.zeros(2**18)
x.add_(1)
def num_threads():
    return len(os.listdir("/proc/self/task"))
"""


def test_enough_threads_are_held_to_exceed_the_cores():
    """PyTorch takes one thread per physical core, half of the cores that a machine with hyperthreading shows."""
    for cores in range(1, 65):
        for threads in range(2, cores + 1):
            holders = num_holders(threads, cores)
            assert threads + holders * (threads - 1) > cores >= threads + (holders - 1) * (threads - 1)
    assert num_holders(1, 8) == num_holders(9, 8) == 0  # no waiting; GNU OpenMP spins briefly by itself


def test_threads_sleep_while_others_are_held_and_spin_afterwards():
    code = """
def fewest_sleeps():
    '''Of 20 operations, in the quietest of 50 moments: this may run beside other tests.'''
    counts = []
    for _ in range(50):
        began = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        for _ in range(20):
            x.add_(1)
            for _ in range(2000):  # longer than 100 spins, shorter than 300,000
                pass
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - began)
    return min(counts)

def gradient():
    '''Of a norm's weight: a sum over rows, whose last bits depend on the number of threads.'''
    norm, rows = torch.nn.LayerNorm(128), torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    norm(rows).square().sum().backward()
    return norm.weight.grad

alone, release = (fewest_sleeps(), gradient()), Event()
holder = Thread(target=spinning.hold_threads, args=(release,))
holder.start()
time.sleep(0.5)
held = (fewest_sleeps(), gradient())
release.set()
holder.join()
time.sleep(0.5)
print(alone[0], held[0], fewest_sleeps(), torch.equal(alone[1], held[1]))
"""
    alone, held, after, equal = ok(run("-c", CHILD + code)).stdout.split()
    assert int(alone) < 5 and int(after) < 5 and int(held) >= 10 and equal == "True"


def test_threads_are_held_while_this_process_waits_for_cores():
    code = """
with spinning.share_cores():
    before = num_threads()
    while num_threads() == before:
        x.add_(1)
    print("busy")
    while num_threads() > before:
        time.sleep(0.1)  # wants no core, so it waits for none
    print("idle")
    while num_threads() == before:
        x.add_(1)
while num_threads() >= before:  # the threads that were held and the watcher
    time.sleep(0.1)
print("over")
"""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(CORES)]
    try:
        assert ok(run("-c", CHILD + code)).stdout.split() == ["busy", "idle", "over"]
    finally:
        for process in busy:
            process.kill()
            process.wait()
