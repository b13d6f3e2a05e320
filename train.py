"""Train a character-level GPT on the text that data/prepare.py prepared.

    python train.py --eval_interval 500              a size that suits the device
    python train.py --preset nanogpt-cpu             nanoGPT's CPU setting
    python train.py --init_from resume               go on where the last run in --out_dir stopped
    python train.py --init_from out/hf               start from the weights of a Hugging Face folder
    torchrun --standalone --nproc_per_node=2 train.py        the same run on two processes

Writes out/ckpt.pt (best validation loss, what sample.py reads), out/last.pt (the latest, what a resume reads) and
out/log.csv. On a CPU the same command gives the same weights to the bit, interrupted and resumed or not.
"""

import argparse
import csv
import hashlib
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from checkpoint import build_model, load_checkpoint, save_checkpoint, write_atomically
from decode import count_ngrams
from hf import read_folder
from model import GPT, GPTConfig, eval_mode
from optim import configure_optimizers, get_lr
from sample import OneLineParser, number, path, pick_device

# -- the settings ------------------------------------------------------------------------------------------------------

# a size, its context and how many characters it is trained on; a recipe's own way through as many characters
SMALL = dict(n_layer=4, n_head=4, n_embd=128, modern=dict(mlp_ratio=4.2))
PRESETS = {
    "lecture": dict(n_layer=4, n_head=4, n_embd=64, block_size=32, batch_size=16, max_iters=5000),
    "nanogpt-cpu": dict(SMALL, block_size=64, batch_size=12, max_iters=2000),
    "cpu": dict(SMALL, block_size=256, batch_size=2, max_iters=3000),
    "gpu": dict(
        n_layer=6,
        n_head=6,
        n_embd=384,
        block_size=256,
        batch_size=64,
        max_iters=5000,
        dropout=0.2,
        modern=dict(max_iters=2000, dropout=0.3),
    ),
}
# a network and how it learns
RECIPES = {
    "nanogpt": dict(learning_rate=1e-3),
    "modern": dict(
        pos_emb="rope",
        qk_norm=True,
        activation="swiglu",
        zero_init=True,
        optimizer="muon",
        learning_rate=1e-2,
        beta2=0.95,
        weight_decay=0.0,
        grad_clip=0.0,
        warmup_iters=0,
        lr_decay="linear",
        lr_level=0.3,
        min_lr=0.0,
    ),
}


def boolean(text):
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


