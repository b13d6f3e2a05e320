"""kvgpt/training/objective.py: what training minimizes, and the layer that only training has."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import train
from helpers import CPU, SMALL, assert_one_line, assert_same_run, here, load, ok, same, tiny_run
from kvgpt.recipes import TrainConfig
from kvgpt.training.dist import Ranks
from kvgpt.training.ngram_targets import ngram_targets
from kvgpt.training.objective import NUM_AHEAD, loss_weights


def test_the_weights_fall_along_a_line():
    config = TrainConfig(max_iters=40, mtp_weight=0.8, ngram_targets=0.5)
    weights = [loss_weights(step, config).tolist() for step in (0, 10, 40, 50)]
    expected = [[0.8, 0.5], [0.6, 0.4375], [0, 0.25], [0, 0.25]]
    assert weights == [pytest.approx(pair, abs=1e-6) for pair in expected]
    config = TrainConfig(max_iters=40, lr_decay_iters=20, mtp_weight=0.8)
    assert loss_weights(10, config).tolist() == pytest.approx([0.4, 0])


@pytest.mark.parametrize("ngrams", [0.0, 0.6])
def test_the_objective_adds_the_losses_of_the_tokens_after_the_next(ngrams):
    """Gradients of two micro-steps at step 10 of 40, against the definition, one position at a time."""
    settings = dict(mtp_weight=0.4, gradient_accumulation_steps=2, learning_rate=0.0, grad_clip=0.0, max_iters=40)
    config, data, state = tiny_run(**settings, ngram_targets=ngrams)
    V, state.step = len(data.chars), 10
    data.ngram_targets = ngram_targets(data.train, V, CPU) if ngrams else None
    gradients = {}
    for name, p in state.objective.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
    reported, _, _ = train.train_step(config, data, state, Ranks())

    config, _, fresh = tiny_run(**settings)
    assert [layer.weight.tolist() for layer in fresh.mtp] == [torch.eye(16).tolist()] * NUM_AHEAD
    share, plain = ngrams * (0.5 + 0.5 * 0.75), []

    def loss_at(hidden, place):  # of predicting the token after a place of the text
        log_probs = fresh.model.lm_head(hidden).log_softmax(-1)
        loss = -log_probs[data.train[place + 1]]
        if ngrams:
            after = data.ngram_targets.table[data.ngram_targets.rows[place]]
            loss = (1 - share) * loss - share * (after * log_probs).sum()
        return loss

    for number in (20, 21):
        x, y = train.get_batch(data.train, config.seed, number, 2, 16, CPU)
        places, _ = train.get_batch(np.arange(len(data.train)), config.seed, number, 2, 16, CPU)
        _, loss = fresh.model(x, y)
        hidden = fresh.model.hidden_states(x)
        objective = torch.stack([loss_at(hidden[i, t], places[i, t]) for i in range(2) for t in range(16)]).mean()
        for j in range(1, NUM_AHEAD + 1):
            ahead = [
                loss_at(F.layer_norm(fresh.mtp[j - 1](hidden[i, t]), (16,)), places[i, t + j])
                for i in range(2)
                for t in range(16 - j)
            ]
            objective = objective + 0.4 * 0.75 / j * torch.stack(ahead).mean()
        (objective / 2).backward()
        plain.append(loss.item())
    assert reported.item() == pytest.approx(sum(plain) / 2, rel=1e-5)
    for name, p in fresh.objective.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-6)


def test_a_resumed_run_goes_on_with_the_layer_and_the_model_has_none(data_dir, tmp_path):
    flags = [*SMALL, "--data_dir", data_dir, "--mtp_weight", 0.5, "--lr_decay_iters", 8, "--out_dir"]
    ok(here(*flags, tmp_path / "whole", "--max_iters", 8))
    ok(here(*flags, tmp_path / "halves", "--max_iters", 4))
    ok(here("--init_from", "resume", "--max_iters", 8, "--data_dir", data_dir, "--out_dir", tmp_path / "halves"))
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    last, best = (load(tmp_path / "whole" / name) for name in ("last.pt", "ckpt.pt"))
    assert same(last["mtp"], load(tmp_path / "halves" / "last.pt")["mtp"])
    assert len(last["mtp"]) == NUM_AHEAD
    assert not any(torch.equal(weight, torch.eye(len(weight))) for weight in last["mtp"].values())
    assert "mtp" not in best and not [name for name in last["model"] if "mtp" in name]
    ok(here(*flags, tmp_path / "off", "--max_iters", 8, "--mtp_weight", 0))
    assert not load(tmp_path / "off" / "last.pt")["mtp"]
    for name, weight, stored in (("whole", 0.0, 0.5), ("off", 0.5, 0.0)):
        resume = ["--init_from", "resume", "--out_dir", tmp_path / name, "--data_dir", data_dir, "--max_iters", 9]
        result = here(*resume, "--mtp_weight", weight)
        assert_one_line(result, f"--mtp_weight {weight} conflicts", f"(mtp_weight {stored})", code=1)
    ok(here(*resume, "--mtp_weight", 0))


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_short_context_has_fewer_tokens_after_the_next(block_size, data_dir, tmp_path):
    flags = [*SMALL, "--data_dir", data_dir, "--mtp_weight", 0.5, "--block_size", block_size, "--max_iters", 2]
    ok(here(*flags, "--out_dir", tmp_path / "out"))
    assert len(load(tmp_path / "out" / "last.pt")["mtp"]) == block_size - 1
