#!/bin/sh
# axiomlm 0.1.0: generate_with_cache(num_samples=1) writes a different text than without the cache.
#
# The first layer of the prefill moves the length of the cache, and the layers after it take that for the start: they
# rotate the prompt by its own length and leave out the causal mask. Two samples use a different cache, and are correct.
#
# It matters if you test with a batch: the mistake is only in the single prompt.
#
# Seen (Linux x86-64, Python 3.11):
#   33 of 40 greedy tokens differ
#   0 of 80 greedy tokens differ
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy tiktoken
venv/bin/pip install -qq --no-deps axiomlm==0.1.0
venv/bin/python - > out <<'END'
from types import SimpleNamespace

import torch
from axiomlm.engine.inference import generate_samples, generate_with_cache
from axiomlm.models.transformer import ModelConfig, Transformer

torch.manual_seed(0)
model = Transformer(ModelConfig(block_size=64, vocab_size=64, n_layer=2, n_head=4, n_embd=64)).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=0.3)
ids = SimpleNamespace(encode=lambda ids: ids, decode=lambda ids: ids)  # a tokenizer that leaves ids as they are
for samples in (1, 2):
    greedy = dict(prompt=[*range(10)], num_samples=samples, max_length=50, temperature=0.0)
    with_cache, without = (write(model, ids, "cpu", **greedy) for write in (generate_with_cache, generate_samples))
    print((torch.tensor(with_cache) != torch.tensor(without)).sum().item(), "of", samples * 40, "greedy tokens differ")
END
cat out
if ! { grep -q "^[1-9][0-9]* of 40" out && grep -q "^0 of 80" out; }; then
    echo "changed: axiomlm-paged-cache" >&2
    exit 1
fi
