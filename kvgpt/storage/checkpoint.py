"""Checkpoints: written whole or not at all, and read without running code from the file."""

import io
import math
import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from kvgpt.decoding.ngrams import valid_ngrams
from kvgpt.storage.files import write_atomically
from model import GPT, GPTConfig


@dataclass
class Checkpoint:
    """The content of a checkpoint file, of this kit's or of nanoGPT's, or of a Hugging Face folder.

    weights        the state_dict of a GPT, without prefixes of torch.compile
    model_args     the fields of GPTConfig
    chars          the vocabulary: token i is chars[i]; None in a nanoGPT checkpoint
    ngrams         n-gram counts of the training text, for --draft ngram; None if there are none
    best_val_loss  NaN if unknown
    training       all other entries of the file. A run of train.py has optimizer, scaler, iter_num, evals_since_best,
                   config and data_sha256
    """

    path: Path
    weights: dict
    model_args: dict
    chars: str | None = None
    ngrams: dict | None = None
    best_val_loss: float = math.nan
    training: dict = field(default_factory=dict)

    def build_model(self):
        """Return the GPT on the CPU. Raises ValueError if weights and model_args disagree."""
        unknown = sorted(str(name) for name in self.model_args if name not in {f.name for f in fields(GPTConfig)})
        if unknown:
            raise ValueError(f"model_args has {', '.join(unknown)}, which this version does not know")
        config = GPTConfig(**self.model_args)
        try:
            model = GPT(config)
            model.load_state_dict(self.weights)
        except RuntimeError as error:  # from load_state_dict, or from a failed allocation
            lines = [line.strip() for line in str(error).splitlines()]
            raise ValueError(f"the weights do not fit model_args: {' '.join(lines[1:3] or lines)}") from None
        return model

    def build_language_model(self):
        """Return (model in eval mode, chars). Raises ValueError if the characters do not fit the model."""
        if self.chars is None:
            where = "nanoGPT keeps them in meta.pkl, and sample.py and export.py take --meta meta.pkl"
            raise ValueError(f"{self.path} has no characters in it: {where}")
        model = self.build_model()
        if isinstance(self.chars, str) and any(0xD800 <= ord(char) < 0xE000 for char in self.chars):
            raise ValueError(f"{self.path} is damaged: half a surrogate pair is no character")
        distinct = isinstance(self.chars, str) and len(set(self.chars)) == len(self.chars)
        if not distinct or len(self.chars) != model.config.vocab_size:
            raise ValueError(f"the characters do not fit the vocab_size {model.config.vocab_size} of {self.path}")
        return model.eval(), self.chars

    def checked_ngrams(self):
        """Return `ngrams`. Raises ValueError if they are damaged."""
        if self.ngrams is not None and not valid_ngrams(self.ngrams, len(self.chars)):
            raise ValueError(f"the n-grams in {self.path} are damaged: leave out --draft, or train again")
        return self.ngrams


def save_checkpoint(path, content):
    """Write `content`, a dict of tensors and plain values, atomically.

    torch.save writes to memory first, because on a full disk it raises errors of many kinds. Raises OSError.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically({path: buffer.getbuffer()})


def load_checkpoint(path, meta=None):
    """Read a checkpoint of this kit or of nanoGPT, without running code that it may contain.

    meta  the meta.pkl that belongs to a nanoGPT checkpoint
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: train one first (python train.py), or name another")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path} is damaged, or holds more than tensors and plain values: not loaded") from None
    except Exception as error:  # a damaged file can raise anything
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path} cannot be read, or is truncated or damaged ({why[0]})") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("model", "model_args")):
        raise ValueError(f"{path} is no GPT checkpoint: it lacks the dicts 'model' and 'model_args'")
    if not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content["model"].items()):
        raise ValueError(f"{path} is no GPT checkpoint: its 'model' holds something else than named tensors")

    # torch.compile adds a prefix; nanoGPT before flash attention saved its masks
    weights = {
        key.removeprefix("_orig_mod."): value
        for key, value in content.pop("model").items()
        if not key.endswith((".attn.bias", ".attn.masked_bias"))
    }
    return Checkpoint(
        path=path,
        weights=weights,
        model_args=content.pop("model_args"),
        chars=content.pop("chars", None) if meta is None else read_nanogpt_meta(meta),
        ngrams=content.pop("ngrams", None),
        best_val_loss=content.pop("best_val_loss", math.nan),
        training=content,
    )


def load_model(path, meta=None):
    """Return (model, chars) of a checkpoint file: the model on the CPU in eval mode, and token i as chars[i].

    meta  the meta.pkl that belongs to a nanoGPT checkpoint
    Raises FileNotFoundError or ValueError with one line that says why.
    """
    return load_checkpoint(path, meta).build_language_model()


def read_nanogpt_meta(path):
    """Return the characters in nanoGPT's meta.pkl. The unpickler accepts plain values only, no class or function."""

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module, name):
            raise pickle.UnpicklingError(f"it names {module}.{name}, and a meta.pkl needs plain values only")

    try:
        with open(path, "rb") as f:
            itos = PlainUnpickler(f).load()["itos"]
        return "".join(itos[i] for i in range(len(itos)))
    except FileNotFoundError:
        raise FileNotFoundError(f"no --meta file at {path}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"--meta {path} is not a nanoGPT meta.pkl: {error}") from None
