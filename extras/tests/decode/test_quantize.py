"""Weights in int8: as near as the formula of Q8_0 is, and the same text on every path."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from extra_helpers import NETWORKS, TEXT, assert_same_as_alone, needs_compiler
from extras.decode.c_pack import int8_panels
from extras.decode.engine import Decoder
from extras.decode.ngrams import count_ngrams
from extras.decode.quantize import BLOCK, quantize, round_weights
from helpers import V, a_model, prompts, random_model
from model import GPTConfig


def q8_0(row):
    """A row by the formula of Q8_0: d = max |x| / 127 in float16, and round(x / d), one block after the other."""
    out = np.zeros_like(row)
    for first in range(0, len(row), 32):
        block = row[first : first + 32]
        d = np.float32(np.float16(np.abs(block).max() / 127))
        out[first : first + 32] = 0 if d == 0 else np.rint(block / d) * d
    return out


def expanded(numbers, scales, K):
    """The weights in float64."""
    return (numbers.double() * scales.double()[..., None]).flatten(1)[:, :K]


@given(st.integers(1, 5), st.integers(1, 100), st.integers(0, 2**32 - 1), st.floats(-12, 4))
def test_weights_are_rounded_as_finely_as_q8_0_does(N, K, seed, exponent):
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 10**exponent
    numbers, scales = quantize(weight)
    assert (numbers.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
    assert numbers.shape == (N, -(-K // BLOCK), BLOCK)
    assert (numbers.abs().amax(2) == 127).all()  # no block leaves a part of the range unused
    error = (expanded(numbers, scales, K) - weight.double()).abs()
    for n in range(N):
        for first in range(0, K, BLOCK):
            step = weight[n, first : first + BLOCK].abs().max().item() / 127
            # half a step, and for the largest numbers what rounding the scale costs: 127 / 2**9 steps
            assert error[n, first : first + BLOCK].max() <= (0.5 + 127 * 2**-9) * step
    if exponent > -2:  # where float16 has all of its digits
        theirs = torch.from_numpy(np.stack([q8_0(row) for row in weight.numpy()])).double()
        mine, theirs = ((x - weight.double()).norm() for x in (expanded(numbers, scales, K), theirs))
        assert mine <= 1.5 * theirs + 1e-9 or K < 8


@given(a_model)
def test_rounding_twice_is_rounding_once_and_touches_matrices_only(model):
    once = round_weights(copy.deepcopy(model))
    twice = round_weights(copy.deepcopy(once))
    for (name, p), q, r in zip(model.named_parameters(), once.parameters(), twice.parameters(), strict=True):
        assert torch.equal(q, r), name
        linear = p.dim() == 2 and "wpe" not in name and (model.config.tie_weights or "wte" not in name)
        assert torch.equal(p, q) != linear, name
    assert (once.transformer["wte"].weight is once.lm_head.weight) == model.config.tie_weights


def test_a_block_of_zeros_stays_zero():
    numbers, scales = quantize(torch.zeros(2, 40))
    assert not numbers.any() and not scales.any()


def test_more_rows_than_are_rounded_at_a_time():
    layer = torch.nn.Linear(3, 5000)
    weight = layer.weight.detach().clone()
    assert torch.equal(int8_panels(weight, 16, 4)[4096 // 16 :], int8_panels(weight[4096:], 16, 4))
    round_weights(layer)
    assert torch.equal(layer.weight.double(), expanded(*quantize(weight), 3))


# -- the C backend -----------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("network", NETWORKS[::2])
def test_every_network_in_int8_gets_the_tokens_of_its_rounded_weights(network):
    """The step in int8 adds the same numbers in the same order as the one in float32, so the texts are equal."""
    model = round_weights(random_model(GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | network)))
    idx = prompts(9, 3)[:, : model.config.block_size] % model.config.vocab_size
    ngrams = count_ngrams(TEXT % model.config.vocab_size, model.config.vocab_size, 1000)
    decoders = [Decoder(model, "ngram", ngrams, compile=True, weights=weights) for weights in ("int8", "float32")]
    ours, floats = (decoder.generate(idx, 65, seed=1) for decoder in decoders)
    assert torch.equal(ours, floats)
    assert_same_as_alone(model, ours[:1], idx[:1], 65, [0], 1, {})
