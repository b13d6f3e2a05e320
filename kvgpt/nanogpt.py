"""For people who come from nanoGPT."""

import pickle

from kvgpt.cli import first_line

# -- checkpoints -------------------------------------------------------------------------------------------------------


class PlainUnpickler(pickle.Unpickler):
    """Unpickles plain values only, because a pickle runs code through the classes and functions that it names."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a meta.pkl needs plain values only")


def read_meta(path):
    """Return the characters of nanoGPT's meta.pkl in the order of their ids. Raises ValueError."""
    try:
        with open(path, "rb") as file:
            itos = PlainUnpickler(file).load()["itos"]
        return "".join(itos[i] for i in range(len(itos)))
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"--meta {path} is not a nanoGPT meta.pkl: {first_line(error)}") from None
