"""Train a GPT on the data that data/prepare.py wrote.

    python train.py --eval_interval 500              a size that suits the device
    python train.py --preset nanogpt-cpu             nanoGPT's CPU settings: its size and number of characters
    python train.py --recipe nanogpt                 nanoGPT's network and optimizer instead of the modern ones
    python train.py --init_from resume               continue the last run in --out_dir
    python train.py --init_from gpt2 --data_dir data/gpt2    finetune the model of a Hugging Face folder
    torchrun --standalone --nproc_per_node=2 train.py        the same run on two processes

Writes out/ckpt.pt (best val loss, for sample.py), out/last.pt (latest step, for --init_from resume) and out/log.csv. On
a CPU the same command gives bit-identical weights, whether or not the run was interrupted.
"""

import math
import os
import shlex
import signal
import statistics
import sys
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.distributed import ReduceOp

from kvgpt.checkpoint import load_checkpoint
from kvgpt.cli import fail, first_line, handle_signals, need, note, one_line_errors, run_main, torchrun_ranks
from kvgpt.cores import share_cores
from kvgpt.decoding.ngrams import count_ngrams
from kvgpt.recipes import TrainConfig, parse_flags, resolve_config
from kvgpt.training.data import load_dataset
from kvgpt.training.dist import Ranks
from kvgpt.training.meter import Meter
from kvgpt.training.objective import evaluate, loss_weights, ngram_targets
from kvgpt.training.optim import lr_multiplier, set_lr
from kvgpt.training.run import RunFolder, plot_loss
from kvgpt.training.state import Diverged, TrainState, pick_dtype, require_finite
from model import GPT, GPTConfig

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


def get_batch(ids, seed, number, batch_size, block_size, device, rank=0, world_size=1):
    """Return x and y, `(batch_size / world_size, block_size)` int64: this rank's rows of batch `number` of the run.

    A batch depends only on the seed and its number. So resuming needs no saved random state, and the batches are the
    same for any number of processes.
    """
    windows_per_epoch = (len(ids) - 1) // block_size
    starts = []
    for i in range(number * batch_size + rank, (number + 1) * batch_size, world_size):
        windows = window_starts(len(ids), block_size, seed, i // windows_per_epoch)
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


# -- training ----------------------------------------------------------------------------------------------------------


def train_step(config, data, state, ranks, measure=False):
    """Run one optimizer step: forward and backward per micro-step, clip, update.

    measure  compute the norm of the gradients even if we do not clip them
    Returns this rank's mean loss, a tensor, and the norm, a tensor or None.
    """
    # forward and backward
    micro_steps = config.gradient_accumulation_steps
    total = 0.0
    for micro_step in range(micro_steps):
        number = state.step * micro_steps + micro_step
        shape, where = (config.batch_size, config.block_size), (state.device, ranks.rank, ranks.world_size)
        x, y = get_batch(data.train, config.seed, number, *shape, *where)
        if config.dropout:  # like the batches, the masks depend only on the seed and the step
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

    # clip
    grad_norm = None
    if config.grad_clip or measure:
        for optimizer in state.optimizers:
            state.scaler.unscale_(optimizer)
        if config.grad_clip:
            grad_norm = torch.nn.utils.clip_grad_norm_(state.objective.parameters(), config.grad_clip)
        else:
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in state.objective.parameters()])

    # update
    for optimizer in state.optimizers:
        state.scaler.step(optimizer)
    state.scaler.update()
    state.objective.zero_grad(set_to_none=True)
    return total, grad_norm


def val_loss(config, data, state, ranks, limit=None):
    """Return the loss over the val split, or over its first `limit` tokens. Raises Diverged if it is not finite."""
    loss = 0.0  # the other ranks add 0, so the sum over ranks is the loss of rank 0
    if ranks.is_main:
        loss = evaluate(state.model, data.val[:limit], config.block_size, state.device, state.autocast)
    return require_finite(ranks.all_reduce(loss))


