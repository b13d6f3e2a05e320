"""The files of a prepared text: train.bin and val.bin (uint16 character ids), and meta.json."""

import hashlib
import json

from kvgpt.storage.files import write_atomically


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def write_prepared(data_dir, chars, train, val, source, text):
    """Write the files of a text into data_dir, a Path, all or none. Raises OSError.

    chars       the distinct characters; id i is chars[i]
    train, val  uint16 arrays of ids
    source      where the text is from
    text        its bytes, UTF-8
    """
    splits = {"train": train.tobytes(), "val": val.tobytes()}
    hashes = {"text": sha256(text)} | {split: sha256(content) for split, content in splits.items()}
    files = {data_dir / f"{split}.bin": content for split, content in splits.items()}
    meta = {"chars": chars, "source": source, "sha256": hashes}
    files[data_dir / "meta.json"] = json.dumps(meta, indent=1).encode("utf-8")
    data_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(files)
