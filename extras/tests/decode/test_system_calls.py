"""Where the system refuses a call, we do without it: the C backend gives the same text and leaves the cores alone.

And extras/threads.py, whose threads yield on a busy machine.
"""

import json
import subprocess
from pathlib import Path

import pytest

from extra_helpers import needs_compiler
from helpers import linux, ok, run

pytestmark = [needs_compiler, linux, pytest.mark.slow]

# `affinity` reads the file of each thread, because os.sched_getaffinity may be the call that fails
TEXT = """
import gc, json, os, torch
from pathlib import Path
from extras.decode import c_step
from extras.decode.engine import Decoder
from model import GPT, GPTConfig

def threads():
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}

def cores(thread):
    (line,) = [x for x in Path(f"/proc/self/task/{thread}/status").read_text().splitlines() if "Cpus_allowed_list" in x]
    return line.split()[1]

torch.set_num_threads(3)
torch.manual_seed(0)
c_step.WORK_PER_THREAD = 1
model = GPT(GPTConfig(block_size=64, vocab_size=23, n_layer=2, n_head=2, n_embd=32)).eval()
before = threads()
caller = os.getpid()
own = cores(caller)
decoder = Decoder(model, compile=True)
text = decoder.generate(torch.zeros(2, 1, dtype=torch.int64), 63, seed=1).tolist()
after = cores(caller)
workers = sorted(cores(thread) for thread in threads() - before)
del decoder, model.kv_cache
gc.collect()
print(json.dumps(dict(text=text, own=own, after=after, workers=workers, left=len(threads() - before))))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = tmp_path_factory.mktemp("shim") / "system_calls.so"
    subprocess.run(["cc", "-shared", "-fPIC", Path(__file__).with_name("system_calls.c"), "-o", library], check=True)
    return library


@pytest.fixture(scope="module")
def expected(shim):
    """What a run without failures gives. The caller may use all of its cores again."""
    found = decode(shim, "mutex")
    assert found["after"] == found["own"] and len(found["workers"]) == 2 and found["left"] == 0
    return found


def decode(shim, calls):
    result = ok(run("-c", TEXT, env={"LD_PRELOAD": str(shim), "FAIL": calls, "OMP_NUM_THREADS": "1"}))
    assert "mutexes" not in result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("calls", ["getaffinity", "setaffinity", "getcpu", "madvise", "create", "getaffinity create"])
def test_a_call_that_fails_changes_no_token_and_leaves_the_cores_and_no_thread(calls, shim, expected):
    got = decode(shim, calls)
    assert got["text"] == expected["text"]
    assert got["after"] == got["own"] == expected["own"]
    assert len(got["workers"]) == (1 if "create" in calls else 2)
    assert "getaffinity" not in calls or set(got["workers"]) == {got["own"]}  # and not all on the caller's core
    assert got["left"] == 0


# a machine that is always busy, looked at every 2 ms
BUSY = """
import itertools, sys, time, torch
from extras import threads
torch.set_num_threads(2)
waited = itertools.count(10**9, 10**9)
threads.INTERVAL, threads.schedule_times = 0.002, lambda: (0, next(waited))
threads.share_cores()
time.sleep(float(sys.argv[1]))
print(torch.zeros(2**18).add_(1).sum().item())
"""


def test_a_short_process_on_a_busy_machine_exits_cleanly():
    """Python stops daemon threads when it exits. One that was inside torch aborted about half of these processes."""
    for milliseconds in range(10):
        assert ok(run("-c", BUSY, milliseconds / 1000)).stderr == ""


@pytest.mark.parametrize("calls", ["", "getaffinity", "new thread"])
def test_a_run_goes_on_without_extra_threads(calls, shim):
    result = ok(run("-c", BUSY, 0.1, env={"LD_PRELOAD": str(shim), "FAIL": calls}))  # it has tried to start threads
    assert (result.stdout, result.stderr) == (f"{2.0**18}\n", "")
