#!/bin/sh
# Rows of docs/elsewhere.md: "causal" in torch 2.13.0 and xformers 0.0.35, as the keys that the last of 1 and of 3
# queries sees, of 5, and the 4 slots of a tensor after a write past its end. xformers' kernels need a GPU, so its masks
# are only written out.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6
venv/bin/pip install -qq --no-deps xformers==0.0.35
venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask, LowerTriangularMask


def sees(attend):
    """Return how many keys the last of 1 and of 3 queries sees: all weights are equal, and key j has the value 5**j."""
    result = []
    for queries in (1, 3):
        q, k = torch.zeros(1, 1, queries, 16), torch.zeros(1, 1, 5, 16)
        value = (5.0 ** torch.arange(5)).view(1, 1, 5, 1).expand(1, 1, 5, 16)
        y = attend(q, k, value)[0, 0, -1, 0]
        result += [n for n in range(1, 6) if torch.isclose(y, value[0, 0, :n, 0].mean())]
    return result


def flex(q, k, v):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.size(2), k.size(2), device="cpu")
    return flex_attention(q, k, v, block_mask=mask)


def xformers(bias):
    return lambda q, k, v: sdpa(q, k, v, attn_mask=bias().materialize((q.size(2), k.size(2))))


def layer(need_weights):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 1, batch_first=True).eval()
    q, k = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    mask = torch.ones(3, 5, dtype=torch.bool).triu(3)  # bottom right
    with torch.no_grad():
        y = layer(q, k, k, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]
        for name, mask in (("bottom right", mask), ("top left", torch.ones(3, 5, dtype=torch.bool).triu(1))):
            if torch.allclose(y, layer(q, k, k, attn_mask=mask)[0], atol=1e-6):
                return name


def written(start, tokens):
    slots = torch.zeros(4, dtype=torch.long)
    try:
        slots[start : start + tokens] = torch.ones(tokens, dtype=torch.long)
    except RuntimeError as error:
        return type(error).__name__
    return slots.tolist()


seen = {
    "sdpa is_causal": sees(lambda q, k, v: sdpa(q, k, v, is_causal=True)),
    "sdpa causal_upper_left": sees(lambda q, k, v: sdpa(q, k, v, attn_mask=causal_upper_left(q.size(2), 5))),
    "sdpa causal_lower_right": sees(lambda q, k, v: sdpa(q, k, v, attn_mask=causal_lower_right(q.size(2), 5))),
    "flex_attention q >= k": sees(flex),
    "xformers LowerTriangularMask": sees(xformers(LowerTriangularMask)),
    "xformers LowerTriangularFromBottomRightMask": sees(xformers(LowerTriangularFromBottomRightMask)),
    "nn.MultiheadAttention, mask and is_causal, need_weights=True": layer(True),
    "nn.MultiheadAttention, mask and is_causal, need_weights=False": layer(False),
    "slots[4:5] = 1 token": written(4, 1),
    "slots[3:5] = 2 tokens": written(3, 2),
}
top_left, bottom_right = [1, 3], [5, 5]
causal = [top_left, top_left, bottom_right, top_left, top_left, bottom_right, "bottom right", "top left"]
expected = dict(zip(seen, [*causal, [0, 0, 0, 0], "RuntimeError"]))
print("\n".join(f"{name:70} {result}" for name, result in seen.items()))
if changed := [name for name, result in seen.items() if result != expected[name]]:
    sys.exit(f"changed: {changed}")
END