positive = number(int, f"[1, {2**31})")
# name: (default, type or choices, help); where a preset names a flag, the preset's value is the default
FLAGS = {
    "preset": (None, ("auto", *PRESETS), "the size and length to start from; auto: gpu on a GPU, else cpu"),
    "recipe": ("modern", tuple(RECIPES), "how the network is made and trained: nanoGPT's way, or this kit's"),
    "init_from": (
        "scratch",
        path,
        "scratch; resume, from last.pt in --out_dir; or a Hugging Face folder to start from",
    ),
    "data_dir": (None, path, "where data/prepare.py wrote (default: data, beside this script)"),
    "out_dir": ("out", path, "where checkpoints and log.csv go"),
    "eval_interval": (250, positive, "steps between evaluations on the whole val split; changes no step of the run"),
    "save_interval": (250, positive, "steps between writes of last.pt, besides those at evaluations"),
    "log_interval": (20, positive, "steps between lines of progress and rows of log.csv"),
    # model
    "n_layer": (4, positive, "blocks"),
    "n_head": (4, positive, "query heads a block"),
    "n_kv_head": (None, positive, "key/value heads a block: fewer than n_head is grouped-query attention"),
    "n_embd": (128, positive, "width"),
    "block_size": (256, positive, "context length in characters"),
    "dropout": (0.0, number(float, "[0, 1)"), "dropout probability"),
    "bias": (False, boolean, "biases in Linears and LayerNorms"),
    "mlp_ratio": (4, number(float, "[0, inf)"), "width of the MLP's hidden layer, in n_embd"),
    "activation": ("gelu", ("gelu", "gelu_tanh", "swiglu"), "exact GELU, GPT-2's tanh GELU, or SwiGLU"),
    "pos_emb": ("learned", ("learned", "rope"), "a table of positions, or rotary embeddings"),
    "norm_first": (True, boolean, "False: post-LN"),
    "tie_weights": (True, boolean, "lm_head shares the embedding's matrix"),
    "qk_norm": (False, boolean, "LayerNorm on queries and keys"),
    "zero_init": (False, boolean, "begin with blocks that add nothing, instead of GPT-2's initialization"),
    # optimization
    "optimizer": ("adamw", ("adamw", "muon"), "muon: for the matrices of the blocks, and adamw for the rest"),
    "batch_size": (12, positive, "sequences a micro-step"),
    "gradient_accumulation_steps": (1, positive, "micro-steps a step"),
    "max_iters": (2000, positive, "steps in all"),
    "learning_rate": (1e-3, number(float, "[0, inf)"), "peak learning rate, AdamW's"),
    "muon_learning_rate": (0.01, number(float, "[0, inf)"), "Muon's"),
    "warmup_iters": (100, number(int, "[0, inf)"), "steps of linear warm-up"),
    "lr_level": (0.0, number(float, "[0, 1)"), "share of the steps after that at the peak"),
    "lr_decay": ("cosine", ("cosine", "linear"), "how the learning rate goes down to min_lr then"),
    "lr_decay_iters": (None, positive, "the step at which it arrives there (default: max_iters)"),
    "min_lr": (None, number(float, "[0, inf)"), "learning rate at the end (default: learning_rate / 10)"),
    "weight_decay": (0.1, number(float, "[0, inf)"), "AdamW's, on matrices and embeddings"),
    "beta1": (0.9, number(float, "[0, 1)"), "AdamW's"),
    "beta2": (0.99, number(float, "[0, 1)"), "AdamW's"),
    "grad_clip": (1.0, number(float, "[0, inf)"), "largest norm of the gradient; 0: no clipping"),
    "patience": (None, positive, "stop after so many evaluations without a better val loss"),
    # system
    "seed": (1337, number(int, f"[0, {2**63})"), "of the weights, the batches and dropout"),
    "device": ("auto", str, "cpu, cuda, cuda:1, mps; auto: cuda where there is one"),
    "dtype": ("auto", ("auto", "float32", "bfloat16", "float16"), "auto: bfloat16 on a GPU that has it, else float16"),
    "compile": (False, boolean, "torch.compile the training step"),
    "plot": (False, boolean, "draw loss.png in --out_dir at the end (matplotlib)"),
}
MODEL_FLAGS = [field.name for field in fields(GPTConfig) if field.name in FLAGS]


