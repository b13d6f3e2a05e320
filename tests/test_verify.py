"""--verify takes a near-tie for what it is, and a difference for a difference."""

import torch

from helpers import random_model
from model import GPTConfig, Sampling, gumbel_noise, sample_token
from sample import near_tie


def test_a_near_tie_is_told_from_a_difference():
    """Two ids whose scores, noise included, are 5e-5 apart are a near-tie. At 1e-3 they are not, and no third id is."""
    model = random_model(GPTConfig(block_size=4, vocab_size=11, n_layer=1, n_head=1, n_embd=8, tie_weights=False))
    context, sampling = [3, 1], Sampling(seed=9, temperature=0.8)
    noise = gumbel_noise(9, torch.tensor([2]), torch.tensor([5]), 11)[0]
    with torch.no_grad():
        score = model(torch.tensor([context]))[0][0, -1] + 0.8 * noise[0]
        winner, second = score.topk(2).indices.tolist()
        x = model.hidden_states(torch.tensor([context]))[0, -1]

        def move(gap):  # along x, so that this logit alone changes
            now = (model.lm_head(x) + 0.8 * noise[0])[winner] - (model.lm_head(x) + 0.8 * noise[0])[second]
            model.lm_head.weight[second] += (now - gap) * x / (x @ x)

        for gap, expected in ((5e-5, True), (1e-3, False), (-5e-5, True)):
            move(gap)
            assert near_tie(model, context, 2, 5, (winner, second), sampling) is expected
        assert not near_tie(model, context, 2, 5, (winner, score.argmin().item()), sampling)
        assert not near_tie(model, context, 2, 6, (winner, second), sampling)


def test_a_tie_at_the_edge_of_top_k_is_a_near_tie():
    """Which of two equal logits stays in the set is a matter of rounding, whatever the noise does afterwards."""
    model = random_model(GPTConfig(block_size=4, vocab_size=11, n_layer=1, n_head=1, n_embd=8, tie_weights=False))
    with torch.no_grad():
        x = model.hidden_states(torch.tensor([[3, 1]]))[0, -1]
        model.lm_head.weight[4] = model.lm_head.weight[7] = 20 * x / (x @ x)
        logits = model(torch.tensor([[3, 1]]))[0][:, -1]
    sampling = Sampling(seed=9, top_k=1)
    for step in range(20):
        noise = gumbel_noise(9, torch.tensor([0]), torch.tensor([step]), 11)[0]
        assert sample_token(logits, noise, Sampling(1.0, top_k=1)).item() == 4
        assert near_tie(model, [3, 1], 0, step, (4, 7), sampling)
        assert not near_tie(model, [3, 1], 0, step, (4, 2), sampling)
