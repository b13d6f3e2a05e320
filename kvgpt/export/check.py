"""Is an exported model still the model? Its logits and its greedy text, compared with PyTorch's."""

import itertools

import torch

from kvgpt.cli import fail
from kvgpt.decoding.verify import NEAR_TIE, first_difference, near_tie
from kvgpt.engines.onnx import OnnxGPT
from model import Sampling


def own_text(model):
    """Return a text that the model itself writes, `(2, block_size)` ids, for the comparison of logits."""
    start = torch.zeros(2, 1, dtype=torch.int64)
    return model.generate(start, model.config.block_size - 1, temperature=1, seed=0)


@torch.no_grad()
def compare(name, model, ids, logits, greedy, exact=True):
    """Print how far an exported model is from `model`, and exit if it is not the same.

    name    what to call the exported model
    ids     own_text(model)
    logits  the exported model's for ids, `(2, block_size, V)`
    greedy  a function that continues a prompt `(1, T)` by the exported model: a list of block_size ids
    exact   False only prints, because int8 weights make another model
    """
    block_size, T = model.config.block_size, max(1, model.config.block_size // 16)
    difference = (model(ids)[0] - logits).abs().max().item()
    ours, theirs = model.generate(ids[:1, :T], block_size, temperature=0)[0].tolist(), greedy(ids[:1, :T])
    position, tie = first_difference(ours, theirs), False
    if position is not None:  # rounding may have decided between two logits that are almost equal
        picks = ours[position], theirs[position]
        tie = near_tie(model, ours[:position], 0, position - T, picks, Sampling(temperature=0, seed=0))
    num_equal = (block_size if position is None else position) - T
    line = f"{name}: logits within {difference:.1e} of PyTorch's, greedy text the same for {num_equal}"
    print(f"{line} of {block_size - T}{', then a near-tie' if tie else ''}", flush=True)
    if exact and not (difference <= NEAR_TIE and (position is None or tie)):  # NaN is not below
        fail(f"{name} is not the model: the logits must be within {NEAR_TIE}, and the greedy text the same")


def compare_onnx(file, model, ids, exact=True):
    """Run an ONNX file, `compare` it and return it as an OnnxGPT."""
    onnx = OnnxGPT(file)

    def greedy(prompt):
        return torch.cat((prompt, *onnx.stream(prompt, ids.size(1), temperature=0)), dim=1)[0].tolist()

    compare(file.name, model, ids, chunked_logits(onnx, ids), greedy, exact)
    return onnx


def chunked_logits(onnx, ids):
    """Return the logits of ids `(B, T)` through the cache: a prefill, a chunk, then single tokens."""
    T, past, logits = ids.size(1), [], []
    edges = sorted({0, T // 2, *range(T * 3 // 4, T + 1)})
    for begin, end in itertools.pairwise(edges):
        some, past = onnx(ids[:, begin:end], past)
        logits.append(some)
    return torch.cat(logits, dim=1)
