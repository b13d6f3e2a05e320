"""Progress of a run: loss and speed since the last log row, shown as a bar or as lines."""

import shutil
import sys
import time

import torch
from tqdm import tqdm

from kvgpt.training.state import require_finite


class Meter:
    """Measures a run from its current step on.

    tokens, seconds_before  what the log of an interrupted run has already counted
    """

    def __init__(self, config, state, ranks, tokens=0, seconds_before=0.0):
        self.config, self.ranks, self.first_step = config, ranks, state.step
        self.tokens, self.seconds_before = tokens, seconds_before
        self.loss_sum, self.num_steps = torch.zeros((), device=state.device), 0  # since the last row
        self.rates = []  # tokens per second, per row
        self.val_loss = "-"  # of the last evaluation, as text
        self.on_terminal = sys.stderr.isatty() and ranks.is_main
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
        mean = self.ranks.all_reduce(self.loss_sum.item()) / self.ranks.world_size / self.num_steps
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
            if done:
                text += f", {(time.perf_counter() - self.first_ended) / done * left:.0f} s left"
            print(f"step {row['step']}/{self.config.max_iters}: {text}", flush=True)
        self.loss_sum.zero_()
        self.num_steps, self.row_began = 0, time.perf_counter()

    def close(self):
        self.bar.close()
