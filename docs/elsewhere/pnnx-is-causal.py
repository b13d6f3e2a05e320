# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "pnnx==20261020", "ncnn==1.0.20261020", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""pnnx 20261020 and ncnn 1.0.20261020: with is_causal, nn.MultiheadAttention loses its mask, and sees the future.

Without weights, torch 2.13.0 calls its causal kernel instead of adding the mask. pnnx converts that call to a layer
with neither mask nor causality, without a warning. With weights, which is the default, or without is_causal, the mask
is converted. A model that sees the future looks good on a whole text, and fails when it generates. Leave out
is_causal, and change the last token: no earlier output may move.
"""

from report import report

import ncnn
import numpy as np
import pnnx
import torch

TOKENS, SIZE = 8, 16
VARIANTS = {
    "attn_mask": dict(),
    "attn_mask, is_causal": dict(is_causal=True),
    "the same, no weights": dict(is_causal=True, need_weights=False),
}


class Layer(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(SIZE, 2, batch_first=True)
        self.options = options

    def forward(self, x):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS)
        return self.attention(x, x, x, attn_mask=mask, **self.options)[0]


def converted(layer, name, x):
    """Return a function that computes what the converted layer does."""
    pnnx.export(layer, f"{name}.pt", (x,), fp16=False)
    net = ncnn.Net()
    net.load_param(f"{name}.ncnn.param")
    net.load_model(f"{name}.ncnn.bin")

    def run(x):
        extractor = net.create_extractor()
        extractor.input("in0", ncnn.Mat(x[0].numpy()).clone())
        return np.array(extractor.extract("out0")[1]).copy()

    return run


torch.manual_seed(0)
x = torch.randn(1, TOKENS, SIZE)
changed = torch.cat((x[:, :-1], torch.randn(1, 1, SIZE)), dim=1)
print("off from torch, and how far earlier outputs move when the last token changes")
rows = {}
for i, (name, options) in enumerate(VARIANTS.items()):
    layer = Layer(options).eval()
    run = converted(layer, f"layer{i}", x)
    with torch.no_grad():
        assert torch.allclose(layer(x)[:, :-1], layer(changed)[:, :-1])  # torch itself is causal in all three
        off = float(abs(run(x) - layer(x)[0].numpy()).max())
    moved = float(abs(run(x) - run(changed))[:-1].max())
    rows[name] = [off, moved], [0.8, 0.2] if "no weights" in name else [0.0, 0.0]
report(rows)
