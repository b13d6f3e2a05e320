"""Train a GPT on the data that data/prepare.py wrote.

    python train.py --eval_interval 500              a size that suits the device
    python train.py --preset nanogpt-cpu             nanoGPT's CPU settings: its size and number of characters
    python train.py --recipe nanogpt                 nanoGPT's network and optimizer instead of the modern ones
    python train.py --init_from resume               continue the last run in --out_dir
    python train.py --init_from gpt2 --data_dir data/gpt2    finetune a model: a Hugging Face folder or a checkpoint
    python train.py --init_from out --eval_only              the val loss of a model, without training it
    torchrun --standalone --nproc_per_node=2 train.py        the same run on two processes

Writes out/ckpt.pt (best val loss, for sample.py), out/last.pt (latest step, for --init_from resume) and out/log.csv. On
a CPU the same command gives bit-identical weights, whether or not the run was interrupted.
"""

# Read it from top to bottom: settings, batches, the loss, the optimizers, a step, evaluation, the loop. The rest
# supports the loop: the data, the folder of a run, progress, processes and devices, the command line.

import argparse
import csv
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import textwrap
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from model import (
    GPT,
    CharTokenizer,
    GPTConfig,
    build,
    char_tokenizer,
    load,
    name_in_errors,
    save,
    write_atomically,
)

# torchrun starts several processes. Each runs all of this file, but only rank 0 prints, evaluates and writes files.
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
RANK, LOCAL_RANK, WORLD_SIZE = (
    (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) if TORCHRUN else (0, 0, 1)
)

# -- settings ----------------------------------------------------------------------------------------------------------

# The defaults of TrainConfig are `python train.py` on a CPU. A preset changes size and length, a recipe the network and
# the optimizer. If both change a setting, the preset wins, and the command line wins over everything.
#
# No recipe may win by size: within each preset, the parameter counts differ by less than 3%. RoPE has no table of
# positions, so at a context of 256 a small modern network needs a wider MLP to be as large as nanoGPT's.

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
    | dict(ngram_targets=None, mtp_weight=None, optimizer="adamw", learning_rate=1e-3, beta2=0.99, weight_decay=0.1)
    | dict(grad_clip=1.0, warmup_iters=100, lr_decay="cosine", lr_stable_frac=0.0, min_lr=None),
}
PAIRS = {("gpu", "nanogpt"): dict(max_iters=5000, dropout=0.2)}  # a preset with a recipe
EVAL_TOKENS = 2**17  # of the val split per evaluation, without --eval_iters
OLD_DEFAULTS = dict(lr_stable_frac=0.0, ngram_targets=None, mtp_weight=None)  # of runs that are older than the setting


def flag(default, kind, help, none=None, hidden=False):
    """Return a dataclass field for a flag of the command line.

    kind    a tuple of choices, or a key of KINDS
    none    what None means, for --help
    hidden  leave it out of --help, because only the recipes set it
    """
    return field(default=default, metadata=dict(kind=kind, help=help, none=none, hidden=hidden))


@dataclass
class TrainConfig:
    """All settings of a run. If you add one, record in OLD_DEFAULTS what older runs did, so that they can resume."""

    preset: str = flag(
        "auto",
        ("auto", *PRESETS),
        "size and length; auto: finetune for a Hugging Face folder, gpu on a GPU, else cpu",
    )
    recipe: str = flag("modern", tuple(RECIPES), "network and optimizer: ours, or nanoGPT's")
    init_from: str = flag(
        "scratch", "path", "scratch; resume (last.pt in --out_dir); or a checkpoint, a run or a Hugging Face folder"
    )
    meta: str | None = flag(None, "path", "for a nanoGPT checkpoint in --init_from: its meta.pkl", none="none")
    data_dir: str | None = flag(None, "path", "folder that data/prepare.py wrote", none="data, next to train.py")
    out_dir: str = flag("out", "path", "folder for checkpoints and log.csv")
    eval_only: bool = flag(False, "boolean", "print the val loss of the model in --init_from, and stop")
    eval_interval: int = flag(250, "positive", "steps between evaluations")
    eval_iters: int | None = flag(
        None, "positive", "batches per evaluation, spread over the val split", none=f"up to {EVAL_TOKENS:,} tokens"
    )
    save_interval: int = flag(250, "positive", "steps between writes of last.pt; an evaluation writes it too")
    log_interval: int = flag(20, "positive", "steps between lines of progress and rows of log.csv")
    sample_interval: int | None = flag(None, "positive", "steps between samples in samples.txt", none="off")
    # model
    n_layer: int = flag(4, "positive", "number of blocks")
    n_head: int = flag(4, "positive", "query heads per block")
    n_kv_head: int | None = flag(None, "positive", "key/value heads; fewer is grouped-query attention", none="n_head")
    n_embd: int = flag(128, "positive", "embedding width")
    block_size: int = flag(256, "positive", "context length in tokens")
    dropout: float = flag(0.0, "fraction", "dropout probability")
    bias: bool = flag(False, "boolean", "biases in Linear and LayerNorm layers")
    mlp_ratio: float = flag(4.2, "rate", "width of the MLP's hidden layer, in units of n_embd", hidden=True)
    activation: str = flag("swiglu", ("gelu", "gelu_tanh", "swiglu"), "exact GELU, GPT-2's tanh GELU, or SwiGLU")
    pos_emb: str = flag("rope", ("learned", "rope"), "learned position embeddings, or rotary ones")
    norm_first: bool = flag(True, "boolean", "True: pre-LN; False: post-LN", hidden=True)
    tie_weights: bool = flag(True, "boolean", "lm_head shares the matrix of the token embedding", hidden=True)
    qk_norm: bool = flag(True, "boolean", "LayerNorm on queries and keys", hidden=True)
    zero_init: bool = flag(True, "boolean", "every pre-LN block starts as the identity", hidden=True)
    # optimization
    ngram_targets: float | None = flag(
        1.0, "weight", "weight of n-grams in the targets at the first step; halves by the end", "0", hidden=True
    )
    mtp_weight: float | None = flag(
        0.3, "rate", "weight of the loss for the three tokens after the next; falls to 0", "0", hidden=True
    )
    optimizer: str = flag("muon", ("adamw", "muon"), "muon updates the matrices of the blocks, adamw the rest")
    batch_size: int = flag(2, "positive", "sequences per micro-step, over all processes")
    gradient_accumulation_steps: int = flag(1, "positive", "micro-steps per step")
    max_iters: int = flag(3200, "positive", "total steps")
    learning_rate: float = flag(1e-2, "rate", "peak learning rate of AdamW")
    muon_learning_rate: float = flag(0.01, "rate", "peak learning rate of Muon")
    warmup_iters: int = flag(0, "not negative", "steps of linear warm-up")
    lr_stable_frac: float = flag(
        0.3, "fraction", "fraction of the steps after warm-up at the peak learning rate", hidden=True
    )
    lr_decay: str = flag("linear", ("cosine", "linear", "none"), "shape of the decay; none: constant")
    lr_decay_iters: int | None = flag(None, "positive", "step at which the decay ends", none="max_iters", hidden=True)
    min_lr: float | None = flag(0.0, "rate", "learning rate at the end of the decay", none="learning_rate/10")
    weight_decay: float = flag(0.0, "rate", "AdamW's weight decay, on matrices and embeddings")
    beta1: float = flag(0.9, "fraction", "AdamW's beta1", hidden=True)
    beta2: float = flag(0.95, "fraction", "AdamW's beta2", hidden=True)
    grad_clip: float = flag(0.0, "rate", "largest norm of the gradient; 0 turns clipping off")
    patience: int | None = flag(None, "positive", "stop after N evaluations without a better val loss", none="off")
    # system
    seed: int = flag(1337, "seed", "seed of weights, batches and dropout")
    device: str = flag("auto", "text", "cpu, cuda, cuda:1, mps; auto: cuda if there is one, else cpu")
    dtype: str = flag(
        "auto",
        ("auto", "float32", "bfloat16", "float16"),
        "dtype of the forward; auto: bfloat16 on a GPU that has it, float16 on other GPUs, float32 on a CPU",
    )
    threads: int | None = flag(
        None, "threads", "CPU threads; a resume uses as many as the run did", none="PyTorch's choice"
    )
    compile: bool = flag(False, "boolean", "torch.compile the training step")
    plot: bool = flag(False, "boolean", "draw loss.png in --out_dir at each evaluation; needs matplotlib")

    @property
    def tokens_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size * self.block_size

    @property
    def eval_tokens(self):
        """Tokens of the val split per evaluation, at most."""
        return self.eval_iters * self.batch_size * self.block_size if self.eval_iters else EVAL_TOKENS

    def model_args(self):
        """Return the fields that GPTConfig shares."""
        return {name: getattr(self, name) for name in MODEL_FLAGS}


