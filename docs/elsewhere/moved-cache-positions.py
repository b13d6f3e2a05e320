# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.24.0", "mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""transformers 5.24.0, mlx-lm 0.32.2: a left-padded cache counts slots in the one and tokens in the other.

Without position_ids, transformers rotates the keys of a padded row by their slots, which is correct as long as the
steps count slots, too. mlx-lm's BatchKVCache counts the tokens of each row. Move the cache from one to the other, and
behind four pads every new query is rotated by four positions too few. With position_ids in the prefill, both count
tokens.
"""

from report import report

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
    return float(np.abs(np.array(logits) - alone.numpy()).max())


def logits_off(prefill, next_step):
    """Return how far the next token of the padded row is off, in transformers and moved to BatchKVCache."""
    past = model(batch, attention_mask=mask, use_cache=True, **prefill).past_key_values
    cache = [BatchKVCache([4, 0]) for _ in past.layers]
    for layer, source in zip(cache, past.layers):
        keys, values = mx.array(source.keys.numpy()), mx.array(source.values.numpy())
        layer.state = keys, values, mx.array([5, 9]), mx.array([4, 0]), 9  # tokens and pads per row, filled slots
    there = off(moved(mx.array(step.numpy()), cache=cache)[0, -1])
    longer = torch.cat((mask, torch.ones_like(step)), dim=1)
    here = off(model(step, attention_mask=longer, past_key_values=past, **next_step).logits[0, -1])
    return [here, there]


print("logits of the next token behind four pads: off in transformers, and moved to BatchKVCache")
counted = logits_off({"position_ids": positions}, {"position_ids": torch.tensor([[5], [9]])})
report(
    {
        "prefill with position_ids": (counted, [0.0, 0.0]),
        "prefill without position_ids": (logits_off({}, {}), [0.0, 3.1]),
    }
)
