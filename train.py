"""Train a GPT on the data that data/prepare.py wrote.

    python train.py --eval_interval 500              a default size for this device
    python train.py --preset nanogpt-cpu             nanoGPT's CPU settings: its size and number of characters
    python train.py --recipe nanogpt                 nanoGPT's network and optimizer instead of the modern ones
    python train.py --init_from resume               continue the last run in --out_dir
    python train.py --init_from gpt2 --data_dir data/gpt2    finetune a model: a Hugging Face folder or a checkpoint
    python train.py --init_from out --eval_only              the val loss of a model, without training it
    torchrun --standalone --nproc_per_node=2 train.py        the same run on two processes

Writes out/ckpt.pt (best val loss, for sample.py), out/last.pt (latest step, for --init_from resume) and out/log.csv. On
a CPU the same command gives bit-identical weights, interrupted or not. The defaults below are those of preset cpu and
recipe modern; PRESETS and RECIPES have the rest.
"""

import argparse
import csv
import difflib
import hashlib
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import get_args

try:  # importing torch takes a second, in which Ctrl-C may come
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm

    from model import GPT, CharTokenizer, GPTConfig, build_model, load_checkpoint, pick_device, save_checkpoint
except ModuleNotFoundError as error:
    sys.exit(f"train.py: {error}: activate the environment, or install it as README.md says")
except KeyboardInterrupt:
    sys.exit(130)
try:
    from extras import training as extras
except ImportError as error:
    if error.name != "extras":
        raise
    extras = None
NEEDS_EXTRAS = "needs the folder extras of the repository, next to train.py"

# torchrun starts several processes. Each runs all of this file, but only rank 0 prints and writes files.
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
RANK = int(os.environ["RANK"]) if TORCHRUN else 0
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if TORCHRUN else 1
NO_BAR = True if RANK else None  # None: tqdm shows a bar on a terminal, and nothing elsewhere

# -- settings ----------------------------------------------------------------------------------------------------------

# The defaults of TrainConfig are what `python train.py` uses on a CPU. A preset changes size and length, a recipe the
# network and the optimizer. If both change a setting, the preset wins, and the command line wins over everything.
# No recipe should win by being bigger, so the modern one, which has no table of positions, has a wider MLP.

# nanoGPT's for GPT-2 on Shakespeare, whatever the recipe
FINETUNE_LENGTH = dict(batch_size=1, gradient_accumulation_steps=32, max_iters=20, eval_interval=5, log_interval=1)
FINETUNE_OPTIMIZER = dict(optimizer="adamw", learning_rate=3e-5, beta2=0.95, weight_decay=0.1, grad_clip=1.0)

PRESETS = {
    "cpu": {},
    "laptop": dict(max_iters=7000),
    "nanogpt-cpu": dict(block_size=64, batch_size=12, max_iters=2000),
    "lecture": dict(n_embd=64, block_size=32, mlp_ratio=4, batch_size=16, max_iters=5000),
    "gpu": dict(n_layer=6, n_head=6, n_embd=384, mlp_ratio=4, batch_size=64, max_iters=2000, dropout=0.3),
    "finetune": FINETUNE_LENGTH | FINETUNE_OPTIMIZER | dict(lr_decay="none", warmup_iters=0),
}

NANOGPT_NETWORK = dict(pos_emb="learned", qk_norm=False, activation="gelu", mlp_ratio=4, zero_init=False)
NANOGPT_LOSS = dict(ngram_targets=0.0, mtp_weight=0.0)
NANOGPT_OPTIMIZER = dict(optimizer="adamw", learning_rate=1e-3, beta2=0.99, weight_decay=0.1, grad_clip=1.0)
NANOGPT_SCHEDULE = dict(warmup_iters=100, lr_decay="cosine", lr_stable_frac=0.0, min_lr=None)

RECIPES = {"modern": {}, "nanogpt": NANOGPT_NETWORK | NANOGPT_LOSS | NANOGPT_OPTIMIZER | NANOGPT_SCHEDULE}

DTYPES = ("auto", "float32", "bfloat16", "float16")
EVAL_TOKENS = 2**17  # val tokens per evaluation, unless --eval_iters is set


def flag(default, help, choices=None, least=None, most=math.inf):
    """Return a dataclass field for a flag of the command line. A number must be from `least` to `most`."""
    return field(default=default, metadata=dict(help=help, choices=choices, least=least, most=most))


