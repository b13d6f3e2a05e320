"""Turn a text into data/train.bin, data/val.bin (uint16 character ids) and data/meta.json.

python data/prepare.py                  tiny Shakespeare, downloaded
python data/prepare.py --input my.txt   any UTF-8 text of your own
python data/prepare.py --url https://…  a UTF-8 text from elsewhere
"""

import argparse
import codecs
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import requests
from requests import exceptions
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
CORPUS_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
CORPUS_BYTES = 1_115_394
CORPUS_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TRIES = 3


def fail(message):
    sys.exit(f"prepare.py: {message}")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def download(url, is_corpus):
    """The bytes at `url`, whole: the length the server announced and, for the corpus, the known size and hash.

    Tries three times where another try may help. Raises requests' RequestException or ValueError when it gives up.
    """
    for attempt in range(1, TRIES + 1):
        try:
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
            if is_corpus and (len(body) != CORPUS_BYTES or sha256(body) != CORPUS_SHA256):
                raise ValueError(f"the {len(body)} bytes that came back are not tiny Shakespeare (size, sha256)")
            return bytes(body)
        except (OSError, ValueError) as error:
            refused = getattr(error, "response", None) is not None and error.response.status_code < 500
            no_address = isinstance(error, (exceptions.InvalidURL, exceptions.MissingSchema, exceptions.InvalidSchema))
            if attempt == TRIES or refused or no_address:
                raise
            print(
                f"try {attempt} of {TRIES} failed ({reason(error)}); again in {2 ** (attempt - 1)} s", file=sys.stderr
            )
            time.sleep(2 ** (attempt - 1))


def reason(error):
    """The innermost cause of a requests error, in one line: the outer ones wrap it in object addresses."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return " ".join(f"{error}".split())[:200] or type(error).__name__


def read_meta(data_dir):
    """data/meta.json if it and both files beside it are whole: they spell the text that was prepared. Else None."""
    try:
        meta = json.loads((data_dir / "meta.json").read_text(encoding="utf-8"))
        splits = {split: (data_dir / f"{split}.bin").read_bytes() for split in ("train", "val")}
        chars = np.array(list(meta["chars"]))
        text = "".join(chars[np.frombuffer(splits["train"] + splits["val"], dtype="<u2")]).encode()
        whole = all(sha256(content) == meta["sha256"][split] for split, content in splits.items())
        whole = whole and meta["sha256"]["text"] in (sha256(text), sha256(codecs.BOM_UTF8 + text))
        return meta if whole else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def encode(text):
    """(chars, train, val): the distinct characters, sorted, and the ids of the text's first 90% and last 10%."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    codes, ids = np.unique(points, return_inverse=True)
    if len(codes) > 2**16:
        fail(f"the text has {len(codes):,} distinct characters; at most 65,536 fit the uint16 of the .bin files")
    ids = ids.astype("<u2")
    n = int(0.9 * len(ids))
    return "".join(map(chr, codes)), ids[:n], ids[n:]


def write_atomically(files):
    """Write {path: bytes}: all to temporary files first, then renamed, so that a failure leaves what was there."""
    temporary = {path: path.with_name(f".{path.name}.tmp") for path in files}
    try:
        for path, content in files.items():
            with open(temporary[path], "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
        for path in files:
            if path.is_dir():  # found out now, before the first file has been replaced
                raise IsADirectoryError(0, f"{path} is a folder")
        for path in files:
            os.replace(temporary[path], path)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def main():
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--input", metavar="FILE", help="a UTF-8 text of your own instead")
    origin.add_argument("--url", help="download the text from here instead")
    parser.add_argument(
        "--data_dir", type=Path, default=HERE, metavar="DIR", help="where to write (default: beside this script)"
    )
    parser.add_argument("--force", action="store_true", help="do it again even if the files are there")
    args = parser.parse_args()

    meta = read_meta(args.data_dir)
    recorded = meta and (meta.get("source"), meta["sha256"].get("text"))
    source = CORPUS_URL if args.url is None else args.url
    if args.input is not None:
        source = os.path.abspath(args.input)
        try:
            raw = Path(args.input).read_bytes()
        except OSError as error:
            fail(f"cannot read --input {args.input}: {error.strerror}")
        done = recorded == (source, sha256(raw))
    else:
        done = recorded and (recorded[0] == source or (args.url is None and recorded[1] == CORPUS_SHA256))
    if done and not args.force:
        print(f"{args.data_dir} already holds {recorded[0]}, whole: nothing to do (--force does it again)")
        return

    if args.input is None:
        try:
            raw = download(source, is_corpus=source == CORPUS_URL)
        except (OSError, ValueError) as error:  # requests' own errors are OSErrors
            if args.url is not None:
                fail(f"cannot download {args.url}: {reason(error)}; nothing was changed")
            why = f"COULD NOT DOWNLOAD TINY SHAKESPEARE ({reason(error)})"
            print(
                f"WARNING: {why}{'' if done else ': USING THE SMALL STAND-IN data/sample.txt INSTEAD'}", file=sys.stderr
            )
            if done:
                print(f"{args.data_dir} keeps the {recorded[0]} that it holds")
                return
            source = "sample.txt (offline stand-in)"
            try:
                raw = (HERE / "sample.txt").read_bytes()
            except OSError as error:
                fail(f"cannot read the stand-in {HERE / 'sample.txt'}: {error.strerror}; nothing was changed")
            if recorded == (source, sha256(raw)):
                print(f"{args.data_dir} already holds the stand-in, whole: nothing else to do")
                return
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{source} is not UTF-8 (byte {error.start}: {error.reason}); convert it first")
    if len(text) < 2:
        fail(f"{source} is empty" if not text else f"{source} has one character only")

    chars, train, val = encode(text)
    splits = {"train": train.tobytes(), "val": val.tobytes()}
    meta = {
        "chars": chars,
        "source": source,
        "sha256": {
            "text": sha256(raw),
            **{split: sha256(content) for split, content in splits.items()},
        },
    }
    files = {args.data_dir / f"{split}.bin": content for split, content in splits.items()}
    files[args.data_dir / "meta.json"] = json.dumps(meta, indent=1).encode("utf-8")
    try:
        args.data_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(files)
    except OSError as error:
        fail(f"cannot write to {args.data_dir}: {error.strerror}; what was there before is as it was")
    print(f"source: {source}")
    print(f"{len(text):,} characters, {len(chars):,} distinct; train {len(train):,}, val {len(val):,}: {args.data_dir}")


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be no valid text
    try:
        main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        sys.stdout = None
        fail(f"cannot write its messages: {error.strerror}; the files are in place")
    except KeyboardInterrupt:
        sys.exit(130)
