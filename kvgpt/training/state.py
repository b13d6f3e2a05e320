"""The state of a run: weights, optimizers and counters."""

import math
from contextlib import nullcontext

import torch

from kvgpt.training.objective import Objective
from kvgpt.training.optim import configure_optimizers


class Diverged(Exception):
    """The loss is no longer a finite number."""


def require_finite(loss):
    """Return the loss. Raises Diverged if it is infinite or NaN."""
    if not math.isfinite(loss):
        raise Diverged(f"the loss is {loss}")
    return loss


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


class TrainState:
    """The weights and everything else that changes from step to step.

    model       the GPT, for evaluation and checkpoints
    objective   the Objective of the same GPT, for training; train.py may compile or wrap it
    mtp         the layers of the objective for multi-token prediction
    optimizers  AdamW, or AdamW and Muon
    step        steps done; `iter_num` in a checkpoint, which is nanoGPT's name
    """

    def __init__(self, model, config, device, dtype):
        self.model, self.objective = model, Objective(model, config).to(device)
        self.mtp = self.objective.mtp
        self.device, self.dtype = device, dtype
        self.optimizers = configure_optimizers(self.objective, config, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
        self.step, self.best_val_loss, self.evals_since_best = 0, math.inf, 0

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
            )
        return state

    def load_training(self, ckpt):
        """Continue the run of a Checkpoint whose weights are loaded. Raises ValueError if the rest does not fit."""
        saved = ckpt.training
        try:
            for optimizer, state in zip(self.optimizers, saved["optimizer"], strict=True):
                # keep our settings, because a resume may change --weight_decay or --beta2
                settings = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict(dict(state=state["state"], param_groups=settings))
            self.mtp.load_state_dict(saved.get("mtp", {}))  # older versions had no mtp
            if self.scaler.is_enabled() and saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
            self.step, self.evals_since_best = saved["iter_num"], saved["evals_since_best"]
            self.best_val_loss = ckpt.best_val_loss
        except Exception as error:  # torch raises many kinds of errors
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"{ckpt.path} does not contain the state of this run ({why}): start a new run") from None
