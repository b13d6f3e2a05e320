"""The n-gram targets of a training run: against plain counting, and runs with them and without."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extras.decode import ngrams
from extras.decode.ngrams import DISCOUNT, STRENGTH, TARGET_ORDER, ngram_distributions
from helpers import (
    CPU,
    SMALL,
    assert_same_run,
    here,
    ok,
    write_ids,
)
from model import CharTokenizer

# -- the table ---------------------------------------------------------------------------------------------------------


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
    table, rows = ngram_distributions(np.array(text, dtype="<u2"), V, CPU)
    assert table.dtype == torch.float32
    for i in range(len(text)):
        assert table[rows[i]].tolist() == pytest.approx(expected(text, i, V, TARGET_ORDER), abs=1e-6)


def test_a_text_with_many_contexts_gets_shorter_ones_or_none(monkeypatch):
    text = np.random.default_rng(0).integers(0, 5, 400).astype("<u2")
    monkeypatch.setattr(ngrams, "TARGET_TABLE_SIZE", 130 * 5)  # at most 125 contexts of three
    table, rows = ngram_distributions(text, 5, CPU)
    assert len(table) <= 125
    for i in (0, 1, 200, 399):
        assert table[rows[i]].tolist() == pytest.approx(expected(text.tolist(), i, 5, 3), abs=1e-6)
    monkeypatch.setattr(ngrams, "TARGET_TABLE_SIZE", 26 * 5)  # 25 contexts of two
    assert ngram_distributions(text, 5, CPU) is None


def test_a_run_whose_text_has_too_many_contexts_goes_on_without_them(tmp_path):
    """6,000 distinct characters: even contexts of three would need a table of 36 million entries."""
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 6000)))
    write_ids(tmp_path / "data", CharTokenizer(text), text + text[:1000])
    flags = [*SMALL, "--data_dir", tmp_path / "data", "--max_iters", 2, "--out_dir"]
    assert "training without" in ok(here(*flags, tmp_path / "a", "--ngram_targets", 1)).stdout
    ok(here(*flags, tmp_path / "b"))
    assert_same_run(tmp_path / "a", tmp_path / "b")


# -- with the folder extras and without --------------------------------------------------------------------------------
