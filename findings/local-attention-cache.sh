#!/bin/sh
# local-attention 1.11.2: with the cache, keys are rotated again at every step.
#
# `generate` of its LocalTransformer has use_kv_cache=True, and writes another text than without. A step rotates all
# keys in the window, the old ones included, and returns them as the new cache, so after n steps a key has been rotated
# n times. The first step with the cache is still right. With use_dynamic_pos_bias=True, which rotates nothing, all is
# well.
#
# It matters beyond this package: keys are cached before RoPE or after it, and a cache that forgets which raises no
# error. Compare two decode steps with a full pass, because one is not enough here.
#
# Seen (Linux x86-64, Python 3.11), how far the logits of tokens 1 to 6 are off, and the greedy texts:
#   rotary         0 0 0.8 0.3 1.6 0.8  different texts
#   position bias  0 0 0 0 0 0          equal texts
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 local-attention==1.11.2
venv/bin/python -W ignore - <<'END'
import sys

import torch
from local_attention import LocalTransformer


@torch.no_grad()
def compare(**settings):
    torch.manual_seed(0)
    sizes = {"num_tokens": 50, "dim": 16, "depth": 2, "heads": 2, "dim_head": 8, "max_seq_len": 64}
    model = LocalTransformer(causal=True, local_attn_window_size=16, **sizes, **settings).eval()
    for parameter in model.parameters():  # larger weights, so that positions show
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    ids, cache, off = torch.randint(0, 50, (1, 6)), None, []
    for t in range(6):
        logits, cache = model(ids[:, : t + 1], cache=cache, return_cache=True)
        off.append((logits[:, -1] - model(ids[:, : t + 1])[:, -1]).abs().max().item())
    texts = [model.generate(ids, 24, temperature=0.0, use_kv_cache=use).tolist() for use in (True, False)]
    return off, texts[0] == texts[1]


seen = {"rotary": compare(), "position bias": compare(use_dynamic_pos_bias=True)}
for name, (off, equal) in seen.items():
    print(f"{name:14}", *(f"{x:.1f}" if x > 1e-3 else "0" for x in off), "equal texts" if equal else "different texts")
wrong, right = seen.values()
if not (max(wrong[0][:2]) < 1e-3 and min(wrong[0][2:]) > 0.1 and not wrong[1] and max(right[0]) < 1e-3 and right[1]):
    sys.exit("changed: the cache of LocalTransformer")
END
