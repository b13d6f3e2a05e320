"""Checkpoints: written whole or not at all, and read without running code from the file."""

import io
import math
import pickle
import pickletools
import re
import warnings
import zipfile
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch

from kvgpt.decoding.ngrams import valid_ngrams
from kvgpt.files import read_regular, write_atomically
from kvgpt.vocabulary import check_characters
from model import GPT, GPTConfig

PLAIN = (bool, int, float, str, type(None))
LAYER = re.compile(r"(?:transformer\.h|model\.layers)\.(\d+)\.")  # in names of ours and of transformers


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
        """Return the GPT on the CPU. Raises ValueError if the weights do not fit model_args, or are not finite."""
        unknown = sorted(str(name) for name in self.model_args if name not in {f.name for f in fields(GPTConfig)})
        if unknown:
            raise ValueError(f"model_args has {', '.join(unknown)}, which this version does not know")
        config = GPTConfig(**self.model_args)
        # before the network is made, because sizes that a file only claims can take hours or all memory
        expected, found = network_shapes(config, self.weights), {name: t.shape for name, t in self.weights.items()}
        for name in sorted(expected.keys() | found.keys()):
            ours, theirs = (tuple(shapes[name]) if name in shapes else "nothing" for shapes in (found, expected))
            if ours != theirs:
                raise ValueError(f"the weights do not fit model_args: {name} is {ours} instead of {theirs}")
        try:
            model = GPT(config)
            model.load_state_dict(self.weights)
        except RuntimeError as error:  # a failed allocation, or tensors of a kind that cannot be copied
            raise ValueError(f"the weights in {self.path} cannot be used: {first_line(error)}") from None
        check_finite(model, self.path)
        return model

    def build_language_model(self):
        """Return (model in eval mode, chars). Raises ValueError if the characters do not fit the model."""
        if self.chars is None:
            where = "nanoGPT keeps them in meta.pkl, and sample.py and export.py take --meta meta.pkl"
            raise ValueError(f"{self.path} has no characters in it: {where}")
        model = self.build_model()
        check_characters(self.chars, self.path, model.config.vocab_size)
        return model.eval(), self.chars

    def checked_ngrams(self):
        """Return `ngrams`. Raises ValueError if they are damaged."""
        if self.ngrams is not None and not valid_ngrams(self.ngrams, len(self.chars)):
            raise ValueError(f"the n-grams in {self.path} are damaged: leave out --draft, or train again")
        return self.ngrams


def network_shapes(config, weights):
    """Return {name: shape} of the parameters of GPT(config), from a network of one layer.

    weights  {name: tensor} for that network, by our names or by those of transformers
    Raises ValueError if they are of another number of layers, or if a size of `config` is larger than all of them.
    """
    layers = {match[1] for match in map(LAYER.match, weights) if match}
    if len(layers) != config.n_layer:
        raise ValueError(f"the weights do not fit: they have {len(layers)} layers instead of {config.n_layer}")
    largest = max(tensor.untyped_storage().nbytes() for tensor in weights.values())
    hidden, positions = int(config.mlp_ratio * config.n_embd), config.block_size if config.pos_emb == "learned" else 1
    for rows in (config.n_embd, config.vocab_size, hidden, positions):
        if rows * config.n_embd > largest:
            raise ValueError(f"the weights do not fit: none has {rows} x {config.n_embd} numbers")
    one = GPT(replace(config, n_layer=1)).state_dict()  # not on the meta device, whose first use takes a second
    return {
        name.replace(".h.0.", f".h.{i}."): tensor.shape
        for name, tensor in one.items()
        for i in (range(config.n_layer) if ".h.0." in name else (0,))
    }


def check_finite(model, path):
    """Raise ValueError if a parameter of a model, which `path` holds, has an infinite number or NaN."""
    for name, p in model.named_parameters():
        if not torch.isfinite(torch.stack(p.detach().aminmax())).all():
            raise ValueError(f"{path} has infinite numbers or NaN in {name}: take an older file, or train again")


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
        with open(path, "rb") as file:
            check_archive(file)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, about files that are no checkpoints
                content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path} is damaged, or holds more than tensors and plain values: not loaded") from None
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} cannot be read, or is truncated or damaged ({first_line(error)})") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("model", "model_args")):
        raise ValueError(f"{path} is no GPT checkpoint: it lacks the dicts 'model' and 'model_args'")
    if not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content["model"].items()):
        raise ValueError(f"{path} is no GPT checkpoint: its 'model' holds something else than named tensors")
    if not all(type(value) in PLAIN for value in content["model_args"].values()):
        raise ValueError(f"{path} is no GPT checkpoint: its 'model_args' hold something else than plain values")

    # torch.compile adds a prefix; nanoGPT before flash attention saved its masks
    weights = {
        key.removeprefix("_orig_mod."): value
        for key, value in content.pop("model").items()
        if not key.endswith((".attn.bias", ".attn.masked_bias"))
    }
    if not all(w.layout == torch.strided and w.is_floating_point() for w in weights.values()):
        raise ValueError(f"{path} is no GPT checkpoint: its 'model' holds other tensors than plain ones of floats")
    stored = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights.values()}
    if sum(w.nbytes for w in weights.values()) > 2 * sum(stored.values()):  # 2: the head can share the embedding
        raise ValueError(f"{path} is no GPT checkpoint: the tensors of its 'model' are larger than the file")
    return Checkpoint(
        path=path,
        weights=weights,
        model_args=content.pop("model_args"),
        chars=content.pop("chars", None) if meta is None else read_nanogpt_meta(meta),
        ngrams=content.pop("ngrams", None),
        best_val_loss=as_number(content.pop("best_val_loss", math.nan)),
        training=content,
    )


def check_archive(file):
    """Compare the content of an open torch.save file with its CRC-32 checksums, which torch.load does not read.

    Raises BadZipFile or another error if one differs. A file of torch 1.5 or older has none. Raises ValueError for a
    compressed record. torch.save never writes one, and a small file could fill the memory with it.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{record.filename} is compressed")
                if record.CRC:  # 0: torch was told to save without checksums
                    with archive.open(record) as content:
                        while content.read(2**20):
                            pass
    file.seek(0)


def as_number(value):
    """Return a loss from a file as a float: NaN for anything but a number. nanoGPT saves a tensor."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def first_line(error):
    """Return the first line of an error's message, or its kind if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
        content = read_regular(path)
        for opcode, number, _ in pickletools.genops(content):
            if "PUT" in opcode.name and number > len(content):  # the unpickler would take memory for so many entries
                raise pickle.UnpicklingError(f"it stores an entry of number {number}")
        itos = PlainUnpickler(io.BytesIO(content)).load()["itos"]
        return "".join(itos[i] for i in range(len(itos)))
    except FileNotFoundError:
        raise FileNotFoundError(f"no --meta file at {path}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"--meta {path} is not a nanoGPT meta.pkl: {first_line(error)}") from None
