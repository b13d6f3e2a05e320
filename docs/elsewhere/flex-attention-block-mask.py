# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "setuptools==84.2.1"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0: with a BlockMask made at position 0, a compiled decode step sees at most 128 keys, an eager one all.

The mask function reads the position from a tensor, and the BlockMask is made once. It lists the blocks of 128 keys
that may be visible at that time: the first. Eager mode only calls the mask function, so it is correct at every
position. Compiled code never looks beyond the listed blocks. Make the mask at the last position. Needs a C++
compiler.
"""

from report import report

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

POSITIONS = (0, 127, 128, 255)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, tokens, 64) for tokens in (1, 256, 256))
position = torch.tensor(0)
compiled = torch.compile(flex_attention)


def made_at(p):
    position.fill_(p)
    return create_block_mask(lambda batch, head, query, key: key <= position, None, None, 1, 256, device="cpu")


def first(tokens):
    """Attend to that many keys from the start."""
    return torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :tokens], v[:, :, :tokens])


def errors(attend, mask):
    for p in POSITIONS:
        position.fill_(p)
        yield (attend(q, k, v, block_mask=mask) - first(p + 1)).abs().max().item()


with torch.no_grad():
    at_0, at_255 = made_at(0), made_at(255)
    eager = list(errors(flex_attention, at_0))
    stale = list(errors(compiled, at_0))
    good = list(errors(compiled, at_255))
    position.fill_(255)
    first_block = torch.allclose(compiled(q, k, v, block_mask=at_0), first(128), atol=1e-5)
print("positions 0, 127, 128 and 255: the largest difference from scaled_dot_product_attention")
report(
    {
        "eager, mask made at 0": (eager, [0.0, 0.0, 0.0, 0.0]),
        "compiled, mask made at 0": (stale, [0.0, 0.0, 0.098, 0.33]),
        "compiled, mask made at 255": (good, [0.0, 0.0, 0.0, 0.0]),
        "compiled, made at 0, position 255: equal to the first 128 keys": (first_block, True),
    }
)
