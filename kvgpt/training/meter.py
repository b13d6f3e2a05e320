"""Progress of a run: loss and speed since the last log row, and the lines or the bar that show them."""

import math
import shutil
import statistics
import sys
import time

import torch
from tqdm import tqdm

from kvgpt.training.state import require_finite

RISES = 3  # of val loss in a row, before a run is said to overfit


class Meter:
    """Measures a run from its present step on.

    chars_before, seconds_before  what the log of an interrupted run has counted already
    """

    def __init__(self, config, state, ranks, chars_before=0, seconds_before=0.0):
        self.ranks, self.max_iters = ranks, config.max_iters
        self.first_step, self.chars_before, self.seconds_before = state.step, chars_before, seconds_before
        self.chars_per_step = config.chars_per_step
        self.loss_sum, self.num_steps = torch.zeros((), device=state.device), 0  # since the last row
        self.grad_norm = None  # of the last step
        self.rates = []  # tokens per second, per row
        self.last_val_loss = math.nan
        self.train_loss_sum, self.train_steps = 0.0, 0  # since the last evaluation
        self.train_loss, self.val_loss = math.inf, math.inf  # of the last evaluation; train_loss is a mean
        self.rises = 0  # evaluations in a row with a higher val loss and a lower train loss than the one before
        self.on_terminal = sys.stderr.isatty() and ranks.is_main
        columns, rows = shutil.get_terminal_size((100, 24))  # tqdm shows no bar in a terminal of size 0, a notebook's
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

    def update(self, loss, grad_norm):
        """Count a step. loss and grad_norm stay tensors, because reading a number would wait for the device."""
        self.loss_sum += loss
        self.num_steps += 1
        self.grad_norm = grad_norm
        self.bar.update()

    def row(self, step, lr):
        """Return the log row of the steps since the last one. Raises Diverged if their mean loss is not finite."""
        seconds = time.perf_counter() - self.row_began
        rate = round(self.num_steps * self.chars_per_step / seconds)
        self.rates.append(rate)
        mean = self.ranks.all_reduce(self.loss_sum.item()) / self.ranks.world_size / self.num_steps
        self.train_loss_sum += mean * self.num_steps
        self.train_steps += self.num_steps
        chars = self.chars_before + (step - self.first_step) * self.chars_per_step
        return dict(
            step=step,
            chars=chars,
            lr=lr,
            train_loss=require_finite(mean),
            tokens_per_s=rate,
            grad_norm=None if self.grad_norm is None else self.grad_norm.item(),
        )

    def warn_of_overfitting(self, val_loss):
        """Record an evaluation. Warn when val loss has risen RISES times in a row while train loss fell."""
        train_loss = self.train_loss_sum / self.train_steps
        self.rises = self.rises + 1 if train_loss < self.train_loss and val_loss > self.val_loss else 0
        self.train_loss, self.val_loss = train_loss, val_loss
        self.train_loss_sum, self.train_steps = 0.0, 0
        if self.rises == RISES and self.ranks.is_main:
            line = (
                f"train.py: the run overfits: val loss has risen {RISES} times in a row, to {val_loss:.4f}, "
                f"while train loss fell to {train_loss:.4f}. --patience {RISES} stops such a run, "
                "and --dropout 0.2 slows overfitting. ckpt.pt keeps the best weights"
            )
            self.bar.write(line, file=sys.stderr)

    def seconds(self):
        """Return the seconds of the run, evaluations and saves included."""
        return round(self.seconds_before + time.perf_counter() - self.began, 3)

    def show(self, row):
        """Show a row in the bar, or as a line where stderr is no terminal, and begin the next row."""
        self.last_val_loss = row.get("val_loss", self.last_val_loss)
        val_loss = "-" if math.isnan(self.last_val_loss) else f"{self.last_val_loss:.4f}"
        text = f"loss {row['train_loss']:.4f}, val {val_loss}, {row['tokens_per_s']:,} tokens/s"
        self.bar.set_postfix_str(text)
        if not self.on_terminal:
            done, left = row["step"] - self.first_step, self.max_iters - row["step"]
            seconds_left = (time.perf_counter() - self.began) / done * left
            print(f"step {row['step']}/{self.max_iters}: {text}, {seconds_left:.0f} s left", flush=True)
        self.loss_sum.zero_()
        self.num_steps, self.row_began = 0, time.perf_counter()

    def close(self):
        self.bar.close()

    def speed(self, state):
        """Return a line: the median speed, and its share of the speed of a plain matrix product."""
        rate, config = statistics.median(self.rates), state.model.config
        # forward and backward: 6 FLOP per weight in a matrix, 12 per layer, channel and position in attention
        flops = 6 * sum(p.numel() for name, p in state.model.named_parameters() if p.dim() == 2 and "wpe" not in name)
        flops += 12 * config.n_layer * config.n_embd * config.block_size
        peak = matmul_peak(state.device, state.dtype)
        share = rate * flops / peak / self.ranks.world_size
        return (
            f"{rate:,.0f} tokens/s, {rate * flops / 1e9:,.0f} GFLOP/s: "
            f"{share:.0%} of the {peak / 1e9:,.0f} GFLOP/s of a matrix product here"
        )


def matmul_peak(device, dtype):
    """Return the FLOP/s of the fastest square matrix product, measured now."""
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
