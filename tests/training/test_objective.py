"""kvgpt/training/objective.py: what training minimizes, and the layer that only training has."""

import pytest
import torch
from torch.nn import functional as F

import train
from helpers import CPU, SMALL, assert_same_run, here, load, ok, same, tiny_run
from kvgpt.training.config import TrainConfig
from kvgpt.training.dist import Ranks
from kvgpt.training.objective import NUM_AHEAD, falling


def test_the_weights_fall_to_0_along_a_line():
    config = TrainConfig(max_iters=40)
    assert [falling(0.8, step, config) for step in (0, 10, 40, 50)] == pytest.approx([0.8, 0.6, 0, 0])
    assert falling(0.8, 10, TrainConfig(max_iters=40, lr_decay_iters=20)) == 0.4


def test_the_objective_adds_the_losses_of_the_tokens_after_the_next():
    """Gradients of two micro-steps at step 10 of 40, against the definition, one position at a time."""
    settings = dict(mtp_weight=0.4, gradient_accumulation_steps=2, learning_rate=0.0, grad_clip=0.0, max_iters=40)
    config, data, state = tiny_run(**settings)
    state.step = 10
    gradients = {}
    for name, p in state.objective.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
    reported, _, _ = train.train_step(config, data, state, Ranks())

    config, _, fresh = tiny_run(**settings)
    assert [layer.weight.tolist() for layer in fresh.mtp] == [torch.eye(16).tolist()] * NUM_AHEAD
    plain = []
    for number in (20, 21):
        x, y = train.get_batch(data.train, config.seed, number, 2, 16, CPU)
        _, loss = fresh.model(x, y)
        hidden = fresh.model.hidden_states(x)
        objective = loss
        for j in range(1, NUM_AHEAD + 1):
            ahead = [
                F.cross_entropy(fresh.model.lm_head(F.layer_norm(fresh.mtp[j - 1](hidden[i, t]), (16,))), y[i, t + j])
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


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_short_context_has_fewer_tokens_after_the_next(block_size, data_dir, tmp_path):
    flags = [*SMALL, "--data_dir", data_dir, "--mtp_weight", 0.5, "--block_size", block_size, "--max_iters", 2]
    ok(here(*flags, "--out_dir", tmp_path / "out"))
    assert len(load(tmp_path / "out" / "last.pt")["mtp"]) == block_size - 1
