#!/bin/sh
# axiomlm 0.1.0: with the KV cache of its GPT-2, every new token has position 0.
#
# The positions of a call are 0, 1, 2, ..., however much the cache holds. So each decode step adds the first row of the
# table of learned positions.
#
# It matters because it is the commonest mistake in a cache written by hand, and the text still looks like text.
#
# Seen (Linux x86-64, Python 3.11):
#   logits off by 11
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy tiktoken
venv/bin/pip install -qq --no-deps axiomlm==0.1.0
venv/bin/python - > out <<'END'
import torch
from axiomlm.models.transformer import ModelConfig, Transformer

torch.manual_seed(0)
sizes = dict(block_size=64, vocab_size=64, n_layer=2, n_head=4, n_embd=64)
model = Transformer(ModelConfig(**sizes, arch="classic")).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.3)
ids, caches, worst = torch.randint(64, (1, 40)), [None] * 2, 0.0
with torch.no_grad():
    without = model(ids)[0]
    for t in range(40):
        logits, _, caches = model(ids[:, t : t + 1], kv_caches=caches)
        worst = max(worst, (logits[:, -1] - without[:, t]).abs().max().item())
print(f"logits off by {worst:.2g}")
END
cat out
if ! { grep -q "off by [1-9]" out; }; then
    echo "changed: axiomlm-learned-positions" >&2
    exit 1
fi
