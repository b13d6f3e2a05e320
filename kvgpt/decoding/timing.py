"""What a generation costs: its times in the terms of serving (TTFT, TPOT, ITL, E2E), and the bytes of its cache."""

import math
import time

import torch

from kvgpt.decoding.sequence import text_context_start
from model import GPTConfig


class Timing:
    """Arrival times of the blocks of one generation. The clock starts with the object.

    times  seconds from the start to the arrival of each block
    sizes  new tokens per row in each block, on average over the rows
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
        """Record the end of a step that gave every row `size` new tokens."""
        self.times.append(self.now() - self.start)
        self.sizes.append(size)

    def summary(self, num_tokens):
        """Return the figures of a generation with num_tokens tokens in all rows together.

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


def report(config, dtype, kv_cache, timing, texts, prompts):
    """Return the lines of sample.py's report.

    texts  lists of ids, prompts included
    """
    produced = sum(map(len, texts)) - sum(map(len, prompts))
    figures, num_steps, per_row = timing.summary(produced), len(timing.times), sum(timing.sizes)
    line = f"{produced} tokens: TTFT {figures['ttft_ms']:.2f} ms"
    if num_steps > 1:
        line += f", TPOT {figures['tpot_ms']:.3f} ms"
        line += f", ITL p50 {figures['itl_p50_ms']:.3f} ms, p99 {figures['itl_p99_ms']:.3f} ms"
        line += f" per chunk of {per_row / num_steps:.2f}" if per_row > num_steps else ""
    lines = [f"{line}, E2E {figures['e2e_ms']:.1f} ms, {figures['tokens_per_s']:,.0f} tokens/s"]
    if not kv_cache:
        lines.append("KV cache: off")
    elif isinstance(config, GPTConfig):  # a model of transformers may keep anything in its cache
        cached = max(map(len, texts)) - 1  # the last token is never fed
        cached -= text_context_start(config.block_size, max(map(len, prompts)), cached)
        factors = (config.n_layer, config.num_kv_heads, config.head_size, cached, len(texts))
        formula = "2 * {} layers * {} kv heads * {} head size * {} tokens * {} rows".format(*factors)
        itemsize = getattr(torch, dtype).itemsize
        lines.append(f"KV cache: {formula} * {itemsize} bytes = {2 * math.prod(factors) * itemsize:,} bytes")
    return lines
