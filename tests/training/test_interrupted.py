"""train.py stopped or killed at any moment, and resumed: the run and its log are those of the undisturbed run.

All of train.py runs in this process, and is disturbed at what it does: a step, an evaluation, a row, a save. At the end
processes are killed at each of their writes. Others get real signals: in test_train.py and test_dist.py.
"""

import csv
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import Mock

import pytest
import torch

import model
from helpers import (
    ONE_THREAD,
    ROOT,
    STATEFUL,
    assert_same_run,
    here,
    load,
    log,
    needs_extras,
    ok,
    progress,
    run,
    same,
    unix,
)

FLAGS = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 2 --device cpu --dropout 0.1".split()
FLAGS += "--gradient_accumulation_steps 2 --warmup_iters 3 --recipe nanogpt --optimizer muon".split()
INTERVALS = "--max_iters 5 --eval_interval 3 --save_interval 2 --log_interval 2 --eval_iters 1".split()


class Killed(BaseException):
    """The end of a process that has no time for anything."""


def kill_at(n):
    def kill(number, name, stop):
        if number == n:
            raise Killed

    return kill


@pytest.fixture
def go(data_dir):
    """go(out_dir, *flags, disturb) starts or resumes a run in out_dir. Returns its exit code and events.

    disturb(number, name, stop)  is called before each event. stop(signum) is what the system does with a signal
    """

    def go(out_dir, *flags, disturb=lambda number, name, stop: None):
        events, handlers = [], {}

        def announced(name, do):
            def call(*args, **kwargs):
                disturb(len(events), name, lambda signum: handlers[signum](signum, None))
                events.append(name)
                return do(*args, **kwargs)

            return call

        resume = ["--init_from", "resume"] if (out_dir / "last.pt").exists() else []
        words = [*FLAGS, "--data_dir", data_dir, *INTERVALS, "--out_dir", out_dir, *flags, *resume]
        if resume:
            words = ["--out_dir", out_dir, *flags, *resume]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()):
            patch.setattr("sys.argv", ["train.py", *map(str, words)])
            patch.setattr("signal.signal", handlers.__setitem__)
            patch.setattr(torch.optim.AdamW, "step", announced("step", torch.optim.AdamW.step))
            patch.setattr(torch.Tensor, "item", announced("number", torch.Tensor.item))  # of a loss, say
            patch.setattr(model.GPT, "eval", announced("evaluate", model.GPT.eval))
            patch.setattr(model.GPT, "generate", lambda model, idx, *settings, **more: idx)
            patch.setattr(csv, "writer", announced("row", csv.writer))
            patch.setattr(model, "save_checkpoint", announced("save", model.save_checkpoint))
            try:
                runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
            except SystemExit as error:
                return error.code, events
        return 0, events

    return go


@pytest.fixture
def whole(go, tmp_path):
    """(out_dir, events) of the undisturbed run."""
    code, events = go(tmp_path / "whole")
    assert code == 0 and {*events} == {"step", "number", "evaluate", "row", "save"}
    return tmp_path / "whole", events


def evaluations(out_dir):
    return [(row["step"], row["val_loss"]) for row in log(out_dir) if row["val_loss"]]


def assert_undisturbed(whole, out_dir, signaled=False):
    """A signal adds a row to the log: that of the steps before it."""
    if signaled:
        assert evaluations(out_dir) == evaluations(whole)
    else:
        assert progress(out_dir) == progress(whole)
    assert_same_run(whole, out_dir)
    for name in ("ckpt.pt", "last.pt"):
        ours, theirs = (load(folder / name) for folder in (out_dir, whole))
        for file in (ours, theirs):
            for key in ("init_from", "out_dir"):
                del file["config"][key]
            file.pop("seconds", None)
        assert same(ours, theirs)


# with patience, a resume that evaluated again must not count that evaluation twice
PATIENCE = "--learning_rate 0 --patience 2 --max_iters 30 --eval_interval 2".split()


