"""N-grams of the training text: training targets for train.py, and a draft model for sample.py.

train.py calls ngram_distributions for the targets of the modern recipe, and count_ngrams for what it saves in the
checkpoint, from which --draft builds an ngram_table.
"""

import numpy as np
import torch

# -- training targets --------------------------------------------------------------------------------------------------

# The next character of the text is one sample of what could follow, so its gradient is noisy. The average over all
# places where the same few characters come before is less noisy. But an n-gram sees only those few, so its weight
# falls during training. Malagutti et al. 2024 (arXiv:2403.17240) regularize with n-grams too; the decay is ours.

TARGET_ORDER = 7  # tokens of context; most longer ones occur once, so there is nothing to average
MIN_TARGET_ORDER = 3  # shorter contexts are not worth using
DISCOUNT = 0.9  # subtracted from each follower's count, in favour of the next shorter context
STRENGTH = 1.0  # pseudo-counts given to the next shorter context
TARGET_TABLE_SIZE = 2**25  # entries: 128 MiB
MAX_TARGET_TEXT = 2**24  # tokens; more would take minutes and gigabytes


def ngram_distributions(ids, vocab_size, device):
    """Return (table, rows): table[rows[i]] is the n-gram distribution of token i + 1 of the text.

    ids    (N,) integers below vocab_size
    table  (contexts, V) float32, on the device
    rows   (N,) int64: the row of the context that ends with token i
    Returns None for text that is too long or has too many distinct tokens.
    The longest context has TARGET_ORDER tokens, or fewer if the table would be too large. Distributions are those of
    Kneser and Ney (1995), interpolated as in Teh (2006). With n counts of m distinct followers,

        P(w) = (count(w) - DISCOUNT + (DISCOUNT m + STRENGTH) P_shorter(w)) / (n + STRENGTH)

    where a follower that never occurs has neither count nor discount. In a shorter context we do not count how often a
    follower occurs, but how many distinct tokens precede the two.
    """
    if len(ids) > MAX_TARGET_TEXT:
        return None
    ids = ids.astype(np.int64)

    # number the contexts of each length, from short to long
    rows = np.zeros(len(ids), np.int64)
    parents = [np.zeros(1, np.int64)]  # per length: the row of every context without its oldest token
    for k in range(1, TARGET_ORDER + 1):  # add the token k - 1 back; at the start of the text it comes from the end
        found, longer = np.unique(rows * vocab_size + np.roll(ids, k - 1), return_inverse=True)
        if len(found) * vocab_size > TARGET_TABLE_SIZE:
            if k <= MIN_TARGET_ORDER:
                return None
            break
        rows = longer
        parents.append(found // vocab_size)

    # count the followers, from long to short
    pairs, counts = np.unique(rows[:-1] * vocab_size + ids[1:], return_counts=True)  # (context, follower)
    followers = [(pairs, counts)]
    for parent in parents[:0:-1]:
        pairs, counts = np.unique(parent[pairs // vocab_size] * vocab_size + pairs % vocab_size, return_counts=True)
        followers.append((pairs, counts))

    # average, from short to long; in place, because a table can be 128 MiB large
    table = np.full((1, vocab_size), 1 / vocab_size, np.float32)
    for parent, (pairs, counts) in zip(parents, reversed(followers)):
        row, follower = divmod(pairs, vocab_size)
        total = STRENGTH + np.bincount(row, counts, len(parent))
        table = table[parent]
        table *= ((STRENGTH + DISCOUNT * np.bincount(row, minlength=len(parent))) / total)[:, None]
        table[row, follower] += (counts - DISCOUNT) / total[row]
    return torch.from_numpy(table).to(device), rows


# -- the draft model ---------------------------------------------------------------------------------------------------

MAX_ORDER = 4  # tokens of the longest context; with a million characters of text, longer ones predict no better
TABLE_SIZE = 2**23  # entries of the table of contexts and tokens: at most 32 MB for each of its two arrays


def count_ngrams(ids, vocab_size, limit):
    """Return the `limit` most frequent n-grams of `ids` as {"order", "codes", "counts"}, sorted by code.

    ids  the text as integers; we read at most the first 2**24
    An n-gram is a context of `order` tokens and the token that follows. Its code is a number in base vocab_size whose
    digits are the tokens, the last token last. `order` is as large as 32-bit codes allow, at most MAX_ORDER.
    Returns None if there are no n-grams, or if the vocabulary has more than 2,895 tokens: then the table has no room
    for a row per token, and without contexts the text so far predicts better.
    """
    if vocab_size * (vocab_size + 1) > TABLE_SIZE:
        return None
    order = max(n for n in range(1, MAX_ORDER + 1) if vocab_size ** (n + 1) < 2**31)
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


def order_of(ngrams, vocab_size):
    """Return the order of `ngrams` from a file. Raises ValueError unless count_ngrams could have made them."""

    def require(fine, what):
        if not fine:
            raise ValueError(f"the n-gram counts are damaged ({what}): decode without drafts")

    require(isinstance(ngrams, dict) and ngrams.keys() >= {"codes", "counts"}, "they need codes and counts")
    order = ngrams.get("order", 3)  # older checkpoints do not record it, because it was always 3
    fits = type(order) is int and 1 <= order <= MAX_ORDER and vocab_size ** (order + 1) < 2**63
    require(fits, f"the order {order!r:.50} does not fit {vocab_size} tokens")
    codes, counts = ngrams["codes"], ngrams["counts"]
    for x in (codes, counts):
        whole = isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.dtype in (torch.int32, torch.int64)
        # an expanded tensor, which is not contiguous, can claim any size
        fine = whole and x.dim() == 1 and len(x) and x.is_contiguous()
        require(fine, "codes and counts must be lists of integers, and not empty")
    require(len(codes) == len(counts), f"there are {len(codes)} codes and {len(counts)} counts")
    ascend = codes[0] >= 0 and (codes[1:] > codes[:-1]).all() and codes[-1] < vocab_size ** (order + 1)
    require(ascend, f"the codes must be n-grams of {order + 1} out of {vocab_size} tokens, and ascend")
    require((counts > 0).all(), "a count is not positive")
    return order


def ngram_table(ngrams, vocab_size):
    """Return (logits, after): the n-grams as an automaton whose state is the longest known context.

    logits  (R, vocab_size) float32 log-probabilities of the next token, a row per known context; row 0 is the empty one
    after   (R, vocab_size) int32: the row for a context plus one more token. An unknown context falls back to its
            longest known suffix
    The estimate is interpolated absolute discounting with discount 0.75 (Ney, Essen and Kneser 1994). Raises ValueError
    for damaged counts.
    """
    order = order_of(ngrams, vocab_size)
    base = vocab_size + 1
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
