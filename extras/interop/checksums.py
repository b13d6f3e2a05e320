"""Folders with checksums: export.py writes them, and whatever reads such a folder checks them."""

import hashlib
from pathlib import Path

from model import write_atomically

SUMS = "SHA256SUMS"  # in the format of sha256sum, so `sha256sum -c SHA256SUMS` checks a folder too


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def read_tree(folder):
    """Return {name inside the folder, with slashes: bytes} of all its files. Raises OSError."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_tree(folder, files):
    """Write {name inside the folder, with slashes: bytes} and their SUMS atomically.

    SUMS comes last, so a folder with both old and new files does not match its checksums. Raises OSError.
    """
    sums = "".join(f"{sha256(content)}  {name}\n" for name, content in sorted(files.items()))
    paths = {folder / name: [content] for name, content in (files | {SUMS: sums.encode()}).items()}
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(paths)


def check_folder(folder):
    """Raise ValueError if a file in `folder` has changed since write_tree wrote it. A folder without SUMS passes."""
    sums = Path(folder, SUMS)
    lines = sums.read_text("utf-8", "replace").splitlines() if sums.is_file() else []
    if sums.is_file() and not lines:
        raise ValueError(f"{SUMS} is empty: export again, or remove it")
    for line in lines:
        recorded, _, name = line.partition("  ")
        file = Path(folder, name)
        if file.is_file() and sha256(file.read_bytes()) != recorded:
            raise ValueError(f"{name} has changed since export.py wrote it: export again, or remove {SUMS}")
