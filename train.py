"""Train a character-level GPT on the text that data/prepare.py prepared.

    python train.py --eval_interval 500              a size that suits the device
    python train.py --preset nanogpt-cpu             nanoGPT's CPU size and number of characters
    python train.py --recipe nanogpt                 nanoGPT's network and optimizer instead of the modern ones
    python train.py --init_from resume               continue the last run in --out_dir
    python train.py --init_from out/hf               start from the weights of a Hugging Face folder
    torchrun --standalone --nproc_per_node=2 train.py        the same run on two processes

Writes out/ckpt.pt (best val loss, which sample.py reads), out/last.pt (latest step, which a resume reads) and
out/log.csv. On a CPU the same command gives the same weights to the bit, interrupted and resumed or not.
"""

import importlib.util
import math
import os
import shlex
import sys
import time
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from kvgpt.checkpoint import load_checkpoint
from kvgpt.cli import fail, note, one_line_errors, run_main
from kvgpt.decoding.ngrams import count_ngrams
from kvgpt.export.hf import read_folder
from kvgpt.recipes import TrainConfig, parse_flags, resolve_config
from kvgpt.training.data import evaluate, load_dataset
from kvgpt.training.device import compile_module, pick_dtype
from kvgpt.training.dist import Ranks
from kvgpt.training.meter import Meter
from kvgpt.training.ngram_targets import ngram_targets
from kvgpt.training.objective import loss_weights
from kvgpt.training.optim import lr_multiplier, set_lr
from kvgpt.training.plots import plot_loss
from kvgpt.training.run import RunFolder
from kvgpt.training.signals import StopSignals
from kvgpt.training.spinning import share_cores
from kvgpt.training.state import Diverged, TrainState, require_finite
from model import GPT, GPTConfig

# -- presets and recipes -----------------------------------------------------------------------------------------------

# A preset is a size, a context length and a length of training. A recipe is a network and an optimizer.
# Precedence: flags, OVERRIDES, PRESETS, RECIPES, defaults in kvgpt/recipes.py.

PRESETS = {
    "lecture": dict(n_layer=4, n_head=4, n_embd=64, block_size=32, batch_size=16, max_iters=5000),
    "nanogpt-cpu": dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, max_iters=2000),
    "cpu": dict(n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=2, max_iters=3200),
    "laptop": dict(n_layer=4, n_head=4, n_embd=128, block_size=256, batch_size=2, max_iters=7000),
    "gpu": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=64, max_iters=5000, dropout=0.2),
}
RECIPES = {
    "modern": dict(
        pos_emb="rope",
        qk_norm=True,
        activation="swiglu",
        zero_init=True,
        ngram_targets=1.0,
        mtp_weight=0.3,
        optimizer="muon",
        learning_rate=1e-2,
        beta2=0.95,
        weight_decay=0.0,
        grad_clip=0.0,
        warmup_iters=0,
        lr_decay="linear",
        lr_stable_frac=0.3,
        min_lr=0.0,
    ),
    "nanogpt": dict(learning_rate=1e-3),
}
OVERRIDES = {
    ("nanogpt-cpu", "modern"): dict(mlp_ratio=4.2),
    ("cpu", "modern"): dict(mlp_ratio=4.2),
    ("laptop", "modern"): dict(mlp_ratio=4.2),
    ("gpu", "modern"): dict(max_iters=2000, dropout=0.3),
}

