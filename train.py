"""Train a character-level GPT on the text that data/prepare.py prepared.

    python train.py --eval_interval 500              a size that suits the device
    python train.py --preset nanogpt-cpu             nanoGPT's CPU setting
    python train.py --init_from resume               go on where the last run in --out_dir stopped

Writes out/ckpt.pt (best validation loss, what sample.py reads), out/last.pt (the latest, what a resume reads) and
out/log.csv. On a CPU the same command gives the same weights to the bit, interrupted and resumed or not.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from checkpoint import build_model, load_checkpoint, save_checkpoint, write_atomically
from decode import count_ngrams
from model import GPT, GPTConfig, eval_mode
from sample import OneLineParser, number, path, pick_device

# -- the settings ------------------------------------------------------------------------------------------------------

PRESETS = {
    "lecture": dict(
        n_layer=4, n_head=4, n_embd=64, block_size=32, batch_size=16, max_iters=5000, learning_rate=1e-3, dropout=0.0
    ),
    "nanogpt-cpu": dict(
        n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, max_iters=2000, learning_rate=3e-3, dropout=0.0
    ),
    "cpu": dict(
        n_layer=4,
        n_head=4,
        n_embd=128,
        block_size=256,
        batch_size=6,
        max_iters=2000,
        learning_rate=3e-3,
        dropout=0.0,
        pos_emb="rope",
    ),
    "gpu": dict(
        n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, max_iters=5000, learning_rate=1e-3, dropout=0.2
    ),
}


def boolean(text):
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1")


positive = number(int, f"[1, {2**31})")
# name: (default, type or choices, help); where a preset names a flag, the preset's value is the default
FLAGS = {
    "preset": (None, ("auto", *PRESETS), "the size and schedule to start from; auto: gpu on a GPU, else cpu"),
    "init_from": ("scratch", ("scratch", "resume"), "start anew, or go on from last.pt in --out_dir"),
    "data_dir": (None, path, "where data/prepare.py wrote (default: data, beside this script)"),
    "out_dir": ("out", path, "where checkpoints and log.csv go"),
    "eval_interval": (250, positive, "steps between evaluations on the whole val split; changes nothing about the run"),
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
    "activation": ("gelu", ("gelu", "gelu_tanh"), "exact or GPT-2's tanh GELU"),
    "pos_emb": ("learned", ("learned", "rope"), "a table of positions, or rotary embeddings"),
    "norm_first": (True, boolean, "False: post-LN"),
    "tie_weights": (True, boolean, "lm_head shares the embedding's matrix"),
    # optimization
    "batch_size": (12, positive, "sequences a micro-step"),
    "gradient_accumulation_steps": (1, positive, "micro-steps a step"),
    "max_iters": (2000, positive, "steps in all"),
    "learning_rate": (3e-3, number(float, "[0, inf)"), "peak learning rate"),
    "warmup_iters": (100, number(int, "[0, inf)"), "steps of linear warm-up"),
    "lr_decay_iters": (None, positive, "the step at which the cosine reaches min_lr (default: max_iters)"),
    "min_lr": (None, number(float, "[0, inf)"), "learning rate at the end (default: learning_rate / 10)"),
    "weight_decay": (0.1, number(float, "[0, inf)"), "on matrices and embeddings"),
    "beta1": (0.9, number(float, "[0, 1)"), "AdamW's"),
    "beta2": (0.99, number(float, "[0, 1)"), "AdamW's"),
    "grad_clip": (1.0, number(float, "[0, inf)"), "largest norm of the gradient; 0: no clipping"),
    # system
    "seed": (1337, number(int, f"[0, {2**63})"), "of the weights, the batches and dropout"),
    "device": ("auto", str, "cpu, cuda, cuda:1, mps; auto: cuda where there is one"),
    "dtype": ("auto", ("auto", "float32", "bfloat16", "float16"), "auto: bfloat16 on a GPU that has it, else float16"),
    "compile": (False, boolean, "torch.compile the training step"),
}
MODEL_FLAGS = [field.name for field in fields(GPTConfig) if field.name in FLAGS]


def parse_args(argv=None):
    """(parser, flags): only the flags that were given, so that presets and checkpoints can fill in the rest."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, (default, kind, text) in FLAGS.items():
        by_preset = ", ".join(f"{p[name]} {preset}" for preset, p in PRESETS.items() if name in p)
        text += f" (default: {by_preset or default})" if by_preset or default is not None else ""
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


def get_batch(ids, seed, step, micro_step, batch_size, block_size, device):
    """x and y `(batch_size, block_size)`, a pure function of (seed, step, micro_step): nothing to save or restore."""
    rng = np.random.default_rng((seed, step, micro_step))
    starts = rng.integers(len(ids) - block_size, size=batch_size)
    windows = torch.from_numpy(ids[starts[:, None] + np.arange(block_size + 1)].astype(np.int64))
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


