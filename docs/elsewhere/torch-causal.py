# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "xformers==0.0.35"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0 and xformers 0.0.35: is_causal starts in the top left, so one query sees one of five keys.

The masks of xformers are only written out, because its kernels need a GPU. The last rows write past the end of a
tensor with four slots: a slice that begins there is dropped, and one of which a part fits is an error.

Upstream: pytorch/pytorch#108108 (is_causal), pytorch/pytorch#178588 (nn.MultiheadAttention).
"""

from report import report, sees

import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask, LowerTriangularMask


def causal(mask=None, **settings):
    """Return which keys 1 and 3 queries see. mask(T, S) makes the attn_mask."""

    def attend(*qkv):
        q, k, v = map(torch.tensor, qkv)
        return sdpa(q, k, v, attn_mask=mask and mask(q.size(2), k.size(2)), **settings)

    return [sees(attend, 1), sees(attend, 3)]


def flex(*qkv):
    q, k, v = map(torch.tensor, qkv)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.size(2), k.size(2), device="cpu")
    return flex_attention(q, k, v, block_mask=mask)


def layer(need_weights):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 1, batch_first=True).eval()
    q, k = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    masks = {name: torch.ones(3, 5, dtype=torch.bool).triu(n) for name, n in (("bottom right", 3), ("top left", 1))}
    with torch.no_grad():
        y = layer(q, k, k, attn_mask=masks["bottom right"], is_causal=True, need_weights=need_weights)[0]
        return next(
            name for name, mask in masks.items() if torch.allclose(y, layer(q, k, k, attn_mask=mask)[0], atol=1e-6)
        )


def written(start, tokens):
    slots = torch.zeros(4, dtype=torch.long)
    try:
        slots[start : start + tokens] = torch.ones(tokens, dtype=torch.long)
    except RuntimeError as error:
        return type(error).__name__
    return slots.tolist()


top_left, bottom_right = [[1], [1, 2, 3]], [[5], [3, 4, 5]]
report(
    {
        "sdpa is_causal": (causal(is_causal=True), top_left),
        "sdpa causal_upper_left": (causal(causal_upper_left), top_left),
        "sdpa causal_lower_right": (causal(causal_lower_right), bottom_right),
        "flex_attention q >= k": ([sees(flex, 1), sees(flex, 3)], top_left),
        "xformers LowerTriangularMask": (causal(lambda *size: LowerTriangularMask().materialize(size)), top_left),
        "xformers LowerTriangularFromBottomRightMask": (
            causal(lambda *size: LowerTriangularFromBottomRightMask().materialize(size)),
            bottom_right,
        ),
        "nn.MultiheadAttention, mask and is_causal, need_weights=True": (layer(True), "bottom right"),
        "nn.MultiheadAttention, mask and is_causal, need_weights=False": (layer(False), "top left"),
        "slots[4:5] = 1 token": (written(4, 1), [0, 0, 0, 0]),
        "slots[3:5] = 2 tokens": (written(3, 2), "RuntimeError"),
    }
)
