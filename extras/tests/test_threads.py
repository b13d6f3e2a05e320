"""extras/threads.py: threads that yield on a busy machine."""

import pytest

from helpers import linux, ok, run

# a machine that is always busy, looked at every 2 ms
SHORT = """
import itertools, sys, time, torch
from extras import threads
torch.set_num_threads(2)
waited = itertools.count(10**9, 10**9)
threads.INTERVAL, threads.schedule_times = 0.002, lambda: (0, next(waited))
threads.share_cores()
time.sleep(float(sys.argv[1]))
"""


@linux
@pytest.mark.slow
def test_a_short_process_on_a_busy_machine_exits_cleanly():
    """Python stops daemon threads when it exits. One that was inside torch aborted about half of these processes."""
    for milliseconds in range(10):
        assert ok(run("-c", SHORT, milliseconds / 1000)).stderr == ""
