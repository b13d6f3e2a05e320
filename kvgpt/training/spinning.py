"""Threads that wait: they spin on an idle machine and sleep on a busy one.

On Linux PyTorch divides an operation among threads by GNU OpenMP. A thread that is done early spins: it asks 300,000
times whether the others are done, and sleeps only then. Spinning is fastest while every thread has a core. Beside
another busy process it keeps the core from the thread that all wait for. Two runs side by side drop to a hundredth.

The number of spins cannot be changed after torch is imported. GNU OpenMP itself spins 100 times only while it has more
threads than there are cores, and `hold_threads` adds some that do nothing. No sum changes, so the weights stay the
same to the bit.
"""

import os
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import torch

INTERVAL = 0.5  # seconds between two looks
BUSY = 0.2  # seconds per second that this process's threads wait for a core; 0.001 alone, 0.5 beside one busy process


@contextmanager
def share_cores():
    """Inside the block, let waiting threads sleep while other processes need the cores. Other systems: do nothing."""
    if not Path("/proc/self/schedstat").exists():
        yield
        return
    done = Event()
    watcher = Thread(target=watch, args=(done,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def watch(done):
    """Add threads while the machine is busy, until `done` is set."""
    release, waited = None, seconds_waited()
    while not done.wait(INTERVAL):
        before, waited = waited, seconds_waited()
        busy = waited - before > BUSY * INTERVAL
        if busy and not release:
            release = Event()
            for _ in range(num_holders(torch.get_num_threads(), len(os.sched_getaffinity(0)))):
                Thread(target=hold_threads, args=(release,), daemon=True).start()
        elif not busy and release:
            release.set()
            release = None
    if release:
        release.set()


def seconds_waited():
    """Return the seconds that the threads of this process were ready to run and had no core, summed over them."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            nanoseconds += int(file.read_text(encoding="ascii").split()[1])
        except OSError:  # the thread has ended
            continue
    return nanoseconds / 1e9


def num_holders(num_threads, cores):
    """Return how many sets of num_threads - 1 more threads GNU OpenMP needs to have more threads than cores."""
    return (cores - num_threads) // (num_threads - 1) + 1 if 1 < num_threads <= cores else 0


def hold_threads(release):
    """Start another set of PyTorch's threads, and keep them asleep until the Event `release` is set."""
    torch.zeros(2**18).add_(1)  # large enough to be divided among threads
    release.wait()
