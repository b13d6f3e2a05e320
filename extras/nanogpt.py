"""nanoGPT's meta.pkl, the vocabulary of its checkpoints of characters."""

import pickle

from extras.cli import first_line


class PlainUnpickler(pickle.Unpickler):
    """Unpickles plain values only. A pickle can name classes and functions, and unpickling it calls them."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, but a meta.pkl needs plain values only")


def read_meta(path):
    """Return the characters of nanoGPT's meta.pkl in the order of their ids. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no {path}")
    try:
        with open(path, "rb") as file:
            meta = PlainUnpickler(file).load()
        itos = meta["itos"] if "itos" in meta else {i: token for token, i in meta["stoi"].items()}
        tokens = [itos[i] for i in range(len(itos))]
        if any(len(token) != 1 for token in tokens):
            raise ValueError("its tokens are not characters, so pass their tokenizer.json instead")
        return "".join(tokens)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{path} is not a nanoGPT meta.pkl: {first_line(error)}") from None
