"""The command lines of extras: flags, and messages in one line each, without a traceback."""

import difflib
import errno
import importlib
import os
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path


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


# -- flags -------------------------------------------------------------------------------------------------------------


# what a flag of nanoGPT or of another script is called here
ELSEWHERE = {
    ("train.py", "--resume"): "type --init_from resume",
    ("train.py", "--dataset"): "type --data_dir FOLDER, one that data/prepare.py wrote",
    ("train.py", "--input"): "run python data/prepare.py --input FILE first",
    ("train.py", "--ckpt"): "type --init_from FILE",
    ("train.py", "--lr"): "type --learning_rate",
    ("train.py", "--tokenizer"): "that is a flag of data/prepare.py",
    ("train.py", "--vocab_size"): "that is a flag of data/prepare.py",
    ("sample.py", "--init_from"): "type --ckpt for a model from elsewhere, and nothing for your last run",
    ("sample.py", "--resume"): "without --ckpt, it is your last run",
    ("sample.py", "--data_dir"): "the checkpoint has the vocabulary, so leave it out",
    ("sample.py", "--dataset"): "the checkpoint has the vocabulary, so leave it out",
}


def hint(word, parser):
    """Return what a word that the parser does not know may mean, as the end of its message: ": type --ckpt FILE"."""
    name = "--" + word.partition("=")[0].lstrip("-").replace("-", "_")
    if said := ELSEWHERE.get((parser.prog, name)):
        return f": {said}"
    path = Path(word)
    if parser.prog in ("train.py", "sample.py") and os.path.exists(word):  # Path.exists raises for a long name
        trains = parser.prog == "train.py"
        word = shlex.quote(word)
        if path.suffix == ".txt":
            return f": run python data/prepare.py --input {word} first" if trains else f": type --prompt FILE:{word}"
        data = path.is_dir() and not any((path / name).exists() for name in ("ckpt.pt", "last.pt", "config.json"))
        return f": type {'--ckpt' if not trains else '--data_dir' if data else '--init_from'} {word}"
    if parser.prog == "sample.py" and not word.startswith("-"):
        return ': type --prompt "TEXT"'
    known = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    begun = [flag for flag in known if len(name) > 4 and flag.startswith(name[2:])]
    if similar := begun or difflib.get_close_matches(name[2:], known, n=1, cutoff=0.7):
        return f": did you mean --{similar[0]}?"
    return ": docs/interop.md lists what nanoGPT's flags are called here" if parser.prog == "train.py" else ""


# -- main --------------------------------------------------------------------------------------------------------------


def run_main(main):
    """Run main(), whose output may go to a pipe that closes early. A file error is one line."""
    from model import begin_script  # here, because data/prepare.py has no torch

    begin_script()
    try:
        main()
    except OSError as error:
        fail(error)
