"""extras/decoding/cuda_graph.py, without its graph: what it records runs on the CPU step by step.

test_gpu.py runs it on a GPU.
"""

import pytest
import torch

from extras.decoding.compile import CompileError
from extras.decoding.cuda_graph import TOKENS_AT_ONCE, GraphedGPT
from helpers import FILTERS, KINDS, V, prompts, random_model
from model import GPTConfig, Sampling
from sample import num_slots

NETWORKS = [
    *KINDS,
    *(dict(kind, bias=False) for kind in KINDS),
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
        for filters in FILTERS:
            sampling = Sampling(seed=5, overflow=overflow, **filters)
            graphed = GraphedGPT(model, B, num_slots(T, steps, CONTEXT), sampling)
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


def test_a_network_of_your_own_and_a_prompt_beyond_the_context_are_refused():
    model = network()
    with pytest.raises(ValueError, match="49 tokens"):
        next(GraphedGPT(model, 1, CONTEXT, Sampling()).stream(prompts(1, CONTEXT + 1), 1))
    model.transformer["h"][1].mlp = torch.nn.Identity()
    with pytest.raises(CompileError, match="Identity"):
        GraphedGPT(model, 1, CONTEXT, Sampling())
