"""What every script does around its work: read the command line, say what went wrong in one line, obey a signal."""

import argparse
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what it sets in the environment
MODEL_IN_THE_BOX = Path(__file__).resolve().parent.parent / "assets" / "shakespeare.pt"

# -- arguments ---------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the line breaks of its description and reports a mistake in one line."""

    def __init__(self, description, **options):
        options = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False) | options
        super().__init__(description=description, **options)

    def error(self, message):
        self.exit(2, f"{one_line(f'{self.prog}: {message}')} (--help lists the flags)\n")


def number(kind, interval):
    """Return an argparse type: an int or a float in an interval that is written like "[0, 1)"."""
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
    """An argparse type: a path. We refuse an empty one, because it is most likely a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def pick_device(name):
    """Return the torch.device for --device. "auto" is a GPU if there is one. Raises ValueError if we cannot use it.

    A GPU with a number becomes PyTorch's current one, because pinned memory and NCCL go by that.
    """
    import torch  # here, because data/prepare.py does without torch

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


def pick_checkpoint(ckpt, out_dir):
    """Return the path of the checkpoint that --ckpt and --out_dir name. None stands for a flag that is not given.

    --ckpt may name a file, or the folder of a run. Without either flag we take out/ckpt.pt, and if nothing has been
    trained there yet, the model that comes with the code. Raises FileNotFoundError if we can tell what went wrong.
    """
    if ckpt and not Path(ckpt).is_dir():
        return Path(ckpt)
    folder = Path(ckpt or out_dir or "out")
    file, last = folder / "ckpt.pt", folder / "last.pt"
    if os.path.lexists(file):  # a link to a disk that is not mounted is a problem to report, not a missing run
        return file
    if last.is_file():
        raise FileNotFoundError(f"no checkpoint at {file}, which the next evaluation writes: give --ckpt {last}")
    if (folder / "config.json").is_file():
        read = f"sample.py --engine hf --ckpt {folder} reads it, and so does train.py --init_from {folder}"
        raise FileNotFoundError(f"{folder} is a Hugging Face folder, without a ckpt.pt: {read}")
    if ckpt or out_dir:
        return file  # load_checkpoint says that it is not there
    note(f"no checkpoint in out: using {MODEL_IN_THE_BOX.name}, a model that comes with the code")
    return MODEL_IN_THE_BOX


# -- messages ----------------------------------------------------------------------------------------------------------


def one_line(text):
    """Return the text with escapes for what cannot be printed. A path may hold a newline, or move the cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def note(message):
    """Print a line on stderr that begins with the name of the script."""
    print(one_line(f"{Path(sys.argv[0]).name}: {message}"), file=sys.stderr)


def fail(message, code=1):
    """Exit with `code` and one line on stderr."""
    rank, *_ = torchrun_ranks() or (0,)
    if rank == 0:
        note(message)
    else:  # fails like rank 0, which speaks for all: torchrun ends the others as soon as one process has ended
        time.sleep(2)
    sys.exit(code)


def torchrun_ranks():
    """Return (rank, local rank, number of processes) if torchrun has started this process, otherwise None."""
    try:
        rank, local_rank, world_size = (int(os.environ[name]) for name in TORCHRUN[:3])
    except (KeyError, ValueError):
        return None
    return (rank, local_rank, world_size) if set(TORCHRUN) <= set(os.environ) and 0 <= rank < world_size else None


@contextmanager
def one_line_errors():
    """Turn a ValueError or an OSError inside the block into one line and exit code 1.

    Wrap code that reads the user's files in it. Anywhere else a ValueError is a bug, and its traceback helps.
    """
    try:
        yield
    except OSError as error:  # our own have a message alone; those of the operating system have three parts
        fail(f"cannot use {error.filename}: {error.strerror}" if error.filename else error.strerror or error)
    except ValueError as error:
        fail(error)


def aligned(rows, num_left):
    """Return rows of cells as text in columns. The first num_left columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    padded = (
        [cell.ljust(w) if i < num_left else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths))]
        for cells in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


# -- around main -------------------------------------------------------------------------------------------------------


def run_main(main, *, disk_hint="", memory_hint="a smaller model or batch would fit"):
    """Run a script's main() so that whatever ends it, short of a bug, takes one line or none.

    disk_hint    end of the line about a file that could not be written
    memory_hint  end of the line about memory that ran out
    Exit codes: 1 after an error or a closed pipe, 130 after Ctrl-C, 143 after SIGTERM, 129 after a lost terminal.
    """
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # on Windows too
    # torchrun ends its processes by SIGTERM, and one that waits for the others inside a library would never see it
    handle_signals(leave, ["SIGINT"] if torchrun_ranks() else ["SIGINT", "SIGTERM", "SIGHUP"])
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # `head` has read enough
        sys.stdout = None  # the interpreter would flush it once more, and complain
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            sys.stdout = None  # the only file of ours that has no name
        verb = "write" if disk_hint or sys.stdout is None else "use"  # we read inside one_line_errors
        hint = f"; {disk_hint}" if disk_hint else ""
        fail(f"cannot {verb} {error.filename or 'the output'}: {error.strerror}{hint}")
    except (MemoryError, RuntimeError) as error:
        words = ("allocate memory", "out of memory", "not enough memory")  # Linux, CUDA, Windows
        if not (isinstance(error, MemoryError) or any(each in str(error) for each in words)):
            raise
        fail(f"out of memory: {memory_hint}")


def leave(signum, frame):
    """Exit as a shell expects of a process that a signal has ended, but clean up first: `with` and `finally` run."""
    sys.exit(128 + signum)


def handle_signals(handler, names=("SIGINT", "SIGTERM", "SIGHUP")):
    """Let the handler take these signals, except one that is ignored: nohup means it, and so does `&` in a script."""
    for name in names:
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class StopSignals:
    """Ctrl-C, SIGTERM and a lost terminal as a wish that train.py can grant after its present step.

    received  the number of the first signal, or 0
    A second Ctrl-C ends the process at once. A second SIGTERM or SIGHUP doesn't, because they come in pairs: `timeout`
    sends to the process and to its group, and a terminal that closes is reported by the shell and by the kernel.
    """

    def __init__(self):
        self.received = 0
        handle_signals(self.receive)

    def receive(self, signum, frame):
        self.received = self.received or signum
        if signum == signal.SIGINT and not torchrun_ranks():  # torchrun passes on a Ctrl-C that everybody got already
            signal.signal(signal.SIGINT, signal.SIG_DFL)
