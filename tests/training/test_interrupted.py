"""train.py stopped or killed at any moment, and resumed: the run and its log are those of the undisturbed run.

All of train.py runs in this process, and is disturbed at what it does: a step, an evaluation, a row, a save. Others
send real signals to real processes: test_train.py, test_evaluate.py and test_dist.py.
"""

import csv
import math
import runpy
import signal
from contextlib import redirect_stdout, suppress
from io import StringIO

import pytest
import torch

import model
from helpers import ROOT, assert_same_run, load, log, progress, same

FLAGS = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 2 --device cpu --dropout 0.1".split()
FLAGS += "--gradient_accumulation_steps 2 --warmup_iters 3 --recipe nanogpt --optimizer muon".split()
INTERVALS = "--max_iters 9 --eval_interval 4 --save_interval 3 --log_interval 2 --eval_iters 1".split()


class Killed(BaseException):
    """The end of a process that has no time for anything."""


@pytest.fixture
def go(data_dir):
    """go(out_dir, disturb, *flags) starts or resumes a run in out_dir. Returns its exit code and events.

    disturb(number, name, stop)  is called before each event. stop(signum) is what the system does with a signal
    """

    def go(out_dir, disturb=lambda number, name, stop: None, *flags):
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
    assert code == 0 and {*events} == {"step", "evaluate", "row", "save"}
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


def test_a_run_killed_before_anything_it_does_resumes_to_the_same_run_and_log(whole, go, tmp_path):
    """First, what is due is logged: otherwise we would compare empty logs."""
    out_dir, events = whole
    rows = [(int(step), bool(val_loss)) for step, _, val_loss, _ in progress(out_dir)]
    assert rows == [(step, step % 4 == 0 or step == 9) for step in (2, 3, 4, 6, 8, 9)]
    assert events.count("step") == 9
    for n in range(len(events)):

        def kill(number, name, stop):
            if number == n:  # noqa: B023
                raise Killed

        here = tmp_path / str(n)
        with suppress(Killed):
            go(here, kill)
            raise AssertionError("not killed")
        assert progress(here) == progress(out_dir)[: len(log(here))]
        go(here)
        assert_undisturbed(out_dir, here)


def test_a_run_stopped_by_a_signal_at_any_time_resumes_to_the_same_run(whole, go, tmp_path):
    out_dir, events = whole
    for n in range(len(events)):

        def stop_at(number, name, stop):
            if number == n:  # noqa: B023
                stop(signal.SIGTERM)

        here = tmp_path / str(n)
        code, done = go(here, stop_at)
        steps = done.count("step")
        # it stops after the step, and saves it
        assert steps == min(9, events[:n].count("step") + (events[n] != "evaluate"))
        assert code == (128 + signal.SIGTERM if steps < 9 else 0)
        assert load(here / "last.pt")["iter_num"] == int(log(here)[-1]["step"]) == steps
        go(here)
        assert_undisturbed(out_dir, here, signaled=True)


def test_a_run_stopped_after_every_single_step_is_the_same_run_too(whole, go, tmp_path):
    out_dir, _ = whole

    def stop_at(number, name, stop):
        if name == "step":
            stop(signal.SIGINT)

    for step in range(1, 10):
        code, _ = go(tmp_path / "out", stop_at)
        assert code == (130 if step < 9 else 0) and load(tmp_path / "out" / "last.pt")["iter_num"] == step
    assert go(tmp_path / "out")[0] == 0
    assert_undisturbed(out_dir, tmp_path / "out", signaled=True)


def test_patience_counts_the_same_evaluations_in_a_run_that_was_killed(go, tmp_path):
    """A resume that evaluated again must not count that evaluation twice."""
    flags = "--learning_rate 0 --patience 2 --max_iters 30 --eval_interval 2".split()
    _, events = go(tmp_path / "whole", lambda *event: None, *flags)
    assert [int(row[0]) for row in progress(tmp_path / "whole") if row[2]] == [2, 4, 6]
    for n in range(events.index("evaluate"), len(events)):

        def kill(number, name, stop):
            if number == n:  # noqa: B023
                raise Killed

        with suppress(Killed):
            go(tmp_path / str(n), kill, *flags)
        go(tmp_path / str(n), lambda *event: None, *flags)
        assert_undisturbed(tmp_path / "whole", tmp_path / str(n))


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

    go(tmp_path, lambda *event: None, "--max_iters", "3")
    before = {name: (tmp_path / name).read_bytes() for name in ("ckpt.pt", "last.pt")}
    flags = [word for name, n in zip(("eval", "save", "log"), (*intervals, 5)) for word in (f"--{name}_interval", n)]
    code, events = go(tmp_path, spoil, "--max_iters", "9", *flags)
    assert "the loss or a weight is not finite" in code
    assert events == (["step", "evaluate"] if 4 in intervals else ["step"])
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
