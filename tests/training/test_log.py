"""train.py: the folder of a run and the run that was there before, what log.csv says, and how progress is shown."""

import contextlib
import math
import os

import numpy as np
import pytest
import torch

from helpers import HEADER, SMALL, STATEFUL, batch, contents, here, load, log, ok, start, unix
from model import GPT, GPTConfig
from train import begin_folder

# -- the run before ----------------------------------------------------------------------------------------------------


def test_every_earlier_run_is_kept_and_a_run_that_saved_nothing_is_none(out, data_dir):
    """A forgotten --init_from resume must not cost a run. But one that breaks before its first save left only a log."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", out, "--max_iters", 2]
    first = contents(out)
    broken = "--learning_rate 1e18 --min_lr 1e18 --warmup_iters 0 --grad_clip 0".split()  # one such step ends in NaN
    assert here(*flags, *broken).returncode != 0
    assert contents(out).keys() == {"log.csv"} and contents(out / "previous-1") == first
    ok(here(*flags))
    second = contents(out)
    assert f"to {out / 'previous-2'}" in ok(here(*flags)).stdout
    assert contents(out / "previous-1") == first and contents(out / "previous-2") == second
    assert len([*out.glob("previous-*")]) == 2
    ok(here("--init_from", "resume", "--out_dir", out / "previous-1", "--max_iters", "61"))


# -- log.csv -----------------------------------------------------------------------------------------------------------


def test_the_log_says_what_was_trained(data_dir, tmp_path):
    """A row's train_loss is the mean of the steps since the last row."""
    ok(here(*STATEFUL, "--max_iters", 6, "--log_interval", 1, "--data_dir", data_dir, "--out_dir", tmp_path / "1"))
    ok(here(*STATEFUL, "--max_iters", 6, "--log_interval", 3, "--data_dir", data_dir, "--out_dir", tmp_path / "3"))
    each = [float(row["train_loss"]) for row in log(tmp_path / "1")]
    rows = log(tmp_path / "3")
    assert [row["step"] for row in rows] == ["3", "6"]
    assert [float(row["train_loss"]) for row in rows] == pytest.approx([sum(each[:3]) / 3, sum(each[3:]) / 3], rel=1e-5)
    assert all(float(row["seconds"]) > 0 and float(row["tokens_per_s"]) > 0 and float(row["lr"]) > 0 for row in rows)


def test_a_run_that_clips_logs_the_norm_before(data_dir, tmp_path):
    """The first row is of the untrained model, whose gradients autograd gives. Without clipping there is no norm."""
    flags = [*SMALL, "--log_interval", 1, "--max_iters", 3, "--data_dir", data_dir]
    for clip in (0, 1e-3):
        ok(here(*flags, "--grad_clip", clip, "--out_dir", tmp_path / str(clip)))
    assert [row["grad_norm"] for row in log(tmp_path / "0")] == [""] * 3
    torch.manual_seed(1337)
    model = GPT(GPTConfig(**load(tmp_path / "0" / "last.pt")["model_args"]))
    ids = np.fromfile(data_dir / "train.bin", dtype="<u2")
    model(*batch(ids, 1337, 0, 2, 16))[1].backward()
    norm = math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
    assert float(log(tmp_path / "0.001")[0]["grad_norm"]) == pytest.approx(norm, rel=1e-4)


ROWS = "20,0.031,4.1,,0.001,47711,1.5\r\n40,0.054,3.7,3.6,4.76e-151,85681,1.2\r\n"


def test_a_row_cut_short_or_newer_than_the_checkpoint_is_dropped_and_others_stay_to_the_byte(tmp_path):
    """A full disk cuts a row short, and a killed run has logged steps that its last.pt does not have."""
    whole, path = ",".join(HEADER) + "\r\n" + ROWS, tmp_path / "log.csv"
    first = "".join(whole.splitlines(keepends=True)[:2])

    def kept(content, newest):
        path.write_bytes(content.encode())
        begin_folder(tmp_path, newest)
        return path.read_bytes().decode()

    for cut in range(whole.index("\r\n40,") + 2, len(whole) + 1):
        assert kept(whole[:cut], 60) == (whole if cut == len(whole) else first), whole[:cut][-20:]
    assert kept(whole.replace("\r\n20,", "\r\n2x,"), 60) == whole.replace(ROWS.splitlines(keepends=True)[0], "")
    assert kept("", 60) == whole.splitlines(keepends=True)[0]
    assert kept(whole, 39) == first
    assert kept(whole, 40) == whole
    assert kept(whole, 20) == first  # the row of the step is still due


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_a_pipe_gets_plain_lines_and_a_sample(data_dir, tmp_path):
    flags = [*SMALL, "--max_iters", 4, "--log_interval", 2, "--data_dir", data_dir, "--out_dir", tmp_path]
    result = ok(here(*flags))
    assert "\r" not in result.stdout + result.stderr and "\x1b" not in result.stdout + result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:3]] == ["step 2/4", "step 4/4"]
    assert all(line.endswith(" s left") for line in lines[1:3])
    assert lines[3].startswith(f"best val loss {float(log(tmp_path)[-1]['val_loss']):.4f}: {tmp_path / 'ckpt.pt'}; ")
    text = result.stdout.split("A sample:\n\n")[1]
    chars = load(tmp_path / "last.pt")["chars"]
    assert len(text.removesuffix("\n")) == 16 and set(text) <= set(chars)  # a full context


@unix
@pytest.mark.slow
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
