# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "litgpt==0.5.13", "torchtune==0.6.1", "torchao==0.9.0", "x-transformers==2.31.10",
#     "datasets==4.4.1",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""litgpt 0.5.13, torchtune 0.6.1, x-transformers 2.31.10: one token more than the cache holds.

litgpt and torchtune raise an error. x-transformers with rotary positions continues, but its text differs from the
text without the cache. torchtune and x-transformers rotate neighbours together.
"""

from report import layout, report

import litgpt
import torch
from torchtune.modules import KVCache, RotaryPositionalEmbeddings
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
from x_transformers.x_transformers import RotaryEmbedding, apply_rotary_pos_emb


def first_error(step, tokens=5):
    """Feed single tokens, and say at which of them a step fails."""
    for t in range(tokens):
        try:
            step(t)
        except Exception as error:
            return f"{type(error).__name__} at token {t + 1}"


def with_torchtune():
    cache, token = KVCache(1, 4, 1, 8, torch.float32), torch.zeros(1, 1, 1, 8)
    return first_error(lambda t: cache.update(token, token))


def with_litgpt():
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "padded_vocab_size": 50}
    model = litgpt.GPT(litgpt.Config(block_size=16, **sizes)).eval()
    model.set_kv_cache(1, max_seq_length=4)
    return first_error(lambda t: model(torch.tensor([[t]]), input_pos=torch.tensor([t])))


def with_x_transformers(rotary):
    """Compare greedy text past max_seq_len, with and without the cache."""
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=rotary)
    model = TransformerWrapper(num_tokens=50, max_seq_len=8, use_abs_pos_emb=not rotary, attn_layers=layers)
    for parameter in model.parameters():  # larger weights, so that positions show
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    model, prompt = AutoregressiveWrapper(model.eval()), torch.tensor([[1, 2, 3]])
    try:
        a, b = (model.generate(prompt, 16, temperature=0.0, cache_kv=cache)[0].tolist() for cache in (False, True))
    except AssertionError as error:
        return type(error).__name__
    return "the same text" if a == b else "differs without the cache"


x = torch.tensor([1.0, 2, 3, 4]).repeat(1, 1, 2, 1)
frequencies, scale = RotaryEmbedding(4).forward_from_seq_len(2)
report(
    {
        "torchtune KVCache of 4": (with_torchtune(), "AssertionError at token 5"),
        "litgpt set_kv_cache(max_seq_length=4)": (with_litgpt(), "IndexError at token 5"),
        "x-transformers, max_seq_len 8, learned positions": (with_x_transformers(rotary=False), "AssertionError"),
        "x-transformers, max_seq_len 8, rotary": (with_x_transformers(rotary=True), "differs without the cache"),
        "torchtune RoPE": (layout(RotaryPositionalEmbeddings(4, max_seq_len=2)(x.transpose(1, 2))[0, 1, 0]), "pairs"),
        "x-transformers RoPE": (layout(apply_rotary_pos_emb(x, frequencies, scale)[0, 0, 1]), "pairs"),
    }
)
