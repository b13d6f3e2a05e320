"""Prepare a text for training: write train.bin, val.bin (uint16 character ids) and meta.json.

python data/prepare.py                  tiny Shakespeare, downloaded
python data/prepare.py --input my.txt   any UTF-8 text of your own
python data/prepare.py --url https://…  a UTF-8 text from elsewhere
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kvgpt is beside this script's folder

if __name__ == "__main__":
    from kvgpt.guard import guard_process

    guard_process()  # before the imports, which take seconds

import codecs
import json
import os
import time

import numpy as np
import requests
from requests import exceptions
from tqdm import tqdm

from kvgpt.cli import Parser, fail, path, run_main
from kvgpt.files import sha256
from kvgpt.training.prepared import write_prepared

HERE = Path(__file__).resolve().parent
CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_BYTES = 1_115_394
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STAND_IN = "sample.txt (offline stand-in)"
TRIES = 3

# -- the prepared text -------------------------------------------------------------------------------------------------


def prepared_text(data_dir):
    """Return (source, sha256) of the text that data_dir holds, or None if a file is missing or damaged.

    Both .bin files must have the hashes in meta.json. The text that they decode to must have its hash too.
    """
    try:
        meta = json.loads((data_dir / "meta.json").read_bytes())
        splits = {split: (data_dir / f"{split}.bin").read_bytes() for split in ("train", "val")}
        points = np.frombuffer(meta["chars"].encode("utf-32-le"), dtype="<u4")
        ids = np.frombuffer(splits["train"] + splits["val"], dtype="<u2")
        text = points[ids].tobytes().decode("utf-32-le").encode()
        whole = all(sha256(content) == meta["sha256"][split] for split, content in splits.items())
        whole = whole and meta["sha256"]["text"] in (sha256(text), sha256(codecs.BOM_UTF8 + text))
        return (meta.get("source"), meta["sha256"]["text"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def is_prepared(args, source, raw, prepared):
    """Return whether the data folder already holds the text that args ask for.

    source    name of that text
    raw       bytes of that text; None: not known before the download
    prepared  a result of prepared_text
    """
    if prepared is None:
        return False
    if raw is not None:
        return prepared == (source, sha256(raw))
    return prepared[0] == source or (args.url is None and prepared[1] == CORPUS_SHA256)


# -- fetching ----------------------------------------------------------------------------------------------------------


def read_text(file, name, hint=""):
    """Return the bytes of a file, or exit with one line that calls it `name`."""
    try:
        return Path(file).read_bytes()
    except OSError as error:
        fail(f"cannot read {name} {file}: {error.strerror}{hint}")


def fetch(args, source, prepared, keep):
    """Download `source`. Return (source, bytes), or None if the files in data_dir stay as they are.

    prepared  a result of prepared_text
    keep      whether that is the text asked for
    A --url that cannot be downloaded is an error. A failed download of tiny Shakespeare is replaced by the stand-in, or
    by the files in data_dir if they hold either text.
    """
    try:
        return source, download(source, is_corpus=source == CORPUS_URL)
    except (OSError, ValueError) as error:  # the errors of requests are OSErrors
        if args.url is not None:
            fail(f"cannot download {args.url}: {reason(error)}; nothing was changed")
        warning = f"WARNING: COULD NOT DOWNLOAD TINY SHAKESPEARE ({reason(error)})"
        stand_in = "" if keep else ": USING THE SMALL STAND-IN data/sample.txt INSTEAD"
        print(warning + stand_in, file=sys.stderr)
    if keep:
        print(f"{args.data_dir} keeps the {prepared[0]} that it holds")
        return None
    raw = read_text(HERE / "sample.txt", "the stand-in", "; nothing was changed")
    if prepared == (STAND_IN, sha256(raw)):
        print(f"{args.data_dir} already holds the stand-in, whole: nothing else to do")
        return None
    return STAND_IN, raw


def download(url, is_corpus):
    """Return the bytes at `url`. The corpus must have its known size and hash.

    Tries up to three times where another try may help. Raises requests' RequestException, or ValueError.
    """
    for attempt in range(1, TRIES + 1):
        try:
            body = download_once(url)
            if is_corpus and (len(body) != CORPUS_BYTES or sha256(body) != CORPUS_SHA256):
                raise ValueError(f"the {len(body)} bytes that came back are not tiny Shakespeare (size, sha256)")
            return body
        except (OSError, ValueError) as error:
            refused = getattr(error, "response", None) is not None and error.response.status_code < 500
            no_address = isinstance(error, (exceptions.InvalidURL, exceptions.MissingSchema, exceptions.InvalidSchema))
            if attempt == TRIES or refused or no_address:
                raise
            wait = 2 ** (attempt - 1)
            print(f"try {attempt} of {TRIES} failed ({reason(error)}); again in {wait} s", file=sys.stderr)
            time.sleep(wait)


def download_once(url):
    """Return the bytes at `url`. Raises RequestException, or ValueError for an incomplete text or an HTML page."""
    with requests.get(url, stream=True, timeout=(10, 30)) as response:
        response.raise_for_status()
        size = int(response.headers.get("Content-Length", 0))
        body = bytearray()
        with tqdm(total=size or None, unit="B", unit_scale=True, desc="download", disable=None) as bar:
            for chunk in response.iter_content(2**16):
                body += chunk
                bar.update(len(chunk))
    if "Content-Encoding" not in response.headers and size and len(body) != size:
        raise ValueError(f"{len(body)} of {size} bytes arrived")
    head = bytes(body[:99]).removeprefix(codecs.BOM_UTF8).lstrip().lower()
    is_html = "html" in response.headers.get("Content-Type", "")
    if is_html or head.startswith((b"<!doctype html", b"<html")):
        raise ValueError("an HTML page came back, not a text")
    return bytes(body)


def reason(error):
    """Return the innermost cause of a requests error in one line. The outer errors contain object addresses."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return " ".join(f"{error}".split())[:200] or type(error).__name__


