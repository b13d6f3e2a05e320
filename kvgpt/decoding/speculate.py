"""Speculative decoding: guess the next tokens, verify all guesses in one forward, keep those that are right.

The tokens are those of GPT.generate for the same seed. The sampler's noise fixes the token that the model picks at each
position, so a guess is either that token or not. Everything before the first wrong guess is kept.

The noise is known before the logits are. A guess from n-grams is the token that the n-gram table picks with the same
noise. Shared noise raises the share of right guesses above that of the table's likeliest tokens. Prior art: Daliri,
Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv:2408.07978.
"""

from dataclasses import dataclass

import torch

from kvgpt.decoding.ngrams import LOOK_UP_ORDER, MAX_ORDER
from kvgpt.decoding.sampling import gumbel_noise, sample_token
from model import causal_mask


@dataclass
class DecodeState:
    """Rows that are being continued, each at its own position. decode_step uses this state and the caches only.

    The order of the fields is the order of `State` in step.c. A step writes tokens, end and cached.
    """

    tokens: torch.Tensor  # (B, block_size + 1) int64: the context; slot s holds the token at position s
    end: torch.Tensor  # (B,) int64: known tokens per row, at least 1; the last slot is for a token past the context
    cached: torch.Tensor  # (B,) int64, below end: slots whose keys and values are in the caches
    limit: torch.Tensor  # (B,) int64: where `end` stops
    first_new: torch.Tensor  # (B,) int64: slot of the row's first generated token; negative after the context has moved
    sample: torch.Tensor  # (B,) int64: index of the noise that the row uses
    seed: torch.Tensor  # (2,) int64: low and high 32 bits
    temperature: torch.Tensor  # () float32
    top_k: torch.Tensor | None  # () int64
    top_p: torch.Tensor | None  # () float32


def decode_step(model, state, num_drafts, table, noise=None, lengths=None):
    """Feed the newest token and num_drafts guesses per row; append the 1 to num_drafts + 1 accepted tokens.

    Known tokens that are not cached yet are fed first, in place of guesses. Such a step may append no token. Near
    block_size the chunk shifts left to end inside the context; overlapped slots hold known tokens and are recomputed.
    A row at its limit does not change.

    table    from ngram_table; None: guess by looking up the text so far
    noise    (B, num_drafts + 1, V) for the slots after the fed ones; None: computed here
    lengths  cache lengths after the forward, as Python integers; None in a CUDA graph, which attends over all slots
    """
    block_size, V = model.config.block_size, model.config.vocab_size

    # the chunk: fed tokens, known or guessed, and one slot more for the last prediction
    first = state.cached.clamp(max=block_size - 1 - num_drafts)[:, None]
    slots = first + torch.arange(num_drafts + 2, device=first.device)  # (B, num_drafts + 2)
    chunk = state.tokens.gather(1, slots)
    known = slots[:, 1:] < state.end[:, None]
    if noise is None:
        noise = gumbel_noise(state.seed.unbind(), state.sample, slots[:, 1:] - state.first_new[:, None], V)
    if num_drafts and table is not None:
        guess_from_ngrams(state, slots, chunk, known, noise, *table)
    elif num_drafts:
        guess_from_text(state, slots, chunk, known)

    # verify: one forward picks a token after each fed token
    fed, pos = chunk[:, :-1], slots[:, :-1]
    if lengths is None:
        x = model.hidden_states(fed, pos, block_size, causal_mask(pos, block_size))
    else:
        x = model.cached_hidden_states(fed, pos, lengths)
    picks = sample_token(model.lm_head(x), noise, state.temperature, state.top_k, state.top_p)

    # accept: a pick is final if every token fed before it was right. The last pick has no guess to compare with.
    right = known | (picks == chunk[:, 1:])
    index = torch.arange(num_drafts + 1, device=first.device)
    first_wrong = torch.where(right & (index < num_drafts), num_drafts, index).amin(1)

    # append: the pick of index i belongs to slot first + i + 1, and `end` is one past the last final pick. Slots past
    # `cached` hold keys of wrong guesses. The next chunks overwrite these slots before any query sees them.
    state.tokens.scatter_(1, slots[:, 1:], torch.where(known, chunk[:, 1:], picks))
    state.end.copy_(torch.minimum(first[:, 0] + first_wrong + 2, state.limit).maximum(state.end))
    state.cached.copy_(torch.minimum(first[:, 0] + num_drafts + 1, state.end - 1))


def guess_from_ngrams(state, slots, chunk, known, noise, logits, after):
    """Fill the unknown tokens of chunk[:, 1:-1] with samples from the n-gram table, one after the other."""
    # the row of the table for the newest tokens: the context
    before = slots[:, :1] - torch.arange(MAX_ORDER - 1, -1, -1, device=slots.device)
    text, row = state.tokens.gather(1, before.clamp(min=0)), torch.zeros_like(state.end)
    for i in range(MAX_ORDER):
        row = torch.where(before[:, i] >= 0, after[row, text[:, i]], 0)
    for i in range(1, chunk.size(1) - 1):
        guess = sample_token(logits[row], noise[:, i - 1], state.temperature, state.top_k, state.top_p)
        chunk[:, i] = torch.where(known[:, i - 1], chunk[:, i], guess)
        row = after[row, chunk[:, i]]


def guess_from_text(state, slots, chunk, known):
    """Fill the unknown tokens of chunk[:, 1:-1] with the continuation of an earlier match of the newest tokens.

    The longest match of up to LOOK_UP_ORDER tokens wins, and the latest of equally long ones. This is prompt lookup
    decoding (Saxena 2023).
    """
    text, end = state.tokens, state.end[:, None]
    slot = torch.arange(text.size(1), device=text.device)
    same, length = slot < end, 0  # length of the match that ends before each slot
    for back in range(1, LOOK_UP_ORDER + 1):
        newest = text.gather(1, (end - back).clamp(min=0))
        same = same & (slot >= back) & (end >= back) & (text.roll(back, dims=1) == newest)
        length = length + same
    best = torch.where(slot < end, length * text.size(1) + slot, -1).argmax(1, keepdim=True)
    guess = text.gather(1, (best + slots[:, 1:-1] - end).clamp(0, text.size(1) - 1))
    chunk[:, 1:-1] = torch.where(known[:, :-1], chunk[:, 1:-1], guess)
