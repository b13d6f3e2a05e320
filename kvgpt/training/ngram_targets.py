"""Soft targets: the distribution of the next character after the same few characters anywhere in the training text.

The character that follows in the text is one sample of what could follow. An n-gram distribution averages many samples.
The average gives a gradient with less noise. An n-gram sees at most MAX_ORDER characters. The targets therefore begin
as n-gram distributions and end as a mixture with the text: see objective.py. Malagutti et al. 2024 (arXiv:2403.17240)
regularize language models by smoothed n-gram distributions. The fall of their share is this kit's.
"""

from dataclasses import dataclass

import numpy as np
import torch

MAX_ORDER = 7  # characters of context; with more of them most contexts occur once, and nothing is averaged
DISCOUNT = 0.9  # that every count of a follower loses to the next shorter context
STRENGTH = 1.0  # that the next shorter context has in any case, in counts
MIN_ORDER = 3  # a table of shorter contexts is not used
MAX_ENTRIES = 2**25  # of the table: 128 MiB
MAX_LENGTH = 2**24  # of the text; a longer one takes minutes and gigabytes


@dataclass
class NgramTargets:
    """table[rows[i]] is the distribution of token i + 1 of the training text.

    table  (contexts, V) float32
    rows   (N,) int64: the row of the context that ends with token i
    """

    table: torch.Tensor
    rows: np.ndarray


def ngram_targets(ids, vocab_size, device):
    """Return the NgramTargets of a text, or None if the text is too long or has too many distinct characters.

    ids  (N,) integers below vocab_size
    The longest context has MAX_ORDER tokens, or fewer if the table would be too large. Its distribution is that of
    Kneser and Ney (1995), interpolated as by Teh (2006): with n counts of m distinct followers,

        P(w) = (count(w) - DISCOUNT + (DISCOUNT m + STRENGTH) P_shorter(w)) / (n + STRENGTH)

    where a follower that never came has neither count nor discount. A shorter context counts no occurrences of a
    follower, but the distinct tokens that came before both.
    """
    if len(ids) > MAX_LENGTH:
        return None
    ids = ids.astype(np.int64)

    # number the contexts of each length, from short to long
    rows = np.zeros(len(ids), np.int64)
    parents = [np.zeros(1, np.int64)]  # per length: the row of every context without its oldest token
    for k in range(1, MAX_ORDER + 1):  # one token more, the one k - 1 before; the first tokens take the end's
        found, longer = np.unique(rows * vocab_size + np.roll(ids, k - 1), return_inverse=True)
        if len(found) * vocab_size > MAX_ENTRIES:
            if k <= MIN_ORDER:
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

    # average, from short to long, in place, because a table can have 128 MiB
    table = np.full((1, vocab_size), 1 / vocab_size, np.float32)
    for parent, (pairs, counts) in zip(parents, reversed(followers)):
        row, follower = divmod(pairs, vocab_size)
        total = STRENGTH + np.bincount(row, counts, len(parent))
        table = table[parent]
        table *= ((STRENGTH + DISCOUNT * np.bincount(row, minlength=len(parent))) / total)[:, None]
        table[row, follower] += (counts - DISCOUNT) / total[row]
    return NgramTargets(torch.from_numpy(table).to(device), rows)
