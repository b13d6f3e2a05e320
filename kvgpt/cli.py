"""The command line of every script: parser, argument types, device, and errors as one line on stderr."""

import argparse
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from kvgpt.guard import exit_after_signals

DEVICES = ("cpu", "cuda", "mps")
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what it sets in the environment
MODEL_IN_THE_BOX = Path(__file__).resolve().parent.parent / "assets" / "shakespeare.pt"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the line breaks of its description and reports an error in one line."""

    def __init__(self, description, **options):
        options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False) | options
        super().__init__(description=description, **options)

    def parse_args(self, args=None, namespace=None):
        parsed = super().parse_args(args, namespace)
        for action in self._actions:  # Python 3.11 turns the value of "--flag=--" into an empty list
            value = getattr(parsed, action.dest, None)
            if value == [] or (isinstance(value, list) and [] in value):
                self.error(f"argument {'/'.join(action.option_strings)}: expected a value other than '--'")
        return parsed

    def error(self, message):
        self.exit(2, f"{one_line(f'{self.prog}: {message}')} (--help lists the flags)\n")


def number(kind, interval):
    """Return an argparse type: an int or a float within `interval`, which is written like "[0, 1)"."""
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
    """An argparse type: a path. An empty string is refused, because it is most likely an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def pick_device(name):
    """Return the torch.device for --device. Raises ValueError for a device that cannot be used here.

    A GPU with a number becomes PyTorch's current one, on which streams, graphs and pinned memory work.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    problem = f"--device {name} cannot be used here"
    if name.partition(":")[0] not in DEVICES:  # torch has names for twenty devices, and no clear error for most
        raise ValueError(f"{problem}: choose auto, {', '.join(DEVICES)}")
    try:
        torch.zeros(1, device=name).tolist()
    except Exception as error:  # every backend raises its own error
        raise ValueError(f"{problem}: {str(error).strip().splitlines()[0][:150]}") from None
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def pick_checkpoint(ckpt, out_dir):
    """Return the path of the checkpoint to read, from the flags --ckpt and --out_dir. None is a flag that is not given.

    Without both flags the path is out/ckpt.pt. Where no run has left a file, it is MODEL_IN_THE_BOX, which a line on
    stderr says. Raises FileNotFoundError for a run that has no ckpt.pt yet.
    """
    file = Path(ckpt or Path(out_dir or "out") / "ckpt.pt")
    last, folder = file.with_name("last.pt"), file.parent
    if not ckpt and last.is_file() and not os.path.lexists(file):
        raise FileNotFoundError(f"no checkpoint at {file}, which the next evaluation writes: give --ckpt {last}")
    broken = os.path.lexists(file) or (os.path.lexists(folder) and not folder.is_dir())  # load_checkpoint says how
    if ckpt or out_dir or broken or not MODEL_IN_THE_BOX.is_file():
        return file
    note(f"no checkpoint in out: using {MODEL_IN_THE_BOX.name}, a model that comes with the code")
    return MODEL_IN_THE_BOX


# -- messages and exit codes -------------------------------------------------------------------------------------------


def script():
    return Path(sys.argv[0]).name


def one_line(text):
    """Return the text with escapes for unprintable characters: a path can hold a newline, or move the cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def note(message):
    """Print a line on stderr that begins with the name of the script."""
    print(one_line(f"{script()}: {message}"), file=sys.stderr)


def fail(message, code=1):
    """Exit with `code` and one line on stderr."""
    rank, *_ = torchrun_ranks() or (0,)
    if rank == 0:  # of the processes that torchrun starts, which all fail alike
        note(message)
    else:
        time.sleep(2)  # torchrun ends all processes when the first one ends, and rank 0 may not have spoken yet
    sys.exit(code)


def torchrun_ranks():
    """Return (rank, local rank, number of processes) of a process that torchrun has started. Otherwise None."""
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in TORCHRUN[:3])
    except (KeyError, ValueError):
        return None
    return (rank, local_rank, world_size) if set(TORCHRUN) <= set(os.environ) and 0 <= rank < world_size else None


@contextmanager
def one_line_errors():
    """Turn a ValueError or FileNotFoundError inside the block into one line and exit code 1.

    Wrap code that reads user-named files. An error anywhere else is a bug and keeps its traceback.
    """
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        fail(error)


def run_main(main, *, disk_hint="", memory_hint="a smaller model or batch would fit"):
    """Run a script's main(). Report I/O errors and out of memory in one line.

    disk_hint    end of the message after a failed write
    memory_hint  end of the message after a failed allocation
    Exit codes: 1 after an error; 130 after Ctrl-C, 143 after SIGTERM, 129 after a lost terminal. A closed pipe is
    reported only with a disk_hint.
    """
    if sys.stdout is not None:
        # UTF-8 whatever the code page of the terminal, and \n on Windows too
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    try:
        # torchrun ends its processes by SIGTERM, and no handler runs while one waits for the others inside a C library
        with exit_after_signals("SIGINT", *(() if torchrun_ranks() else ("SIGTERM", "SIGHUP"))):
            main()
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.filename is None:
            sys.stdout = None  # stdout itself has failed: the interpreter must not flush it again
        if isinstance(error, BrokenPipeError) and not disk_hint:  # `head` has read enough, and nothing is lost
            sys.exit(1)
        hint = f"; {disk_hint}" if disk_hint else ""
        # a script with a disk_hint reads its files inside one_line_errors
        what = f"write {error.filename or 'its output'}" if hint or not error.filename else f"use {error.filename}"
        fail(f"cannot {what}: {error.strerror}{hint}")
    except (MemoryError, RuntimeError) as error:
        words = ("allocate memory", "out of memory", "not enough memory")  # Linux, CUDA, Windows
        if not (isinstance(error, MemoryError) or any(each in str(error) for each in words)):
            raise
        fail(f"out of memory: {memory_hint}")


def aligned(rows, num_left):
    """Return rows of cells as text in columns. The first num_left columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    padded = (
        [cell.ljust(w) if i < num_left else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths))]
        for cells in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


class StopSignals:
    """Ctrl-C, SIGTERM and a lost terminal, as a number to poll: `received`, or 0 while none came."""

    def __init__(self):
        self.received = 0
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP on purpose
                signal.signal(number, self._receive)

    def _receive(self, signum, frame):
        self.received = self.received or signum
        if not torchrun_ranks():  # torchrun passes on what the terminal has sent to every process already
            signal.signal(signum, signal.SIG_DFL)
