# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.24.0"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""transformers 5.24.0: which caches are exact after crop, and what happens to one token too many.

A DynamicCache is, also with a sliding window if it records its past. A StaticCache with a window and Jamba with an
attention and a Mamba layer accept crop, but the next logits are not those of a fresh prefill.
"""

from report import report

import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
sizes |= {"initializer_range": 0.3, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
torch.manual_seed(0)
gpt2 = GPT2LMHeadModel(
    GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
).eval()
mistral = MistralForCausalLM(MistralConfig(**sizes, sliding_window=16)).eval()
jamba = JambaForCausalLM(
    JambaConfig(**sizes, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1, num_experts=2)
).eval()
ids = torch.randint(1, 50, (1, 41))


def dynamic(model):
    return DynamicCache(config=model.config)


def recording(model):
    cache = dynamic(model)
    cache.activate_past_recording()
    return cache


def static(model):
    return StaticCache(config=model.config, max_cache_len=64)


@torch.no_grad()
def after_crop(model, make, crop=-10):
    """Prefill 40 tokens, crop, feed one more token, and compare with a fresh prefill of what is left."""
    try:
        cache, fresh = make(model), make(model)
        model(ids[:, :40], past_key_values=cache)
        cache.crop(crop)
        left = 40 + crop
        model(ids[:, :left], past_key_values=fresh)
        a, b = (model(ids[:, 40:], past_key_values=c).logits[:, -1] for c in (cache, fresh))
        return "exact" if (a - b).abs().max() < 1e-4 else "wrong"
    except (RuntimeError, ValueError, AttributeError) as error:
        return type(error).__name__


@torch.no_grad()
def live_length():
    cache = static(gpt2)
    gpt2(ids[:, :20], past_key_values=cache)
    saved = cache.get_seq_length()
    gpt2(ids[:, 20:30], past_key_values=cache)
    return int(saved)


@torch.no_grad()
def one_too_many():
    cache = StaticCache(config=gpt2.config, max_cache_len=4)
    try:
        for t in range(5):
            gpt2(ids[:, t : t + 1], past_key_values=cache)
    except Exception as error:
        return f"{type(error).__name__} at token {t + 1}"


report(
    {
        "DynamicCache, crop(30)": (after_crop(gpt2, dynamic, 30), "ValueError"),
        "DynamicCache, crop(-10)": (after_crop(gpt2, dynamic), "exact"),
        "DynamicCache, full window of 16, crop(-10)": (after_crop(mistral, dynamic), "RuntimeError"),
        "the same with activate_past_recording()": (after_crop(mistral, recording), "exact"),
        "StaticCache, crop(-10)": (after_crop(gpt2, static), "exact"),
        "StaticCache: a length saved at 20, read at 30": (live_length(), 30),
        "StaticCache, full window of 16, crop(-10)": (after_crop(mistral, static), "wrong"),
        "Jamba, crop(-2)": (after_crop(jamba, dynamic, -2), "RuntimeError"),
        "Jamba with activate_past_recording(), crop(-2)": (after_crop(jamba, recording, -2), "wrong"),
        "StaticCache(4)": (one_too_many(), "IndexError at token 5"),
    }
)
