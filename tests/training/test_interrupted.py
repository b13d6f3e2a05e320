"""train.py stopped or killed at any moment, and resumed: the run and its log are those of the undisturbed run.

In this process, with the settings of a tiny run that does all that a run can do. test_train.py, test_evaluate.py and
test_dist.py send real signals to real processes.
"""

import math
import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest
from tqdm import tqdm

import train
from helpers import assert_same_run, load, log, progress, same, tiny_run

SETTINGS = dict(
    max_iters=9, eval_interval=4, save_interval=3, log_interval=2, eval_iters=1, gradient_accumulation_steps=2
)
SETTINGS |= dict(dropout=0.1, optimizer="muon", mtp_weight=0.3, learning_rate=1e-2, warmup_iters=3)
EVENTS = ("train_step", "evaluate", "save_checkpoint", "log_row")  # what a run does, and may be disturbed before


class Killed(BaseException):
    """The end of a process that has no time for anything."""


def go(out_dir, disturb=lambda number, name, signals: None, **settings):
    """Start or resume a run in out_dir. Returns train's stop signal and the events.

    disturb(number, name, signals)  is called before each event
    """
    events, signals = [], []

    def announced(name):
        def call(*args):
            disturb(len(events), name, signals)
            events.append(name)
            return do(*args)

        do = getattr(train, name)
        return call

    config, data, state = tiny_run(out_dir=str(out_dir), **(SETTINGS | settings))
    out_dir.mkdir(exist_ok=True)
    if (out_dir / "last.pt").exists():
        last = load(out_dir / "last.pt")
        state.model.load_state_dict(last["model"])
        state.resume(last)
    train.begin_log(out_dir, state)
    with pytest.MonkeyPatch.context() as patch, tqdm(total=config.max_iters, disable=True) as bar:
        for name in EVENTS:
            patch.setattr(train, name, announced(name))
        return train.train(config, data, state, {}, bar=bar, signals=signals), events


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(out_dir, events) of the undisturbed run."""
    out_dir = tmp_path_factory.mktemp("whole")
    signum, events = go(out_dir)
    assert signum == 0 and {*events} == {*EVENTS}
    return out_dir, events


def assert_undisturbed(whole, out_dir):
    assert progress(out_dir) == progress(whole)
    assert_same_run(whole, out_dir)
    for name in ("ckpt.pt", "last.pt"):
        ours, theirs = ({k: v for k, v in load(folder / name).items() if k != "seconds"} for folder in (out_dir, whole))
        assert same(ours, theirs)


def test_the_undisturbed_run_logs_what_is_due(whole):
    """Otherwise the tests below would compare empty logs."""
    out_dir, events = whole
    rows = [(int(step), bool(val_loss)) for step, _, val_loss, _ in progress(out_dir)]
    assert rows == [(step, step % 4 == 0 or step == 9) for step in (2, 3, 4, 6, 8, 9)]
    assert events.count("train_step") == 9


def test_a_run_killed_before_anything_it_does_resumes_to_the_same_run_and_log(whole, tmp_path):
    out_dir, events = whole
    for n in range(len(events)):

        def kill(number, name, signals):
            if number == n:  # noqa: B023
                raise Killed

        here = tmp_path / str(n)
        with suppress(Killed):
            go(here, kill)
            raise AssertionError("not killed")
        assert progress(here) == progress(out_dir)[: len(log(here))]
        go(here)
        assert_undisturbed(out_dir, here)


def test_a_run_stopped_by_a_signal_at_any_time_resumes_to_the_same_run_and_log(whole, tmp_path):
    """It writes no row of its own: last.pt holds the sum of the losses since the last row."""
    out_dir, events = whole
    for n in range(len(events)):

        def stop(number, name, signals):
            if number == n:  # noqa: B023
                signals.append(signal.SIGTERM)

        here = tmp_path / str(n)
        signum, done = go(here, stop)
        assert signum == (signal.SIGTERM if {"train_step", "evaluate"} & {*events[n:]} else 0)  # it has ended anyway
        steps = done.count("train_step")
        assert steps <= events[:n].count("train_step") + 1  # it stops after the step, and saves it
        assert load(here / "last.pt")["iter_num"] == steps
        assert progress(here) == progress(out_dir)[: len(log(here))]
        go(here)
        assert_undisturbed(out_dir, here)


def test_a_run_stopped_after_every_single_step_is_the_same_run_too(whole, tmp_path):
    """Nothing is lost or counted twice, however often a row is interrupted."""
    out_dir, _ = whole

    def stop(number, name, signals):
        if name == "train_step":
            signals.append(signal.SIGINT)

    for step in range(1, 10):
        signum, _ = go(tmp_path, stop)
        assert signum == signal.SIGINT and load(tmp_path / "last.pt")["iter_num"] == step
    assert go(tmp_path)[0] == 0
    assert_undisturbed(out_dir, tmp_path)


def test_a_cut_evaluation_comes_first_in_the_resumed_run_and_a_finished_run_does_nothing(tmp_path):
    def stop(number, name, signals):
        if name == "evaluate":
            evaluations.append(name)
        if len(evaluations) == 2:  # at step 3 a test of the weights before the save, at step 4 the evaluation
            signals.append(signal.SIGINT)

    evaluations = []
    assert go(tmp_path, stop)[0] == signal.SIGINT
    last = load(tmp_path / "last.pt")
    assert (last["iter_num"], last["num_unlogged"]) == (4, 1)
    assert go(tmp_path)[1][:5] == ["evaluate", "log_row", "save_checkpoint", "save_checkpoint", "train_step"]
    last = load(tmp_path / "last.pt")
    assert (last["iter_num"], last["num_unlogged"]) == (9, 0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert go(tmp_path) == (0, [])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_patience_counts_the_same_evaluations_in_a_run_that_was_killed(tmp_path):
    """A resume that evaluated again must not count that evaluation twice."""
    settings = dict(learning_rate=0.0, patience=2, max_iters=30, eval_interval=2)
    _, events = go(tmp_path / "whole", **settings)
    assert [int(row[0]) for row in progress(tmp_path / "whole") if row[2]] == [2, 4, 6]
    for n in range(events.index("evaluate"), len(events)):

        def kill(number, name, signals):
            if number == n:  # noqa: B023
                raise Killed

        with suppress(Killed):
            go(tmp_path / str(n), kill, **settings)
        go(tmp_path / str(n), **settings)
        assert_undisturbed(tmp_path / "whole", tmp_path / str(n))


def test_a_val_loss_that_is_not_finite_is_neither_logged_nor_saved(tmp_path, monkeypatch):
    """The first window of the val split may be fine where the rest is not."""
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda state, ids, *more: math.nan if more else evaluate(state, ids))
    with pytest.raises(SystemExit, match="stopped at step 4: the loss is nan"):
        go(tmp_path)
    assert [row[0] for row in progress(tmp_path)] == ["2", "3"]
    assert load(tmp_path / "last.pt")["iter_num"] == 3 and not (tmp_path / "ckpt.pt").exists()


@pytest.mark.parametrize("cut", ["train_step", "evaluate"])
def test_steps_before_the_stop_do_not_count_as_fast_ones(cut, tmp_path, monkeypatch):
    """The speed of a row is that of the steps which this process has done, without the evaluations before them.

    Here a step takes a second, and an evaluation ten.
    """
    clock = SimpleNamespace(now=0.0)

    def perf_counter():
        clock.now += 1e-6
        return clock.now

    def step(number, name, signals):
        clock.now += {"train_step": 1, "evaluate": 10}.get(name, 0)

    def stop(number, name, signals):
        step(number, name, signals)
        if name == cut and number >= 4:
            signals.append(signal.SIGTERM)

    monkeypatch.setattr(train.time, "perf_counter", perf_counter)
    settings = dict(max_iters=18, log_interval=6, eval_interval=6, save_interval=6)
    assert go(tmp_path, stop, **settings)[0] == signal.SIGTERM
    assert load(tmp_path / "last.pt")["num_unlogged"] >= 5
    go(tmp_path, step, **settings)
    first, *others = [int(row["tokens_per_s"]) for row in log(tmp_path)]
    assert others == [2 * 2 * 16] * 2 and first <= 2 * 2 * 16
