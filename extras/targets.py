"""What the modern recipe adds to the cross-entropy of the next token: n-gram targets and multi-token prediction.

Both fade during training, and neither is in the model that you sample from. docs/experiments.md has measurements.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

from extras.decode.ngrams import ngram_distributions

NUM_AHEAD = 3  # extra tokens to predict, after the next one
NGRAM_END = 0.5  # fraction of the n-grams' initial weight in the targets that remains at the end


class TrainingLoss(nn.Module):
    """A GPT and the loss that training minimizes: cross-entropy, and two auxiliary terms.

    config    the TrainConfig of the run
    mtp       NUM_AHEAD Linear layers `(C, C)`, or none without mtp_weight. They start as the identity and exist only
              in training
    table     (contexts, V) float32: n-gram distributions of the next token; None: without n-gram targets
    contexts  (N,): the row of the table for each token of the text
    """

    def __init__(self, model, config, ids, device):
        super().__init__()
        self.model = model
        self.config = config
        C = model.config.n_embd
        count = min(NUM_AHEAD, config.block_size - 1) if config.mtp_weight else 0
        self.mtp = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(count))
        for layer in self.mtp:
            nn.init.eye_(layer.weight)
        self.to(device)
        self.table = self.contexts = None
        if config.ngram_targets:
            self.table, self.contexts = ngram_distributions(ids, model.config.vocab_size, device) or (None, None)
            if self.table is None:
                print("training without n-gram targets: the text is too long or has too many distinct tokens for them")

    def inputs(self, step, batch):
        """Return the last arguments of forward. batch(ids) gives x and y of the step, from an array `(N,)`.

        Both weights fall linearly until lr_decay_iters. They are tensors, because torch.compile would recompile the
        step for every new number.
        """
        config = self.config
        left = max(0.0, 1 - step / (config.lr_decay_iters or config.max_iters))
        ngram_weight = config.ngram_targets * (NGRAM_END + (1 - NGRAM_END) * left)
        contexts = None if self.contexts is None else batch(self.contexts)[0]
        device = self.model.lm_head.weight.device
        return torch.tensor([config.mtp_weight * left, ngram_weight], device=device), contexts

    def forward(self, x, y, weights, contexts=None):
        """Return (total, loss), 0-d tensors: what we minimize, and the plain cross-entropy, without a gradient.

        x, y      (B, T) int64: tokens, and the next token of each
        weights   (2,) float32: mtp_weight and ngram_weight
        contexts  (B, T) int64: the row of `table` for each token; None: the target is the next token alone
        """
        mtp_weight, ngram_weight = weights
        hidden = self.model.hidden_states(x)  # (B, T, C)
        logits = self.model.unembed(hidden)
        total = self.model.loss(logits, y)
        loss = total.detach()
        targets = y  # (B, T), or distributions (B, T, V)
        if contexts is not None:
            targets = F.one_hot(y, logits.size(-1)).float().lerp(self.table[contexts], ngram_weight)
            total = self.model.loss(logits, targets)
        # Multi-token prediction (Gloeckle et al., arXiv:2404.19737): layer j predicts the hidden state j positions
        # ahead, which lm_head maps to logits. The paper uses a block per extra token, we use a matrix.
        for j, layer in enumerate(self.mtp, start=1):
            # a norm like the model's, but without weights
            ahead = F.layer_norm(layer(hidden[:, :-j]), hidden.shape[-1:])  # (B, T - j, C)
            total = total + mtp_weight / j * self.model.loss(self.model.unembed(ahead), targets[:, j:])
        return total, loss
