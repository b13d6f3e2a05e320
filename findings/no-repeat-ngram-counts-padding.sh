#!/bin/sh
# transformers 5.24.0: no_repeat_ngram_size counts the padding of a batch.
#
# Left padding is masked in attention, so a prompt gives the same text alone and in a batch. But the n-gram filter looks
# at the ids, pads included: with six pads, the pad token may not follow itself again. If the pad token is a token that
# the model writes (for GPT-2 people take the end of text, for characters the newline), the text changes.
#
# It matters when you check a batched cache against a run alone: the difference is not the cache's. The row that needs
# no padding keeps its text.
#
# Seen (Linux x86-64, Python 3.11), a prompt alone and behind six pads, a model that prefers the pad token:
#   no filter:              the same 8 of 8 tokens
#   no_repeat_ngram_size 2: the same 1 of 8 tokens
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import sys

import torch
import transformers

transformers.logging.set_verbosity_error()
PAD, NEW = 0, 8
torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=20, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=PAD, eos_token_id=None
)
model = transformers.GPT2LMHeadModel(config).eval()
with torch.no_grad():  # a model that prefers token 0 for a while
    embedding = model.transformer.wte.weight[PAD]
    model.transformer.ln_f.bias.copy_(0.5 * embedding / embedding.norm())
short, long = torch.tensor([[5, 3, PAD]]), torch.tensor([[4, 8, 15, 16, 11, 7, 9, 2, 5]])
padded = torch.cat((torch.full((1, 6), PAD), short), dim=1)
batch, mask = torch.cat((padded, long)), torch.ones(2, 9, dtype=torch.long)
mask[0, :6] = 0


def generate(ids, mask, **settings):
    ids = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=PAD, **settings)
    return ids[0, -NEW:].tolist()


same = []
for name, settings in {"no filter": {}, "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2}}.items():
    alone, batched = generate(short, torch.ones_like(short), **settings), generate(batch, mask, **settings)
    same.append(sum(a == b for a, b in zip(alone, batched)))
    print(f"{name + ':':23} the same {same[-1]} of {NEW} tokens: {alone} alone, {batched} in the batch")
if not (same[0] == NEW and same[1] < NEW):
    sys.exit("changed: no_repeat_ngram_size leaves out the padding")
END