@pytest.mark.parametrize(
    "flags, rows",
    [
        ([], [(2, False), (3, True), (4, False), (5, True)]),
        pytest.param(PATIENCE, [(2, True), (4, True), (6, True)], marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_before_anything_it_does_resumes_to_the_same_run_and_log(flags, rows, go, tmp_path):
    """First, what is due is logged: otherwise we would compare empty logs."""
    whole = tmp_path / "whole"
    _, events = go(whole, *flags)
    assert [(int(step), bool(val_loss)) for step, _, val_loss, _ in progress(whole)] == rows
    assert events.count("step") == rows[-1][0]
    for n in range(len(events)):
        out = tmp_path / str(n)
        with pytest.raises(Killed):
            go(out, *flags, disturb=kill_at(n))
        assert progress(out) == progress(whole)[: len(log(out))]
        go(out, *flags)
        assert_undisturbed(whole, out)


@needs_extras
def test_a_run_stopped_by_a_signal_at_any_time_resumes_to_the_same_run(whole, go, tmp_path):
    out_dir, events = whole
    for n in range(len(events)):

        def stop_at(number, name, stop):
            if number == n:  # noqa: B023
                stop(signal.SIGTERM)

        out = tmp_path / str(n)
        code, done = go(out, disturb=stop_at)
        steps = done.count("step")
        # it stops after the step, or after the next one, and saves it
        before = events[:n].count("step")
        assert before <= steps <= min(5, before + 1)
        assert code == (128 + signal.SIGTERM if steps < 5 else 0)
        assert load(out / "last.pt")["iter_num"] == int(log(out)[-1]["step"]) == steps
        go(out)
        assert_undisturbed(out_dir, out, signaled=True)


@pytest.mark.parametrize("value, intervals", [(math.inf, (100, 1)), (1e38, (4, 5))])
def test_weights_that_are_broken_replace_no_file(value, intervals, go, tmp_path, monkeypatch):
    """If the step before a save breaks them, no loss shows it. 1e38 is finite, but no loss that it gives is."""
    made = []
    init = model.GPT.__init__
    monkeypatch.setattr(model.GPT, "__init__", lambda gpt, config: made.append(gpt) or init(gpt, config))

    def spoil(number, name, stop):
        if name == "step":
            for p in made[-1].parameters():
                p.data.fill_(value)

    go(tmp_path, "--max_iters", "3")
    before = {name: (tmp_path / name).read_bytes() for name in ("ckpt.pt", "last.pt", "log.csv")}
    flags = [word for name, n in zip(("eval", "save", "log"), (*intervals, 5)) for word in (f"--{name}_interval", n)]
    code, events = go(tmp_path, "--max_iters", "9", *flags, disturb=spoil)
    assert "the loss or a weight is not finite: lower --learning_rate" in code
    assert [event for event in events if event != "number"] == (["step", "evaluate"] if 4 in intervals else ["step"])
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert go(tmp_path, "--max_iters", "9")[0] == 0  # and a sane run goes on from there


# -- every write in turn fails, or the process is killed at it ---------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The environment of a process whose FAULT_AT-th write below FAULT_DIR, of any kind, fails or kills it."""
    if not sys.platform.startswith("linux") or not shutil.which("cc"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests" / "faults.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), **ONE_THREAD}


@unix
def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """A power cut could leave an empty file under the good name otherwise."""
    calls = Mock(fsync=Mock(wraps=os.fsync), replace=Mock(wraps=os.replace))
    monkeypatch.setattr(os, "fsync", calls.fsync)
    monkeypatch.setattr(os, "replace", calls.replace)
    model.write_atomically(tmp_path / "file", [b"n", b"ew"])
    assert [name for name, *_ in calls.mock_calls] == ["fsync", "replace"]


# each folder in a forked child, which saves the imports, for the fixture faults. In folder 7 the 7th write fails
RESUME = """
import os, runpy, sys
from pathlib import Path
import torch._dynamo, train  # which each optimizer would import

for folder in map(Path, sys.argv[1:]):
    child = os.fork()
    if not child:
        os.environ.update({"FAULT_DIR": f"{folder}/", "FAULT_AT": folder.name})
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        sys.argv = ["train.py", "--init_from", "resume", "--out_dir", str(folder), "--max_iters", "6"]
        try:
            runpy.run_path("train.py", run_name="__main__")
        except SystemExit as error:
            os._exit(1 if isinstance(error.code, str) else error.code or 0)
        except OSError:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    if code == 0:
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True], ids=["I/O error", "kill"])
def test_a_save_that_ends_at_any_write_leaves_checkpoints_to_go_on_from(kills, faults, data_dir, tmp_path):
    """We fail every write of log.csv, ckpt.pt and last.pt in turn, until a run has no more of them."""
    flags = [*STATEFUL, "--lr_decay_iters", 6, "--log_interval", 2, "--eval_interval", 2, "--data_dir", data_dir]
    ok(here(*flags, "--max_iters", 6, "--out_dir", tmp_path / "whole"))
    folders = [tmp_path / str(at) for at in range(1, 51)]
    ok(here(*flags, "--max_iters", 4, "--out_dir", folders[0]))
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    env = faults | ({"FAULT_KILLS": "1"} if kills else {})
    codes = [int(code) for code in ok(run("-c", RESUME, *folders, env=env)).stdout.split()]
    n = codes.index(0)
    assert codes[:n] == [-signal.SIGKILL if kills else 1] * n
    assert n > 11  # an open, a write, a sync and a rename at least, for every file
    for out in folders[:n]:
        assert load(out / "ckpt.pt") and load(out / "last.pt")["iter_num"] in (4, 6)
        ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 6))
        assert_same_run(tmp_path / "whole", out)
        assert [row["step"] for row in log(out)] == [row["step"] for row in log(tmp_path / "whole")]
