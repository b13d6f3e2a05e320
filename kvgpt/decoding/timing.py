"""The time of a generation, in the terms of serving: TTFT, TPOT, ITL, E2E."""

import time

import torch


class Timing:
    """Arrival times of the blocks of one generation. The clock starts when the object is made.

    times  seconds from the start to the arrival of each block
    sizes  new tokens per row in each block
    """

    def __init__(self, device=None):
        self.device = device
        self.times, self.sizes = [], []
        self.start = self.now()

    def now(self):
        """Return the time in seconds, after the device has finished its work."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def record(self, size=1):
        """Record a step that has just ended and gave every row `size` new tokens."""
        self.times.append(self.now() - self.start)
        self.sizes.append(size)

    def summary(self, num_tokens):
        """Return the figures of a generation of num_tokens tokens in all rows together.

        ttft_ms                 time to first token: from the start to the end of the first step
        tpot_ms                 time per output token: mean over the tokens per row after the first step
        itl_p50_ms, itl_p99_ms  inter-token latency: median and 99th percentile of the time between blocks
        e2e_ms                  end to end: from the start to the end of the last step
        tokens_per_s            num_tokens per second, end to end
        """
        gaps = torch.tensor(self.times, dtype=torch.float64).diff() * 1e3
        p50, p99 = (0.0, 0.0) if not len(gaps) else torch.quantile(gaps, gaps.new_tensor([0.5, 0.99])).tolist()
        return dict(
            ttft_ms=self.times[0] * 1e3,
            tpot_ms=(self.times[-1] - self.times[0]) * 1e3 / max(1, sum(self.sizes[1:])),
            itl_p50_ms=p50,
            itl_p99_ms=p99,
            e2e_ms=self.times[-1] * 1e3,
            tokens_per_s=num_tokens / self.times[-1],
        )
