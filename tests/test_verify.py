"""--verify takes a near-tie for what it is, and a difference for a difference."""

import pytest
import torch

from model import Sampling, gumbel_noise, sample_token
from sample import near_tie

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
        assert near_tie(close, noise, (winner, second), sampling) is expected
    loser = score.argmin().item()
    assert not near_tie(close, noise, (winner, loser), sampling)


def test_a_tie_at_the_edge_of_top_k_is_a_near_tie():
    """Which of two equal logits stays in the set is a matter of rounding, whatever the noise does afterwards."""
    row_of_logits, sampling = logits(), Sampling(seed=9, top_k=1)
    row_of_logits[[4, 7]] = 5
    for step in range(20):
        assert sample_token(row_of_logits, row(step), Sampling(1.0, top_k=1)).item() == 4
        assert near_tie(row_of_logits, row(step), (4, 7), sampling)
        assert not near_tie(row_of_logits, row(step), (4, 2), sampling)


@pytest.mark.parametrize("shift, expected", [(1e-5, True), (-1e-5, True), (1e-2, False), (-1e-2, False)])
def test_a_tie_at_the_edge_of_top_p_is_a_near_tie(shift, expected):
    """Rounding moves the probability at which top_p cuts, so the last token of the set can be in it or not."""
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = torch.tensor([0.0, 0.0, 9.0, 0.0])  # id 2 wins if it is in the set, and otherwise id 0
    edge = 0.8 + shift
    picks = [sample_token(probs.log(), noise, Sampling(1.0, top_p=p)).item() for p in (0.81, 0.79)]
    assert picks == [2, 0]
    assert near_tie(probs.log(), noise, (2, 0), Sampling(1.0, top_p=edge, seed=0)) is expected
