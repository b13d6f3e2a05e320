"""What the modern recipe adds to the cross-entropy of the next token: n-gram targets and multi-token prediction.

Both fade during training, and neither is in the model that you sample from. docs/experiments.md has measurements.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

from extras.decode.ngrams import count_ngrams, ngram_distributions

NUM_AHEAD = 3  # extra tokens to predict, after the next one
NGRAM_END = 0.5  # fraction of the n-grams' initial weight in the targets that remains at the end


def cross_entropy(logits, targets):
    """Return the mean cross-entropy of logits `(B, T, V)`. targets: ids `(B, T)`, or distributions `(B, T, V)`."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


class TrainingLoss(nn.Module):
    """A GPT and the loss that training minimizes: cross-entropy, and two auxiliary terms. It replaces train.py's.

    config    the settings of the run, of which we read ngram_targets and mtp_weight
    ids       the text to train on, an array `(N,)`
    mtp       NUM_AHEAD Linear layers `(C, C)`, or none without mtp_weight. They start as the identity and exist only
              in training
    table     (contexts, V) float32: n-gram distributions of the next token; None: without n-gram targets
    contexts  (N,) int64: the row of the table for each token of the text
    saved     for the checkpoints: n-grams of the text, for sample.py --draft
    """

    def __init__(self, model, config, ids):
        super().__init__()
        self.model = model
        self.config = config
        C = model.config.n_embd
        V = model.config.vocab_size
        device = model.lm_head.weight.device
        if config.ngram_targets > 1:
            raise ValueError(f"--ngram_targets {config.ngram_targets}: it is a weight of at most 1")
        count = min(NUM_AHEAD, config.block_size - 1) if config.mtp_weight else 0
        self.mtp = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(count))
        for layer in self.mtp:
            nn.init.eye_(layer.weight)
        self.table = self.contexts = None
        if config.ngram_targets:
            self.table, contexts = ngram_distributions(ids, V, device) or (None, None)
            if self.table is None:
                print("training without n-gram targets: the text is too long or has too many distinct tokens for them")
            else:
                self.contexts = torch.from_numpy(contexts).to(device)
        # at most one n-gram of 8 or 12 bytes per 16 parameters of 4 bytes
        self.saved = {"ngrams": count_ngrams(ids, V, sum(p.numel() for p in model.parameters()) // 16)}

    def forward(self, x, y, where, left):
        """Return (total, loss), 0-d tensors: what we minimize, and the plain cross-entropy, without a gradient.

        x, y, where  (B, T) int64: tokens, the next token of each, and the position of each in the text
        left         the part of the run that is left, a 0-d float64 tensor from 1 to 0. With it the weights fall along
                     a line; only they, not `left` itself, are rounded to float32
        """
        config = self.config
        hidden = self.model.hidden_states(x)  # (B, T, C)
        logits = self.model.lm_head(hidden)
        total = cross_entropy(logits, y)
        loss = total.detach()
        targets = y  # (B, T), or distributions (B, T, V)
        if self.table is not None:
            ngram_weight = (config.ngram_targets * (NGRAM_END + (1 - NGRAM_END) * left)).float().to(x.device)
            one_hot = F.one_hot(y, logits.size(-1)).float()
            targets = one_hot.lerp(self.table[self.contexts[where]], ngram_weight)
            total = cross_entropy(logits, targets)
        # Multi-token prediction (Gloeckle et al., arXiv:2404.19737): layer j predicts the hidden state j positions
        # ahead, which lm_head maps to logits. The paper uses a block per extra token, we use a matrix.
        mtp_weight = (config.mtp_weight * left).float().to(x.device)
        for j, layer in enumerate(self.mtp, start=1):
            # a norm like the model's, but without weights
            ahead = F.layer_norm(layer(hidden[:, :-j]), hidden.shape[-1:])  # (B, T - j, C)
            total = total + mtp_weight / j * cross_entropy(self.model.lm_head(ahead), targets[:, j:])
        return total, loss