FLAGS = {f.name: f for f in fields(TrainConfig)}
MODEL_FLAGS = [f.name for f in fields(GPTConfig) if f.name in FLAGS]


def resolve_config(flags, *, on_gpu, source=None):
    """Return the TrainConfig of a run.

    flags    {name: value} of the given flags
    on_gpu   whether preset "auto" means "gpu"
    source   the checkpoint of the run to resume, or of the model to start from; None: from scratch
    Raises ValueError for flags that contradict `source` or each other, and for a checkpoint that cannot be resumed.
    """
    flags = {name: value for name, value in flags.items() if (name, value) != ("preset", "auto")}
    if flags.get("preset") == "finetune" and source is None:
        raise ValueError("--preset finetune starts from a trained model: pass it as --init_from")
    if flags.get("init_from") == "resume":
        earlier = saved_config(source)
        fixed = ["preset", "recipe", "optimizer", *MODEL_FLAGS]
        if bool(flags.get("mtp_weight", earlier.mtp_weight)) != bool(earlier.mtp_weight):
            fixed.append("mtp_weight")  # last.pt either has its layers or not, so it cannot be turned on or off
        require_unchanged(f"the run in {source['path'].parent}", vars(earlier), flags, fixed)
        config = replace(earlier, **flags)
    else:
        finetune = source and source["path"].suffix != ".pt"  # a folder
        preset = flags.get("preset", "finetune" if finetune else "gpu" if on_gpu else "cpu")
        recipe = flags.get("recipe", TrainConfig.recipe)
        settings = RECIPES[recipe] | PRESETS[preset] | PAIRS.get((preset, recipe), {})
        config = TrainConfig(**(settings | flags | dict(preset=preset, recipe=recipe)))
        if source:
            model_args = GPTConfig(**source["model_args"])  # nanoGPT saves only some of the fields
            network = {name: getattr(model_args, name) for name in MODEL_FLAGS if name != "dropout"}
            # only a shorter context can be chosen
            network["block_size"] = min(network["block_size"], flags.get("block_size", math.inf))
            require_unchanged(f"the model in {source['path']}", network, flags, network)
            # a trained model knows more than n-grams do, so both auxiliary targets are off unless you ask for them
            targets = {name: flags.get(name) for name in ("ngram_targets", "mtp_weight")}
            config = replace(config, **network, **targets)
    if config.min_lr is not None and config.min_lr > config.learning_rate:
        raise ValueError(f"--min_lr {config.min_lr} is above --learning_rate {config.learning_rate}: lower it")
    return config


def require_unchanged(what, settings, flags, fixed):
    """Raise ValueError if a flag in `fixed` differs from the settings of an earlier run or model."""
    for name in fixed:
        if name != "dropout" and flags.get(name, settings[name]) != settings[name]:
            raise ValueError(
                f"--{name} {flags[name]} conflicts with {what} ({name} {settings[name]}): "
                "drop the flag or start a new run"
            )


