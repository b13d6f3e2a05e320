"""The loss that training minimizes: cross-entropy with the text, n-gram targets, and the tokens after the next.

A validation loss is plain cross-entropy with the text. The other two parts help training, and fall during the run.
"""

import torch
import torch.nn as nn
from torch.nn import functional as F

NUM_AHEAD = 3  # tokens after the next that are predicted too
NGRAM_END = 0.5  # what is left at the end of the n-gram distributions' share in the targets


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
        """Return (objective, loss), 0-d tensors. loss is the plain cross-entropy, without a gradient.

        x, y          (B, T) int64: tokens, and the token after each
        mtp_weight    0-d tensor: weight of the loss for the token after the next; layer j has this weight / j
        ngram_share   0-d tensor: share of `expected` in the targets
        expected      (B, T, V): the n-gram distribution of the token after each; None: the text alone
        """
        hidden = self.model.hidden_states(x)  # (B, T, C)
        logits = self.model.lm_head(hidden).flatten(0, 1).float()
        loss = F.cross_entropy(logits.detach(), y.flatten())
        targets = y  # (B, T), or distributions (B, T, V)
        if expected is not None:
            targets = F.one_hot(y, logits.size(-1)).float().lerp(expected, ngram_share)
        objective = F.cross_entropy(logits, targets.flatten(0, 1))
        for j, layer in enumerate(self.mtp, start=1):
            ahead = F.layer_norm(layer(hidden[:, :-j]), hidden.shape[-1:])  # (B, T - j, C)
            logits = self.model.lm_head(ahead).flatten(0, 1).float()
            objective = objective + mtp_weight / j * F.cross_entropy(logits, targets[:, j:].flatten(0, 1))
        return objective, loss


def loss_weights(step, config):
    """Return mtp_weight and ngram_share at a step, a float32 tensor `(2,)`.

    Both fall along a line until lr_decay_iters: mtp_weight to 0, ngram_share to NGRAM_END of its start. The result is a
    tensor, because torch.compile would compile a step per value of a number.
    """
    left = max(0.0, 1 - step / (config.lr_decay_iters or config.max_iters))
    mtp_weight, ngram_share = config.mtp_weight or 0.0, config.ngram_targets or 0.0
    return torch.tensor([mtp_weight * left, ngram_share * (NGRAM_END + (1 - NGRAM_END) * left)])
