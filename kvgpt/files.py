"""Files that are whole at every moment, the old content or the new one, and folders that one process writes to."""

import errno
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomically(files):
    """Write {path: bytes}. Each path holds its old bytes or its new ones at any moment, even after a power cut.

    All contents are written beside their paths first and renamed last, in the order given. An error before the first
    rename leaves every old file in place. No error leaves a temporary file. Raises OSError.
    """
    temporary = {path: temporary_path(path) for path in files}
    try:
        for path, content in files.items():
            temporary[path].unlink(missing_ok=True)  # of a killed process; a link would be followed, a pipe would block
            with name_in_errors(path), open(temporary[path], "xb") as f:
                f.write(content)
                sync(f)
        refuse_folders(files)  # before the first rename, so that no old file has been replaced yet
        for path in files:
            os.replace(temporary[path], path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    for parent in {path.parent for path in files}:
        sync_folder(parent)


def temporary_path(path):
    """Return where write_atomically writes first. One process at a time writes there: see lock_folder."""
    return path.with_name(f".{path.name}.tmp")


def refuse_folders(paths):
    """Raise IsADirectoryError if one of the paths is a folder, which no file can replace."""
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(0, "a folder is in the way", str(path))


def read_tree(folder):
    """Return {name inside the folder, with slashes: bytes} of all its files. Raises OSError."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_tree(folder, files, stale=()):
    """Write {name inside the folder, with slashes: bytes} by write_atomically, then remove the files named in `stale`.

    Missing folders are made. An error before the first rename leaves the folder as it was. Raises OSError.
    """
    refuse_folders(folder / name for name in stale)
    files = {folder / name: content for name, content in files.items()}
    missing = sorted({parent for path in files for parent in path.parents if not parent.is_dir()})  # outer ones first
    try:
        for parent in missing:
            parent.mkdir(exist_ok=True)  # "new/.." exists as soon as "new" does
        write_atomically(files)
    except BaseException:  # a signal, too
        for parent in reversed(missing):
            with suppress(OSError):  # not made yet, or not empty
                parent.rmdir()
        raise
    for name in stale:
        (folder / name).unlink(missing_ok=True)


def sync(file):
    """Wait until the content of an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder):
    """Wait until the names in a folder are on the disk, so that a rename survives a power cut."""
    if hasattr(os, "O_DIRECTORY"):  # Windows has no such call
        opened = os.open(folder, os.O_DIRECTORY)
        os.fsync(opened)
        os.close(opened)


def keep_copy(file, copy):
    """Give the content of a file a second name. `copy` does not exist yet. Raises OSError."""
    try:
        os.link(file.resolve(), copy)
    except OSError:  # a file system without links
        with open(file, "rb") as source, open(copy, "wb") as target:
            shutil.copyfileobj(source, target)
            sync(target)


def read_regular(file):
    """Return the bytes of a file. Raises OSError, for a pipe too, which would block."""
    Path(file).stat()  # raises what is wrong with the path
    require_regular(file)
    return Path(file).read_bytes()


def require_regular(file):
    """Raise OSError if a path holds something else than a file. A pipe would block, and a folder cannot be replaced."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise OSError(errno.EINVAL, "not a regular file", str(file))


def lock_folder(folder, name=".lock"):
    """Lock a folder for this process by a file of that name in it.

    Returns the lock, an open file. Closing it unlocks the folder. The operating system closes it when the process ends.
    Raises BlockingIOError if another process holds the lock, and OSError if the folder cannot be written.
    """
    require_regular(folder / name)
    lock = open(folder / name, "ab")  # noqa: SIM115
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # others: the file system has no locks
            lock.close()
            raise BlockingIOError(errno.EAGAIN, "another process is writing there", str(folder)) from None
    return lock


@contextmanager
def name_in_errors(path):
    """Add the path to an OSError inside the block that names no file, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
