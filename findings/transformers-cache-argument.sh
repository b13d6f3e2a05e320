#!/bin/sh
# transformers 5.23.0 and 5.24.0: in generate(), a model of your own forgets its prompt if it names its cache as the
# other version does.
#
# Since 5.24, generate() passes the cache as `cache`, before that as `past_key_values`. The library's own models accept
# both names. A forward of yours that has one of them, and **kwargs for the rest, finds the other one in kwargs, and
# goes on without a cache. But from the second step on it gets one token, so it sees one token, at position 0. Without
# **kwargs there would be an error. 5.24 warns that the old name is deprecated, as if it still worked.
#
# It matters if you wrapped a small GPT for generate(): it works, but its text gets worse. Accept both names, and
# compare with use_cache=False.
#
# Seen (Linux x86-64, Python 3.11), 20 greedy tokens after each of 4 prompts, compared with a forward pass over the
# whole text for each token; the last column is what explains the logits of the last token:
#   transformers 5.23.0   forward(past_key_values)           0 of 80 tokens differ   sees the whole text
#   transformers 5.23.0   forward(cache)                    70 of 80 tokens differ   sees one token
#   transformers 5.23.0   forward(past_key_values, cache)    0 of 80 tokens differ   sees the whole text
#   transformers 5.24.0   forward(past_key_values)          70 of 80 tokens differ   sees one token
#   transformers 5.24.0   forward(cache)                     0 of 80 tokens differ   sees the whole text
#   transformers 5.24.0   forward(past_key_values, cache)    0 of 80 tokens differ   sees the whole text
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 transformers==5.24.0
venv/bin/pip install -qq --no-deps --target older transformers==5.23.0
cat > own.py <<'END'
import sys

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

BATCH, PROMPT, NEW, HEADS, SIZE = 4, 6, 20, 2, 16


class Config(PreTrainedConfig):
    model_type, num_hidden_layers, num_attention_heads, hidden_size = "own", 1, HEADS, HEADS * SIZE


class GPT(PreTrainedModel, GenerationMixin):
    """One layer of attention with learned positions."""

    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.wte, self.wpe = nn.Embedding(40, HEADS * SIZE), nn.Embedding(64, HEADS * SIZE)
        self.qkv, self.lm_head = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, 40)
        self.post_init()

    def attend(self, input_ids, past):
        (B, T), before = input_ids.shape, past.get_seq_length() if past is not None else 0
        x = self.wte(input_ids) + self.wpe(torch.arange(before, before + T))
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = past.update(k, v, 0)
        visible = torch.ones(T, before + T, dtype=torch.bool).tril(before)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return CausalLMOutputWithPast(logits=self.lm_head(x + y.transpose(1, 2).flatten(2)))


class Old(GPT):
    def forward(self, input_ids, past_key_values=None, **kwargs):
        return self.attend(input_ids, past_key_values)


class New(GPT):
    def forward(self, input_ids, cache=None, **kwargs):
        return self.attend(input_ids, cache)


class Both(GPT):
    def forward(self, input_ids, past_key_values=None, cache=None, **kwargs):
        return self.attend(input_ids, past_key_values if cache is None else cache)


@torch.no_grad()
def run(make):
    """Return how many greedy tokens differ, and what the last of them has seen."""
    torch.manual_seed(0)
    model = make(Config()).eval()
    for p in model.parameters():
        p.normal_(std=0.5)
    ids = torch.randint(1, 40, (BATCH, PROMPT))
    expected = ids
    for _ in range(NEW):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    scores = dict(output_logits=True, return_dict_in_generate=True)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **scores)
    text = out.sequences[:, :-1]
    candidates = {"the whole text": model(text), "one token": model(text[:, -1:])}
    seen = [name for name, o in candidates.items() if torch.allclose(out.logits[-1], o.logits[:, -1], atol=1e-4)]
    return (out.sequences != expected).sum().item(), *seen


version = transformers.__version__
wrong = New if version == "5.23.0" else Old
for make, names in ((Old, "past_key_values"), (New, "cache"), (Both, "past_key_values, cache")):
    differ, *seen = run(make)
    head = f"transformers {version}   {f'forward({names})':31}"
    print(f"{head}   {differ:2} of {BATCH * NEW} tokens differ   sees {', '.join(seen)}")
    if (differ > 0) != (make is wrong) or seen != ["one token" if make is wrong else "the whole text"]:
        sys.exit(f"changed: what transformers {version} passes to forward({names})")
END
PYTHONPATH=older venv/bin/python -W ignore own.py
venv/bin/python -W ignore own.py
