#!/bin/sh
# rotary-embedding-torch 0.9.1: with xPos, its function for cached keys scales the query for a text of one token.
#
# xPos is RoPE with a decay: the scores of a query and a key shrink with their distance. The scale is counted from the
# middle of the sequence, which cancels out if the query and the keys have the same middle.
# `rotate_queries_with_cached_keys` takes it from the number of queries for these, and from the number of keys for
# those. A chunk of all tokens is correct, a decode step is not, and the error grows with the length: the fastest
# dimension of the query is 2% too small after 16 tokens, and 150 times too small after 4,096. Without xPos it is exact.
#
# It matters as a test of a cache: at 16 tokens, the length of most tests, the scores are off by 1%, which looks like
# rounding.
#
# Seen (Linux x86-64, Python 3.11), the query of a decode step by that of the full pass, in its fastest dimension:
#   tokens    xPos     without
#   16        0.98     1
#   1024      0.29     1
#   4096      0.0067   1
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 rotary-embedding-torch==0.9.1
venv/bin/python -W ignore - <<'END'
import sys

import torch
from rotary_embedding_torch import RotaryEmbedding


def ratio(tokens, use_xpos):
    torch.manual_seed(0)
    rope = RotaryEmbedding(dim=32, use_xpos=use_xpos)
    queries, keys = torch.randn(2, 1, 1, tokens, 32)
    full = rope.rotate_queries_and_keys(queries, keys)[0] if use_xpos else rope.rotate_queries_or_keys(queries)
    step, _ = rope.rotate_queries_with_cached_keys(queries[:, :, -1:], keys)
    return (step[0, 0, 0] / full[0, 0, -1])[0].item()


seen = {tokens: (ratio(tokens, True), ratio(tokens, False)) for tokens in (16, 1024, 4096)}
for tokens, (xpos, without) in seen.items():
    print(f"{tokens:<9} {xpos:<8.2g} {without:.3g}")
close = all(abs(without - 1) < 1e-3 for _, without in seen.values())
if not (close and 0.95 < seen[16][0] < 0.99 and seen[1024][0] < 0.5 and seen[4096][0] < 0.05):
    sys.exit("changed: rotate_queries_with_cached_keys of rotary-embedding-torch")
END
