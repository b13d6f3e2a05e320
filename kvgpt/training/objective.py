"""The loss that training minimizes: cross-entropy with the text, n-gram targets, and multi-token prediction.

The validation loss is plain cross-entropy with the text. The other two parts help training, and fade during the run.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from model import eval_mode

NUM_AHEAD = 3  # extra tokens to predict, after the next one
NGRAM_END = 0.5  # fraction of the n-grams' initial weight in the targets that remains at the end


class Objective(nn.Module):
    """A GPT and the loss that training minimizes.

    mtp  NUM_AHEAD Linear layers `(C, C)`, or none if multi-token prediction is off. Layer j predicts the hidden state j
         positions ahead, which lm_head maps to logits. The layers start as the identity and exist only in training.

    Multi-token prediction (Gloeckle et al. 2024, arXiv:2404.19737) uses a block per extra token. We use a matrix.
    """

    def __init__(self, model, config):
        super().__init__()
        self.model = model
        C, count = model.config.n_embd, min(NUM_AHEAD, config.block_size - 1) if config.mtp_weight else 0
        self.mtp = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(count))
        for layer in self.mtp:
            nn.init.eye_(layer.weight)

    def forward(self, x, y, mtp_weight=None, ngram_weight=None, expected=None):
        """Return (objective, loss), 0-d tensors. loss is the plain cross-entropy, without a gradient.

        x, y          (B, T) int64: tokens, and the next token of each
        mtp_weight    0-d tensor: weight of the loss for the token after the next; layer j has this weight / j
        ngram_weight  0-d tensor: weight of `expected` in the targets
        expected      (B, T, V): the n-gram distribution of the next token; None: targets are the text alone
        """
        hidden = self.model.hidden_states(x)  # (B, T, C)
        logits = self.model.unembed(hidden).flatten(0, 1).float()
        objective = F.cross_entropy(logits, y.flatten())
        loss, targets = objective.detach(), y  # targets: (B, T), or distributions (B, T, V)
        if expected is not None:
            targets = F.one_hot(y, logits.size(-1)).float().lerp(expected, ngram_weight)
            objective = F.cross_entropy(logits, targets.flatten(0, 1))
        for j, layer in enumerate(self.mtp, start=1):
            ahead = F.layer_norm(layer(hidden[:, :-j]), hidden.shape[-1:])  # (B, T - j, C)
            logits = self.model.unembed(ahead).flatten(0, 1).float()
            objective = objective + mtp_weight / j * F.cross_entropy(logits, targets[:, j:].flatten(0, 1))
        return objective, loss


def loss_weights(step, config):
    """Return mtp_weight and ngram_weight at a step, a float32 tensor `(2,)`.

    Both fall linearly until lr_decay_iters. We return a tensor because torch.compile would recompile the step for every
    new number.
    """
    left = max(0.0, 1 - step / (config.lr_decay_iters or config.max_iters))
    mtp_weight, ngram_weight = config.mtp_weight or 0.0, config.ngram_targets or 0.0
    return torch.tensor([mtp_weight * left, ngram_weight * (NGRAM_END + (1 - NGRAM_END) * left)])


# -- evaluation --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, ids, block_size, device, autocast):
    """Return the mean cross-entropy in nats over every token of `ids` but the first.

    The windows of block_size tokens do not overlap, and the last one may be shorter. We draw no random numbers, so
    evaluating more often does not change a run.
    model     a Module that maps (x, y) to (logits, loss)
    autocast  a context manager around the forwards
    """
    total, count = 0.0, len(ids) - 1
    whole = count // block_size * block_size  # tokens in whole windows
    most = min(2**13, 2**27 // model.config.vocab_size)  # tokens per forward; their logits take at most 512 MB
    chunk = max(1, most // block_size) * block_size
    edges = sorted({*range(0, whole, chunk), whole, count})
    with eval_mode(model), autocast:
        for begin, end in itertools.pairwise(edges):
            window = torch.from_numpy(ids[begin : end + 1].astype(np.int64)).to(device)
            width = min(block_size, end - begin)
            _, loss = model(window[:-1].view(-1, width), window[1:].view(-1, width))
            total += loss.item() * (end - begin)
    return total / count


# -- n-gram targets ----------------------------------------------------------------------------------------------------

# The next character of the text is one sample of what could follow, so its gradient is noisy. The average over all
# places where the same few characters come before is less noisy. But an n-gram sees only those few, so its weight
# falls during training. Malagutti et al. 2024 (arXiv:2403.17240) regularize with n-grams too; the decay is ours.

NGRAM_ORDER = 7  # characters of context; longer contexts mostly occur only once, which averages nothing
DISCOUNT = 0.9  # subtracted from each follower's count, in favour of the next shorter context
STRENGTH = 1.0  # counts that the next shorter context is always worth
MIN_ORDER = 3  # shorter contexts are not worth using
MAX_ENTRIES = 2**25  # in the table: 128 MiB
MAX_LENGTH = 2**24  # tokens of text; more would take minutes and gigabytes


@dataclass
class NgramTargets:
    """table[rows[i]] is the distribution of token i + 1 of the training text."""

    table: torch.Tensor  # (contexts, V) float32
    rows: np.ndarray  # (N,) int64: the row of the context that ends with token i


def ngram_targets(ids, vocab_size, device):
    """Return the NgramTargets of a text, or None if it is too long or has too many distinct tokens.

    ids  (N,) integers below vocab_size
    The longest context has NGRAM_ORDER tokens, or fewer if the table would be too large. Distributions are those of
    Kneser and Ney (1995), interpolated as in Teh (2006). With n counts of m distinct followers,

        P(w) = (count(w) - DISCOUNT + (DISCOUNT m + STRENGTH) P_shorter(w)) / (n + STRENGTH)

    where a follower that never occurs has neither count nor discount. In a shorter context we do not count how often a
    follower occurs, but how many distinct tokens precede the two.
    """
    if len(ids) > MAX_LENGTH:
        return None
    ids = ids.astype(np.int64)

    # number the contexts of each length, from short to long
    rows = np.zeros(len(ids), np.int64)
    parents = [np.zeros(1, np.int64)]  # per length: the row of every context without its oldest token
    for k in range(1, NGRAM_ORDER + 1):  # add the token k - 1 back; at the start of the text it comes from the end
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

    # average, from short to long; in place, because a table can be 128 MiB large
    table = np.full((1, vocab_size), 1 / vocab_size, np.float32)
    for parent, (pairs, counts) in zip(parents, reversed(followers)):
        row, follower = divmod(pairs, vocab_size)
        total = STRENGTH + np.bincount(row, counts, len(parent))
        table = table[parent]
        table *= ((STRENGTH + DISCOUNT * np.bincount(row, minlength=len(parent))) / total)[:, None]
        table[row, follower] += (counts - DISCOUNT) / total[row]
    return NgramTargets(torch.from_numpy(table).to(device), rows)
