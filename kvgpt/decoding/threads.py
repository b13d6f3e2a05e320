"""The number of threads of a decode step, and of its noise: one, or all that torch may use.

An operation on several threads ends when its slowest thread ends. Beside another busy process a thread may wait
milliseconds for a core, so a step on several threads can take a hundred times as long as on one.
"""

import time
from contextlib import contextmanager

import torch

SMALL_STEP = 2**22  # multiply-adds; for fewer a second thread gains nothing
TRIAL = 4  # steps that are timed to compare two numbers of threads


@contextmanager
def one_thread():
    """Set torch's number of threads to 1 inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class StepThreads:
    """Chooses the number of threads for each step of one generation.

    num_params  of the model. A token costs about as many multiply-adds
    A small step runs on one thread. A larger step runs on one thread or on all, whichever was faster lately.
    """

    def __init__(self, num_params):
        self.num_params = num_params
        self.search = fastest(torch.get_num_threads())
        self.choice = next(self.search)

    @contextmanager
    def for_tokens(self, num_tokens):
        """Set torch's number of threads inside the block, which feeds num_tokens tokens in all rows to the model.

        The block receives the number.
        """
        before, work = torch.get_num_threads(), num_tokens * self.num_params
        large = before > 1 and work >= SMALL_STEP
        torch.set_num_threads(self.choice if large else 1)
        began, began_on_core = time.perf_counter(), time.thread_time()
        try:
            yield torch.get_num_threads()
        finally:
            torch.set_num_threads(before)
        if large:
            seconds, on_core = time.perf_counter() - began, time.thread_time() - began_on_core
            self.choice = self.search.send((seconds, on_core / seconds, seconds / work))


def fastest(all_threads):
    """Yield the number of threads for the next large step: 1 or all_threads.

    Receives of that step the seconds, the share of them in which the main thread was on a core, and the seconds per
    multiply-add. Steps with longer contexts have more of these.
    """
    pause = 0.03  # seconds until a trial; a time slice of the operating system is shorter
    while True:
        # one thread
        seconds, seconds_on_core, paces = 0.0, 0.0, []
        while seconds < pause:
            step, share, pace = yield 1
            seconds += step
            seconds_on_core += share * step
            paces = [*paces[1 - TRIAL :], pace]
        pause = 0.3
        if seconds_on_core < 0.9 * seconds:  # other processes use all cores, and a trial would cost more than it gains
            continue

        # a trial of all threads, until a step takes so long that another process must have taken a core
        trial = []
        while len(trial) < TRIAL and max(trial, default=0.0) < 3 * max(paces):
            trial.append((yield all_threads)[2])
        if len(trial) < TRIAL or min(trial) > min(paces):
            pause = 1.0
            continue

        # all threads, until a step takes that long
        while (yield all_threads)[2] < 3 * max(paces):
            pass
        pause = 0.03