@dataclass
class TrainConfig:
    """All settings of a run, which are also the flags. Raises ValueError for a number outside its range."""

    preset: str = flag("auto", "model size and run length; auto picks finetune, gpu or cpu", choices=("auto", *PRESETS))
    recipe: str = flag("modern", "network and optimizer: ours, or nanoGPT's", choices=tuple(RECIPES))
    init_from: str = flag("scratch", "scratch, resume (last.pt in --out_dir), or a checkpoint, run or model folder")
    meta: str | None = flag(None, "for a nanoGPT checkpoint in --init_from: its meta.pkl")
    data_dir: str | None = flag(None, "folder that data/prepare.py wrote; None: data, next to train.py")
    out_dir: str = flag("out", "folder for checkpoints and log.csv")
    eval_only: bool = flag(False, "print the val loss of the model in --init_from, and stop")
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
    activation: str = flag("swiglu", "of the MLP: swiglu, gelu (exact) or gelu_tanh")
    pos_emb: str = flag("rope", "learned position embeddings, or rotary ones", choices=("learned", "rope"))
    norm_first: bool = flag(True, "True: pre-LN; False: post-LN")
    tie_weights: bool = flag(True, "lm_head shares the matrix of the token embedding")
    qk_norm: bool = flag(True, "LayerNorm on queries and keys")
    zero_init: bool = flag(True, "every pre-LN block starts as the identity")
    # optimization
    ngram_targets: float = flag(1.0, "weight of n-grams in the targets at first; halves by the end", least=0, most=1)
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
    weight_decay: float = flag(0.0, "of AdamW, on matrices and embeddings; muon has none", least=0)
    beta1: float = flag(0.9, "AdamW's beta1", least=0, most=0.99999)
    beta2: float = flag(0.95, "AdamW's beta2", least=0, most=0.99999)
    grad_clip: float = flag(0.0, "clip the norm of the gradient to this; 0: no clipping", least=0)
    # system
    seed: int = flag(1337, "seed of weights, batches and dropout", least=0, most=2**63 - 1)
    device: str = flag("auto", "cpu, cuda, cuda:1, mps; auto: cuda if there is one, else cpu")
    dtype: str = flag("auto", "dtype of the forward; auto: half precision on a GPU, float32 on a CPU", choices=DTYPES)
    threads: int | None = flag(None, "CPU threads, kept by a resume; None: PyTorch's choice", least=1, most=1024)
    compile: bool = flag(False, "torch.compile the training step")

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            least, most = f.metadata["least"], f.metadata["most"]
            if value == "":
                raise ValueError(f"--{f.name} is empty")
            if least is not None and value is not None and not least <= value <= most:  # NaN, too
                limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"
                raise ValueError(f"--{f.name} {value} is not {limits}")
        if self.min_lr is not None and self.min_lr > self.learning_rate:
            raise ValueError(f"--min_lr {self.min_lr} is above --learning_rate {self.learning_rate}: lower it")

    def tokens_per_step(self):
        return self.gradient_accumulation_steps * self.batch_size * self.block_size

    def eval_tokens(self):  # per evaluation, at most
        return self.eval_iters * self.batch_size * self.block_size if self.eval_iters else EVAL_TOKENS

    def model_args(self):
        return {name: getattr(self, name) for name in MODEL_FLAGS}


FLAGS = {f.name: f for f in fields(TrainConfig)}
MODEL_FLAGS = {f.name for f in fields(GPTConfig) if f.name in FLAGS}
NETWORK_FLAGS = MODEL_FLAGS - {"dropout"}  # settings that the weights of a checkpoint determine


def resolve_config(flags, checkpoint=None, on_gpu=False):
    """Return the TrainConfig of a run. Raises ValueError.

    flags are {name: value} of those given, checkpoint is that of the run to resume or of the model to start from, and
    on_gpu says whether preset "auto" means "gpu".
    """
    flags = {name: value for name, value in flags.items() if (name, value) != ("preset", "auto")}
    if flags.get("init_from") == "resume":
        return resume_config(flags, checkpoint)
    if flags.get("preset") == "finetune" and checkpoint is None:
        raise ValueError("--preset finetune starts from a trained model: pass it as --init_from")

    recipe = flags.get("recipe", "modern")
    preset = "gpu" if on_gpu else "cpu"
    if checkpoint and checkpoint["path"].is_dir():
        preset = "finetune"
    preset = flags.get("preset", preset)
    settings = RECIPES[recipe] | PRESETS[preset]
    if checkpoint:
        # the network comes from the checkpoint; only its context may shrink
        network = asdict(GPTConfig(**checkpoint["model_args"]))  # nanoGPT saves only some of the fields
        settings |= {name: network[name] for name in NETWORK_FLAGS}
        settings["block_size"] = min(network["block_size"], flags.get("block_size", math.inf))
        refuse_changes(flags, settings, NETWORK_FLAGS, f"the model in {checkpoint['path']}")
        # a trained model knows more than n-grams do, so both auxiliary targets are off unless you ask for them
        settings |= dict(ngram_targets=0.0, mtp_weight=0.0)
    return TrainConfig(**(settings | flags | dict(preset=preset, recipe=recipe)))


def resume_config(flags, checkpoint):
    """Return the settings of the run that a checkpoint continues, overridden by the flags."""
    path = checkpoint["path"]
    if not {"config", "optimizer", "mtp"} <= checkpoint.keys():
        raise ValueError(f"{path} is not a last.pt of this train.py: start a new run from it")
    config = TrainConfig(**{name: value for name, value in checkpoint["config"].items() if name in FLAGS})
    fixed = NETWORK_FLAGS | {"preset", "recipe", "optimizer", "mtp_weight"}
    refuse_changes(flags, asdict(config), fixed, f"the run in {path.parent}")
    return replace(config, **(dict(out_dir=TrainConfig.out_dir) | flags))  # its folder may have a new name


def refuse_changes(flags, settings, fixed, what):
    """Raise ValueError if a flag in `fixed` differs from the settings of `what`, an earlier run or model."""
    for name in flags.keys() & fixed:
        if flags[name] != settings[name]:
            raise ValueError(f"--{name} {flags[name]} conflicts with {what} ({name} {settings[name]}): leave it out")


