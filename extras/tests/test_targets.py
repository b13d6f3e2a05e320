"""The auxiliary targets of a training run: the loss of a step against its definition, and what is saved."""

import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from extras.targets import NUM_AHEAD, TrainingLoss
from helpers import CPU, SMALL, assert_refused, here, load, log, ok, random_model
from model import GPTConfig
from train import configure_optimizers, get_batch, make_config

V = 20
IDS = np.random.default_rng(0).integers(V, size=700).astype("<u2")


def loss_with_targets(**settings):
    """Return the settings, the TrainingLoss of a random model, and its n-gram table, of random distributions."""
    sizes = dict(n_layer=1, n_head=2, n_embd=16, block_size=16)
    config = make_config(dict(batch_size=2, loss="extras.targets", **settings, **sizes))
    loss = TrainingLoss(random_model(GPTConfig(vocab_size=V, bias=False, **sizes)).train(), config, IDS)
    table = torch.rand(30, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    rows = np.random.default_rng(0).integers(30, size=len(IDS))
    if config.ngram_targets:
        loss.table, loss.contexts = table, torch.from_numpy(rows)
    return config, loss, table, rows


def test_a_weight_of_n_grams_above_1_is_refused():
    with pytest.raises(ValueError, match="it is a weight of at most 1"):
        loss_with_targets(ngram_targets=1.5)


@pytest.mark.parametrize("ngrams, mtp", [(0.0, 0.0), (0.6, 0.0), (0.0, 0.4), (0.6, 0.4)])
@pytest.mark.parametrize("left", [1.0, 0.75, 0.0])
def test_the_loss_is_its_definition_and_the_reported_loss_the_plain_one(ngrams, mtp, left):
    """With its gradients, one position at a time. n-grams fall from their weight to half of it, mtp falls to 0."""
    config, loss, table, rows = loss_with_targets(ngram_targets=ngrams, mtp_weight=mtp)
    x, y, where = get_batch(IDS, config, 3, CPU)
    assert torch.equal(torch.from_numpy(IDS.astype(np.int64))[where], x)
    total, reported = loss(x, y, where, torch.tensor(left, dtype=torch.float64))
    params = dict(loss.named_parameters())
    gradients = torch.autograd.grad(total, params.values())
    assert [layer.weight.tolist() for layer in loss.mtp] == ([torch.eye(16).tolist()] * NUM_AHEAD if mtp else [])

    share = ngrams * (0.5 + 0.5 * left)

    def loss_at(hidden, place):  # of predicting the token after a place of the text
        log_probs = loss.model.lm_head(hidden).log_softmax(-1)
        at = -log_probs[IDS[place + 1]]
        if ngrams:
            at = (1 - share) * at - share * (table[rows[place]] * log_probs).sum()
        return at

    hidden = loss.model.hidden_states(x)
    expected = torch.stack([loss_at(hidden[i, t], where[i, t]) for i in range(2) for t in range(16)]).mean()
    for j, layer in enumerate(loss.mtp, start=1):
        ahead = [
            loss_at(F.layer_norm(layer(hidden[i, t]), (16,)), where[i, t + j]) for i in range(2) for t in range(16 - j)
        ]
        expected = expected + mtp * left / j * torch.stack(ahead).mean()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert reported.item() == pytest.approx(loss.model(x, y)[1].item(), rel=1e-5) and not reported.requires_grad
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, params.values())):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_the_layers_ahead_are_saved_for_a_resume_and_the_model_has_none(data_dir, tmp_path):
    flags = [*SMALL, "--loss", "extras.targets", "--ngram_targets", 0, "--mtp_weight", 0.5, "--data_dir", data_dir]
    ok(here(*flags, "--max_iters", 4, "--out_dir", tmp_path))
    last, best = (load(tmp_path / name) for name in ("last.pt", "ckpt.pt"))
    assert len(last["loss"]) == NUM_AHEAD
    assert not any(torch.equal(weight, torch.eye(len(weight))) for weight in last["loss"].values())
    assert "loss" not in best and not [name for name in last["model"] if "mtp" in name]
    assert_refused(tmp_path, "--mtp_weight", 0, words=["--mtp_weight 0.0 conflicts", "(mtp_weight 0.5)"])


@pytest.mark.parametrize("block_size", [1, 3])
def test_a_short_context_has_fewer_tokens_after_the_next(block_size, data_dir, tmp_path):
    flags = [*SMALL, "--data_dir", data_dir, "--loss", "extras.targets", "--block_size", block_size]
    ok(here(*flags, "--max_iters", 2, "--out_dir", tmp_path / "out"))
    assert len(load(tmp_path / "out" / "last.pt")["loss"]) == block_size - 1


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_is_the_plain_step(data_dir, tmp_path):
    """Three steps, with new numbers in each, of a run with --compile and of the same run without."""
    flags = [*SMALL, "--loss", "extras.targets", "--gradient_accumulation_steps", 2, "--data_dir", data_dir]
    flags += ["--max_iters", 3, "--log_interval", 1]
    ok(here(*flags, "--out_dir", tmp_path / "plain"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ok(here(*flags, "--compile", "--out_dir", tmp_path / "compiled"))
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["calls_captured"] > 10 and stats["unique_graphs"] <= 2  # it is compiled, once for all steps
    plain, compiled = (load(tmp_path / name / "last.pt") for name in ("plain", "compiled"))
    assert plain["model"].keys() == compiled["model"].keys()  # without a prefix of torch.compile
    for name, p in plain["model"].items():
        torch.testing.assert_close(p, compiled["model"][name], rtol=1e-2, atol=1e-4)
    losses = [[float(row["train_loss"]) for row in log(tmp_path / name)] for name in ("plain", "compiled")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_layers_ahead_are_matrices_of_adamw():
    config, loss, *_ = loss_with_targets(optimizer="muon", weight_decay=0.3, mtp_weight=0.3)
    adamw, muon = configure_optimizers(loss.parameters(), loss.model, config, CPU)
    layers = {id(p) for p in loss.mtp.parameters()}
    assert layers and layers <= {id(p) for p in adamw.param_groups[0]["params"]}
    everything = [id(p) for optimizer in (adamw, muon) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(everything) == sorted({id(p) for p in loss.parameters()})
