#!/bin/sh
# pnnx 20261020 and ncnn 1.0.20261020: with is_causal, nn.MultiheadAttention loses its mask, and sees the future.
#
# torch wants a mask next to is_causal=True, and without weights it calls its causal kernel instead of adding the mask.
# pnnx converts that call to a layer with neither mask nor causality, without a warning. With weights, which is the
# default, or without is_causal, the mask is converted. scaled_dot_product_attention with is_causal becomes a layer that
# ncnn refuses to load.
#
# It matters because need_weights=False is what a decoder uses for speed. A model that sees the future looks good on a
# whole text, and fails as soon as it generates, where there is none. Leave out is_causal, and change the last token: no
# earlier output may move.
#
# Seen (Linux x86-64, Python 3.11), with 8 tokens:
#                                   off from torch   when the last token changes, earlier outputs move by
#   attn_mask                                6e-08   0e+00
#   attn_mask, is_causal                     9e-08   0e+00
#   the same, no weights                     8e-01   2e-01
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 pnnx==20261020 ncnn==1.0.20261020 numpy==2.4.6
PATH="$dir/venv/bin:$PATH" venv/bin/python -W ignore - <<'END' 2> log > out || { tail -n 1 log; exit 1; }
import sys

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
seen = {}
for i, (name, options) in enumerate(VARIANTS.items()):
    layer = Layer(options).eval()
    run = converted(layer, f"layer{i}", x)
    with torch.no_grad():
        assert torch.allclose(layer(x)[:, :-1], layer(changed)[:, :-1])  # torch itself is causal in all three
        error = abs(run(x) - layer(x)[0].numpy()).max()
    seen[name] = error, abs(run(x) - run(changed))[:-1].max()
print(f"{'':32}off from torch   when the last token changes, earlier outputs move by")
for name, (error, moved) in seen.items():
    print(f"{name:32}{error:14.0e}   {moved:.0e}")
if [(error < 1e-5, moved < 1e-5) for error, moved in seen.values()] != [(True, True), (True, True), (False, False)]:
    sys.exit("changed: what pnnx makes of is_causal")
END
grep -A 4 "off from torch" out