def parse_flags():
    """Return {name: value} of the flags on the command line. resolve_config fills in the rest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    # errors in one line, without argparse's usage
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} (--help lists the flags)\n")
    for name, f in FLAGS.items():
        kind = next(iter(get_args(f.type)), f.type)  # int, for int | None
        choices = f.metadata["choices"]
        options = dict(type=kind, choices=choices, metavar=None if choices else name.split("_")[-1].upper())
        if kind is bool:
            options = dict(type=boolean, nargs="?", const=True, metavar="True|False")
        help = f"{f.metadata['help']} (default: {f.default})"
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help, **options)
    flags, unknown = parser.parse_known_args()
    if unknown:
        similar = difflib.get_close_matches(unknown[0].partition("=")[0].lstrip("-"), FLAGS, n=1, cutoff=0.7)
        hint = f"did you mean --{similar[0]}?" if similar else "docs/interop.md lists what nanoGPT's are called here"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}: {hint}")
    return vars(flags)


def boolean(text):
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


# -- the data ----------------------------------------------------------------------------------------------------------


# what data/prepare.py wrote: the vocabulary, arrays of token ids, the hashes of the files, and where the text is from
Dataset = namedtuple("Dataset", "tokenizer train val sha256 source")


def load_dataset(data_dir, min_train):
    """Return the Dataset in data_dir, a Path. Raises ValueError, also if train has fewer than min_train tokens."""
    text = f" --input {data_dir}" if data_dir.is_file() else ""
    hint = f"run python data/prepare.py{text}, or pass a different --data_dir"
    sha256 = {}
    try:
        if extras and (data_dir / "train.bin").exists() and not (data_dir / "meta.json").exists():
            meta = extras.read_data(data_dir)
        else:
            meta = json.loads((data_dir / "meta.json").read_bytes())
        for split in ("train", "val"):
            with open(data_dir / f"{split}.bin", "rb") as file:
                sha256[split] = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256[split] != meta["sha256"][split]:
                raise ValueError(f"{split}.bin has changed")
        if "chars" not in meta and not extras:
            raise ValueError(f"their tokens are not characters, which {NEEDS_EXTRAS}")
        tokenizer = CharTokenizer(meta["chars"]) if "chars" in meta else extras.tokenizer_from_state(meta)
    except OSError as error:
        raise ValueError(f"no data at {error.filename} ({error.strerror}): {hint}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the data in {data_dir} cannot be read ({error}): {hint}") from None

    # the files may be larger than memory. If prepare.py replaces them while we train, our mapping keeps the old ones
    id_type = "<u2" if len(tokenizer.vocab) <= 2**16 else "<u4"
    train = np.asarray(np.memmap(data_dir / "train.bin", id_type, "r"))
    val = np.asarray(np.memmap(data_dir / "val.bin", id_type, "r"))
    if len(train) < min_train or len(val) < 2:
        lengths = f"{len(train)} {tokenizer.unit} for training and {len(val)} for validation"
        raise ValueError(f"{lengths}, but we need {min_train} and 2: use longer text or a smaller --block_size")
    return Dataset(tokenizer, train, val, sha256, source=str(meta.get("source")))


@lru_cache(maxsize=2)  # a batch can span two epochs
def window_starts(length, block_size, seed, epoch):
    """Return where each window of an epoch starts, in random order.

    The offset of the first window is random too. An epoch predicts every token once, but for some at the ends.
    """
    rng = np.random.default_rng((seed, epoch))
    offset = rng.integers(min(block_size, length - block_size))
    return offset + block_size * rng.permutation((length - 1 - offset) // block_size)


def get_batch(ids, config, number, device, rank=RANK, world_size=WORLD_SIZE):
    """Return x and y, `(batch_size / world_size, block_size)` int64: this rank's rows of batch `number` of the run.

    They depend only on the seed and the number, so resuming needs no saved random state.
    """
    windows_per_epoch = (len(ids) - 1) // config.block_size
    starts = []
    for i in range(number * config.batch_size + rank, (number + 1) * config.batch_size, world_size):
        epoch = window_starts(len(ids), config.block_size, config.seed, i // windows_per_epoch)
        # if the offset leaves one window fewer, the epoch repeats its first window
        starts.append(epoch[i % windows_per_epoch % len(epoch)])
    windows = ids[np.array(starts)[:, None] + np.arange(config.block_size + 1)]
    windows = torch.from_numpy(windows.astype(np.int64))
    if device.type == "cuda":  # pinned memory lets a GPU compute while it copies
        windows = windows.pin_memory()
    windows = windows.to(device, non_blocking=device.type == "cuda")
    return windows[:, :-1], windows[:, 1:]


# -- the optimizers ----------------------------------------------------------------------------------------------------

# Muon updates the matrices of the blocks, and AdamW everything else. Muon (Jordan et al. 2024,
# kellerjordan.github.io/posts/muon) makes the update of a matrix nearly orthogonal: it moves all singular values
# towards 1, so that directions with small gradients are learned as fast as those with large ones. A polynomial maps a
# singular value s to a s + b s^3 + c s^5. Applied in turn, these three bring every s in (1e-3, 1] close to 1, as fast
# as possible: the first steps of the Polar Express (Amsel et al. 2025, arXiv:2505.16932).
POLYNOMIALS = ((8.2872, -23.5959, 17.3004), (4.1071, -2.9478, 0.5448), (3.9487, -2.9089, 0.5518))


def orthogonalize(x):
    """Move the singular values of the matrices x `(n, rows, cols)` towards 1.

    The polynomials apply to gram = x x^T, which is smaller, and x is multiplied only once, at the end.
    """
    wide = x if x.size(-2) <= x.size(-1) else x.mT
    wide = wide / (1.01 * wide.norm(dim=(-2, -1), keepdim=True)).clamp(min=1e-30)  # no singular value above 1
    gram = wide @ wide.mT
    factor = product = None
    for a, b, c in POLYNOMIALS:
        if factor is not None:  # the Gram matrix of factor @ x, because all factors commute
            gram = factor @ (gram @ factor)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
    wide = product @ wide
    return wide if x.size(-2) <= x.size(-1) else wide.mT


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal updates, in float32, with one batched computation per matrix shape.

    group["parts"] are the sizes along dim 0 of the matrices in one parameter, such as q, k and v in c_attn. Each gets
    its own update, because a joint one trains worse. A step of size lr moves a matrix by lr * sqrt(max(1, rows / cols))
    in every direction. torch.optim.Muon works in bfloat16, which most CPUs emulate, and cannot split a parameter.
    """

    @torch.no_grad()
    def step(self):
        # update the momentum; collect the matrices by shape
        by_shape = {}  # (rows, cols): [(matrix, its update, lr), ...]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):  # frozen ones have none
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


