"""The files of a prepared text: train.bin and val.bin (uint16 character ids), and meta.json."""

import json

from kvgpt.files import lock_folder, sha256, write_atomically


def write_prepared(data_dir, chars, train, val, source, text):
    """Write the files of a text into data_dir, a Path, all or none, meta.json last.

    chars       the distinct characters; id i is chars[i]
    train, val  uint16 arrays of ids
    source      where the text is from
    text        its bytes, UTF-8
    Raises OSError, a BlockingIOError if another process is writing there.
    """
    splits = {"train": train.tobytes(), "val": val.tobytes()}
    hashes = {name: sha256(content) for name, content in {"text": text, "chars": chars.encode(), **splits}.items()}
    files = {data_dir / f"{split}.bin": content for split, content in splits.items()}
    meta = {"chars": chars, "source": source, "sha256": hashes}
    files[data_dir / "meta.json"] = json.dumps(meta, indent=1).encode("utf-8")
    data_dir.mkdir(parents=True, exist_ok=True)
    with lock_folder(data_dir):
        write_atomically(files)
