"""nanoGPT's data folder, and its meta.pkl, the vocabulary of its character-level checkpoints."""

import hashlib
import pickle

import numpy as np

from extras.cli import first_line
from extras.formats.unsupported import refuse_pointer

RARE = 2**13  # GPT-2's tokens from this id on are rare, such as those of names, but any training text has some


class PlainUnpickler(pickle.Unpickler):
    """Unpickles plain values only. A pickle can name classes and functions, and unpickling it calls them."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, but a meta.pkl needs plain values, as int(size)")


def unpickle(path):
    """Return the content of a meta.pkl, a dict. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no {path}")
    refuse_pointer(path)
    try:
        with open(path, "rb") as file:
            return dict(PlainUnpickler(file).load())
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{path} is not a nanoGPT meta.pkl: {first_line(error)}") from None


def read_meta(path):
    """Return the characters of nanoGPT's meta.pkl in the order of their ids. Raises ValueError."""
    meta = unpickle(path)
    try:
        itos = meta["itos"] if "itos" in meta else {i: token for token, i in meta.get("stoi", {}).items()}
        tokens = [itos[i] for i in range(len(itos))]
        characters = tokens and all(isinstance(token, str) and len(token) == 1 for token in tokens)
    except Exception as error:
        raise ValueError(f"{path} is not a nanoGPT meta.pkl: {first_line(error)}") from None
    if not characters:
        raise ValueError(f"{path}: its tokens are not characters (itos or stoi), so pass their tokenizer.json instead")
    return "".join(tokens)


def read_data(folder):
    """Return what meta.json would hold for nanoGPT's data folder: "chars", or "vocab_size" if tokens are just ids.

    Without a meta.pkl the tokens are GPT-2's, and nanoGPT pads their number to 50,304. Raises ValueError, and OSError.
    """
    vocabulary = {"vocab_size": 50304}
    if (folder / "meta.pkl").exists():
        meta = unpickle(folder / "meta.pkl")
        try:
            vocabulary = {"chars": read_meta(folder / "meta.pkl")}
        except ValueError:  # moves, notes or words
            vocabulary = {"vocab_size": meta.get("vocab_size") or len(meta.get("itos") or meta.get("stoi") or ())}
    hashes = {}
    most = 0
    for split in ("train", "val"):
        refuse_pointer(folder / f"{split}.bin")
        content = (folder / f"{split}.bin").read_bytes()
        hashes[split] = hashlib.sha256(content).hexdigest()
        head = content[: min(2**20, len(content) // 8 * 8)]
        for kind in ("int64", "float64", "int32", "float32"):  # ids of 2 bytes look like tiny or huge values of these
            values = np.abs(np.frombuffer(head, np.dtype(kind).newbyteorder("<")))
            if len(values) and ((values == 0) | ((values > 1e-6) & (values < 2**16))).all():
                raise ValueError(f"{split}.bin holds {kind} values, but nanoGPT's ids are np.uint16: save them so")
        most = max(most, np.frombuffer(content, "<u2").max(initial=0))
    if not (folder / "meta.pkl").exists() and most < RARE:
        why = f"no id is above {most}, so these are not the tokens of GPT-2"
        raise ValueError(f"meta.json is missing, and {why} (for ids of your own, add {{'vocab_size': N}} as meta.pkl)")
    return vocabulary | {"source": str(folder), "sha256": hashes}
