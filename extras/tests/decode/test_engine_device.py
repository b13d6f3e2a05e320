"""The Decoder's tensors meet none of another device, and few are copied back: on the device of tests/pretend.py."""

import pytest
import torch

from extras.decode.cuda_graph import TOKENS_AT_ONCE, GraphedGPT
from extras.decode.engine import Decoder
from extras.decode.ngrams import count_ngrams
from model import Sampling
from pretend import DEVICE, IDX, LEARNED, ROPE, both, pretend_device


@pytest.fixture
def device():
    with pretend_device() as mode:
        yield mode


@pytest.mark.parametrize(
    "network, settings",
    [(LEARNED, dict(seed=1, top_p=0.8, temperature=1.2)), (ROPE, dict(seed=2, overflow="slide", top_k=9))],
)
def test_drafts_stay_on_their_device(network, settings, device):
    here, there = both(network)
    expected = here.generate(IDX, 30, **settings).tolist()
    ngrams = count_ngrams(IDX.flatten().tolist() * 9, 65, 100)
    device.reads.clear()
    got = Decoder(there, "ngram", ngrams).generate(IDX.to(DEVICE), 30, **settings)
    assert got.device == DEVICE
    assert max(device.reads) <= 2 * 4 * 65  # tokens, and noise for the table
    assert got.tolist() == expected


def test_prompts_of_different_lengths(device):
    here, there = both(ROPE)
    ragged = [IDX[0], IDX[1, :2]]
    got = Decoder(there).generate([row.to(DEVICE) for row in ragged], 10, seed=1)
    assert [row.tolist() for row in got] == [row.tolist() for row in Decoder(here).generate(ragged, 10, seed=1)]


@pytest.mark.parametrize("network, overflow", [(LEARNED, "stop"), (ROPE, "slide")])
def test_the_steps_of_a_cuda_graph_stay_on_their_device(network, overflow, device):
    """Without CUDA they are not recorded, but launched one by one."""
    here, there = both(network)
    sampling = Sampling(seed=2, overflow=overflow, top_k=9)
    graphed = GraphedGPT(there, len(IDX), there.config.block_size, sampling)
    device.reads.clear()
    got = torch.cat(list(graphed.stream(IDX.to(DEVICE), 70)), dim=1)
    assert max(device.reads) <= 2 * TOKENS_AT_ONCE
    assert got.tolist() == here.generate(IDX, 70, seed=2, overflow=overflow, top_k=9)[:, IDX.size(1) :].tolist()
