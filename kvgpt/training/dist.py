"""One run on several processes, started by torchrun."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kvgpt.cli import pick_device, torchrun_ranks


class Ranks:
    """The processes of a run. Without torchrun there is one.

    Every process runs all of train.py, but only rank 0 prints, evaluates and writes files.
    """

    def __init__(self):
        self.rank, self.local_rank, self.world_size = torchrun_ranks() or (0, 0, 1)
        self.is_main = self.rank == 0
        if not self.is_main:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def pick_device(self, name):
        """Return this process's device: one GPU per process on a machine with GPUs. Raises ValueError."""
        if self.world_size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
            name = f"cuda:{self.local_rank}"
        return pick_device(name)

    def connect(self, device):
        """Wait until all processes have started."""
        if self.world_size > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

    def wrap(self, objective):
        """Return the module to call in training. It averages gradients over the processes."""
        return DistributedDataParallel(objective) if self.world_size > 1 else objective

    def sync_gradients(self, objective, sync):
        """Set whether the next backward averages the gradients, as only the last micro-step of a step must."""
        if self.world_size > 1:
            objective.require_backward_grad_sync = sync

    def all_reduce(self, value, op=dist.ReduceOp.SUM):
        """Reduce a number over all processes, by default to the sum."""
        if self.world_size == 1:
            return value
        value = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(value, op)
        return value.item()

    def finish(self, exit_code):
        """Wait for all processes, and end all but rank 0."""
        if self.world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
        if not self.is_main:
            os._exit(exit_code)  # during a normal exit, a thread of gloo can abort the process