class StopSignals:
    """Remembers Ctrl-C and SIGTERM, so that train.py can finish the current step before it stops.

    received  the number of the first signal, or 0
    A second Ctrl-C ends the process at once. A second SIGTERM does not, because `timeout` sends two.
    """

    def __init__(self):
        self.received = 0
        handle_signals(self.receive)

    def receive(self, signum, frame):
        self.received = self.received or signum
        if signum == signal.SIGINT and not torchrun_ranks():  # torchrun forwards a Ctrl-C that we got already
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def train(config, data, state, ranks, run, meter, signals):
    """Train from state.step until max_iters, a stop signal, or until patience runs out.

    Returns the number of the stop signal, or 0. Raises Diverged rather than save weights whose loss is not finite.
    """
    signum = 0
    while state.step < config.max_iters and not signum:
        # one step
        lr_scale = lr_multiplier(state.step, config)  # AdamW and Muon each have their own peak
        set_lr(state.optimizers, lr_scale)
        number = state.step + 1
        evaluating = number % config.eval_interval == 0 or number == config.max_iters
        saving = evaluating or number % config.save_interval == 0
        logging = saving or number % config.log_interval == 0
        loss, grad_norm = train_step(config, data, state, ranks, measure=logging)
        meter.update(loss)
        state.step = number

        # evaluate, save, log
        signum = int(ranks.all_reduce(signals.received, ReduceOp.MAX))  # all processes stop after the same step
        saving = saving or signum
        if config.sample_interval and number % config.sample_interval == 0 and ranks.is_main:
            run.add_sample(number, sample(config, data, state))
        if not (logging or signum):
            continue
        row = meter.row(number, config.learning_rate * lr_scale, grad_norm)
        if evaluating:
            row["val_loss"] = val_loss(config, data, state, ranks)
            if data.val_bytes:
                row["val_bpb"] = data.bits_per_byte(row["val_loss"])
            if state.record_evaluation(row["val_loss"]) and ranks.is_main:
                run.save_best(state)
            if state.evals_since_best == 3 and not config.patience:
                meter.bar.write("no better val loss in 3 evaluations: the run may overfit (--patience 3 would stop it)")
        elif saving:  # the loss above is from before the update, which may have broken the weights
            val_loss(config, data, state, ranks, limit=config.block_size + 1)
        if ranks.is_main:
            run.log(row | {"seconds": meter.seconds()})  # before last.pt, because a resume drops rows after its step
            if saving:
                run.save_latest(state)
            if config.plot and evaluating:
                plot_loss(run.path)
        meter.show(row)
        if config.patience and state.evals_since_best >= config.patience:
            break
    return signum


def sample(config, data, state):
    """Return a sample of 300 new tokens, or as many as fit the context. It does not affect the run."""
    tokenizer = data.tokenizer
    start = torch.tensor([tokenizer.encode(tokenizer.default_prompt)], device=state.device)
    return tokenizer.decode(state.model.generate(start, 300, seed=config.seed)[0].tolist())


# -- the run -----------------------------------------------------------------------------------------------------------


def load_source(init_from, ranks, run):
    """Return the Checkpoint to resume or to start from, or None for a run from scratch. Raises ValueError."""
    if init_from == "scratch":
        return None
    if init_from == "resume":
        if ranks.is_main and run.path.is_dir():
            run.lock()  # before we read, so that no other process writes meanwhile
        return load_checkpoint(run.path / "last.pt")
    if not Path(init_from, "config.json").is_file():
        raise ValueError(f"{init_from} is not a Hugging Face folder: it has no config.json")
    return load_checkpoint(init_from)


def load_text(config, source, run):
    """Return the Dataset of a run. Raises ValueError if it does not match the checkpoint that we start from."""
    data_dir = Path(config.data_dir or Path(__file__).resolve().parent / "data")
    tokenizer = source.build_tokenizer() if source else None
    data = load_dataset(data_dir, config.block_size)
    if not source:
        return data
    same_tokens = tokenizer.state_dict() == data.tokenizer.state_dict()
    if config.init_from == "resume" and not (same_tokens and source.training.get("data_sha256") == data.sha256):
        raise ValueError(
            f"the run in {run.path} was trained on different text than {data_dir} holds: "
            "point --data_dir to that text, or prepare it again"
        )
    if not same_tokens:
        raise ValueError(
            f"the {tokenizer.unit} in {data_dir} are not those of the model in {source.path}: "
            f"python data/prepare.py --tokenizer {source.path} prepares text for it"
        )
    return data


def setup(flags, ranks, run):
    """Return (config, data, state) for the flags. Raises ValueError with one line for the user."""
    # settings
    source = load_source(flags.get("init_from", TrainConfig.init_from), ranks, run)
    on_gpu = ranks.pick_device(flags.get("device", TrainConfig.device)).type == "cuda"
    config = resolve_config(flags, on_gpu=on_gpu, source=source)
    if config.batch_size % ranks.world_size:
        raise ValueError(
            f"--batch_size {config.batch_size} does not divide among {ranks.world_size} processes: "
            "choose a multiple of their number"
        )
    if config.plot:
        need("--plot", "matplotlib")  # now, and not after the first evaluation
    device = ranks.pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)

    # threads: recorded in the checkpoint, because their number decides the last bits of a sum
    if ranks.world_size > 1:  # torchrun decides
        config.threads = flags.get("threads")
    else:
        config.threads, cores = config.threads or torch.get_num_threads(), os.cpu_count()
        if "threads" not in flags and cores and config.threads > cores:
            note(
                f"{config.threads} threads are more than the {cores} cores of this machine: --threads {cores} is faster"
            )
    if config.threads:
        torch.set_num_threads(config.threads)

    # text and weights
    data = load_text(config, source, run)
    try:
        vocab_size = source.model_args["vocab_size"] if source else len(data.tokenizer.vocab)
        model_config = GPTConfig(vocab_size=vocab_size, **config.model_args())
    except ValueError as error:  # it starts with the name of a field, which is also a flag
        raise ValueError(f"--{error} (--help lists the flags)") from None
    torch.manual_seed(config.seed)
    if source:
        model = replace(source.crop(config.block_size), model_args=asdict(model_config)).build_model()
    else:
        model = GPT(model_config)
    if config.zero_init and not source:
        model.zero_init()
    state = TrainState(model.to(device), config, device, dtype)
    if config.init_from == "resume":
        state.load_training(source)
        if not (run.path / "ckpt.pt").exists():
            state.best_val_loss = math.inf  # the best weights are gone, so the next evaluation saves new ones
    return config, data, state


