"""extras/interop/checksums.py: a folder and its SHA256SUMS, and what a failed or killed write leaves behind."""

import pytest

from extras.interop.checksums import SUMS, check_folder, write_tree
from helpers import FORKS, num_faults, ok, run, tree


def test_a_folder_with_empty_checksums_is_damaged(tmp_path):
    write_tree(tmp_path, {"a": b"text"})
    (tmp_path / SUMS).write_bytes(b"")
    with pytest.raises(ValueError, match=f"{SUMS} is empty"):
        check_folder(tmp_path)


WRITE_NEW = """
from extras.interop.checksums import write_tree

for folder in map(Path, sys.argv[1:]):
    forked(folder, lambda folder: write_tree(folder, {"a": b"new", "b/c": b"new"}))
"""


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
