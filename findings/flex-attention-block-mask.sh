#!/bin/sh
# torch 2.13.0: on a CPU, flex_attention ignores the blocks of a BlockMask in eager mode and obeys them when compiled.
#
# A decode step has a mask function that reads the position from a tensor, and a BlockMask made once, at position 0. A
# BlockMask lists the blocks of 128 keys that may be visible, and this list is fixed when it is made: here, the first
# block. That is by design. But eager mode only calls the mask function, so it is correct at every position, while
# compiled code never looks beyond the first 128 keys. There is no error.
#
# It matters because a decode loop that was checked in eager mode, or in texts up to 128 tokens, goes wrong in longer
# ones as soon as it is compiled. Make the mask at the last position: then all blocks are listed, and the mask function
# decides. Or make it again every 128 tokens, which lets compiled code skip the rest.
#
# Seen (Linux x86-64, Python 3.11, gcc 12), largest difference from scaled_dot_product_attention:
#   position                               0    127    128    255
#   eager, mask made at 0              0e+00  2e-07  2e-07  1e-07
#   compiled, mask made at 0           0e+00  1e-07  1e-01  3e-01
#   compiled, mask made at 255         0e+00  1e-07  1e-07  1e-07
#   at 255, compiled and made at 0: the first 128 keys
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 setuptools
export TORCHINDUCTOR_CACHE_DIR="$dir/inductor"
venv/bin/python -W ignore - <<'END'
import sys

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
    seen = {
        "eager, mask made at 0": list(errors(flex_attention, at_0)),
        "compiled, mask made at 0": list(errors(compiled, at_0)),
        "compiled, mask made at 255": list(errors(compiled, at_255)),
    }
    position.fill_(255)
    stale = torch.allclose(compiled(q, k, v, block_mask=at_0), first(128), atol=1e-5)
print(f"{'position':32}" + "".join(f"{p:7}" for p in POSITIONS))
for name, row in seen.items():
    print(f"{name:32}" + "".join(f"{error:7.0e}" for error in row))
print("at 255, compiled and made at 0:", "the first 128 keys" if stale else "other keys")
correct = [[error < 1e-5 for error in row] for row in seen.values()]
if correct != [4 * [True], [True, True, False, False], 4 * [True]] or not stale:
    sys.exit("changed: which keys flex_attention sees with a BlockMask made at position 0")
END
