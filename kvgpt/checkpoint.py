"""Checkpoints: written whole or not at all, and read without running any code that a file may hold."""

import io
import math
import pickle
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from kvgpt.blank import blank_model, tie
from kvgpt.cli import first_line, note
from kvgpt.files import write_atomically
from kvgpt.tokenizer import check_vocab_size, tokenizer_from_state
from model import GPTConfig

PRETRAINED = Path(__file__).resolve().parent.parent / "assets" / "shakespeare.pt"


@dataclass
class Checkpoint:
    """What is in a checkpoint file, ours or nanoGPT's, or in a Hugging Face folder.

    weights          the state_dict of a GPT
    model_args       the fields of GPTConfig
    tokenizer_state  its state_dict; None in a nanoGPT checkpoint
    ngrams           n-gram counts of the training text, for --draft ngram; None if there are none
    best_val_loss    NaN if unknown
    training         everything else in the file: what train.py needs to resume
    """

    path: Path
    weights: dict
    model_args: dict
    tokenizer_state: dict | None = None
    ngrams: dict | None = None
    best_val_loss: float = math.nan
    training: dict = field(default_factory=dict)

    def build_model(self):
        """Return the GPT on the CPU. Raises ValueError if the weights do not fit model_args, or are not finite.

        It takes over the tensors in `weights` instead of a copy, so that a model is never in memory twice.
        """
        try:
            model = blank_model(GPTConfig(**self.model_args))
            model.load_state_dict({name: p.float() for name, p in self.weights.items()}, assign=True)
        except (TypeError, ValueError, RuntimeError) as error:
            *_, why = str(error).strip().splitlines()  # load_state_dict lists what does not fit, a line for each
            raise ValueError(f"the weights in {self.path} do not fit its model_args: {why.strip()[:200]}") from None
        tie(model)
        check_finite(model, self.path)
        return model

    def build_tokenizer(self):
        """Return the tokenizer. Raises ValueError if there is none, or if the weights are of another one."""
        if self.tokenizer_state is None:
            where = "nanoGPT keeps it in meta.pkl, and sample.py and export.py take --meta meta.pkl"
            raise ValueError(f"{self.path} has no vocabulary in it: {where}")
        try:
            tokenizer = tokenizer_from_state(self.tokenizer_state)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        check_vocab_size(tokenizer, self.model_args["vocab_size"], self.path)
        return tokenizer

    def build_language_model(self):
        """Return (model in eval mode, its tokenizer). Raises ValueError if the two do not fit together."""
        tokenizer = self.build_tokenizer()
        return self.build_model().eval(), tokenizer

    def crop(self, block_size):
        """Return a Checkpoint whose model has a shorter context: the first rows of a table of learned positions."""
        name, weights = "transformer.wpe.weight", dict(self.weights)
        if name in weights:
            weights[name] = weights[name][:block_size].clone()
        return replace(self, weights=weights, model_args=self.model_args | dict(block_size=block_size))


def check_finite(model, path):
    """Raise ValueError if a parameter of a model, which `path` holds, has an infinite number or NaN."""
    for name, p in model.named_parameters():
        if not torch.isfinite(torch.stack(p.detach().aminmax())).all():
            raise ValueError(f"{path} has infinite numbers or NaN in {name}: take an older file, or train again")


def save_checkpoint(path, content):
    """Write `content`, a dict of tensors and plain values, atomically. Raises OSError."""
    buffer = io.BytesIO()  # because torch.save itself raises errors of many kinds on a full disk
    torch.save(content, buffer)
    write_atomically({path: buffer.getbuffer()})


def load_checkpoint(path, meta=None):
    """Read a checkpoint, ours or nanoGPT's, or a Hugging Face folder, without running code that it may contain.

    meta  the meta.pkl that belongs to a nanoGPT checkpoint, or the tokenizer of one that was trained on GPT-2's tokens
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """
    path = Path(path)
    if path.is_dir():
        from kvgpt.interop.huggingface import read_folder

        weights, model_args, tokenizer_state = read_folder(path)
        return Checkpoint(path, weights, model_args, tokenizer_state)
    if not path.is_file():
        hint = "train one first (python train.py), or name another"
        if path.name.startswith("gpt2"):
            hint = f"hf download openai-community/{path.name} --local-dir {path} makes that folder"
        raise FileNotFoundError(f"no checkpoint at {path}: {hint}")
    tokenizer_state = read_vocabulary(Path(meta)) if meta else None
    try:
        check_crc(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        weights = {
            name.removeprefix("_orig_mod."): tensor  # torch.compile adds this prefix
            for name, tensor in content.pop("model").items()
            if not name.endswith(".attn.bias")  # the causal masks that nanoGPT once saved
        }
        in_file = {name: content.pop(name) for name in ("chars", "tokenizer") if name in content} or None
        return Checkpoint(
            path=path,
            weights=weights,
            model_args=dict(content.pop("model_args")),
            tokenizer_state=tokenizer_state or in_file,
            ngrams=content.pop("ngrams", None),
            best_val_loss=float(content.pop("best_val_loss", math.nan)),  # nanoGPT saves a tensor
            training=content,
        )
    except pickle.UnpicklingError:
        raise ValueError(f"{path} is damaged, or holds more than tensors and plain values: not loaded") from None
    except Exception as error:  # a damaged file can raise anything
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{path} is no checkpoint of a GPT, or is damaged ({what})") from None


def check_crc(path):
    """Raise BadZipFile if a record of a torch.save file does not have its CRC-32, which torch.load does not check."""
    if zipfile.is_zipfile(path):  # torch before 1.6 wrote other files
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"{damaged} has changed")


def pick_checkpoint(ckpt, out_dir):
    """Return the path of the checkpoint that --ckpt and --out_dir name. None stands for a flag that is not given.

    --ckpt may name a file, the folder of a run, or a Hugging Face folder. Without either flag we look in out, and if
    nothing has been trained there yet, we take the pretrained model that comes with the code.
    """
    if ckpt and not Path(ckpt).is_dir():
        return Path(ckpt)
    folder = Path(ckpt or out_dir or "out")
    for file in (folder / "ckpt.pt", folder / "last.pt"):  # a run has no ckpt.pt before its first evaluation
        if file.exists():
            return file
    if ckpt and (folder / "config.json").exists():
        return folder
    if ckpt or out_dir:
        return folder / "ckpt.pt"  # load_checkpoint says that it is not there
    note(f"no checkpoint in out: using the pretrained {PRETRAINED.name}")
    return PRETRAINED


def load_model(path, meta=None):
    """Return (model, tokenizer) of a checkpoint: the GPT on the CPU in eval mode, and its tokenizer.

    It takes the same arguments as load_checkpoint, and raises the same errors.
    """
    return load_checkpoint(path, meta).build_language_model()


def read_vocabulary(path):
    """Return the tokenizer_state in nanoGPT's meta.pkl, or in a tokenizer's folder or file. Raises ValueError."""
    if path.is_dir() or path.suffix == ".json":
        from kvgpt.bpe import read_tokenizer

        return {"tokenizer": read_tokenizer(path)}
    from kvgpt.nanogpt import read_meta

    return {"chars": read_meta(path)}
