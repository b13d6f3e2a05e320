"""Messages to the user: one line each, without a traceback."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path


def note(message):
    """Print a line on stderr that starts with the name of the script."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


def fail(message):
    """Exit with code 1 and one line on stderr: a message or an error."""
    if isinstance(message, OSError) and message.filename:  # without "[Errno 2]"
        message = f"{message.filename}: {message.strerror}"
    note(message)
    sys.exit(1)


def first_line(error):
    """Return the first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def need(feature, *packages):
    """Import packages that only this feature needs, and return the first. Raises ValueError if one fails."""
    try:
        first, *_ = map(importlib.import_module, packages)
        return first
    except ImportError as error:
        line = f"{feature} needs {', '.join(packages)} ({first_line(error)}): pip install {' '.join(packages)}"
        raise ValueError(line) from None


@contextmanager
def one_line_errors():
    """Turn a ValueError into one line where we read what the user gave us. Elsewhere it is a bug, with a traceback."""
    try:
        yield
    except ValueError as error:
        fail(error)
