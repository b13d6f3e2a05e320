"""Compare two ways to decode: the same tokens, a near-tie, or a difference."""

from dataclasses import replace

import torch

from kvgpt.decoding.sequence import Sequence, text_context_start
from model import eval_mode, gumbel_noise, sample_token, stream_tokens

# A full and a cached forward differ by up to 5e-5, so rounding can reorder logits that are closer than NEAR_TIE.
NEAR_TIE = 1e-4


@torch.no_grad()
def near_tie(model, context, sample, step, picks, sampling):
    """Return whether rounding alone can explain two different picks after the same context.

    context       token ids that the model sees
    sample, step  indices of the noise and of the new token
    picks         the two token ids
    sampling      a Sampling
    The picks are a near-tie if each of them wins once the logits move by at most NEAR_TIE in its favour.
    """
    with eval_mode(model):
        logits = model(torch.tensor([context], device=next(model.parameters()).device))[0][:, -1].float()
    counters = (torch.tensor([i], device=logits.device) for i in (sample, step))
    noise = gumbel_noise(sampling.seed, *counters, logits.size(-1))[:, 0]

    # rounding also moves the probability at which top_p cuts
    top_p, temperature = sampling.top_p, sampling.temperature
    edges = {top_p}
    if top_p is not None and temperature > 0:
        slack = NEAR_TIE / temperature + 1e-6  # 1e-6 for the sum of many probabilities in float32
        edges |= {min(1.0, top_p + slack), max(1e-9, top_p - slack)}
    winners = set()
    for favoured, other in (picks, picks[::-1]):
        shifted = logits.clone()
        shifted[:, favoured] += NEAR_TIE / 2
        shifted[:, other] -= NEAR_TIE / 2
        winners |= {sample_token(shifted, noise, replace(sampling, top_p=edge)).item() for edge in edges}
    return set(picks) <= winners


def logits_after(model, ids, T, kv_cache):
    """Return the logits `(V,)` of the plain loop after `ids`, the first T of which are the prompt."""
    start = text_context_start(model.config.block_size, T, len(ids))
    context = torch.tensor([ids[start:]], device=next(model.parameters()).device)
    if not kv_cache:
        return model.next_logits(context)[0].float()
    cache, prefilled = model.new_cache(1), max(1, model.config.block_size // 2) if start else T
    logits = model.next_logits(context[:, :prefilled], cache)
    for i in range(prefilled, context.size(1)):
        logits = model.next_logits(context[:, i : i + 1], cache)
    return logits[0].float()


def first_difference(ours, theirs):
    """Return the first index at which two lists differ, or None. A missing item differs."""
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def verify(model, prompts, texts, max_new_tokens, kv_cache, sampling, tokenizer, stops=()):
    """Compare texts with those of the plain loop, stream_tokens, on the same prompts.

    model       a GPT, or any model that works with stream_tokens
    prompts     B int64 tensors of one dimension
    texts       B lists of ids: the prompts and their continuations
    kv_cache    whether the plain loop uses the cache: the opposite of the run that we compare
    sampling    the Sampling of that run
    tokenizer   the model's tokenizer
    stops       the stop strings of the texts
    Returns (same, lines). `same` is False for a difference that is not a near-tie. `lines` is a report.
    """
    how = "with" if kv_cache else "without"
    lines, num_equal = [], 0
    samples = sampling.sample_ids(len(prompts), "cpu").tolist()
    for T in sorted({len(prompt) for prompt in prompts}):
        # generate the rows whose prompts have this length
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == T]
        settings = replace(sampling, samples=[samples[row] for row in rows])
        idx = torch.stack([prompts[row] for row in rows])
        plain = torch.cat((idx, *stream_tokens(model, idx, max_new_tokens, settings, kv_cache)), dim=1).tolist()

        # compare
        for row, theirs in zip(rows, plain):
            ours, theirs = texts[row], Sequence(theirs[:T], tokenizer, stops).add(theirs[T:]).ids
            position = first_difference(ours, theirs)
            num_equal += position is None
            if position is None:
                continue
            picks = (*ours[position : position + 1], *theirs[position : position + 1])
            pair = ", but ".join(repr(tokenizer.show(i)) for i in picks)
            where = f"row {row}, new token {position - T}: {pair} {how} the cache. Logits of the two: "
            both_ways = [logits_after(model, ours[:position], T, kv) for kv in (True, False)]
            cached, uncached = (" and ".join(f"{logits[i]:.5f}" for i in picks) for logits in both_ways)
            where += f"{cached} with the cache, {uncached} without"
            context = ours[text_context_start(model.config.block_size, T, position) : position]
            if len(picks) < 2 or not near_tie(model, context, samples[row], position - T, picks, sampling):
                return False, [*lines, f"DIFFERENT at {where}"]
            lines.append(
                f"near-tie at {where}. Rounding decides between logits this close. All earlier tokens are equal."
            )
    num_new = sum(len(text) - len(prompt) for text, prompt in zip(texts, prompts))
    summary = f"{num_new} new tokens, compared with those {how} the cache: {num_equal} of {len(texts)} samples match"
    return True, [*lines, summary]
