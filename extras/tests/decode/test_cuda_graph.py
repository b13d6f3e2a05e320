"""extras/decode/cuda_graph.py, without its graph: what it records runs on the CPU step by step.

test_gpu.py runs it on a GPU.
"""

import pytest
import torch

from extras.decode import guard
from extras.decode.c_step import CompileError
from extras.decode.cuda_graph import TOKENS_AT_ONCE, GraphedGPT
from helpers import FILTERS, KINDS, V, heads_of, prompts, random_model
from model import ACTIVATIONS, GPTConfig, Sampling

NETWORKS = [
    *KINDS,
    *(dict(kind, bias=False) for kind in (KINDS[0], KINDS[-1])),
    dict(qk_norm=True, activation="gelu_tanh"),
    dict(qk_norm=True, bias=False, n_kv_head=2),
]
CONTEXT = 48


def network(**kind):
    return random_model(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32, **kind))


@pytest.mark.parametrize("kind", NETWORKS, ids=str)
def test_tokens_are_those_of_generate(kind):
    model = network(**kind)
    for B, T, steps, overflow in ((3, 1, 47, "stop"), (1, 7, 60, "slide"), (2, 60, 30, "slide")):
        filters = FILTERS[(NETWORKS.index(kind) + B) % len(FILTERS)]
        sampling = Sampling(seed=5, overflow=overflow, **filters)
        graphed = GraphedGPT(model, B, T + steps if T <= CONTEXT else None, sampling)
        for seed in (None, 6):  # the second generation finds the keys and values of the first
            idx = prompts(B, T)
            got = torch.cat([idx, *graphed.stream(idx, steps, seed)], dim=1)
            assert torch.equal(got, model.generate(idx, steps, seed=seed or 5, overflow=overflow, **filters))


def test_rows_use_the_noise_of_their_samples():
    model = network()
    sampling = Sampling(seed=1, samples=[4, 4, 0])
    idx = prompts(1, 5).expand(3, -1)
    got = torch.cat(list(GraphedGPT(model, 3, CONTEXT, sampling).stream(idx, 30)), dim=1)
    assert torch.equal(got, model.generate(idx, 30, seed=1, samples=[4, 4, 0])[:, 5:])
    assert torch.equal(got[0], got[1]) and not torch.equal(got[0], got[2])


def test_the_first_token_comes_at_once_and_the_others_in_blocks():
    blocks = GraphedGPT(network(), 1, CONTEXT, Sampling(seed=1)).stream(prompts(1, 8), CONTEXT)
    assert [block.size(1) for block in blocks] == [1, TOKENS_AT_ONCE, CONTEXT - 8 - 1 - TOKENS_AT_ONCE]


def test_what_one_generation_leaves_does_not_reach_the_next():
    """A NaN in a slot that the mask hides would, because 0 times NaN is NaN."""
    model = network()
    graphed = GraphedGPT(model, 1, CONTEXT, Sampling(seed=1))
    list(graphed.stream(prompts(1, 8), CONTEXT))
    with torch.inference_mode():
        graphed.kv.fill_(float("nan"))
    got = torch.cat(list(graphed.stream(prompts(1, 8), 20)), dim=1)
    assert [head.key_cache.shape for head in heads_of(model)] == [(1, 8 + 20 - 1, 8)] * 8
    assert torch.equal(got, model.generate(prompts(1, 8), 20, seed=1)[:, 8:])


def test_what_does_not_fit_is_refused():
    model = network()
    graphed = GraphedGPT(model, 1, 20, Sampling())
    assert sum(block.size(1) for block in graphed.stream(prompts(1, 8), 13)) == 13  # the last token needs no slot
    with pytest.raises(ValueError, match="a cache of 20 slots is full"):
        list(graphed.stream(prompts(1, 8), 14))
    with pytest.raises(ValueError, match="49 tokens"):
        next(graphed.stream(prompts(1, CONTEXT + 1), 1))
    model.train()
    with pytest.raises(RuntimeError, match="train mode"):
        next(graphed.stream(prompts(1, 1), 1))


def test_a_stream_whose_cache_a_later_one_has_taken_says_so():
    """A graph has one cache, so the first text would go on with the keys of the second."""
    model = network()
    graphed = GraphedGPT(model, 1, CONTEXT, Sampling(seed=1))
    first, second = graphed.stream(prompts(1, 8), 20), graphed.stream(prompts(1, 8, 1), 20)
    next(first)
    block = next(second)
    with pytest.raises(RuntimeError, match="a later stream has taken it"):
        next(first)
    assert torch.equal(torch.cat([block, *second], dim=1), model.generate(prompts(1, 8, 1), 20, seed=1)[:, 8:])


def test_logits_that_are_nan_are_an_error_and_not_tokens():
    """Tokens come in blocks, and the one with the NaN does not come."""
    model = network()
    graphed = GraphedGPT(model, 2, CONTEXT, Sampling(seed=1))
    expected = torch.cat(list(graphed.stream(prompts(2, 8), 9)), dim=1)
    weight = model.transformer["wpe"].weight
    before = weight[12].clone()
    with torch.no_grad():
        weight[12] = 3e38
    blocks = graphed.stream(prompts(2, 8), 9)
    assert torch.equal(next(blocks), expected[:, :1])
    with pytest.raises(FloatingPointError, match="logits are infinite or NaN"):
        next(blocks)
    with torch.no_grad():
        weight[12] = before
    assert torch.equal(torch.cat(list(graphed.stream(prompts(2, 8), 9)), dim=1), expected)


def test_a_network_of_your_own_is_refused_but_not_a_sampler_or_an_activation(monkeypatch):
    """The graph calls those of model.py, which step.c repeats."""
    monkeypatch.setitem(ACTIVATIONS, "relu", torch.relu)
    monkeypatch.setitem(guard.REPEATED, "sample_token", ("0" * 16, "sample_token", None))
    model = network(activation="relu")
    got = torch.cat(list(GraphedGPT(model, 1, CONTEXT, Sampling(seed=1)).stream(prompts(1, 8), 40)), dim=1)
    assert torch.equal(got, model.generate(prompts(1, 8), 40, seed=1)[:, 8:])

    monkeypatch.setitem(guard.REPEATED, "MLP.forward", ("0" * 16, "forward, activate", "feed_forward"))
    with pytest.raises(CompileError, match=r"^MLP\.forward in model\.py has changed, and cuda_graph\.py in feed_for"):
        GraphedGPT(model, 1, CONTEXT, Sampling())
    monkeypatch.undo()
    model = network()
    model.transformer["h"][1].mlp = torch.nn.Identity()
    with pytest.raises(CompileError, match="Identity"):
        GraphedGPT(model, 1, CONTEXT, Sampling())
