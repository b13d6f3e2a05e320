"""Turn text into training data: train.bin and val.bin with token ids, and meta.json.

    python data/prepare.py                  tiny Shakespeare, downloaded; a token is a character
    python data/prepare.py --input a.txt b.txt   your own UTF-8 text, one file or several
    python data/prepare.py --tokenizer bpe --vocab_size 512   a token is a piece of a word, learned from the text
    python data/prepare.py --tokenizer gpt2     the tokens of a model: a Hugging Face folder, a checkpoint or a run

The first nine tenths of the text are for training, and the rest is the val split, unless --val names a file for it.
"""

import hashlib
import json
import os
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import suppress
from functools import partial
from pathlib import Path

try:
    import numpy as np
except ModuleNotFoundError as error:
    sys.exit(f"prepare.py: {error}: activate the environment, or install it as README.md says")

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # the repository, where extras is
CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# formats other than plain text: extras reads the first three, and says what to do with the others
RECORDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".pdf", ".bin", ".npy", ".pt")
RECORDS += (".gz", ".xz", ".zip", ".zst")
STAND_IN = HERE / "sample.txt"
STAND_IN_SOURCE = "sample.txt (offline stand-in)"


def parse_args():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    hint = "--help lists the flags; for your own text, type --input FILE"
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} ({hint})\n")
    add = parser.add_argument
    add("--input", nargs="+", default=[], metavar="FILE", help="use these UTF-8 text files, one after the other")
    add("--field", metavar="NAME", help="for JSON and JSON Lines: the field with the text, if there are several")
    add("--val", metavar="FILE", help="text for the val split (default: the last tenth)")
    add("--data_dir", default=HERE, metavar="DIR", help="where to write (default: this script's folder)")
    add("--tokenizer", metavar="bpe|MODEL", help="learn a BPE from the text, or take the tokens of a model")
    add("--vocab_size", type=int, default=512, metavar="N", help="of --tokenizer bpe (default: 512)")
    add("--force", action="store_true", help="start over, even if that replaces your own text")
    args = parser.parse_args()
    if "" in (args.tokenizer, args.data_dir, args.val, *args.input):
        parser.error("--input, --tokenizer, --data_dir or --val is empty")
    records = [name for name in (*args.input, args.val or "") if Path(name).suffix.lower() in RECORDS]
    if args.field is not None and not records:
        parser.error(f"--field {args.field} is for JSON, and --input has none: leave it out")
    if args.vocab_size != 512 and args.tokenizer != "bpe":
        parser.error("--vocab_size needs --tokenizer bpe")
    return args


def read(name, args):
    """Return the text of a file. After each record comes a blank line, or the model's end token. Raises ValueError."""
    if Path(name).suffix.lower() not in RECORDS:
        return decode(Path(name).read_bytes(), name)
    from extras.formats.records import end_of_text, read_records

    return read_records(name, args.field, end_of_text(args.tokenizer))


def decode(content, name):
    """Return the text of UTF-8 bytes, with "\\n" for every line end. Raises ValueError."""
    if content.startswith(b"version https://git-lfs"):
        raise ValueError(f"{name} is a Git LFS pointer and not the file itself: run git lfs pull")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or content.count(b"\0") > len(content) / 4:
        raise ValueError(f"{name} looks like UTF-16, or like no text at all: convert it to UTF-8 first")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error.reason}): convert it first") from None


def download():
    """Return the text of tiny Shakespeare. Raises ValueError."""
    try:
        import requests  # here, because --input works without it

        response = requests.get(CORPUS_URL, timeout=30)
        response.raise_for_status()
        if sha256(response.content) != CORPUS_SHA256:
            raise ValueError(f"the response ({len(response.content)} bytes) is not tiny Shakespeare")
        return decode(response.content, CORPUS_URL)
    except (ImportError, OSError, ValueError) as error:
        while error.__context__:  # the outer errors of requests are full of object addresses
            error = error.__context__
        raise ValueError(f"cannot download {CORPUS_URL}: {str(error) or type(error).__name__}") from None


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def main():
    # what is there already: only --input or --force replaces your own text. An empty folder counts as the stand-in
    args = parse_args()
    data_dir = Path(args.data_dir)
    files = [file for file in (data_dir / "train.bin", data_dir / "val.bin") if file.exists()]
    old = {"source": "another program" if files else STAND_IN_SOURCE}
    with suppress(OSError, ValueError, TypeError):
        old |= json.loads((data_dir / "meta.json").read_bytes())
    if not args.input and not args.force:
        if old["source"] not in (CORPUS_URL, STAND_IN_SOURCE):
            hint = "--force replaces it, a different --data_dir keeps both"
            raise ValueError(f"{data_dir} holds your own text, from {old['source']}: {hint}")
        hashes = {file.stem: sha256(file.read_bytes()) for file in files}
        hashes["vocabulary"] = sha256(str(old.get("chars")).encode())
        whole = (old["source"], old.get("sha256")) == (CORPUS_URL, hashes)
        if whole and not args.tokenizer and not args.val:
            print(f"{data_dir} already holds all of {CORPUS_URL}: nothing to do (--force does it again)")
            return

    # the text
    source = ", ".join(map(os.path.abspath, args.input)) or CORPUS_URL
    if args.input:
        text = "".join(read(name, args) for name in args.input)
    else:
        try:
            text = download()
        except ValueError as error:
            if old["source"] != STAND_IN_SOURCE:
                raise ValueError(f"{error}; nothing was changed") from None
            print(f"prepare.py: WARNING: {error}\nUSING THE SMALL STAND-IN data/sample.txt", file=sys.stderr)
            source = STAND_IN_SOURCE
            text = decode(STAND_IN.read_bytes(), STAND_IN)
    train = text[: int(0.9 * len(text))]
    val = text[len(train) :]
    if args.val:
        source += f", {os.path.abspath(args.val)} (val)"
        train = text
        val = read(args.val, args)
    elif (HERE.parent / "extras").is_dir():
        from extras.formats.records import warn_if_sorted

        warn_if_sorted(text[: 2**20])
    if not train or not val:
        raise ValueError(f"{source} has {len(train)} characters for training and {len(val)} for validation")

    # the tokens
    chars = "".join(sorted(set(train) | set(val)))
    vocabulary = {"chars": chars}
    size = len(chars)
    encode = partial(map, {char: i for i, char in enumerate(chars)}.get)
    if args.tokenizer:
        from extras.formats.tokenizer import make_tokenizer

        vocabulary, size, encode = make_tokenizer(args.tokenizer, args.vocab_size, train, chars, args.force)
    id_type = np.dtype("<u2" if size <= 2**16 else "<u4")
    ids = {split: np.fromiter(encode(part), id_type) for split, part in (("train", train), ("val", val))}

    # the files: all of them or, on a full disk, none
    hashes = {split: sha256(ids[split]) for split in ids}
    hashes["vocabulary"] = sha256("".join(vocabulary.values()).encode())
    meta = vocabulary | {"source": source, "sha256": hashes}
    files = {"train.bin": ids["train"], "val.bin": ids["val"], "meta.json": json.dumps(meta, indent=1).encode()}
    data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir) as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        for name in files:
            os.replace(Path(folder, name), data_dir / name)
    print(f"source: {source}\n{len(train) + len(val):,} characters, a vocabulary of {size:,}: {data_dir}")
    print(f"train {len(ids['train']):,}, val {len(ids['val']):,} tokens")


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout has no reconfigure
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # on Windows too, and for any file name
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(f"prepare.py: {error}: this needs the folder extras of the repository, and torch")
    except (OSError, ValueError) as error:
        sys.exit(f"prepare.py: {error}")
