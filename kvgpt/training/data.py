"""The prepared text: train.bin and val.bin hold character ids (uint16), meta.json the characters and SHA-256 hashes."""

import json
from dataclasses import dataclass

import numpy as np

from kvgpt.files import lock_folder, sha256, write_atomically


@dataclass
class Dataset:
    """A prepared text. Token i is chars[i]. train and val are arrays of uint16 ids."""

    chars: str
    train: np.ndarray
    val: np.ndarray
    sha256: dict  # of train.bin and val.bin, by split
    ngram_targets: object = None  # objective.NgramTargets of train, if the run uses them


def load_dataset(data_dir, block_size):
    """Return the Dataset in data_dir, a Path.

    Raises ValueError if files are missing or damaged, or if the train text is too short for a context of block_size.
    """
    # read all of it, because the file may be written again while we train
    meta_file = data_dir / "meta.json"
    try:
        meta = json.loads(meta_file.read_bytes())
        raw = {split: (data_dir / f"{split}.bin").read_bytes() for split in ("train", "val")}
        chars, recorded = meta["chars"], meta["sha256"]
        hashes = {name: sha256(content) for name, content in {**raw, "chars": chars.encode()}.items()}
        changed = [name for name in hashes if recorded[name] != hashes[name]]
    except FileNotFoundError as error:
        hint = "run python data/prepare.py first, or give another --data_dir"
        raise ValueError(f"no data: {error.filename} is missing; {hint}") from None
    except OSError as error:
        raise ValueError(f"cannot read the data: {error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{meta_file} is damaged or too old: run python data/prepare.py again") from None
    if changed:
        file = meta_file if changed == ["chars"] else data_dir / f"{changed[0]}.bin"
        raise ValueError(f"{file} has changed since data/prepare.py wrote it: run data/prepare.py again")

    train, val = (np.frombuffer(content, "<u2") for content in raw.values())
    if len(train) < block_size + 1:
        raise ValueError(
            f"the train text has {len(train)} characters, and a context of {block_size} needs {block_size + 1}: "
            "choose a longer text or a smaller --block_size"
        )
    return Dataset(chars, train, val, {split: hashes[split] for split in raw})


def write_prepared(data_dir, chars, train, val, source, text):
    """Write the files of a text into data_dir, a Path: all of them or none.

    chars       the distinct characters; id i is chars[i]
    train, val  uint16 arrays of ids
    source      where the text is from
    text        its bytes, UTF-8
    Raises OSError, which is a BlockingIOError if another process is writing there.
    """
    splits = {"train": train.tobytes(), "val": val.tobytes()}
    hashes = {name: sha256(content) for name, content in {"text": text, "chars": chars.encode(), **splits}.items()}
    files = {data_dir / f"{split}.bin": content for split, content in splits.items()}
    meta = {"chars": chars, "source": source, "sha256": hashes}
    files[data_dir / "meta.json"] = json.dumps(meta, indent=1).encode("utf-8")  # last, because it vouches for the rest
    data_dir.mkdir(parents=True, exist_ok=True)
    with lock_folder(data_dir):
        write_atomically(files)