def configure_optimizers(params, model, config, device):
    """Return [AdamW] or [AdamW, Muon], with each of the params in one group, whose peak_lr the schedule scales.

    params  those of the model, a GPT, and perhaps of auxiliary targets
    Weight decay applies to AdamW's matrices and embeddings, but not to biases and norms, and not to Muon.
    """
    muon_params = muon_groups(model, config.muon_learning_rate) if config.optimizer == "muon" else []
    of_muon = {id(p) for group in muon_params for p in group["params"]}
    rest = [p for p in params if id(p) not in of_muon]
    matrices = [p for p in rest if p.dim() >= 2]
    vectors = [p for p in rest if p.dim() < 2]
    adamw_params = [
        dict(params=matrices, weight_decay=config.weight_decay, peak_lr=config.learning_rate),
        dict(params=vectors, weight_decay=0.0, peak_lr=config.learning_rate),
    ]
    fused = device.type in ("cpu", "cuda")
    betas = (config.beta1, config.beta2)
    optimizers = [torch.optim.AdamW(adamw_params, lr=config.learning_rate, betas=betas, fused=fused)]
    if muon_params:
        optimizers.append(Muon(muon_params, dict(lr=config.muon_learning_rate, momentum=0.9)))
    return optimizers


def muon_groups(model, peak_lr):
    """Return Muon's parameter groups: the matrices of the blocks, grouped by their parts."""
    by_parts = {}
    kv = model.config.n_kv_head * model.config.head_size
    for block in model.transformer["h"]:
        for name, p in block.named_parameters():
            if p.dim() != 2:
                continue
            if name == "attn.c_attn.weight":
                parts = (len(p) - 2 * kv, kv, kv)  # q, k, v
            elif name == "mlp.c_fc.weight" and model.config.activation == "swiglu":
                parts = (len(p) // 2, len(p) // 2)  # gate, up
            else:
                parts = (len(p),)
            by_parts.setdefault(parts, []).append(p)
    return [dict(params=params, peak_lr=peak_lr, parts=parts) for parts, params in by_parts.items()]


def lr_multiplier(step, config):
    """Return the learning rate of a step as a fraction of its peak: a linear warm-up, a plateau, and a decay.

    The plateau is the fraction lr_stable_frac of the steps from warmup_iters to lr_decay_iters.
    """
    if not config.learning_rate:  # 0 turns Muon off too
        return 0.0
    floor = 0.1 if config.min_lr is None else config.min_lr / config.learning_rate
    if step < config.warmup_iters:
        return (step + 1) / (config.warmup_iters + 1)
    if config.lr_decay == "none" or config.lr_stable_frac >= 1:
        return 1.0
    remaining = max(1, (config.lr_decay_iters or config.max_iters) - config.warmup_iters)
    progress = ((step - config.warmup_iters) / remaining - config.lr_stable_frac) / (1 - config.lr_stable_frac)
    progress = min(1.0, max(0.0, progress))
    if config.lr_decay == "cosine":
        progress = 0.5 - 0.5 * math.cos(math.pi * progress)
    return floor + (1 - progress) * (1 - floor)


# -- a step ------------------------------------------------------------------------------------------------------------

COUNTERS = ("iter_num", "seconds", "num_unlogged", "best_val_loss", "evals_since_best")  # of TrainState, in checkpoints


class TrainState:
    """The weights, and everything else that changes from step to step."""

    def __init__(self, model, config, device, dtype, targets=None):
        self.model = model  # the GPT, for evaluation and checkpoints
        self.targets = targets  # a TrainingLoss of extras/targets.py, which adds to the cross-entropy of the GPT
        self.training_loss = targets or model  # what a step calls; main may compile or wrap it
        self.device = device
        self.dtype = dtype
        self.optimizers = configure_optimizers(self.training_loss.parameters(), model, config, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
        self.iter_num = 0  # steps done
        self.seconds = 0.0  # so far, including evaluations and saves
        self.num_unlogged = 0  # steps since the last row of log.csv
        self.loss_sum = torch.zeros((), device=device)  # of the losses of those steps
        self.best_val_loss = math.inf
        self.evals_since_best = 0

    def state_dict(self, with_optimizers):
        """Return the part of a checkpoint that changes from step to step, with or without what only a resume needs."""
        state = dict(model=self.model.state_dict())
        state |= {name: getattr(self, name) for name in COUNTERS}
        if with_optimizers:
            state["optimizer"] = [optimizer.state_dict() for optimizer in self.optimizers]
            state["scaler"] = self.scaler.state_dict()
            state["mtp"] = self.targets.mtp.state_dict() if self.targets else {}
            state["loss_sum"] = self.loss_sum
        return state

    def resume(self, saved):
        """Continue the run of a checkpoint. Its weights are already loaded."""
        for optimizer, state in zip(self.optimizers, saved["optimizer"], strict=True):
            # our own settings, because a resume may change --weight_decay or --beta2
            optimizer.load_state_dict(state | dict(param_groups=optimizer.state_dict()["param_groups"]))
        if self.targets:
            self.targets.mtp.load_state_dict(saved["mtp"])
        if self.scaler.is_enabled() and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])
        self.loss_sum.copy_(saved["loss_sum"])
        for name in COUNTERS:
            setattr(self, name, saved[name])


