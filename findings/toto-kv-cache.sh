#!/bin/sh
# toto-ts 0.2.0 (Datadog's time series model): with the KV cache the output differs from that without.
#
# Its xPos scales keys and queries around the middle of each call. Cached keys and new queries then have different
# centers, so their scores are scaled by the wrong distance (toto/model/rope.py:93).
#
# It matters to every rotary cache with a decay: what is kept must not depend on the length of the call that wrote it.
#
# Seen (Linux x86-64, Python 3.11):
#   in the prompt: off by 0.00, in 64 steps: off by 2.02
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy einops jaxtyping==0.2.29 rotary-embedding-torch==0.8.6
venv/bin/pip install -qq --no-deps toto-ts==0.2.0
venv/bin/python - > out <<'END'
import torch
from toto.model.transformer import Transformer
from toto.model.util import KVCache

torch.manual_seed(0)
sizes = dict(num_layers=2, embed_dim=64, num_heads=4)
more = dict(mlp_hidden_dim=128, dropout=0.0, spacewise_every_n_layers=2, spacewise_first=False)
model = Transformer(**sizes, **more, use_memory_efficient_attention=False).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.2)
patches, group = torch.randn(1, 2, 80, 64), torch.zeros(1, 2, 80)
sizes |= dict(batch_size=1, num_variates=2, transformer_layers=model.layers, max_seq_len=80)
cache = KVCache(**sizes, use_memory_efficient_attention=False)
with torch.no_grad():
    parts = patches[:, :, :16], *patches[:, :, 16:].split(1, 2)
    got = torch.cat([model(part, group[:, :, : part.size(2)], cache) for part in parts], 2)
    error = (got - model(patches, group)).abs().amax((0, 1, 3))
print(f"in the prompt: off by {error[:16].max():.2f}, in 64 steps: off by {error[16:].max():.2f}")
END
cat out
if ! { grep -q "in the prompt: off by 0.00, in 64 steps: off by [1-9]" out; }; then
    echo "changed: toto-kv-cache" >&2
    exit 1
fi
