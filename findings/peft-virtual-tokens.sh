#!/bin/sh
# peft 0.21.2 with transformers 5.24.0: generate() with the cache repeats a learned prompt and ignores a learned prefix.
#
# transformers 5.24 calls the cache `cache` instead of `past_key_values`, and peft looks for the old name. So every step
# looks like the first: with prompt tuning, the virtual tokens are inserted again before each new token, and after 20
# tokens the cache holds 20 prompts. With prefix tuning, which learns keys and values, the new prefix is passed under
# the old name in each step, and loses against the model's own cache: the text is that of the model without the adapter,
# five positions later. A plain forward pass, and with it the training, is correct, and so is transformers 5.23.
#
# It matters because the loss of the adapter is good and its text is bad, or it seems to have learned nothing. There is
# no error. Keep transformers below 5.24 with these two methods.
#
# Seen (Linux x86-64, Python 3.11), 20 greedy tokens after each of 4 prompts, compared with a forward pass over the
# whole text for each token:
#   transformers 5.23.0   GPT-2, prompt tuning    0 of 80 tokens differ    5 virtual tokens
#   transformers 5.23.0   GPT-2, prefix tuning    0 of 80 tokens differ    5 virtual tokens
#   transformers 5.23.0   Llama, prompt tuning    0 of 80 tokens differ    5 virtual tokens
#   transformers 5.23.0   Llama, prefix tuning    0 of 80 tokens differ    5 virtual tokens
#   transformers 5.24.0   GPT-2, prompt tuning   59 of 80 tokens differ  100 virtual tokens
#   transformers 5.24.0   GPT-2, prefix tuning   26 of 80 tokens differ    0 virtual tokens
#   transformers 5.24.0   Llama, prompt tuning   69 of 80 tokens differ  100 virtual tokens
#   transformers 5.24.0   Llama, prefix tuning   67 of 80 tokens differ    0 virtual tokens
# The last column is what explains the logits of the last token: a forward pass without a cache, over the text with that
# many virtual tokens in it.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 transformers==5.24.0 peft==0.21.2
venv/bin/pip install -qq --no-deps --target older transformers==5.23.0
cat > virtual.py <<'END'
import sys

import torch
import transformers
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

BATCH, PROMPT, NEW, VIRTUAL = 4, 12, 20, 5
SIZES = dict(vocab_size=40, pad_token_id=None, bos_token_id=None, eos_token_id=None, initializer_range=0.2)
gpt2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=256, **SIZES)
llama = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, **SIZES)


def repeated_prompt(base, tuned, text):
    """Logits of the last token if the virtual tokens come before the prompt and before each new token."""
    virtual, embedded = tuned.get_prompt(BATCH), base.get_input_embeddings()(text)
    parts = [virtual, embedded[:, :PROMPT]]
    for i in range(PROMPT, text.size(1)):
        parts += [virtual, embedded[:, i : i + 1]]
    return base(inputs_embeds=torch.cat(parts, dim=1)).logits[:, -1]


def no_prefix(base, tuned, text):
    """Logits of the last token without the prefix, at the positions that it would leave."""
    return base(text, position_ids=torch.arange(VIRTUAL, VIRTUAL + text.size(1))[None]).logits[:, -1]


@torch.no_grad()
def run(make, config, tuning, wrong):
    """Return how many greedy tokens differ, and how many virtual tokens the last of them saw."""
    torch.manual_seed(0)
    base = make(config).eval()
    tuned = get_peft_model(base, tuning(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)).eval()
    torch.manual_seed(1)
    for p in tuned.prompt_encoder.parameters():
        p.normal_()
    ids = torch.randint(1, 40, (BATCH, PROMPT))
    expected = ids
    for _ in range(NEW):
        expected = torch.cat([expected, tuned(input_ids=expected).logits[:, -1:].argmax(-1)], dim=1)
    scores = dict(output_logits=True, return_dict_in_generate=True)
    out = tuned.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False, **scores)
    text, last = out.sequences[:, :-1], out.logits[-1]
    explained = {
        VIRTUAL: tuned(input_ids=text).logits[:, -1],
        VIRTUAL * NEW if wrong is repeated_prompt else 0: wrong(base, tuned, text),
    }
    seen = [virtual for virtual, logits in explained.items() if torch.allclose(last, logits, atol=1e-4)]
    return (out.sequences != expected).sum().item(), *seen


correct = transformers.__version__ == "5.23.0"
for name, make, config in (("GPT-2", GPT2LMHeadModel, gpt2), ("Llama", LlamaForCausalLM, llama)):
    for method, tuning, wrong in (
        ("prompt", PromptTuningConfig, repeated_prompt),
        ("prefix", PrefixTuningConfig, no_prefix),
    ):
        differ, *seen = run(make, config, tuning, wrong)
        head = f"transformers {transformers.__version__}   {name}, {method} tuning"
        print(f"{head}   {differ:2} of {BATCH * NEW} tokens differ  {', '.join(f'{n:3}' for n in seen)} virtual tokens")
        if (differ == 0) != correct or seen != [VIRTUAL if correct else VIRTUAL * NEW if method == "prompt" else 0]:
            sys.exit(f"changed: what generate() makes of {method} tuning with transformers {transformers.__version__}")
END
PYTHONPATH=older venv/bin/python -W ignore virtual.py
venv/bin/python -W ignore virtual.py
