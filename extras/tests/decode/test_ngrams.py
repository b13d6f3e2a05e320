"""The n-grams of drafts and of the targets of a training run, against dictionaries and plain counting."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extra_helpers import NGRAMS, TEXT, WAYS
from extras.decode.engine import Decoder
from extras.decode.ngrams import DISCOUNT, STRENGTH, TARGET_ORDER, count_ngrams, ngram_distributions, ngram_table
from helpers import CPU, MODELS, SMALL, V, assert_same_run, here, ok, prompts, random_model, write_ids
from model import CharTokenizer, GPTConfig

ORDER = 4  # of V tokens


def dictionary_ngrams(runs, context):
    """P(next | context) by interpolated absolute discounting, from dictionaries: the definition itself."""

    def probability(context):
        followers = collections.Counter()
        for tokens, n in runs.items():
            if tokens[ORDER - len(context) : ORDER] == context:
                followers[tokens[-1]] += n
        lower = probability(context[1:]) if context else [1 / V] * V
        total = sum(followers.values())
        if not total:
            return lower
        return [(max(0, followers[t] - 0.75) + 0.75 * len(followers) * lower[t]) / total for t in range(V)]

    return probability(tuple(context))


def test_the_table_is_interpolated_absolute_discounting_of_the_longest_known_context():
    ngrams = count_ngrams(TEXT, V, 10**6)
    logits, after = ngram_table(ngrams, V)
    assert ngrams["order"] == ORDER and logits.shape == after.shape
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(len(logits)), atol=1e-4, rtol=0)
    text = TEXT.tolist()
    runs = collections.Counter(tuple(text[i : i + ORDER + 1]) for i in range(len(text) - ORDER))
    known = {run[n:ORDER] for run in runs for n in range(ORDER + 1)}
    row, context, lengths = 0, (), set()
    for i, token in enumerate([*text[:200], 22, 22, 22, 22, 0, 21, *text[:9]]):
        if i % 3 == 0:
            expected = torch.tensor(dictionary_ngrams(runs, context), dtype=torch.float64)
            torch.testing.assert_close(logits[row].exp().double(), expected, atol=1e-5, rtol=1e-4)
        row = int(after[row, token])
        context = next(c for n in range(ORDER + 1) if (c := (*context, token)[-ORDER:][n:]) in known)
        lengths.add(len(context))
    assert lengths >= {1, 2, 3, 4}


def test_order_and_codes_fit_32_bits():
    for vocab_size, order in ((2, 4), (73, 4), (74, 3), (215, 3), (216, 2), (1290, 2), (1291, 1), (2895, 1)):
        text = np.full(20, vocab_size - 1)
        ngrams = count_ngrams(text, vocab_size, 10)
        assert ngrams["order"] == order and ngrams["codes"].tolist() == [vocab_size ** (order + 1) - 1]
        assert ngrams["codes"].dtype == ngrams["counts"].dtype == torch.int32
    assert count_ngrams(np.full(20, 1), 2896, 10) is None  # the table would have no row for a context


def test_counts_of_an_older_checkpoint_have_contexts_of_three():
    text = [0, 1, 2, 3] * 5
    codes = sorted({sum(text[i + j] * 5 ** (3 - j) for j in range(4)) for i in range(4)})
    older = {"codes": torch.tensor(codes), "counts": torch.tensor([4] * 4)}
    logits, after = ngram_table(older, 5)
    row = 0
    for token in text:
        row = int(after[row, token])
    assert int(logits[row].argmax()) == 0


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 40))
def test_ngrams_are_counted_as_a_dictionary_counts_them(text, most):
    ngrams = count_ngrams(np.array(text, dtype=np.uint16), 6, most)
    counted = collections.Counter(tuple(text[i : i + 5]) for i in range(len(text) - 4))
    if ngrams is None:
        assert not counted or not most
        return
    codes = ngrams["codes"].tolist()
    runs = [tuple(code // 6**i % 6 for i in (4, 3, 2, 1, 0)) for code in codes]
    assert codes == sorted(set(codes)) and len(codes) == min(most, len(counted))
    assert all(counted[run] == n for run, n in zip(runs, ngrams["counts"].tolist(), strict=True))
    assert sorted(ngrams["counts"].tolist()) == sorted(counted.values())[len(counted) - len(codes) :]
    ngram_table(ngrams, 6)


def test_a_large_vocabulary_shortens_the_contexts():
    text = np.random.default_rng(0).integers(2800, size=5000).tolist() * 2
    logits, after = ngram_table(count_ngrams(np.array(text), 2800, 10**6), 2800)
    assert logits.shape == after.shape and logits.numel() <= 2**23
    model = random_model(GPTConfig(block_size=8, vocab_size=2800, n_layer=1, n_head=2, n_embd=16))
    decoder = Decoder(model, "ngram", count_ngrams(np.array(text), 2800, 1000))
    idx = prompts(2, 3)
    assert torch.equal(decoder.generate(idx, 5, seed=1), model.generate(idx, 5, seed=1, kv_cache=False))


# -- counts from a file, which may contain anything --------------------------------------------------------------------

CODES, COUNTS = NGRAMS["codes"], NGRAMS["counts"]
DAMAGED = {
    "a list": [CODES, COUNTS],
    "no counts": {"order": 4, "codes": CODES},
    "order 0": {"order": 0, "codes": torch.tensor([1, 2]), "counts": torch.tensor([3, 4])},
    "order 5": NGRAMS | {"order": 5},
    "a shorter order": NGRAMS | {"order": 3},
    "a string as order": NGRAMS | {"order": "4"},
    "empty": NGRAMS | {"codes": CODES[:0], "counts": COUNTS[:0]},
    "short counts": NGRAMS | {"counts": COUNTS[:-1]},
    "a list of codes": NGRAMS | {"codes": CODES.tolist()},
    "codes of floats": NGRAMS | {"codes": CODES.double()},
    "two dimensions": NGRAMS | {"codes": CODES[None], "counts": COUNTS[None]},
    "an expanded number": NGRAMS | {"counts": COUNTS[:1].expand(len(CODES))},
    "a meta tensor": NGRAMS | {"counts": COUNTS.to("meta")},
    "a sparse tensor": NGRAMS | {"codes": CODES.to_sparse()},
    "codes in another order": NGRAMS | {"codes": CODES.flip(0)},
    "a code twice": NGRAMS | {"codes": CODES.clone().index_copy_(0, torch.tensor([1]), CODES[:1])},
    "a negative code": NGRAMS | {"codes": CODES - CODES[0] - 1},
    "a code beyond the vocabulary": NGRAMS | {"codes": CODES - CODES[-1] + V**5},
    "a gap that overflows": NGRAMS | {"codes": torch.tensor([2**31 - 1, -(2**31)]).int(), "counts": COUNTS[:2]},
    "a count of 0": NGRAMS | {"counts": COUNTS - COUNTS.min()},
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_counts_are_refused_in_one_line_before_anything_reads_them(what):
    """Empty ones were an IndexError in PyTorch, and a segmentation fault in the C backend."""
    with pytest.raises(ValueError, match=r"^the n-gram counts are damaged \(.{10,120}\): decode without drafts$"):
        ngram_table(DAMAGED[what], V)
    for way in WAYS.values():
        if way["draft"]:
            with pytest.raises(ValueError, match="damaged"):
                Decoder(MODELS[0], **way | {"ngrams": DAMAGED[what]})


def test_codes_that_do_not_fit_64_bits_are_refused():
    with pytest.raises(ValueError, match="the order 4 does not fit 50257 tokens"):
        ngram_table(NGRAMS, 50257)


@given(st.integers(1, 4), st.lists(st.integers(0, 4**5 - 1), min_size=1, max_size=30, unique=True))
def test_counts_that_pass_the_check_make_a_table_of_finite_numbers_and_rows_that_exist(order, codes):
    codes = torch.tensor(sorted({code % 4 ** (order + 1) for code in codes}))
    logits, after = ngram_table({"order": order, "codes": codes, "counts": torch.ones_like(codes) * 2**40}, 4)
    assert logits.shape == after.shape and logits.isfinite().all()
    assert 0 <= int(after.min()) <= int(after.max()) < len(after)


# -- targets of a training run, against plain counting -----------------------------------------------------------------


def plain_distribution(text, i, V, order):
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
        assert table[rows[i]].tolist() == pytest.approx(plain_distribution(text, i, V, TARGET_ORDER), abs=1e-6)


def test_a_text_with_many_contexts_gets_shorter_ones_or_none(monkeypatch):
    text = np.random.default_rng(0).integers(0, 5, 400).astype("<u2")
    monkeypatch.setattr("extras.decode.ngrams.TARGET_TABLE_SIZE", 130 * 5)  # at most 125 contexts of three
    table, rows = ngram_distributions(text, 5, CPU)
    assert len(table) <= 125
    for i in (0, 1, 200, 399):
        assert table[rows[i]].tolist() == pytest.approx(plain_distribution(text.tolist(), i, 5, 3), abs=1e-6)
    monkeypatch.setattr("extras.decode.ngrams.TARGET_TABLE_SIZE", 26 * 5)  # 25 contexts of two
    assert ngram_distributions(text, 5, CPU) is None


def test_a_run_whose_text_has_too_many_contexts_goes_on_without_them(tmp_path):
    """6,000 distinct characters: even contexts of three would need a table of 36 million entries."""
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 6000)))
    write_ids(tmp_path / "data", CharTokenizer(text), text + text[:1000])
    flags = [*SMALL, "--data_dir", tmp_path / "data", "--max_iters", 2, "--out_dir"]
    ngrams = ["--loss", "extras.targets", "--mtp_weight", 0]
    assert "training without" in ok(here(*flags, tmp_path / "a", *ngrams)).stdout
    ok(here(*flags, tmp_path / "b"))
    assert_same_run(tmp_path / "a", tmp_path / "b")