# -- batches -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)  # a batch can span two epochs
def window_starts(length, block_size, seed, epoch):
    """Return the start of every window of an epoch, in random order.

    The offset of the first window is random. An epoch predicts every character once, except less than a window at
    either end of the text.
    """
    rng = np.random.default_rng((seed, epoch))
    offset = rng.integers(min(block_size, length - block_size))
    return offset + block_size * rng.permutation((length - 1 - offset) // block_size)


def get_batch(ids, seed, number, batch_size, block_size, device, rank=0, world_size=1):
    """Return x and y, `(batch_size / world_size, block_size)` int64: this rank's rows of batch `number` of the run.

    A batch is a pure function of the seed and its number. A resumed run needs no saved state for it, and any number of
    processes sees the same batches.
    """
    windows_per_epoch = (len(ids) - 1) // block_size
    starts = []
    for i in range(number * batch_size + rank, (number + 1) * batch_size, world_size):
        windows = window_starts(len(ids), block_size, seed, i // windows_per_epoch)
        # the offset can leave one window fewer; the epoch then repeats its first window
        starts.append(windows[i % windows_per_epoch % len(windows)])
    windows = torch.from_numpy(ids[np.array(starts)[:, None] + np.arange(block_size + 1)].astype(np.int64))
    windows = to_device(windows, device)
    return windows[:, :-1], windows[:, 1:]


def to_device(tensor, device):
    """Return a tensor of the CPU on the device. A copy to a GPU from pinned memory waits for no earlier step."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# -- training ----------------------------------------------------------------------------------------------------------


def train_step(config, data, state, ranks, measure=False):
    """Run one optimizer step: forward and backward per micro-step, clip, update.

    measure  whether to compute the norm of the gradients where no clipping needs it
    Returns this rank's mean loss, a tensor; the norm, a tensor or None; and the seconds in Muon.
    """
    micro_steps = config.gradient_accumulation_steps
    total = 0.0
    for micro_step in range(micro_steps):
        number = state.step * micro_steps + micro_step
        shape, where = (config.batch_size, config.block_size), (state.device, ranks.rank, ranks.world_size)
        x, y = get_batch(data.train, config.seed, number, *shape, *where)
        if config.dropout:  # dropout masks are a function of the seed and the step, like the batches
            sequence = np.random.SeedSequence((config.seed, state.step, micro_step, ranks.rank))
            torch.manual_seed(int(sequence.generate_state(1)[0]))
        ranks.sync_gradients(state.objective, micro_step == micro_steps - 1)
        expected = None
        if data.ngram_targets:
            rows, _ = get_batch(data.ngram_targets.rows, config.seed, number, *shape, *where)
            expected = data.ngram_targets.table[rows]
        weights = to_device(loss_weights(state.step, config), state.device)
        with state.autocast:
            objective, loss = state.objective(x, y, *weights, expected)
        state.scaler.scale(objective / micro_steps).backward()
        total = total + loss.detach() / micro_steps
    grad_norm = None
    if config.grad_clip or measure:
        for optimizer in state.optimizers:
            state.scaler.unscale_(optimizer)
        if config.grad_clip:
            grad_norm = torch.nn.utils.clip_grad_norm_(state.objective.parameters(), config.grad_clip)
        else:
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in state.objective.parameters()])
    for optimizer in state.optimizers:
        began = time.perf_counter()
        state.scaler.step(optimizer)
    muon_seconds = time.perf_counter() - began if len(state.optimizers) > 1 else 0.0  # Muon is the second of two
    state.scaler.update()
    state.objective.zero_grad(set_to_none=True)
    return total, grad_norm, muon_seconds


def val_loss(config, data, state, ranks, limit=None):
    """Return the loss over the val split, or over its first `limit` characters. Raises Diverged if it is not finite."""
    loss = 0.0  # the other ranks add 0, so the sum over ranks is the loss of rank 0
    if ranks.is_main:
        loss = evaluate(state.model, data.val[:limit], config.block_size, state.device, state.autocast)
    return require_finite(ranks.all_reduce(loss))


def due(step, interval):
    return step % interval == 0


def train(config, data, state, ranks, run, meter, signals):
    """Train from state.step until max_iters, a stop signal, or the end of patience.

    data, state, run, meter: a Dataset, TrainState, RunFolder and Meter. Returns the stop signal's number, or 0.
    Raises Diverged instead of saving weights whose loss is not finite.
    """
    signum = 0
    while state.step < config.max_iters and not signum:
        # one step
        lr_scale = lr_multiplier(state.step, config)  # AdamW and Muon have peaks of their own
        set_lr(state.optimizers, lr_scale)
        number = state.step + 1
        evaluating = due(number, config.eval_interval) or number == config.max_iters
        logging = evaluating or due(number, config.save_interval) or due(number, config.log_interval)
        meter.update(*train_step(config, data, state, ranks, measure=logging))
        state.step = number

        # evaluate, save, log
        signum = signals.poll()
        if config.sample_interval and due(state.step, config.sample_interval) and ranks.is_main:
            run.add_sample(state.step, sample(config, data, state, 300))
        if not (logging or signum):
            continue
        saving = evaluating or signum or due(state.step, config.save_interval)
        row = meter.row(state.step, config.learning_rate * lr_scale)
        if evaluating:
            row["val_loss"] = val_loss(config, data, state, ranks)
            meter.warn_of_overfitting(row["val_loss"])
            if state.record_evaluation(row["val_loss"]) and ranks.is_main:
                run.save_best(state)
        elif saving:  # raise Diverged if the last update broke the weights, which no loss has shown yet
            val_loss(config, data, state, ranks, limit=config.block_size + 1)
        if ranks.is_main:
            run.log(row | {"seconds": meter.seconds()})  # first, because a resume drops rows after last.pt's step
            if saving:
                run.save_latest(state)
            if config.plot and (evaluating or signum):
                plot_loss(run.path)
        meter.show(row)
        if config.patience and state.evals_since_best >= config.patience:
            break
    return signum


def sample(config, data, state, num_chars):
    """Return a text of num_chars new characters, or as many as fit the context. It changes no step of the run."""
    newline = torch.full((1, 1), max(data.chars.find("\n"), 0), device=state.device)
    ids = state.model.generate(newline, num_chars, seed=config.seed)[0]
    return "".join(data.chars[i] for i in ids.tolist())


# -- the run -----------------------------------------------------------------------------------------------------------


def resolve(flags, ranks, run):
    """Return (config, data, source, device, dtype) of the run that the flags describe. Raises ValueError.

    source  the Checkpoint to resume or to start from; None: from scratch
    """
    # the run to resume, or the model to start from
    resuming, source = flags.get("init_from") == "resume", None
    if resuming:
        if ranks.is_main and run.path.is_dir():
            run.lock()  # before reading, so that no other run writes meanwhile
        source = load_checkpoint(run.path / "last.pt")
    elif flags.get("init_from", "scratch") != "scratch":
        source = read_folder(flags["init_from"])

    # settings
    on_gpu = ranks.pick_device(flags.get("device", TrainConfig.device)).type == "cuda"
    config = resolve_config(flags, PRESETS, RECIPES, OVERRIDES, on_gpu=on_gpu, source=source)
    if config.batch_size % ranks.world_size:
        raise ValueError(
            f"--batch_size {config.batch_size} cannot be shared by {ranks.world_size} processes: "
            "choose a multiple of their number"
        )
    if config.plot and not importlib.util.find_spec("matplotlib"):
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    device = ranks.pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    if ranks.world_size > 1:  # torchrun sets the number
        config.threads = flags.get("threads")
    else:  # recorded, because the number of threads decides the last bits of a sum
        config.threads = config.threads or torch.get_num_threads()
        if "threads" not in flags and config.threads > (os.cpu_count() or config.threads):
            note(
                f"the run in {run.path} has {config.threads} threads, and this machine {os.cpu_count()} cores: "
                f"--threads {os.cpu_count()} is faster, and gives weights with other last bits"
            )
    if config.threads:
        torch.set_num_threads(config.threads)

    # data
    data_dir = Path(config.data_dir or Path(__file__).resolve().parent / "data")
    data = load_dataset(data_dir, config.block_size)
    if source and source.chars != data.chars:
        what = f"the run in {run.path}" if resuming else f"the model in {source.path}"
        raise ValueError(f"{data_dir} holds other characters than {what} was trained on")
    if resuming and source.training["data_sha256"] != data.sha256:
        raise ValueError(f"the text in {data_dir} has changed since the run in {run.path} began")

    # memory: a batch that does not fit fails here, where no file has changed
    num_logits = config.batch_size // ranks.world_size * config.block_size * len(data.chars)
    torch.empty(min(num_logits, 2**60), device=device)  # more elements than that are an error of another kind
    return config, data, source, device, dtype


def build(config, data, source, device, dtype):
    """Return the TrainState at the start of the run, or where `source` left it. Exits with one line on an error."""
    try:
        model_config = GPTConfig(vocab_size=len(data.chars), **config.model_args())
    except ValueError as error:  # the message begins with the name of the field, which is a flag
        fail(f"--{error} (--help lists the flags)", code=2)
    with one_line_errors():
        start = replace(source, model_args=asdict(model_config)).build_model() if source else None
    torch.manual_seed(config.seed)
    try:
        model = start or GPT(model_config)
        if not source and config.zero_init:
            model.zero_init()
        model.to(device)
    except (RuntimeError, MemoryError) as error:
        fail(f"a network of this size does not fit: {str(error).strip().splitlines()[0]}")
    state = TrainState(model, config, device, dtype)
    if config.init_from == "resume":
        with one_line_errors():
            state.load_training(source)
        best = source.path.with_name("ckpt.pt")
        if math.isfinite(state.best_val_loss) and not best.exists():
            note(f"{best} is gone, and with it the best weights so far: the next evaluation writes a new one")
            state.best_val_loss = math.inf
    return state


def describe(config, state, ranks):
    """Return the first line of a run's output."""
    config_line = f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, context {config.block_size}"
    others = f" and {ranks.world_size - 1} more" if ranks.world_size > 1 else ""
    if state.device.type == "cpu" and config.threads:
        others += f" with {config.threads} thread{'s' if config.threads > 1 else ''}"
    return (
        f"{'resuming' if state.step else 'training'} preset {config.preset}, recipe {config.recipe}, "
        f"on {state.device}{others} in {str(state.dtype).removeprefix('torch.')}: "
        f"{config_line}, {state.num_parameters() / 1e6:.2f}M parameters; "
        f"steps {state.step}..{config.max_iters} of {config.chars_per_step:,} characters"
    )


def main():
    # settings, data and weights
    flags = parse_flags(__doc__, PRESETS, RECIPES, OVERRIDES)
    run = RunFolder(flags.get("out_dir", TrainConfig.out_dir))
    with one_line_errors():
        ranks = Ranks()
        config, data, source, device, dtype = resolve(flags, ranks, run)
    state = build(config, data, source, device, dtype)
    if state.step >= config.max_iters:
        print(
            f"the run in {run.path} is at step {state.step} of {config.max_iters} already: "
            f"--max_iters {2 * state.step} would continue it"
        )
        return
    if config.ngram_targets:
        data.ngram_targets = ngram_targets(data.train, len(data.chars), device)
        if not data.ngram_targets:
            print("the text is too long, or has too many distinct characters, for n-gram targets: training without")
    with one_line_errors():
        ranks.connect(device)
    state.objective = ranks.wrap(compile_module(state.objective) if config.compile else state.objective)

    # run folder and log
    header = dict(
        model_args=asdict(state.model.config),
        config=asdict(config),
        chars=data.chars,
        data_sha256=data.sha256,
        # at most one n-gram of 8 or 12 bytes per 16 parameters of 4 bytes
        ngrams=count_ngrams(data.train, len(data.chars), state.num_parameters() // 16),
    )
    counted = (0, 0.0)
    if ranks.is_main:
        run.path.mkdir(parents=True, exist_ok=True)
        with one_line_errors():
            run.lock()
        counted = run.begin(state.step, header)
    print(describe(config, state, ranks), flush=True)
    meter = Meter(config, state, ranks, *counted)

    # train
    signals = StopSignals(ranks)
    try:
        with share_cores():
            signum = train(config, data, state, ranks, run, meter, signals)
    except Diverged as error:
        meter.close()
        fail(
            f"stopped at step {state.step}: {error}. Lower --learning_rate (now {config.learning_rate}). "
            f"The checkpoints in {run.path} are from before that step"
        )
    meter.close()
    ranks.finish(128 + signum if signum else 0)

    # report
    if signum:
        command = f"python train.py --init_from resume --out_dir {shlex.quote(str(run.path))}"
        print(f"stopped at step {state.step} of {config.max_iters} and saved; to continue: {command}")
        sys.exit(128 + signum)
    if state.step < config.max_iters:
        print(
            f"stopped at step {state.step} of {config.max_iters}: "
            f"no better val loss in {state.evals_since_best} evaluations (--patience)"
        )
    print(meter.speed(state))
    seconds = meter.seconds() - meter.seconds_before
    print(f"best val loss {state.best_val_loss:.4f}: {run.path / 'ckpt.pt'}; {seconds:.0f} s. A sample:\n")
    print(sample(config, data, state, 300))


if __name__ == "__main__":
    run_main(main, disk_hint="older checkpoints are whole")
