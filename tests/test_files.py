"""write_atomically and kvgpt/interop/checksums.py: atomic writes, and what a failed or killed write leaves behind."""

import itertools
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

from helpers import (
    ROOT,
    STATEFUL,
    assert_one_line,
    assert_same_run,
    child,
    contents,
    here,
    load,
    log,
    ok,
    run,
    tree,
    unix,
)
from kvgpt.interop.checksums import SUMS, check_folder, write_tree
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
    """Return the environment of a process whose at-th write below `folder`, of any kind, fails or kills it."""
    if not sys.platform.startswith("linux") or not shutil.which("cc"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, ROOT / "tests" / "faults.c", "-ldl"], check=True)

    def faults(folder, at, kills):
        env = {"LD_PRELOAD": str(library), "FAULT_DIR": str(folder.resolve()), "FAULT_AT": str(at)}
        return env | ({"FAULT_KILLS": "1"} if kills else {})

    return faults


WRITE_NEW = """
import os, sys
from pathlib import Path
from kvgpt.interop.checksums import write_tree

for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.environ["FAULT_AT"] = Path(folder).name
        try:
            write_tree(Path(folder), {"a": b"new", "b/c": b"new"})
        except OSError:
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("kills", [False, True], ids=["I/O error", "kill"])
def test_a_tree_fits_its_checksums_only_if_it_is_wholly_old_or_new(kills, faults, tmp_path):
    """In folder n, the n-th write fails. From some n on, there are not so many."""
    folders = [tmp_path / str(at) for at in range(1, 31)]
    for folder in folders:
        write_tree(folder, {"a": b"old", "b/c": b"old"})
        check_folder(folder)
    old = tree(folder)
    codes = [int(code) for code in ok(run("-c", WRITE_NEW, *folders, env=faults(tmp_path, 0, kills))).stdout.split()]
    num_faults = codes.index(0)
    assert num_faults > 11  # an open, a write, a sync and a rename of three files
    assert codes == [-signal.SIGKILL if kills else 1] * num_faults + [0] * (len(folders) - num_faults)
    for folder in folders[: num_faults + 1]:
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


@pytest.mark.slow
@pytest.mark.parametrize("kills", [False, True], ids=["I/O error", "kill"])
def test_a_save_that_ends_at_any_write_leaves_checkpoints_to_go_on_from(kills, faults, data_dir, tmp_path):
    """We fail every write of log.csv, ckpt.pt and last.pt in turn, until a run has no more of them."""
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
            assert_one_line(result, out)  # the file that could not be written
        assert load(out / "ckpt.pt") and load(out / "last.pt")["iter_num"] in (4, 6)
        ok(here(*resume))
        assert_same_run(tmp_path / "whole", out)
        assert [row["step"] for row in log(out)] == [row["step"] for row in log(tmp_path / "whole")]
    assert at > 12  # an open, a write, a sync and a rename at least, for every file
