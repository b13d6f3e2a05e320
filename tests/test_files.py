"""write_atomically and extras/interop/checksums.py: atomic writes, and what a failed or killed write leaves behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.interop.checksums import SUMS, check_folder, write_tree
from helpers import (
    ONE_THREAD,
    ROOT,
    STATEFUL,
    assert_same_run,
    contents,
    here,
    load,
    log,
    ok,
    run,
    tree,
    unix,
)
from model import write_atomically

some_files = st.dictionaries(st.sampled_from("abc"), st.binary(max_size=9))


@given(old=some_files, new=some_files)
def test_the_files_named_hold_the_new_bytes_and_all_others_the_old(old, new):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for name, content in old.items():
            (folder / name).write_bytes(content)
        write_atomically({folder / name: [content] for name, content in new.items()})
        assert contents(folder) == old | new  # and no temporary file


def test_a_folder_with_empty_checksums_is_damaged(tmp_path):
    write_tree(tmp_path, {"a": b"text"})
    (tmp_path / SUMS).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{SUMS} is empty"):
        check_folder(tmp_path)


@unix
def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """A power cut could leave an empty file under the good name otherwise."""
    calls = Mock(fsync=Mock(wraps=os.fsync), replace=Mock(wraps=os.replace))
    monkeypatch.setattr(os, "fsync", calls.fsync)
    monkeypatch.setattr(os, "replace", calls.replace)
    write_atomically({tmp_path / "file": [b"n", b"ew"]})
    assert [name for name, *_ in calls.mock_calls] == ["fsync", "replace"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """The environment of a process whose FAULT_AT-th write below FAULT_DIR, of any kind, fails or kills it."""
    if not sys.platform.startswith("linux") or not shutil.which("cc"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests" / "faults.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), **ONE_THREAD}


# Each folder in a forked child, which saves the imports. Folder kill/7 is killed at its 7th write.
FORKS = """
import os, runpy, sys
from pathlib import Path

def forked(folder, do):
    child = os.fork()
    if not child:
        os.environ.update({"FAULT_DIR": f"{folder}/", "FAULT_AT": folder.name})
        if folder.parent.name == "kill":
            os.environ["FAULT_KILLS"] = "1"
        try:
            do(folder)
        except OSError:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    return code
"""
WRITE_NEW = """
from extras.interop.checksums import write_tree

for folder in map(Path, sys.argv[1:]):
    forked(folder, lambda folder: write_tree(folder, {"a": b"new", "b/c": b"new"}))
"""


def num_faults(codes, kills):
    """How many writes failed before the first folder in which there were fewer."""
    n = codes.index(0)
    assert codes[:n] == [-signal.SIGKILL if kills else 1] * n
    return n


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["I/O error", "kill"])
def test_a_tree_fits_its_checksums_only_if_it_is_wholly_old_or_new(kills, faults, tmp_path):
    """In folder n, the n-th write fails. From some n on, there are not so many."""
    folders = [tmp_path / ("kill" if kills else "error") / str(at) for at in range(1, 31)]
    for folder in folders:
        folder.mkdir(parents=True)
        write_tree(folder, {"a": b"old", "b/c": b"old"})
        check_folder(folder)
    old = tree(folder)
    codes = ok(run("-c", FORKS + WRITE_NEW, *folders, env=faults)).stdout.split()
    n = num_faults(list(map(int, codes)), kills)
    assert n > 11  # an open, a write, a sync and a rename of three files
    for folder in folders[: n + 1]:
        left = {name: content for name, content in tree(folder).items() if not name.endswith(".tmp") and content}
        assert {left["a"], left["b/c"]} <= {b"old", b"new"}
        if left["a"] == left["b/c"] == b"old":
            assert {**left, "b": None} == old
            check_folder(folder)
        elif left[SUMS] == old[SUMS]:
            with pytest.raises(ValueError, match="has changed"):
                check_folder(folder)
        write_tree(folder, {"a": b"new", "b/c": b"new"})
        assert tree(folder).keys() == {"a", "b", "b/c", SUMS}
        check_folder(folder)


RESUME = """
import torch._dynamo, train  # which each optimizer would import

def resume(folder):
    os.dup2(os.open(f"{folder}.out", os.O_CREAT | os.O_WRONLY), 1)
    os.dup2(os.open(f"{folder}.err", os.O_CREAT | os.O_WRONLY), 2)
    sys.argv = ["train.py", "--init_from", "resume", "--out_dir", str(folder), "--max_iters", "6"]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as error:
        sys.stderr.flush()
        os._exit(error.code or 0)

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
        said = Path(f"{out}.err").read_text(encoding="utf-8")
        assert kills or (said.count("\n") == 1 and str(out) in said)  # the file that could not be written
        assert load(out / "ckpt.pt") and load(out / "last.pt")["iter_num"] in (4, 6)
        ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 6))
        assert_same_run(tmp_path / "whole", out)
        assert [row["step"] for row in log(out)] == [row["step"] for row in log(tmp_path / "whole")]