def saved_config(source):
    """Return the TrainConfig in the checkpoint of a run. Raises ValueError if train.py did not write it."""
    saved = source.get("config", {})
    if "recipe" not in saved:  # nanoGPT saves a config too
        raise ValueError(f"{source['path']} cannot be resumed, because this train.py did not write it: start a new run")
    return TrainConfig(**(OLD_DEFAULTS | {name: value for name, value in saved.items() if name in FLAGS}))


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
        windows = window_starts(len(ids), block_size, config.seed, i // windows_per_epoch)
        # if the offset leaves one window fewer, the epoch repeats its first window
        starts.append(windows[i % windows_per_epoch % len(windows)])
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


class Objective(nn.Module):
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
        """Return (objective, loss), 0-d tensors: what we minimize, and the plain cross-entropy, without a gradient.

        x, y          (B, T) int64: tokens, and the next token of each
        mtp_weight    0-d tensor: weight of the loss for the token after the next; that of layer j is divided by j
        ngram_weight  0-d tensor: weight of ngram_probs in the targets
        ngram_probs   (B, T, V): the n-gram distribution of the next token; None: targets are the text alone
        """
        hidden = self.model.hidden_states(x)  # (B, T, C)
        logits = self.model.unembed(hidden).flatten(0, 1).float()
        objective = F.cross_entropy(logits, y.flatten())
        loss, targets = objective.detach(), y  # targets: (B, T), or distributions (B, T, V)
        if ngram_probs is not None:
            targets = F.one_hot(y, logits.size(-1)).float().lerp(ngram_probs, ngram_weight)
            objective = F.cross_entropy(logits, targets.flatten(0, 1))
        for j, loss_ahead in enumerate(self.losses_ahead(hidden, targets), start=1):
            objective = objective + mtp_weight / j * loss_ahead
        return objective, loss

    def losses_ahead(self, hidden, targets):
        """Return the losses for the tokens after the next: multi-token prediction (Gloeckle et al., arXiv:2404.19737).

        Layer j predicts the hidden state j positions ahead, which lm_head maps to logits. The paper uses a block per
        extra token, we use a matrix.
        """
        losses = []
        for j, layer in enumerate(self.mtp, start=1):
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
    mtp_weight, ngram_weight = config.mtp_weight or 0.0, config.ngram_targets or 0.0
    return torch.tensor([mtp_weight * left, ngram_weight * (NGRAM_END + (1 - NGRAM_END) * left)])


# The next character of the text is one sample of what could follow, so its gradient is noisy. The average over all
# places where the same few characters come before is less noisy. But an n-gram sees only those few, so its weight
# falls during training. Malagutti et al. 2024 (arXiv:2403.17240) regularize with n-grams too; the decay is ours.

NGRAM_ORDER = 7  # characters of context; longer contexts mostly occur only once, which averages nothing
DISCOUNT = 0.9  # subtracted from each follower's count, in favour of the next shorter context
STRENGTH = 1.0  # counts that the next shorter context is always worth
MIN_ORDER = 3  # shorter contexts are not worth using
MAX_ENTRIES = 2**25  # in the table: 128 MiB
MAX_LENGTH = 2**24  # tokens of text; more would take minutes and gigabytes


def ngram_targets(ids, vocab_size, device):
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


def configure_optimizers(objective, config, device):
    """Return [AdamW] or [AdamW, Muon], with every parameter of an Objective in exactly one group.

    group["peak_lr"] is the learning rate that the schedule scales. Weight decay applies to AdamW's matrices and
    embeddings, but not to biases and norms, and not to Muon.
    """
    muon = []
    if config.optimizer == "muon":
        muon = [Muon(muon_groups(objective.model, config.muon_learning_rate), lr=config.muon_learning_rate)]
    of_muon = {id(p) for optimizer in muon for group in optimizer.param_groups for p in group["params"]}
    rest = [p for p in objective.parameters() if id(p) not in of_muon]
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
    if config.lr_decay == "none":
        return 1.0
    remaining = max(1, (config.lr_decay_iters or config.max_iters) - config.warmup_iters)
    stable = config.lr_stable_frac
    progress = min(1.0, max(0.0, ((step - config.warmup_iters) / remaining - stable) / (1 - stable)))
    if config.lr_decay == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return floor + (1 - progress) * (1 - floor)


# -- a step ------------------------------------------------------------------------------------------------------------


class TrainState:
    """The weights and everything else that changes from step to step.

    model       the GPT, for evaluation and checkpoints
    objective   the Objective of the same GPT, for training; main may compile or wrap it
    mtp         the layers of the objective for multi-token prediction
    optimizers  AdamW, or AdamW and Muon
    step        steps done; `iter_num` in a checkpoint, which is nanoGPT's name
    row         the log row of a step that still has to be evaluated, or None
    max_iters   of the run that we resume, before a new --max_iters
    """

    def __init__(self, model, config, device, dtype):
        self.model, self.objective = model, Objective(model, config).to(device)
        self.mtp = self.objective.mtp
        self.device, self.dtype = device, dtype
        self.optimizers = configure_optimizers(self.objective, config, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
        self.step, self.best_val_loss, self.evals_since_best, self.row = 0, math.inf, 0, None
        self.max_iters = config.max_iters

    def num_parameters(self):
        return sum(p.numel() for p in self.model.parameters())

    def record_evaluation(self, val_loss):
        """Count an evaluation. Returns whether val_loss is the best so far."""
        is_best = val_loss < self.best_val_loss
        self.best_val_loss = min(val_loss, self.best_val_loss)
        self.evals_since_best = 0 if is_best else self.evals_since_best + 1
        return is_best

    def state_dict(self, with_optimizers):
        """Return the part of a checkpoint that changes from step to step.

        with_optimizers  needed to resume; without them the file is half the size
        """
        state = dict(model=self.model.state_dict(), iter_num=self.step, best_val_loss=self.best_val_loss)
        if with_optimizers:
            state |= dict(
                optimizer=[optimizer.state_dict() for optimizer in self.optimizers],
                scaler=self.scaler.state_dict(),
                mtp=self.mtp.state_dict(),
                evals_since_best=self.evals_since_best,
                row=self.row,
            )
        return state

    def load_training(self, saved):
        """Continue the run of a checkpoint whose weights are loaded. Raises ValueError if the rest does not fit."""
        try:
            for optimizer, state in zip(self.optimizers, saved["optimizer"], strict=True):
                # keep our settings, because a resume may change --weight_decay or --beta2
                settings = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict(dict(state=state["state"], param_groups=settings))
            self.mtp.load_state_dict(saved.get("mtp", {}))  # older versions had no mtp
            if self.scaler.is_enabled() and saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
            self.step, self.evals_since_best = saved["iter_num"], saved["evals_since_best"]
            self.best_val_loss, self.row = float(saved["best_val_loss"]), saved.get("row")
        except Exception as error:  # torch raises many kinds of errors
            path, why = saved["path"], " ".join(str(error).split())[:200]
            raise ValueError(f"{path} does not contain the state of this run ({why}): start a new run") from None


def train_step(config, data, state, measure=False):
    """Run one optimizer step: forward and backward per micro-step, clip, update.

    measure  compute the norm of the gradients even if we do not clip them
    Returns this rank's mean loss, a tensor, and the norm, a tensor or None.
    """
    # forward and backward
    micro_steps = config.gradient_accumulation_steps
    total = 0.0
    for micro_step in range(micro_steps):
        number = state.step * micro_steps + micro_step
        x, y = get_batch(data.train, config, number, state.device)
        ngram_probs = None
        if data.ngram_targets:
            table, rows = data.ngram_targets
            ngram_probs = table[get_batch(rows, config, number, state.device)[0]]
        if config.dropout:  # like the batches, the masks depend only on the seed and the step
            sequence = np.random.SeedSequence((config.seed, state.step, micro_step, RANK))
            torch.manual_seed(int(sequence.generate_state(1)[0]))
        if WORLD_SIZE > 1:  # only the last micro-step averages the gradients over the processes
            state.objective.require_backward_grad_sync = micro_step == micro_steps - 1
        mtp_weight, ngram_weight = to_device(loss_weights(state.step, config), state.device)
        with state.autocast:
            objective, loss = state.objective(x, y, mtp_weight, ngram_weight, ngram_probs)
        state.scaler.scale(objective / micro_steps).backward()
        total = total + loss.detach() / micro_steps

    # clip
    grad_norm = None
    if config.grad_clip or measure:
        for optimizer in state.optimizers:
            state.scaler.unscale_(optimizer)
        if config.grad_clip:
            grad_norm = nn.utils.clip_grad_norm_(state.objective.parameters(), config.grad_clip)
        else:
            grad_norm = nn.utils.get_total_norm([p.grad for p in state.objective.parameters()])

    # update
    for optimizer in state.optimizers:
        state.scaler.step(optimizer)
    state.scaler.update()
    state.objective.zero_grad(set_to_none=True)
    return total, grad_norm


# -- evaluation --------------------------------------------------------------------------------------------------------


class Diverged(Exception):
    """The loss is no longer a finite number."""


def require_finite(loss):
    """Return the loss. Raises Diverged if it is infinite or NaN."""
    if not math.isfinite(loss):
        raise Diverged(f"the loss is {loss}")
    return loss


@contextmanager
def eval_mode(model):
    """Put the model in eval mode inside the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def eval_windows(ids, block_size, num_tokens, at_once):
    """Yield the windows of an evaluation, arrays `(at_once or fewer, block_size + 1)`.

    They do not overlap, and together they cover `ids`; the last one may be shorter. If that is more than num_tokens,
    we take fewer windows, spread evenly over `ids`. They are the same in every evaluation.
    """
    starts = block_size * np.arange((len(ids) - 1) // block_size)
    rest = ids[len(starts) * block_size :]
    if num_tokens < len(ids) - 1:
        starts = starts[np.linspace(0, len(starts) - 1, max(1, num_tokens // block_size)).astype(int)]
        rest = rest[:0]
    for i in range(0, len(starts), at_once):
        yield ids[starts[i : i + at_once, None] + np.arange(block_size + 1)]
    if len(rest) > 1:
        yield rest[None]


@torch.no_grad()
def evaluate(model, ids, block_size, device, autocast, num_tokens=math.inf, signals=None):
    """Return the mean cross-entropy in nats over every token of `ids` but the first. Only rank 0 computes it.

    We draw no random numbers, so evaluating more often does not change a run.
    model       a Module that maps (x, y) to (logits, loss)
    autocast    a context manager around the forwards
    num_tokens  read at most this many
    signals     StopSignals; once it has received one, we return None
    Raises Diverged if the loss is not finite.
    """
    most = min(2**13, 2**27 // model.config.vocab_size)  # tokens per forward; their logits take at most 512 MB
    total, count = 0.0, 0
    windows = eval_windows(ids, block_size, num_tokens, max(1, most // block_size)) if RANK == 0 else []
    size = min(num_tokens, len(ids) - 1)
    bar = tqdm(total=size, desc="evaluate", leave=False, position=0, disable=None, delay=2)  # in place of the run's bar
    with eval_mode(model), autocast, bar:
        for window in windows:
            if signals and signals.received:
                return None
            window = torch.from_numpy(window.astype(np.int64)).to(device)
            x, y = window[:, :-1], window[:, 1:]
            _, loss = model(x, y)
            total += loss.item() * x.numel()
            count += x.numel()
            bar.update(x.numel())
    return require_finite(all_reduce(total / max(1, count)))  # the other ranks add 0


def sample(config, data, state):
    """Return a sample of 300 new tokens, or as many as fit the context. It does not affect the run."""
    tokenizer = data.tokenizer
    start = torch.tensor([tokenizer.encode(tokenizer.default_prompt)], device=state.device)
    with eval_mode(state.model):
        return tokenizer.decode(state.model.generate(start, 300, seed=config.seed)[0].tolist())


# -- the loop ----------------------------------------------------------------------------------------------------------


def train(config, data, state, run, progress, signals):
    """Train from state.step until max_iters, a stop signal, or until patience runs out.

    Returns the number of the stop signal, or 0. Raises Diverged rather than save weights whose loss is not finite.
    """

    def val_loss(ids, **limits):
        return evaluate(state.model, ids, config.block_size, state.device, state.autocast, **limits)

    signum, row = 0, state.row
    while not signum and (row or state.step < config.max_iters):
        # one step, unless the run was interrupted between a step and its evaluation
        number = state.step if row else state.step + 1
        evaluating = row or number % config.eval_interval == 0 or number == config.max_iters
        saving = evaluating or number % config.save_interval == 0
        logging = saving or number % config.log_interval == 0
        lr_scale = lr_multiplier(number - 1, config)  # AdamW and Muon each have their own peak
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_scale
        if not row:
            loss, grad_norm = train_step(config, data, state, measure=logging)
            progress.update(loss)
            state.step = number
            signum = int(all_reduce(signals.received, dist.ReduceOp.MAX))  # all processes stop after the same step
            if config.sample_interval and number % config.sample_interval == 0 and RANK == 0:
                run.add_sample(number, sample(config, data, state))
            if not (logging or signum):
                continue
            row = progress.row(number, config.learning_rate * lr_scale, grad_norm)

        # evaluate, log, save
        saving = saving or signum
        if saving:  # the loss above is from before the update, which may have broken the weights
            val_loss(data.val[: config.block_size + 1])
        if evaluating:
            state.row = row  # if we are stopped during the evaluation, a resume begins with it
            if RANK == 0:
                run.save("last.pt", state.state_dict(with_optimizers=True))
            stopped = signals if WORLD_SIZE == 1 else None
            row["val_loss"] = val_loss(data.val, num_tokens=config.eval_tokens, signals=stopped)
            if row["val_loss"] is None:
                return signals.received
            if data.val_bytes:
                row["val_bpb"] = data.bits_per_byte(row["val_loss"])
            state.row = None
            if state.record_evaluation(row["val_loss"]) and RANK == 0:
                run.save("ckpt.pt", state.state_dict(with_optimizers=False))
            if state.evals_since_best == 3 and not config.patience:
                progress.bar.write(
                    "no better val loss in 3 evaluations: the run may overfit (--patience 3 would stop it)"
                )
        if RANK == 0:
            run.log(row | {"seconds": progress.seconds()})  # before last.pt, because a resume drops rows after its step
            if saving:
                run.save("last.pt", state.state_dict(with_optimizers=True))
            if config.plot and evaluating:
                from extras.plot import plot_loss

                plot_loss(run.path)
        progress.show(row)
        row = None
        if config.patience and state.evals_since_best >= config.patience:
            break
    return signum


# -- the data ----------------------------------------------------------------------------------------------------------


@dataclass
class Dataset:
    """The training data of a run: token ids from train.bin and val.bin, and the vocabulary from meta.json.

    tokenizer      a CharTokenizer, or a BPETokenizer of extras/bpe.py
    train, val     arrays of ids
    sha256         the hashes of train.bin and val.bin, by split
    val_bytes      the length of the val text in UTF-8; None if tokens are characters, which need no such number
    ngram_targets  ngram_targets(train, ...), if the run uses them
    special_tokens those of the model that we start from, such as {"eos": 50256}; for export.py
    """

    tokenizer: object
    train: np.ndarray
    val: np.ndarray
    sha256: dict
    val_bytes: int | None = None
    ngram_targets: tuple | None = None
    special_tokens: dict | None = None

    def bits_per_byte(self, loss):
        """Convert a val loss from nats per token to bits per byte, which do not depend on the tokenizer."""
        val_bytes = self.val_bytes
        if not val_bytes:  # tokens are characters
            lengths = [len(char.encode()) for char in self.tokenizer.vocab]
            val_bytes = np.bincount(self.val, minlength=len(lengths)) @ lengths
        return loss / math.log(2) * len(self.val) / val_bytes


def load_dataset(data_dir, block_size):
    """Return the Dataset in data_dir, a Path.

    Raises ValueError if files are missing or damaged, or if the splits are too short for a context of block_size.
    """
    meta_file = data_dir / "meta.json"
    try:
        meta = json.loads(meta_file.read_bytes())
        vocabulary, recorded = "tokenizer" if "tokenizer" in meta else "chars", meta["sha256"]
        hashes = {vocabulary: hashlib.sha256(meta[vocabulary].encode()).hexdigest()}
        for split in ("train", "val"):
            with open(data_dir / f"{split}.bin", "rb") as file:
                hashes[split] = hashlib.file_digest(file, "sha256").hexdigest()
        changed = [name for name in hashes if recorded[name] != hashes[name]]
    except FileNotFoundError as error:
        hint = "run python data/prepare.py first, or pass a different --data_dir"
        raise ValueError(f"no data: {error.filename} is missing; {hint}") from None
    except OSError as error:
        raise ValueError(f"cannot read the data: {error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{meta_file} is damaged or too old: run python data/prepare.py again") from None
    if changed:
        file = meta_file if changed == [vocabulary] else data_dir / f"{changed[0]}.bin"
        raise ValueError(f"{file} has changed since data/prepare.py wrote it: run data/prepare.py again")

    if vocabulary == "tokenizer":
        with needs_extras(f"the tokenizer in {meta_file}"):
            from extras.bpe import tokenizer_from_json
        tokenizer = tokenizer_from_json(meta["tokenizer"])
    else:
        tokenizer = CharTokenizer(meta["chars"])
    id_type = "<u2" if len(tokenizer.vocab) <= 2**16 else "<u4"
    length = {split: (data_dir / f"{split}.bin").stat().st_size // int(id_type[-1]) for split in ("train", "val")}
    if length["train"] < block_size + 1:
        raise ValueError(
            f"the train split has {length['train']} {tokenizer.unit}, but a context of {block_size} needs "
            f"{block_size + 1}: use a longer text or a smaller --block_size"
        )
    if length["val"] < 2:
        raise ValueError(f"the val split has {length['val']} {tokenizer.unit}, but needs 2: use a longer text")
    # the files may be larger than memory, and prepare.py may replace them meanwhile without changing what we map
    train, val = (np.asarray(np.memmap(data_dir / f"{split}.bin", id_type, "r")) for split in length)
    return Dataset(tokenizer, train, val, {split: hashes[split] for split in length}, meta.get("val_bytes"))


# -- the folder of a run -----------------------------------------------------------------------------------------------

FILES = ("log.csv", "samples.txt", "ckpt.pt", "last.pt")
COLUMNS = ("step", "tokens", "seconds", "train_loss", "val_loss", "lr", "tokens_per_s", "grad_norm")  # of log.csv


class RunFolder:
    """out_dir: ckpt.pt (best val loss), last.pt (latest step), log.csv, samples.txt, and earlier runs in `previous`.

    Only rank 0 writes to it.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.lock_file = None
        self.header = {}
        self.columns = COLUMNS

    def lock(self):
        """Lock the folder until the process ends. Raises ValueError if it is already locked, or not writable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock_file = self.lock_file or lock_folder(self.path)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {self.path}: stop it, or change --out_dir") from None
        except PermissionError as error:
            raise ValueError(f"cannot write to {self.path} ({error.strerror}): change --out_dir") from None

    def begin(self, step, header, bits_per_byte, row=None):
        """Prepare for a run that starts at `step`. At step 0, move an earlier run in the folder out of the way.

        header         the part of a checkpoint that stays the same during the run
        bits_per_byte  whether to log val losses in bits per byte too
        row            the row of `step`, if it is not complete yet
        Returns (tokens, seconds), what the log has counted so far. Raises OSError, or ValueError if the log is damaged.
        """
        self.header, self.columns = header, COLUMNS + (("val_bpb",) if bits_per_byte else ())
        if not step:
            self.set_aside()
        self.trim_samples(step)
        return self.trim_log(step - 1 if row else step)

    def set_aside(self):
        """Move the files of an earlier run to a new folder, last.pt last. Nothing is ever overwritten."""
        files = [self.path / name for name in FILES if (self.path / name).exists()]
        if not {"last.pt", "ckpt.pt"} & {file.name for file in files}:  # a log alone is not worth keeping
            return
        previous, numbers = self.path / "previous", itertools.count(2)
        while previous.exists():
            previous = self.path / f"previous-{next(numbers)}"
        previous.mkdir()
        for file in files:
            file.rename(previous / file.name)
        print(f"moved the earlier run in {self.path} to {previous} (--init_from resume would have continued it)")

    def trim_log(self, step):
        """Cut log.csv back to the rows up to `step`. Returns the tokens and seconds of the last row.

        A killed run has rows newer than its last.pt, which the resumed run will write again. A full disk can cut the
        last row short. We rewrite the header because older versions called the column `tokens` `chars`.
        """
        file = self.path / "log.csv"
        lines = file.read_bytes().splitlines(keepends=True) if step and file.is_file() else []
        try:
            rows = [line for line in lines[1:] if line.endswith(b"\n") and int(line.split(b",")[0]) <= step]
            counted = (0, 0.0)
            if rows:
                _, tokens, seconds, *_ = rows[-1].split(b",")
                counted = (int(tokens), float(seconds))
        except ValueError:
            raise ValueError(f"{file} is damaged: remove it to start a new one") from None
        header = ",".join(self.columns) + "\r\n"
        write_atomically({file: [header.encode(), *rows]})
        return counted

    def trim_samples(self, step):
        """Cut samples.txt back to the samples up to `step`, like the log."""
        file = self.path / "samples.txt"
        if step and file.is_file():
            content = file.read_bytes()
            samples = re.finditer(rb"^=== step (\d+) ===$", content, re.MULTILINE)
            end = min((sample.start() for sample in samples if int(sample[1]) > step), default=len(content))
            write_atomically({file: [content[:end]]})

    def log(self, row):
        file = self.path / "log.csv"
        with name_in_errors(file), open(file, "a", encoding="utf-8", newline="") as f:
            csv.DictWriter(f, self.columns).writerow(row)

    def add_sample(self, step, text):
        """Append a sample to samples.txt."""
        file = self.path / "samples.txt"
        with name_in_errors(file), open(file, "a", encoding="utf-8", newline="\n") as f:
            f.write(f"=== step {step} ===\n{text}\n\n")

    def save(self, name, state):
        """Write a checkpoint, atomically. Raises OSError."""
        save(self.path / name, self.header | state)


def lock_folder(folder, name=".lock"):
    """Lock a folder through a file in it, and return the open file. The lock ends with the process.

    Raises BlockingIOError if another process holds the lock, and OSError if the folder is not writable.
    """
    lock = open(folder / name, "ab")  # noqa: SIM115
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # of Unix and of Windows
        lock.close()
        raise BlockingIOError(errno.EAGAIN, "another process is writing there", str(folder)) from None
    except OSError:
        pass  # this file system has no locks
    return lock


# -- progress ----------------------------------------------------------------------------------------------------------


class Progress:
    """Loss and speed since the last log row, shown as a bar, or as lines if stderr is not a terminal.

    tokens, seconds_before  what the log of an interrupted run has already counted
    """

    def __init__(self, config, state, tokens=0, seconds_before=0.0):
        self.config, self.first_step = config, state.step
        self.tokens, self.seconds_before = state.row["tokens"] if state.row else tokens, seconds_before
        self.loss_sum, self.num_steps = torch.zeros((), device=state.device), 0  # since the last row
        self.rates = []  # tokens per second, per row
        self.val_loss = "-"  # of the last evaluation, as text
        self.on_terminal = sys.stderr.isatty() and RANK == 0
        columns, rows = shutil.get_terminal_size((100, 24))  # a notebook's terminal has size 0, where tqdm shows no bar
        self.bar = tqdm(
            total=config.max_iters,
            initial=state.step,
            unit="step",
            disable=not self.on_terminal,
            ncols=columns,
            nrows=rows,
            mininterval=1.0,  # a notebook keeps every update
        )
        self.began = self.row_began = time.perf_counter()
        self.first_ended = None  # when the first step ended, which takes long with --compile

    def update(self, loss):
        """Count a step. The loss stays a tensor, because reading a number would wait for the device."""
        self.loss_sum += loss
        self.num_steps += 1
        self.tokens += self.config.tokens_per_step
        self.first_ended = self.first_ended or time.perf_counter()
        self.bar.update()

    def row(self, step, lr, grad_norm):
        """Return the log row of the steps since the last one. Raises Diverged if their mean loss is not finite.

        grad_norm  the norm in the last step, a tensor or None
        """
        seconds = time.perf_counter() - self.row_began
        self.rates.append(round(self.num_steps * self.config.tokens_per_step / seconds))
        mean = all_reduce(self.loss_sum.item()) / WORLD_SIZE / self.num_steps
        return dict(
            step=step,
            tokens=self.tokens,
            lr=lr,
            train_loss=require_finite(mean),
            tokens_per_s=self.rates[-1],
            grad_norm=None if grad_norm is None else grad_norm.item(),
        )

    def seconds(self):
        """Return the seconds of the run so far, including evaluations and saves."""
        return round(self.seconds_before + time.perf_counter() - self.began, 3)

    def show(self, row):
        """Show a row in the bar, or as a line if stderr is not a terminal, and start the next row."""
        if "val_loss" in row:
            self.val_loss = f"{row['val_loss']:.4f}"
        if "val_bpb" in row:
            self.val_loss += f" ({row['val_bpb']:.4f} bits per byte)"
        text = f"loss {row['train_loss']:.4f}, val {self.val_loss}, {row['tokens_per_s']:,} tokens/s"
        self.bar.set_postfix_str(text)
        if not self.on_terminal:
            done, left = row["step"] - self.first_step - 1, self.config.max_iters - row["step"]
            if done > 0:
                text += f", {(time.perf_counter() - self.first_ended) / done * left:.0f} s left"
            print(f"step {row['step']}/{self.config.max_iters}: {text}", flush=True)
        self.loss_sum.zero_()
        self.num_steps, self.row_began = 0, time.perf_counter()

    def close(self):
        self.bar.close()


# -- processes and devices ---------------------------------------------------------------------------------------------


def all_reduce(value, op=dist.ReduceOp.SUM):
    """Reduce a number over all processes, by default to the sum."""
    if WORLD_SIZE == 1:
        return value
    value = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(value, op)
    return value.item()


def connect(state):
    """Wait until all processes have started, and let the objective average gradients over them."""
    if WORLD_SIZE > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if state.device.type == "cuda" else "gloo")
        state.objective = DistributedDataParallel(state.objective)


def disconnect(exit_code):
    """Wait for all processes, and end all but rank 0."""
    if WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()
    if RANK:
        os._exit(exit_code)  # during a normal exit, a thread of gloo can abort the process


class StopSignals:
    """Remembers Ctrl-C and SIGTERM, so that train.py can finish the current step before it stops.

    received  the number of the first signal, or 0
    A second Ctrl-C ends the process at once. A second SIGTERM does not, because `timeout` sends two.
    """

    def __init__(self):
        self.received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # a shell script that starts us with & has Ctrl-C ignored
                signal.signal(number, self.receive)

    def receive(self, signum, frame):
        self.received = self.received or signum
        if signum == signal.SIGINT and not TORCHRUN:  # torchrun forwards a Ctrl-C that we got already
            signal.signal(signal.SIGINT, signal.SIG_DFL)


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


def compile_module(module):
    """Return torch.compile(module), or print a note and return the module if there is no working compiler."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=next(module.parameters()).device))
    except Exception as error:  # a missing compiler raises many kinds of errors
        why = str(error).strip().partition("\n")[0]
        note(f"--compile: no working compiler ({why}): training uncompiled")
        return module
    note("--compile: compiling the training step; the first steps take a while")
    return torch.compile(module)


# -- the command line --------------------------------------------------------------------------------------------------


def number(kind, interval):
    """Return an argparse type: an int or a float in an interval such as "[0, 1)"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))

    def parse(text):
        value = kind(text)
        inside = low <= value <= high and (value > low or interval[0] == "[") and (value < high or interval[-1] == "]")
        if not inside:
            raise argparse.ArgumentTypeError(f"{text} is not in {interval}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value: 'x'"
    return parse


def boolean(text):
    """An argparse type: True, False, 1 or 0."""
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


def path(text):
    """An argparse type: a path. An empty one is refused, because it is probably an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


KINDS = {  # argparse types of the flags
    "path": path,
    "text": str,
    "boolean": boolean,
    "positive": number(int, f"[1, {2**31})"),
    "not negative": number(int, f"[0, {2**31})"),
    "seed": number(int, f"[0, {2**63})"),
    "threads": number(int, "[1, 1024]"),
    "fraction": number(float, "[0, 1)"),
    "weight": number(float, "[0, 1]"),
    "rate": number(float, "[0, 1e30]"),  # torch cannot multiply a float32 tensor by more
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that keeps the line breaks of its description and reports mistakes in one line."""

    def __init__(self, description, epilog=None):
        lines_as_they_are = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, epilog=epilog, formatter_class=lines_as_they_are, allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def parse_flags(argv=None):
    """Return {name: value} of the given flags. resolve_config fills in the rest."""
    parser = make_parser()
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        with suppress(ModuleNotFoundError):  # hints for people who come from nanoGPT
            from extras.nanogpt import refuse_unknown

            refuse_unknown(parser, unknown)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return vars(flags)


def make_parser():
    parser = Parser(__doc__, epilog=choices())
    for name, f in FLAGS.items():
        kind = f.metadata["kind"]
        if isinstance(kind, tuple):
            options = dict(choices=kind)
        elif kind == "boolean":
            options = dict(type=boolean, nargs="?", const=True, metavar="True|False")
        else:
            options = dict(type=KINDS[kind], metavar=name.split("_")[-1].upper())
        help = f"{f.metadata['help']} (default: {shown(name, f.default)})".replace("%", "%%")
        help = argparse.SUPPRESS if f.metadata["hidden"] else help
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help, **options)
    return parser


def shown(name, value):
    """Return a setting's value as --help shows it."""
    return FLAGS[name].metadata["none"] if value is None else str(value)


def choices():
    """Return what each preset and recipe changes, as text for the end of --help."""
    pairs = {f"{preset} with {recipe}": settings for (preset, recipe), settings in PAIRS.items()}
    lines = [
        "The defaults above are preset cpu with recipe modern. The rest change these settings, and each is a flag:"
    ]
    for title, chosen in (("presets", PRESETS), ("recipes", RECIPES), ("a preset with a recipe", pairs)):
        lines.append(f"{title}:")
        for name, settings in chosen.items():
            text = " ".join(f"{key}={shown(key, value)}" for key, value in settings.items()) or "(the defaults)"
            lines.append(textwrap.fill(f"  {name}: {text}", 118, subsequent_indent="    "))
    return "\n".join(lines)


# -- messages ----------------------------------------------------------------------------------------------------------


def note(message):
    """Print a line on stderr that starts with the name of the script."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


def fail(message):
    """Exit with code 1 and one line on stderr: a message or an error."""
    if isinstance(message, OSError) and message.filename:  # without "[Errno 2]"
        message = f"{message.filename}: {message.strerror}"
    note(message)
    sys.exit(1)


@contextmanager
def one_line_errors():
    """Turn a ValueError into one line where we read what the user gave us. Elsewhere it is a bug, with a traceback."""
    try:
        yield
    except ValueError as error:
        fail(error)


@contextmanager
def needs_extras(feature):
    """Exit with one line if the imports inside the block fail because the folder extras is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "extras":
            raise
        fail(f"{feature} needs the folder extras of the repository, next to model.py")


def run_main(main, memory_hint):
    """Run main(). Errors that are not bugs are reported in one line.

    memory_hint  what to suggest when memory runs out
    Exit codes: 1 after an error or a closed pipe, 130 after Ctrl-C, 143 after SIGTERM.
    """
    sys.stdout, sys.stderr = (f or open(os.devnull, "w") for f in (sys.stdout, sys.stderr))  # noqa: SIM115 - for >&-
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")  # on Windows too
    if not TORCHRUN:  # its SIGTERM has to end a process that waits in a library
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C, it lets `with` and `finally` clean up
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `head` has read enough
        sys.stdout = None  # the interpreter would flush it again, and complain
        sys.exit(1)
    except OSError as error:
        fail(error)
    except (MemoryError, RuntimeError) as error:
        words = ("allocate memory", "out of memory", "not enough memory")  # Linux, CUDA, Windows
        if not (isinstance(error, MemoryError) or any(each in str(error) for each in words)):
            raise
        fail(f"out of memory: {memory_hint}")


# -- main --------------------------------------------------------------------------------------------------------------


def load_source(init_from, meta, run):
    """Return the checkpoint to resume or to start from, or None for a run from scratch.

    meta  for a nanoGPT checkpoint: the file of its vocabulary
    Raises FileNotFoundError or ValueError.
    """
    if init_from == "scratch":
        return None
    if init_from == "resume":
        if RANK == 0 and run.path.is_dir():
            run.lock()  # before we read, so that no other process writes meanwhile
        return load(run.path / "last.pt")
    path, checkpoint = Path(init_from), None
    if path.is_dir() and not (path / "config.json").exists():  # the folder of a run
        path = path / ("ckpt.pt" if (path / "ckpt.pt").exists() else "last.pt")
    if not (meta or path.is_dir()):
        checkpoint = load(path)
        if "tokenizer" not in checkpoint:
            char_tokenizer(checkpoint)  # raises ValueError if it does not fit the weights
            return checkpoint
    with needs_extras(f"--init_from {init_from}, whose tokens are not characters,"):
        from extras.checkpoint import build_tokenizer, load_checkpoint
    checkpoint = checkpoint or load_checkpoint(path, meta)
    build_tokenizer(checkpoint)
    return checkpoint


def load_text(config, source, run):
    """Return the Dataset of a run. Raises ValueError if it does not match the checkpoint that we start from."""
    data_dir = Path(config.data_dir or Path(__file__).resolve().parent / "data")
    data = load_dataset(data_dir, config.block_size)
    if not source:
        return data
    same_tokens = data.tokenizer.state_dict().items() <= source.items()
    if config.init_from == "resume" and not (same_tokens and source.get("data_sha256") == data.sha256):
        raise ValueError(
            f"the run in {run.path} was trained on different text than {data_dir} holds: "
            "point --data_dir to that text, or prepare it again"
        )
    if not same_tokens:
        raise ValueError(
            f"the {data.tokenizer.unit} in {data_dir} are not those of the model in {source['path']}: "
            f"python data/prepare.py --tokenizer {config.meta or source['path']} prepares text for it"
        )
    data.special_tokens = source.get("special_tokens")
    return data


def make_model(config, source, vocab_size):
    """Return the GPT to train: a new one, or that of the checkpoint that we start from. Raises ValueError."""
    try:
        model_config = GPTConfig(vocab_size=vocab_size, **config.model_args())
    except ValueError as error:  # it starts with the name of a field, which is also a flag
        raise ValueError(f"--{error} (--help lists the flags)") from None
    torch.manual_seed(config.seed)
    if source:
        weights, positions = dict(source["model"]), "transformer.wpe.weight"
        if positions in weights:  # a shorter context uses the first rows
            weights[positions] = weights[positions][: config.block_size].clone()
        return build(source | dict(model=weights, model_args=asdict(model_config)))
    model = GPT(model_config)
    if config.zero_init:
        model.zero_init()
    return model


def choose_threads(config, asked):
    """Set torch's threads, and record their number in the config, because it decides the last bits of a sum.

    asked  --threads, or None
    """
    if WORLD_SIZE > 1:  # torchrun decides
        config.threads = asked
    else:
        config.threads, cores = config.threads or torch.get_num_threads(), os.cpu_count()
        if asked is None and cores and config.threads > cores:
            note(
                f"{config.threads} threads are more than the {cores} cores of this machine: --threads {cores} is faster"
            )
    if config.threads:
        torch.set_num_threads(config.threads)


def setup(flags, run):
    """Return (config, data, state) for the flags. Raises ValueError with one line for the user."""
    # settings
    source = load_source(flags.get("init_from", TrainConfig.init_from), flags.get("meta"), run)
    on_gpu = pick_device(flags.get("device", TrainConfig.device)).type == "cuda"
    config = resolve_config(flags, on_gpu=on_gpu, source=source)
    if (config.eval_only or config.meta) and not source:
        raise ValueError("--eval_only and --meta need a model: pass it as --init_from")
    if config.batch_size % WORLD_SIZE:
        raise ValueError(
            f"--batch_size {config.batch_size} does not divide among {WORLD_SIZE} processes: "
            "choose a multiple of their number"
        )
    if config.plot:  # now, and not after the first evaluation
        with needs_extras("--plot"):
            from extras.cli import need
        need("--plot", "matplotlib")
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    choose_threads(config, flags.get("threads"))

    # text and weights
    data = load_text(config, source, run)
    vocab_size = source["model_args"]["vocab_size"] if source else len(data.tokenizer.vocab)
    state = TrainState(make_model(config, source, vocab_size).to(device), config, device, dtype)
    if config.init_from == "resume":
        state.load_training(source)
        state.max_iters = source["config"]["max_iters"]
        if not (run.path / "ckpt.pt").exists():
            state.best_val_loss = math.inf  # the best weights are gone, so the next evaluation saves new ones
    return config, data, state


def describe(config, data, state):
    """Return the first line that a run prints."""
    unit, num_val = data.tokenizer.unit, len(data.val) - 1
    more = f" and {WORLD_SIZE - 1} more" if WORLD_SIZE > 1 else ""
    if state.device.type == "cpu" and config.threads:
        more += f" with {config.threads} thread{'s' if config.threads > 1 else ''}"
    return (
        f"{'resuming' if state.step else 'training'} preset {config.preset}, recipe {config.recipe}, "
        f"on {state.device}{more} in {str(state.dtype).removeprefix('torch.')}: "
        f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, context {config.block_size}, "
        f"{state.num_parameters() / 1e6:.2f}M parameters; "
        f"steps {state.step}..{config.max_iters} of {config.tokens_per_step:,} {unit}"
        + (f"; an evaluation reads {config.eval_tokens:,} of {num_val:,} {unit}" * (config.eval_tokens < num_val))
    )


def main():
    flags = parse_flags()
    if RANK:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # Training does not need the folder extras. If it is here, threads yield on a busy machine, and the checkpoints
    # contain n-gram counts for sample.py --draft.
    try:
        from extras.cores import share_cores
        from extras.decoding.ngrams import count_ngrams
    except ModuleNotFoundError:
        share_cores = count_ngrams = lambda *args: None
    share_cores()

    # settings, text and weights
    run = RunFolder(flags.get("out_dir", TrainConfig.out_dir))
    with one_line_errors():
        config, data, state = setup(flags, run)
    if config.eval_only:
        connect(state)
        loss = evaluate(state.model, data.val, config.block_size, state.device, state.autocast)
        disconnect(0)
        where = f"{config.init_from}, {len(data.val) - 1:,} {data.tokenizer.unit}"
        print(f"val loss {loss:.4f} ({data.bits_per_byte(loss):.4f} bits per byte): {where}")
        return
    out_of_patience = config.patience and state.evals_since_best >= config.patience
    if out_of_patience or (state.step >= config.max_iters and not state.row):
        flag = "a larger --patience" if out_of_patience else f"--max_iters {2 * state.step}"
        print(f"the run in {run.path} has ended at step {state.step}: {flag} would continue it")
        return
    if config.compile:
        state.objective = compile_module(state.objective)
    connect(state)

    # run folder and log
    counted = (0, 0.0)
    if RANK == 0:
        header = dict(
            model_args=asdict(state.model.config),
            config=asdict(config),
            **data.tokenizer.state_dict(),
            data_sha256=data.sha256,
            special_tokens=data.special_tokens,
            # at most one n-gram of 8 or 12 bytes per 16 parameters of 4 bytes
            ngrams=count_ngrams(data.train, state.model.config.vocab_size, state.num_parameters() // 16),
        )
        with one_line_errors():
            run.lock()
            counted = run.begin(state.step, header, bits_per_byte=bool(data.val_bytes), row=state.row)
    print(describe(config, data, state), flush=True)
    if state.max_iters != config.max_iters and not config.lr_decay_iters:
        print(f"the learning rate now falls until step {config.max_iters}, not {state.max_iters}", flush=True)
    if config.ngram_targets:
        data.ngram_targets = ngram_targets(data.train, state.model.config.vocab_size, state.device)
        if not data.ngram_targets:
            unit = data.tokenizer.unit
            print(f"training without n-gram targets: the text is too long or has too many distinct {unit} for them")
    progress, signals = Progress(config, state, *counted), StopSignals()

    # train
    try:
        signum = train(config, data, state, run, progress, signals)
    except Diverged as error:
        progress.close()
        fail(
            f"stopped at step {state.step}: {error}. Lower --learning_rate (now {config.learning_rate}). "
            f"The checkpoints in {run.path} are from before that step"
        )
    progress.close()
    whole_loss = None
    if not signum and config.eval_tokens < len(data.val) - 1:
        print(f"evaluating ckpt.pt on all {len(data.val):,} {data.tokenizer.unit} (Ctrl-C skips this)", flush=True)
        best = build(load(run.path / "ckpt.pt")).to(state.device) if RANK == 0 else state.model
        where = (config.block_size, state.device, state.autocast)
        whole_loss = evaluate(best, data.val, *where, signals=signals if WORLD_SIZE == 1 else None)
    disconnect(128 + signum if signum else 0)

    # report
    if signum:
        command = f"python train.py --init_from resume --out_dir={shlex.quote(str(run.path))}"
        print(f"stopped at step {state.step} of {config.max_iters} and saved; to continue: {command}")
        sys.exit(128 + signum)
    if state.step < config.max_iters:
        print(
            f"stopped at step {state.step} of {config.max_iters}: "
            f"no better val loss in {state.evals_since_best} evaluations (--patience)"
        )
    if progress.rates:  # a resume may only evaluate
        print(f"{statistics.median(progress.rates):,.0f} tokens/s")
    seconds = progress.seconds() - progress.seconds_before
    best = f"best val loss {state.best_val_loss:.4f}"
    if data.val_bytes:
        best += f" ({data.bits_per_byte(state.best_val_loss):.4f} bits per byte)"
    if whole_loss:
        best += f", {whole_loss:.4f} on all of the val split"
    print(f"{best}: {run.path / 'ckpt.pt'}; {seconds:.0f} s. A sample:\n")
    print(sample(config, data, state))


if __name__ == "__main__":
    run_main(main, memory_hint="a smaller model or batch would fit")
