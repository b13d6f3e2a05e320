"""Turn text into training data: train.bin and val.bin with token ids, and meta.json.

    python data/prepare.py                  tiny Shakespeare, downloaded; a token is a character
    python data/prepare.py --input a.txt b.txt   your own UTF-8 text, one file or several
    python data/prepare.py --url https://…  UTF-8 text from the web
    python data/prepare.py --tokenizer bpe --vocab_size 512   a token is a piece of a word, learned from the text
    python data/prepare.py --tokenizer gpt2     the tokens of a model: a Hugging Face folder, a checkpoint or a run
    python data/prepare.py --hold_out       split the training text again, into data/dev

A setting chosen for its loss on val.bin looks better than it is. So choose settings on data/dev, which trains on the
first nine tenths of train.bin and evaluates on the last tenth. val.bin stays unseen.
"""

import argparse
import codecs
import hashlib
import io
import itertools
import json
import os
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # the repository, where extras is
CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STAND_IN = "sample.txt (offline stand-in)"
TIMEOUT = 30  # seconds, to connect and between two chunks of the response
PIECE = 2**20  # bytes per read, so that the text may be larger than memory

# -- fetching ----------------------------------------------------------------------------------------------------------


def download(url, file):
    """Write the response from `url` to an open file, and check the hash of tiny Shakespeare.

    Raises OSError, like all errors of requests, or ValueError if the response is not the text.
    """
    import requests  # here, because --input works without it

    with requests.get(url, stream=True, timeout=TIMEOUT) as response:
        response.raise_for_status()
        if "html" in response.headers.get("Content-Type", ""):  # a page about the file, or a sign-in page
            raise ValueError("the response is an HTML page, not plain text")
        size = int(response.headers.get("Content-Length", 0))
        with tqdm(total=size, unit="B", unit_scale=True, desc="download", disable=None) as bar:
            for chunk in response.iter_content(PIECE):
                file.write(chunk)
                bar.update(len(chunk))
    if url == CORPUS_URL and sha256_of(file) != CORPUS_SHA256:
        raise ValueError(f"the response ({file.tell()} bytes) is not tiny Shakespeare: its SHA-256 differs")


def reason(error):
    """Return the innermost cause of an error of requests. The outer ones are full of object addresses."""
    while error.__context__:
        error = error.__context__
    return str(error) or type(error).__name__


# -- from text to ids --------------------------------------------------------------------------------------------------


def read_text(files, task):
    """Yield the text of the files in pieces, with a progress bar if that takes long.

    files  [(name, open binary file), ...]
    task   what the bar says
    Line ends become "\\n", as when Python opens a file in text mode. Raises ValueError if a file is not UTF-8.
    """
    size = sum(os.fstat(file.fileno()).st_size for _, file in files)
    with tqdm(total=size, unit="B", unit_scale=True, desc=task, disable=None, delay=1) as bar:
        for name, file in files:
            if not file.seekable():
                raise ValueError(f"{name} is a pipe, but we read the text twice: write it to a file first")
            file.seek(0)
            decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
            for raw in itertools.chain(iter(lambda: file.read(PIECE), b""), [b""]):  # noqa: B023
                try:
                    yield decoder.decode(raw, final=not raw)
                except UnicodeDecodeError as error:
                    why = f"byte {file.tell() - len(error.object) + error.start}: {error.reason}"
                    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        why = "it looks like UTF-16"
                    raise ValueError(f"{name} is not UTF-8 ({why}); convert it first") from None
                bar.update(len(raw))


def part(pieces, begin, end):
    """Yield characters `begin` to `end` of the text in `pieces`."""
    for piece in pieces:
        yield piece[max(0, begin) : max(0, end)]
        begin, end = begin - len(piece), end - len(piece)
        if end <= 0:
            return


def split_point(length):
    """Return where the val split begins: 90% of the text is for training."""
    return int(0.9 * length)


def code_points(text):
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def distinct_characters(pieces):
    """Return (chars, length): the distinct characters of the text in order, and its number of characters."""
    seen, length = np.zeros(sys.maxunicode + 1, bool), 0
    for piece in pieces:
        seen[code_points(piece)] = True
        length += len(piece)
    return "".join(map(chr, np.flatnonzero(seen))), length


def encode_characters(pieces, chars):
    """Yield arrays of ids, one per piece of text. The id of a character is its index in `chars`."""
    ids = np.zeros(sys.maxunicode + 1, np.uint32)
    ids[code_points(chars)] = np.arange(len(chars))
    for piece in pieces:
        yield ids[code_points(piece)]


