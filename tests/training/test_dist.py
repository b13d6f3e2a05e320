"""train.py on several processes: several processes per run."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from helpers import (
    ONE_THREAD,
    ROOT,
    SMALL,
    STATEFUL,
    assert_same_run,
    contents,
    here,
    load,
    log,
    ok,
    run,
    unix,
)

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]


def torchrun(*flags):
    """Run train.py on two processes, to its end."""
    return run(*TORCHRUN, *flags, env=ONE_THREAD)


@unix
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nanogpt", "modern"])
def test_two_processes_train_as_one_does_on_the_same_global_batch(recipe, data_dir, tmp_path):
    """Losses, gradients (as AdamW saw them) and weights are equal, and each resumes the run that the other began."""
    flags = [*SMALL, "--gradient_accumulation_steps", 2, "--batch_size", 4, "--log_interval", 1, "--data_dir", data_dir]
    flags += ["--recipe", recipe, "--max_iters", 5, "--eval_interval", 2]
    two, one = tmp_path / "two", tmp_path / "one"
    result = ok(torchrun(*flags, "--out_dir", two))
    assert result.stdout.count("step 5/5") == 1 and "and 1 more" in result.stdout
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
    ok(torchrun("--init_from", "resume", "--out_dir", one, "--max_iters", 7))
    ok(here("--init_from", "resume", "--out_dir", two, "--max_iters", 7))
    assert [int(row["step"]) for row in log(one)] == [int(row["step"]) for row in log(two)] == list(range(1, 8))


@unix
@pytest.mark.slow
def test_two_processes_resume_to_the_bit_with_dropout(data_dir, tmp_path):
    flags = [*STATEFUL, "--lr_decay_iters", 8, "--data_dir", data_dir]
    ok(torchrun(*flags, "--max_iters", 8, "--out_dir", tmp_path / "whole"))
    ok(torchrun(*flags, "--max_iters", 4, "--out_dir", tmp_path / "halves"))
    ok(torchrun("--init_from", "resume", "--out_dir", tmp_path / "halves", "--max_iters", 8))
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


@unix
@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_one_line_per_process(data_dir, tmp_path):
    result = torchrun(*SMALL, "--batch_size", 3, "--data_dir", data_dir, "--out_dir", tmp_path / "out")
    assert result.returncode != 0 and not (tmp_path / "out").exists()
    lines = [line for line in result.stderr.splitlines() if line.startswith("train.py:")]
    assert 1 <= len(lines) <= 2 and "--batch_size 3" in lines[0], result.stderr  # torchrun may end the second one first


@unix
@pytest.mark.slow
def test_sigterm_to_the_launcher_saves(data_dir, tmp_path):
    flags = [*STATEFUL, "--max_iters", 10**6, "--log_interval", 5, "--data_dir", data_dir, "--out_dir", tmp_path]
    command = [sys.executable, *TORCHRUN, *map(str, flags)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | ONE_THREAD, **pipes)
    stdout = ""
    while "\nstep 15/" not in stdout and (line := process.stdout.readline()):
        stdout += line
    process.send_signal(signal.SIGTERM)
    rest, stderr = process.communicate(timeout=90)
    stopped = load(tmp_path / "last.pt")["iter_num"]
    assert stopped >= 15 and f"stopped at step {stopped} " in rest, stderr
    ok(torchrun("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", stopped + 2))
