"""Threads that sleep instead of spinning when the machine is busy.

On Linux PyTorch splits an operation over threads with GNU OpenMP. A thread that finishes early spins: it checks 300,000
times whether the rest are done before it sleeps. That is fastest as long as every thread has a core. But if another
process is busy, the spinning thread occupies the core that the slowest thread needs, and two training runs at once
would each be 100 times slower.

The number of spins is fixed once torch is imported. But GNU OpenMP spins only 100 times if it has more threads than
there are cores. So while the machine is busy, we start extra threads that do nothing. They take no part in any sum, so
the weights stay bit-identical. Always spinning this little would be simpler, but training would be 7% slower.
"""

import atexit
import os
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread

import torch

INTERVAL = 0.1  # seconds between two checks of the load
BUSY = 0.1  # fraction of time that our threads wait for a core; it is 0.001 when we are alone on the machine


@cache  # one watcher per process
def share_cores():
    """From now on, let torch's threads sleep early while another process needs the cores. Only Linux needs it."""
    if Path("/proc/self/schedstat").exists():
        done = Event()
        if watcher := start(watch, done):
            # a thread that is still inside torch when the interpreter exits would abort the process
            atexit.register(lambda: (done.set(), watcher.join()))


@contextmanager
def torch_threads(n):
    """Run torch on n threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start(target, event):
    """Start a thread that calls target(event), and return it. None: the system gives us no more."""
    thread = Thread(target=target, args=(event,), daemon=True)
    with suppress(RuntimeError):
        thread.start()
        return thread


def watch(done):
    """Hold extra threads for as long as the machine is busy, until the Event `done` is set."""
    ran = 0
    waited = 0
    holder = None
    end = Event()  # set while no extra threads are held
    end.set()
    while not done.wait(INTERVAL):
        ran_before = ran
        waited_before = waited
        ran, waited = schedule_times()
        busy = (waited - waited_before) > BUSY * (ran - ran_before + waited - waited_before)
        if not busy:
            end.set()
        elif end.is_set():
            end.clear()
            # a new thread, because an old one does not see what torch.set_num_threads has changed since
            holder = start(hold_extra_threads, end)
    end.set()
    if holder:
        holder.join()


def schedule_times():
    """Return the nanoseconds that our threads ran, and those that they waited for a core."""
    ran = waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            times = file.read_text(encoding="ascii").split()
        except OSError:  # the thread has ended
            continue
        ran += int(times[0])
        waited += int(times[1])
    return ran, waited


def hold_extra_threads(end):
    """Keep more of torch's threads than there are cores until the Event `end` is set."""
    threads = torch.get_num_threads()
    try:
        cores = len(os.sched_getaffinity(0))
    except OSError:  # a sandbox forbids it
        cores = 0
    if not 1 < threads <= cores:  # torch needs no other thread, or has too many already
        end.set()
        return
    # teams of `threads`, besides the one of this thread
    teams = [start(hold_a_team, end) for _ in range((cores - threads) // (threads - 1))]
    hold_a_team(end)
    for team in filter(None, teams):
        team.join()


def hold_a_team(end):
    """Start an OpenMP team, of which every Python thread has its own, and keep it until `end` is set."""
    torch.zeros(2**18).add_(1)  # large enough to be split over threads
    end.wait()