# -- optimization ------------------------------------------------------------------------------------------------------


def configure_optimizer(model, config, device):
    """AdamW, with weight decay on what is a matrix and none on biases and norms."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config["weight_decay"]},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config["beta1"], config["beta2"])
    return torch.optim.AdamW(groups, lr=config["learning_rate"], betas=betas, fused=device.type in ("cpu", "cuda"))


def get_lr(step, config):
    """Linear warm-up, then a cosine from learning_rate to min_lr, reached at lr_decay_iters."""
    peak, warmup = config["learning_rate"], config["warmup_iters"]
    floor = peak / 10 if config["min_lr"] is None else config["min_lr"]
    decay = config["lr_decay_iters"] or config["max_iters"]
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, decay - warmup))
    return floor + 0.5 * (1 + math.cos(math.pi * progress)) * (peak - floor)


# -- the run in out_dir ------------------------------------------------------------------------------------------------


def load_run(out_dir, flags):
    """(config, checkpoint) of the run in out_dir, with the given flags overriding its settings.

    Raises ValueError for a checkpoint that holds no run, and for flags that a running run cannot change.
    """
    ckpt = load_checkpoint(out_dir / "last.pt")
    missing = {"optimizer", "iter_num", "best_val_loss", "config", "chars", "scaler", "rng_state"} - set(ckpt)
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
    config = ckpt["config"] | flags
    for name in ("preset", *MODEL_FLAGS):
        if config[name] != ckpt["config"][name] and name != "dropout":
            raise ValueError(
                f"the run in {out_dir} has {name} {ckpt['config'][name]}; a resume cannot make it {config[name]}"
            )
    ckpt["model_args"]["dropout"] = config["dropout"]
    return config, ckpt


def set_aside(out_dir):
    """Move an earlier run in out_dir to out_dir/previous, where it can be sampled from and resumed."""
    files = [out_dir / name for name in ("last.pt", "ckpt.pt", "log.csv") if (out_dir / name).is_file()]
    if files:
        (out_dir / "previous").mkdir(exist_ok=True)
        for file in files:
            os.replace(file, out_dir / "previous" / file.name)
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
    out_dir = Path(flags.get("out_dir", FLAGS["out_dir"][0]))
    ckpt = None
    try:
        if flags.get("init_from") == "resume":
            config, ckpt = load_run(out_dir, flags)
            device = pick_device(config["device"])
        else:
            config = {name: default for name, (default, _, _) in FLAGS.items()} | flags
            device = pick_device(config["device"])
            config["preset"] = config["preset"] or ("gpu" if device.type == "cuda" else "cpu")
            config |= PRESETS[config["preset"]] | flags
        dtype = pick_dtype(config["dtype"], device)
        data_dir = Path(config["data_dir"] or Path(__file__).resolve().parent / "data")
        chars, data, hashes = load_data(data_dir, config["block_size"])
        if ckpt and ckpt["chars"] != chars:
            raise ValueError(f"{data_dir} holds other characters than the run in {out_dir} was trained on")
        if ckpt and ckpt["config"]["data_sha256"] != hashes:
            raise ValueError(f"the text in {data_dir} has changed since the run in {out_dir} began")
        model = build_model(ckpt) if ckpt else None
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"train.py: {error}")
    try:
        model_config = GPTConfig(vocab_size=len(chars), **{name: config[name] for name in MODEL_FLAGS})
    except ValueError as error:
        parser.error(f"--{error}")
    config["data_sha256"] = hashes

    torch.manual_seed(config["seed"])
    try:
        raw_model = (model or GPT(model_config)).to(device)
    except (RuntimeError, MemoryError) as error:
        sys.exit(f"train.py: a network of this size does not fit: {str(error).strip().splitlines()[0]}")
    optimizer = configure_optimizer(raw_model, config, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
    step, best_val_loss = 0, math.inf
    if ckpt:
        try:
            chosen = [{key: group[key] for key in ("betas", "weight_decay")} for group in optimizer.param_groups]
            optimizer.load_state_dict(ckpt["optimizer"])
            for group, settings in zip(optimizer.param_groups, chosen):
                group |= settings  # flags override what the checkpoint had
            if scaler.is_enabled() and ckpt["scaler"]:
                scaler.load_state_dict(ckpt["scaler"])
            step, best_val_loss = ckpt["iter_num"], float(ckpt["best_val_loss"])
            if not (isinstance(step, int) and step >= 0):
                raise ValueError(f"iter_num={step!r}")
            torch.set_rng_state(ckpt["rng_state"]["torch"])
            if device.type == "cuda" and ckpt["rng_state"]["cuda"] is not None:
                torch.cuda.set_rng_state(ckpt["rng_state"]["cuda"], device)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            sys.exit(f"train.py: {out_dir / 'last.pt'} does not hold the state of this run ({error!r}): start anew")
    first_step, max_iters = step, config["max_iters"]
    if step >= max_iters:
        print(f"the run in {out_dir} is at step {step} of {max_iters} already: --max_iters {2 * step} would go on")
        return
    ckpt = None  # free the memory
    # what sample.py --draft ngram guesses from: 8 bytes each (12 if there are many characters), for 64 of weights
    ngrams = count_ngrams(data["train"], len(chars), sum(p.numel() for p in raw_model.parameters()) // 16)
    model = compiled(raw_model) if config["compile"] else raw_model

    out_dir.mkdir(parents=True, exist_ok=True)
    if not first_step:
        set_aside(out_dir)
    chars_before, seconds_before = trim_log(out_dir / "log.csv", step)
    chars_a_step = config["gradient_accumulation_steps"] * config["batch_size"] * config["block_size"]
    print(
        f"{'resuming' if first_step else 'training'} preset {config['preset']} on {device} in {str(dtype)[6:]}: "
        f"{config['n_layer']} layers, {config['n_head']} heads, {config['n_embd']} wide, "
        f"context {config['block_size']}, "
        f"{sum(p.numel() for p in raw_model.parameters()) / 1e6:.2f}M parameters; "
        f"steps {first_step}..{max_iters} of {chars_a_step:,} characters",
        flush=True,
    )

    def save(name):
        with torch.no_grad(), eval_mode(raw_model), autocast:
            _, loss = raw_model(x, y)  # the last update may have broken the weights, and no loss has shown it yet
        check_finite(loss.item())
        state = dict(model=raw_model.state_dict(), model_args=asdict(model_config), optimizer=optimizer.state_dict())
        state |= dict(iter_num=step, best_val_loss=best_val_loss, config=config, chars=chars, ngrams=ngrams)
        cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        state |= dict(scaler=scaler.state_dict(), rng_state={"torch": torch.get_rng_state(), "cuda": cuda_state})
        save_checkpoint(out_dir / name, state)

    def check_finite(loss):
        if not math.isfinite(loss):
            bar.close()
            sys.exit(
                f"train.py: stopped at step {step}: the loss is {loss}; as a rule a smaller --learning_rate "
                f"helps (it was {config['learning_rate']}). The checkpoints in {out_dir} are from before that"
            )

    signals = []  # the first one lets the step finish and saves; a second one ends the process at once

    def on_signal(signum, frame):
        signals.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    # a lost terminal: Windows has no such signal, and nohup ignores it on purpose
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_signal)

    on_terminal = sys.stderr.isatty()
    columns, rows = shutil.get_terminal_size((100, 24))  # a terminal of size 0, as notebooks have, shows no bar
    bar = tqdm(total=max_iters, initial=step, unit="step", disable=not on_terminal, ncols=columns, nrows=rows)
    began = mark = time.perf_counter()  # mark: since when the training steps of the next row have run
    loss_sum, loss_steps, val_loss = torch.zeros((), device=device), 0, None
    while step < max_iters:
        lr = get_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for micro_step in range(config["gradient_accumulation_steps"]):
            x, y = get_batch(
                data["train"], config["seed"], step, micro_step, config["batch_size"], config["block_size"], device
            )
            with autocast:
                _, loss = model(x, y)
            loss = loss / config["gradient_accumulation_steps"]
            scaler.scale(loss).backward()
            loss_sum += loss.detach()
        if config["grad_clip"]:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(raw_model.parameters(), config["grad_clip"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step, loss_steps = step + 1, loss_steps + 1
        bar.update()

        evaluating = step % config["eval_interval"] == 0 or step == max_iters
        stopping = bool(signals)
        saving = evaluating or stopping or step % config["save_interval"] == 0
        if not saving and step % config["log_interval"]:
            continue

        row = dict(
            step=step,
            chars=chars_before + (step - first_step) * chars_a_step,
            train_loss=loss_sum.item() / loss_steps,
            lr=lr,
        )
        row["tokens_per_s"] = round(loss_steps * chars_a_step / (time.perf_counter() - mark))
        check_finite(row["train_loss"])  # a sum stays NaN or infinite once it is
        if evaluating:
            val_loss = row["val_loss"] = evaluate(raw_model, data["val"], config["block_size"], device, autocast)
            check_finite(val_loss)
            if val_loss < best_val_loss:
                best_val_loss = val_loss
                save("ckpt.pt")
        if saving:
            save("last.pt")
        row["seconds"] = round(seconds_before + time.perf_counter() - began, 3)
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
        if stopping:
            break
    bar.close()

    if step < max_iters:
        command = f"python train.py --init_from resume --out_dir {shlex.quote(str(out_dir))}"
        print(f"stopped at step {step} of {max_iters} and saved; to go on: {command}")
        sys.exit(128 + signals[0])
    print(f"best val loss {best_val_loss:.4f}: {out_dir / 'ckpt.pt'}; {time.perf_counter() - began:.0f} s. A sample:\n")
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
