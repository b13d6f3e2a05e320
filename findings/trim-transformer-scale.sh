#!/bin/sh
# trim-transformer 0.1.3: the default scale of attention depends on how many tokens a call gets.
#
# Its linear attention is divided by the number of tokens in the call, so one token at a time is scaled differently from
# all at once. Even without a cache, a token's output changes when more tokens follow.
#
# It matters because no cache can be correct for a layer whose earlier outputs change. Pass a fixed scale.
#
# Seen (Linux x86-64, Python 3.11):
#   with the cache: off by 4.6
#   20 tokens, when 20 more follow: off by 1.2
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy
venv/bin/pip install -qq --no-deps trim-transformer==0.1.3
venv/bin/python - > out <<'END'
import torch
from trim_transformer.transformer_layers import TrimTransformerEncoder, TrimTransformerEncoderLayer

torch.manual_seed(0)
layer = TrimTransformerEncoderLayer(d_model=64, nhead=4, batch_first=True)
model = TrimTransformerEncoder(layer, num_layers=2).eval()
x = torch.randn(1, 40, 64)
with torch.no_grad():
    without, shorter = model(x, is_causal=True), model(x[:, :20], is_causal=True)
    flags = dict(is_causal=True, use_kv_cache=True, update_kv_cache=True)
    got = torch.cat([model(part, **flags) for part in x.split(1, 1)], 1)
print(f"with the cache: off by {(got - without).abs().max():.2g}")
print(f"20 tokens, when 20 more follow: off by {(shorter - without[:, :20]).abs().max():.2g}")
END
cat out
if ! { grep -q "with the cache: off by [1-9]" out && grep -q "follow: off by [1-9]" out; }; then
    echo "changed: trim-transformer-scale" >&2
    exit 1
fi
