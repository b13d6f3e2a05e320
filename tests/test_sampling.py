"""The sampler: filters, the Gumbel-max trick, noise that is a pure function of its counters, and near-ties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import a_seed
from model import Sampling, gumbel_noise, near_tie, sample_token

rows_of_logits = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12)


@given(rows_of_logits, st.integers(1, 14), a_seed)
def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_id(values, k, seed):
    """`logits < kth` as a filter keeps all that tie with the k-th."""
    logits = torch.tensor([[round(v) for v in values]], dtype=torch.float32)  # many ties
    kept = sorted(range(len(values)), key=lambda i: (-logits[0, i].item(), i))[:k]
    noise = gumbel_noise(seed, torch.arange(1), torch.arange(300), len(values))[0]
    picked = sample_token(logits.repeat(300, 1), noise, Sampling(temperature=9.0, top_k=k)).tolist()
    assert set(picked) <= set(kept)
    assert sample_token(logits, noise[:1], Sampling(temperature=0, top_k=k)).item() == kept[0]


@given(rows_of_logits, st.floats(0.01, 1), a_seed)
def test_top_p_keeps_the_token_that_crosses(values, p, seed):
    logits = torch.tensor([values])
    probs = torch.softmax(logits[0].double(), 0)
    ranking = sorted(range(len(values)), key=lambda i: (-logits[0, i].item(), i))
    before = [probs[ranking[:n]].sum().item() for n in range(len(values))]
    surely = {i for i, mass in zip(ranking, before) if mass < p - 1e-5}
    possibly = {i for i, mass in zip(ranking, before) if mass < p + 1e-5}
    noise = gumbel_noise(seed, torch.arange(1), torch.arange(50), len(values))[0]
    spread = noise + 1000 * torch.eye(len(values)).repeat(50, 1)[:50]  # each token in turn is the one the noise wants
    picked = set(sample_token(logits.repeat(50, 1), spread, Sampling(1.0, top_p=p)).tolist())
    assert surely <= picked <= possibly


def test_sampled_frequencies_are_the_softmax():
    """Chi-squared over 40,000 picks, with and without filters; 99.9% of fair samplers stay below these bounds."""
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3)) * 1.5
    n = 40_000
    noise = gumbel_noise(11, torch.arange(200), torch.arange(200), 20).reshape(n, 20)
    for filters, bound in ((dict(temperature=1.0), 43.8), (dict(temperature=0.8, top_k=6), 20.5)):
        expected = torch.softmax(logits[0].double() / filters["temperature"], 0)
        if "top_k" in filters:
            expected[expected < expected.topk(6).values.min()] = 0
            expected /= expected.sum()
        counts = sample_token(logits.repeat(n, 1), noise, Sampling(**filters)).bincount(minlength=20).double()
        live = expected > 0
        assert counts[~live].sum() == 0
        assert ((counts - n * expected)[live] ** 2 / (n * expected[live])).sum().item() < bound


def test_noise_is_gumbel_finite_and_independent_over_every_counter():
    """Neighbours in seed, sample, step and id must be uncorrelated, and a hash that only adds counters would fail."""
    base = gumbel_noise(1, torch.arange(40), torch.arange(50), 60)
    assert base.dtype == torch.float32 and base.shape == (40, 50, 60) and base.isfinite().all()
    flat = base.flatten().double()
    assert abs(flat.mean().item() - 0.5772) < 0.015  # Euler's constant; the standard error is 0.004
    assert abs(flat.var().item() - torch.pi**2 / 6) < 0.05
    uniform = torch.exp(-torch.exp(-flat))
    counts = torch.histc(uniform, 64, 0, 1)
    assert ((counts - len(flat) / 64) ** 2 / (len(flat) / 64)).sum().item() < 104  # 99.9% for 63 degrees of freedom
    other_seeds = [gumbel_noise(s, torch.arange(40), torch.arange(50), 60) for s in (0, 2, 1 + 2**32, 1 + 2**63)]
    neighbours = [base.roll(1, d) for d in range(3)] + other_seeds
    for neighbour in neighbours:
        correlation = torch.corrcoef(torch.stack((flat, neighbour.flatten().double())))[0, 1]
        assert abs(correlation.item()) < 0.013  # four and a half standard errors
    swapped = gumbel_noise(1, torch.arange(50), torch.arange(40), 60).transpose(0, 1)
    assert (swapped == base).float().mean() < 0.03  # sample and step are not one counter


def reference_noise(seed, sample, step, token):
    """The rule written out on Python integers: what another program, a web page say, has to compute."""

    def mix(h):
        h = ((h ^ (h >> 16)) * 0x7FEB352D) % 2**32
        h = ((h ^ (h >> 15)) * 0x846CA68B) % 2**32
        return h ^ (h >> 16)

    h = 0
    for counter in (seed % 2**32, seed // 2**32, sample, step, token):
        h = mix(h ^ mix((counter + 0x9E3779B9) % 2**32))
    return -math.log(-math.log1p(-min((h + 0.5) / 2**32, 1 - 2**-24)))


@given(a_seed, st.integers(0, 2**32 - 1), st.integers(0, 2**20), st.integers(1, 70))
def test_noise_follows_the_written_rule(seed, sample, step, vocab):
    got = gumbel_noise(seed, torch.tensor([sample]), torch.tensor([step]), vocab)[0, 0]
    expected = torch.tensor([reference_noise(seed, sample, step, token) for token in range(vocab)])
    torch.testing.assert_close(got, expected, atol=3e-6, rtol=1e-5)


def test_noise_is_finite_at_the_largest_hash():
    """Its uniform number would round to 1, with minus infinity as noise. Running the hash backwards gave this step."""
    noise = gumbel_noise(12345, torch.tensor([7]), torch.tensor([389953481]), 3)
    assert noise.isfinite().all() and noise[0, 0, 0] < -2.8


# -- near-ties, which --verify takes for what they are -----------------------------------------------------------------

V = 11


def row(step):
    """Noise `(V,)`."""
    return gumbel_noise(9, torch.tensor([2]), torch.tensor([step]), V)[0, 0]


def logits():
    return torch.randn(V, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("filters", [dict(), dict(top_k=4), dict(top_p=0.9)], ids=str)
def test_a_near_tie_is_told_from_a_difference(filters):
    """Two ids whose scores, noise included, are 5e-5 apart are a near-tie. At 1e-3 they are not, and no third id is."""
    sampling, noise = Sampling(seed=9, temperature=0.8, **filters), row(5)
    kept = torch.arange(V).tolist() if not filters else logits().topk(4).indices.tolist()
    score = logits() + 0.8 * noise
    winner, second = sorted(kept, key=lambda i: -score[i])[:2]
    for gap, expected in ((5e-5, True), (1e-3, False), (-5e-5, True)):
        close = logits()
        close[second] += score[winner] - score[second] - gap
        if filters.get("top_p"):  # so that both are in the set
            close[[i for i in range(V) if i not in (winner, second)]] -= 20
        assert all(near_tie(close, noise, token, sampling) for token in (winner, second)) is expected
    loser = score.argmin().item()
    assert not near_tie(close, noise, loser, sampling)


def test_a_tie_at_the_edge_of_top_k_is_a_near_tie():
    """Which of two equal logits stays in the set is a matter of rounding, whatever the noise does afterwards."""
    row_of_logits, sampling = logits(), Sampling(seed=9, top_k=1)
    row_of_logits[[4, 7]] = 5
    for step in range(20):
        assert sample_token(row_of_logits, row(step), Sampling(1.0, top_k=1)).item() == 4
        assert near_tie(row_of_logits, row(step), 7, sampling)
        assert not near_tie(row_of_logits, row(step), 2, sampling)


@pytest.mark.parametrize("shift, expected", [(1e-5, True), (-1e-5, True), (1e-2, False), (-1e-2, False)])
def test_a_tie_at_the_edge_of_top_p_is_a_near_tie(shift, expected):
    """Rounding moves the probability at which top_p cuts, so the last token of the set can be in it or not."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = torch.tensor([0.0, 0.0, 9.0, 0.0])  # id 2 wins if it is in the set, and otherwise id 0
    edge = 0.8 + shift
    picks = [sample_token(probs.log(), noise, Sampling(1.0, top_p=p)).item() for p in (0.81, 0.79)]
    assert picks == [2, 0]
    sampling = Sampling(1.0, top_p=edge, seed=0)
    assert all(near_tie(probs.log(), noise, token, sampling) for token in picks) is expected
