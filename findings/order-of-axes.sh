#!/bin/sh
# torch 2.13.0, jax 0.10.2, flax 0.12.8, keras 3.15.1, mlx 0.32.4: a prefill with heads and tokens swapped is accepted.
#
# torch, transformers and mlx order queries, keys and values as (batch, heads, tokens, size); jax, flax and Keras as
# (batch, tokens, heads, size). A prefill has as many queries as keys, so the swapped arrays fit, and the heads of each
# token attend to each other. Only a step with one query shows it, by an error, or in torch by one row per key.
# mlx.fast.rope never does: it rotates heads instead of tokens.
#
# It matters because a moved cache is usually compared in a prefill, where only the numbers differ. Compare the logits.
#
# Seen (Linux x86-64, Python 3.11, float32 on the CPU), with 4 heads and 6 tokens:
#                                             prefill      one query, 6 keys
#   torch sdpa, (B, T, heads, size)           off by 3.1   shape (1, 6, 4, 8)
#   mlx fast sdpa, (B, T, heads, size)        off by 3.1   ValueError
#   mlx fast rope, (B, T, heads, size)        off by 2.7   off by 2.4
#   jax.nn, (B, heads, T, size)               off by 3.1   ValueError
#   flax.linen, (B, heads, T, size)           off by 3.1   AssertionError
#   keras.ops, (B, heads, T, size)            off by 3.1   TypeError
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 jax==0.10.2 flax==0.12.8 keras==3.15.1 "mlx[cpu]==0.32.4"
KERAS_BACKEND=jax venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import flax.linen
import jax
import jax.numpy as jnp
import keras
import mlx.core as mx
import numpy as np
import torch

rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 4, 6, 8)).astype(np.float32) for _ in range(3))  # batch, heads, tokens, head size
sdpa = torch.nn.functional.scaled_dot_product_attention


def swapped(*arrays):
    return [np.ascontiguousarray(a.swapaxes(1, 2)) for a in arrays]


def with_torch(*qkv):
    return sdpa(*map(torch.tensor, qkv), is_causal=qkv[0].shape == qkv[1].shape).numpy()


def with_mlx(*qkv):
    mask = "causal" if qkv[0].shape == qkv[1].shape else None
    return mx.fast.scaled_dot_product_attention(*map(mx.array, qkv), scale=8**-0.5, mask=mask)


def rope(q, k, v):
    return mx.fast.rope(mx.array(q), 8, traditional=False, base=10000.0, scale=1.0, offset=10)


def with_jax(q, k, v):
    return jax.nn.dot_product_attention(*map(jnp.asarray, (q, k, v)), is_causal=q.shape == k.shape)


def with_flax(q, k, v):
    mask = np.tril(np.ones((q.shape[1], k.shape[1]), dtype=bool))[None, None] if q.shape == k.shape else None
    return flax.linen.dot_product_attention(*map(jnp.asarray, (q, k, v)), mask=mask)


def with_keras(q, k, v):
    return keras.ops.dot_product_attention(*map(jnp.asarray, (q, k, v)), is_causal=q.shape == k.shape)


calls = {  # the call, and whether it wants heads before tokens
    "torch sdpa, (B, T, heads, size)": (with_torch, True),
    "mlx fast sdpa, (B, T, heads, size)": (with_mlx, True),
    "mlx fast rope, (B, T, heads, size)": (rope, True),
    "jax.nn, (B, heads, T, size)": (with_jax, False),
    "flax.linen, (B, heads, T, size)": (with_flax, False),
    "keras.ops, (B, heads, T, size)": (with_keras, False),
}


def result(call, heads_first, query):
    qkv = query, k, v
    good, bad = (qkv, swapped(*qkv)) if heads_first else (swapped(*qkv), qkv)
    correct = np.array(call(*good))
    try:
        y = np.array(call(*bad))
    except Exception as error:
        return type(error).__name__
    if y.shape != bad[0].shape:
        return f"shape {y.shape}"
    off = np.abs(y.swapaxes(1, 2) - correct).max()
    return "correct" if off < 1e-4 else f"off by {off:.1f}"


seen = {name: [result(*call, q), result(*call, q[:, :, -1:])] for name, call in calls.items()}
expected = {
    "torch sdpa, (B, T, heads, size)": ["off", "shape (1, 6, 4, 8)"],
    "mlx fast sdpa, (B, T, heads, size)": ["off", "ValueError"],
    "mlx fast rope, (B, T, heads, size)": ["off", "off"],
    "jax.nn, (B, heads, T, size)": ["off", "ValueError"],
    "flax.linen, (B, heads, T, size)": ["off", "AssertionError"],
    "keras.ops, (B, heads, T, size)": ["off", "TypeError"],
}
for name, columns in {"": ["prefill", "one query, 6 keys"], **seen}.items():
    print("{:41} {:12} {}".format(name, *columns))
if changed := [name for name in calls if [x.partition(" by")[0] for x in seen[name]] != expected[name]]:
    sys.exit(f"changed: {changed}")
END
