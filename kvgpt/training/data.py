"""The training data: token ids in train.bin and val.bin, vocabulary and SHA-256 hashes in meta.json."""

import json
import math
from dataclasses import dataclass

import numpy as np

from kvgpt.files import lock_folder, sha256, write_atomically
from kvgpt.tokenizer import tokenizer_from_state


@dataclass
class Dataset:
    """The training data of a run.

    tokenizer   a CharTokenizer or a BPETokenizer
    train, val  arrays of ids
    sha256      the hashes of train.bin and val.bin, by split
    val_bytes   the length of the val text in UTF-8; None if tokens are characters
    """

    tokenizer: object
    train: np.ndarray
    val: np.ndarray
    sha256: dict
    val_bytes: int | None = None
    ngram_targets: object = None  # objective.NgramTargets of train, if the run uses them

    def bits_per_byte(self, loss):
        """Convert a val loss from nats per token to bits per byte, which do not depend on the tokenizer."""
        return loss / math.log(2) * len(self.val) / self.val_bytes


def id_type(tokenizer):
    """Return the dtype of the ids in a .bin file."""
    return np.dtype("<u2" if len(tokenizer.vocab) <= 2**16 else "<u4")


def load_dataset(data_dir, block_size):
    """Return the Dataset in data_dir, a Path.

    Raises ValueError if files are missing or damaged, or if the train split is too short for a context of block_size.
    """
    # read everything into memory, because the files may be replaced while we train
    meta_file = data_dir / "meta.json"
    try:
        meta = json.loads(meta_file.read_bytes())
        raw = {split: (data_dir / f"{split}.bin").read_bytes() for split in ("train", "val")}
        state = {kind: meta[kind] for kind in ("chars", "tokenizer") if kind in meta}
        (kind, content), recorded = state.popitem(), meta["sha256"]
        hashes = {name: sha256(content) for name, content in {**raw, kind: content.encode()}.items()}
        changed = [name for name in hashes if recorded[name] != hashes[name]]
    except FileNotFoundError as error:
        hint = "run python data/prepare.py first, or pass a different --data_dir"
        raise ValueError(f"no data: {error.filename} is missing; {hint}") from None
    except OSError as error:
        raise ValueError(f"cannot read the data: {error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{meta_file} is damaged or too old: run python data/prepare.py again") from None
    if changed:
        file = meta_file if changed == [kind] else data_dir / f"{changed[0]}.bin"
        raise ValueError(f"{file} has changed since data/prepare.py wrote it: run data/prepare.py again")

    tokenizer = tokenizer_from_state({kind: content})
    train, val = (np.frombuffer(content, id_type(tokenizer)) for content in raw.values())
    for split, ids in (("train", train), ("val", val)):
        if len(ids) and ids.max() >= len(tokenizer.vocab):
            raise ValueError(
                f"{data_dir / split}.bin contains the id {ids.max()}, but {meta_file} has only "
                f"{len(tokenizer.vocab):,} {tokenizer.unit}: run data/prepare.py again"
            )
    if len(train) < block_size + 1:
        raise ValueError(
            f"the train split has {len(train)} {tokenizer.unit}, but a context of {block_size} needs {block_size + 1}: "
            "use a longer text or a smaller --block_size"
        )
    return Dataset(tokenizer, train, val, {split: hashes[split] for split in raw}, meta.get("val_bytes"))


def write_prepared(data_dir, tokenizer, train, val, source, text, **more):
    """Write the training data into data_dir, a Path: all files or none.

    train, val  arrays of ids, of id_type(tokenizer)
    source      where the text comes from
    text        its bytes, UTF-8
    more        additional entries for meta.json
    Raises OSError; BlockingIOError if another process is writing there.
    """
    splits, state = {"train": train.tobytes(), "val": val.tobytes()}, tokenizer.state_dict()
    hashed = {"text": text, **{name: content.encode() for name, content in state.items()}, **splits}
    hashes = {name: sha256(content) for name, content in hashed.items()}
    files = {data_dir / f"{split}.bin": content for split, content in splits.items()}
    meta = state | {"source": source} | more | {"sha256": hashes}
    files[data_dir / "meta.json"] = json.dumps(meta, indent=1).encode("utf-8")  # last, because it vouches for the rest
    data_dir.mkdir(parents=True, exist_ok=True)
    with lock_folder(data_dir):
        write_atomically(files)
