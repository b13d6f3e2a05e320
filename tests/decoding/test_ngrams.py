"""The n-gram table against dictionaries, and damaged counts told from good ones."""

import collections

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import NGRAMS, TEXT, V, lively, prompts
from kvgpt.decoding.decode import Decoder
from kvgpt.decoding.ngrams import ORDER, count_ngrams, ngram_table, valid_ngrams
from model import GPTConfig


def dictionary_ngrams(text, context):
    """P(next | context) by interpolated absolute discounting, from dictionaries; an own reading of the definition."""
    runs = collections.Counter(tuple(text[i : i + ORDER + 1]) for i in range(len(text) - ORDER))
    runs = {run: n for run, n in runs.items() if n > 1}

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


def test_the_table_is_interpolated_absolute_discounting():
    text = TEXT.tolist()
    contexts, logits = ngram_table(count_ngrams(TEXT, V, 10**6), V, "cpu")
    assert contexts.tolist() == sorted(set(contexts.tolist())) and len(contexts) == len(logits)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(len(logits)))
    generator = np.random.default_rng(1)
    seen = [text[i : i + ORDER] for i in generator.integers(len(text) - 3, size=12)]
    for context in [*seen, [], [3], [0, 1], [22, 22, 22], [22, 0, 21]]:
        codes = [sum((token + 1) * (V + 1) ** i for i, token in enumerate(context[:-n:-1])) for n in (1, 2, 3, 4)]
        row = max(contexts.tolist().index(code) for code in codes if code in contexts)
        expected = torch.tensor(dictionary_ngrams(text, context), dtype=torch.float64)
        torch.testing.assert_close(logits[row].exp().double(), expected, atol=1e-5, rtol=1e-4)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 40))
def test_ngrams_are_counted_as_a_dictionary_counts_them(text, most):
    ngrams = count_ngrams(np.array(text, dtype=np.uint16), 6, most)
    counted = collections.Counter(tuple(text[i : i + 4]) for i in range(len(text) - 3))
    counted = {run: n for run, n in counted.items() if n > 1}
    if ngrams is None:
        assert not counted or not most
        return
    codes = ngrams["codes"].tolist()
    runs = [tuple(code // 6**i % 6 for i in (3, 2, 1, 0)) for code in codes]
    assert codes == sorted(set(codes)) and len(codes) == min(most, len(counted))
    assert all(counted[run] == n for run, n in zip(runs, ngrams["counts"].tolist(), strict=True))
    assert sorted(ngrams["counts"].tolist()) == sorted(counted.values())[len(counted) - len(codes) :]
    assert valid_ngrams(ngrams, 6)
    ngram_table(ngrams, 6, "cpu")


def test_a_large_vocabulary_shortens_the_contexts_and_one_too_large_has_no_counts():
    text = np.random.default_rng(0).integers(3000, size=5000).tolist() * 2
    contexts, logits = ngram_table(count_ngrams(np.array(text), 3000, 10**6), 3000, "cpu")
    assert 3000 <= contexts[-1] < 3001**3 and logits.numel() <= 2**23
    assert count_ngrams(np.array(text), 2**16, 10) is None
    model = lively(GPTConfig(block_size=8, vocab_size=3000, n_layer=1, n_head=2, n_embd=16))
    decoder = Decoder(model, "ngram", count_ngrams(np.array(text), 3000, 1000))
    idx = prompts(2, 3)
    assert torch.equal(torch.stack(decoder.generate(idx, 5, seed=1)), model.generate(idx, 5, seed=1, kv_cache=False))


def test_damaged_counts_are_told_from_good_ones():
    codes, counts = NGRAMS["codes"], NGRAMS["counts"]
    assert valid_ngrams(NGRAMS, V)
    for bad in (
        7,
        {"codes": codes},
        {"codes": codes, "counts": counts[:-1]},
        {"codes": codes - 10**9, "counts": counts},
        {"codes": codes + V**4, "counts": counts},
        {"codes": codes.float(), "counts": counts},
        {"codes": codes, "counts": counts * 0},
        {"codes": codes[None], "counts": counts[None]},
    ):
        assert not valid_ngrams(bad, V)
