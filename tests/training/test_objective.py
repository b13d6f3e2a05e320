"""train.py: the loss of a step against its definition, and the evaluation."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

import train
from helpers import (
    CPU,
    SMALL,
    assert_refused,
    batch,
    here,
    load,
    ngram_table,
    ok,
    plain_val_loss,
    tiny_run,
)
from model import GPT, GPTConfig
from train import (
    NUM_AHEAD,
    TrainConfig,
    TrainState,
    evaluate,
    loss_weights,
)

# -- the loss of a step ------------------------------------------------------------------------------------------------


def test_the_weights_fall_along_a_line():
    config = TrainConfig(max_iters=40, mtp_weight=0.8, ngram_targets=0.5)
    weights = [loss_weights(step, config).tolist() for step in (0, 10, 40, 50)]
    expected = [[0.8, 0.5], [0.6, 0.4375], [0, 0.25], [0, 0.25]]
    assert weights == [pytest.approx(pair, abs=1e-6) for pair in expected]
    config = TrainConfig(max_iters=40, lr_decay_iters=20, mtp_weight=0.8, ngram_targets=0.0)
    assert loss_weights(10, config).tolist() == pytest.approx([0.4, 0])


@pytest.mark.parametrize("mtp", [0.0, 0.4])
@pytest.mark.parametrize("ngrams", [0.0, 0.6])
def test_a_step_descends_the_training_loss_and_reports_the_plain_loss(ngrams, mtp):
    """Gradients of two micro-steps at step 10 of 40, against the definition, one position at a time."""
    settings = dict(mtp_weight=mtp, gradient_accumulation_steps=2, learning_rate=0.0, grad_clip=0.0, max_iters=40)
    config, data, state = tiny_run(**settings, ngram_targets=ngrams)
    V, state.iter_num = len(data.tokenizer.vocab), 10
    table, rows = ngram_table(data.train, V)
    state.ngrams = (table, rows) if ngrams else None
    gradients = {}
    for name, p in state.training_loss.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
    train.train_step(config, data, state)

    config, _, fresh = tiny_run(**settings)
    assert [layer.weight.tolist() for layer in fresh.mtp] == ([torch.eye(16).tolist()] * NUM_AHEAD if mtp else [])
    share, plain = ngrams * (0.5 + 0.5 * 0.75), []

    def loss_at(hidden, place):  # of predicting the token after a place of the text
        log_probs = fresh.model.unembed(hidden).log_softmax(-1)
        loss = -log_probs[data.train[place + 1]]
        if ngrams:
            after = table[rows[place]]
            loss = (1 - share) * loss - share * (after * log_probs).sum()
        return loss

    for number in (20, 21):
        x, y = batch(data.train, config.seed, number, 2, 16)
        places, _ = batch(np.arange(len(data.train)), config.seed, number, 2, 16)
        _, loss = fresh.model(x, y)
        hidden = fresh.model.hidden_states(x)
        total = torch.stack([loss_at(hidden[i, t], places[i, t]) for i in range(2) for t in range(16)]).mean()
        for j, layer in enumerate(fresh.mtp, start=1):
            ahead = [
                loss_at(F.layer_norm(layer(hidden[i, t]), (16,)), places[i, t + j])
                for i in range(2)
                for t in range(16 - j)
            ]
            total = total + 0.4 * 0.75 / j * torch.stack(ahead).mean()
        (total / 2).backward()
        plain.append(loss.item())
    assert state.loss_sum.item() == pytest.approx(sum(plain) / 2, rel=1e-5)
    for name, p in fresh.training_loss.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-6)


def test_the_layers_ahead_are_saved_for_a_resume_and_the_model_has_none(data_dir, tmp_path):
    ok(here(*SMALL, "--mtp_weight", 0.5, "--max_iters", 4, "--data_dir", data_dir, "--out_dir", tmp_path))
    last, best = (load(tmp_path / name) for name in ("last.pt", "ckpt.pt"))
    assert len(last["mtp"]) == NUM_AHEAD
    assert not any(torch.equal(weight, torch.eye(len(weight))) for weight in last["mtp"].values())
    assert "mtp" not in best and not [name for name in last["model"] if "mtp" in name]
    assert_refused(tmp_path, "--mtp_weight", 0, words=["--mtp_weight 0.0 conflicts", "(mtp_weight 0.5)"])


@pytest.mark.parametrize("block_size", [1, 3])
def test_a_short_context_has_fewer_tokens_after_the_next(block_size, data_dir, tmp_path):
    flags = [*SMALL, "--data_dir", data_dir, "--mtp_weight", 0.5, "--block_size", block_size, "--max_iters", 2]
    ok(here(*flags, "--out_dir", tmp_path / "out"))
    assert len(load(tmp_path / "out" / "last.pt")["mtp"]) == block_size - 1


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