def train_step(config, data, state):
    """Run one optimizer step. Returns the norm of the gradients, a tensor, or None if we do not clip them."""
    # forward and backward
    micro_steps = config.gradient_accumulation_steps
    mean_loss = 0.0
    for micro_step in range(micro_steps):
        number = state.iter_num * micro_steps + micro_step
        x, y = get_batch(data.train, config, number, state.device)
        if config.dropout:  # like the batches, the masks depend only on the seed and the step
            sequence = np.random.SeedSequence((config.seed, state.iter_num, micro_step, RANK))
            torch.manual_seed(int(sequence.generate_state(1)[0]))
        if WORLD_SIZE > 1:  # only the last micro-step averages the gradients over the processes
            state.training_loss.require_backward_grad_sync = micro_step == micro_steps - 1
        with state.autocast:
            if state.targets:
                batch = partial(get_batch, config=config, number=number, device=state.device)
                total, loss = state.training_loss(x, y, *state.targets.inputs(state.iter_num, batch))
            else:
                total = loss = state.training_loss(x, y)[1]
        state.scaler.scale(total / micro_steps).backward()
        mean_loss = mean_loss + loss.detach() / micro_steps

    # clip
    grad_norm = None
    if config.grad_clip:
        for optimizer in state.optimizers:
            state.scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(state.training_loss.parameters(), config.grad_clip)

    # update
    for optimizer in state.optimizers:
        state.scaler.step(optimizer)
    state.scaler.update()
    state.training_loss.zero_grad(set_to_none=True)
    state.loss_sum += mean_loss  # it stays a tensor, because reading a number would wait for the device
    state.iter_num += 1
    state.num_unlogged += 1
    return grad_norm


# -- evaluation --------------------------------------------------------------------------------------------------------


