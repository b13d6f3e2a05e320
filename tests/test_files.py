"""kvgpt/files.py: atomic writes, and the checkpoints that a failed or killed write leaves behind."""

import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import ROOT, STATEFUL, assert_one_line, assert_same_run, child, contents, here, load, log, ok, tree, unix
from kvgpt.checkpoint import save_checkpoint
from kvgpt.files import write_atomically, write_tree

# -- write_atomically --------------------------------------------------------------------------------------------------


@given(
    old=st.dictionaries(st.sampled_from("abc"), st.binary(max_size=9)),
    new=st.dictionaries(st.sampled_from("abc"), st.binary(max_size=9)),
)
def test_the_files_named_hold_the_new_bytes_and_all_others_the_old(old, new):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for name, content in old.items():
            (folder / name).write_bytes(content)
        write_atomically({folder / name: content for name, content in new.items()})
        assert contents(folder) == old | new  # and no temporary file


@pytest.mark.parametrize("blocked", ["a", "b", "c"])
def test_all_files_or_none(blocked, tmp_path):
    """A folder under one of the names stops the write before any file is replaced."""
    files = {tmp_path / name: b"new" for name in "abc"}
    for path in files:
        path.mkdir() if path.name == blocked else path.write_bytes(b"old")
    with pytest.raises(IsADirectoryError) as error:
        write_atomically(files)
    assert error.value.filename == str(tmp_path / blocked)
    assert contents(tmp_path) == {name: b"old" for name in "abc" if name != blocked}


def test_a_folder_that_is_not_there_is_an_os_error_that_names_the_file(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(OSError) as error:
        write_atomically({tmp_path / "a": b"new", tmp_path / "missing" / "b": b"new"})
    assert "missing" in str(error.value.filename)
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("obstacle", ["new", "stale"])
def test_a_tree_is_written_as_a_whole_or_left_as_it_was(obstacle, tmp_path):
    """A new file beside an old one, a stale file that is gone, or an empty folder that was made for nothing."""
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / obstacle).mkdir()
    before = tree(tmp_path)
    with pytest.raises(IsADirectoryError) as error:
        write_tree(tmp_path, {"old": b"new", "a/b/c": b"new", "new": b"new"}, stale=["stale"])
    assert error.value.filename == str(tmp_path / obstacle)
    assert tree(tmp_path) == before
    (tmp_path / obstacle).rmdir()
    (tmp_path / "stale").write_bytes(b"old")
    write_tree(tmp_path, {"old": b"new", "a/b/c": b"new", "new": b"new"}, stale=["stale", "not there"])
    assert tree(tmp_path) == dict.fromkeys(["old", "a/b/c", "new"], b"new") | {"a": None, "a/b": None}


@unix
def test_a_checkpoint_is_written_beside_synced_and_renamed(tmp_path):
    """The sync comes before the rename. A power cut could leave an empty file under the good name otherwise."""
    path, calls = tmp_path / "last.pt", []
    save_checkpoint(path, {"x": torch.zeros(3)})
    sys.setprofile(lambda frame, event, arg: event == "c_call" and calls.append(getattr(arg, "__name__", "")))
    with open(path, "rb") as old:
        try:
            save_checkpoint(path, {"x": torch.ones(3)})
        finally:
            sys.setprofile(None)
        assert torch.equal(load(old)["x"], torch.zeros(3))  # a process that has the old file open still reads it whole
    assert torch.equal(load(path)["x"], torch.ones(3))
    assert contents(tmp_path).keys() == {"last.pt"}
    calls = [call for call in calls if call in ("fsync", "replace", "rename")]
    assert calls.index("fsync") < calls.index("replace")


# -- writes that fail --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_while_saving_leaves_the_older_checkpoints(out):
    resource = pytest.importorskip("resource")

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    before = contents(out)
    assert len(before["last.pt"]) > 100_000
    result = child("--init_from", "resume", "--out_dir", out, "--max_iters", 65, preexec_fn=limit)
    assert_one_line(result, f"cannot write {out}", ".pt: File too large", "older checkpoints are whole")
    after = contents(out)
    assert after.keys() == before.keys()  # no temporary file
    assert (after["ckpt.pt"], after["last.pt"]) == (before["ckpt.pt"], before["last.pt"])
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 65))  # the disk has room again


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """Return the environment of a process whose at-th write below `folder`, of any kind, fails or kills it."""
    if not sys.platform.startswith("linux") or not shutil.which("cc"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests" / "faults.c", "-ldl"], check=True)

    def faults(folder, at, kills):
        env = {"LD_PRELOAD": str(library), "FAULT_DIR": str(folder.resolve()), "FAULT_AT": str(at)}
        return env | ({"FAULT_KILLS": "1"} if kills else {})

    return faults


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True], ids=["I/O error", "kill"])
def test_a_save_that_ends_at_any_write_leaves_checkpoints_to_go_on_from(kills, faults, data_dir, tmp_path):
    """Every write of log.csv, ckpt.pt and last.pt in turn, until a run has no more of them.

    A kill between last.pt and log.csv cost a row of the log, when last.pt came first.
    """
    flags = [*STATEFUL, "--lr_decay_iters", 6, "--log_interval", 2, "--eval_interval", 2, "--data_dir", data_dir]
    ok(here(*flags, "--max_iters", 6, "--out_dir", tmp_path / "whole"))
    ok(here(*flags, "--max_iters", 4, "--out_dir", tmp_path / "half"))
    for at in itertools.count(1):
        out = tmp_path / f"out {at}"
        shutil.copytree(tmp_path / "half", out)
        resume = ["--init_from", "resume", "--out_dir", out, "--max_iters", 6]
        result = child(*resume, env=faults(out, at, kills))
        if result.returncode == 0:
            break
        if kills:
            assert result.returncode == -signal.SIGKILL
        else:
            assert_one_line(result, "older checkpoints are whole")
        assert load(out / "ckpt.pt") and load(out / "last.pt")["iter_num"] in (4, 6)
        ok(here(*resume))
        assert_same_run(tmp_path / "whole", out)
        assert [row["step"] for row in log(out)] == [row["step"] for row in log(tmp_path / "whole")]
    assert at > 12  # an open, a write, a sync and a rename at least, for every file
