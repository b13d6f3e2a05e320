"""Soft targets: the distribution of the next character after the same few characters anywhere in the training text.

The character that follows in the text is one sample of what could follow. An n-gram distribution averages many samples.
The average gives a gradient with less noise. An n-gram sees at most MAX_ORDER characters. The targets therefore begin
as n-gram distributions and end as the text. Malagutti et al. 2024 (arXiv:2403.17240) regularize language models by
smoothed n-gram distributions. The decay to the plain loss is this kit's.
"""

from dataclasses import dataclass

import numpy as np
import torch

MAX_ORDER = 7  # characters of context; with more of them most contexts occur once, and nothing is averaged
STRENGTH = 6.0  # occurrences of a context after which it weighs as much as the next shorter one
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
    The distribution after a context of k tokens is an average of what followed it and of the distribution after its
    last k - 1 tokens. The occurrences of the context weigh 1 each, and the shorter context STRENGTH (a Dirichlet prior,
    MacKay and Peto 1995). The longest context has MAX_ORDER tokens, or fewer if the table would be too large.
    """
    if len(ids) > MAX_LENGTH:
        return None
    ids = ids.astype(np.int64)
    rows, table = np.zeros(len(ids), np.int64), np.full((1, vocab_size), 1 / vocab_size, np.float32)
    contexts = np.zeros(len(ids), np.int64)  # a number per context of k tokens, equal for equal contexts
    for k in range(MAX_ORDER + 1):
        if k:  # one token more, the one k - 1 before; the first tokens of the text take their context from its end
            contexts = rows * vocab_size + np.roll(ids, k - 1)
        found, longer = np.unique(contexts, return_inverse=True)
        if len(found) * vocab_size > MAX_ENTRIES:
            if k <= MIN_ORDER:
                return None
            break
        shorter = np.zeros(len(found), np.int64)
        shorter[longer] = rows
        table = table[shorter]  # and then in place, because a table can have 128 MiB
        table *= STRENGTH
        np.add.at(table, (longer[:-1], ids[1:]), 1)
        table /= table.sum(1, keepdims=True)
        rows = longer
    return NgramTargets(torch.from_numpy(table).to(device), rows)
