"""Files that are complete at every moment, and one writer per folder."""

import errno
import hashlib
import os
from contextlib import contextmanager


def write_atomically(files):
    """Write {path: bytes}. At any moment, each file is either the old one or the new one, even after a power cut.

    We write temporary files first, and rename them only when all of them are on the disk. So a full disk leaves the old
    files alone. Raises OSError.
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


@contextmanager
def name_in_errors(path):
    """Add the path to an OSError in the block that names no file, as when a write fills the disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def lock_folder(folder, name=".lock"):
    """Lock a folder through a file in it, and return the open file. The lock ends with the process.

    Raises BlockingIOError if another process holds the lock, and OSError if the folder is not writable.
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
        pass  # this file system has no locks
    return lock
