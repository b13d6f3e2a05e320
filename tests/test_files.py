"""write_atomically: atomic writes, and what a failed or killed write leaves behind."""

import os
import shutil
from unittest.mock import Mock

import pytest

from helpers import (
    FORKS,
    STATEFUL,
    assert_same_run,
    here,
    load,
    log,
    num_faults,
    ok,
    run,
    unix,
)
from model import write_atomically


@unix
def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """A power cut could leave an empty file under the good name otherwise."""
    calls = Mock(fsync=Mock(wraps=os.fsync), replace=Mock(wraps=os.replace))
    monkeypatch.setattr(os, "fsync", calls.fsync)
    monkeypatch.setattr(os, "replace", calls.replace)
    write_atomically(tmp_path / "file", [b"n", b"ew"])
    assert [name for name, *_ in calls.mock_calls] == ["fsync", "replace"]


RESUME = """
import torch._dynamo, train  # which each optimizer would import

def resume(folder):
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.argv = ["train.py", "--init_from", "resume", "--out_dir", str(folder), "--max_iters", "6"]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as error:
        os._exit(1 if isinstance(error.code, str) else error.code or 0)

for folder in map(Path, sys.argv[1:]):
    if forked(folder, resume) == 0:
        break
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True], ids=["I/O error", "kill"])
def test_a_save_that_ends_at_any_write_leaves_checkpoints_to_go_on_from(kills, faults, data_dir, tmp_path):
    """We fail every write of log.csv, ckpt.pt and last.pt in turn, until a run has no more of them."""
    flags = [*STATEFUL, "--lr_decay_iters", 6, "--log_interval", 2, "--eval_interval", 2, "--data_dir", data_dir]
    ok(here(*flags, "--max_iters", 6, "--out_dir", tmp_path / "whole"))
    folders = [tmp_path / ("kill" if kills else "error") / str(at) for at in range(1, 51)]
    ok(here(*flags, "--max_iters", 4, "--out_dir", folders[0]))
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder)
    codes = ok(run("-c", FORKS + RESUME, *folders, env=faults)).stdout.split()
    n = num_faults(list(map(int, codes)), kills)
    assert n > 11  # an open, a write, a sync and a rename at least, for every file
    for out in folders[:n]:
        assert load(out / "ckpt.pt") and load(out / "last.pt")["iter_num"] in (4, 6)
        ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 6))
        assert_same_run(tmp_path / "whole", out)
        assert [row["step"] for row in log(out)] == [row["step"] for row in log(tmp_path / "whole")]
