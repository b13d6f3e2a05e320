"""How our threads share a busy machine: small steps run on one thread, and threads that wait for others may sleep.

On Linux PyTorch divides an operation among threads by GNU OpenMP. A thread that is done early spins: it asks 300,000
times whether the others are done, and sleeps only then. That is fastest while every thread has a core. But beside
another busy process it keeps the core from the very thread that all wait for, so two runs at once are 100 times slower.

The number of spins cannot be changed after torch is imported. But GNU OpenMP itself spins only 100 times while it has
more threads than there are cores, so we add some that do nothing. They take no part in any sum, so the weights stay the
same to the bit.
"""

import math
import os
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import torch

SMALL_STEP = 2**22  # multiply-adds; a step with fewer gains nothing from a second thread
INTERVAL = 0.1  # seconds between two looks at the machine
BUSY = 0.1  # share of their time that our threads wait for a core; it is 0.001 when we are alone on the machine


def num_threads(multiply_adds):
    """Return how many threads a step with so many multiply-adds is worth: one, or all that torch may use."""
    return 1 if multiply_adds < SMALL_STEP else torch.get_num_threads()


@contextmanager
def share_cores(multiply_adds=math.inf):
    """Inside the block, run torch on as many threads as steps with so many multiply-adds are worth.

    If these are several, they leave the cores to other processes that need them.
    """
    before, done = torch.get_num_threads(), Event()
    torch.set_num_threads(num_threads(multiply_adds))
    watcher = Thread(target=share, args=(done,), daemon=True)
    watches = torch.get_num_threads() > 1 and Path("/proc/self/schedstat").exists()  # Linux
    if watches:
        watcher.start()
    try:
        yield
    finally:
        done.set()
        if watches:
            watcher.join()
        torch.set_num_threads(before)


def share(done):
    """Add threads while the machine is busy, until `done` is set."""
    release, before = None, (0, 0)  # the first look is at all that the process has done so far
    while True:
        (ran, waited), before = before, scheduled()
        ran, waited = before[0] - ran, before[1] - waited
        busy = waited > BUSY * (ran + waited)
        if busy and not release:
            release = Event()
            for _ in range(num_holders(torch.get_num_threads(), len(os.sched_getaffinity(0)))):
                Thread(target=hold_threads, args=(release,), daemon=True).start()
        elif not busy and release:
            release.set()
            release = None
        if done.wait(INTERVAL):
            break
    if release:
        release.set()


def scheduled():
    """Return the nanoseconds that our threads ran, and those that they waited for a core. Only Linux knows: else 0."""
    ran = waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            times = file.read_text(encoding="ascii").split()
        except OSError:  # the thread has ended
            continue
        ran, waited = ran + int(times[0]), waited + int(times[1])
    return ran, waited


def num_holders(num_threads, cores):
    """Return how many more sets of num_threads - 1 threads give GNU OpenMP more threads than there are cores."""
    return (cores - num_threads) // (num_threads - 1) + 1 if 1 < num_threads <= cores else 0


def hold_threads(release):
    """Start another set of PyTorch's threads, and keep them asleep until the Event `release` is set."""
    torch.zeros(2**18).add_(1)  # large enough to be divided among threads
    release.wait()
