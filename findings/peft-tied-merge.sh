#!/bin/sh
# peft 0.21.2: with ensure_weight_tying=True, merging a LoRA adapter of tied embeddings adds it twice.
#
# The option is for models whose lm_head is their embedding, and ties the adapters of both. But merge_and_unload then
# adds the adapter to the shared weight once for each, so the merged model is not the one that was trained. The tied
# adapters are also two parameters on the same memory: AdamW has a state for each, and its first step moves a number by
# twice the learning rate, or not at all. With GPT-2, where the embedding is called wte, the option only warns that it
# found nothing to tie, and merging changes lm_head, too, which had no adapter.
#
# It matters because a small GPT usually has tied weights, and adapters are merged for export. peft warns, with the
# option or without, that tied layers "can lead to complications", but not with GPT-2. Give lm_head a copy of the weight
# before you merge: then the merged model is exact, and peft sets tie_word_embeddings=False in its config.
#
# Seen (Linux x86-64, Python 3.11), after 20 steps:
#                                             merged - base, in adapters   logits differ by
#   Llama, q_proj                                                   1.00              2e-07
#   Llama, embed_tokens                                             2.00              7e+00
#   GPT-2, wte                                                      1.00              1e+01
#   Llama, embed_tokens, lm_head has a copy                         1.00              3e-06
#   GPT-2, wte, lm_head has a copy                                  1.00              0e+00
#   the first step of AdamW, in learning rates: 0 1 2
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 transformers==5.24.0 peft==0.21.2
TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'END'
import copy
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

LR = 0.01
COMMON = {"vocab_size": 65, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
LLAMA = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, **COMMON)
GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **COMMON)


def adapt(config, layer):
    """Add LoRA with alpha / r = 1 to a new model, and return both, and the adapted layer."""
    torch.manual_seed(0)
    model = (LlamaForCausalLM if config is LLAMA else GPT2LMHeadModel)(copy.deepcopy(config))
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=[layer], ensure_weight_tying=layer != "q_proj")
    adapted = get_peft_model(model, lora)
    return adapted, next(module for name, module in adapted.named_modules() if name.endswith("." + layer))


def train(adapted, steps):
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=LR, weight_decay=0)
    for _ in range(steps):
        optimizer.zero_grad()
        adapted(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def adapter(layer):
    if hasattr(layer, "lora_embedding_A") and "default" in layer.lora_embedding_A:
        return (layer.lora_embedding_B["default"] @ layer.lora_embedding_A["default"]).T
    return layer.lora_B["default"].weight @ layer.lora_A["default"].weight


@torch.no_grad()
def merge(config, name, copy_head=False):
    """Return how many times peft adds the adapter to the weight, and how far the merged logits are off."""
    adapted, layer = adapt(config, name)
    base = layer.base_layer.weight.clone()
    with torch.enable_grad():
        train(adapted, steps=20)
    delta, trained = adapter(layer).clone(), adapted(input_ids=tokens).logits
    if copy_head:
        head = adapted.get_output_embeddings()
        head = getattr(head, "base_layer", head)
        head.weight = torch.nn.Parameter(head.weight.clone())
    merged = adapted.merge_and_unload()
    weight = next(module for path, module in merged.named_modules() if path.endswith("." + name)).weight
    times = ((weight - base) * delta).sum() / (delta * delta).sum()
    return times.item(), (merged(tokens).logits - trained).abs().max().item()


torch.manual_seed(1)
tokens = torch.randint(0, 65, (2, 32))
seen = {
    "Llama, q_proj": merge(LLAMA, "q_proj"),
    "Llama, embed_tokens": merge(LLAMA, "embed_tokens"),
    "GPT-2, wte": merge(GPT2, "wte"),
    "Llama, embed_tokens, lm_head has a copy": merge(LLAMA, "embed_tokens", copy_head=True),
    "GPT-2, wte, lm_head has a copy": merge(GPT2, "wte", copy_head=True),
}
print(f"{'':42}merged - base, in adapters   logits differ by")
for name, (times, error) in seen.items():
    print(f"{name:42}{times:26.2f}{error:19.0e}")

adapted, layer = adapt(LLAMA, "embed_tokens")
before = layer.lora_embedding_A["default"].detach().clone()
train(adapted, steps=1)
moved = ((layer.lora_embedding_A["default"] - before).abs() / LR).round().int().unique().tolist()
print("the first step of AdamW, in learning rates:", *moved)
if [round(times, 2) for times, _ in seen.values()] != [1, 2, 1, 1, 1]:
    sys.exit("changed: how many times merging adds the adapter to a tied weight")
if [error < 1e-4 for _, error in seen.values()] != [True, False, False, True, True]:
    sys.exit("changed: which merged models are exact")
if moved != [0, 1, 2]:
    sys.exit("changed: the first step of tied adapters")
END