def eval_windows(ids, block_size, num_tokens, at_once):
    """Yield the windows of an evaluation, arrays `(at_once or fewer, block_size + 1)`, which cover `ids` once.

    If that is more than num_tokens, we take fewer windows, spread evenly: the same ones in every evaluation.
    """
    starts = block_size * np.arange((len(ids) - 1) // block_size)
    rest = ids[len(starts) * block_size :]
    if num_tokens < len(ids) - 1 and len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, max(1, num_tokens // block_size)).astype(int)]
        rest = rest[:0]
    for i in range(0, len(starts), at_once):
        yield ids[starts[i : i + at_once, None] + np.arange(block_size + 1)]
    if len(rest) > 1:
        yield rest[None]


@torch.no_grad()
def evaluate(state, ids, num_tokens=math.inf, signals=()):
    """Return the mean cross-entropy in nats over `ids`, at most num_tokens. It draws no random numbers.

    The processes share the work. Returns None once any of them has received one of the signals.
    """
    model = state.model
    block_size = model.config.block_size
    at_once = min(2**13, 2**27 // model.config.vocab_size) // block_size  # so that the logits take at most 512 MB
    windows = eval_windows(ids, block_size, num_tokens, max(1, at_once))
    total = count = 0
    model.eval()
    bar = tqdm(total=min(num_tokens, len(ids) - 1), desc="evaluate", leave=False, position=0, delay=2, disable=NO_BAR)
    with state.autocast, bar:
        for window in itertools.islice(windows, RANK, None, WORLD_SIZE):
            if signals:
                break
            window = torch.from_numpy(window.astype(np.int64)).to(state.device)
            x, y = window[:, :-1], window[:, 1:]
            _, loss = model(x, y)
            total += loss.item() * y.numel()
            count += y.numel()
            bar.update(y.numel() * WORLD_SIZE)
    model.train()
    if stop_signal(signals):
        return None
    return all_reduce(total) / all_reduce(count)


# -- the folder of a run -----------------------------------------------------------------------------------------------

COLUMNS = ("step", "seconds", "train_loss", "val_loss", "lr", "tokens_per_s", "grad_norm")  # of log.csv


def begin_log(out_dir, state):
    """Begin log.csv, or for a resume, trim it to the step of the checkpoint. An earlier run moves out of the way."""
    log = out_dir / "log.csv"
    files = [log, out_dir / "ckpt.pt", out_dir / "last.pt"]
    if not state.iter_num and any(file.exists() for file in files[1:]):
        previous = next(p for n in itertools.count(1) if not (p := out_dir / f"previous-{n}").exists())
        previous.mkdir()
        for file in files:  # last.pt moves last, so an interrupted move is not taken for a new run
            if file.exists():
                file.rename(previous / file.name)
        print(f"moved the earlier run in {out_dir} to {previous} (--init_from resume would have continued it)")

    # A killed run has rows newer than its last.pt, which we will write again. A full disk can cut the last row short.
    rows = []
    newest = state.iter_num - state.num_unlogged
    if state.iter_num and log.exists():
        rows = log.read_bytes().splitlines(keepends=True)[1:]
    steps = [row.split(b",")[0] for row in rows]
    rows = [row for row, step in zip(rows, steps) if row.endswith(b"\n") and step.isdigit() and int(step) <= newest]
    temporary = out_dir / ".log.csv.tmp"
    temporary.write_bytes(b"".join([",".join(COLUMNS).encode() + b"\r\n", *rows]))
    temporary.replace(log)


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


def train(config, data, state, metadata, bar, signals):
    """Train until max_iters, a stop signal, or until patience runs out. Returns the number of the signal, or 0.

    metadata  the entries of a checkpoint that stay the same during the run
    bar       a tqdm bar; if it is disabled, because stderr is not a terminal, we print lines instead
    signals   a list from catch_signals
    """
    out_dir = Path(config.out_dir)
    row_began = time.perf_counter()  # when the steps of the next row of log.csv began
    row_step = state.iter_num
    began = row_began - state.seconds
    grad_norm = None

    while True:
        # As in nanoGPT, we evaluate, log and save before a step. An evaluation is saved, and what is saved is logged. A
        # stop signal only saves, and the resumed run begins with what that has put off.
        step = state.iter_num
        signum = stop_signal(signals)
        ending = step >= config.max_iters
        due = state.num_unlogged > 0
        evaluating = due and not signum and (ending or step % config.eval_interval == 0)
        saving = due and (signum or evaluating or step % config.save_interval == 0)
        logging = due and not signum and (saving or step % config.log_interval == 0)

        # learning rate: AdamW and Muon each have their own peak
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_multiplier(step, config)

        # evaluate
        val_loss = None
        if logging or saving:
            # every process keeps the mean over all of them, so that any number of processes can resume
            state.loss_sum.fill_(all_reduce(state.loss_sum.item()) / WORLD_SIZE)
            train_loss = state.loss_sum.item() / state.num_unlogged
            tokens_per_s = (step - row_step) * config.tokens_per_step() / (time.perf_counter() - row_began)
            newest_loss = train_loss
            if evaluating:
                val_loss = newest_loss = evaluate(state, data.val, config.eval_tokens(), signals)
                if val_loss is None:  # a signal has cut it short
                    continue
            elif saving:  # try the new weights, because train_loss is from before the last update
                newest_loss = evaluate(state, data.val[: config.block_size + 1])
            if not math.isfinite(train_loss + newest_loss):  # before broken weights replace a checkpoint
                hint = f"lower --learning_rate {config.learning_rate} (the checkpoints are from before that step)"
                sys.exit(f"train.py: stopped at step {step}: the loss is {train_loss + newest_loss}: {hint}")
        if evaluating:
            state.evals_since_best += 1
            if val_loss < state.best_val_loss:
                state.best_val_loss = val_loss
                state.evals_since_best = 0
        state.seconds = round(time.perf_counter() - began, 3)

        # log
        if logging:
            row = dict(step=step, seconds=state.seconds, train_loss=train_loss, val_loss=val_loss)
            row["lr"] = config.learning_rate * lr_multiplier(step - 1, config)  # of the last step
            row["tokens_per_s"] = round(tokens_per_s)
            row["grad_norm"] = None if grad_norm is None else grad_norm.item()
            log_row(out_dir, bar, row, state.best_val_loss)
            state.loss_sum.zero_()
            state.num_unlogged = 0

        # save
        if saving and RANK == 0:
            if evaluating and state.evals_since_best == 0:
                save_checkpoint(out_dir / "ckpt.pt", metadata | state.state_dict(with_optimizers=False))
            save_checkpoint(out_dir / "last.pt", metadata | state.state_dict(with_optimizers=True))

        if signum or ending or (config.patience and state.evals_since_best >= config.patience):
            return signum

        # step
        if state.num_unlogged == 0:  # the first of a row
            row_began = time.perf_counter()
            row_step = step
        grad_norm = train_step(config, data, state)
        bar.update()


# -- processes and devices ---------------------------------------------------------------------------------------------


def all_reduce(value, op=dist.ReduceOp.SUM):
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
            signal.signal(signal.SIGINT, signal.default_int_handler)  # so a notebook kernel survives

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # jobs that a shell script starts with & ignore Ctrl-C
            signal.signal(number, receive)
    return received


def stop_signal(signals):
    """Return the number of a signal that any process has received, or 0. All processes get the same answer."""
    return int(all_reduce(signals[0] if signals else 0, dist.ReduceOp.MAX))


def end_all_but_rank_0(exit_code=0):
    """Wait for all processes, and end all but rank 0."""
    if WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()
    if RANK:
        os._exit(exit_code)  # during a normal exit, a thread of gloo can abort the process


def device_of_process(name):
    """Return this process's torch.device for --device. With torchrun, each has a GPU of its own. Raises ValueError."""
    if WORLD_SIZE > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    device = pick_device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # because pinned memory and NCCL use PyTorch's current device
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


def initial_checkpoint(init_from, out_dir, meta):
    """Return the checkpoint to resume or to start from; None: from scratch. Raises OSError or ValueError."""
    if init_from == "scratch":
        return None
    path = out_dir / "last.pt" if init_from == "resume" else Path(init_from)
    if path.is_dir() and not (path / "config.json").exists():  # the folder of a run
        path = path / ("ckpt.pt" if (path / "ckpt.pt").exists() else "last.pt")
    if extras:
        return extras.load_checkpoint(path, meta)
    if meta or path.is_dir():
        raise ValueError(f"--init_from {path} {NEEDS_EXTRAS}")
    return load_checkpoint(path)


def check_vocabulary(data, data_dir, checkpoint, config):
    """Raise ValueError unless the Dataset has the vocabulary of the checkpoint, and for a resume, the same text."""
    path = checkpoint["path"]
    if config.init_from == "resume" and checkpoint["data_sha256"] != data.sha256:
        hint = f"point --data_dir at the original, or start a new run from its weights with --init_from {path.parent}"
        raise ValueError(f"the run used different text from {data_dir}: {hint}")
    if extras:  # other tokenizers can give the same ids
        same = extras.gives_ids_of(data.tokenizer, checkpoint, data.val)
    else:
        same = data.tokenizer.vocab == checkpoint.get("chars")
    if not same:
        what = f"the {data.tokenizer.unit} in {data_dir} are not those of the model in {path}"
        command = f"python data/prepare.py --input FILE --tokenizer {config.meta or path} --data_dir FOLDER"
        raise ValueError(f"{what}: encode your text with those ({command})")


def make_model(config, checkpoint, vocab_size):
    """Return the GPT to train: a new one, or that of a checkpoint. Raises ValueError."""
    try:
        model_config = GPTConfig(vocab_size=vocab_size, **config.model_args())
    except ValueError as error:  # it starts with the name of a field, which is also a flag
        raise ValueError(f"--{error}") from None
    torch.manual_seed(config.seed)
    if checkpoint:
        weights = dict(checkpoint["model"])
        positions = "transformer.wpe.weight"
        if positions in weights:  # a shorter context uses the first rows
            weights[positions] = weights[positions][: config.block_size].clone()
        return build_model(checkpoint | dict(model=weights, model_args=asdict(model_config)))
    model = GPT(model_config)
    if config.zero_init:
        model.zero_init()
    return model


def auxiliary_targets(flags, config, model, data, device):
    """Return the TrainingLoss of extras/targets.py for --ngram_targets and --mtp_weight, or None. Raises ValueError."""
    if config.eval_only or not (config.ngram_targets or config.mtp_weight):
        return None
    if not extras:
        if config.init_from == "resume" or flags.get("ngram_targets") or flags.get("mtp_weight"):
            raise ValueError(f"training with --ngram_targets or --mtp_weight {NEEDS_EXTRAS}")
        config.ngram_targets = config.mtp_weight = 0.0  # recorded, so a resume does the same
        print("training without auxiliary targets, which need the folder extras: the val loss ends 0.05 higher")
        return None
    return extras.TrainingLoss(model, config, data.train, device)


def make_run(flags):
    """Return (config, data, state, metadata), the latter for checkpoints. Raises ValueError or OSError."""
    # settings
    init_from = flags.get("init_from", TrainConfig.init_from)
    out_dir = Path(flags.get("out_dir", TrainConfig.out_dir))
    checkpoint = initial_checkpoint(init_from, out_dir, flags.get("meta"))
    on_gpu = torch.cuda.is_available() and flags.get("device", "auto") != "cpu"
    config = resolve_config(flags, checkpoint, on_gpu)
    device = device_of_process(config.device)
    # multiply-adds of a forward, for at least 1,024 tokens, because weights need memory even if few tokens use them
    per_token = config.n_layer * config.n_embd * (config.n_embd * (4 + 2 * config.mlp_ratio) + config.block_size)
    if max(1024, config.batch_size * config.block_size) * per_token > (2**41 if device.type == "cpu" else 2**48):
        size = " ".join(f"--{n} {getattr(config, n)}" for n in "n_layer n_embd mlp_ratio block_size batch_size".split())
        raise ValueError(f"{size}: a step takes minutes, or more memory than there is: lower one of them")
    if (config.eval_only or config.meta) and not checkpoint:
        raise ValueError("--eval_only and --meta need a model: pass it as --init_from")
    if config.batch_size % WORLD_SIZE and not config.eval_only:
        raise ValueError(f"--batch_size {config.batch_size} is not divisible by {WORLD_SIZE} processes")
    if WORLD_SIZE > 1:  # torchrun chooses
        config.threads = flags.get("threads")
    else:  # a resume uses the same number, because it changes how sums round
        config.threads = config.threads or torch.get_num_threads()
    torch.set_num_threads(config.threads or torch.get_num_threads())

    # text and weights
    data_dir = Path(config.data_dir or Path(__file__).resolve().parent / "data")
    data = load_dataset(data_dir, min_train=1 if config.eval_only else config.block_size + 1)
    vocab_size = len(data.tokenizer.vocab)
    if checkpoint:
        check_vocabulary(data, data_dir, checkpoint, config)
        vocab_size = checkpoint["model_args"]["vocab_size"]
    model = make_model(config, checkpoint, vocab_size).to(device)
    targets = auxiliary_targets(flags, config, model, data, device)
    state = TrainState(model, config, device, pick_dtype(config.dtype, device), targets)
    if init_from == "resume":
        state.resume(checkpoint)
        if not (out_dir / "ckpt.pt").exists():  # so the next evaluation saves new weights
            state.best_val_loss = math.inf
            state.evals_since_best = 0
    metadata = dict(model_args=asdict(model.config), config=asdict(config), data_sha256=data.sha256)
    metadata |= data.tokenizer.state_dict()
    metadata["special_tokens"] = checkpoint.get("special_tokens") if checkpoint else None
    if WORLD_SIZE > 1:  # waits until all processes have joined
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return config, data, state, metadata


def main():
    if extras:
        extras.share_cores()
    lock = nullcontext()
    flags = parse_flags()
    try:
        config, data, state, metadata = make_run(flags)
        out_dir = Path(config.out_dir)
        if RANK == 0 and not config.eval_only:
            try:
                out_dir.mkdir(parents=True, exist_ok=True)
                if extras:
                    lock = extras.lock_folder(out_dir)
                begin_log(out_dir, state)
            except OSError as error:
                hint = f"change --out_dir, or to resume, copy the folder and resume in the copy (cp -r {out_dir} COPY)"
                raise ValueError(f"cannot write to {out_dir} ({error.strerror}): {hint}") from None
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")
    if config.eval_only:
        num_tokens = min(config.eval_tokens() if "eval_iters" in flags else math.inf, len(data.val) - 1)
        loss = evaluate(state, data.val, num_tokens)
        end_all_but_rank_0()
        text = f"{num_tokens:,} {data.tokenizer.unit} of the val split"
        print(f"val loss {loss:.4f} (perplexity {math.exp(loss):.3f}): {config.init_from}, {text}")
        return

    num_params = sum(p.numel() for p in state.model.parameters())
    metadata["ngrams"] = None
    if extras and RANK == 0:  # for sample.py --draft: at most one n-gram of 8 or 12 bytes per 16 parameters of 4 bytes
        metadata["ngrams"] = extras.count_ngrams(data.train, state.model.config.vocab_size, num_params // 16)

    # train
    print(
        f"{'resuming' if state.iter_num else 'training'} preset {config.preset}, recipe {config.recipe}, on "
        f"{WORLD_SIZE} x {state.device} in {str(state.dtype).removeprefix('torch.')}: {config.n_layer} layers, "
        f"{config.n_head} heads, {config.n_embd} wide, context {config.block_size}, {num_params / 1e6:.2f}M "
        f"parameters; steps {state.iter_num}..{config.max_iters} of {config.tokens_per_step():,} {data.tokenizer.unit} "
        f"from {data.source}",
        flush=True,
    )
    if config.init_from not in ("scratch", "resume"):
        print(f"starting at step 0 with the weights of {config.init_from}, not its optimizer: resume continues a run")
        state.best_val_loss = evaluate(state, data.val, config.eval_tokens())  # the start may be the best of all
        if RANK == 0:
            save_checkpoint(out_dir / "ckpt.pt", metadata | state.state_dict(with_optimizers=False))
    if config.compile:
        state.training_loss = torch.compile(state.training_loss)
    if WORLD_SIZE > 1:
        state.training_loss = DistributedDataParallel(state.training_loss)
    first_step = state.iter_num
    ncols, nrows = shutil.get_terminal_size()  # a notebook's terminal has size 0, where tqdm shows no bar
    steps = dict(total=config.max_iters, initial=state.iter_num, unit="step")
    # a notebook keeps every update, so there is at most one a second
    with lock, tqdm(**steps, ncols=ncols, nrows=nrows, mininterval=1.0, disable=NO_BAR) as bar:
        signum = train(config, data, state, metadata, bar=bar, signals=catch_signals())
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from now on, Ctrl-C ends the process at once
    end_all_but_rank_0(128 + signum if signum else 0)

    # report
    done = f"step {state.iter_num} of {config.max_iters}"
    resume = f"--init_from resume --out_dir={shlex.quote(str(out_dir))}"
    if signum:
        print(f"stopped at {done} and saved; to continue: python train.py {resume}")
        sys.exit(128 + signum)
    if state.iter_num < config.max_iters:
        print(f"stopped at {done}: {state.evals_since_best} evaluations without a better val loss (--patience)")
    elif state.iter_num == first_step:
        print(f"finished at step {state.iter_num}; {resume} --max_iters {2 * state.iter_num} trains longer")
    print(f"best val loss {state.best_val_loss:.4f}: {out_dir / 'ckpt.pt'}; {state.seconds:.0f} s. A sample:\n")
    start = torch.tensor([data.tokenizer.encode(data.tokenizer.default_prompt)], device=state.device)
    print(data.tokenizer.decode(state.model.eval().generate(start, 300, seed=config.seed)[0].tolist()))


if __name__ == "__main__":
    if RANK:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout has no reconfigure
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # on Windows too, and for any file name
        if hasattr(signal, "SIGPIPE") and not TORCHRUN:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when `head` has read enough
    try:
        main()
    except KeyboardInterrupt:  # before the run has begun
        sys.exit(130)
    except torch.OutOfMemoryError:
        sys.exit("train.py: out of GPU memory: halve --batch_size and double --gradient_accumulation_steps")
