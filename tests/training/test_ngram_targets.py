"""kvgpt/training/ngram_targets.py: the distribution of the next character after the same few characters."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import train
from helpers import CPU, SMALL, assert_same_run, here, ok, tiny_run
from kvgpt.training import ngram_targets as targets
from kvgpt.training.dist import Ranks
from kvgpt.training.ngram_targets import DISCOUNT, MAX_ORDER, STRENGTH, ngram_targets


def expected(text, i, V, order):
    """The distribution after text[: i + 1], by counting. The text goes round: its end comes before its beginning."""
    after = [1 / V] * V
    for k in range(order + 1):
        context = [text[(i - j) % len(text)] for j in range(k)]
        places = [p for p in range(len(text) - 1) if [text[(p - j) % len(text)] for j in range(k)] == context]
        followers = [text[p + 1] for p in places]
        if k < order:  # one count per distinct token before the context
            followers = [w for w, _ in {(text[p + 1], text[(p - k) % len(text)]) for p in places}]
        counts = [followers.count(v) for v in range(V)]
        shorter = STRENGTH + DISCOUNT * sum(c > 0 for c in counts)
        after = [(max(c - DISCOUNT, 0) + shorter * p) / (len(followers) + STRENGTH) for c, p in zip(counts, after)]
    return after


@given(st.integers(1, 4), st.data())
def test_the_targets_are_those_of_plain_counting(V, data):
    text = data.draw(st.lists(st.integers(0, V - 1), min_size=2, max_size=40))
    found = ngram_targets(np.array(text, dtype="<u2"), V, CPU)
    assert found.table.dtype == torch.float32
    for i in range(len(text)):
        assert found.table[found.rows[i]].tolist() == pytest.approx(expected(text, i, V, MAX_ORDER), abs=1e-6)


def test_a_text_with_many_contexts_gets_shorter_ones(monkeypatch):
    text = np.random.default_rng(0).integers(0, 5, 400).astype("<u2")
    monkeypatch.setattr(targets, "MAX_ENTRIES", 130 * 5)  # at most 125 contexts of three
    found = ngram_targets(text, 5, CPU)
    assert len(found.table) <= 125
    for i in (0, 1, 200, 399):
        assert found.table[found.rows[i]].tolist() == pytest.approx(expected(text.tolist(), i, 5, 3), abs=1e-6)


def test_a_text_that_is_too_long_or_too_varied_has_no_targets(monkeypatch, data_dir, tmp_path):
    text = np.random.default_rng(0).integers(0, 5, 400).astype("<u2")
    monkeypatch.setattr(targets, "MAX_ENTRIES", 26 * 5)  # 25 contexts of two
    assert ngram_targets(text, 5, CPU) is None
    monkeypatch.undo()
    monkeypatch.setattr(targets, "MAX_LENGTH", 399)
    assert ngram_targets(text, 5, CPU) is None and ngram_targets(text[1:], 5, CPU)
    flags = [*SMALL, "--data_dir", data_dir, "--max_iters", 2, "--out_dir"]
    with_targets = ok(here(*flags, tmp_path / "a", "--ngram_targets", 1))
    assert "training without" in with_targets.stdout
    ok(here(*flags, tmp_path / "b"))
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_step_descends_the_mean_of_both_losses_and_reports_the_plain_one():
    """The gradients of the first step against those of the definition, with micro-steps."""
    config, data, state = tiny_run(ngram_targets=0.6, gradient_accumulation_steps=2, learning_rate=0.0, grad_clip=0.0)
    V = len(data.chars)
    data.ngram_targets = ngram_targets(data.train, V, CPU)
    gradients = {}
    for name, p in state.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: gradients.update({name: p.grad.clone()}))
    reported, _, _ = train.train_step(config, data, state, Ranks())

    _, _, fresh = tiny_run()
    text, plain = data.train.tolist(), []
    for number in range(2):
        x, y = train.get_batch(data.train, config.seed, number, 2, 16, CPU)
        logits, loss = fresh.model(x, y)
        plain.append(loss.item())
        places, _ = train.get_batch(np.arange(len(text)), config.seed, number, 2, 16, CPU)
        for row in range(2):
            for t, i in enumerate(places[row].tolist()):
                mixed = torch.tensor(expected(text, i, V, MAX_ORDER)) * 0.6
                mixed[text[i + 1]] += 0.4
                (-(mixed * logits[row, t].log_softmax(-1)).sum() / (2 * 2 * 16)).backward(retain_graph=True)
    assert reported.item() == pytest.approx(sum(plain) / 2, rel=1e-5)
    for name, p in fresh.model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-3, atol=1e-6)
