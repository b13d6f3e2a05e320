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

import csv
import hashlib
import importlib
import itertools
import json
import math
import os
import shlex
import shutil
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import lru_cache, partial
from pathlib import Path

try:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm
except ModuleNotFoundError as error:
    sys.exit(f"train.py: {error}: activate the environment, or install it as README.md says")

from model import GPT, CharTokenizer, GPTConfig, build_model, extras, load_checkpoint, pick_device, save_checkpoint

cli = extras("cli")  # hints, signals, locks, one line for a full disk; None without the folder

# torchrun starts several processes. Each runs all of this file, but only rank 0 prints and writes files.
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
RANK = int(os.environ["RANK"]) if TORCHRUN else 0
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if TORCHRUN else 1
NO_BAR = True if RANK else None  # None: tqdm shows a bar on a terminal, and nothing elsewhere


def all_reduce(value, op=dist.ReduceOp.SUM):
    """Return the sum, or another reduction, of a number over all processes."""
    if WORLD_SIZE == 1:
        return value
    value = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(value, op)
    return value.item()


# -- settings ----------------------------------------------------------------------------------------------------------

# A preset changes size and length, a recipe the network, the loss and the optimizer. If both change a setting, the
# preset wins, and the command line wins over everything. The modern recipe has no table of positions, so its MLP is
# wider: neither recipe should win by being bigger.
PRESETS = {
    "cpu": {},
    "laptop": dict(max_iters=7000),
    "nanogpt-cpu": dict(block_size=64, batch_size=12, max_iters=2000),
    "lecture": dict(n_embd=64, block_size=32, mlp_ratio=4, batch_size=16, max_iters=5000),
    "gpu": dict(n_layer=6, n_head=6, n_embd=384, mlp_ratio=4, batch_size=64, max_iters=2000, dropout=0.3),
    # nanoGPT's settings for GPT-2 on Shakespeare, which win over those of the recipe
    "finetune": dict(batch_size=1, gradient_accumulation_steps=32, max_iters=20, eval_interval=5, log_interval=1)
    | dict(optimizer="adamw", learning_rate=3e-5, beta2=0.95, weight_decay=0.1, grad_clip=1.0)
    | dict(warmup_iters=0, lr_decay="none"),
}
RECIPES = {
    "modern": dict(loss="extras.targets"),  # with n-grams, and tokens further ahead
    "nanogpt": dict(pos_emb="learned", qk_norm=False, activation="gelu", mlp_ratio=4, zero_init=False)
    | dict(loss="cross_entropy", optimizer="adamw", learning_rate=1e-3, beta2=0.99, weight_decay=0.1, grad_clip=1.0)
    | dict(warmup_iters=100, lr_decay="cosine", lr_stable_frac=0.0, min_lr=1e-4),
}
EVAL_TOKENS = 2**17  # val tokens per evaluation, unless --eval_iters is set

