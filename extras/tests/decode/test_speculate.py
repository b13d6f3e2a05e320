"""Draft tokens: which are accepted, and honest counts of them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extra_helpers import NGRAMS, a_draft, needs_compiler
from extras.decode.engine import MOST_DRAFTS, NUM_DRAFTS, Decoder
from extras.decode.ngrams import count_ngrams
from helpers import CONTEXT, V, a_filter, a_model, a_seed, prompts, random_model
from model import GPTConfig


def constant_model(token, context=CONTEXT, n_embd=16):
    """Predicts `token`, whatever came before."""
    model = random_model(
        GPTConfig(block_size=context, vocab_size=V, n_layer=1, n_head=2, n_embd=n_embd, tie_weights=False)
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.zero_() if "ln_f" not in name else p.fill_(1.0)
        model.lm_head.weight[token] = 1.0
        model.transformer.ln_f.weight.zero_()
    return model


def generated(decoder, idx, steps, **sampling):
    """Return the text of one prompt, and the counts of the Generation that wrote it."""
    generation = decoder.stream(idx, steps, **sampling)
    return torch.cat((idx, *generation), dim=1)[0], SimpleNamespace(**generation.stats)


def test_a_draft_that_knows_the_text_is_accepted_whole_and_a_wrong_one_never():
    model = constant_model(4, context=64)
    for text, right in ((4, True), (5, False)):
        decoder = Decoder(model, "ngram", count_ngrams(np.full(100, text), V, 100))
        row, counts = generated(decoder, prompts(1, 3), 20, temperature=0)
        assert (row[3:] == 4).all() and len(row) == 23
        assert counts.accepted == (counts.offered if right else 0)
        assert counts.forwards == (math.ceil(20 / (NUM_DRAFTS + 1)) if right else 20)
        if right:
            assert counts.offered == 20 - counts.forwards


@needs_compiler
def test_draft_tokens_continue_the_newest_tokens():
    """A model and n-grams that go round in a circle: each token has one successor."""
    model = constant_model(0, context=64, n_embd=32)
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.wte.weight.copy_(torch.eye(V, 32))
        model.lm_head.weight.copy_(torch.eye(V, 32).roll(1, dims=0))
    for compiled, most in ((False, NUM_DRAFTS), (True, MOST_DRAFTS)):
        decoder = Decoder(model, "ngram", count_ngrams(np.arange(200) % V, V, 1000), compiled)
        for prompt in ([5], [2, 3, 4, 5, 6, 7]):
            row, counts = generated(decoder, torch.tensor([prompt]), 8 * 5, temperature=0)
            assert row.tolist() == [(prompt[0] + i) % V for i in range(len(prompt) + 8 * 5)]
            assert counts.forwards == 8 * 5 / (most + 1) and counts.accepted == counts.offered


@given(a_model, a_draft, st.lists(st.integers(1, CONTEXT), min_size=1, max_size=3), a_filter, a_seed)
def test_every_token_is_a_forwards_own_or_an_accepted_draft_token(model, draft, lengths, filters, seed):
    decoder = Decoder(model, **draft)
    generation = decoder.stream([prompts(1, n, n)[0] for n in lengths], CONTEXT, seed=seed, **filters)
    sizes = [block.size(1) for block in generation]
    counts = SimpleNamespace(**generation.stats)
    assert 0 <= counts.accepted <= counts.offered <= NUM_DRAFTS * counts.forwards * len(lengths)
    if len(lengths) == 1:
        new = CONTEXT - lengths[0]
        assert sum(sizes) == new == counts.forwards + counts.accepted
        assert len(sizes) == counts.forwards
        assert max(sizes, default=0) <= decoder.num_drafts + 1
        # what is left of the text, and of the context, clips a draft
        ends = np.cumsum([lengths[0], *sizes])
        assert counts.offered == sum(min(decoder.num_drafts, CONTEXT - end - 1) for end in ends[:-1])


@needs_compiler
def test_the_c_backend_drafts_as_much_as_pays():
    """Much where the table is sure and right, less where it is often wrong."""
    model = constant_model(4, context=64)
    decoder = Decoder(model, "ngram", count_ngrams(np.full(100, 4), V, 100), compile=True)
    row, counts = generated(decoder, prompts(1, 3), 40, temperature=0)
    assert (row[3:] == 4).all() and len(row) == 43
    assert counts.forwards == 40 / (MOST_DRAFTS + 1)
    assert counts.offered == counts.accepted == 40 - counts.forwards

    text = np.random.default_rng(1).integers(V, size=20000)  # nothing to foresee
    decoder = Decoder(model, "ngram", count_ngrams(text, V, 10**4), compile=True)
    _, counts = generated(decoder, prompts(1, 3), 60, seed=1)
    assert counts.offered < 0.7 * MOST_DRAFTS * counts.forwards


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_compiler)])
def test_a_draft_token_is_drawn_with_the_noise_of_its_own_position(compile, monkeypatch):
    """Model and table hold all tokens equally likely, so the noise alone decides, and every draft token is accepted."""
    flat = torch.zeros(1, V), torch.zeros(1, V, dtype=torch.int32)
    monkeypatch.setattr("extras.decode.engine.ngram_table", lambda *_: flat)
    monkeypatch.setattr("extras.decode.c_step.MIN_CHANCE_SMALL", 0.0)
    model = constant_model(4, context=64)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    decoder = Decoder(model, "ngram", NGRAMS, compile)
    _, counts = generated(decoder, prompts(1, 3), 50, temperature=1.0, seed=3)
    assert counts.accepted == counts.offered > 30
