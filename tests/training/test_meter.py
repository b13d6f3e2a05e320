"""kvgpt/training/meter.py: what log.csv says, how progress is shown, and the warning of a run that overfits."""

import contextlib
import math
import os
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import train
from helpers import CPU, SMALL, STATEFUL, assert_same_run, child, here, load, log, ok, start, tiny_run, unix
from kvgpt.training.data import write_prepared
from kvgpt.training.dist import Ranks
from kvgpt.training.meter import Meter
from model import GPT, GPTConfig

# -- log.csv -----------------------------------------------------------------------------------------------------------


def test_the_log_says_what_was_trained(data_dir, tmp_path):
    """A row's train_loss is the mean of the steps since the last row. Its chars count all micro-steps."""
    ok(here(*STATEFUL, "--max_iters", 6, "--log_interval", 1, "--data_dir", data_dir, "--out_dir", tmp_path / "1"))
    ok(here(*STATEFUL, "--max_iters", 6, "--log_interval", 3, "--data_dir", data_dir, "--out_dir", tmp_path / "3"))
    each = [float(row["train_loss"]) for row in log(tmp_path / "1")]
    rows = log(tmp_path / "3")
    assert [row["step"] for row in rows] == ["3", "6"]
    assert [float(row["train_loss"]) for row in rows] == pytest.approx([sum(each[:3]) / 3, sum(each[3:]) / 3], rel=1e-5)
    assert [int(row["chars"]) for row in rows] == [3 * 2 * 2 * 16, 6 * 2 * 2 * 16]
    assert all(float(row["seconds"]) > 0 and float(row["tokens_per_s"]) > 0 and float(row["lr"]) > 0 for row in rows)


def test_the_log_has_the_norm_of_the_gradients(data_dir, tmp_path):
    """The first row is of the untrained model, whose gradients autograd gives, clipped or not."""
    flags = [*SMALL, "--log_interval", 1, "--max_iters", 3, "--data_dir", data_dir]
    norms = []
    for clip in (0, 1e-3):
        ok(here(*flags, "--grad_clip", clip, "--out_dir", tmp_path / str(clip)))
        norms.append(float(log(tmp_path / str(clip))[0]["grad_norm"]))
    torch.manual_seed(1337)
    model = GPT(GPTConfig(**load(tmp_path / "0" / "last.pt")["model_args"]))
    ids = np.fromfile(data_dir / "train.bin", dtype="<u2")
    model(*train.get_batch(ids, 1337, 0, 2, 16, CPU))[1].backward()
    norm = math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
    assert norms == pytest.approx([norm] * 2, rel=1e-4)


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_a_pipe_gets_plain_lines_and_a_sample(data_dir, tmp_path):
    flags = [*SMALL, "--max_iters", 4, "--log_interval", 2, "--data_dir", data_dir, "--out_dir", tmp_path]
    result = ok(child(*flags))
    assert "\r" not in result.stdout + result.stderr and "\x1b" not in result.stdout + result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:3]] == ["step 2/4", "step 4/4"]
    ckpt = load(tmp_path / "last.pt")
    text = result.stdout.split("A sample:\n\n")[1]
    assert len(text.removesuffix("\n")) == 16 and set(text) <= set(ckpt["chars"])  # a full context


@unix
def test_a_terminal_gets_a_progress_bar_and_stdout_stays_plain(data_dir, tmp_path):
    """Also a terminal of size 0, which a notebook has and where tqdm by itself shows nothing."""
    termios = pytest.importorskip("termios")
    leader, follower = os.openpty()
    termios.tcsetwinsize(follower, (0, 0))
    flags = [*SMALL, "--max_iters", 4, "--log_interval", 1, "--data_dir", data_dir, "--out_dir", tmp_path]
    process = start(*flags, stderr=follower)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says EIO, others an empty read, when the process is gone
        while part := os.read(leader, 4096):
            shown += part
    stdout = process.communicate(timeout=60)[0]
    os.close(leader)
    assert process.returncode == 0
    assert b"\r" in shown and b"4/4" in shown and b"%|" in shown and b"loss" in shown
    assert "\r" not in stdout and "step 1/4" not in stdout and "A sample:" in stdout


# -- overfitting -------------------------------------------------------------------------------------------------------


def warned(train_losses, val_losses, capsys):
    """Return after how many evaluations a Meter has warned."""
    config, _, state = tiny_run()
    meter, after = Meter(config, state, Ranks()), []
    for i, (train_loss, val_loss) in enumerate(zip(train_losses, val_losses)):
        for _ in range(3):
            meter.update(torch.tensor(train_loss), None)
            meter.row(1, lr=0.1)
            meter.num_steps = 0
            meter.loss_sum.zero_()
        meter.warn_of_overfitting(val_loss)
        if capsys.readouterr().err:
            after.append(i + 1)
    return after


change = st.sampled_from([(-1, 1)] * 6 + [(-1, -1), (1, 1), (0, 1), (-1, 0)])  # of train loss and of val loss


@given(st.lists(change, min_size=1, max_size=30))
@example([(-1, 1)] * 4)
@example([(-1, 1)] * 5)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_that_overfits_is_told_at_the_third_rise_in_a_row_and_once(capsys, changes):
    """The oracle finds three "r" in a row in a string with a letter per evaluation."""
    train_losses, val_losses = (100.0 + np.cumsum(column) for column in zip(*changes))
    letters = "-" + "".join("r" if change == (-1, 1) else "-" for change in changes[1:])
    expected = [match.start() + 3 for match in re.finditer("(?<!r)rrr", letters)]
    assert warned(train_losses.tolist(), val_losses.tolist(), capsys) == expected


def test_the_warning_names_what_helps_and_changes_no_step(tmp_path):
    """Train and val text are random, so there is nothing to learn but the train text itself."""
    train_ids, val_ids = np.random.default_rng(0).integers(0, 20, (2, 400)).astype("<u2")
    write_prepared(tmp_path, "abcdefghijklmnopqrst", train_ids, val_ids, "a test", b"")
    flags = ["--recipe", "modern", "--n_layer", 1, "--n_head", 2, "--n_embd", 32, "--block_size", 16, "--batch_size", 8]
    flags += ["--max_iters", 100, "--log_interval", 5, "--device", "cpu", "--data_dir", tmp_path]
    noisy = ok(here(*flags, "--eval_interval", 10, "--sample_interval", 7, "--out_dir", tmp_path / "noisy"))
    (line,) = noisy.stderr.splitlines()
    assert "overfits" in line and "--patience" in line and "--dropout" in line
    quiet = ok(here(*flags, "--eval_interval", 100, "--out_dir", tmp_path / "quiet"))
    assert quiet.stderr == ""
    assert_same_run(tmp_path / "noisy", tmp_path / "quiet")
