"""Command lines: messages in one line each, without a traceback, and streams that may be closed."""

import argparse
import errno
import importlib
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from extras.hints import hint


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the line breaks of its description, and reports errors in one line."""

    def __init__(self, description):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=raw, allow_abbrev=False)

    def parse_args(self, args=None):
        flags = super().parse_args(args)
        for name, value in vars(flags).items():
            if value == "":  # probably an unset variable of the shell
                self.error(f"--{name} is empty")
        return flags

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}{hint(message, self)} (--help lists the flags)\n")


def note(message):
    """Print a line on stderr that starts with the name of the script."""
    script = Path(sys.argv[0])
    name = script.parent.name if script.name == "__main__.py" else script.name
    print(f"{name}: {message}", file=sys.stderr)


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


@contextmanager
def writing_to(folder, hint):
    """Turn a folder that cannot be written, or is a file, into one line with a way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR):
            raise
        fail(f"cannot write to {folder} ({error.strerror}): {hint}")


def lock_folder(folder, name=".lock"):
    """Lock a folder, which may be new, through a file in it, and return the open file. The lock ends with the process.

    Raises ValueError if another process holds the lock, and OSError if the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / name, "ab")  # noqa: SIM115
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is writing to {folder}: stop it, or change --out_dir") from None
    except (ImportError, OSError):  # Windows and some network drives have no such locks
        pass
    return lock


# -- main --------------------------------------------------------------------------------------------------------------


def run_script(main):
    """Run main() as a good citizen of the command line, and return its exit code.

    Ctrl-C, a full disk and too little memory are one line or none. Output is UTF-8 on Windows, too. A stream that is
    closed, as a daemon's, becomes devnull. Threads share the cores with other processes.
    """
    from extras.threads import share_cores  # here, because data/prepare.py has no torch

    share_cores()  # threads that spin on a busy machine can be 40 times slower
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout lacks it
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
        if hasattr(signal, "SIGPIPE") and "RANK" not in os.environ:  # torchrun's processes may lose a socket
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` has read enough
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        fail(error)
    except RuntimeError as error:
        if "allocate" not in str(error):  # torch says so for the CPU and for a GPU
            raise
        fail("out of memory: take a smaller batch or a smaller model (train.py: --gradient_accumulation_steps)")


def catch_signals():
    """Return a list to which Ctrl-C and SIGTERM append their numbers, so that we can finish the current step.

    A second Ctrl-C ends the process at once. A second SIGTERM does not, because `timeout` sends two.
    """
    received = []

    def receive(signum, frame):
        received.append(signum)
        if signum == signal.SIGINT and "RANK" not in os.environ:  # torchrun forwards one that we have received
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # jobs that a shell script starts with & ignore Ctrl-C
            signal.signal(number, receive)
    return received


def run_main(main):
    """Run the main() of a script in extras."""
    if code := run_script(main):  # a notebook reports even exit code 0
        sys.exit(code)
