"""train.py: what log.csv says, and how progress is shown."""

import contextlib
import math
import os

import numpy as np
import pytest
import torch

from helpers import SMALL, STATEFUL, batch, here, load, log, ok, start, unix
from model import GPT, GPTConfig

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