def parse_args(argv=None):
    """(parser, flags): only the flags that were given, so that presets and checkpoints can fill in the rest."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sources = PRESETS | RECIPES | {f"{key} {r}": p[r] for r in RECIPES for key, p in PRESETS.items() if r in p}
    for name, (default, kind, text) in FLAGS.items():
        special = ", ".join(f"{source[name]} {key}" for key, source in sources.items() if name in source)
        default = ", ".join(filter(None, ("" if default is None else str(default), special)))
        text += f" (default: {default})" if default else ""
        options = (
            dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind, metavar=name.split("_")[-1].upper())
        )
        if kind is boolean:
            options |= dict(nargs="?", const=True, metavar="True|False")
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **options)
    return parser, vars(parser.parse_args(argv))


# -- data --------------------------------------------------------------------------------------------------------------


def load_data(data_dir, block_size):
    """(chars, {"train": ids, "val": ids}, {"train": sha256, "val": sha256}); ids are uint16 arrays on disk.

    Raises ValueError if the files are missing, damaged, or too short for a context of block_size.
    """
    try:
        meta = json.loads((data_dir / "meta.json").read_text(encoding="utf-8"))
        chars, recorded = meta["chars"], dict(meta["sha256"])
        data, hashes = {}, {}
        for split in ("train", "val"):
            hashes[split] = hashlib.sha256((data_dir / f"{split}.bin").read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise ValueError(f"no data: {error.filename} is missing; run python data/prepare.py first") from None
    except OSError as error:
        raise ValueError(f"cannot read the data: {error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise ValueError(f"{data_dir / 'meta.json'} is damaged: run python data/prepare.py again") from None
    for split in ("train", "val"):
        if hashes[split] != recorded.get(split):
            raise ValueError(f"{data_dir / split}.bin is not what data/prepare.py wrote: run it again")
    for split, least in (("train", block_size + 1), ("val", 2)):
        size = (data_dir / f"{split}.bin").stat().st_size // 2
        if size < least:
            raise ValueError(
                f"the {split} text has {size} characters, too short for a context of {block_size}: "
                f"it needs {least}; choose a smaller --block_size or a longer text"
            )
        data[split] = np.memmap(data_dir / f"{split}.bin", dtype="<u2", mode="r")
        if not isinstance(chars, str) or data[split].max() >= len(chars):
            raise ValueError(
                f"{data_dir / 'meta.json'} lacks characters of the {split} text: run data/prepare.py again"
            )
    return chars, data, hashes


@lru_cache(maxsize=2)
def window_starts(length, block_size, seed, epoch):
    """Where an epoch's windows begin: the text is cut at a random offset into windows that share no character to be
    predicted, in random order. So few characters are enough for all of the text to be seen before any comes again."""
    rng = np.random.default_rng((seed, epoch))
    offset = rng.integers(min(block_size, length - block_size))
    return offset + block_size * rng.permutation((length - 1 - offset) // block_size)


def get_batch(ids, seed, number, batch_size, block_size, device, rank=0, world=1):
    """x and y `(batch_size / world, block_size)`: this rank's rows of the run's batch of that number, which is a pure
    function of it and the seed, so that there is nothing to save or restore, and any number of processes sees the same.
    """
    an_epoch, starts = (len(ids) - 1) // block_size, []
    for i in range(number * batch_size + rank, (number + 1) * batch_size, world):
        windows = window_starts(len(ids), block_size, seed, i // an_epoch)
        starts.append(windows[i % an_epoch % len(windows)])
    windows = torch.from_numpy(ids[np.array(starts)[:, None] + np.arange(block_size + 1)].astype(np.int64))
    if device.type == "cuda":
        windows = windows.pin_memory().to(device, non_blocking=True)
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def evaluate(model, ids, block_size, device, autocast):
    """Mean cross-entropy over every predicted character of `ids`, once: windows of block_size, the last one short."""
    total = 0.0
    rows = max(1, 2**13 // block_size)
    whole = (len(ids) - 1) // block_size * block_size
    edges = [*range(0, whole, rows * block_size), whole]
    with eval_mode(model), autocast:
        for begin, end in zip(edges, [*edges[1:], len(ids) - 1]):
            if end > begin:
                window = torch.from_numpy(ids[begin : end + 1].astype(np.int64)).to(device)
                width = block_size if end <= whole else end - begin
                _, loss = model(window[:-1].view(-1, width), window[1:].view(-1, width))
                total += loss.item() * (end - begin)
    return total / (len(ids) - 1)


# -- the run in out_dir ------------------------------------------------------------------------------------------------


def lock(out_dir):
    """Hold out_dir for this process alone, by a lock of the operating system, which dies with the process.

    Returns the open file that must be kept. Raises ValueError if another process holds it.
    """
    file = open(out_dir / ".lock", "ab")  # noqa: SIM115
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"another run is at work in {out_dir}: stop it, or choose another --out_dir") from None
    return file


def load_run(out_dir, flags):
    """(config, checkpoint) of the run in out_dir, with the given flags overriding its settings.

    Raises ValueError for a checkpoint that holds no run, and for flags that a running run cannot change.
    """
    ckpt = load_checkpoint(out_dir / "last.pt")
    missing = {"optimizer", "iter_num", "best_val_loss", "stale", "config", "chars", "scaler"} - set(ckpt)
    if missing:
        raise ValueError(f"{out_dir / 'last.pt'} cannot be resumed: no {', '.join(sorted(missing))} in it")
    lacking = [name for name in (*FLAGS, "data_sha256") if name not in ckpt["config"]]
    if lacking:
        raise ValueError(f"{out_dir / 'last.pt'} is of another version of this kit: it has no {lacking[0]}; start anew")
    for name, (_, kind, _) in FLAGS.items():
        value = ckpt["config"][name]
        try:
            valid = value is None or (value in kind if isinstance(kind, tuple) else kind(str(value)) == value)
        except (ValueError, argparse.ArgumentTypeError):
            valid = False
        if not valid or ckpt["model_args"].get(name, value) != value:
            raise ValueError(f"{out_dir / 'last.pt'} is damaged: its {name} is {value!r}")
    keep(f"the run in {out_dir}", ckpt["config"], flags, ("preset", "recipe", "optimizer", *MODEL_FLAGS))
    config = ckpt["config"] | flags
    ckpt["model_args"]["dropout"] = config["dropout"]
    return config, ckpt


def load_folder(folder, config, flags):
    """(config, checkpoint) of a run that starts from the weights in a Hugging Face folder: the network is theirs, and
    the dropout the run's. Raises ValueError for a folder that cannot be read, and for flags of another network."""
    ckpt = read_folder(folder)
    network = {name: ckpt["model_args"][name] for name in MODEL_FLAGS if name != "dropout"}
    keep(f"the model in {folder}", network, flags, network)
    ckpt["model_args"]["dropout"] = config["dropout"]
    return config | network, ckpt


