"""What every script needs around its work: the command line, one-line errors, signals."""

import argparse
import importlib
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

# -- arguments ---------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the line breaks of its description and reports mistakes in one line."""

    def __init__(self, description, epilog=None):
        lines_as_they_are = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, epilog=epilog, formatter_class=lines_as_they_are, allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def number(kind, interval):
    """Return an argparse type: an int or a float in an interval such as "[0, 1)"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))

    def parse(text):
        value = kind(text)
        inside = low <= value <= high and (value > low or interval[0] == "[") and (value < high or interval[-1] == "]")
        if not inside:
            raise argparse.ArgumentTypeError(f"{text} is not in {interval}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value: 'x'"
    return parse


def boolean(text):
    """An argparse type: True, False, 1 or 0."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


def path(text):
    """An argparse type: a path. An empty one is refused, because it is probably an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def pick_device(name):
    """Return the torch.device for --device. "auto" is a GPU if there is one. Raises ValueError if it does not work.

    A numbered GPU becomes PyTorch's current device, because pinned memory and NCCL use that.
    """
    import torch  # here, because data/prepare.py does not need torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).tolist()
    except Exception as error:  # every backend raises its own kind
        reason = str(error).strip().splitlines()[0][:150]
        raise ValueError(f"--device {name} cannot be used here: {reason}") from None
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


# -- messages ----------------------------------------------------------------------------------------------------------


def note(message):
    """Print a line on stderr that starts with the name of the script."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


def fail(message):
    """Exit with code 1 and one line on stderr: a message or an error. With torchrun every process prints its own."""
    if isinstance(message, OSError) and message.filename:  # without "[Errno 2]"
        message = f"{message.filename}: {message.strerror}"
    note(message)
    sys.exit(1)


def torchrun_ranks():
    """Return (rank, local rank, number of processes) if torchrun started this process, otherwise None."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if all(name in os.environ for name in names):
        return tuple(int(os.environ[name]) for name in names)
    return None


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
    """Turn a ValueError or an OSError inside the block into one line and exit code 1.

    It is for code that reads the user's files. Anywhere else a ValueError is a bug, and needs its traceback.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        fail(error)


# -- around main -------------------------------------------------------------------------------------------------------


def run_main(main, *, memory_hint="a smaller model or batch would fit"):
    """Run a script's main(). Whatever ends it, short of a bug, the user sees at most one line.

    memory_hint  what to suggest when memory runs out
    Exit codes: 1 after an error or a closed pipe, 130 after Ctrl-C, 143 after SIGTERM.
    """
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # on Windows too
    if not torchrun_ranks():  # torchrun's SIGTERM has to end a process that waits in a library
        handle_signals(leave)
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # `head` has read enough
        sys.stdout = None  # the interpreter would flush it again, and complain
        sys.exit(1)
    except OSError as error:
        fail(error)
    except (MemoryError, RuntimeError) as error:
        words = ("allocate memory", "out of memory", "not enough memory")  # Linux, CUDA, Windows
        if not (isinstance(error, MemoryError) or any(each in str(error) for each in words)):
            raise
        fail(f"out of memory: {memory_hint}")


def leave(signum, frame):
    """Exit with the code that shells expect after a signal, but let `with` and `finally` blocks clean up."""
    sys.exit(128 + signum)


def handle_signals(handler):
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell script that starts us with & has Ctrl-C ignored
            signal.signal(number, handler)
