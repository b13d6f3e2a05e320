"""Turn text into training data: train.bin and val.bin with token ids, and meta.json.

    python data/prepare.py                  tiny Shakespeare, downloaded; a token is a character
    python data/prepare.py --input my.txt   your own UTF-8 text
    python data/prepare.py --url https://…  UTF-8 text from the web
    python data/prepare.py --tokenizer bpe --vocab_size 512   a token is a piece of a word, learned from the text
    python data/prepare.py --tokenizer gpt2                   the tokens of the model in the folder gpt2
    python data/prepare.py --hold_out       split the training text again, into data/dev

A setting chosen for its loss on val.bin looks better than it is. So choose settings on data/dev, which trains on the
first nine tenths of train.bin and evaluates on the last tenth. val.bin stays unseen.
"""

import argparse
import errno
import hashlib
import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # the repository, where kvgpt is
CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STAND_IN = "sample.txt (offline stand-in)"
TIMEOUT = 30  # seconds, to connect and between two chunks of the response

# -- fetching ----------------------------------------------------------------------------------------------------------


def download(url):
    """Return the bytes at `url`, and check the hash of tiny Shakespeare.

    Raises OSError, like all errors of requests, or ValueError if the response is not the text.
    """
    import requests  # here, because --input works without it

    with requests.get(url, stream=True, timeout=TIMEOUT) as response:
        response.raise_for_status()
        if "html" in response.headers.get("Content-Type", ""):  # a page about the file, or a sign-in page
            raise ValueError("the response is an HTML page, not plain text")
        body, size = bytearray(), int(response.headers.get("Content-Length", 0))
        with tqdm(total=size, unit="B", unit_scale=True, desc="download", disable=None) as bar:
            for chunk in response.iter_content(2**16):
                body += chunk
                bar.update(len(chunk))
    if url == CORPUS_URL and sha256(body) != CORPUS_SHA256:
        raise ValueError(f"the response ({len(body)} bytes) is not tiny Shakespeare: its SHA-256 differs")
    return body


def reason(error):
    """Return the innermost cause of an error of requests. The outer ones are full of object addresses."""
    while error.__context__:
        error = error.__context__
    return str(error) or type(error).__name__


# -- from text to ids --------------------------------------------------------------------------------------------------


def split(text):
    """Return the first 90% of a str or an array of ids, for training, and the last 10%, for evaluation."""
    n = int(0.9 * len(text))
    return text[:n], text[n:]


def encode_characters(text):
    """Return (chars, ids): the distinct characters in order, and the place of each character of the text among them."""
    codes, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), "<u4"), return_inverse=True)
    return "".join(map(chr, codes)), ids


def make_tokenizer(text, name, vocab_size):
    """Return the tokenizer for --tokenizer. Raises ValueError.

    text  all of it; a BPE learns only from the training part
    name  "bpe", or a folder or file
    """
    with needs_kvgpt("--tokenizer"):
        from kvgpt.bpe import read_tokenizer, tokenizer_from_json, train_bpe
    if name == "bpe":
        return tokenizer_from_json(train_bpe(split(text)[0], vocab_size))
    return tokenizer_from_json(read_tokenizer(Path(name)))


def tokenizer_from(name, vocab_size):
    """Return what meta.json records about the origin of the tokenizer, or None for characters."""
    if name is None:
        return None
    return f"bpe of {vocab_size}" if name == "bpe" else os.path.abspath(name)


