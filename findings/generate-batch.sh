#!/bin/sh
# transformers 5.24.0: generate_batch is not generate for Gemma 2, for a GPT without a cache, and for some options.
#
# generate_batch serves many prompts from a paged cache. Gemma 2 caps its attention scores with a tanh, and on a CPU
# it runs in eager mode only. The paged eager attention leaves the cap out, so the text is that of a model with no
# cap. The first GPT (OpenAIGPTLMHeadModel) has no KV cache, and generate reads its whole text again for every token.
# But generate_batch feeds the newest token alone, and the model forgets everything before it. It also ignores
# num_beams and min_new_tokens. None of these gives a warning, as repetition_penalty does, which it drops.
#
# It matters because generate_batch is offered as a faster generate. Most families do give the same greedy tokens
# (Llama, GPT-2, Mistral, Qwen3, gpt-oss and 20 more that we tried), and others raise an error (OPT, Bloom, GPT-NeoX,
# Mamba). Compare the two before you switch, above all if you write your own model without a cache.
#
# Seen (Linux x86-64, Python 3.11), greedy tokens that differ, of 90; the options are those of GPT-2:
#   Gemma 2, from generate                            33
#   Gemma 2, from generate without the cap             0
#   the first GPT, from generate                      32
#   the first GPT, from a model fed one token only     0
#   GPT-2, from generate                               0
#   num_beams, from generate                          22
#   num_beams, from greedy text                        0
#   min_new_tokens, from generate                     57
#   min_new_tokens, from generate without it           0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 transformers==5.24.0 psutil==7.2.2 numpy==2.4.6
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import sys
from itertools import zip_longest

import torch
import transformers
from transformers import ContinuousBatchingConfig, Gemma2Config, GenerationConfig, GPT2Config, OpenAIGPTConfig

transformers.logging.set_verbosity_error()
NEW = 30
PAGES = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64)
PROMPTS = [torch.randint(1, 65, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 17, 30)]
SIZES = dict(vocab_size=65, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
GPT = dict(n_embd=64, n_layer=2, n_head=4, n_positions=128)


def model(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def gemma(cap):
    layers = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, initializer_range=1.0)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8)
    return model(Gemma2Config(attn_logit_softcapping=cap, **layers, **heads, **SIZES))


def greedy(**options):
    length = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return GenerationConfig(**(length | dict(eos_token_id=-1) | options))


def batched(model, **options):
    """One prompt at a time, so that prompts cannot see each other."""
    outputs = [model.generate_batch([prompt], greedy(**options), PAGES) for prompt in PROMPTS]
    return [next(iter(output.values())).generated_tokens for output in outputs]


def generated(model, **options):
    texts = [model.generate(torch.tensor([prompt]), generation_config=greedy(**options)) for prompt in PROMPTS]
    return [text[0, len(prompt) :].tolist() for text, prompt in zip(texts, PROMPTS, strict=True)]


@torch.no_grad()
def newest_token_only(model):
    for prompt in PROMPTS:
        tokens = [model(torch.tensor([prompt])).logits[0, -1].argmax().item()]
        while len(tokens) < NEW:
            position = torch.tensor([[len(prompt) + len(tokens) - 1]])
            tokens.append(model(torch.tensor([tokens[-1:]]), position_ids=position).logits[0, -1].argmax().item())
        yield tokens


gemma2, uncapped = gemma(50.0), gemma(None)
first_gpt, gpt2 = model(OpenAIGPTConfig(**GPT, **SIZES)), model(GPT2Config(**GPT, initializer_range=0.5, **SIZES))
stop = generated(gpt2)[0][10]
beams, least = dict(num_beams=3), dict(min_new_tokens=NEW, eos_token_id=stop)
pairs = {
    "Gemma 2, from generate": (batched(gemma2), generated(gemma2)),
    "Gemma 2, from generate without the cap": (batched(gemma2), generated(uncapped)),
    "the first GPT, from generate": (batched(first_gpt), generated(first_gpt)),
    "the first GPT, from a model fed one token only": (batched(first_gpt), newest_token_only(first_gpt)),
    "GPT-2, from generate": (batched(gpt2), generated(gpt2)),
    "num_beams, from generate": (batched(gpt2, **beams), generated(gpt2, **beams)),
    "num_beams, from greedy text": (batched(gpt2, **beams), generated(gpt2)),
    "min_new_tokens, from generate": (batched(gpt2, **least), generated(gpt2, **least)),
    "min_new_tokens, from generate without it": (batched(gpt2, **least), generated(gpt2, eos_token_id=stop)),
}
seen = {}
for name, (served, expected) in pairs.items():
    seen[name] = sum(a != b for x, y in zip(served, expected, strict=True) for a, b in zip_longest(x, y))
    print(f"{name:47} {seen[name]:4}")
if [count > 0 for count in seen.values()] != 2 * [True, False] + [False] + 2 * [True, False]:
    sys.exit("changed: which texts of generate_batch are those of generate")
END
