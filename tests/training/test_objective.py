"""train.py: the gradient of a step against its definition, and the evaluation. extras has auxiliary targets."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import train
from helpers import CPU, batch, plain_val_loss, tiny_run
from model import GPT, GPTConfig
from train import TrainConfig, TrainState, evaluate

# -- the loss of a step ------------------------------------------------------------------------------------------------


def test_a_step_descends_the_mean_loss_of_its_micro_steps():
    config, data, state = tiny_run(gradient_accumulation_steps=2, learning_rate=0.0, grad_clip=0.0)
    state.iter_num = 10
    gradients = {}
    for name, p in state.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
    train.train_step(config, data, state)

    _, _, fresh = tiny_run()
    losses = []
    for number in (20, 21):
        x, y = batch(data.train, config.seed, number, 2, 16)
        log_probs = fresh.model(x)[0].log_softmax(-1)
        loss = -torch.stack([log_probs[i, t, y[i, t]] for i in range(2) for t in range(16)]).mean()
        (loss / 2).backward()
        losses.append(loss.item())
    assert state.loss_sum.item() == pytest.approx(sum(losses) / 2, rel=1e-5)
    for name, p in fresh.model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-6)


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
    state = TrainState(model, TrainConfig(), CPU, torch.float32)
    ids = np.random.default_rng(seed).integers(7, size=length).astype("<u2")
    before = torch.get_rng_state()
    loss = evaluate(state, ids)
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert loss == pytest.approx(plain_val_loss(model, ids, block_size), rel=1e-5)
