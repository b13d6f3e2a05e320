#!/bin/sh
# transformers 5.24.0 and mlx-lm 0.32.2: a left-padded cache counts slots in the one and tokens in the other.
#
# Without position_ids, transformers rotates the keys of a padded row by their slots. That is correct as long as the
# steps count slots, too, because only distances matter. mlx-lm's BatchKVCache counts the tokens of each row. Move the
# cache from one to the other, and behind four pads every new query is rotated by four positions too few.
#
# It matters because nothing fails, and rows without padding stay correct. Prefill with position_ids, then both count
# tokens.
#
# Seen (Linux x86-64, Python 3.11), logits of the next token of a row with four pads, off from the row alone:
#   prefill with position_ids:    transformers 0.0, moved to BatchKVCache 0.0
#   prefill without position_ids: transformers 0.0, moved to BatchKVCache 3.1
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 transformers==5.24.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - 2> log <<'END' || { tail -n 1 log; exit 1; }
import sys

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache

torch.manual_seed(0)
torch.set_grad_enabled(False)
sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
rope = {"rope_type": "default", "rope_theta": 10000.0}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(rope_parameters=rope, **sizes, **tokens)).eval()
for parameter in model.parameters():  # larger weights, so that positions show
    if parameter.dim() > 1:
        parameter.normal_(std=0.3)
moved = llama.Model(llama.ModelArgs(model_type="llama", rope_theta=10000.0, **sizes))
moved.load_weights([(name, mx.array(weight.numpy())) for name, weight in model.state_dict().items()])

short, long, step = torch.tensor([[5, 3, 8, 9, 4]]), torch.randint(0, 50, (1, 9)), torch.tensor([[7], [7]])
pads = torch.zeros(1, 4, dtype=torch.long)
batch = torch.cat((torch.cat((pads, short), dim=1), long))
mask = torch.cat((torch.cat((pads, torch.ones_like(short)), dim=1), torch.ones_like(long)))
positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
alone = model(torch.cat((short, step[:1]), dim=1)).logits[0, -1]


def off(logits):
    return np.abs(np.array(logits) - alone.numpy()).max()


seen = []
for word, prefill, next_step in (
    ("with", {"position_ids": positions}, {"position_ids": torch.tensor([[5], [9]])}),
    ("without", {}, {}),
):
    past = model(batch, attention_mask=mask, use_cache=True, **prefill).past_key_values
    cache = [BatchKVCache([4, 0]) for _ in past.layers]
    for layer, source in zip(cache, past.layers):
        keys, values = mx.array(source.keys.numpy()), mx.array(source.values.numpy())
        layer.state = keys, values, mx.array([5, 9]), mx.array([4, 0]), 9  # tokens and pads per row, filled slots
    there = off(moved(mx.array(step.numpy()), cache=cache)[0, -1])
    longer = torch.cat((mask, torch.ones_like(step)), dim=1)
    here = off(model(step, attention_mask=longer, past_key_values=past, **next_step).logits[0, -1])
    print(f"prefill {word + ' position_ids:':21} transformers {here:.1f}, moved to BatchKVCache {there:.1f}")
    seen += [here < 1e-3, there < 1e-3]
if seen != [True, True, True, False]:
    sys.exit("changed: how transformers or mlx-lm count positions behind left padding")
END
