#!/bin/sh
# Rows of docs/elsewhere.md: one token too many in the caches of litgpt 0.5.13, torchtune 0.6.1 and x-transformers
# 2.31.10, and which numbers of a head the RoPE of the last two rotates together.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 litgpt==0.5.13 torchtune==0.6.1 torchao==0.9.0 x-transformers==2.31.10
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

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
    return "same text" if a == b else "another text without the cache"


def rotated(y):
    """Name the layout that turns 1 2 3 4 at position 1 into y."""
    x, angle = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 0.01])  # theta 10000
    for name, a, b in (("halves", [0, 1], [2, 3]), ("pairs", [0, 2], [1, 3])):
        expected = torch.empty(4)
        expected[a] = x[a] * angle.cos() - x[b] * angle.sin()
        expected[b] = x[b] * angle.cos() + x[a] * angle.sin()
        if torch.allclose(y, expected, atol=1e-4):
            return name


x = torch.tensor([1.0, 2, 3, 4]).repeat(1, 1, 2, 1)
frequencies, scale = RotaryEmbedding(4).forward_from_seq_len(2)
seen = {
    "torchtune KVCache of 4": with_torchtune(),
    "litgpt set_kv_cache(max_seq_length=4)": with_litgpt(),
    "x-transformers, max_seq_len 8, learned positions": with_x_transformers(rotary=False),
    "x-transformers, max_seq_len 8, rotary": with_x_transformers(rotary=True),
    "torchtune RoPE": rotated(RotaryPositionalEmbeddings(4, max_seq_len=2)(x.transpose(1, 2))[0, 1, 0]),
    "x-transformers RoPE": rotated(apply_rotary_pos_emb(x, frequencies, scale)[0, 0, 1]),
}
expected = dict(
    zip(
        seen,
        ["AssertionError at token 5", "IndexError at token 5", "AssertionError"]
        + ["another text without the cache", "pairs", "pairs"],
    )
)
print("\n".join(f"{name:70} {result}" for name, result in seen.items()))
if changed := [name for name, result in seen.items() if result != expected[name]]:
    sys.exit(f"changed: {changed}")
END