FLAGS = {  # name: (default, help, choices). The type of a flag is that of its default
    "preset": ("auto", "model size and run length; auto picks finetune, gpu or cpu", "auto", *PRESETS),
    "recipe": ("modern", "network, loss and optimizer: ours, or nanoGPT's", *RECIPES),
    "init_from": ("scratch", "scratch, resume (last.pt in --out_dir), or a checkpoint, run or model folder"),
    "meta": ("", "for a nanoGPT checkpoint in --init_from: its meta.pkl"),
    "data_dir": ("", "folder that data/prepare.py wrote; by default data, next to train.py"),
    "out_dir": ("out", "folder for checkpoints and log.csv"),
    "eval_only": (False, "print the val loss of the model in --init_from, and stop"),
    "eval_interval": (250, "steps between evaluations"),
    "eval_iters": (0, f"batches per evaluation; 0: up to {EVAL_TOKENS:,} tokens"),
    "save_interval": (250, "steps between writes of last.pt; an evaluation writes it too"),
    "log_interval": (20, "steps between lines of progress and rows of log.csv"),
    "patience": (0, "stop after N evaluations without a better val loss; 0: never"),
    # model
    "n_layer": (4, "number of blocks"),
    "n_head": (4, "query heads per block"),
    "n_kv_head": (0, "key/value heads; fewer than n_head is grouped-query attention; 0: n_head"),
    "n_embd": (128, "embedding width"),
    "block_size": (256, "context length in tokens"),
    "bias": (False, "biases in Linear and LayerNorm layers"),
    "mlp_ratio": (4.2, "width of the MLP's hidden layer, in units of n_embd"),
    "activation": ("swiglu", "of the MLP: swiglu, gelu (exact) or gelu_tanh"),
    "pos_emb": ("rope", "learned position embeddings, or rotary ones", "learned", "rope"),
    "qk_norm": (True, "LayerNorm on queries and keys"),
    "zero_init": (True, "every pre-LN block starts as the identity"),
    # optimization
    "loss": ("cross_entropy", "cross_entropy, or the module of another TrainingLoss, such as extras.targets"),
    "ngram_targets": (1.0, "of extras.targets: weight of n-grams in the targets at first; halves by the end"),
    "mtp_weight": (0.3, "of extras.targets: weight of the loss for the three tokens after the next; falls to 0"),
    "optimizer": ("muon", "for the matrices of the blocks; the rest uses adamw", "adamw", "muon"),
    "batch_size": (2, "sequences per micro-step, over all processes"),
    "gradient_accumulation_steps": (1, "micro-steps per step"),
    "max_iters": (3200, "total steps"),
    "learning_rate": (1e-2, "peak learning rate of AdamW"),
    "muon_learning_rate": (0.01, "peak learning rate of Muon"),
    "warmup_iters": (0, "steps of linear warm-up"),
    "lr_stable_frac": (0.3, "fraction of the steps after warm-up at the peak"),
    "lr_decay": ("linear", "shape of the decay; none: constant", "cosine", "linear", "none"),
    "lr_decay_iters": (0, "step at which the decay ends; 0: max_iters"),
    "min_lr": (0.0, "learning rate of AdamW at the end of the decay; that of Muon falls to the same fraction"),
    "weight_decay": (0.0, "of AdamW, on matrices and embeddings; muon has none"),
    "beta1": (0.9, "AdamW's beta1"),
    "beta2": (0.95, "AdamW's beta2"),
    "grad_clip": (0.0, "clip the norm of the gradient to this; 0: no clipping"),
    # system
    "seed": (1337, "seed of weights, batches and dropout"),
    "device": ("auto", "cpu, cuda, cuda:1, mps; auto: cuda if there is one, else cpu"),
    "dtype": ("auto", "of the forward; auto: half precision on a GPU", "auto", "float32", "bfloat16", "float16"),
    "threads": (0, "CPU threads, kept by a resume; 0: PyTorch's choice"),
    "compile": (False, "torch.compile the training step"),
}
for field in fields(GPTConfig):  # those without a row above are flags, too
    if field.name != "vocab_size":
        FLAGS.setdefault(field.name, (field.default, "see GPTConfig in model.py"))
AT_LEAST_1 = "batch_size gradient_accumulation_steps max_iters eval_interval save_interval log_interval".split()


def boolean(text):
    return ("false", "0", "true", "1").index(text.lower()) > 1  # argparse turns the ValueError into one line