def write_text(data_dir, source, raw, name, vocab_size):
    """Write the files for `raw`, the bytes of the text from `source`, and print its size."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{source} is not UTF-8 (byte {error.start}: {error.reason}); convert it first")
    if not text:
        fail(f"{source} is empty")
    more = {}
    if name is None:
        chars, ids = encode_characters(text)
        vocabulary, size, kind = {"chars": chars}, len(chars), "distinct"
        train, val = split(ids)
    else:
        with one_line_errors():
            tokenizer = make_tokenizer(text, name, vocab_size)
            train, val = (tokenizer.encode(part) if part else [] for part in split(text))
        vocabulary, size, kind = tokenizer.state_dict(), len(tokenizer.vocab), "distinct"
        more["tokenizer_from"] = tokenizer_from(name, vocab_size)
        if "tokenizer" in vocabulary:  # with the bytes, losses can be compared across tokenizers
            more["val_bytes"], kind = len(split(text)[1].encode()), "tokens"
    write(data_dir, vocabulary, size, train, val, source, raw, **more)
    print(f"source: {source}")
    print(f"{len(text):,} characters, {size:,} {kind}; train {len(train):,}, val {len(val):,}: {data_dir}")


def hold_out(data_dir):
    """Split the training text in data_dir again, into data_dir/dev, with the same tokenizer."""
    with needs_kvgpt("--hold_out"):
        from kvgpt.holdout import read_training_ids
    with one_line_errors():
        tokenizer, ids = read_training_ids(data_dir)
    (train, val), vocabulary = split(ids), tokenizer.state_dict()
    source, dev, text = f"the training text in {data_dir}", data_dir / "dev", tokenizer.decode(ids.tolist())
    more = dict(val_bytes=len(tokenizer.decode(val.tolist()).encode())) if "tokenizer" in vocabulary else {}
    write(dev, vocabulary, len(tokenizer.vocab), train, val, source, text.encode(), **more)
    print(f"train {len(train):,}, val {len(val):,} {tokenizer.unit}: {dev}")


# -- the files ---------------------------------------------------------------------------------------------------------


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def write(data_dir, vocabulary, size, train, val, source, text, **more):
    """Write train.bin, val.bin and meta.json into data_dir, a Path: all files or none.

    vocabulary  {"chars": the characters} or {"tokenizer": a tokenizer.json}
    size        the number of tokens in it
    train, val  sequences of ids
    source      where the text comes from
    text        its bytes, UTF-8
    more        additional entries for meta.json
    Raises OSError; BlockingIOError if another process is writing there.
    """
    id_type = "<u2" if size <= 2**16 else "<u4"
    splits = {"train": np.asarray(train, id_type).tobytes(), "val": np.asarray(val, id_type).tobytes()}
    hashed = {"text": text, **{name: content.encode() for name, content in vocabulary.items()}, **splits}
    hashes = {name: sha256(content) for name, content in hashed.items()}
    files = {data_dir / f"{name}.bin": content for name, content in splits.items()}
    meta = vocabulary | {"source": source} | more | {"sha256": hashes}
    files[data_dir / "meta.json"] = json.dumps(meta, indent=1).encode("utf-8")  # last, because it vouches for the rest
    data_dir.mkdir(parents=True, exist_ok=True)
    with lock_folder(data_dir):
        write_atomically(files)


def prepared(data_dir):
    """Return the meta.json in data_dir, or {} if a file there is missing or damaged."""
    try:
        meta = json.loads((data_dir / "meta.json").read_bytes())
        contents = {name: (data_dir / f"{name}.bin").read_bytes() for name in ("train", "val")}
        contents |= {name: meta[name].encode() for name in ("chars", "tokenizer") if name in meta}
        whole = len(contents) == 3 and all(sha256(each) == meta["sha256"][name] for name, each in contents.items())
        return meta if whole else {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


# -- the command line --------------------------------------------------------------------------------------------------


def parse_args():
    parser = Parser(__doc__)
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--input", type=path, metavar="FILE", help="use this UTF-8 text file instead of tiny Shakespeare")
    task.add_argument("--url", help="download this UTF-8 text instead of tiny Shakespeare")
    task.add_argument("--hold_out", action="store_true", help="split the training text in DIR again, into DIR/dev")
    parser.add_argument(
        "--data_dir", type=path, default=str(HERE), metavar="DIR", help="where to write (default: this script's folder)"
    )
    parser.add_argument(
        "--tokenizer",
        type=path,
        metavar="bpe|FOLDER",
        help="bpe: learn a BPE from the text; FOLDER: use the tokenizer of a model (default: characters)",
    )
    size_help = "vocabulary size of --tokenizer bpe (default: 512)"
    parser.add_argument("--vocab_size", type=int, metavar="N", help=size_help)
    parser.add_argument("--force", action="store_true", help="download again even if the files exist")
    args, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; to prepare your own text, type --input FILE")
    if args.vocab_size is not None and not 256 <= args.vocab_size <= 2**20:
        parser.error(f"argument --vocab_size: {args.vocab_size} is not in [256, {2**20}]")
    if args.vocab_size and args.tokenizer != "bpe":
        parser.error("--vocab_size needs --tokenizer bpe")
    if args.hold_out and args.tokenizer:
        parser.error("--hold_out keeps the tokenizer of the data: leave out --tokenizer")
    args.vocab_size = args.vocab_size or 512
    return args


# -- main --------------------------------------------------------------------------------------------------------------


def main():
    args = parse_args()
    data_dir = Path(args.data_dir)
    if args.hold_out:
        hold_out(data_dir)
        return
    if args.input:
        write_text(
            data_dir, os.path.abspath(args.input), Path(args.input).read_bytes(), args.tokenizer, args.vocab_size
        )
        return

    # is everything in place already?
    source = args.url or CORPUS_URL
    there = prepared(data_dir)
    same_tokens = there.get("tokenizer_from") == tokenizer_from(args.tokenizer, args.vocab_size)
    same_text = there and (
        there["source"] == source or (source == CORPUS_URL and there["sha256"]["text"] == CORPUS_SHA256)
    )
    done = same_text and same_tokens
    if done and not args.force:
        print(f"{data_dir} already holds all of {there['source']}: nothing to do (--force does it again)")
        return

    # download, or fall back to the stand-in for tiny Shakespeare
    try:
        raw = download(source)
    except (ImportError, OSError, ValueError) as error:
        if args.url or same_text:
            fail(f"cannot download {source}: {reason(error)}; nothing was changed")
        note(f"WARNING: COULD NOT DOWNLOAD TINY SHAKESPEARE ({reason(error)})")
        note("USING THE SMALL STAND-IN data/sample.txt INSTEAD")
        source, raw = STAND_IN, (HERE / "sample.txt").read_bytes()
    write_text(data_dir, source, raw, args.tokenizer, args.vocab_size)


# -- helpers, as in model.py and train.py ------------------------------------------------------------------------------


def write_atomically(files):
    """Write {path: bytes}. At any moment, each file is either the old one or the new one, even after a power cut.

    We write temporary files first, and rename them only when all of them are on the disk. So a full disk leaves the old
    files alone. Raises OSError.
    """
    temporary = {path: path.with_name(f".{path.name}.tmp") for path in files}
    try:
        for path, content in files.items():
            with name_in_errors(path), open(temporary[path], "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
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


def path(text):
    """An argparse type: a path. An empty one is refused, because it is probably an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the line breaks of its description and reports mistakes in one line."""

    def __init__(self, description, epilog=None):
        lines_as_they_are = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, epilog=epilog, formatter_class=lines_as_they_are, allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def note(message):
    """Print a line on stderr that starts with the name of the script."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


def fail(message):
    """Exit with code 1 and one line on stderr: a message or an error."""
    if isinstance(message, OSError) and message.filename:  # without "[Errno 2]"
        message = f"{message.filename}: {message.strerror}"
    note(message)
    sys.exit(1)


@contextmanager
def one_line_errors():
    """Turn a ValueError into one line where we read what the user gave us. Elsewhere it is a bug, with a traceback."""
    try:
        yield
    except ValueError as error:
        fail(error)


@contextmanager
def needs_kvgpt(feature):
    """Exit with one line if the imports inside the block fail because the folder kvgpt is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "kvgpt":
            raise
        fail(f"{feature} needs the folder kvgpt of the repository, next to model.py")


def run_main(main, memory_hint):
    """Run main(). Errors that are not bugs are reported in one line.

    memory_hint  what to suggest when memory runs out
    Exit codes: 1 after an error or a closed pipe, 130 after Ctrl-C, 143 after SIGTERM.
    """
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # on Windows too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C, it lets `with` and `finally` clean up
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
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


if __name__ == "__main__":
    run_main(main, memory_hint="a shorter text would fit")
