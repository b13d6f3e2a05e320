"""Files that are whole at every moment: the old content or the new one."""

import os
from contextlib import contextmanager


def write_atomically(files):
    """Write {path: bytes}. Each path holds its old bytes or its new ones at any moment, even after a power cut.

    All contents are written beside their paths first and renamed last, in the order given. An error before the first
    rename leaves every old file in place. No error leaves a temporary file. Raises OSError.
    """
    temporary = {path: path.with_name(f".{path.name}.tmp") for path in files}
    try:
        for path, content in files.items():
            with name_in_errors(path), open(temporary[path], "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
        for path in files:
            if path.is_dir():  # found before the first rename, so that no old file has been replaced yet
                raise IsADirectoryError(0, "a folder is in the way", str(path))
        for path in files:
            os.replace(temporary[path], path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # sync the folder, so that the rename survives; Windows has no such call
        for parent in {path.parent for path in files}:
            folder = os.open(parent, os.O_DIRECTORY)
            os.fsync(folder)
            os.close(folder)


@contextmanager
def name_in_errors(path):
    """Add the path to an OSError inside the block that names no file, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
