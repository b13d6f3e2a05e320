# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "jax==0.10.2", "flax==0.12.8", "keras==3.15.1", "mlx[cpu]==0.32.4", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0, jax 0.10.2, flax 0.12.8, keras 3.15.1, mlx 0.32.4: a prefill with heads and tokens swapped is accepted.

torch, transformers and mlx want (batch, heads, tokens, size), and jax, flax and Keras (batch, tokens, heads, size). A
prefill has as many queries as keys, so swapped arrays fit, and the heads of each token attend to each other. Only a
single query shows it, by an error, or in torch by one row per key. mx.fast.rope never does: it rotates heads.
"""

from report import report

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


def result(call, heads_first, query):
    """Return how far the result of swapped arrays is off, or what else happens."""
    qkv = query, k, v
    good, bad = (qkv, swapped(*qkv)) if heads_first else (swapped(*qkv), qkv)
    correct = np.array(call(*good))
    try:
        y = np.array(call(*bad))
    except Exception as error:
        return type(error).__name__
    if y.shape != bad[0].shape:
        return f"shape {y.shape}"
    return float(np.abs(y.swapaxes(1, 2) - correct).max())


print("swapped arrays: how far a prefill is off, and a single query on 6 keys")
report(
    {
        name: ([result(call, heads_first, q), result(call, heads_first, q[:, :, -1:])], expected)
        for name, call, heads_first, expected in (
            ("torch sdpa, (B, T, heads, size)", with_torch, True, [3.1, "shape (1, 6, 4, 8)"]),
            ("mlx fast sdpa, (B, T, heads, size)", with_mlx, True, [3.1, "ValueError"]),
            ("mlx fast rope, (B, T, heads, size)", rope, True, [2.7, 2.4]),
            ("jax.nn, (B, heads, T, size)", with_jax, False, [3.1, "ValueError"]),
            ("flax.linen, (B, heads, T, size)", with_flax, False, [3.1, "AssertionError"]),
            ("keras.ops, (B, heads, T, size)", with_keras, False, [3.1, "TypeError"]),
        )
    }
)
