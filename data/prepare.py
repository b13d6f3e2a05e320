"""Turn text into training data: train.bin and val.bin with token ids, and meta.json.

    python data/prepare.py                  tiny Shakespeare, downloaded; a token is a character
    python data/prepare.py --input a.txt b.txt   your own UTF-8 text, one file or several
    python data/prepare.py --url https://…  UTF-8 text from the web
    python data/prepare.py --tokenizer bpe --vocab_size 512   a token is a piece of a word, learned from the text
    python data/prepare.py --tokenizer gpt2     the tokens of a model: a Hugging Face folder, a checkpoint or a run

The first nine tenths of the text are for training, the rest is the val split. --tokenizer needs the folder extras.
"""

import argparse
import codecs
import hashlib
import io
import itertools
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # the repository, where extras is
CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STAND_IN = HERE / "sample.txt"
STAND_IN_SOURCE = "sample.txt (offline stand-in)"
TIMEOUT = 30  # seconds, for connecting and for each read
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


def open_corpus(url, stand_in):
    """Return [(name, open file)] of the text from a URL. Raises ValueError if it cannot be downloaded.

    stand_in  whether data/sample.txt may replace it if we are offline
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        download(url, file)
        return [(url, file)]
    except (ImportError, OSError, ValueError) as error:
        while error.__context__:  # the outer errors of requests are full of object addresses
            error = error.__context__
        why = str(error) or type(error).__name__
        if not stand_in or not STAND_IN.exists():
            raise ValueError(f"cannot download {url}: {why}; nothing was changed") from None
        note(f"WARNING: COULD NOT DOWNLOAD TINY SHAKESPEARE ({why})")
        note("USING THE SMALL STAND-IN data/sample.txt INSTEAD")
        return [(STAND_IN_SOURCE, open(STAND_IN, "rb"))]


# -- from text to ids --------------------------------------------------------------------------------------------------


def chunks(file):
    """Yield the content of an open binary file from its beginning, PIECE bytes at a time."""
    file.seek(0)
    while chunk := file.read(PIECE):
        yield chunk


def read_text(files, task, begin=0, end=sys.maxsize):
    """Yield characters `begin` to `end` of the text in the files, in pieces, with a progress bar if that takes long.

    files  [(name, open binary file), ...]
    task   what the bar says
    Line ends become "\\n", as when Python opens a file in text mode. Raises ValueError if a file is not UTF-8.
    """
    size = sum(os.fstat(file.fileno()).st_size for _, file in files)
    position = 0  # characters so far
    with tqdm(total=size, unit="B", unit_scale=True, desc=task, disable=None, delay=1) as bar:
        for name, file in files:
            if not file.seekable():
                raise ValueError(f"{name} is a pipe, but we read the text several times: write it to a file first")
            decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
            for chunk in itertools.chain(chunks(file), [b""]):
                try:
                    piece = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    why = f"byte {file.tell() - len(error.object) + error.start}: {error.reason}"
                    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        why = "it looks like UTF-16"
                    raise ValueError(f"{name} is not UTF-8 ({why}); convert it first") from None
                yield piece[max(0, begin - position) : max(0, end - position)]
                position += len(piece)
                if position >= end:
                    return
                bar.update(len(chunk))


def code_points(text):
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def distinct_characters(pieces):
    """Return (chars, length): the distinct characters of the text in order, and its number of characters."""
    seen = np.zeros(sys.maxunicode + 1, bool)
    length = 0
    for piece in pieces:
        seen[code_points(piece)] = True
        length += len(piece)
    return "".join(map(chr, np.flatnonzero(seen))), length


def encode_characters(pieces, chars):
    """Yield arrays of ids, one per piece of text. The id of a character is its index in `chars`."""
    ids = np.full(sys.maxunicode + 1, len(chars), np.uint32)
    ids[code_points(chars)] = np.arange(len(chars))
    for piece in pieces:
        found = ids[code_points(piece)]
        if (found == len(chars)).any():
            raise ValueError("the text has changed while we read it: it has a new character")
        yield found


# -- the files ---------------------------------------------------------------------------------------------------------


def sha256_of(file):
    """Return the SHA-256 of the content of an open binary file."""
    digest = hashlib.sha256()
    for chunk in chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def write(data_dir, vocabulary, size, train, val, source, val_bytes=None):
    """Write train.bin, val.bin and meta.json into data_dir, a Path: all files or none.

    vocabulary  {"chars": the characters} or {"tokenizer": a tokenizer.json}
    size        the number of tokens in it
    train, val  the ids, in pieces: iterables of sequences
    source      where the text comes from
    val_bytes   the length of the val text in UTF-8, if tokens are not characters
    Returns {"train": the number of ids, "val": the same}. Raises OSError.
    """
    id_type = "<u2" if size <= 2**16 else "<u4"
    meta = vocabulary | ({"val_bytes": val_bytes} if val_bytes else {})
    hashes = {name: sha256(str(entry)) for name, entry in meta.items()}
    num_ids = {"train": 0, "val": 0}
    data_dir.mkdir(parents=True, exist_ok=True)
    temporary = {name: data_dir / f".{name}.tmp" for name in ("train.bin", "val.bin", "meta.json")}
    try:
        for split, pieces in (("train", train), ("val", val)):
            with open(temporary[f"{split}.bin"], "wb+") as file:
                for ids in pieces:
                    file.write(np.asarray(ids, id_type).tobytes())
                    num_ids[split] += len(ids)
                hashes[split] = sha256_of(file)
        meta |= {"source": source, "sha256": hashes}
        temporary["meta.json"].write_text(json.dumps(meta, indent=1), encoding="utf-8")
        for name, file in temporary.items():
            os.replace(file, data_dir / name)
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)
    return num_ids


def prepared(data_dir):
    """Return (meta, whole): the meta.json in data_dir, or {}, and whether all files are intact."""
    meta = {}
    try:
        meta = dict(json.loads((data_dir / "meta.json").read_bytes()))
        hashes = {name: sha256(str(meta[name])) for name in ("chars", "tokenizer", "val_bytes") if name in meta}
        for name in ("train", "val"):
            with open(data_dir / f"{name}.bin", "rb") as file:
                hashes[name] = sha256_of(file)
        return meta, hashes == {name: value for name, value in meta["sha256"].items() if name != "text"}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return meta, False


# -- main --------------------------------------------------------------------------------------------------------------


def note(message):
    print(f"prepare.py: {message}", file=sys.stderr)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    # errors in one line, without argparse's usage
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} (--help lists the flags)\n")
    task = parser.add_mutually_exclusive_group()
    input_help = "use these UTF-8 text files instead of tiny Shakespeare, one after the other"
    task.add_argument("--input", nargs="+", metavar="FILE", help=input_help)
    task.add_argument("--url", default=CORPUS_URL, help="download this UTF-8 text instead of tiny Shakespeare")
    dir_help = "where to write (default: this script's folder)"
    parser.add_argument("--data_dir", default=HERE, metavar="DIR", help=dir_help)
    tokenizer_help = (
        "bpe: learn a BPE from the text; MODEL: the tokens of a Hugging Face folder, a checkpoint or a run "
        "(default: the characters of the text)"
    )
    parser.add_argument("--tokenizer", metavar="bpe|MODEL", help=tokenizer_help)
    size_help = "vocabulary size of --tokenizer bpe (default: 512)"
    parser.add_argument("--vocab_size", type=int, metavar="N", help=size_help)
    parser.add_argument("--force", action="store_true", help="replace what is there, even your own text")
    args, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; to prepare your own text, type --input FILE")
    if "" in (args.url, args.tokenizer, args.data_dir):
        parser.error("--url, --tokenizer or --data_dir is empty")
    args.data_dir = Path(args.data_dir)
    if args.vocab_size is not None and args.vocab_size < 256:
        parser.error(f"argument --vocab_size: {args.vocab_size} is below 256, the number of bytes")
    if args.vocab_size and args.tokenizer != "bpe":
        parser.error("--vocab_size needs --tokenizer bpe")
    return args


def main():
    args = parse_args()
    meta, whole = prepared(args.data_dir)
    old_source = meta.get("source")
    source = ", ".join(map(os.path.abspath, args.input)) if args.input else args.url
    if not args.input and not args.force:
        if whole and old_source == source and "chars" in meta and not args.tokenizer:
            print(f"{args.data_dir} already holds all of {meta['source']}: nothing to do (--force does it again)")
            return
        if meta and old_source not in (source, CORPUS_URL, STAND_IN_SOURCE):
            hint = "--force replaces it, a different --data_dir keeps both"
            raise ValueError(f"{args.data_dir} holds your own text, from {old_source}: {hint}")
    args.data_dir.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=args.data_dir).close()  # raises OSError before we download what we cannot write

    # the text
    if args.input:
        files = [(name, open(name, "rb")) for name in args.input]  # noqa: SIM115
    else:
        files = open_corpus(source, stand_in=source == CORPUS_URL and old_source in (None, STAND_IN_SOURCE))
        source = files[0][0]
    chars, length = distinct_characters(read_text(files, "read"))
    if not length:
        raise ValueError(f"{source} is empty")
    split = int(0.9 * length)  # where the val split begins

    # its vocabulary
    tokenizer = None
    if args.tokenizer:
        from extras.tokenizer import make_tokenizer

        tokenizer = make_tokenizer(args.tokenizer, args.vocab_size or 512, read_text(files, "learn", 0, split))
    vocabulary = tokenizer.state_dict() if tokenizer else {"chars": chars}
    val_bytes = None
    if "tokenizer" in vocabulary:
        encode = tokenizer.encode_pieces
        size = len(tokenizer.vocab)
        unit = "tokens"
        # with the bytes, losses can be compared across tokenizers
        val_bytes = sum(len(piece.encode()) for piece in read_text(files, "count", split))
    else:
        if tokenizer:
            tokenizer.encode(chars)  # raises ValueError for characters that the model does not have
        encode = partial(encode_characters, chars=vocabulary["chars"])
        size = len(vocabulary["chars"])
        unit = "distinct"

    # its ids
    train = encode(read_text(files, "encode", 0, split))
    val = encode(read_text(files, "encode", split))
    num_ids = write(args.data_dir, vocabulary, size, train, val, source=source, val_bytes=val_bytes)
    counts = f"{length:,} characters, {size:,} {unit}; train {num_ids['train']:,}, val {num_ids['val']:,}"
    print(f"source: {source}\n{counts}: {args.data_dir}")


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