def parse_flags():
    """Return {name: value} of the flags on the command line. make_config fills in the rest."""
    plain = dict(description=__doc__, usage=SUPPRESS, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = cli.Parser(__doc__) if cli else ArgumentParser(**plain)  # the former also gives hints
    for name, (default, help, *choices) in FLAGS.items():
        options = dict(type=type(default), choices=choices or None)
        if type(default) is bool:  # a flag that may stand alone
            options = dict(type=boolean, nargs="?", const=True, metavar="True|False")
        help = f"{help} (default: {RECIPES['modern'].get(name, default)})"
        parser.add_argument(f"--{name}", default=SUPPRESS, help=help, **options)
    flags = vars(parser.parse_args())
    for name, value in flags.items():
        least = 1 if name in AT_LEAST_1 else 0
        if isinstance(value, (int, float)) and not least <= value < 2**63:
            parser.error(f"--{name} {value} is not a number from {least} to 2**63 - 1")
    return flags


def make_config(flags, checkpoint=None, on_gpu=False):
    """Return all settings of a run, as attributes. Raises ValueError.

    Later ones win: defaults, recipe, preset (auto: finetune for a Hugging Face folder, else gpu if on_gpu, else cpu),
    checkpoint (its network, and if we resume, all its settings), flags.
    """
    automatic = {"preset": "auto", "n_kv_head": 0}  # as if the flag were absent
    flags = {name: value for name, value in flags.items() if value != automatic.get(name)}
    resuming = flags.get("init_from") == "resume"
    saved = dict(checkpoint["config"]) if resuming else {}
    saved.pop("out_dir", None)  # the folder may have a new name
    if WORLD_SIZE > 1:  # torchrun sets its own number
        saved.pop("threads", None)
    # settings that a flag may repeat, but not change
    fixed = {name: saved[name] for name in ("preset", "recipe", "loss", "mtp_weight", "optimizer") if name in saved}
    if checkpoint:
        network = asdict(GPTConfig(**checkpoint["model_args"]))  # files from elsewhere have only some of the fields
        fixed |= {name: value for name, value in network.items() if name in FLAGS and name != "dropout"}
    for name in sorted(flags.keys() & fixed.keys()):
        shrinks = name == "block_size" and not resuming and flags[name] < fixed[name]
        if flags[name] != fixed[name] and not shrinks:
            what = f"{checkpoint['path']} ({name} {fixed[name]})"
            raise ValueError(f"--{name} {flags[name]} conflicts with {what}: leave it out")

    preset = "gpu" if on_gpu else "cpu"
    if checkpoint and checkpoint["path"].is_dir():  # of Hugging Face; the path of a run is that of its file
        preset = "finetune"
    given = dict(preset=preset, recipe="modern") | fixed | saved | flags
    if checkpoint:
        given.setdefault("loss", "cross_entropy")  # a trained model knows more than n-grams do
    defaults = {name: default for name, (default, *_) in FLAGS.items()}
    config = Namespace(**defaults | RECIPES[given["recipe"]] | PRESETS[given["preset"]] | given)
    if not checkpoint and (config.preset == "finetune" or config.eval_only or config.meta):
        raise ValueError("--preset finetune, --eval_only and --meta need a trained model: pass it as --init_from")
    if config.loss == "cross_entropy" and (flags.get("ngram_targets") or flags.get("mtp_weight")):
        raise ValueError("--ngram_targets and --mtp_weight need --loss extras.targets, which reads them")
    if flags.get("min_lr", 0.0) > config.learning_rate:
        raise ValueError(f"--min_lr {config.min_lr} is above --learning_rate {config.learning_rate}: lower it")
    if config.batch_size % WORLD_SIZE and not config.eval_only:
        raise ValueError(f"--batch_size {config.batch_size} is not divisible by {WORLD_SIZE} processes")
    return config


# -- the data ----------------------------------------------------------------------------------------------------------


def load_dataset(data_dir, min_train=1):
    """Return what data/prepare.py wrote: tokenizer, train, val (arrays of token ids) and meta, a dict.

    Raises ValueError, also if train has fewer than min_train tokens.
    """
    try:
        if (data_dir / "train.bin").exists() and not (data_dir / "meta.json").exists():
            meta = extras("formats.nanogpt", "nanoGPT's data").read_data(data_dir)
        else:
            meta = json.loads((data_dir / "meta.json").read_bytes())
        if "chars" in meta:
            tokenizer = CharTokenizer(meta["chars"])
        else:
            tokenizer = extras("formats.tokenizer", "text in other tokens").tokenizer_from_state(meta)
        # the arrays may be larger than memory; if prepare.py replaces one while we train, our mapping keeps the old one
        dtype = "<u2" if len(tokenizer.vocab) <= 2**16 else "<u4"
        train, val = (np.asarray(np.memmap(data_dir / name, dtype, "r")) for name in ("train.bin", "val.bin"))
        vocabulary = str(meta.get("chars") or meta.get("tokenizer") or meta["vocab_size"]).encode()
        for name, content in (("train", train), ("val", val), ("vocabulary", vocabulary)):
            digest = hashlib.sha256(content).hexdigest()
            if meta["sha256"].get(name, digest) != digest:  # older folders have no hash of the vocabulary
                raise ValueError(f"{name} has changed")
        largest = max(train.max(), val.max())
        if largest >= len(tokenizer.vocab):
            raise ValueError(f"the vocabulary has {len(tokenizer.vocab)} tokens, but the largest id is {largest}")
    except Exception as error:  # damaged files can raise anything
        hint = f"run python data/prepare.py --data_dir {data_dir} (--input FILE for your own text)"
        raise ValueError(f"no usable data in {data_dir} ({error}): {hint}, or pass a different --data_dir") from None
    if len(train) < min_train or len(val) < 2:
        lengths = f"{len(train)} {tokenizer.unit} for training and {len(val)} for validation"
        raise ValueError(f"{lengths}, but we need {min_train} and 2: use longer text or a smaller --block_size")
    return tokenizer, train, val, meta


@lru_cache(maxsize=2)  # a batch can span two epochs
def window_starts(length, block_size, seed, epoch):
    """Return where each window of an epoch starts, in random order.

    The offset of the first window is random too. An epoch predicts every token once, except a few at either end.
    """
    rng = np.random.default_rng((seed, epoch))
    offset = rng.integers(min(block_size, length - block_size))
    return offset + block_size * rng.permutation((length - 1 - offset) // block_size)


def get_batch(ids, config, number, device, rank=RANK, world_size=WORLD_SIZE):
    """Return x, y and where, `(batch_size / world_size, block_size)` int64: this rank's rows of batch `number`.

    y is the next token of each x, and `where` the position of each x in the text. All depend only on the seed and the
    number, so resuming needs no saved random state.
    """
    windows_per_epoch = (len(ids) - 1) // config.block_size
    starts = []
    for i in range(number * config.batch_size + rank, (number + 1) * config.batch_size, world_size):
        epoch = window_starts(len(ids), config.block_size, config.seed, i // windows_per_epoch)
        # if the offset leaves one window fewer, the epoch repeats its first window
        starts.append(epoch[i % windows_per_epoch % len(epoch)])
    where = np.array(starts)[:, None] + np.arange(config.block_size + 1)
    batch = torch.from_numpy(np.stack((ids[where], where)).astype(np.int64))
    if device.type == "cuda":  # pinned memory lets a GPU compute while it copies
        batch = batch.pin_memory()
    windows, where = batch.to(device, non_blocking=device.type == "cuda")
    return windows[:, :-1], windows[:, 1:], where[:, :-1]


# -- the loss ----------------------------------------------------------------------------------------------------------


class TrainingLoss(nn.Module):
    """What a step minimizes: cross-entropy. --loss can name a module with a TrainingLoss of its own.

    It keeps the GPT as `model`, and may have weights of its own, and `saved`, a dict to add to every checkpoint.
    """

    def __init__(self, model, config, ids):
        """model: the GPT. config: all settings of the run. ids: the text to train on, an array `(N,)`."""
        super().__init__()
        self.model = model

    def forward(self, x, y, where, left):
        """Return the loss to minimize and the loss to report, 0-d tensors.

        x, y, where  (B, T) int64: tokens, the next token of each, and the position of each in the text
        left         the fraction of the run that is left, from 1 to 0: a float64 tensor, because torch.compile would
                     recompile the step for every new number
        """
        loss = self.model(x, y)[1]
        return loss, loss.detach()


def loss_class(name, flags):
    """Return the class TrainingLoss that --loss names. Raises ValueError.

    A file must not choose which code runs, so a module of your own is imported only if a flag names it.
    """
    if name == "cross_entropy":
        return TrainingLoss
    if name == "extras.targets":
        return extras("targets", f"--loss {name}").TrainingLoss
    if name != flags.get("loss"):
        raise ValueError(f"the run was trained with --loss {name}: pass it again if you trust that module")
    try:
        return importlib.import_module(name).TrainingLoss
    except (AttributeError, ModuleNotFoundError, TypeError) as error:
        raise ValueError(f"--loss {name}: {error}: for mine.py with a class TrainingLoss, type --loss mine") from None


@torch.no_grad()
def evaluate(model, ids, num_tokens, autocast):
    """Return the mean cross-entropy in nats over `ids`, cut into windows. It draws no random numbers.

    num_tokens  if there are more, we take fewer windows, spread evenly: the same ones in every evaluation
    The processes share the work.
    """
    T = model.config.block_size
    at_once = max(1, min(2**13, 2**27 // model.config.vocab_size) // T)  # so that the logits take at most 512 MB
    starts = np.arange(0, len(ids) - 1, T)
    num_whole = (len(ids) - 1) // T  # the last window may be shorter
    if num_tokens < len(ids) - 1 and num_whole:
        starts = starts[np.linspace(0, num_whole - 1, max(1, num_tokens // T)).astype(int)]
    batches = range(RANK * at_once, len(starts), WORLD_SIZE * at_once)
    total = count = 0
    model.eval()
    for i in tqdm(batches, "evaluate", leave=False, position=0, delay=2, disable=NO_BAR):
        where = starts[i : i + at_once, None] + np.arange(T + 1)
        windows = ids[where.clip(max=len(ids) - 1)].astype(np.int64)
        targets = np.where(where[:, 1:] < len(ids), windows[:, 1:], -1)  # the loss ignores -1
        x, y = torch.from_numpy(np.stack((windows[:, :-1], targets))).to(model.device)
        with autocast:
            loss = model(x, y)[1]
        num_targets = (y >= 0).sum().item()
        total += loss.item() * num_targets
        count += num_targets
    model.train()
    return all_reduce(total) / all_reduce(count)


# -- the optimizers ----------------------------------------------------------------------------------------------------

# Muon updates the matrices of the blocks, and AdamW everything else. Muon (Jordan et al. 2024,
# kellerjordan.github.io/posts/muon) makes the update of a matrix nearly orthogonal: it moves all singular values
# towards 1, so that directions with small gradients are learned as fast as those with large ones. A polynomial maps a
# singular value s to a s + b s^3 + c s^5. Applied in turn, these three bring every s from 0.002 to 1 to between 0.19
# and 1.87, which is near enough: the first steps of the Polar Express (Amsel et al. 2025, arXiv:2505.16932).
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

    params  those of a TrainingLoss: of its model, a GPT, and perhaps more
    Weight decay applies to AdamW's matrices and embeddings, but not to biases and norms, and not to Muon.
    """
    muon = {}  # {parts: matrices of the blocks}
    kv = model.config.n_kv_head * model.config.head_size
    for name, p in model.transformer["h"].named_parameters():
        if config.optimizer != "muon" or p.dim() != 2:
            continue
        parts = (len(p),)
        if name.endswith("attn.c_attn.weight"):
            parts = (len(p) - 2 * kv, kv, kv)  # q, k, v
        elif name.endswith("mlp.c_fc.weight") and model.config.activation == "swiglu":
            parts = (len(p) // 2, len(p) // 2)  # gate, up
        muon.setdefault(parts, []).append(p)
    of_muon = {id(p) for group in muon.values() for p in group}
    rest = [p for p in params if id(p) not in of_muon]
    groups = [
        dict(params=[p for p in rest if p.dim() >= 2], weight_decay=config.weight_decay, peak_lr=config.learning_rate),
        dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0, peak_lr=config.learning_rate),
    ]
    betas = (config.beta1, config.beta2)
    optimizers = [torch.optim.AdamW(groups, betas=betas, fused=device.type in ("cpu", "cuda"))]
    if muon:
        groups = [dict(params=group, parts=parts, peak_lr=config.muon_learning_rate) for parts, group in muon.items()]
        optimizers.append(Muon(groups, dict(lr=config.muon_learning_rate, momentum=0.9)))
    return optimizers


def lr_multiplier(step, config):
    """Return the learning rate of a step as a fraction of its peak: a linear warm-up, a plateau, and a decay.

    The plateau is the fraction lr_stable_frac of the steps from warmup_iters to lr_decay_iters.
    """
    if not config.learning_rate:  # 0 turns Muon off too
        return 0.0
    floor = min(1.0, config.min_lr / config.learning_rate)  # a recipe's min_lr may exceed the peak
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


# -- a run -------------------------------------------------------------------------------------------------------------


def set_up_device(config):
    """Set the threads and the device. Returns the device, and the dtype of the forward, a name.

    Raises ValueError, also for a model that is too large to train here.
    """
    if WORLD_SIZE == 1:  # saved for a resume, because it changes how sums round
        config.threads = config.threads or torch.get_num_threads()
    if config.threads:
        torch.set_num_threads(min(config.threads, 1024))  # OpenMP crashes with too many
    own_gpu = WORLD_SIZE > 1 and config.device in ("auto", "cuda") and torch.cuda.is_available()
    device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}" if own_gpu else config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # because pinned memory and NCCL use PyTorch's current device
    # multiply-adds of a forward, for at least 1,024 tokens, because weights need memory even if few tokens use them
    per_token = config.n_layer * config.n_embd * (config.n_embd * (4 + 2 * config.mlp_ratio) + config.block_size)
    if max(1024, config.batch_size * config.block_size) * per_token > (2**41 if device.type == "cpu" else 2**48):
        names = ("n_layer", "n_embd", "mlp_ratio", "block_size", "batch_size")
        size = " ".join(f"--{name} {getattr(config, name)}" for name in names)
        raise ValueError(f"{size}: a step takes minutes, or more memory than there is: lower one of them")
    dtype = config.dtype
    if dtype == "float16" and device.type != "cuda":
        raise ValueError(f"--dtype float16 needs CUDA to train, not {device.type}: use float32 or bfloat16")
    if dtype == "auto":
        dtype = "float32"
        if device.type == "cuda":  # a T4 only emulates bfloat16, which is several times slower than float16
            dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return device, dtype


def read_checkpoint(init_from, out_dir, meta=None):
    """Return the checkpoint to resume or to start from; None: from scratch. Raises OSError or ValueError."""
    if init_from == "scratch":
        return None
    path = out_dir / "last.pt" if init_from == "resume" else Path(init_from)
    formats = extras("formats.checkpoint", "--meta" if meta else None)  # it reads more formats than model.py
    checkpoint = formats.load_checkpoint(path, meta) if formats else load_checkpoint(path)
    if init_from == "resume" and not {"config", "loss", "scaler", "seconds"} <= checkpoint.keys():
        raise ValueError(f"{path} is not a last.pt of this train.py: start a new run from it")
    return checkpoint


def make_model(config, checkpoint, tokenizer, ids):
    """Return the GPT to train: a new one, or that of a checkpoint. Raises ValueError.

    tokenizer, ids  of the data; the model of a checkpoint must use the same tokens
    """
    torch.manual_seed(config.seed)
    if not checkpoint:
        network = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
        model = GPT(GPTConfig(vocab_size=len(tokenizer.vocab), **network))
        if config.zero_init:
            model.zero_init()
        return model

    formats = extras("formats.tokenizer")  # two tokenizers may give the same ids
    known = formats.gives_ids_of(tokenizer, checkpoint, ids) if formats else tokenizer.vocab == checkpoint.get("chars")
    if not known:
        hint = f"python data/prepare.py --input FILE --tokenizer {config.meta or checkpoint['path']} --data_dir FOLDER"
        raise ValueError(f"the {tokenizer.unit} of the text are not those of the model in {checkpoint['path']}: {hint}")
    model_args = checkpoint["model_args"] | dict(block_size=config.block_size, dropout=config.dropout)
    GPTConfig(**model_args)  # raises ValueError for a wrong flag, before build_model would blame the file
    weights = dict(checkpoint["model"])
    positions = "transformer.wpe.weight"
    if positions in weights:  # a shorter context uses the first rows
        weights[positions] = weights[positions][: config.block_size].clone()
    return build_model(checkpoint | dict(model=weights, model_args=model_args))


def resume(checkpoint, training_loss, optimizers, scaler):
    """Restore what last.pt has besides the model's weights. Raises ValueError or RuntimeError if it does not fit."""
    training_loss.load_state_dict(training_loss.model.state_dict(prefix="model.") | checkpoint["loss"])
    for optimizer, state in zip(optimizers, checkpoint["optimizer"], strict=True):
        # our own settings, because a resume may change --weight_decay or --beta2
        optimizer.load_state_dict(state | dict(param_groups=optimizer.state_dict()["param_groups"]))
        for p, tensors in optimizer.state.items():  # a fused optimizer trusts them
            if any(x.shape not in ((), p.shape) for x in tensors.values()):
                raise ValueError(f"{checkpoint['path']} is damaged: the state of an optimizer does not fit the weights")
    if checkpoint["scaler"]:
        scaler.load_state_dict(checkpoint["scaler"])


def begin_folder(out_dir, newest=-1):
    """Begin log.csv, and move an earlier run out of the way. Returns a lock of out_dir to close at the end.

    newest  for a resume, the last step of log.csv to keep
    Raises OSError if the folder cannot be written, and ValueError if another process has the lock.
    """
    log = out_dir / "log.csv"
    files = [log, out_dir / "ckpt.pt", out_dir / "last.pt"]
    out_dir.mkdir(parents=True, exist_ok=True)
    lock = cli.lock_folder(out_dir) if cli else nullcontext()
    if newest < 0 and any(file.exists() for file in files[1:]):
        previous = next(p for n in itertools.count(1) if not (p := out_dir / f"previous-{n}").exists())
        previous.mkdir()
        for file in filter(Path.exists, files):  # last.pt is the last one: until it moves, the run can be resumed
            file.rename(previous / file.name)
        print(f"moved the earlier run in {out_dir} to {previous} (--init_from resume would have continued it)")

    # The log of a killed run may go beyond its last.pt; we repeat those steps. A full disk can cut the last row short.
    kept = [b"step,seconds,train_loss,val_loss,lr,tokens_per_s,grad_norm\r\n"]
    for row in log.read_bytes().splitlines(keepends=True) if log.exists() else []:
        step = row.split(b",")[0]
        if row.endswith(b"\n") and step.isdigit() and int(step) <= newest:
            kept.append(row)
    (out_dir / ".log.csv").write_bytes(b"".join(kept))
    os.replace(out_dir / ".log.csv", log)
    return lock


def train_model(run, config, training_loss, optimizers, scaler, ids, evaluate_model, content, autocast):
    """Take steps until the run is complete or a signal stops it; log, evaluate and save. Returns the signal, or 0.

    run             how far it is, updated in place
    ids             the text to train on, an array `(N,)`
    evaluate_model  a function that returns the val loss
    content         what every checkpoint holds; each save adds run
    """
    out_dir = Path(config.out_dir)
    device = training_loss.model.device
    forward = torch.compile(training_loss) if config.compile else training_loss
    if WORLD_SIZE > 1:
        forward = DistributedDataParallel(forward)
    signals = cli.catch_signals() if cli else []  # Ctrl-C and SIGTERM finish and save the step
    stop = 0  # the signal that ends the run
    # a notebook's terminal has size 0, where tqdm shows no bar by itself, and keeps every update
    terminal = shutil.get_terminal_size()
    fits = dict(ncols=terminal.columns, nrows=terminal.lines, mininterval=1)
    bar = tqdm(total=config.max_iters, initial=run.iter_num, unit="step", disable=NO_BAR, **fits)
    row_began = time.perf_counter()  # when the steps of the next row of log.csv began
    began = row_began - run.seconds
    losses = []  # of those steps; tensors, because reading a number would wait for the device
    last_val = ""  # the latest val loss, for the line of progress
    params = list(training_loss.parameters())
    micro_steps = config.gradient_accumulation_steps
    decay_iters = config.lr_decay_iters or config.max_iters
    patience = config.patience or math.inf
    with bar:
        while run.iter_num < config.max_iters and run.evals_since_best < patience and not stop:
            # forward and backward
            left = torch.tensor(max(0.0, 1 - run.iter_num / decay_iters), dtype=torch.float64)
            for micro_step in range(micro_steps):
                x, y, where = get_batch(ids, config, run.iter_num * micro_steps + micro_step, device)
                if config.dropout:  # like the batches, the masks depend only on the seed and the step
                    entropy = (config.seed, run.iter_num, micro_step, RANK)
                    torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
                if WORLD_SIZE > 1:  # only the last micro-step averages the gradients over the processes
                    forward.require_backward_grad_sync = micro_step == micro_steps - 1
                with autocast:
                    total, loss = forward(x, y, where, left)
                scaler.scale(total / micro_steps).backward()
                losses.append(loss)

            # update
            if config.grad_clip:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                grad_norm = nn.utils.clip_grad_norm_(params, config.grad_clip)
            multiplier = lr_multiplier(run.iter_num, config)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * multiplier  # AdamW and Muon each have their own peak
                scaler.step(optimizer)
            scaler.update()
            training_loss.zero_grad(set_to_none=True)
            run.iter_num += 1
            bar.update()

            # is anything due? All processes must agree
            stop = int(all_reduce(signals[0] if signals else 0, dist.ReduceOp.MAX))
            evaluating = run.iter_num == config.max_iters or run.iter_num % config.eval_interval == 0
            saving = stop or evaluating or run.iter_num % config.save_interval == 0
            if not saving and run.iter_num % config.log_interval:
                continue

            # evaluate
            train_loss = all_reduce(torch.stack(losses).mean().item()) / WORLD_SIZE
            speed = len(losses) * config.batch_size * config.block_size / (time.perf_counter() - row_began)
            val_loss = evaluate_model() if evaluating else None
            finite = math.isfinite(train_loss + (val_loss or 0.0)) and all(p.isfinite().all() for p in params)
            if not finite:  # stop before broken weights replace a checkpoint
                hint = "lower --learning_rate or --muon_learning_rate (the checkpoints are from before that step)"
                sys.exit(f"train.py: stopped at step {run.iter_num}: the loss or a weight is not finite: {hint}")
            if evaluating:
                run.evals_since_best = 0 if val_loss < run.best_val_loss else run.evals_since_best + 1
                run.best_val_loss = min(val_loss, run.best_val_loss)
                last_val = f"val {val_loss:.4f}, "
            run.seconds = round(time.perf_counter() - began, 3)
            losses.clear()
            if RANK:  # only rank 0 writes
                continue

            # log
            norm = grad_norm.item() if config.grad_clip else None
            lr = config.learning_rate * multiplier
            with open(out_dir / "log.csv", "a", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow((run.iter_num, run.seconds, train_loss, val_loss, lr, round(speed), norm))
            text = f"loss {train_loss:.4f}, {last_val}{speed:,.0f} tokens/s"
            bar.set_postfix_str(text)
            if bar.disable:
                seconds_left = run.seconds / run.iter_num * (config.max_iters - run.iter_num)
                print(f"step {run.iter_num}/{config.max_iters}: {text}, {seconds_left:.0f} s left", flush=True)

            # save
            checkpoint = content | vars(run)
            if evaluating and run.evals_since_best == 0:
                save_checkpoint(out_dir / "ckpt.pt", checkpoint)
            if saving:
                more = dict(optimizer=[optimizer.state_dict() for optimizer in optimizers], scaler=scaler.state_dict())
                more["loss"] = {n: p for n, p in training_loss.state_dict().items() if not n.startswith("model.")}
                save_checkpoint(out_dir / "last.pt", checkpoint | more)
            row_began = time.perf_counter()
    return stop


def main():
    """Train, or only evaluate. Returns the exit code."""
    if RANK:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    flags = parse_flags()
    init_from = flags.get("init_from", "scratch")
    resuming = init_from == "resume"
    out_dir = Path(flags.get("out_dir", "out"))
    try:  # an error here is a user's mistake, and one line; a later one is a bug, with a traceback
        # settings and device
        checkpoint = read_checkpoint(init_from, out_dir, flags.get("meta"))
        config = make_config(flags, checkpoint, torch.cuda.is_available() and flags.get("device") != "cpu")
        device, dtype = set_up_device(config)
        autocast = nullcontext() if dtype == "float32" else torch.autocast(device.type, getattr(torch, dtype))

        # the text and the model
        data_dir = Path(config.data_dir or Path(__file__).resolve().parent / "data")
        tokenizer, train, val, meta = load_dataset(data_dir, min_train=1 if config.eval_only else config.block_size + 1)
        if resuming and not checkpoint["data_sha256"].items() <= meta["sha256"].items():
            hint = f"pass its --data_dir, or begin a new run with --init_from {out_dir}"
            raise ValueError(f"the run used different text from {data_dir}: {hint}")
        model = make_model(config, checkpoint, tokenizer, val).to(device)
        if WORLD_SIZE > 1:  # waits until all processes have joined
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        eval_tokens = config.eval_iters * config.batch_size * config.block_size or EVAL_TOKENS
        if config.eval_only and "eval_iters" not in flags:
            eval_tokens = len(val)
        evaluate_model = partial(evaluate, model, val, eval_tokens, autocast)
        if config.eval_only:
            loss = evaluate_model()
            perplexity = torch.tensor(loss).exp()  # math.exp raises an error where it is infinite
            text = f"{min(eval_tokens, len(val) - 1):,} {tokenizer.unit} of the val split"
            print(f"val loss {loss:.4f} (perplexity {perplexity:.3f}): {init_from}, {text}")
            return 0

        # the loss and the optimizers
        asked = flags.get("loss") or flags.get("ngram_targets") or flags.get("mtp_weight")
        if config.loss == "extras.targets" and not (cli or resuming or asked):
            print("training without auxiliary targets, which need the folder extras: the val loss will end 0.04 higher")
            config.loss = "cross_entropy"
        training_loss = loss_class(config.loss, flags)(model, config, train).to(device)
        optimizers = configure_optimizers(list(training_loss.parameters()), model, config, device)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")

        # how far the run is: steps done, their time with evaluations and saves, and its evaluations
        run = Namespace(iter_num=0, seconds=0.0, best_val_loss=math.inf, evals_since_best=0)
        if resuming:
            resume(checkpoint, training_loss, optimizers, scaler)
            vars(run).update({name: checkpoint[name] for name in vars(run)})
            if not (out_dir / "ckpt.pt").exists():  # then the next evaluation writes it again
                run.best_val_loss = math.inf
                run.evals_since_best = 0
        lock = begin_folder(out_dir, run.iter_num if resuming else -1) if RANK == 0 else nullcontext()
    except (ValueError, OSError) as error:
        sys.exit(f"train.py: {error}")

    # what every checkpoint holds. The tensors are live, so each save writes their current values
    content = getattr(training_loss, "saved", {}) | tokenizer.state_dict() | dict(data_sha256=meta["sha256"])
    content |= dict(model=model.state_dict(), model_args=asdict(model.config), config=vars(config))
    content["special_tokens"] = checkpoint.get("special_tokens") if checkpoint else None

    tokens_per_step = config.gradient_accumulation_steps * config.batch_size * config.block_size
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters"
    how = f"preset {config.preset}, recipe {config.recipe}, {size}, on {WORLD_SIZE} x {device} in {dtype}"
    steps = f"steps {run.iter_num}..{config.max_iters} of {tokens_per_step:,} {tokenizer.unit}"
    print(f"{'resuming' if resuming else 'training'} {how}: {steps} from {meta.get('source')}", flush=True)
    if checkpoint and not resuming:
        print(f"starting at step 0 with the weights of {init_from}, but a new optimizer (resume continues a run)")
        run.best_val_loss = evaluate_model()  # the starting weights may remain the best
        if RANK == 0:
            save_checkpoint(out_dir / "ckpt.pt", content | vars(run))

    with lock:
        stop = train_model(run, config, training_loss, optimizers, scaler, train, evaluate_model, content, autocast)

    # report
    again = f"python train.py --init_from resume --out_dir={shlex.quote(str(out_dir))}"
    if stop and run.iter_num < config.max_iters:
        print(f"stopped at step {run.iter_num} of {config.max_iters} and saved; to continue: {again}")
        return 128 + stop
    if run.iter_num < config.max_iters:
        why = f"{run.evals_since_best} evaluations without a better val loss (--patience)"
        print(f"stopped at step {run.iter_num}: {why}")
    elif resuming:
        print(f"finished at step {run.iter_num}; to train longer: {again} --max_iters {2 * run.iter_num}")
    print(f"best val loss {run.best_val_loss:.4f}: {out_dir / 'ckpt.pt'}; {run.seconds:.0f} s. A sample:\n")
    start = torch.tensor([tokenizer.encode(tokenizer.default_prompt)], device=device)
    print(tokenizer.decode(model.eval().generate(start, 300, seed=config.seed)[0].tolist()))
    return 0


if __name__ == "__main__":
    code = cli.run_script(main) if cli else main()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if RANK:
        os._exit(code)  # during a normal exit, a thread of gloo can abort the process
    if code:
        sys.exit(code)
