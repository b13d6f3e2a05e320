"""Ctrl-C and other signals that stop a run after its present step."""

import signal

import torch.distributed as dist


class StopSignals:
    """Ctrl-C, SIGTERM and a lost terminal, as a number to poll.

    Without torchrun, a second signal ends the process at once.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self.received = 0
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            # nohup ignores SIGHUP on purpose, and a shell script SIGINT for a command that ends with &
            if number and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)

    def _receive(self, signum, frame):
        self.received = self.received or signum
        if self.ranks.world_size == 1:  # torchrun passes on signals that a terminal has sent to every process already
            signal.signal(signum, signal.SIG_DFL)

    def poll(self):
        """Return the signal that any process has received, or 0. All processes get the same answer."""
        return int(self.ranks.all_reduce(self.received, dist.ReduceOp.MAX))
