"""Speculative decoding: draft the next tokens, check all of them in one forward, keep those that the model picks.

The tokens are those of GPT.generate for the same seed. The sampler's noise determines which token the model picks at
each position. A draft token either is that token or it is not, and everything before the first rejected one is final.

We know the noise before we know the logits. So we let the n-gram table pick its draft token with the same noise, which
is right more often than the most likely token of the table. Prior art: Daliri, Musco and Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.
"""

from dataclasses import dataclass

import torch

from extras.decode.ngrams import MAX_ORDER
from model import KVCache, gumbel_noise, require_finite, sample_token


@dataclass
class BatchState:
    """The rows of a generation, each at its own position. All tensors are on the CPU, wherever the model is.

    A step reads all fields and writes tokens, end and cached. Their order is that of `State` in step.c.
    """

    tokens: torch.Tensor  # (B, block_size + 1) int64: the context; slot s holds the token at position s
    end: torch.Tensor  # (B,) int64: known tokens per row, at least 1; the last slot is for a token past the context
    cached: torch.Tensor  # (B,) int64, below end: slots whose keys and values are in the cache
    limit: torch.Tensor  # (B,) int64: where `end` stops
    first_new: torch.Tensor  # (B,) int64: slot of the row's first generated token; negative after the context has moved
    sample: torch.Tensor  # (B,) int64: index of the noise that the row uses
    seed: torch.Tensor  # (2,) int64: low and high 32 bits
    temperature: torch.Tensor  # () float32
    top_k: torch.Tensor | None  # () int64
    top_p: torch.Tensor | None  # () float32


class RaggedCache(KVCache):
    """A KVCache whose rows may be at different positions: pos is `(B, T)`.

    Shorter rows hold padding or rejected draft tokens beyond their own positions, up to `length`, that of the longest
    row. A query sees the slots up to its own position, which hides them. Where all rows are at the same position, pos
    is `(T,)`, as in a KVCache.
    """

    def next_positions(self, idx, pos):
        return super().next_positions(idx, pos) if pos is None or pos.dim() == 1 else pos

    def update(self, layer, pos, k, v):
        if pos.dim() == 1:
            return super().update(layer, pos, k, v)
        rows = torch.arange(len(k), device=pos.device)[:, None]
        key = self.key[layer]
        value = self.value[layer]
        key.transpose(1, 2)[rows, pos] = k.transpose(1, 2)
        value.transpose(1, 2)[rows, pos] = v.transpose(1, 2)
        t = self.length + k.size(2)
        return key.narrow(2, 0, t), value.narrow(2, 0, t)

    def mask(self, pos):
        mask = super().mask(pos)
        return mask if pos.dim() == 1 else mask[:, None]  # (B, 1, T, t)


def prefill(model, state, slots):
    """Return a RaggedCache with the known tokens of all rows, except the newest of each. Sets state.cached."""
    cache = model.new_cache(len(state.end), slots)
    cache = model.kv_cache = RaggedCache(cache.key, cache.value)
    longest = int(state.end.max()) - 1
    if longest:
        model(state.tokens[:, :longest].to(model.device), cache=cache, last=True)
    state.cached.copy_(state.end - 1)
    return cache


def noise_window(model, state, seed, chunk):
    """Return noise_of(steps): the noise `(B, chunk, V)` of each row from its own step on, on the device of the model.

    steps is (B,) int64. We compute up to 64 steps at once, because that is cheaper.
    """
    B = len(state.end)
    vocab_size = model.config.vocab_size
    device = model.device
    width = max(chunk, min(64, 2**22 // (B * vocab_size)))
    first = torch.full((B,), -(2**62))  # the step where each row's window starts; so far there is none
    noise = None  # of the windows

    def noise_of(steps):
        nonlocal first, noise
        offsets = (steps - first).tolist()
        if not all(0 <= offset <= width - chunk for offset in offsets):
            first = steps
            offsets = [0] * B
            window = (first[:, None] + torch.arange(width)).to(device)
            noise = gumbel_noise(seed, state.sample.to(device), window, vocab_size)
        if len(set(offsets)) == 1:
            return noise[:, offsets[0] : offsets[0] + chunk]
        at = (torch.tensor(offsets)[:, None] + torch.arange(chunk)).to(device)
        return noise.gather(1, at[..., None].expand(-1, -1, vocab_size))

    return noise_of


def speculative_step(model, cache, state, num_drafts, table, noise_of, sampling):
    """Feed the newest token and num_drafts draft tokens per row, and append the 1 to num_drafts + 1 correct tokens.

    Known tokens that are not cached yet take the place of draft tokens, so a step may append nothing. Near block_size
    the chunk shifts left to end inside the context, and feeds a few known tokens again. A row at its limit does not
    change.

    cache     the RaggedCache of the rows
    table     from ngram_table; needed for draft tokens
    noise_of  noise_of(steps) is the noise `(B, num_drafts + 1, V)` from each row's own step on
    Returns the slot of the first fed token of each row.
    """
    # the chunk: fed tokens, known or drafted, and one more slot for the last prediction
    first = state.cached.clamp(max=model.config.block_size - 1 - num_drafts)
    slots = first[:, None] + torch.arange(num_drafts + 2)  # (B, num_drafts + 2)
    chunk = state.tokens.gather(1, slots)
    known = slots[:, 1:] < state.end[:, None]
    noise = noise_of(first + 1 - state.first_new)
    if num_drafts:
        draft_from_ngrams(state, slots, chunk, known, noise.cpu(), sampling, *table)

    # check: one forward picks a token after each fed token
    starts = first.tolist()
    cache.length = max(starts)  # forget the draft tokens that were rejected
    pos = None if len(set(starts)) == 1 else slots[:, :-1].to(model.device)
    logits, _ = model(chunk[:, :-1].to(model.device), pos=pos, cache=cache)
    require_finite(logits)
    picks = sample_token(logits, noise, sampling).cpu()

    # accept: a pick is final if every token fed before it was right. The last pick has no draft token to compare with
    right = known | (picks == chunk[:, 1:])
    index = torch.arange(num_drafts + 1)
    first_wrong = torch.where(right & (index < num_drafts), num_drafts, index).amin(1)

    # append: pick i goes to slot first + i + 1, and `end` is one past the last final pick. Slots past `cached` hold the
    # keys of rejected draft tokens, which the next step overwrites
    state.tokens.scatter_(1, slots[:, 1:], torch.where(known, chunk[:, 1:], picks))
    state.end.copy_(torch.minimum(first + first_wrong + 2, state.limit).maximum(state.end))
    state.cached.copy_(torch.minimum(first + num_drafts + 1, state.end - 1))
    return starts


def draft_from_ngrams(state, slots, chunk, known, noise, sampling, logits, after):
    """Fill the unknown tokens of chunk[:, 1:-1] with samples from the n-gram table, one after another."""
    # the row of the table for the newest tokens: the context
    before = slots[:, :1] - torch.arange(MAX_ORDER - 1, -1, -1)
    text = state.tokens.gather(1, before.clamp(min=0))
    row = torch.zeros_like(state.end)
    for i in range(MAX_ORDER):
        row = torch.where(before[:, i] >= 0, after[row, text[:, i]], 0)
    for i in range(1, chunk.size(1) - 1):
        token = sample_token(logits[row], noise[:, i - 1], sampling)
        chunk[:, i] = torch.where(known[:, i - 1], chunk[:, i], token)
        row = after[row, chunk[:, i]]
