"""train.py: the gradient of a step against its definition, and the evaluation. extras has auxiliary targets."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import batch, plain_val_loss
from model import GPT, GPTConfig
from train import TrainingLoss, evaluate, make_config

# -- the loss of a step ------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_cross_entropy_of_the_next_tokens():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=20, n_layer=1, n_head=2, n_embd=16))
    ids = np.random.default_rng(0).integers(20, size=500).astype("<u2")
    x, y = batch(ids, 0, 3, 2, 16)
    loss = TrainingLoss(model, make_config({}), ids)
    total, reported = loss(x, y, where=None, left=torch.tensor(0.5))
    log_probs = model(x)[0].log_softmax(-1)
    expected = -torch.stack([log_probs[i, t, y[i, t]] for i in range(2) for t in range(16)]).mean()
    assert total.item() == reported.item() == pytest.approx(expected.item(), rel=1e-5)
    assert total.requires_grad and not reported.requires_grad


# -- evaluation --------------------------------------------------------------------------------------------------------


@given(length=st.integers(2, 80), block_size=st.integers(1, 40), seed=st.integers(0, 9))
@example(length=8193, block_size=32, seed=0)  # a forward takes 8192 characters at most, in whole windows
@example(length=8194, block_size=32, seed=0)
@example(length=20001, block_size=100, seed=0)
@example(length=40, block_size=9000, seed=0)
def test_evaluation_is_one_exact_pass_over_the_text(length, block_size, seed):
    """Not a mean of means: the short last window counts by its characters. And it leaves the model and rng alone."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=block_size, vocab_size=7, n_layer=1, n_head=1, n_embd=8, dropout=0.5)
    model = GPT(config).train()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.7)  # so that no two characters have the same loss
    ids = np.random.default_rng(seed).integers(7, size=length).astype("<u2")
    before = torch.get_rng_state()
    loss = evaluate(model, ids, math.inf, nullcontext())
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert loss == pytest.approx(plain_val_loss(model, ids, block_size), rel=1e-5)
