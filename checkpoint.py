"""Checkpoints: written whole or not at all, and read without running any code that they may contain."""

import io
import os
import pickle
from dataclasses import fields
from pathlib import Path

import torch

from model import GPT, GPTConfig


def write_atomically(path, content):
    """Write bytes so that `path` is at every moment the old file or the new one, whole, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the rename, too, must survive a power cut; Windows cannot sync a folder
        folder = os.open(path.parent, os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


def save_checkpoint(path, ckpt):
    """Write `ckpt`, a dict of tensors and plain values, atomically. It is made in memory first: torch.save on a full
    disk raises whatever it likes, and OSErrors are what callers can tell a user about."""
    buffer = io.BytesIO()
    torch.save(ckpt, buffer)
    write_atomically(path, buffer.getbuffer())


def load_checkpoint(path):
    """Read a checkpoint of this kit or of nanoGPT, without running code that it may contain.

    Returns its dict, the keys of ["model"] cleaned of torch.compile's prefix and of old nanoGPT's mask buffers.
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: train one first (python train.py), or name another")
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path} is damaged, or holds more than tensors and plain values: not loaded") from None
    except Exception as error:  # there is no end to the ways in which a file can be broken
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path} cannot be read, or is truncated or damaged ({why[0]})") from None
    if not isinstance(ckpt, dict) or not all(isinstance(ckpt.get(key), dict) for key in ("model", "model_args")):
        raise ValueError(f"{path} is no GPT checkpoint: it lacks the dicts 'model' and 'model_args'")
    if not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in ckpt["model"].items()):
        raise ValueError(f"{path} is no GPT checkpoint: its 'model' holds something else than named tensors")
    ckpt["model"] = {
        key.removeprefix("_orig_mod."): value
        for key, value in ckpt["model"].items()
        if not key.endswith((".attn.bias", ".attn.masked_bias"))
    }
    return ckpt


def build_model(ckpt):
    """The GPT of a checkpoint dict (see load_checkpoint). Raises ValueError where weights and model_args disagree."""
    known = {field.name for field in fields(GPTConfig)}
    unknown = sorted(str(name) for name in ckpt["model_args"] if name not in known)
    if unknown:
        raise ValueError(f"model_args has {', '.join(unknown)}, which this version does not know")
    config = GPTConfig(**ckpt["model_args"])
    try:
        model = GPT(config)
        model.load_state_dict(ckpt["model"])
    except RuntimeError as error:  # of load_state_dict, or of an allocator that model_args ask too much of
        lines = [line.strip() for line in str(error).splitlines()]
        raise ValueError(f"the weights do not fit model_args: {' '.join(lines[1:3] or lines)}") from None
    return model


def load_model(path, meta=None):
    """(model, chars) from a checkpoint of train.py, or from one of nanoGPT with its `meta` pickle; token i is chars[i].

    The model is on the CPU and in eval mode. Raises FileNotFoundError or ValueError with one line that says why.
    """
    ckpt = load_checkpoint(path)
    chars = ckpt.get("chars") if meta is None else read_nanogpt_meta(meta)
    if chars is None:
        raise ValueError(f"{path} has no characters in it: for a nanoGPT checkpoint give its --meta meta.pkl")
    model = build_model(ckpt)
    if isinstance(chars, str) and any(0xD800 <= ord(char) < 0xE000 for char in chars):
        raise ValueError(f"{path} is damaged: half a surrogate pair is no character")
    if not isinstance(chars, str) or not len(set(chars)) == len(chars) == model.config.vocab_size:
        raise ValueError(f"the characters do not fit the vocab_size {model.config.vocab_size} of {path}")
    return model.eval(), chars


def read_nanogpt_meta(path):
    """The characters of nanoGPT's meta.pkl, read by an unpickler that knows plain values and no class or function."""

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which a meta.pkl has no need of")

    try:
        with open(path, "rb") as f:
            itos = PlainUnpickler(f).load()["itos"]
        return "".join(itos[i] for i in range(len(itos)))
    except FileNotFoundError:
        raise FileNotFoundError(f"no --meta file at {path}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"--meta {path} is not a nanoGPT meta.pkl: {error}") from None