def keep(what, settings, flags, names):
    """Raise ValueError if a flag of these names would change what the settings of an earlier run or model are."""
    for name in names:
        if name != "dropout" and flags.get(name, settings[name]) != settings[name]:
            raise ValueError(f"{what} has {name} {settings[name]}; that cannot become {flags[name]}")


def set_aside(out_dir):
    """Move an earlier run in out_dir to out_dir/previous, in the place of the one there: it can be sampled from and
    resumed."""
    names, previous = ("last.pt", "ckpt.pt", "log.csv"), out_dir / "previous"
    if any((out_dir / name).is_file() for name in names[:2]):  # a log alone is of a run that saved nothing
        previous.mkdir(exist_ok=True)
        for name in names:
            (previous / name).unlink(missing_ok=True)  # nothing of another run beside it
            if (out_dir / name).is_file():
                os.replace(out_dir / name, previous / name)
        print(f"{out_dir} held a run: it is in {out_dir / 'previous'} now (--init_from resume would have gone on)")


LOG_FIELDS = ("step", "chars", "seconds", "train_loss", "val_loss", "lr", "tokens_per_s")


def trim_log(path, step):
    """Cut log.csv back to whole rows up to `step`, what a resumed run has behind it.

    Returns the characters and seconds of the last of them: where the counts go on.
    """
    header, rows = ",".join(LOG_FIELDS) + "\r\n", []
    if path.exists():
        with open(path, encoding="utf-8", errors="replace", newline="") as f:
            whole = re.compile(r"\d+,\d+,[\d.]+(,[^,]*){4}\r\n")
            rows = [line for line in f if whole.fullmatch(line) and int(line.split(",")[0]) <= step]
    write_atomically(path, "".join([header, *rows]).encode())
    _, chars, seconds, *_ = rows[-1].split(",") if rows else ("0", "0", "0")
    return int(chars), float(seconds)


