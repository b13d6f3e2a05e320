"""Train a GPT on the data that data/prepare.py wrote.

    python train.py --eval_interval 500              a default size for this device
    python train.py --preset nanogpt-cpu             nanoGPT's CPU settings: its size and number of characters
    python train.py --recipe nanogpt                 nanoGPT's network and optimizer instead of the modern ones
    python train.py --init_from resume               continue the last run in --out_dir
    python train.py --init_from gpt2 --data_dir data/gpt2    finetune a model: a Hugging Face folder or a checkpoint
    python train.py --init_from out --eval_only              the val loss of a model, without training it
    torchrun --standalone --nproc_per_node=2 train.py        the same run on two processes

Writes out/ckpt.pt (best val loss, for sample.py), out/last.pt (latest step, for --init_from resume) and out/log.csv. On
a CPU the same command gives bit-identical weights, whether or not the run was interrupted.

If the folder extras is present, it adds two things without a flag: threads yield on a busy machine (extras/cores.py),
and checkpoints contain the n-gram counts for sample.py --draft (extras/decoding/ngrams.py).
"""

# Read it from top to bottom: settings, data, batches, the loss, the optimizers, a step, evaluation, the loop, main.

import argparse
import csv
import hashlib
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import sys
import textwrap
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from model import GPT, CharTokenizer, GPTConfig, build_model, load_checkpoint, save_checkpoint, write_atomically

# torchrun starts several processes. Each runs all of this file, but only rank 0 prints and writes files.
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
RANK, LOCAL_RANK, WORLD_SIZE = (
    (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) if TORCHRUN else (0, 0, 1)
)
NO_BAR = True if RANK else None  # None: tqdm shows a bar on a terminal, and nothing elsewhere

# -- settings ----------------------------------------------------------------------------------------------------------

# The defaults of TrainConfig are what `python train.py` uses on a CPU. A preset changes size and length, a recipe the
# network and the optimizer. If both change a setting, the preset wins, and the command line wins over everything.
#
# No recipe should win just by being bigger: within each preset, the parameter counts differ by less than 3%. RoPE has
# no table of positions, so at a context of 256 a small modern network needs a wider MLP to be as large as nanoGPT's.

PRESETS = {
    "cpu": {},
    "laptop": dict(max_iters=7000),
    "nanogpt-cpu": dict(block_size=64, batch_size=12, max_iters=2000),
    "lecture": dict(n_embd=64, block_size=32, mlp_ratio=4, batch_size=16, max_iters=5000),
    "gpu": dict(n_layer=6, n_head=6, n_embd=384, mlp_ratio=4, batch_size=64, max_iters=2000, dropout=0.3),
    # nanoGPT's settings for finetuning GPT-2 on Shakespeare, whatever the recipe
    "finetune": dict(batch_size=1, gradient_accumulation_steps=32, max_iters=20, eval_interval=5, log_interval=1)
    | dict(optimizer="adamw", learning_rate=3e-5, lr_decay="none", warmup_iters=0, weight_decay=0.1, beta2=0.95)
    | dict(grad_clip=1.0),
}
RECIPES = {
    "modern": {},
    "nanogpt": dict(pos_emb="learned", qk_norm=False, activation="gelu", mlp_ratio=4, zero_init=False)
    | dict(ngram_targets=0.0, mtp_weight=0.0, optimizer="adamw", learning_rate=1e-3, beta2=0.99, weight_decay=0.1)
    | dict(grad_clip=1.0, warmup_iters=100, lr_decay="cosine", lr_stable_frac=0.0, min_lr=None),
}
EVAL_TOKENS = 2**17  # val tokens per evaluation, unless --eval_iters is set


def flag(default, help, choices=None, least=None):
    """Return a dataclass field for a flag of the command line. A number must be at least `least`."""
    return field(default=default, metadata=dict(help=help, choices=choices, least=least))


