"""The auxiliary targets of a training run: the loss of a step against its definition, and what is saved."""

import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import train
from extras.targets import NUM_AHEAD, TrainingLoss
from helpers import CPU, SMALL, assert_compiled_step_is_plain, assert_refused, batch, here, load, ok, tiny_run
from train import TrainConfig, TrainState, configure_optimizers


def random_table(ids, vocab_size):
    """Random n-gram targets as extras makes them: a table of distributions, and the row of each token."""
    generator = torch.Generator().manual_seed(0)
    rows = np.random.default_rng(0).integers(30, size=len(ids))
    return torch.rand(30, vocab_size, generator=generator).softmax(-1), rows


def test_the_weights_fall_along_a_line():
    config = TrainConfig(max_iters=40, mtp_weight=0.8, ngram_targets=0.5)
    model = tiny_run()[2].model

    def weights_at(step):
        weights, _ = TrainingLoss(model, config, np.arange(40) % 5, CPU).inputs(step, lambda ids: (None, None))
        return weights.tolist()

    weights = [weights_at(step) for step in (0, 10, 40, 50)]
    expected = [[0.8, 0.5], [0.6, 0.4375], [0, 0.25], [0, 0.25]]
    assert weights == [pytest.approx(pair, abs=1e-6) for pair in expected]
    config = TrainConfig(max_iters=40, lr_decay_iters=20, mtp_weight=0.8, ngram_targets=0.0)
    assert weights_at(10) == pytest.approx([0.4, 0])


def run_with_targets(**settings):
    """A tiny_run with a TrainingLoss, and its n-gram table, of random distributions, and contexts."""
    config, data, state = tiny_run(**settings)
    targets = TrainingLoss(state.model, config, data.train, CPU)
    table, rows = random_table(data.train, len(data.tokenizer.vocab))
    if config.ngram_targets:
        targets.table, targets.contexts = table, rows
    return config, data, TrainState(state.model, config, CPU, torch.float32, targets), table, rows


@pytest.mark.parametrize("ngrams, mtp", [(0.6, 0.0), (0.0, 0.4), (0.6, 0.4)])
def test_a_step_descends_the_training_loss_and_reports_the_plain_loss(ngrams, mtp):
    """Gradients of two micro-steps at step 10 of 40, against the definition, one position at a time."""
    settings = dict(mtp_weight=mtp, gradient_accumulation_steps=2, learning_rate=0.0, grad_clip=0.0, max_iters=40)
    config, data, state, table, rows = run_with_targets(**settings, ngram_targets=ngrams)
    state.iter_num = 10
    gradients = {}
    for name, p in state.training_loss.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
    train.train_step(config, data, state)

    config, _, fresh, *_ = run_with_targets(**settings, ngram_targets=ngrams)
    mtp = fresh.targets.mtp if mtp or ngrams else []
    assert [layer.weight.tolist() for layer in mtp] == ([torch.eye(16).tolist()] * NUM_AHEAD if mtp else [])
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
        for j, layer in enumerate(mtp, start=1):
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


def test_an_edit_of_the_loss_in_model_py_is_trained():
    """All terms come from GPT.loss, or an edit would change the val loss and not the training."""
    config, data, state, table, rows = run_with_targets(ngram_targets=0.6, mtp_weight=0.4)
    x, y = batch(data.train, config.seed, 0, 2, 16)
    arguments = state.targets.inputs(0, lambda ids: batch(ids, config.seed, 0, 2, 16))
    plain = state.targets(x, y, *arguments)
    loss = state.model.loss
    state.model.loss = lambda logits, targets: 3 * loss(logits, targets)
    torch.testing.assert_close(state.targets(x, y, *arguments), tuple(3 * each for each in plain))


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


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_is_the_plain_step():
    settings = dict(gradient_accumulation_steps=2, ngram_targets=0.5, mtp_weight=0.3)
    assert_compiled_step_is_plain(lambda: run_with_targets(**settings)[:3])


def test_the_layers_ahead_are_matrices_of_adamw():
    config, data, state, *_ = run_with_targets(optimizer="muon", weight_decay=0.3, mtp_weight=0.3)
    adamw, muon = configure_optimizers(state.training_loss.parameters(), state.model, config, CPU)
    layers = {id(p) for p in state.targets.mtp.parameters()}
    assert layers and layers <= {id(p) for p in adamw.param_groups[0]["params"]}
    everything = [id(p) for optimizer in (adamw, muon) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(everything) == sorted({id(p) for p in state.training_loss.parameters()})
