"""Turn text into training data: train.bin and val.bin with token ids, and meta.json.

    python data/prepare.py                  tiny Shakespeare, downloaded; a token is a character
    python data/prepare.py --input a.txt b.txt   your own UTF-8 text, one file or several
    python data/prepare.py --tokenizer bpe --vocab_size 512   a token is a piece of a word, learned from the text
    python data/prepare.py --tokenizer gpt2     the tokens of a model: a Hugging Face folder, a checkpoint or a run

The first nine tenths of the text are for training, and the rest is the val split, unless --val names a file for it.
"""

import argparse
import codecs
import difflib
import hashlib
import json
import os
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

try:
    import numpy as np
    from tqdm import tqdm
except ModuleNotFoundError as error:
    sys.exit(f"prepare.py: {error}: activate the environment, or install it as README.md says")

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # the repository, where extras is
CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STAND_IN = HERE / "sample.txt"
STAND_IN_SOURCE = "sample.txt (offline stand-in)"
PIECE = 2**20  # characters per read, so that the text may be larger than memory


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(path):
    """Write tiny Shakespeare to a file. Raises ValueError."""
    try:
        import requests  # here, because --input works without it

        response = requests.get(CORPUS_URL, timeout=30)
        response.raise_for_status()
        path.write_bytes(response.content)
        if sha256_of(path) != CORPUS_SHA256:
            raise ValueError(f"the response ({len(response.content)} bytes) is not tiny Shakespeare")
    except (ImportError, OSError, ValueError) as error:
        while error.__context__:  # the outer errors of requests are full of object addresses
            error = error.__context__
        raise ValueError(f"cannot download {CORPUS_URL}: {str(error) or type(error).__name__}") from None


def read_text(paths, task=None, begin=0, end=sys.maxsize):
    """Yield characters `begin` to `end` of UTF-8 files in pieces, with "\\n" for every line end. Raises ValueError.

    A progress bar for the `task` appears if that takes long.
    """
    position = 0  # characters so far
    size = sum(map(os.path.getsize, paths))
    with tqdm(total=size, unit="B", unit_scale=True, desc=task, disable=None, delay=1) as bar:
        for path in paths:
            try:
                with open(path, encoding="utf-8-sig") as file:
                    while position < end and (piece := file.read(PIECE)):
                        yield piece[max(0, begin - position) : max(0, end - position)]
                        position += len(piece)
                        bar.update(len(piece.encode()))
            except UnicodeDecodeError as error:
                utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                why = "it looks like UTF-16" if utf16 else error.reason
                raise ValueError(f"{os.path.abspath(path)} is not UTF-8 ({why}): convert it first") from None


def code_points(text):
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def distinct_characters(pieces):
    """Return the distinct characters of the text, in order, and its number of characters."""
    seen = np.zeros(sys.maxunicode + 1, bool)
    length = 0
    for piece in pieces:
        seen[code_points(piece)] = True
        length += len(piece)
    return "".join(map(chr, np.flatnonzero(seen))), length


def encode_characters(pieces, chars):
    """Yield arrays of ids, one per piece of text. The id of a character is its index in `chars`."""
    ids = np.full(sys.maxunicode + 1, len(chars), np.uint32)  # beyond the vocabulary, if the text changes meanwhile
    ids[code_points(chars)] = np.arange(len(chars))
    for piece in pieces:
        yield ids[code_points(piece)]


def in_order(text):
    """Return whether the lines of a text are sorted: from A to Z, also by their last word, or by length, either way."""
    lines = [line.casefold() for line in text.splitlines() if line.strip()]
    for key in (str, len, lambda line: line.split()[-1]):
        rising = [key(a) < key(b) for a, b in pairwise(lines) if key(a) != key(b)]
        if len(lines) >= 20 and len(rising) >= 5 and not 0.05 < sum(rising) / len(rising) < 0.95:
            return True
    return False