@dataclass
class TrainConfig:
    """All settings of a run, which are also the flags. Raises ValueError for a number outside its range."""

    preset: str = flag(
        "auto",
        "size and length; auto: finetune for a Hugging Face folder, gpu on a GPU, else cpu",
        choices=("auto", *PRESETS),
    )
    recipe: str = flag("modern", "network and optimizer: ours, or nanoGPT's", choices=tuple(RECIPES))
    init_from: str = flag(
        "scratch", "scratch; resume: last.pt in --out_dir; or a checkpoint, run or Hugging Face folder"
    )
    meta: str | None = flag(None, "for a nanoGPT checkpoint in --init_from: its meta.pkl")
    data_dir: str | None = flag(None, "folder that data/prepare.py wrote; None: data, next to train.py")
    out_dir: str = flag("out", "folder for checkpoints and log.csv")
    eval_only: bool = flag(False, "print the val loss of the model in --init_from, and stop")
    text: str | None = flag(None, "with --eval_only: read this text file instead of the val split")
    stride: int | None = flag(None, "with --eval_only: tokens from window to window; None: block_size", least=1)
    eval_interval: int = flag(250, "steps between evaluations", least=1)
    eval_iters: int | None = flag(None, f"batches per evaluation; None: up to {EVAL_TOKENS:,} tokens", least=1)
    save_interval: int = flag(250, "steps between writes of last.pt; an evaluation writes it too", least=1)
    log_interval: int = flag(20, "steps between lines of progress and rows of log.csv", least=1)
    patience: int | None = flag(None, "stop after N evaluations without a better val loss; None: never", least=1)
    # model
    n_layer: int = flag(4, "number of blocks")
    n_head: int = flag(4, "query heads per block")
    n_kv_head: int | None = flag(None, "key/value heads; fewer than n_head is grouped-query attention")
    n_embd: int = flag(128, "embedding width")
    block_size: int = flag(256, "context length in tokens")
    dropout: float = flag(0.0, "dropout probability")
    bias: bool = flag(False, "biases in Linear and LayerNorm layers")
    mlp_ratio: float = flag(4.2, "width of the MLP's hidden layer, in units of n_embd")
    activation: str = flag("swiglu", "exact or tanh GELU, or SwiGLU", choices=("gelu", "gelu_tanh", "swiglu"))
    pos_emb: str = flag("rope", "learned position embeddings, or rotary ones", choices=("learned", "rope"))
    norm_first: bool = flag(True, "True: pre-LN; False: post-LN")
    tie_weights: bool = flag(True, "lm_head shares the matrix of the token embedding")
    qk_norm: bool = flag(True, "LayerNorm on queries and keys")
    zero_init: bool = flag(True, "every pre-LN block starts as the identity")
    # optimization
    ngram_targets: float = flag(1.0, "weight of n-grams in the targets at the first step; halves by the end", least=0)
    mtp_weight: float = flag(0.3, "weight of the loss for the three tokens after the next; falls to 0", least=0)
    optimizer: str = flag("muon", "for the matrices of the blocks; the rest uses adamw", choices=("adamw", "muon"))
    batch_size: int = flag(2, "sequences per micro-step, over all processes", least=1)
    gradient_accumulation_steps: int = flag(1, "micro-steps per step", least=1)
    max_iters: int = flag(3200, "total steps", least=1)
    learning_rate: float = flag(1e-2, "peak learning rate of AdamW", least=0)
    muon_learning_rate: float = flag(0.01, "peak learning rate of Muon", least=0)
    warmup_iters: int = flag(0, "steps of linear warm-up", least=0)
    lr_stable_frac: float = flag(0.3, "fraction of the steps after warm-up at the peak", least=0)
    lr_decay: str = flag("linear", "shape of the decay; none: constant", choices=("cosine", "linear", "none"))
    lr_decay_iters: int | None = flag(None, "step at which the decay ends; None: max_iters", least=1)
    min_lr: float | None = flag(0.0, "learning rate at the end of the decay; None: learning_rate/10", least=0)
    weight_decay: float = flag(0.0, "AdamW's weight decay, on matrices and embeddings", least=0)
    beta1: float = flag(0.9, "AdamW's beta1", least=0)
    beta2: float = flag(0.95, "AdamW's beta2", least=0)
    grad_clip: float = flag(0.0, "clip the norm of the gradient to this; 0: no clipping", least=0)
    # system
    seed: int = flag(1337, "seed of weights, batches and dropout", least=0)
    device: str = flag("auto", "cpu, cuda, cuda:1, mps; auto: cuda if there is one, else cpu")
    dtype: str = flag(
        "auto",
        "dtype of the forward; auto: bfloat16 on a GPU that supports it, float16 on other GPUs, float32 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    threads: int | None = flag(None, "CPU threads, kept by a resume; None: PyTorch's choice", least=1)
    compile: bool = flag(False, "torch.compile the training step")

    def __post_init__(self):
        for f in fields(self):
            value, least = getattr(self, f.name), f.metadata["least"]
            if value == "":
                raise ValueError(f"--{f.name} is empty")
            if None not in (value, least) and not value >= least:  # NaN, too
                raise ValueError(f"--{f.name} {value} is not at least {least}")
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            raise ValueError(f"--min_lr {self.min_lr} is above --learning_rate {self.learning_rate}: lower it")

    def tokens_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size * self.block_size

    def eval_tokens(self):
        """Return the number of tokens of the val split per evaluation, at most."""
        return self.eval_iters * self.batch_size * self.block_size if self.eval_iters else EVAL_TOKENS

    def model_args(self):
        """Return the fields that GPTConfig shares."""
        return {name: getattr(self, name) for name in MODEL_FLAGS}


FLAGS = {f.name: f for f in fields(TrainConfig)}
MODEL_FLAGS = {f.name for f in fields(GPTConfig) if f.name in FLAGS}


def resolve_config(flags, source=None, on_gpu=False):
    """Return the TrainConfig of a run.

    flags    {name: value} of the given flags
    source   the checkpoint of the run to resume, or of the model to start from; None: from scratch
    on_gpu   whether preset "auto" means "gpu"
    Raises ValueError for flags that contradict `source` or each other, and for a checkpoint that cannot be resumed.
    """
    flags = {name: value for name, value in flags.items() if (name, value) != ("preset", "auto")}
    if flags.get("preset") == "finetune" and source is None:
        raise ValueError("--preset finetune starts from a trained model: pass it as --init_from")
    if flags.get("init_from") == "resume":
        try:
            earlier, _ = TrainConfig(**source["config"]), source["optimizer"]
        except (KeyError, TypeError):  # a ckpt.pt has no optimizer, and nanoGPT's config has other settings
            raise ValueError(f"{source['path']} is not a last.pt of this train.py: start a new run from it") from None
        fixed = MODEL_FLAGS - {"dropout"} | {"preset", "recipe", "optimizer", "mtp_weight"}
        refuse_changes(flags, vars(earlier), fixed, f"the run in {source['path'].parent}")
        return replace(earlier, **(dict(out_dir=TrainConfig.out_dir) | flags))  # its folder may have a new name

    is_folder = source and source["path"].is_dir()
    preset = flags.get("preset", "finetune" if is_folder else "gpu" if on_gpu else "cpu")
    recipe = flags.get("recipe", "modern")
    settings = RECIPES[recipe] | PRESETS[preset]
    if source:
        # the network comes from the checkpoint; only its context may shrink
        network = vars(GPTConfig(**source["model_args"]))  # nanoGPT saves only some of the fields
        settings |= {name: network[name] for name in MODEL_FLAGS - {"dropout"}}
        settings["block_size"] = min(network["block_size"], flags.get("block_size", math.inf))
        refuse_changes(flags, settings, MODEL_FLAGS - {"dropout"}, f"the model in {source['path']}")
        # a trained model knows more than n-grams do, so both auxiliary targets are off unless you ask for them
        settings |= dict(ngram_targets=0.0, mtp_weight=0.0)
    return TrainConfig(**(settings | flags | dict(preset=preset, recipe=recipe)))


def refuse_changes(flags, settings, fixed, what):
    """Raise ValueError if a flag in `fixed` differs from the settings of `what`, an earlier run or model."""
    for name in flags.keys() & fixed:
        if flags[name] != settings[name]:
            raise ValueError(f"--{name} {flags[name]} conflicts with {what} ({name} {settings[name]}): leave it out")


def parse_flags():
    """Return {name: value} of the flags on the command line. resolve_config fills in the rest."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=presets_and_recipes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # one line, without the usage
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} (--help lists the flags)\n")
    for name, f in FLAGS.items():
        kind, choices = next(iter(get_args(f.type)), f.type), f.metadata["choices"]  # int, for int | None
        options = dict(type=kind, choices=choices, metavar=None if choices else name.split("_")[-1].upper())
        if kind is bool:
            options = dict(type=boolean, nargs="?", const=True, metavar="True|False")
        help = f"{f.metadata['help']} (default: {f.default})"
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help, **options)
    flags, unknown = parser.parse_known_args()
    if unknown:
        with suppress(ModuleNotFoundError):  # hints for people who come from nanoGPT
            from extras.nanogpt import refuse_unknown

            unknown = refuse_unknown(parser, unknown)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return vars(flags)


def presets_and_recipes():
    """Return what each preset and recipe changes, as text for the end of --help."""
    lines = ["The defaults above are preset cpu with recipe modern. The rest change these flags:"]
    for name, settings in (PRESETS | RECIPES).items():
        text = " ".join(f"{key}={value}" for key, value in settings.items()) or "(the defaults)"
        lines.append(textwrap.fill(f"  {name}: {text}", 118, subsequent_indent="    "))
    return "\n".join(lines)


def boolean(text):
    """An argparse type: True, False, 1 or 0."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


# -- the data ----------------------------------------------------------------------------------------------------------


@dataclass
class Dataset:
    """The training data of a run: token ids from train.bin and val.bin, and the vocabulary from meta.json.

    tokenizer   a CharTokenizer, or a BPETokenizer of extras/bpe.py
    train, val  arrays of ids
    sha256      the hashes of train.bin and val.bin, by split
    val_bytes   the length of the val text in UTF-8; None if tokens are characters, which need no such number
    source      where the text is from
    """

    tokenizer: object
    train: np.ndarray
    val: np.ndarray
    sha256: dict
    val_bytes: int | None = None
    source: str = ""

    def bits_per_byte(self, loss):
        """Convert a val loss from nats per token to bits per byte, which do not depend on the tokenizer."""
        val_bytes = self.val_bytes
        if not val_bytes:
            lengths = [len(char.encode()) for char in self.tokenizer.vocab]
            val_bytes = np.bincount(self.val, minlength=len(lengths)) @ lengths
        return loss / math.log(2) * len(self.val) / val_bytes


def load_dataset(data_dir, min_train):
    """Return the Dataset in data_dir, a Path.

    Raises ValueError if a file is missing or damaged, if train has fewer than min_train tokens, or val fewer than two.
    """
    meta_file = data_dir / "meta.json"
    try:
        meta = json.loads(meta_file.read_bytes())
        entries = {name: str(meta[name]) for name in ("chars", "tokenizer", "val_bytes") if name in meta}
        hashes = {name: hashlib.sha256(entry.encode()).hexdigest() for name, entry in entries.items()}
        recorded = {name: value for name, value in meta["sha256"].items() if name != "text"}
        for split in ("train", "val"):
            with open(data_dir / f"{split}.bin", "rb") as file:
                hashes[split] = hashlib.file_digest(file, "sha256").hexdigest()
        changed = sorted(name for name, _ in recorded.items() ^ hashes.items())
    except OSError as error:
        hint = "run python data/prepare.py first, or pass a different --data_dir"
        raise ValueError(f"no data at {error.filename} ({error.strerror}): {hint}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{meta_file} is damaged: run python data/prepare.py again") from None
    if changed:
        raise ValueError(f"{changed[0]} in {data_dir} has changed since data/prepare.py wrote it: run it again")

    if "tokenizer" in meta:
        from extras.bpe import tokenizer_from_json

        tokenizer = tokenizer_from_json(meta["tokenizer"])
    else:
        tokenizer = CharTokenizer(meta["chars"])
    id_type = "<u2" if len(tokenizer.vocab) <= 2**16 else "<u4"
    # the files may be larger than memory, and prepare.py may replace them meanwhile without changing what we map
    train, val = (np.asarray(np.memmap(data_dir / f"{split}.bin", id_type, "r")) for split in ("train", "val"))
    if len(train) < min_train or len(val) < 2:
        lengths = f"{len(train)} {tokenizer.unit} for training and {len(val)} for validation"
        raise ValueError(f"{lengths}, but we need {min_train} and 2: use longer text or a smaller --block_size")
    sha256 = {"train": hashes["train"], "val": hashes["val"]}
    return Dataset(tokenizer, train, val, sha256, meta.get("val_bytes"), str(meta.get("source")))


# -- batches -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)  # a batch can span two epochs
def window_starts(length, block_size, seed, epoch):
    """Return where each window of an epoch starts, in random order.

    The offset of the first window is random too. An epoch predicts every token once, apart from less than a window at
    each end of the text.
    """
    rng = np.random.default_rng((seed, epoch))
    offset = rng.integers(min(block_size, length - block_size))
    return offset + block_size * rng.permutation((length - 1 - offset) // block_size)


def get_batch(ids, config, number, device, rank=RANK, world_size=WORLD_SIZE):
    """Return x and y, `(batch_size / world_size, block_size)` int64: this rank's rows of batch `number` of the run.

    A batch depends only on the seed and its number. So resuming needs no saved random state, and the batches are the
    same for any number of processes.
    """
    batch_size, block_size = config.batch_size, config.block_size
    windows_per_epoch = (len(ids) - 1) // block_size
    starts = []
    for i in range(number * batch_size + rank, (number + 1) * batch_size, world_size):
        epoch = window_starts(len(ids), block_size, config.seed, i // windows_per_epoch)
        # if the offset leaves one window fewer, the epoch repeats its first window
        starts.append(epoch[i % windows_per_epoch % len(epoch)])
    windows = torch.from_numpy(ids[np.array(starts)[:, None] + np.arange(block_size + 1)].astype(np.int64))
    windows = to_device(windows, device)
    return windows[:, :-1], windows[:, 1:]


def to_device(tensor, device):
    """Move a CPU tensor to the device. Pinned memory lets a GPU compute while it copies."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# -- the loss ----------------------------------------------------------------------------------------------------------

NUM_AHEAD = 3  # extra tokens to predict, after the next one
NGRAM_END = 0.5  # fraction of the n-grams' initial weight in the targets that remains at the end


class TrainingLoss(nn.Module):
    """A GPT and the loss that training minimizes: cross-entropy, and two auxiliary terms that fade.

    mtp  NUM_AHEAD Linear layers `(C, C)`, or none if multi-token prediction is off. They start as the identity and
         exist only in training
    """

    def __init__(self, model, config):
        super().__init__()
        self.model = model
        C, count = model.config.n_embd, min(NUM_AHEAD, config.block_size - 1) if config.mtp_weight else 0
        self.mtp = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(count))
        for layer in self.mtp:
            nn.init.eye_(layer.weight)

    def forward(self, x, y, mtp_weight=None, ngram_weight=None, ngram_probs=None):
        """Return (total, loss), 0-d tensors: what we minimize, and the plain cross-entropy, without a gradient.

        x, y          (B, T) int64: tokens, and the next token of each
        mtp_weight    0-d tensor: weight of the loss for the token after the next; that of layer j is divided by j
        ngram_weight  0-d tensor: weight of ngram_probs in the targets
        ngram_probs   (B, T, V): the n-gram distribution of the next token; None: targets are the text alone
        """
        hidden = self.model.hidden_states(x)  # (B, T, C)
        logits = self.model.unembed(hidden).flatten(0, 1).float()
        total = F.cross_entropy(logits, y.flatten())
        loss, targets = total.detach(), y  # targets: (B, T), or distributions (B, T, V)
        if ngram_probs is not None:
            targets = F.one_hot(y, logits.size(-1)).float().lerp(ngram_probs, ngram_weight)
            total = F.cross_entropy(logits, targets.flatten(0, 1))
        for j, loss_ahead in enumerate(self.losses_ahead(hidden, targets), start=1):
            total = total + mtp_weight / j * loss_ahead
        return total, loss

    def losses_ahead(self, hidden, targets):
        """Return the losses for the tokens after the next: multi-token prediction (Gloeckle et al., arXiv:2404.19737).

        Layer j predicts the hidden state j positions ahead, which lm_head maps to logits. The paper uses a block per
        extra token, we use a matrix.
        """
        losses = []
        for j, layer in enumerate(self.mtp, start=1):
            # a norm without weights; if you replace the model's norm, replace this one too
            ahead = F.layer_norm(layer(hidden[:, :-j]), hidden.shape[-1:])  # (B, T - j, C)
            logits = self.model.unembed(ahead).flatten(0, 1).float()
            losses.append(F.cross_entropy(logits, targets[:, j:].flatten(0, 1)))
        return losses


def loss_weights(step, config):
    """Return mtp_weight and ngram_weight at a step, a float32 tensor `(2,)`.

    Both fall linearly until lr_decay_iters. We return a tensor because torch.compile would recompile the step for every
    new number.
    """
    left = max(0.0, 1 - step / (config.lr_decay_iters or config.max_iters))
    ngram_weight = config.ngram_targets * (NGRAM_END + (1 - NGRAM_END) * left)
    return torch.tensor([config.mtp_weight * left, ngram_weight])


# The next character of the text is one sample of what could follow, so its gradient is noisy. The average over all
# places where the same few characters come before is less noisy. But an n-gram sees only those few, so its weight
# falls during training. Malagutti et al. 2024 (arXiv:2403.17240) regularize with n-grams too; the decay is ours.

NGRAM_ORDER = 7  # characters of context; most longer ones occur once, so there is nothing to average
DISCOUNT = 0.9  # subtracted from each follower's count, in favour of the next shorter context
STRENGTH = 1.0  # pseudo-counts given to the next shorter context
MIN_ORDER = 3  # shorter contexts are not worth using
MAX_ENTRIES = 2**25  # in the table: 128 MiB
MAX_LENGTH = 2**24  # tokens of text; more would take minutes and gigabytes


def ngram_distributions(ids, vocab_size, device):
    """Return (table, rows): table[rows[i]] is the n-gram distribution of token i + 1 of the text.

    ids    (N,) integers below vocab_size
    table  (contexts, V) float32, on the device
    rows   (N,) int64: the row of the context that ends with token i
    Returns None for text that is too long or has too many distinct tokens.
    The longest context has NGRAM_ORDER tokens, or fewer if the table would be too large. Distributions are those of
    Kneser and Ney (1995), interpolated as in Teh (2006). With n counts of m distinct followers,

        P(w) = (count(w) - DISCOUNT + (DISCOUNT m + STRENGTH) P_shorter(w)) / (n + STRENGTH)

    where a follower that never occurs has neither count nor discount. In a shorter context we do not count how often a
    follower occurs, but how many distinct tokens precede the two.
    """
    if len(ids) > MAX_LENGTH:
        return None
    ids = ids.astype(np.int64)

    # number the contexts of each length, from short to long
    rows = np.zeros(len(ids), np.int64)
    parents = [np.zeros(1, np.int64)]  # per length: the row of every context without its oldest token
    for k in range(1, NGRAM_ORDER + 1):  # add the token k - 1 back; at the start of the text it comes from the end
        found, longer = np.unique(rows * vocab_size + np.roll(ids, k - 1), return_inverse=True)
        if len(found) * vocab_size > MAX_ENTRIES:
            if k <= MIN_ORDER:
                return None
            break
        rows = longer
        parents.append(found // vocab_size)

    # count the followers, from long to short
    pairs, counts = np.unique(rows[:-1] * vocab_size + ids[1:], return_counts=True)  # (context, follower)
    followers = [(pairs, counts)]
    for parent in parents[:0:-1]:
        pairs, counts = np.unique(parent[pairs // vocab_size] * vocab_size + pairs % vocab_size, return_counts=True)
        followers.append((pairs, counts))

    # average, from short to long; in place, because a table can be 128 MiB large
    table = np.full((1, vocab_size), 1 / vocab_size, np.float32)
    for parent, (pairs, counts) in zip(parents, reversed(followers)):
        row, follower = divmod(pairs, vocab_size)
        total = STRENGTH + np.bincount(row, counts, len(parent))
        table = table[parent]
        table *= ((STRENGTH + DISCOUNT * np.bincount(row, minlength=len(parent))) / total)[:, None]
        table[row, follower] += (counts - DISCOUNT) / total[row]
    return torch.from_numpy(table).to(device), rows


# -- the optimizers ----------------------------------------------------------------------------------------------------

# Muon updates the matrices of the blocks, and AdamW everything else. Muon (Jordan et al. 2024,
# kellerjordan.github.io/posts/muon) makes the update of a matrix nearly orthogonal: it moves all singular values
# towards 1, so that directions with small gradients are learned as fast as those with large ones.
#
# A polynomial maps a singular value s to a s + b s^3 + c s^5. One after the other, these three bring every s in
# (1e-3, 1] close to 1, as fast as possible: the first steps of the Polar Express (Amsel et al. 2025, arXiv:2505.16932).
POLYNOMIALS = ((8.2872, -23.5959, 17.3004), (4.1071, -2.9478, 0.5448), (3.9487, -2.9089, 0.5518))


def orthogonalize(x):
    """Move the singular values of the matrices x `(n, rows, cols)` towards 1, with matrix products alone.

    We apply the polynomials to gram = x x^T, which is smaller, and multiply x only once at the end.
    """
    wide = x if x.size(-2) <= x.size(-1) else x.mT
    wide = wide / (1.01 * wide.norm(dim=(-2, -1), keepdim=True)).clamp(min=1e-30)  # no singular value above 1
    gram, factor, product = wide @ wide.mT, None, None
    for a, b, c in POLYNOMIALS:
        if factor is not None:  # the gram of factor @ x, because all factors commute
            gram = factor @ (gram @ factor)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
    wide = product @ wide
    return wide if x.size(-2) <= x.size(-1) else wide.mT


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal updates, in float32, with one batched computation per matrix shape.

    params  groups; group["parts"] are the sizes along dim 0 of the matrices in one parameter, such as q, k and v in
            c_attn. Each gets its own orthogonal update, because one joint update trains worse
    A step of size lr moves a matrix by lr * sqrt(max(1, rows / cols)) in every direction. We do not use
    torch.optim.Muon, because it works in bfloat16, which most CPUs emulate, and cannot split a parameter.
    """

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        # update the momentum; collect the matrices by shape
        by_shape = {}  # (rows, cols): [(matrix, its update, lr), ...]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])  # Nesterov's momentum
                for matrix, part in zip(p.split(group["parts"]), update.split(group["parts"])):
                    by_shape.setdefault(matrix.shape, []).append((matrix, part, group["lr"]))
        # make the updates orthogonal, one batch per shape
        for (rows, cols), entries in by_shape.items():
            matrices, updates, rates = zip(*entries)
            scale = math.sqrt(max(1, rows / cols))
            for matrix, update, lr in zip(matrices, orthogonalize(torch.stack(updates)).unbind(), rates):
                matrix.add_(update, alpha=-lr * scale)


def configure_optimizers(training_loss, config, device):
    """Return [AdamW] or [AdamW, Muon], with every parameter of a TrainingLoss in exactly one group.

    group["peak_lr"] is the learning rate that the schedule scales. Weight decay applies to AdamW's matrices and
    embeddings, but not to biases and norms, and not to Muon.
    """
    muon = []
    if config.optimizer == "muon":
        muon = [Muon(muon_groups(training_loss.model, config.muon_learning_rate), lr=config.muon_learning_rate)]
    of_muon = {id(p) for optimizer in muon for group in optimizer.param_groups for p in group["params"]}
    rest = [p for p in training_loss.parameters() if id(p) not in of_muon]
    peak_lr = config.learning_rate
    groups = [
        dict(params=[p for p in rest if p.dim() >= 2], weight_decay=config.weight_decay, peak_lr=peak_lr),
        dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0, peak_lr=peak_lr),
    ]
    betas, fused = (config.beta1, config.beta2), device.type in ("cpu", "cuda")
    return [torch.optim.AdamW(groups, lr=peak_lr, betas=betas, fused=fused), *muon]


def muon_groups(model, peak_lr):
    """Return Muon's parameter groups: the matrices of the blocks, grouped by their parts."""
    by_parts = {}
    for block in model.transformer["h"]:
        kv = block.attn.n_kv_head * block.attn.head_size
        for p in (p for p in block.parameters() if p.dim() == 2):
            parts = (len(p),)
            if p is block.attn.c_attn.weight:
                parts = (len(p) - 2 * kv, kv, kv)  # q, k, v
            elif p is block.mlp.c_fc.weight and block.mlp.gated:
                parts = (len(p) // 2,) * 2  # gate, up
            by_parts.setdefault(parts, []).append(p)
    return [dict(params=params, peak_lr=peak_lr, parts=parts) for parts, params in by_parts.items()]


def lr_multiplier(step, config):
    """Return the learning rate of a step as a fraction of its peak, 0 to 1.

    It warms up linearly over warmup_iters. Of the remaining steps until lr_decay_iters, it stays at the peak for the
    fraction lr_stable_frac, and then falls to min_lr / learning_rate along a cosine or a line, or not at all.
    """
    if not config.learning_rate:  # 0 turns Muon off too
        return 0.0
    floor = 0.1 if config.min_lr is None else config.min_lr / config.learning_rate
    if step < config.warmup_iters:
        return (step + 1) / (config.warmup_iters + 1)
    if config.lr_decay == "none" or config.lr_stable_frac >= 1:
        return 1.0
    remaining = max(1, (config.lr_decay_iters or config.max_iters) - config.warmup_iters)
    stable = config.lr_stable_frac
    progress = min(1.0, max(0.0, ((step - config.warmup_iters) / remaining - stable) / (1 - stable)))
    if config.lr_decay == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return floor + (1 - progress) * (1 - floor)


# -- a step ------------------------------------------------------------------------------------------------------------

# what a checkpoint holds besides weights and optimizers, and its value at the start of a run
COUNTERS = dict(
    iter_num=0,  # steps done
    seconds=0.0,  # so far, including evaluations and saves
    num_unlogged=0,  # steps since the last row of log.csv; loss_sum is the sum of their losses
    best_val_loss=math.inf,
    evals_since_best=0,  # evaluations
)


class TrainState:
    """The weights and everything else that changes from step to step: COUNTERS, and

    model          the GPT, for evaluation and checkpoints
    training_loss  the TrainingLoss of the same GPT; main may compile or wrap it
    optimizers     AdamW, or AdamW and Muon
    ngrams         (table, rows) of ngram_distributions, or None
    """

    def __init__(self, model, config, device, dtype):
        self.model, self.training_loss = model, TrainingLoss(model, config).to(device)
        self.mtp = self.training_loss.mtp  # for checkpoints, because a wrapper adds a prefix to its names
        self.device, self.dtype = device, dtype
        self.optimizers = configure_optimizers(self.training_loss, config, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
        self.ngrams = None
        self.loss_sum = torch.zeros((), device=device)
        vars(self).update(COUNTERS)

    def state_dict(self, with_optimizers):
        """Return the part of a checkpoint that changes from step to step.

        with_optimizers  needed to resume; without them the file is half the size
        """
        state = dict(model=self.model.state_dict()) | {name: getattr(self, name) for name in COUNTERS}
        if with_optimizers:
            state["optimizer"] = [optimizer.state_dict() for optimizer in self.optimizers]
            state |= dict(scaler=self.scaler.state_dict(), mtp=self.mtp.state_dict(), loss_sum=self.loss_sum)
        return state

    def resume(self, saved):
        """Continue the run of a checkpoint, whose weights are in the model already."""
        for optimizer, state in zip(self.optimizers, saved["optimizer"], strict=True):
            # keep our settings, because a resume may change --weight_decay or --beta2, and the learning rate so far
            ours = optimizer.state_dict()["param_groups"]
            groups = [group | dict(lr=saved_group["lr"]) for group, saved_group in zip(ours, state["param_groups"])]
            optimizer.load_state_dict(dict(state=state["state"], param_groups=groups))
        self.mtp.load_state_dict(saved["mtp"])
        if self.scaler.is_enabled() and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        self.loss_sum.copy_(saved["loss_sum"])
        vars(self).update({name: saved[name] for name in COUNTERS})


def train_step(config, data, state):
    """Run one optimizer step: forward and backward per micro-step, clip, update.

    Returns the norm of the gradients, a tensor, or None if we do not clip them.
    """
    # forward and backward
    micro_steps, mean_loss = config.gradient_accumulation_steps, 0.0
    for micro_step in range(micro_steps):
        number = state.iter_num * micro_steps + micro_step
        x, y = get_batch(data.train, config, number, state.device)
        ngram_probs = None
        if state.ngrams:
            table, rows = state.ngrams
            ngram_probs = table[get_batch(rows, config, number, state.device)[0]]
        if config.dropout:  # like the batches, the masks depend only on the seed and the step
            sequence = np.random.SeedSequence((config.seed, state.iter_num, micro_step, RANK))
            torch.manual_seed(int(sequence.generate_state(1)[0]))
        if WORLD_SIZE > 1:  # only the last micro-step averages the gradients over the processes
            state.training_loss.require_backward_grad_sync = micro_step == micro_steps - 1
        mtp_weight, ngram_weight = to_device(loss_weights(state.iter_num, config), state.device)
        with state.autocast:
            total, loss = state.training_loss(x, y, mtp_weight, ngram_weight, ngram_probs)
        state.scaler.scale(total / micro_steps).backward()
        mean_loss = mean_loss + loss / micro_steps

    # clip
    grad_norm = None
    if config.grad_clip:
        for optimizer in state.optimizers:
            state.scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(state.training_loss.parameters(), config.grad_clip)

    # update: AdamW and Muon each have their own peak learning rate
    lr_scale = lr_multiplier(state.iter_num, config)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale
        state.scaler.step(optimizer)
    state.scaler.update()
    state.training_loss.zero_grad(set_to_none=True)
    state.loss_sum += mean_loss  # it stays a tensor, because reading a number would wait for the device
    state.iter_num += 1
    state.num_unlogged += 1
    return grad_norm


# -- evaluation --------------------------------------------------------------------------------------------------------


def eval_windows(ids, block_size, num_tokens, at_once, stride):
    """Yield the windows of an evaluation, arrays `(at_once or fewer, block_size + 1)`.

    One starts every `stride` tokens, and together they cover `ids`; the last one may be shorter. If they overlap, each
    predicts its last `stride` tokens, and a first window the beginning of `ids`. If that is more than num_tokens, we
    take fewer windows, spread evenly over `ids`. They are the same in every evaluation.
    """
    overlap = block_size - stride
    starts = stride * np.arange(max(0, len(ids) - 1 - overlap) // stride)
    rest = ids[len(starts) * stride :]
    if num_tokens < len(ids) - 1 and len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, max(1, num_tokens // stride)).astype(int)]
        rest = rest[:0]
    elif overlap:
        yield ids[None, : overlap + 1]
    for i in range(0, len(starts), at_once):
        yield ids[starts[i : i + at_once, None] + np.arange(block_size + 1)]
    if len(rest) > 1 + overlap:
        yield rest[None]


@torch.no_grad()
def evaluate(state, ids, num_tokens=math.inf, signals=(), stride=None):
    """Return the mean cross-entropy in nats over every token of `ids` but the first. The processes share the work.

    We draw no random numbers, so evaluating more often does not change a run.
    num_tokens  read at most this many
    signals     a list of catch_signals; once that of a process has one, we return None
    stride      tokens from window to window; None: block_size, so that windows do not overlap
    """
    model, block_size = state.model, state.model.config.block_size
    stride = stride or block_size
    most = min(2**13, 2**27 // model.config.vocab_size)  # tokens per forward; their logits take at most 512 MB
    windows = eval_windows(ids, block_size, num_tokens, max(1, most // block_size), stride)
    total, count, printed = 0.0, 0, time.perf_counter()
    model.eval()
    # a long evaluation has a bar of its own, which replaces the run's for a while
    bar = tqdm(total=min(num_tokens, len(ids) - 1), desc="evaluate", leave=False, position=0, delay=2, disable=NO_BAR)
    with state.autocast, bar:
        for window in itertools.islice(windows, RANK, None, WORLD_SIZE):
            if signals:
                break
            window = torch.from_numpy(window.astype(np.int64)).to(state.device)
            x, y = window[:, :-1], window[:, 1:].clone()
            if x.size(1) > block_size - stride:
                y[:, : block_size - stride] = -1  # the loss ignores what the window before has predicted
            _, loss = model(x, y)
            predicted = (y >= 0).sum().item()
            total += loss.item() * predicted
            count += predicted
            bar.update(predicted * WORLD_SIZE)
            if bar.disable and RANK == 0 and time.perf_counter() - printed > 10:
                printed = time.perf_counter()
                print(f"evaluate: {count * WORLD_SIZE:,} of {bar.total:,}", file=sys.stderr, flush=True)
    model.train()
    if all_reduce(len(signals), dist.ReduceOp.MAX):
        return None
    return all_reduce(total) / all_reduce(count)


# -- the folder of a run -----------------------------------------------------------------------------------------------

COLUMNS = ("step", "seconds", "train_loss", "val_loss", "lr", "tokens_per_s", "grad_norm")  # of log.csv


def lock_folder(folder, name=".lock"):
    """Lock a folder through a file in it, and return the open file. The lock ends with the process.

    Raises ValueError if another process holds the lock, and OSError if the folder is not writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / name, "ab")  # noqa: SIM115
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is writing to {folder}: stop it, or change --out_dir") from None
    except (ImportError, OSError):  # Windows and some network drives have no such locks
        pass
    return lock


def begin_log(out_dir, state):
    """Trim log.csv to the step of a resume. At step 0, move an earlier run out of the way: no checkpoint is lost.

    Raises ValueError if the log is damaged.
    """
    files = [out_dir / name for name in ("log.csv", "ckpt.pt", "last.pt")]  # last.pt is the last to go
    if not state.iter_num and any(file.exists() for file in files[1:]):
        previous = next(p for n in itertools.count(1) if not (p := out_dir / f"previous-{n}").exists())
        previous.mkdir()
        for file in filter(Path.exists, files):
            file.rename(previous / file.name)
        print(f"moved the earlier run in {out_dir} to {previous} (--init_from resume would have continued it)")

    # A killed run has rows newer than its last.pt, which we will write again. A full disk can cut the last row short.
    log = out_dir / "log.csv"
    lines = log.read_bytes().splitlines(keepends=True)[1:] if state.iter_num and log.exists() else []
    newest = state.iter_num - state.num_unlogged
    try:
        lines = [line for line in lines if line.endswith(b"\n") and int(line.split(b",")[0]) <= newest]
    except ValueError:
        raise ValueError(f"{log} is damaged: remove it to start a new one") from None
    write_atomically({log: [",".join(COLUMNS).encode() + b"\r\n", *lines]})


def log_row(out_dir, bar, row, best_val_loss):
    """Append a row, {column: value}, to log.csv, and show it in the bar, or as a line if there is none."""
    if RANK == 0:
        with open(out_dir / "log.csv", "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
    text = f"loss {row['train_loss']:.4f}, "
    if row["val_loss"] is not None:
        text += f"val {row['val_loss']:.4f}, "
    elif math.isfinite(best_val_loss):
        text += f"best val {best_val_loss:.4f}, "
    text += f"{row['tokens_per_s']:,} tokens/s"
    bar.set_postfix_str(text)
    if bar.disable:
        seconds_left = row["seconds"] / row["step"] * (bar.total - row["step"])
        print(f"step {row['step']}/{bar.total}: {text}, {seconds_left:.0f} s left", flush=True)


# -- the loop ----------------------------------------------------------------------------------------------------------


def train(config, data, state, header, bar, signals):
    """Train from state.iter_num until max_iters, a stop signal, or until patience runs out.

    header   the part of a checkpoint that stays the same during the run
    bar      a tqdm bar; if it is disabled, because stderr is not a terminal, we print lines instead
    signals  a list from catch_signals
    Returns the number of the stop signal, or 0. Exits rather than save weights whose loss is not finite.
    """
    out_dir, signum, grad_norm = Path(config.out_dir), 0, None
    row_began, row_step = time.perf_counter(), state.iter_num
    began = row_began - state.seconds

    def save_as(name, with_optimizers=True):
        state.seconds = round(time.perf_counter() - began, 3)
        if RANK == 0:
            save_checkpoint(out_dir / name, header | state.state_dict(with_optimizers))

    def require_finite(loss):
        if not math.isfinite(loss):
            sys.exit(
                f"train.py: stopped at step {state.iter_num}: the loss is {loss}. Lower --learning_rate "
                f"(now {config.learning_rate}). The checkpoints in {out_dir} are from before that step"
            )

    while True:
        # Evaluate, log and save at the top of the loop, as nanoGPT does. We also save before an evaluation: if it is
        # cut short, a nonzero num_unlogged makes the resumed run begin with it.
        step = state.iter_num
        ending = step >= config.max_iters
        evaluating = ending or step % config.eval_interval == 0
        saving = evaluating or step % config.save_interval == 0
        logging = saving or step % config.log_interval == 0

        # check the losses before we save
        if state.num_unlogged and (logging or signum):
            speed = round((step - row_step) * config.tokens_per_step() / (time.perf_counter() - row_began))
            # the mean over the processes, so that any number of them can resume
            state.loss_sum.fill_(all_reduce(state.loss_sum.item()) / WORLD_SIZE)
            train_loss = state.loss_sum.item() / state.num_unlogged
            require_finite(train_loss)
            if saving or signum:  # train_loss predates the last update, so test the new weights too
                require_finite(evaluate(state, data.val[: config.block_size + 1]))
            if evaluating or signum:
                save_as("last.pt")
        if signum:
            return signum

        # evaluate and log
        if state.num_unlogged and logging:
            val_loss = None
            if evaluating:
                val_loss = evaluate(state, data.val, config.eval_tokens(), signals)
                if val_loss is None:
                    return int(all_reduce(signals[0] if signals else 0, dist.ReduceOp.MAX))
                require_finite(val_loss)
                state.evals_since_best += 1
                if val_loss < state.best_val_loss:
                    state.best_val_loss, state.evals_since_best = val_loss, 0
                    save_as("ckpt.pt", with_optimizers=False)
            row = dict(step=step, train_loss=train_loss, val_loss=val_loss, tokens_per_s=speed)
            row |= dict(seconds=round(time.perf_counter() - began, 3), lr=state.optimizers[0].param_groups[0]["lr"])
            row |= dict(grad_norm=None if grad_norm is None else grad_norm.item())
            log_row(out_dir, bar, row, state.best_val_loss)
            state.loss_sum.zero_()
            state.num_unlogged = 0
            if saving:
                save_as("last.pt")
            row_began, row_step = time.perf_counter(), step
        if ending or (config.patience and state.evals_since_best >= config.patience):
            return 0

        grad_norm = train_step(config, data, state)
        bar.update()
        signum = int(all_reduce(signals[0] if signals else 0, dist.ReduceOp.MAX))  # all processes stop after this step


# -- processes and devices ---------------------------------------------------------------------------------------------


def all_reduce(value, op=dist.ReduceOp.SUM):
    """Reduce a number over all processes, by default to the sum."""
    if WORLD_SIZE == 1:
        return value
    value = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(value, op)
    return value.item()


def catch_signals():
    """Return a list to which Ctrl-C and SIGTERM append their numbers, so that we can finish the current step.

    A second Ctrl-C ends the process at once. A second SIGTERM does not, because `timeout` sends two.
    """
    received = []

    def receive(signum, frame):
        received.append(signum)
        if signum == signal.SIGINT and not TORCHRUN:  # torchrun forwards a Ctrl-C that we have already received
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a notebook that we ran in lives on

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # jobs that a shell script starts with & ignore Ctrl-C
            signal.signal(number, receive)
    return received


def disconnect(exit_code=0):
    """Wait for all processes, and end all but rank 0."""
    if WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()
    if RANK:
        os._exit(exit_code)  # during a normal exit, a thread of gloo can abort the process


def pick_device(name):
    """Return this process's torch.device for --device. "auto" is a GPU if there is one. Raises ValueError.

    With torchrun, every process gets a GPU of its own. A numbered GPU becomes PyTorch's current device, because pinned
    memory and NCCL use that.
    """
    if name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{LOCAL_RANK}" if WORLD_SIZE > 1 else "cuda"
    elif name == "auto":
        name = "cpu"
    try:
        torch.zeros(1, device=name).tolist()
    except Exception as error:  # every backend raises its own kind
        why = str(error).strip().partition("\n")[0]
        raise ValueError(f"--device {name} cannot be used here: {why[:150]}") from None
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def pick_dtype(name, device):
    """Return the dtype of the forward. Raises ValueError for a dtype that the device cannot train in."""
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        # a T4 only emulates bfloat16, which is several times slower than float16
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if name == "float16" and device.type != "cuda":
        raise ValueError(f"--dtype float16 needs CUDA to train, not {device.type}: use float32 or bfloat16")
    return getattr(torch, name)


# -- main --------------------------------------------------------------------------------------------------------------


def load_source(init_from, out_dir, meta=None):
    """Return the checkpoint to resume or to start from, or None for a run from scratch.

    meta  for a nanoGPT checkpoint: the file of its vocabulary
    Raises FileNotFoundError or ValueError.
    """
    if init_from == "scratch":
        return None
    if init_from == "resume":
        if not (out_dir / "last.pt").exists():
            raise ValueError(f"nothing to resume: there is no {out_dir / 'last.pt'}")
        return load_checkpoint(out_dir / "last.pt")
    path = Path(init_from)
    if path.is_dir() and not (path / "config.json").exists():  # the folder of a run
        path = path / ("ckpt.pt" if (path / "ckpt.pt").exists() else "last.pt")
    if meta or path.is_dir():
        from extras import checkpoint

        return checkpoint.load_checkpoint(path, meta)
    return load_checkpoint(path)


def check_text(data, data_dir, source, config):
    """Raise ValueError unless the Dataset has the vocabulary of `source`, and for a resume, the same text."""
    path, vocab_size, unit = source["path"], source["model_args"]["vocab_size"], data.tokenizer.unit
    if "chars" not in source and "tokenizer" not in source:
        raise ValueError(f"{path} has no vocabulary: nanoGPT keeps it in meta.pkl, so pass that as --meta")
    if config.init_from == "resume" and source["data_sha256"] != data.sha256:
        hint = f"point --data_dir at the original, or start a new run from its weights with --init_from {path.parent}"
        raise ValueError(f"the run used different text from {data_dir}: {hint}")
    same = data.tokenizer.state_dict().items() <= source.items()
    if not same and "tokenizer" in source and unit == "tokens":
        same = data.tokenizer.gives_ids_of(source["tokenizer"], data.val)
    if not same:
        command = f"python data/prepare.py --tokenizer {config.meta or path}"
        raise ValueError(f"the {unit} in {data_dir} are not those of the model in {path}: {command} prepares them")
    padding = vocab_size - len(data.tokenizer.vocab)
    if not 0 <= padding < (128 if "tokenizer" in source else 1):  # some models round their size up to a multiple of 128
        raise ValueError(f"{path} has weights for {vocab_size} tokens, but {len(data.tokenizer.vocab)} {unit}")


def make_model(config, source, vocab_size):
    """Return the GPT to train: a new one, or that of the checkpoint that we start from. Raises ValueError."""
    try:
        model_config = GPTConfig(vocab_size=vocab_size, **config.model_args())
    except ValueError as error:  # it starts with the name of a field, which is also a flag
        raise ValueError(f"--{error}") from None
    torch.manual_seed(config.seed)
    if source:
        weights, positions = dict(source["model"]), "transformer.wpe.weight"
        if positions in weights:  # a shorter context uses the first rows
            weights[positions] = weights[positions][: config.block_size].clone()
        return build_model(source | dict(model=weights, model_args=asdict(model_config)))
    model = GPT(model_config)
    if config.zero_init:
        model.zero_init()
    return model


def setup(flags):
    """Return (config, data, state, header): header is the part of a checkpoint that stays the same during the run.

    Raises ValueError or OSError with one line for the user.
    """
    # settings
    init_from, out_dir = flags.get("init_from", "scratch"), Path(flags.get("out_dir", "out"))
    source = load_source(init_from, out_dir, flags.get("meta"))
    on_gpu = torch.cuda.is_available() and flags.get("device", "auto") != "cpu"
    config = resolve_config(flags, source, on_gpu)
    device = pick_device(config.device)
    if (config.eval_only or config.meta) and not source:
        raise ValueError("--eval_only and --meta need a model: pass it as --init_from")
    if init_from == "resume" and "meta" in flags:
        raise ValueError("--meta is for a checkpoint of nanoGPT, and this run has its own vocabulary: leave it out")
    if ((config.text or config.stride) and not config.eval_only) or {"text", "data_dir"} <= flags.keys():
        raise ValueError("--text and --stride need --eval_only, and --text replaces --data_dir")
    if config.stride and config.stride > config.block_size:
        raise ValueError(f"--stride {config.stride} is above the context of {config.block_size}")
    if config.batch_size % WORLD_SIZE and not config.eval_only:
        raise ValueError(f"--batch_size {config.batch_size} is not divisible by {WORLD_SIZE} processes")
    if WORLD_SIZE > 1:  # torchrun chooses
        config.threads = flags.get("threads")
    else:  # a resume uses the same number, because it changes how sums round
        config.threads = config.threads or torch.get_num_threads()
    if config.threads:
        torch.set_num_threads(config.threads)

    # text and weights
    data_dir = Path(config.data_dir or Path(__file__).resolve().parent / "data")
    if config.text:
        from extras.checkpoint import read_text

        data = Dataset(*read_text(config.text, source))
    else:
        data = load_dataset(data_dir, 1 if config.eval_only else config.block_size + 1)
        if source:
            check_text(data, data_dir, source, config)
    vocab_size = source["model_args"]["vocab_size"] if source else len(data.tokenizer.vocab)
    model = make_model(config, source, vocab_size).to(device)
    state = TrainState(model, config, device, pick_dtype(config.dtype, device))
    if init_from == "resume":
        state.resume(source)
        if not (out_dir / "ckpt.pt").exists():
            state.best_val_loss, state.evals_since_best = math.inf, 0  # so the next evaluation saves new weights
    header = dict(model_args=asdict(model.config), config=asdict(config), data_sha256=data.sha256)
    header |= data.tokenizer.state_dict() | dict(special_tokens=source.get("special_tokens") if source else None)
    if WORLD_SIZE > 1:  # waits until all processes have joined
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return config, data, state, header


def main():
    # what the folder extras adds without a flag
    try:
        from extras.cores import share_cores
        from extras.decoding.ngrams import count_ngrams
    except ModuleNotFoundError:
        share_cores = count_ngrams = lambda *args: None
    share_cores()

    # settings, text and weights
    flags = parse_flags()
    try:
        config, data, state, header = setup(flags)
        out_dir = Path(config.out_dir)
        if RANK == 0 and not config.eval_only:
            lock = lock_folder(out_dir)
            begin_log(out_dir, state)
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")
    unit, vocab_size = data.tokenizer.unit, state.model.config.vocab_size
    if config.eval_only:
        read = min(len(data.val) - 1, config.eval_tokens() if "eval_iters" in flags else math.inf)
        loss = evaluate(state, data.val, read, stride=config.stride)
        disconnect()
        least = config.block_size + 1 - (config.stride or config.block_size)
        print(
            f"val loss {loss:.4f} (perplexity {math.exp(loss):.3f}, {data.bits_per_byte(loss):.4f} bits per byte): "
            f"{config.init_from}, {read:,} {unit} of {config.text or 'the val split'}\n"
            f"each is predicted from {least} to {config.block_size} {unit} before it, fewer near the beginning"
        )
        return

    # train
    num_params = sum(p.numel() for p in state.model.parameters())
    # for sample.py --draft: at most one n-gram of 8 or 12 bytes per 16 parameters of 4 bytes
    header["ngrams"] = None if RANK else count_ngrams(data.train, vocab_size, num_params // 16)
    if config.ngram_targets:
        state.ngrams = ngram_distributions(data.train, vocab_size, state.device)
        if not state.ngrams:
            print(f"training without n-gram targets: the text is too long or has too many distinct {unit} for them")
    print(
        f"{'resuming' if state.iter_num else 'training'} preset {config.preset}, recipe {config.recipe}, on "
        f"{WORLD_SIZE} x {state.device} in {str(state.dtype).removeprefix('torch.')}: {config.n_layer} layers, "
        f"{config.n_head} heads, {config.n_embd} wide, context {config.block_size}, {num_params / 1e6:.2f}M "
        f"parameters; steps {state.iter_num}..{config.max_iters} of {config.tokens_per_step():,} {unit} "
        f"from {data.source}",
        flush=True,
    )
    if config.compile:
        state.training_loss = torch.compile(state.training_loss)
    if WORLD_SIZE > 1:
        state.training_loss = DistributedDataParallel(state.training_loss)
    first_step, seconds_before = state.iter_num, state.seconds
    ncols, nrows = shutil.get_terminal_size()  # a notebook's terminal has size 0, where tqdm shows no bar
    size = dict(total=config.max_iters, initial=first_step, ncols=ncols, nrows=nrows)
    with tqdm(**size, unit="step", mininterval=1.0, disable=NO_BAR) as bar:  # a notebook keeps every update
        signum = train(config, data, state, header, bar, catch_signals())
    disconnect(128 + signum if signum else 0)

    # report
    lock.close()  # a notebook, which may keep our variables, can resume
    done = f"step {state.iter_num} of {config.max_iters}"
    if signum:
        command = f"python train.py --init_from resume --out_dir={shlex.quote(str(out_dir))}"
        print(f"stopped at {done} and saved; to continue: {command}")
        sys.exit(128 + signum)
    if state.iter_num < config.max_iters:
        evals = f"val loss has not improved in {state.evals_since_best} evaluations"
        print(f"stopped at {done}: {evals}; pass a larger --patience to train longer")
    elif state.iter_num == first_step:
        print(f"finished at step {state.iter_num}; pass --max_iters {2 * state.iter_num} to train longer")
    best = f"best val loss {state.best_val_loss:.4f}: {out_dir / 'ckpt.pt'}"
    print(f"{best}; {state.seconds - seconds_before:.0f} s. A sample:\n")
    start = torch.tensor([data.tokenizer.encode(data.tokenizer.default_prompt)], device=state.device)
    print(data.tokenizer.decode(state.model.eval().generate(start, 300, seed=config.seed)[0].tolist()))


if __name__ == "__main__":
    if RANK:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has not
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # on Windows too, and for any file name
    try:
        main()
    except KeyboardInterrupt:  # before the run has begun
        sys.exit(130)
    except torch.OutOfMemoryError:
        sys.exit("train.py: out of GPU memory: halve --batch_size and double --gradient_accumulation_steps")
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "extras":
            raise
        sys.exit("train.py: this needs the folder extras of the repository, next to model.py")
