"""Checkpoints: written completely or not at all, and read without running any code in them."""

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
    """The content of a checkpoint, ours or nanoGPT's, or of a Hugging Face folder.

    weights          the state_dict of a GPT
    model_args       the fields of GPTConfig
    tokenizer_state  the state_dict of the tokenizer; None in a nanoGPT checkpoint
    ngrams           n-gram counts of the training text, for --draft ngram, or None
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

        The model uses the tensors in `weights` without a copy, so it is never in memory twice.
        """
        try:
            model = blank_model(GPTConfig(**self.model_args))
            model.load_state_dict({name: p.float() for name, p in self.weights.items()}, assign=True)
        except (TypeError, ValueError, RuntimeError) as error:
            *_, why = str(error).strip().splitlines()  # load_state_dict has a line for each mismatch
            raise ValueError(f"the weights in {self.path} do not fit its model_args: {why.strip()[:200]}") from None
        tie(model)
        check_finite(model, self.path)
        return model

    def build_tokenizer(self):
        """Return the tokenizer. Raises ValueError if there is none, or if it does not fit the weights."""
        if self.tokenizer_state is None:
            where = "nanoGPT keeps it in meta.pkl, so pass --meta meta.pkl to sample.py or export.py"
            raise ValueError(f"{self.path} contains no vocabulary: {where}")
        try:
            tokenizer = tokenizer_from_state(self.tokenizer_state)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        check_vocab_size(tokenizer, self.model_args["vocab_size"], self.path)
        return tokenizer

    def build_language_model(self):
        """Return (model in eval mode, tokenizer). Raises ValueError if they do not fit together."""
        tokenizer = self.build_tokenizer()
        return self.build_model().eval(), tokenizer

    def crop(self, block_size):
        """Return a Checkpoint whose model has a shorter context: the first rows of a table of learned positions."""
        name, weights = "transformer.wpe.weight", dict(self.weights)
        if name in weights:
            weights[name] = weights[name][:block_size].clone()
        return replace(self, weights=weights, model_args=self.model_args | dict(block_size=block_size))


def check_finite(model, path):
    """Raise ValueError if a parameter of the model from `path` is infinite or NaN anywhere."""
    for name, p in model.named_parameters():
        if not torch.isfinite(torch.stack(p.detach().aminmax())).all():
            raise ValueError(f"{path} contains infinity or NaN in {name}: use an older file, or train again")


def save_checkpoint(path, content):
    """Write `content`, a dict of tensors and plain values, atomically. Raises OSError."""
    buffer = io.BytesIO()  # because torch.save raises many kinds of errors on a full disk
    torch.save(content, buffer)
    write_atomically({path: buffer.getbuffer()})


def load_checkpoint(path, meta=None):
    """Read a checkpoint, ours or nanoGPT's, or a Hugging Face folder, without running any code in it.

    meta  for a nanoGPT checkpoint: its meta.pkl, or the tokenizer if it was trained on GPT-2's tokens
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """
    path = Path(path)
    if path.is_dir():
        from kvgpt.interop.huggingface import read_folder

        weights, model_args, tokenizer_state = read_folder(path)
        return Checkpoint(path, weights, model_args, tokenizer_state)
    if not path.is_file():
        hint = "train one first (python train.py), or check the path"
        if path.name.startswith("gpt2"):
            hint = f"hf download openai-community/{path.name} --local-dir {path} downloads it"
        raise FileNotFoundError(f"no checkpoint at {path}: {hint}")
    tokenizer_state = read_vocabulary(Path(meta)) if meta else None
    try:
        check_crc(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        weights = {
            name.removeprefix("_orig_mod."): tensor  # torch.compile adds this prefix
            for name, tensor in content.pop("model").items()
            if not name.endswith(".attn.bias")  # causal masks, which old versions of nanoGPT saved
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
        raise ValueError(f"{path} is damaged, or contains more than tensors and plain values: not loaded") from None
    except Exception as error:  # a damaged file can raise anything
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{path} is not a checkpoint of a GPT, or is damaged ({what})") from None


def check_crc(path):
    """Raise BadZipFile if a CRC-32 in a torch.save file is wrong. torch.load does not check them."""
    if zipfile.is_zipfile(path):  # torch before 1.6 wrote other files
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"{damaged} has changed")


def pick_checkpoint(ckpt, out_dir):
    """Return the path of the checkpoint for --ckpt and --out_dir, which are None if not given.

    --ckpt may be a file, the folder of a run, or a Hugging Face folder. Without either flag we look in out, and fall
    back to the pretrained model that comes with the code.
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
        return folder / "ckpt.pt"  # load_checkpoint reports that it is missing
    note(f"no checkpoint in out: using the pretrained {PRETRAINED.name}")
    return PRETRAINED


def load_model(path, meta=None):
    """Return (model, tokenizer) of a checkpoint: the GPT on the CPU in eval mode, and its tokenizer.

    The arguments and errors are those of load_checkpoint.
    """
    return load_checkpoint(path, meta).build_language_model()


def read_vocabulary(path):
    """Return the tokenizer_state in nanoGPT's meta.pkl, or in a tokenizer's folder or file. Raises ValueError."""
    if path.is_dir() or path.suffix == ".json":
        from kvgpt.bpe import read_tokenizer

        return {"tokenizer": read_tokenizer(path)}
    from kvgpt.nanogpt import read_meta

    return {"chars": read_meta(path)}
