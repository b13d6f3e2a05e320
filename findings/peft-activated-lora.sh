#!/bin/sh
# peft 0.21.2 with transformers 5.24.0: the tokens on which an activated LoRA is active depend on how the text is split
# into calls.
#
# An activated LoRA (aLoRA) is active from certain invocation tokens on, so that the text before them can come from a
# cache of the base model. peft stores the place as a distance from the end of the call. generate() measures it once, in
# the prompt, and shortens it to the length of the call, which is correct for the prompt in one call and then single
# tokens. Without a cache, the adapter is on the last few tokens of the growing text only, and with a prefill in chunks
# also at the end of each chunk. A decode loop of your own finds no invocation in its single tokens, so the adapter is
# off. There is no error.
#
# It matters because these are the usual ways to check a cache: use_cache=False, chunks, and a loop by hand. The adapter
# was made for caches, and here only the cached text is right. In a loop, give each row of a decode step an offset of 1,
# as below. With generate(), leave the cache on and prefill_chunk_size alone.
#
# Seen (Linux x86-64, Python 3.11), a GPT-2 with random weights, 16 greedy tokens after each of 4 prompts of 14 tokens,
# with the invocation at position 9; on the right, where the adapter is active (#) when the last token is computed:
#   the whole text for each token      0 of 64 tokens differ   ---------####################
#   generate()                         0 of 64 tokens differ   ---------####################
#   generate(use_cache=False)         45 of 64 tokens differ   ------------------------#####
#   generate(prefill_chunk_size=7)    43 of 64 tokens differ   --#####--####################
#   own loop with a cache             56 of 64 tokens differ   ---------#####---------------
#   the same, alora_offsets=4 * [1]    0 of 64 tokens differ   ---------####################
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 transformers==5.24.0 peft==0.21.2
venv/bin/python -W ignore - <<'END'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, PROMPT, NEW, START, INVOCATION = 4, 14, 16, 9, [7, 8]
torch.manual_seed(0)
sizes = dict(vocab_size=40, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
base = GPT2LMHeadModel(GPT2Config(pad_token_id=None, bos_token_id=None, eos_token_id=None, **sizes))
adapter = dict(r=4, target_modules=["c_attn"], fan_in_fan_out=True, alora_invocation_tokens=INVOCATION)
model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **adapter)).eval()
for name, p in model.named_parameters():
    if "lora" in name:
        p.data.normal_(std=0.3)
ids = torch.randint(9, 40, (BATCH, PROMPT))
ids[:, START : START + len(INVOCATION)] = torch.tensor(INVOCATION)
calls = []  # for each call, a mark for each token: # with the adapter, - without


def watch(layer, inputs, output):
    changed = (output - layer.base_layer(*inputs)).abs().amax((0, 2)) > 1e-4
    calls.append("".join("#" if active else "-" for active in changed))


def whole_text():
    text = ids
    for _ in range(NEW):
        text = torch.cat([text, model(input_ids=text).logits[:, -1:].argmax(-1)], dim=1)
    return text


def own_loop(**options):
    text, out = ids, model(input_ids=ids, use_cache=True)
    for _ in range(NEW - 1):
        text = torch.cat([text, out.logits[:, -1:].argmax(-1)], dim=1)
        out = model(input_ids=text[:, -1:], cache=out.cache, use_cache=True, **options)
    return torch.cat([text, out.logits[:, -1:].argmax(-1)], dim=1)


def generate(**options):
    return model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, **options)


ways = {
    "the whole text for each token": whole_text,
    "generate()": generate,
    "generate(use_cache=False)": lambda: generate(use_cache=False),
    "generate(prefill_chunk_size=7)": lambda: generate(prefill_chunk_size=7),
    "own loop with a cache": own_loop,
    "the same, alora_offsets=4 * [1]": lambda: own_loop(alora_offsets=BATCH * [1]),
}
base.transformer.h[0].attn.c_attn.register_forward_hook(watch)
seen = {}
with torch.no_grad():
    correct = whole_text()
    for name, way in ways.items():
        calls.clear()
        differ = (way() != correct).sum().item()
        last = calls[-1] if len(calls[-1]) > 1 else "".join(calls)
        seen[name] = (differ > 0, last)
        print(f"{name:33} {differ:2} of {BATCH * NEW} tokens differ   {last}")
prompt, late = START * "-", PROMPT - START
active = prompt + (late + NEW - 1) * "#"
expected = [
    (False, active),
    (False, active),
    (True, (PROMPT + NEW - 1 - late) * "-" + late * "#"),
    (True, "--#####--#####" + (NEW - 1) * "#"),
    (True, prompt + late * "#" + (NEW - 1) * "-"),
    (False, active),
]
if list(seen.values()) != expected:
    sys.exit("changed: which tokens have the adapter, or which texts differ")
END