# -- writing -----------------------------------------------------------------------------------------------------------


def encode(text):
    """Return (chars, train, val): the distinct characters, sorted, and the ids of the first 90% and the last 10%."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    codes, ids = np.unique(points, return_inverse=True)
    if len(codes) > 2**16:
        fail(f"the text has {len(codes):,} distinct characters; at most 65,536 fit the uint16 of the .bin files")
    ids = ids.astype("<u2")
    n = int(0.9 * len(ids))
    return "".join(map(chr, codes)), ids[:n], ids[n:]


def write(data_dir, source, raw):
    """Write train.bin, val.bin and meta.json for the text `raw`, UTF-8 bytes, and print its size."""
    # decode and encode
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{source} is not UTF-8 (byte {error.start}: {error.reason}); convert it first")
    if len(text) < 2:
        fail(f"{source} is empty" if not text else f"{source} has one character only")
    chars, train, val = encode(text)

    # write
    try:
        write_prepared(data_dir, chars, train, val, source, raw)
    except OSError as error:
        fail(f"cannot write {error.filename or data_dir}: {error.strerror}; the files that were there are unchanged")
    print(f"source: {source}")
    print(f"{len(text):,} characters, {len(chars):,} distinct; train {len(train):,}, val {len(val):,}: {data_dir}")


def parse_args():
    parser = Parser(__doc__)
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--input", type=path, metavar="FILE", help="a UTF-8 text of your own instead")
    origin.add_argument("--url", help="download the text from here instead")
    parser.add_argument(
        "--data_dir", type=path, default=str(HERE), metavar="DIR", help="where to write (default: beside this script)"
    )
    parser.add_argument("--force", action="store_true", help="do it again even if the files are there")
    return parser.parse_args()


def main():
    args = parse_args()
    data_dir = Path(args.data_dir)
    source, raw = args.url, None
    if args.input is not None:
        source, raw = os.path.abspath(args.input), read_text(args.input, "--input")
        if Path(source).resolve() in [(data_dir / name).resolve() for name in ("train.bin", "val.bin", "meta.json")]:
            fail(f"--input {args.input} is a file that would be overwritten: choose another --data_dir")
    elif args.url is None:
        source = CORPUS_URL
    prepared = prepared_text(data_dir)
    done = is_prepared(args, source, raw, prepared)
    if done and not args.force:
        print(f"{data_dir} already holds {prepared[0]}, whole: nothing to do (--force does it again)")
        return
    text = (source, raw) if raw is not None else fetch(args, source, prepared, keep=done)
    if text is not None:
        write(data_dir, *text)


if __name__ == "__main__":
    run_main(main, disk_hint="the files are in place", memory_hint="a shorter text would fit")
