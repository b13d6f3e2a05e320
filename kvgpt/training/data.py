"""The prepared text: read, checked, and evaluated in one exact pass."""

import json
from dataclasses import dataclass

import numpy as np
import torch

from kvgpt.files import sha256
from kvgpt.training.ngram_targets import NgramTargets
from kvgpt.vocabulary import check_characters
from model import eval_mode


@dataclass
class Dataset:
    """A prepared text. Token i is chars[i]. train and val are arrays of uint16 ids.

    ngram_targets  of train, if the run uses them
    """

    chars: str
    train: np.ndarray
    val: np.ndarray
    sha256: dict  # of train.bin and val.bin, by split
    ngram_targets: NgramTargets | None = None


def load_dataset(data_dir, block_size):
    """Return the Dataset in data_dir, a Path.

    Raises ValueError if files are missing or damaged, or if the text is too short for a context of block_size.
    """
    # read
    try:
        meta = json.loads((data_dir / "meta.json").read_bytes())
        chars, recorded = meta["chars"], dict(meta["sha256"])
        splits = {split: (data_dir / f"{split}.bin").read_bytes() for split in ("train", "val")}
    except FileNotFoundError as error:
        raise ValueError(f"no data: {error.filename} is missing; run python data/prepare.py first") from None
    except OSError as error:
        raise ValueError(f"cannot read the data: {error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise ValueError(f"{data_dir / 'meta.json'} is damaged: run python data/prepare.py again") from None

    # compare characters, hashes and lengths
    try:
        check_characters(chars, data_dir / "meta.json")
        if recorded.get("chars", sha256(chars.encode())) != sha256(chars.encode()):  # earlier versions recorded none
            raise ValueError(f"{data_dir / 'meta.json'} is damaged: its characters have changed")
    except ValueError as error:
        raise ValueError(f"{error}: run data/prepare.py again") from None
    ids, hashes = {}, {split: sha256(content) for split, content in splits.items()}
    for split, least in (("train", block_size + 1), ("val", 2)):
        file = data_dir / f"{split}.bin"
        if hashes[split] != recorded.get(split):
            raise ValueError(f"{file} has changed since data/prepare.py wrote it: run data/prepare.py again")
        ids[split] = np.frombuffer(splits[split], "<u2")  # in memory, because a mapped file changes with its disk
        size = len(ids[split])
        if size < least:
            context = f"a context of {block_size}" if split == "train" else "an evaluation"
            raise ValueError(
                f"the {split} text has {size} characters, too short for {context}: "
                f"it needs {least}; choose a longer text{' or a smaller --block_size' if split == 'train' else ''}"
            )
        if ids[split].max() >= len(chars):
            raise ValueError(
                f"{data_dir / 'meta.json'} lacks characters of the {split} text: run data/prepare.py again"
            )
    return Dataset(chars, ids["train"], ids["val"], hashes)


@torch.no_grad()
def evaluate(model, ids, block_size, device, autocast):
    """Return the mean cross-entropy in nats over every character of `ids` but the first.

    One exact pass: windows of block_size tokens that do not overlap, the last one short. The random state and the modes
    of the model stay as they are.
    model     a callable (x, y) -> (logits, loss) that is a Module
    autocast  a context manager around the forwards
    """
    total = 0.0
    rows = max(1, 2**13 // block_size)  # windows per forward
    whole = (len(ids) - 1) // block_size * block_size  # characters in whole windows
    edges = [*range(0, whole, rows * block_size), whole]
    with eval_mode(model), autocast:
        for begin, end in zip(edges, [*edges[1:], len(ids) - 1]):
            if end > begin:
                window = torch.from_numpy(ids[begin : end + 1].astype(np.int64)).to(device)
                width = block_size if end <= whole else end - begin
                _, loss = model(window[:-1].view(-1, width), window[1:].view(-1, width))
                total += loss.item() * (end - begin)
    return total / (len(ids) - 1)
