#!/bin/sh
# transformers 5.24.0: in speculation, guidance and the SynthID watermark change greedy text.
#
# With guidance_scale, the logits are compared with those of a second prompt, for which the logits processor keeps its
# own KV cache. Each call adds a token to it. In speculation, every draft token is such a call, the draft model and
# the model share the processor, and rejected tokens are never taken back. So the second text fills up with tokens
# that nobody wrote, until it is longer than the position table (IndexError). The SynthID processor keeps its context
# in the same way. Processors that look only at input_ids, such as penalties, n-grams, biases or top_k, are correct.
#
# It matters because speculation promises the same text. Here greedy text differs even if the draft model is the model
# itself, with no error and no warning. If you write a logits processor, compute everything from input_ids.
#
# Seen (Linux x86-64, Python 3.11), greedy tokens of 40 that differ from those computed by hand without a cache (for
# SynthID, from those without speculation):
#                                  none  prompt lookup    draft model         itself
#   no processor                      0              0              0              0
#   repetition_penalty                0              0              0              0
#   guidance_scale                    0             36             33             28
#   SynthID watermark                 0             36             32             30
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 transformers==5.24.0 numpy==2.4.6
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import sys

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, SynthIDTextWatermarkingConfig

transformers.logging.set_verbosity_error()
NEW, SCALE, PENALTY = 40, 1.5, 1.3
PROMPT = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3]])
WATERMARK = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)


def gpt2():
    torch.manual_seed(0)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=512, vocab_size=65, initializer_range=0.3)
    return GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)).eval()


model, draft = gpt2(), gpt2()
with torch.no_grad():
    for parameter in draft.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)


def written(**options):
    mask = torch.ones_like(PROMPT)
    return model.generate(PROMPT, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)


@torch.no_grad()
def by_hand(choose):
    ids = PROMPT
    for _ in range(NEW):
        ids = torch.cat((ids, choose(ids).argmax().view(1, 1)), dim=1)
    return ids


def log_probs(ids):
    return model(ids).logits[0, -1].log_softmax(-1)


def penalized(ids):
    logits = model(ids).logits[0, -1]
    lower = torch.where(logits > 0, logits / PENALTY, logits * PENALTY)
    return torch.where(torch.isin(torch.arange(65), ids), lower, logits)


def guided(ids):
    """By default the second prompt is the last token of the first one."""
    second = log_probs(ids[:, PROMPT.size(1) - 1 :])
    return second + SCALE * (log_probs(ids) - second)


cases = {
    "no processor": ({}, by_hand(log_probs)),
    "repetition_penalty": (dict(repetition_penalty=PENALTY), by_hand(penalized)),
    "guidance_scale": (dict(guidance_scale=SCALE), by_hand(guided)),
    "SynthID watermark": (dict(watermarking_config=WATERMARK), written(watermarking_config=WATERMARK)),
}
drafts = {
    "none": {},
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "draft model": dict(assistant_model=draft),
    "itself": dict(assistant_model=gpt2()),
}
print(f"{'':20}" + "".join(f"{name:>15}" for name in drafts))
seen = {}
for name, (options, expected) in cases.items():
    seen[name] = [(written(**drafting, **options) != expected).sum().item() for drafting in drafts.values()]
    print(f"{name:20}" + "".join(f"{count:15}" for count in seen[name]))
unchanged, changed = 4 * [False], [False, True, True, True]
if [[count > 0 for count in row] for row in seen.values()] != [unchanged, unchanged, changed, changed]:
    sys.exit("changed: which processors change greedy text in speculation")
END
