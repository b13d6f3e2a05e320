"""N-grams of the training text: counted by train.py, saved in the checkpoint, used as a draft model."""

import numpy as np
import torch

MAX_ORDER = 4  # tokens of the longest context; with a million characters of text, longer ones predict no better
TABLE_SIZE = 2**23  # entries of the table of contexts and tokens: at most 32 MB for each of its two arrays


def count_ngrams(ids, vocab_size, limit):
    """Return the `limit` most frequent n-grams of `ids` as {"order", "codes", "counts"}, sorted by code.

    ids  the text as integers; we read at most the first 2**24
    An n-gram is a context of `order` tokens and the token that follows. Its code is a number in base vocab_size whose
    digits are the tokens, the last token last. `order` is as large as 32-bit codes allow, at most MAX_ORDER.
    Returns None if there are no n-grams, if no order fits, or if the vocabulary has more than 2,895 tokens: then the
    table has no room for a row per token, and without contexts the text so far predicts better.
    """
    if vocab_size * (vocab_size + 1) > TABLE_SIZE:
        return None
    order = max((n for n in range(1, MAX_ORDER + 1) if vocab_size ** (n + 1) < 2**31), default=None)
    if order is None:
        return None
    ids = np.asarray(ids[: 2**24], dtype=np.int64)
    num_positions = max(0, len(ids) - order)
    code = np.zeros(num_positions, dtype=np.int64)
    for i in range(order + 1):
        code = code * vocab_size + ids[i : i + num_positions]
    codes, counts = np.unique(code, return_counts=True)
    frequent = np.sort(np.argsort(-counts, kind="stable")[:limit])
    if not len(frequent):
        return None
    codes, counts = (torch.from_numpy(x[frequent]).int() for x in (codes, counts))
    return {"order": order, "codes": codes, "counts": counts}


def order_of(ngrams):
    """Return the order of `ngrams`. Older checkpoints do not record it, because it was always 3."""
    return ngrams.get("order", 3)


def ngram_table(ngrams, vocab_size):
    """Return (logits, after): the n-grams as an automaton whose state is the longest known context.

    logits  (R, vocab_size) float32 log-probabilities of the next token, a row per known context; row 0 is the empty one
    after   (R, vocab_size) int32: the row for a context plus one more token. An unknown context falls back to its
            longest known suffix
    The estimate is interpolated absolute discounting with discount 0.75 (Ney, Essen and Kneser 1994).
    """
    base, order = vocab_size + 1, order_of(ngrams)
    codes, counts = ngrams["codes"].long(), ngrams["counts"].double()
    tokens = [codes // vocab_size**i % vocab_size for i in range(order, -1, -1)]
    # A context is a number in base vocab_size + 1 whose digits are the tokens + 1, the newest token last. `known` is
    # ascending, because a longer context is a larger number.
    known = torch.zeros(0, dtype=torch.int64)
    # the empty context falls back to the uniform distribution
    probs = torch.full((1, vocab_size), 1 / vocab_size, dtype=torch.float64)
    after = torch.zeros(1, vocab_size, dtype=torch.int32)
    for length in range(order + 1):
        # the contexts of this length that occur, and the row of each context's suffix, which is one token shorter
        context = sum(((tokens[order - 1 - i] + 1) * base**i for i in range(length)), torch.zeros_like(codes))
        contexts, row = context.unique(return_inverse=True)
        suffix_row = torch.searchsorted(known, contexts % base ** max(0, length - 1))
        if (len(contexts) + len(known)) * vocab_size > TABLE_SIZE:
            break
        # interpolate the discounted counts with the estimate for the suffix
        seen = torch.zeros(len(contexts), vocab_size, dtype=torch.float64)
        seen.index_put_((row, tokens[-1]), counts, accumulate=True)
        discount, total = 0.75 * (seen > 0), seen.sum(1, keepdim=True)
        estimate = (seen - discount + discount.sum(1, keepdim=True) * probs[suffix_row]) / total
        probs = torch.cat((probs, estimate)) if length else estimate
        # a context follows the one without its newest token, if that is known, and continues like its suffix
        if length:
            before = torch.searchsorted(known, contexts // base).clamp(max=len(known) - 1)
            exists = known[before] == contexts // base
            new_rows = torch.arange(len(known), len(known) + len(contexts), dtype=torch.int32)
            after[before[exists], contexts[exists] % base - 1] = new_rows[exists]
            after = torch.cat((after, after[suffix_row]))
        known = torch.cat((known, contexts))
    return probs.clamp(min=1e-12).log().float(), after
