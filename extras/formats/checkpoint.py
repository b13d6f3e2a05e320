"""Models that model.py alone cannot read: with a tokenizer, in a Hugging Face folder, or with nanoGPT's meta.pkl."""

import re
from pathlib import Path

import numpy as np
import torch

import model
from extras.formats.hf_read import SkipInit, read_folder
from extras.formats.tokenizer import IdTokenizer, build_tokenizer, read_vocabulary
from extras.formats.unsupported import refuse_foreign

# Some training scripts save a loss or a size as a scalar of NumPy, which runs no code. Its module has had two names.
SCALAR = np._core.multiarray.scalar
NUMPY_SCALARS = [SCALAR, (SCALAR, "numpy.core.multiarray.scalar"), np.dtype]
NUMPY_SCALARS += [type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "uint16", "bool")]
# a weight of a GPT, after whatever wraps the model
OURS = re.compile(r"(?:^|\.)(transformer\.(?:wte|wpe|h|ln_f)\..+|lm_head\..+)$")


def load_model(path, meta=None):
    """Return (model, tokenizer): the GPT on the CPU in eval mode, and its tokenizer. Without one, text is ids.

    The arguments and errors are those of load_checkpoint.
    """
    checkpoint = load_checkpoint(path, meta)
    with SkipInit():
        loaded = model.build_model(checkpoint).eval()
    if checkpoint.keys() & {"chars", "tokenizer"}:
        return loaded, build_tokenizer(checkpoint)
    loaded.source += "; it has no vocabulary, so this is ids (--meta takes nanoGPT's meta.pkl or a tokenizer)"
    return loaded, IdTokenizer(loaded.config.vocab_size)


def load_checkpoint(path, meta=None):
    """Return the checkpoint at `path` as load_checkpoint in model.py does. It may be a Hugging Face folder, too.

    meta  for a nanoGPT checkpoint: its meta.pkl, or the tokenizer if it was trained on GPT-2's tokens
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """
    path = model.find_checkpoint(path)
    refuse_foreign(path)
    if (path / "config.json").exists():
        if meta:
            raise ValueError(f"{path} has its own tokenizer: leave out --meta")
        return read_folder(path)
    if path.name.startswith("gpt2") and not path.exists():
        hint = f"hf download openai-community/{path.name} --local-dir {path} downloads it"
        raise FileNotFoundError(f"no checkpoint at {path}: {hint}")
    vocabulary = read_vocabulary(Path(meta)) if meta else {}
    with torch.serialization.safe_globals(NUMPY_SCALARS):
        checkpoint = model.load_checkpoint(path)
    with model.reading(path):
        checkpoint = in_our_names(checkpoint)
        if not isinstance(checkpoint.get("special_tokens"), dict | None):  # those of a Hugging Face folder
            raise ValueError(f"special_tokens={checkpoint['special_tokens']}: must be dict")
        sizes = checkpoint["model_args"].items()
        checkpoint["model_args"] = {name: value.item() if hasattr(value, "item") else value for name, value in sizes}
        if {"config", "scaler"} <= checkpoint.keys():
            checkpoint = read_older(checkpoint)
    if meta and any(name in checkpoint for name in ("chars", "tokenizer")):
        raise ValueError(f"{path} has its own vocabulary: leave out --meta")
    return checkpoint | vocabulary


def in_our_names(checkpoint):
    """Return a checkpoint, ours or nanoGPT's, with weights that have the names of model.py. Raises ValueError.

    Whatever wraps a model puts its own name in front of those of the weights (DistributedDataParallel, Lightning) or
    between them, with an underscore (torch.compile, FSDP).
    """
    weights = {}
    for name, weight in checkpoint["model"].items():
        # causal masks, which old versions of nanoGPT saved, and the count of AveragedModel
        if name.endswith((".attn.bias", ".attn.masked_bias", "n_averaged")):
            continue
        plain = ".".join(part for part in name.split(".") if not part.startswith("_"))
        found = OURS.search(plain)
        plain = found[1] if found else plain
        if plain in weights:
            raise ValueError(f"{checkpoint['path']} has the weights of two models: {plain} comes twice, once as {name}")
        weights[plain] = weight
    return checkpoint | {"model": weights}


def read_older(checkpoint):
    """Return a last.pt, perhaps of an older train.py, as today's writes it.

    The oldest had no setting `loss`, None where there is a default now, and a field of its own for the layers of
    extras.targets. In later ones, a min_lr of None was a tenth of the learning rate.
    """
    config = {name: value for name, value in checkpoint["config"].items() if value is not None}
    if "min_lr" not in config:
        config["min_lr"] = 0.1 * config["learning_rate"]
    if "mtp" not in checkpoint:
        return checkpoint | dict(config=config)
    targets = config.get("ngram_targets") or config.get("mtp_weight")
    config["loss"] = "extras.targets" if targets else "cross_entropy"
    loss = {f"mtp.{name}": p for name, p in checkpoint["mtp"].items()}
    return checkpoint | dict(config=config, loss=loss)