def compile_module(module):
    """Return torch.compile(module), or print a note and return the module if there is no working compiler."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=next(module.parameters()).device))
    except Exception as error:  # a missing compiler raises many kinds of errors
        note(f"--compile: no working compiler ({first_line(error)}): training uncompiled")
        return module
    note("--compile: compiling the training step; the first steps take a while")
    return torch.compile(module)


def describe(config, state, ranks, unit):
    """Return the first line that a run prints. unit is "characters" or "tokens"."""
    more = f" and {ranks.world_size - 1} more" if ranks.world_size > 1 else ""
    if state.device.type == "cpu" and config.threads:
        more += f" with {config.threads} thread{'s' if config.threads > 1 else ''}"
    return (
        f"{'resuming' if state.step else 'training'} preset {config.preset}, recipe {config.recipe}, "
        f"on {state.device}{more} in {str(state.dtype).removeprefix('torch.')}: "
        f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, context {config.block_size}, "
        f"{state.num_parameters() / 1e6:.2f}M parameters; "
        f"steps {state.step}..{config.max_iters} of {config.tokens_per_step:,} {unit}"
    )


def main():
    # settings, text and weights
    flags = parse_flags(__doc__)
    share_cores()
    ranks, run = Ranks(), RunFolder(flags.get("out_dir", TrainConfig.out_dir))
    with one_line_errors():
        config, data, state = setup(flags, ranks, run)
    if state.step >= config.max_iters:
        print(
            f"the run in {run.path} is already at step {state.step} of {config.max_iters}: "
            f"--max_iters {2 * state.step} would continue it"
        )
        return
    if config.ngram_targets:
        data.ngram_targets = ngram_targets(data.train, state.model.config.vocab_size, state.device)
        if not data.ngram_targets:
            unit = data.tokenizer.unit
            print(f"training without n-gram targets: the text is too long or has too many distinct {unit} for them")

    # other processes
    ranks.connect(state.device)
    state.objective = ranks.wrap(compile_module(state.objective) if config.compile else state.objective)

    # run folder and log
    progress = (0, 0.0)
    if ranks.is_main:
        header = dict(
            model_args=asdict(state.model.config),
            config=asdict(config),
            **data.tokenizer.state_dict(),
            data_sha256=data.sha256,
            # at most one n-gram of 8 or 12 bytes per 16 parameters of 4 bytes
            ngrams=count_ngrams(data.train, state.model.config.vocab_size, state.num_parameters() // 16),
        )
        run.path.mkdir(parents=True, exist_ok=True)
        with one_line_errors():
            run.lock()
            progress = run.begin(state.step, header, bits_per_byte=bool(data.val_bytes))
    print(describe(config, state, ranks, data.tokenizer.unit), flush=True)
    meter = Meter(config, state, ranks, *progress)

    # train
    try:
        signum = train(config, data, state, ranks, run, meter, StopSignals())
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
        command = f"python train.py --init_from resume --out_dir={shlex.quote(str(run.path))}"
        print(f"stopped at step {state.step} of {config.max_iters} and saved; to continue: {command}")
        sys.exit(128 + signum)
    if state.step < config.max_iters:
        print(
            f"stopped at step {state.step} of {config.max_iters}: "
            f"no better val loss in {state.evals_since_best} evaluations (--patience)"
        )
    print(f"{statistics.median(meter.rates):,.0f} tokens/s")
    seconds = meter.seconds() - meter.seconds_before
    best = f"best val loss {state.best_val_loss:.4f}"
    if data.val_bytes:
        best += f" ({data.bits_per_byte(state.best_val_loss):.4f} bits per byte)"
    print(f"{best}: {run.path / 'ckpt.pt'}; {seconds:.0f} s. A sample:\n")
    print(sample(config, data, state))


if __name__ == "__main__":
    run_main(main)
