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
        signal.signal(signal.SIGINT, self._receive)
        signal.signal(signal.SIGTERM, self._receive)
        # Windows has no SIGHUP, and nohup ignores it on purpose
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._receive)

    def _receive(self, signum, frame):
        self.received = self.received or signum
        if self.ranks.world_size == 1:  # torchrun passes on signals that a terminal has sent to every process already
            signal.signal(signum, signal.SIG_DFL)

    def poll(self):
        """Return the signal that any process has received, or 0. All processes get the same answer."""
        return int(self.ranks.all_reduce(self.received, dist.ReduceOp.MAX))