def tokenizer_from(name, vocab_size):
    """Return what meta.json records about the origin of the tokenizer, or None for characters."""
    if name is None:
        return None
    return f"bpe of {vocab_size}" if name == "bpe" else os.path.abspath(name)


def write_text(data_dir, source, files, name, vocab_size):
    """Write the files for the text from `source`, and print its size.

    files             as in read_text
    name, vocab_size  --tokenizer and --vocab_size
    """
    with one_line_errors():
        # the vocabulary
        chars, length = distinct_characters(read_text(files, "read"))
        if not length:
            fail(f"{source} is empty")
        middle, tokenizer, more = split_point(length), None, {}
        if name:
            with needs_extras("--tokenizer"):
                from extras.checkpoint import make_tokenizer
            tokenizer = make_tokenizer(name, vocab_size, training_text=part(read_text(files, "learn"), 0, middle))
            more["tokenizer_from"] = tokenizer_from(name, vocab_size)
        vocabulary = tokenizer.state_dict() if tokenizer else {"chars": chars}
        unit = "tokens" if "tokenizer" in vocabulary else "distinct"
        if unit == "tokens":  # with the bytes, losses can be compared across tokenizers
            val_text = part(read_text(files, "count"), middle, length)
            more["val_bytes"] = sum(len(piece.encode()) for piece in val_text)
        elif tokenizer:
            tokenizer.encode(chars)  # raises ValueError for characters that the model never saw
            chars = tokenizer.vocab

        # the ids
        def encode(begin, end):
            pieces = part(read_text(files, "encode"), begin, end)
            return tokenizer.encode_pieces(pieces) if unit == "tokens" else encode_characters(pieces, chars)

        size = len(tokenizer.vocab if tokenizer else chars)
        text_sha256 = sha256_of(*(file for _, file in files))
        num_ids = write(
            data_dir, vocabulary, size, encode(0, middle), encode(middle, length), source, text_sha256, **more
        )
    print(f"source: {source}")
    print(f"{length:,} characters, {size:,} {unit}; train {num_ids['train']:,}, val {num_ids['val']:,}: {data_dir}")


def hold_out(data_dir):
    """Split the training text in data_dir again, into data_dir/dev, with the same tokenizer."""
    with needs_extras("--hold_out"):
        from extras.holdout import read_training_ids
    with one_line_errors():
        tokenizer, ids = read_training_ids(data_dir)
    middle, vocabulary, more = split_point(len(ids)), tokenizer.state_dict(), {}
    if "tokenizer" in vocabulary:
        more["val_bytes"] = len(tokenizer.decode(ids[middle:].tolist()).encode())
    source, dev = f"the training text in {data_dir}", data_dir / "dev"
    num_ids = write(dev, vocabulary, len(tokenizer.vocab), [ids[:middle]], [ids[middle:]], source, **more)
    print(f"train {num_ids['train']:,}, val {num_ids['val']:,} {tokenizer.unit}: {dev}")


# -- the files ---------------------------------------------------------------------------------------------------------


