"""State of a run: weights, optimizers and counters."""

import math
from contextlib import nullcontext

import torch

from kvgpt.training.objective import Objective
from kvgpt.training.optim import Muon, configure_optimizers


class Diverged(Exception):
    """The loss is no longer a finite number."""

    def __init__(self, loss):
        super().__init__(f"the loss is {loss}")


def require_finite(loss):
    """Return the loss. Raises Diverged if it is infinite or NaN."""
    if not math.isfinite(loss):
        raise Diverged(loss)
    return loss


class TrainState:
    """The weights and everything that goes with them from step to step.

    model             the GPT, for evaluation and checkpoints
    objective         the Objective of the same GPT, which training calls; train.py may compile or wrap it
    mtp               the layers of the objective that no model has
    device, dtype     where the forward runs, and in which dtype
    optimizers        AdamW, or AdamW and Muon
    scaler, autocast  for a dtype other than float32
    step              steps done; `iter_num` in a checkpoint, which is nanoGPT's name
    best_val_loss     of all evaluations
    evals_since_best  evaluations since the best one
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

        with_optimizers  False gives half of the bytes, enough to generate text and too little to resume the run
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
        """Continue the run of a Checkpoint, whose weights the model has already. Raises ValueError if it is damaged."""
        saved = ckpt.training
        try:
            for optimizer, state in zip(self.optimizers, saved["optimizer"], strict=True):
                # load_state_dict overwrites the settings of this run, such as weight_decay: restore them
                wanted = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
                optimizer.load_state_dict(state)
                for group, settings in zip(optimizer.param_groups, wanted):
                    group |= settings
                check_optimizer(optimizer)
            self.mtp.load_state_dict(saved.get("mtp", {}))  # runs of older versions have no such layers
            if self.scaler.is_enabled() and saved["scaler"]:
                if not all(type(value) in (int, float) for value in saved["scaler"].values()):
                    raise ValueError("scaler: no numbers")
                self.scaler.load_state_dict(saved["scaler"])
            self.step, self.evals_since_best = saved["iter_num"], saved["evals_since_best"]
            self.best_val_loss = ckpt.best_val_loss
            counters = dict(iter_num=self.step, evals_since_best=self.evals_since_best)
            for name, value in counters.items():
                if type(value) is not int or value < 0:
                    raise ValueError(f"{name}={value!r}")
            if not self.best_val_loss >= 0:  # NaN, which no loss is below
                raise ValueError(f"best_val_loss={self.best_val_loss}")
        except Exception as error:  # a damaged file can raise anything
            why = " ".join(repr(error).split())[:200]
            raise ValueError(f"{ckpt.path} does not hold the state of this run ({why}): start a new run") from None


def check_optimizer(optimizer):
    """Raise ValueError unless the loaded state of an AdamW or Muon fits its parameters.

    A fused step reads and writes as many numbers as the parameter has, whatever the size of the state is.
    """
    params = {p for group in optimizer.param_groups for p in group["params"]}
    for p, state in optimizer.state.items():
        names = {"momentum_buffer"} if isinstance(optimizer, Muon) else {"step", "exp_avg", "exp_avg_sq"}
        if p not in params or state.keys() != names:
            raise ValueError(f"optimizer: {sorted(map(str, state))} instead of {sorted(names)}")
        for name, value in state.items():
            shape = () if name == "step" else p.shape
            plain = value.dtype == torch.float32 and value.layout == torch.strided and value.is_contiguous()
            if value.shape != shape or not plain:
                raise ValueError(f"optimizer: {name} is {value.dtype} {tuple(value.shape)} instead of {tuple(shape)}")
