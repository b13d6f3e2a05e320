"""The loss that training minimizes: cross-entropy with the text, n-gram targets, and the tokens after the next.

A validation loss is plain cross-entropy with the text. The other two parts help training, and fall to 0 during the run.
"""

import torch.nn as nn
from torch.nn import functional as F

NUM_AHEAD = 3  # tokens after the next that are predicted too


class Objective(nn.Module):
    """A GPT and the loss that its training minimizes.

    mtp  NUM_AHEAD Linear layers `(C, C)`. Layer j predicts the hidden state j positions ahead, and lm_head maps the
         prediction to logits. The layers begin as the identity. They exist in training only. Empty: off

    Multi-token prediction (Gloeckle et al. 2024, arXiv:2404.19737) has a block per further token. Here a matrix serves.
    """

    def __init__(self, model, config):
        super().__init__()
        self.model = model
        C, count = model.config.n_embd, min(NUM_AHEAD, config.block_size - 1) if config.mtp_weight else 0
        self.mtp = nn.ModuleList(nn.Linear(C, C, bias=False) for _ in range(count))
        for layer in self.mtp:
            nn.init.eye_(layer.weight)

    def forward(self, x, y, mtp_weight=None, ngram_share=None, expected=None):
        """Return (objective, loss), 0-d tensors. loss is the plain cross-entropy.

        x, y          (B, T) int64: tokens, and the token after each
        mtp_weight    0-d tensor: weight of the loss for the token after the next; layer j has this weight / j
        ngram_share   0-d tensor: share of `expected` in the targets
        expected      (B * T, V): the n-gram distribution of the token after each
        """
        hidden = self.model.hidden_states(x)  # (B, T, C)
        logits = self.model.lm_head(hidden).flatten(0, 1).float()
        loss = objective = F.cross_entropy(logits, y.flatten())
        if expected is not None:
            objective = loss.lerp(F.cross_entropy(logits, expected), ngram_share)
        for j, layer in enumerate(self.mtp, start=1):
            ahead = F.layer_norm(layer(hidden[:, :-j]), hidden.shape[-1:])  # (B, T - j, C)
            logits = self.model.lm_head(ahead).flatten(0, 1).float()
            objective = objective + mtp_weight / j * F.cross_entropy(logits, y[:, j:].flatten())
        return objective, loss


def falling(start, step, config):
    """Return a value that begins at `start` and falls along a line to 0 at lr_decay_iters."""
    return start * max(0.0, 1 - step / (config.lr_decay_iters or config.max_iters))
