"""Several processes per run."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kvgpt.checkpoint import first_line
from kvgpt.cli import TORCHRUN, pick_device, torchrun_ranks


class Ranks:
    """The processes of a run. Without torchrun there is one process.

    Every process runs all of train.py. Rank 0 alone prints, evaluates and writes. Raises ValueError for an environment
    that holds a part of what torchrun sets.
    """

    def __init__(self):
        ranks, given = torchrun_ranks(), [name for name in TORCHRUN[:3] if name in os.environ]
        if given and not ranks:
            values = ", ".join(f"{name}={os.environ[name]}" for name in given)
            raise ValueError(
                f"the environment has {values}, but torchrun sets RANK, LOCAL_RANK and WORLD_SIZE to numbers, and "
                f"MASTER_ADDR and MASTER_PORT too: unset {' '.join(given)}, or start train.py with torchrun"
            )
        self.rank, self.local_rank, self.world_size = ranks or (0, 0, 1)
        self.is_main = self.rank == 0
        if not self.is_main:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def pick_device(self, name):
        """Return this process's device: one GPU per process on a machine with GPUs. Raises ValueError."""
        if self.world_size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
            name = f"cuda:{self.local_rank}"
        return pick_device(name)

    def connect(self, device):
        """Wait until all processes are there. Raises ValueError if they cannot meet."""
        if self.world_size > 1:
            try:
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
            except (ValueError, RuntimeError) as error:
                where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
                raise ValueError(f"the processes cannot meet at {where}: {first_line(error)}") from None

    def wrap(self, objective):
        """Return the module to call in training. With several processes, it averages gradients over them."""
        return DistributedDataParallel(objective) if self.world_size > 1 else objective

    def sync_gradients(self, objective, sync):
        """Set whether the next forward and backward average the gradients. Only the last micro-step of a step does."""
        if self.world_size > 1:
            objective.require_backward_grad_sync = sync

    def all_reduce(self, value, op=dist.ReduceOp.SUM):
        """Return a number reduced over all processes, by default its sum."""
        if self.world_size == 1:
            return value
        value = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(value, op)
        return value.item()

    def finish(self, exit_code):
        """Wait for all processes. All but rank 0 end here."""
        if self.world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
        if not self.is_main:
            os._exit(exit_code)  # a thread of gloo can abort the process during the interpreter's own exit