def plot(out_dir):
    """Draw out_dir/loss.png from log.csv: losses over characters and over time, beside the previous run's if it is
    there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained", facecolor="white")
    for axes, x in zip(figure.subplots(1, 2, sharey=True), ("chars", "seconds")):
        for folder, color in ((out_dir / "previous", "tab:gray"), (out_dir, "tab:blue")):
            if not all((folder / name).exists() for name in ("log.csv", "last.pt")):
                continue
            with open(folder / "log.csv", encoding="utf-8", newline="") as f:
                rows = [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(f)]
            config = load_checkpoint(folder / "last.pt")["config"]
            name = f"{config['preset']}, {config['recipe']}"
            scored = [row for row in rows if not math.isnan(row["val_loss"])]
            axes.plot(
                [r[x] for r in rows], [r["train_loss"] for r in rows], color=color, alpha=0.35, label=f"{name}: train"
            )
            axes.plot(
                [r[x] for r in scored], [r["val_loss"] for r in scored], "o-", ms=3, color=color, label=f"{name}: val"
            )
            best = min(scored, key=lambda row: row["val_loss"], default=None)
            if best:
                axes.plot(best[x], best["val_loss"], "*", ms=13, color=color)
                axes.annotate(
                    f"{best['val_loss']:.3f}", (best[x], best["val_loss"]), (-2, -13), textcoords="offset points"
                )
        axes.set(xlabel={"chars": "characters of training text", "seconds": "seconds, evaluations included"}[x])
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="loss, nats a character")
    figure.axes[1].legend()
    figure.savefig(out_dir / "loss.png", dpi=110)


def matmul_peak(device, dtype):
    """FLOP/s of the fastest square matrix product, measured now: what training is compared with."""
    best = 0.0
    for n in (512, 1024) if device.type == "cpu" else (4096, 8192):
        a = torch.randn(n, n, device=device, dtype=dtype)
        for _ in range(8):
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            (a @ a)[0, 0].item()  # waits for the device
            best = max(best, 2 * n**3 / (time.perf_counter() - began))
    return best


# -- more than one process ---------------------------------------------------------------------------------------------


def over_ranks(value, op=dist.ReduceOp.SUM):
    """A number, reduced over all processes that torchrun has started; by itself where there is one."""
    if not dist.is_initialized():
        return value
    value = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(value, op)
    return value.item()


# -- the run -----------------------------------------------------------------------------------------------------------


def pick_dtype(name, device):
    """The forward pass's dtype: bfloat16 only where the chip has it (is_bf16_supported() alone counts emulation)."""
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if name == "float16" and device.type != "cuda":
        raise ValueError(f"--dtype float16 trains on CUDA only, not on {device.type}: use float32 or bfloat16")
    return getattr(torch, name)


