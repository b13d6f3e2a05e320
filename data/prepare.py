"""Prepare a text for training: write train.bin, val.bin (uint16 character ids) and meta.json.

    python data/prepare.py                  tiny Shakespeare, downloaded
    python data/prepare.py --input my.txt   any UTF-8 text of your own
    python data/prepare.py --url https://…  a UTF-8 text from elsewhere
    python data/prepare.py --hold_out       split the training text once more, into data/dev

If you choose a setting by its loss on val.bin, that loss will look better than it is. So choose it on data/dev, which
has the first nine tenths of train.bin for training and the last tenth for evaluation. val.bin stays unseen.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kvgpt is beside this script's folder

import json
import os

import numpy as np
import requests
from tqdm import tqdm

from kvgpt.cli import Parser, fail, note, one_line_errors, path, run_main
from kvgpt.files import sha256
from kvgpt.training.data import load_dataset, write_prepared

HERE = Path(__file__).resolve().parent
CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STAND_IN = "sample.txt (offline stand-in)"
TIMEOUT = 30  # seconds to connect, and between two pieces of the answer

# -- fetching ----------------------------------------------------------------------------------------------------------


def download(url):
    """Return the bytes at `url`. Tiny Shakespeare must have the hash that we know.

    Raises an OSError, as all errors of requests are, or ValueError if something else than the text came back.
    """
    with requests.get(url, stream=True, timeout=TIMEOUT) as response:
        response.raise_for_status()
        if "html" in response.headers.get("Content-Type", ""):  # a page about the text, or one that asks to sign in
            raise ValueError("an HTML page came back, not a text")
        body, size = bytearray(), int(response.headers.get("Content-Length", 0))
        with tqdm(total=size, unit="B", unit_scale=True, desc="download", disable=None) as bar:
            for chunk in response.iter_content(2**16):
                body += chunk
                bar.update(len(chunk))
    if url == CORPUS_URL and sha256(body) != CORPUS_SHA256:
        raise ValueError(f"the {len(body)} bytes that came back are not tiny Shakespeare, whose SHA-256 we know")
    return body


def reason(error):
    """Return the innermost cause of an error of requests. The outer ones show addresses of objects."""
    while error.__context__:
        error = error.__context__
    return str(error) or type(error).__name__


# -- reading and writing -----------------------------------------------------------------------------------------------


def prepared(data_dir):
    """Return (source, sha256) of the text that data_dir holds, or (None, None) if a file is missing or damaged."""
    try:
        load_dataset(data_dir, block_size=1)  # compares the files with the hashes in meta.json
        meta = json.loads((data_dir / "meta.json").read_bytes())
        return meta["source"], meta["sha256"]["text"]
    except (ValueError, KeyError):
        return None, None


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
    """Write the files for the text `raw`, bytes that came from `source`, and print its size."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{source} is not UTF-8 (byte {error.start}: {error.reason}); convert it first")
    if not text:
        fail(f"{source} is empty")
    chars, train, val = encode(text)
    write_prepared(data_dir, chars, train, val, source, raw)
    print(f"source: {source}")
    print(f"{len(text):,} characters, {len(chars):,} distinct; train {len(train):,}, val {len(val):,}: {data_dir}")


def hold_out(data_dir):
    """Split the training text in data_dir once more, into data_dir/dev, with the same characters and ids."""
    with one_line_errors():
        data = load_dataset(data_dir, block_size=1)
    n = int(0.9 * len(data.train))
    text = "".join(data.chars[i] for i in data.train)
    source, dev = f"the training text in {data_dir}", data_dir / "dev"
    write_prepared(dev, data.chars, data.train[:n], data.train[n:], source, text.encode())
    print(f"train {n:,}, val {len(text) - n:,} characters: {dev}")


# -- the command line --------------------------------------------------------------------------------------------------


def parse_args():
    parser = Parser(__doc__)
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--input", type=path, metavar="FILE", help="a UTF-8 text of your own instead")
    task.add_argument("--url", help="download the text from here instead")
    task.add_argument("--hold_out", action="store_true", help="split the training text that is there, into DIR/dev")
    parser.add_argument(
        "--data_dir", type=path, default=str(HERE), metavar="DIR", help="where to write (default: beside this script)"
    )
    parser.add_argument("--force", action="store_true", help="download again even if the files are there")
    return parser.parse_args()


def main():
    args = parse_args()
    data_dir = Path(args.data_dir)
    if args.hold_out:
        hold_out(data_dir)
        return
    if args.input:
        write(data_dir, os.path.abspath(args.input), Path(args.input).read_bytes())
        return

    # is the text there already?
    source = args.url or CORPUS_URL
    there, there_sha256 = prepared(data_dir)
    done = there == source or (source == CORPUS_URL and there_sha256 == CORPUS_SHA256)
    if done and not args.force:
        print(f"{data_dir} already holds {there}, whole: nothing to do (--force does it again)")
        return

    # download it, or take the stand-in for tiny Shakespeare
    try:
        raw = download(source)
    except (OSError, ValueError) as error:
        if args.url or done:
            fail(f"cannot download {source}: {reason(error)}; nothing was changed")
        note(f"WARNING: COULD NOT DOWNLOAD TINY SHAKESPEARE ({reason(error)})")
        note("USING THE SMALL STAND-IN data/sample.txt INSTEAD")
        source, raw = STAND_IN, (HERE / "sample.txt").read_bytes()
    write(data_dir, source, raw)


if __name__ == "__main__":
    run_main(main, memory_hint="a shorter text would fit")