def sha256_of(*files):
    """Return the SHA-256 of the content of open binary files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        file.seek(0)
        while chunk := file.read(PIECE):
            digest.update(chunk)
    return digest.hexdigest()


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def write(data_dir, vocabulary, size, train, val, source, text_sha256=None, **more):
    """Write train.bin, val.bin and meta.json into data_dir, a Path: all files or none.

    vocabulary   {"chars": the characters} or {"tokenizer": a tokenizer.json}
    size         the number of tokens in it
    train, val   the ids, in pieces: iterables of sequences
    source       where the text comes from
    text_sha256  the hash of its bytes
    more         additional entries for meta.json
    Returns {"train": the number of ids, "val": the same}. Raises OSError.
    """
    id_type = "<u2" if size <= 2**16 else "<u4"
    hashes, num_ids = {"text": text_sha256, **{name: sha256(content) for name, content in vocabulary.items()}}, {}

    def to_bytes(name, pieces):
        digest, num_ids[name] = hashlib.sha256(), 0
        for ids in pieces:
            content = np.asarray(ids, id_type).tobytes()
            digest.update(content)
            num_ids[name] += len(ids)
            yield content
        hashes[name] = digest.hexdigest()

    def meta():  # runs after the rest is written, when the hashes are known
        yield json.dumps(vocabulary | {"source": source} | more | {"sha256": hashes}, indent=1).encode()

    files = {data_dir / f"{name}.bin": to_bytes(name, pieces) for name, pieces in (("train", train), ("val", val))}
    data_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(files | {data_dir / "meta.json": meta()})
    return num_ids


def prepared(data_dir):
    """Return the meta.json in data_dir, or {} if a file there is missing or damaged."""
    try:
        meta = json.loads((data_dir / "meta.json").read_bytes())
        hashes = {name: sha256(meta[name]) for name in ("chars", "tokenizer") if name in meta}
        for name in ("train", "val"):
            with open(data_dir / f"{name}.bin", "rb") as file:
                hashes[name] = sha256_of(file)
        return meta if len(hashes) == 3 and hashes.items() <= meta["sha256"].items() else {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


# -- the command line --------------------------------------------------------------------------------------------------


def parse_args():
    parser = Parser(__doc__)
    task = parser.add_mutually_exclusive_group()
    input_help = "use these UTF-8 text files instead of tiny Shakespeare, one after the other"
    task.add_argument("--input", type=path, nargs="+", metavar="FILE", help=input_help)
    task.add_argument("--url", help="download this UTF-8 text instead of tiny Shakespeare")
    task.add_argument("--hold_out", action="store_true", help="split the training text in DIR again, into DIR/dev")
    parser.add_argument(
        "--data_dir", type=path, default=str(HERE), metavar="DIR", help="where to write (default: this script's folder)"
    )
    parser.add_argument(
        "--tokenizer",
        type=path,
        metavar="bpe|MODEL",
        help="bpe: learn a BPE from the text; MODEL: the tokens of a Hugging Face folder, a checkpoint or a run "
        "(default: the characters of the text)",
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
    files = [(name, open(name, "rb")) for name in args.input or []]  # noqa: SIM115
    source = ", ".join(map(os.path.abspath, args.input)) if args.input else args.url or CORPUS_URL

    # is everything in place already?
    if not files:
        there = prepared(data_dir)
        same_tokens = there.get("tokenizer_from") == tokenizer_from(args.tokenizer, args.vocab_size)
        same_text = there and (
            there["source"] == source or (source == CORPUS_URL and there["sha256"]["text"] == CORPUS_SHA256)
        )
        if same_text and same_tokens and not args.force:
            print(f"{data_dir} already holds all of {there['source']}: nothing to do (--force does it again)")
            return

    # can we write there? we ask before a download
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=data_dir).close()
    except PermissionError as error:
        fail(f"cannot write to {data_dir} ({error.strerror}): choose a different folder with --data_dir")

    # download, or fall back to the stand-in for tiny Shakespeare
    if not files:
        file = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            download(source, file)
        except (ImportError, OSError, ValueError) as error:
            if args.url or same_text:
                fail(f"cannot download {source}: {reason(error)}; nothing was changed")
            note(f"WARNING: COULD NOT DOWNLOAD TINY SHAKESPEARE ({reason(error)})")
            note("USING THE SMALL STAND-IN data/sample.txt INSTEAD")
            source, file = STAND_IN, open(HERE / "sample.txt", "rb")  # noqa: SIM115
        files = [(source, file)]
    write_text(data_dir, source, files, args.tokenizer, args.vocab_size)


# -- helpers, as in model.py and train.py ------------------------------------------------------------------------------


def write_atomically(files):
    """Write {path: pieces}, iterables of bytes. Even after a power cut, each file is the old one or the new one.

    We write temporary files first, and rename them only when all of them are on the disk. So a full disk leaves the old
    files alone. Raises OSError.
    """
    temporary = {path: path.with_name(f".{path.name}.tmp") for path in files}
    try:
        for path, pieces in files.items():
            with name_in_errors(path), open(temporary[path], "wb") as file:
                file.writelines(pieces)
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
def needs_extras(feature):
    """Exit with one line if the imports inside the block fail because the folder extras is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "extras":
            raise
        fail(f"{feature} needs the folder extras of the repository, next to model.py")


def run_main(main):
    """Run main(). Errors that are not bugs are reported in one line.

    Exit codes: 1 after an error or a closed pipe, 130 after Ctrl-C, 143 after SIGTERM.
    """
    sys.stdout, sys.stderr = (f or open(os.devnull, "w") for f in (sys.stdout, sys.stderr))  # noqa: SIM115 - for >&-
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


if __name__ == "__main__":
    run_main(main)