def write(data_dir, vocabulary, size, train, val, source):
    """Write train.bin, val.bin and meta.json into data_dir, a Path. If that fails, the old files stay. Raises OSError.

    vocabulary  {"chars": the characters} or {"tokenizer": a tokenizer.json}, with `size` tokens
    train, val  the ids, in pieces: iterables of sequences
    Returns the number of ids in train and in val.
    """
    id_type = np.dtype("<u2" if size <= 2**16 else "<u4")
    data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir) as folder:
        files = [Path(folder, name) for name in ("train.bin", "val.bin", "meta.json")]
        for path, pieces in zip(files, (train, val)):
            with open(path, "wb") as file:
                file.writelines(np.asarray(ids, id_type).tobytes() for ids in pieces)
        meta = vocabulary | {"source": source, "sha256": {path.stem: sha256_of(path) for path in files[:2]}}
        files[2].write_text(json.dumps(meta, indent=1), encoding="utf-8")
        for path in files:
            os.replace(path, data_dir / path.name)
    return [(data_dir / name).stat().st_size // id_type.itemsize for name in ("train.bin", "val.bin")]


def prepared(data_dir):
    """Return (meta, whole): the meta.json in data_dir, or {}, and whether train.bin and val.bin are what it says."""
    meta = {}
    if any(data_dir.glob("*.bin")) and not (data_dir / "meta.json").exists():  # as nanoGPT leaves ids that are no text
        return {"source": "another program"}, False
    try:
        meta = dict(json.loads((data_dir / "meta.json").read_bytes()))
        return meta, all(sha256_of(data_dir / f"{split}.bin") == meta["sha256"][split] for split in ("train", "val"))
    except (OSError, ValueError, TypeError, KeyError):
        return meta, False


def parse_args():
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is, allow_abbrev=False)
    # errors in one line, without argparse's usage
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} (--help lists the flags)\n")
    add = parser.add_argument
    add("--input", nargs="+", metavar="FILE", help="use these UTF-8 text files, one after the other")
    add("--val", metavar="FILE", help="text for the val split (default: the last tenth)")
    add("--data_dir", default=HERE, metavar="DIR", help="where to write (default: this script's folder)")
    tokenizer_help = "bpe: learn a BPE from the text; MODEL: the tokens of a model folder, a checkpoint or a run"
    add("--tokenizer", metavar="bpe|MODEL", help=tokenizer_help)
    add("--vocab_size", type=int, metavar="N", help="vocabulary size of --tokenizer bpe (default: 512)")
    add("--force", action="store_true", help="replace what is there, even your own text")
    args, unknown = parser.parse_known_args()
    if unknown:
        name = unknown[0].partition("=")[0]
        similar = difflib.get_close_matches(name, parser._option_string_actions, n=1, cutoff=0.7)
        hint = f"did you mean {similar[0]}?" if similar else "to prepare your own text, type --input FILE"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}: {hint}")
    if "" in (args.tokenizer, args.data_dir, args.val, *(args.input or [])):
        parser.error("--input, --tokenizer, --data_dir or --val is empty")
    if args.vocab_size is not None and args.tokenizer != "bpe":
        parser.error("--vocab_size needs --tokenizer bpe")
    args.vocab_size = 512 if args.vocab_size is None else args.vocab_size
    for name in [*(args.input or []), args.val]:
        if name and not Path(name).is_file():
            parser.error(f"{name} is a folder or a pipe: pass a file" if Path(name).exists() else f"there is no {name}")
    args.data_dir = Path(args.data_dir)
    return args


def main():
    args = parse_args()
    meta, whole = prepared(args.data_dir)
    old_source = meta.get("source")
    if not args.input and not args.force:
        if whole and old_source == CORPUS_URL and "chars" in meta and not args.tokenizer and not args.val:
            print(f"{args.data_dir} already holds all of {CORPUS_URL}: nothing to do (--force does it again)")
            return
        if meta and old_source not in (CORPUS_URL, STAND_IN_SOURCE):
            hint = "--force replaces it, a different --data_dir keeps both"
            raise ValueError(f"{args.data_dir} holds your own text, from {old_source}: {hint}")

    with tempfile.TemporaryDirectory() as folder:
        # the text, and where the val split begins
        paths = args.input
        source = ", ".join(map(os.path.abspath, args.input or []))
        if not args.input:
            paths = [Path(folder, "text")]
            source = CORPUS_URL
            try:
                download(paths[0])
            except ValueError as error:
                if old_source not in (None, STAND_IN_SOURCE):
                    raise ValueError(f"{error}; nothing was changed") from None
                note(f"WARNING: {error}\nUSING THE SMALL STAND-IN data/sample.txt INSTEAD OF TINY SHAKESPEARE")
                paths = [STAND_IN]
                source = STAND_IN_SOURCE
        chars, length = distinct_characters(read_text(paths, "read"))
        split = int(0.9 * length)
        if args.val:
            split = length
            paths = [*paths, args.val]
            source += f", {os.path.abspath(args.val)} (val)"
            chars, length = distinct_characters(read_text(paths, "read"))
        if not 0 < split < length:
            raise ValueError(f"{source} has {split} characters for training and {length - split} for validation")
        if not args.val and in_order("".join(read_text(paths, end=PIECE))):
            note("the lines are sorted, so the val split is unlike the rest: shuffle the lines, or pass --val FILE")

        # the vocabulary
        vocabulary = {"chars": chars}
        size = len(chars)
        encode = partial(encode_characters, chars=chars)
        if args.tokenizer:
            from extras.formats.tokenizer import make_tokenizer

            text = read_text(paths, "learn", 0, split)
            vocabulary, size, encode = make_tokenizer(args.tokenizer, args.vocab_size, text, chars, encode_characters)

        # the ids
        train = encode(read_text(paths, "encode", 0, split))
        val = encode(read_text(paths, "encode", split))
        try:
            num_train, num_val = write(args.data_dir, vocabulary, size, train, val, source)
        except OSError as error:
            raise ValueError(f"--data_dir {args.data_dir}: {error.strerror}, so pass a different one") from None
    print(f"source: {source}\n{length:,} characters, a vocabulary of {size:,}: {args.data_dir}")
    print(f"train {num_train:,}, val {num_val:,} tokens")


def note(message):
    print(f"prepare.py: {message}", file=sys.stderr)


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout has no reconfigure
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # on Windows too, and for any file name
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "extras":
            raise
        sys.exit("prepare.py: --tokenizer needs the folder extras of the repository, next to model.py")
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: {error}")
