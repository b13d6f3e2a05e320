"""train.py on several processes."""

import os
import signal
import socket
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from helpers import ONE_THREAD, ROOT, SMALL, STATEFUL, assert_same_run, contents, here, load, log, ok, run, unix

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]


def two_processes(*flags):
    """Run train.py on two processes, to its end, as torchrun would. This process is the first of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **ONE_THREAD}
    command, second = [sys.executable, "train.py", *map(str, flags)], {"RANK": "1", "LOCAL_RANK": "1"}
    with (
        subprocess.Popen(command, cwd=ROOT, env=os.environ | env | second, stdout=subprocess.DEVNULL) as process,
        patch.dict(os.environ, env | {"RANK": "0", "LOCAL_RANK": "0"}),
    ):
        result = ok(here(*flags))
        assert process.wait(60) == 0
    return result


@pytest.mark.parametrize("names", ["RANK", "WORLD_SIZE", "RANK WORLD_SIZE"])
def test_some_of_what_torchrun_sets_is_no_torchrun(names, data_dir, tmp_path):
    """A cluster may set it for other programs."""
    with patch.dict(os.environ, dict.fromkeys(names.split(), "1")):
        result = here(*SMALL, "--max_iters", 1, "--data_dir", data_dir, "--out_dir", tmp_path)
    assert "on 1 x cpu" in ok(result).stdout and (tmp_path / "last.pt").exists()


@unix
@pytest.mark.slow
def test_two_processes_train_as_one_does_on_the_same_global_batch(data_dir, tmp_path):
    """Losses, gradients (as AdamW saw them) and weights are equal, and each resumes the run that the other began.

    Each process evaluates its share of the val split.
    """
    flags = [*SMALL, "--gradient_accumulation_steps", 2, "--batch_size", 4, "--log_interval", 1, "--data_dir", data_dir]
    flags += ["--recipe", "modern", "--max_iters", 5, "--eval_interval", 2]
    two, one = tmp_path / "two", tmp_path / "one"
    result = two_processes(*flags, "--out_dir", two)
    assert result.stdout.count("step 5/5") == 1 and "on 2 x cpu" in result.stdout
    ok(here(*flags, "--out_dir", one))
    a, b = load(two / "last.pt"), load(one / "last.pt")
    for ours, theirs in zip(a["optimizer"], b["optimizer"], strict=True):
        for i, state in theirs["state"].items():
            for name in state:
                torch.testing.assert_close(ours["state"][i][name], state[name], rtol=1e-2, atol=1e-5)
    for name in b["model"]:
        torch.testing.assert_close(a["model"][name], b["model"][name], rtol=1e-3, atol=1e-4)
    for name in ("train_loss", "val_loss"):
        losses = [[float(row[name] or 0) for row in log(folder)] for folder in (two, one)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert contents(two).keys() == contents(one).keys()
    two_processes("--init_from", "resume", "--out_dir", one, "--max_iters", 7)
    ok(here("--init_from", "resume", "--out_dir", two, "--max_iters", 7))
    assert [int(row["step"]) for row in log(one)] == [int(row["step"]) for row in log(two)] == list(range(1, 8))


@unix
@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_one_line_per_process(data_dir, tmp_path):
    flags = [*SMALL, "--batch_size", 3, "--data_dir", data_dir, "--out_dir", tmp_path / "out"]
    result = run(*TORCHRUN, *flags, env=ONE_THREAD)
    assert result.returncode != 0 and not (tmp_path / "out").exists()
    lines = [line for line in result.stderr.splitlines() if line.startswith("train.py:")]
    assert 1 <= len(lines) <= 2 and "--batch_size 3 " in lines[0]  # torchrun may end the second one first


@unix
@pytest.mark.slow
def test_a_run_stopped_by_sigterm_to_the_launcher_resumes_to_the_bit(data_dir, tmp_path):
    """With dropout, whose random numbers differ between the processes."""
    flags = [*STATEFUL, "--lr_decay_iters", 99, "--log_interval", 5, "--data_dir", data_dir]
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = [sys.executable, *TORCHRUN, *map(str, flags), "--max_iters", str(10**6), "--out_dir", out]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | ONE_THREAD, **pipes)
    stdout = ""
    while "\nstep 15/" not in stdout and (line := process.stdout.readline()):
        stdout += line
    process.send_signal(signal.SIGTERM)
    rest, stderr = process.communicate(timeout=90)
    stopped = load(out / "last.pt")["iter_num"]
    assert stopped >= 15 and f"stopped at step {stopped} " in rest, stderr
    two_processes("--init_from", "resume", "--out_dir", out, "--max_iters", stopped + 2)
    two_processes(*flags, "--max_iters", stopped + 2, "--out_dir", whole)
    assert_same_run(whole, out)
