"""Files that are whole at every moment, folders that carry checksums, and one writer per folder."""

import errno
import hashlib
import os
from contextlib import contextmanager
from pathlib import Path

SUMS = "SHA256SUMS"  # what sha256sum writes, so that `sha256sum -c SHA256SUMS` checks a folder too

# -- writing -----------------------------------------------------------------------------------------------------------


def write_atomically(files):
    """Write {path: bytes}, so that at any moment each path holds its old bytes or its new ones, even after a power cut.

    We write everything beside its path first, and rename only when all of it is on the disk. So a full disk leaves the
    old files alone. Raises OSError.
    """
    temporary = {path: path.with_name(f".{path.name}.tmp") for path in files}
    try:
        for path, content in files.items():
            with name_in_errors(path), open(temporary[path], "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
        for path in files:
            os.replace(temporary[path], path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    if os.name != "nt":  # a rename survives a power cut once its folder is on the disk, for which Windows has no call
        for folder in {path.parent for path in files}:
            with name_in_errors(folder):
                opened = os.open(folder, os.O_RDONLY)
                os.fsync(opened)
                os.close(opened)


def read_tree(folder):
    """Return {name inside the folder, with slashes: bytes} of all its files. Raises OSError."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_tree(folder, files):
    """Write {name inside the folder, with slashes: bytes} and their SUMS atomically.

    SUMS comes last, so that a folder whose files are half old and half new does not fit its checksums. Raises OSError.
    """
    sums = "".join(f"{sha256(content)}  {name}\n" for name, content in sorted(files.items()))
    paths = {folder / name: content for name, content in (files | {SUMS: sums.encode()}).items()}
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(paths)


@contextmanager
def name_in_errors(path):
    """Add the path to an OSError inside the block that names no file, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


# -- checksums ---------------------------------------------------------------------------------------------------------


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def check_folder(folder):
    """Raise ValueError if a file in `folder` has changed since write_tree wrote it. A folder without SUMS passes."""
    sums = Path(folder, SUMS)
    lines = sums.read_text("utf-8", "replace").splitlines() if sums.is_file() else []
    for line in lines:
        recorded, _, name = line.partition("  ")
        file = Path(folder, name)
        if file.is_file() and sha256(file.read_bytes()) != recorded:
            raise ValueError(f"{name} has changed since export.py wrote it: export again, or remove {SUMS}")


# -- one writer --------------------------------------------------------------------------------------------------------


def lock_folder(folder, name=".lock"):
    """Lock a folder for this process by a file in it, and return that open file. The end of the process unlocks it.

    Raises BlockingIOError if another process holds the lock, and OSError if the folder cannot be written.
    """
    lock = open(folder / name, "ab")  # noqa: SIM115
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # of Unix and of Windows
        lock.close()
        raise BlockingIOError(errno.EAGAIN, "another process is writing there", str(folder)) from None
    except OSError:
        pass  # a file system that has no locks
    return lock
