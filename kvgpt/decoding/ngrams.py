"""N-grams of the training text: counted by train.py, kept in the checkpoint, used as a draft model."""

import numpy as np
import torch

ORDER = 3  # context length: an n-gram is ORDER tokens and the token that follows them
LOOK_UP_ORDER = 3  # tokens of the text so far that a match has at most, where there are no counts


def count_ngrams(ids, vocab_size, limit):
    """Return the `limit` most frequent n-grams of `ids` as {"codes", "counts"}, sorted by code.

    ids  the text, integers; only the first 2**24 are read
    The code of an n-gram is a number in base vocab_size whose digits are the tokens, the last token last. N-grams that
    occur once are left out. Returns None if nothing is left, or if codes would exceed 63 bits.
    """
    if vocab_size ** (ORDER + 1) >= 2**63:
        return None
    ids = np.asarray(ids[: 2**24], dtype=np.int64)
    num_positions = max(0, len(ids) - ORDER)
    code = np.zeros(num_positions, dtype=np.int64)
    for i in range(ORDER + 1):
        code = code * vocab_size + ids[i : i + num_positions]
    codes, counts = np.unique(code, return_counts=True)
    frequent = np.sort(np.argsort(-counts, kind="stable")[:limit])
    frequent = frequent[counts[frequent] > 1]
    if not len(frequent):
        return None
    dtype = np.int32 if vocab_size ** (ORDER + 1) < 2**31 else np.int64
    return {
        "codes": torch.from_numpy(codes[frequent].astype(dtype)),
        "counts": torch.from_numpy(counts[frequent]).int(),
    }


def valid_ngrams(ngrams, vocab_size):
    """Return whether `ngrams`, read from a file, can be a result of count_ngrams for this vocabulary."""
    try:
        codes, counts = ngrams["codes"], ngrams["counts"]
        paired = codes.dim() == counts.dim() == 1 and len(codes) == len(counts) > 0
        whole = not codes.is_floating_point() and not counts.is_floating_point()
        in_range = (codes >= 0) & (codes < vocab_size ** (ORDER + 1)) & (counts > 0)
        return paired and whole and bool(in_range.all())
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError):
        return False


def ngram_table(ngrams, vocab_size, device):
    """Return (contexts, logits): the known contexts, and the log-probabilities of the next token after each of them.

    contexts  (R,) int64, ascending. A context of 0 to ORDER tokens is a number in base vocab_size + 1 whose digits are
              the tokens + 1, the newest token last. A longer context has a larger number. If a context is known, its
              endings are known, too
    logits    (R, vocab_size) float32
    The estimate is interpolated absolute discounting with discount 0.75 (Ney, Essen and Kneser 1994).
    """
    base = vocab_size + 1
    codes, counts = ngrams["codes"].long(), ngrams["counts"].double()
    tokens = [codes // vocab_size**i % vocab_size for i in range(ORDER, -1, -1)]
    known = torch.zeros(0, dtype=torch.int64)
    # `probs` holds the estimates for all shorter contexts; the empty context falls back on the uniform distribution
    probs = torch.full((1, vocab_size), 1 / vocab_size, dtype=torch.float64)
    for length in range(ORDER + 1):
        # the contexts of this length that occur, and the row of each context's suffix, which is one token shorter
        context = sum(((tokens[ORDER - 1 - i] + 1) * base**i for i in range(length)), torch.zeros_like(codes))
        contexts, row = context.unique(return_inverse=True)
        suffix_row = torch.searchsorted(known, contexts % base ** max(0, length - 1))
        if (len(contexts) + len(known)) * vocab_size > 2**23:  # at most 32 MB
            break
        # interpolate the discounted counts with the estimate for the suffix
        seen = torch.zeros(len(contexts), vocab_size, dtype=torch.float64)
        seen.index_put_((row, tokens[-1]), counts, accumulate=True)
        discount, total = 0.75 * (seen > 0), seen.sum(1, keepdim=True)
        estimate = (seen - discount + discount.sum(1, keepdim=True) * probs[suffix_row]) / total
        known = torch.cat((known, contexts))
        probs = torch.cat((probs, estimate)) if length else estimate
    return known.to(device), probs.clamp(min=1e-12).log().float().to(device)
