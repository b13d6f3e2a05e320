"""Weights in int8, with a scale for every 32 numbers of a row, like Q8_0 of llama.cpp."""

import torch
from torch.nn import functional as F

BLOCK = 32  # how many numbers share a scale


def quantize(weight):
    """Return (numbers, scales) of a matrix `(N, K)`: int8 `(N, blocks, BLOCK)` and bfloat16 `(N, blocks)`.

    A weight is its number times the scale of its block, exactly in float32. The last block of a row is padded with
    zeros. Rounded weights give the same numbers and scales again, because the largest number of a block is 127, and 127
    times a bfloat16 fits into a float32.
    """
    blocks = F.pad(weight.float(), (0, -weight.size(1) % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(2) / 127).bfloat16()
    divisors = torch.where(scales > 0, scales.float(), 1.0)  # a block of zeros has no scale
    return (blocks / divisors[..., None]).round_().clamp_(-127, 127).to(torch.int8), scales


@torch.no_grad()
def round_weights(model):
    """Round the matrices of all Linear layers to int8, in place, and set model.int8. Returns the model.

    They are almost everything that a step reads. That includes the head, and with it the embedding if they share a
    matrix. Of other embeddings a step reads only a row, so they are not rounded, and neither are biases and norms.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for rows in module.weight.split(4096):  # not all at once, because this takes several times the memory
                numbers, scales = quantize(rows)
                rows.copy_((numbers * scales.float()[..., None]).flatten(1)[:, : rows.size(1)])
    model.int8 = True  # the C backend can read bytes
    return model
