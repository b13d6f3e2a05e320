"""Sampling: temperature, top-k, top-p, and the noise that makes a token reproducible.

`sample_token` computes argmax(logits + temperature * noise) with Gumbel noise. `gumbel_noise` is a pure function of
(seed, sample, step, token id). A token depends on its logits, seed, sample and step, and on nothing else. Cached,
uncached, batched, compiled, speculative and exported decoding pick the same tokens for the same seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvgpt.decoding.threads import one_thread


@dataclass
class Sampling:
    """The settings of one generation. Raises ValueError, naming the field, for an invalid value.

    temperature  0 is greedy: the token with the largest logit, ties to the lowest id. 1 samples from the model's
                 distribution, and less than 1 favours likely tokens
    top_k        sample from the k likeliest tokens
    top_p        sample from the fewest likeliest tokens whose probabilities add up to top_p
    seed         0 <= seed < 2**64; None draws a seed from torch's global generator
    samples      row i uses the noise of sample samples[i]; None: of sample i
    overflow     "stop" ends at a full context. "slide" goes on: see `context_start`
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    samples: Sequence[int] | None = None
    overflow: str = "stop"

    def __post_init__(self):
        def require(condition, name, why):
            if not condition:
                raise ValueError(f"{name}={getattr(self, name)!r}: {why}")

        require(0 <= self.temperature < 1e30, "temperature", "must be a number >= 0 and below 1e30")
        top_k_fits = self.top_k is None or (isinstance(self.top_k, int) and self.top_k >= 1)
        require(top_k_fits, "top_k", "must be an integer >= 1")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        if self.seed is None:
            self.seed = int(torch.randint(2**63 - 1, ()))
        seed_fits = isinstance(self.seed, int) and 0 <= self.seed < 2**64
        require(seed_fits, "seed", "must be an integer, at least 0 and below 2**64")
        require(self.overflow in ("stop", "slide"), "overflow", "must be 'stop' or 'slide'")

    @property
    def filters(self):
        """The arguments of `sample_token` after the noise."""
        return self.temperature, self.top_k, self.top_p

    def sample_ids(self, B, device):
        """Return `samples` as an int64 tensor (B,). Raises ValueError if it does not name B samples."""
        samples = range(B) if self.samples is None else self.samples
        samples = torch.as_tensor(samples, dtype=torch.int64, device=device)
        if B < 1 or samples.shape != (B,):
            raise ValueError(f"samples has shape {tuple(samples.shape)}; {B} prompts need {(B,)}, and at least one")
        return samples

    def num_new_tokens(self, T, max_new_tokens, block_size):
        """Return the number of new tokens for a prompt of T tokens. Raises ValueError if the prompt does not fit."""
        if T < 1 or (self.overflow == "stop" and T > block_size):
            raise ValueError(f"a prompt of {T} tokens; this model takes 1 to {block_size} (block_size)")
        return max(0, max_new_tokens if self.overflow == "slide" else min(max_new_tokens, block_size - T))

    def noise(self, sample_ids, steps, vocab_size):
        """Yield the noise of steps 0, 1, ..., `(B, vocab_size)` each. Computes the noise of up to 64 steps at once."""
        at_once = max(1, min(64, 2**22 // (len(sample_ids) * vocab_size)))
        for first in range(0, steps, at_once):
            some_steps = torch.arange(first, min(first + at_once, steps), device=sample_ids.device)
            with one_thread():  # waking a second thread can take milliseconds
                noise = gumbel_noise(self.seed, sample_ids, some_steps, vocab_size)
            yield from noise.unbind(1)


def context_start(start, end, block_size):
    """Return the index of the first token that the model sees when it predicts token `end`.

    The context keeps its `start` while it fits. A context that does not fit restarts from its newest
    max(1, block_size // 2) tokens, at positions from 0. The mean cost of a token is the same at any text length.
    """
    return start if end - start <= block_size else end - max(1, block_size // 2)


def text_context_start(block_size, prompt_length, end):
    """Return where the context of token `end` starts in a text that has grown from prompt_length tokens."""
    start = 0
    for i in range(prompt_length, end + 1):
        start = context_start(start, i, block_size)
    return start


def sample_token(logits, noise, temperature, top_k=None, top_p=None):
    """Pick tokens, `(...,)` int64, from logits and Gumbel noise, `(..., V)` each.

    argmax(logits / temperature + noise) has the distribution softmax(logits / temperature): the Gumbel-max trick.
    Multiplying by the temperature instead needs no division and is greedy at 0. top_k keeps exactly k tokens, ties to
    the lowest id. top_p then keeps the likeliest of them, up to and including the one that crosses top_p. The filters
    and the temperature may be tensors.
    """
    logits = logits.float()
    score = logits + temperature * noise
    if top_k is None and top_p is None:
        return score.argmax(-1)

    # filter in order of likelihood; a stable sort keeps ties in order of id
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    score = score.gather(-1, ids)
    rank = torch.arange(ids.size(-1), device=ids.device)
    if top_k is not None:
        ranked = ranked.masked_fill(rank >= top_k, -math.inf)
        score = score.masked_fill(rank >= top_k, -math.inf)
    if top_p is not None:
        divisor = torch.as_tensor(temperature, device=ids.device).clamp(min=1e-30)  # no division by 0
        probs = torch.softmax((ranked - ranked[..., :1]) / divisor, dim=-1)
        beyond = probs.cumsum(-1) - probs >= top_p
        score = score.masked_fill(beyond & (rank > 0), -math.inf)
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)


def gumbel_noise(seed, samples, steps, vocab_size):
    """Return standard Gumbel noise, `(B, S, vocab_size)` float32, always finite.

    seed     an integer, or a pair of tensors: its low and its high 32 bits
    samples  (B,) int64
    steps    (S,) int64 for all rows, or (B, S)
    The noise is a hash of (seed, sample, step, token id). There is no generator state, so the order of calls does not
    matter. The hash applies the 32-bit finalizer "lowbias32" by Chris Wellons to one counter after the other.
    """
    low32 = 0xFFFFFFFF

    def mix(h):
        h = (h ^ (h >> 16)) * 0x7FEB352D & low32
        h = (h ^ (h >> 15)) * 0x846CA68B & low32
        return h ^ (h >> 16)

    low, high = (seed & low32, seed >> 32) if isinstance(seed, int) else seed
    ids = torch.arange(vocab_size, device=steps.device)
    h = 0
    for counter in (low, high, samples[:, None, None], steps[..., None], ids):
        h = mix(h ^ mix(counter + 0x9E3779B9 & low32))  # mix(0) is 0, hence the constant
    # float32 is finest near 0, and the largest noise comes from there; exactly 1 would give infinite noise
    uniform = ((h.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
