#!/bin/sh
# axiomlm 0.1.0: with sliding_window, a decode step sees all tokens.
#
# The window is part of the causal mask, and a step with one token gets no mask, while the cache drops nothing. Within
# the first window there is no difference.
#
# It matters because a test shorter than the window passes.
#
# Seen (Linux x86-64, Python 3.11):
#   in the first window: off by 0.0, after it: off by 11.0
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
model = Transformer(ModelConfig(**sizes, sliding_window=16)).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.3)
ids, caches, errors = torch.randint(64, (1, 40)), [None] * 2, []
with torch.no_grad():
    without = model(ids)[0]
    for t in range(40):
        logits, _, caches = model(ids[:, t : t + 1], kv_caches=caches)
        errors.append((logits[:, -1] - without[:, t]).abs().max().item())
print(f"in the first window: off by {max(errors[:16]):.1f}, after it: off by {max(errors[16:]):.1f}")
END
cat out
if ! { grep -q "first window: off by 0.0, after it: off by [1-9]" out; }; then
    echo "changed: axiomlm-sliding-window" >&2
    exit 1
fi
