"""Weights in int8, with a scale for every 32 numbers of a row, as in Q8_0 of llama.cpp."""

import torch
from torch.nn import functional as F

BLOCK = 32  # numbers that share a scale


def quantize(weight):
    """Return (numbers, scales) of a matrix `(N, K)`: int8 `(N, blocks, BLOCK)` and bfloat16 `(N, blocks)`.

    A weight is its number times the scale of its block, exactly so in float32. The last block of a row is filled with
    zeros. Weights that have been rounded once give the same numbers and scales again, because the largest number of a
    block is 127, and 127 times a bfloat16 fits into a float32.
    """
    blocks = F.pad(weight.float(), (0, -weight.size(1) % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(2) / 127).bfloat16()
    divisors = torch.where(scales > 0, scales.float(), 1.0)  # a block of zeros has no scale
    return (blocks / divisors[..., None]).round_().clamp_(-127, 127).to(torch.int8), scales


@torch.no_grad()
def round_weights(model):
    """Round the matrices of all Linear layers to int8, in place. Returns the model.

    These are nearly all that a step reads. The head is one of them, and with it the embedding if they share a matrix.
    Of the other embeddings a step reads a row, so they stay as they are, and so do biases and norms.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for rows in module.weight.split(4096):  # some rows at a time, because this takes a few times their memory
                numbers, scales = quantize(rows)
                rows.copy_((numbers * scales.float()[..., None]).flatten(1)[:, : rows.size(1)])
    return model
