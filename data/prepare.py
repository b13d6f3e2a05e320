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

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the repository, where kvgpt is

import json
import os

import numpy as np
from tqdm import tqdm

from kvgpt.cli import Parser, fail, note, number, one_line_errors, path, run_main
from kvgpt.files import sha256
from kvgpt.tokenizer import CharTokenizer, tokenizer_from_json
from kvgpt.training.data import id_type, load_dataset, write_prepared

HERE = Path(__file__).resolve().parent
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


# -- reading and writing -----------------------------------------------------------------------------------------------


def prepared(data_dir):
    """Return the meta.json in data_dir, or {} if a file there is missing or damaged."""
    try:
        load_dataset(data_dir, block_size=1)  # compares the files with the hashes in meta.json
        return json.loads((data_dir / "meta.json").read_bytes())
    except ValueError:
        return {}


def make_tokenizer(text, name, vocab_size):
    """Return the tokenizer for --tokenizer. Raises ValueError.

    text  all of it; a BPE learns only from the training part
    name  None for characters; "bpe"; or a folder or file
    """
    if name is None:
        return CharTokenizer("".join(sorted(set(text))))
    from kvgpt.bpe import read_tokenizer, train_bpe

    if name == "bpe":
        return tokenizer_from_json(train_bpe(split(text)[0], vocab_size))
    return tokenizer_from_json(read_tokenizer(Path(name)))


def split(text):
    """Return the first 90% of a str or an array of ids, for training, and the last 10%, for evaluation."""
    n = int(0.9 * len(text))
    return text[:n], text[n:]


def encode(text, tokenizer):
    """Return the ids of the training part and of the validation part, as arrays."""
    return [np.array(tokenizer.encode(part) if part else [], id_type(tokenizer)) for part in split(text)]


def write(data_dir, source, raw, name, vocab_size):
    """Write the files for `raw`, the bytes of the text from `source`, and print its size."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{source} is not UTF-8 (byte {error.start}: {error.reason}); convert it first")
    if not text:
        fail(f"{source} is empty")
    with one_line_errors():
        tokenizer = make_tokenizer(text, name, vocab_size)
        train, val = encode(text, tokenizer)
    more, kinds = {}, f"{len(tokenizer.vocab):,} distinct"
    if name:
        more["tokenizer_from"] = tokenizer_from(name, vocab_size)
    if tokenizer.unit == "tokens":  # with the bytes, losses can be compared across tokenizers
        more["val_bytes"] = len(split(text)[1].encode())
        kinds = f"{len(tokenizer.vocab):,} tokens"
    write_prepared(data_dir, tokenizer, train, val, source, raw, **more)
    print(f"source: {source}")
    print(f"{len(text):,} characters, {kinds}; train {len(train):,}, val {len(val):,}: {data_dir}")


def tokenizer_from(name, vocab_size):
    """Return what meta.json records about the origin of the tokenizer, or None for characters."""
    if name is None:
        return None
    return f"bpe of {vocab_size}" if name == "bpe" else os.path.abspath(name)


def hold_out(data_dir):
    """Split the training text in data_dir again, into data_dir/dev, with the same tokenizer."""
    with one_line_errors():
        data = load_dataset(data_dir, block_size=1)
    (train, val), decode = split(data.train), data.tokenizer.decode
    source, dev, text = f"the training text in {data_dir}", data_dir / "dev", decode(data.train.tolist())
    more = {} if data.val_bytes is None else dict(val_bytes=len(decode(val.tolist()).encode()))
    write_prepared(dev, data.tokenizer, train, val, source, text.encode(), **more)
    print(f"train {len(train):,}, val {len(val):,} {data.tokenizer.unit}: {dev}")


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
    parser.add_argument("--vocab_size", type=number(int, f"[256, {2**20}]"), metavar="N", help=size_help)
    parser.add_argument("--force", action="store_true", help="download again even if the files exist")
    args, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; to prepare your own text, type --input FILE")
    if args.vocab_size and args.tokenizer != "bpe":
        parser.error("--vocab_size needs --tokenizer bpe")
    if args.hold_out and args.tokenizer:
        parser.error("--hold_out keeps the tokenizer of the data: leave out --tokenizer")
    args.vocab_size = args.vocab_size or 512
    return args


def main():
    args = parse_args()
    data_dir = Path(args.data_dir)
    if args.hold_out:
        hold_out(data_dir)
        return
    if args.input:
        write(data_dir, os.path.abspath(args.input), Path(args.input).read_bytes(), args.tokenizer, args.vocab_size)
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
    write(data_dir, source, raw, args.tokenizer, args.vocab_size)


if __name__ == "__main__":
    run_main(main, memory_hint="a shorter text would fit")