def compiled(model):
    """torch.compile(model), or, with one line that says why, the model itself where no compiler works."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=next(model.parameters()).device))
    except Exception as error:  # a missing compiler shows in many ways
        print(f"--compile: no working compiler ({str(error).splitlines()[0]}): training uncompiled", file=sys.stderr)
        return model
    print("--compile: compiling the training step; the first steps take a while", file=sys.stderr)
    return torch.compile(model)


def main():
    parser, flags = parse_args()
    if flags.get("preset") == "auto":
        del flags["preset"]
    # set by torchrun; every process runs this whole function, and rank 0 alone prints, evaluates and writes
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def fail(message):
        sys.exit(f"train.py: {message}" if rank == 0 else 1)

    def pick(name):
        many = world > 1 and name in ("auto", "cuda") and torch.cuda.is_available()
        return pick_device(f"cuda:{os.environ['LOCAL_RANK']}" if many else name)

    out_dir = Path(flags.get("out_dir", FLAGS["out_dir"][0]))
    start = ckpt = held = None  # start: the weights to start from; ckpt: if that is a run to go on with
    try:
        if flags.get("init_from") == "resume":
            held = lock(out_dir) if rank == 0 and out_dir.is_dir() else None
            config, ckpt = load_run(out_dir, flags)
            start = ckpt
            device = pick(config["device"])
        else:
            config = {name: default for name, (default, _, _) in FLAGS.items()} | flags
            device = pick(config["device"])
            config["preset"] = config["preset"] or ("gpu" if device.type == "cuda" else "cpu")
            recipe = flags.get("recipe", FLAGS["recipe"][0])
            preset = PRESETS[config["preset"]]
            preset = {name: value for name, value in preset.items() if name in FLAGS} | preset.get(recipe, {})
            config |= RECIPES[recipe] | preset | flags
            if config["init_from"] != "scratch":
                config, start = load_folder(config["init_from"], config, flags)
        if config["batch_size"] % world:
            raise ValueError(f"--batch_size {config['batch_size']} cannot be shared by {world} processes: no multiple")
        if config["plot"] and not importlib.util.find_spec("matplotlib"):
            raise ValueError("--plot needs matplotlib: pip install matplotlib")
        dtype = pick_dtype(config["dtype"], device)
        data_dir = Path(config["data_dir"] or Path(__file__).resolve().parent / "data")
        chars, data, hashes = load_data(data_dir, config["block_size"])
        if start and start["chars"] != chars:
            source = f"the run in {out_dir}" if ckpt else f"the model in {config['init_from']}"
            raise ValueError(f"{data_dir} holds other characters than {source} was trained on")
        if ckpt and ckpt["config"]["data_sha256"] != hashes:
            raise ValueError(f"the text in {data_dir} has changed since the run in {out_dir} began")
        model = build_model(start) if start else None
    except (ValueError, FileNotFoundError) as error:
        fail(error)
    try:
        model_config = GPTConfig(vocab_size=len(chars), **{name: config[name] for name in MODEL_FLAGS})
    except ValueError as error:
        parser.error(f"--{error}")
    config["data_sha256"] = hashes
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(config["seed"])
    try:
        raw_model = model or GPT(model_config)
        if not start and config["zero_init"]:
            raw_model.zero_init()
        raw_model.to(device)
    except (RuntimeError, MemoryError) as error:
        fail(f"a network of this size does not fit: {str(error).strip().splitlines()[0]}")
    optimizers = configure_optimizers(raw_model, config, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
    step, best_val_loss, stale = 0, math.inf, 0  # stale: evaluations since the best one
    if ckpt:
        try:
            for optimizer, state in zip(optimizers, ckpt["optimizer"], strict=True):
                chosen = [
                    {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
                ]
                optimizer.load_state_dict(state)
                for group, settings in zip(optimizer.param_groups, chosen):
                    group |= settings  # flags override what the checkpoint had
            if scaler.is_enabled() and ckpt["scaler"]:
                scaler.load_state_dict(ckpt["scaler"])
            step, best_val_loss, stale = ckpt["iter_num"], float(ckpt["best_val_loss"]), ckpt["stale"]
            if not (isinstance(step, int) and step >= 0 and isinstance(stale, int)):
                raise ValueError(f"iter_num={step!r}, stale={stale!r}")
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            fail(f"{out_dir / 'last.pt'} does not hold the state of this run ({error!r}): start anew")
    first_step, max_iters = step, config["max_iters"]
    if step >= max_iters:
        print(f"the run in {out_dir} is at step {step} of {max_iters} already: --max_iters {2 * step} would go on")
        return
    start = ckpt = None  # free the memory
    # what sample.py --draft ngram guesses from: 8 bytes each (12 if there are many characters), for 64 of weights
    ngrams = count_ngrams(data["train"], len(chars), sum(p.numel() for p in raw_model.parameters()) // 16)
    model = compiled(raw_model) if config["compile"] else raw_model
    if world > 1:
        model = DistributedDataParallel(model)

    chars_before = seconds_before = 0
    if rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
        try:
            held = held or lock(out_dir)
        except ValueError as error:
            fail(error)
        if not first_step:
            set_aside(out_dir)
        chars_before, seconds_before = trim_log(out_dir / "log.csv", step)
    micro_steps, batch_size, block_size = (
        config[name] for name in ("gradient_accumulation_steps", "batch_size", "block_size")
    )
    chars_a_step = micro_steps * batch_size * block_size
    print(
        f"{'resuming' if first_step else 'training'} preset {config['preset']}, recipe {config['recipe']}, on {device}"
        f"{f' and {world - 1} more' if world > 1 else ''} in {str(dtype)[6:]}: "
        f"{config['n_layer']} layers, {config['n_head']} heads, {config['n_embd']} wide, context {block_size}, "
        f"{sum(p.numel() for p in raw_model.parameters()) / 1e6:.2f}M parameters; "
        f"steps {first_step}..{max_iters} of {chars_a_step:,} characters",
        flush=True,
    )

    def save(name):
        if rank:
            return
        with torch.no_grad(), eval_mode(raw_model), autocast:
            _, loss = raw_model(x, y)  # the last update may have broken the weights, and no loss has shown it yet
        check_finite(loss.item())
        state = dict(model=raw_model.state_dict(), model_args=asdict(model_config), config=config, chars=chars)
        state |= dict(optimizer=[optimizer.state_dict() for optimizer in optimizers], scaler=scaler.state_dict())
        state |= dict(iter_num=step, best_val_loss=best_val_loss, stale=stale, ngrams=ngrams)
        save_checkpoint(out_dir / name, state)

    def check_finite(loss):
        if not math.isfinite(loss):
            bar.close()
            fail(
                f"stopped at step {step}: the loss is {loss}; as a rule a smaller --learning_rate "
                f"helps (it was {config['learning_rate']}). The checkpoints in {out_dir} are from before that"
            )

    signals = []  # the first one lets the step finish and saves; a second one ends the process at once

    def on_signal(signum, frame):
        signals.append(signum)
        if world == 1:  # torchrun passes on what a terminal has sent to all already
            signal.signal(signum, signal.SIG_DFL)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    # a lost terminal: Windows has no such signal, and nohup ignores it on purpose
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_signal)

    on_terminal = sys.stderr.isatty() and rank == 0
    columns, rows = shutil.get_terminal_size((100, 24))  # a terminal of size 0, as notebooks have, shows no bar
    bar = tqdm(
        total=max_iters,
        initial=step,
        unit="step",
        disable=not on_terminal,
        ncols=columns,
        nrows=rows,
        mininterval=1.0,  # a notebook keeps every update
    )
    began = mark = time.perf_counter()  # mark: since when the training steps of the next row have run
    loss_sum, loss_steps, val_loss, stopping = torch.zeros((), device=device), 0, None, 0
    rates = []  # characters a second in training, of each row
    while step < max_iters and not stopping:
        lr = get_lr(step, config)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * (lr / config["learning_rate"] if lr else 0.0)
        for micro_step in range(micro_steps):
            number = step * micro_steps + micro_step
            x, y = get_batch(data["train"], config["seed"], number, batch_size, block_size, device, rank, world)
            if config["dropout"]:  # its masks are a function of the place in the run, too
                torch.manual_seed(
                    int(np.random.SeedSequence((config["seed"], step, micro_step, rank)).generate_state(1)[0])
                )
            if world > 1:  # gradients are averaged over the ranks in the last backward only
                model.require_backward_grad_sync = micro_step == micro_steps - 1
            with autocast:
                _, loss = model(x, y)
            loss = loss / micro_steps
            scaler.scale(loss).backward()
            loss_sum += loss.detach()
        if config["grad_clip"]:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), config["grad_clip"])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        raw_model.zero_grad(set_to_none=True)
        step, loss_steps = step + 1, loss_steps + 1
        bar.update()

        evaluating = step % config["eval_interval"] == 0 or step == max_iters
        stopping = int(over_ranks(signals[0] if signals else 0, dist.ReduceOp.MAX))
        saving = evaluating or stopping or step % config["save_interval"] == 0
        if not saving and step % config["log_interval"]:
            continue

        row = dict(step=step, chars=chars_before + (step - first_step) * chars_a_step, lr=lr)
        row["train_loss"] = over_ranks(loss_sum.item()) / world / loss_steps
        row["tokens_per_s"] = round(loss_steps * chars_a_step / (time.perf_counter() - mark))
        rates.append(row["tokens_per_s"])
        check_finite(row["train_loss"])  # a sum stays NaN or infinite once it is
        if evaluating:
            val_loss = 0.0 if rank else evaluate(raw_model, data["val"], block_size, device, autocast)
            val_loss = row["val_loss"] = over_ranks(val_loss)
            check_finite(val_loss)
            stale += 1
            if val_loss < best_val_loss:
                best_val_loss, stale = val_loss, 0
                save("ckpt.pt")
        if saving:
            save("last.pt")
        row["seconds"] = round(seconds_before + time.perf_counter() - began, 3)
        if rank == 0:
            with open(out_dir / "log.csv", "a", encoding="utf-8", newline="") as f:
                csv.DictWriter(f, LOG_FIELDS).writerow(row)
        shown = f"loss {row['train_loss']:.4f}, val {'-' if val_loss is None else f'{val_loss:.4f}'}"
        shown += f", {row['tokens_per_s']:,} tokens/s"
        bar.set_postfix_str(shown)
        if not on_terminal:
            left = (time.perf_counter() - began) / (step - first_step) * (max_iters - step)
            print(f"step {step}/{max_iters}: {shown}, {left:.0f} s left", flush=True)
        loss_sum.zero_()
        loss_steps, mark = 0, time.perf_counter()
        if config["patience"] and stale >= config["patience"]:
            break
    bar.close()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank:
        # not through the interpreter's own end: a thread of gloo that still lets go of a tensor then aborts the process
        os._exit(128 + stopping if stopping else 0)
    if config["plot"]:
        plot(out_dir)

    if stopping:
        command = f"python train.py --init_from resume --out_dir {shlex.quote(str(out_dir))}"
        print(f"stopped at step {step} of {max_iters} and saved; to go on: {command}")
        sys.exit(128 + stopping)
    if step < max_iters:
        print(
            f"stopped at step {step} of {max_iters}: {stale} evaluations have brought no better val loss (--patience)"
        )
    seconds, peak = time.perf_counter() - began, matmul_peak(device, dtype)
    # forward and backward: 6 a weight in a matrix; in attention 12 a layer, channel and position, as nanoGPT counts
    flops = 6 * sum(p.numel() for name, p in raw_model.named_parameters() if p.dim() == 2 and "wpe" not in name)
    flops += 12 * config["n_layer"] * config["n_embd"] * block_size
    rate = statistics.median(rates)
    print(
        f"{rate:,.0f} tokens/s, {rate * flops / 1e9:,.0f} GFLOP/s: "
        f"{rate * flops / peak / world:.0%} of the {peak / 1e9:,.0f} of a matrix product here"
    )
    print(f"best val loss {best_val_loss:.4f}: {out_dir / 'ckpt.pt'}; {seconds:.0f} s. A sample:\n")
    start = torch.full((1, 1), max(chars.find("\n"), 0), device=device)
    print("".join(chars[i] for i in raw_model.generate(start, 300, seed=config["seed"])[0].tolist()))


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # whatever the terminal's code page
    try:
        main()
    except OSError as error:
        sys.exit(
            f"train.py: cannot write {error.filename or 'its output'}: {error.strerror}; older checkpoints are whole"
        )
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
