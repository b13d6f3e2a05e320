# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "jax==0.10.2", "flax==0.12.8", "keras==3.15.1", "mlx[cpu]==0.32.4", "onnx==1.23.2",
#     "onnxruntime==1.32.0", "tinygrad==0.14.0", "numpy==2.4.6",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0, jax 0.10.2, flax 0.12.8, keras 3.15.1, mlx 0.32.4, onnxruntime 1.32.0, tinygrad 0.14.0: masks.

All agree on a boolean mask. The 1 and 0 of transformers' attention_mask are added to the scores in mlx, onnxruntime
and tinygrad, and in torch once they are floats. flax and Keras read numbers as booleans, so that 0 and -inf mean the
opposite. A query that may see no key gets zeros, NaN or the mean of all values, those behind the mask included. In
torch that depends on need_weights, in mlx on the form of the mask. A NaN spreads to later steps through its cached
value.
"""

from report import in_onnxruntime, onnx_model, report

import flax.linen
import jax
import jax.numpy as jnp
import keras
import mlx.core as mx
import numpy as np
import tinygrad
import torch

rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 2, 6, 8)).astype(np.float32) for _ in range(3))  # batch, heads, tokens, head size
jqkv = [jnp.asarray(a.swapaxes(1, 2)) for a in (q, k, v)]  # batch, tokens, heads, head size
causal = np.tril(np.ones((6, 6), dtype=bool))
nothing = causal & (np.arange(6) > 0)[:, None]  # the first query sees no key


def as_float(mask, low=-np.inf):
    return np.where(mask, 0, low).astype(np.float32)


def attention(bias):
    """The definition, with a bias that is added to the scores."""
    scores = q @ k.swapaxes(2, 3) / 8**0.5 + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


with np.errstate(invalid="ignore"):
    meanings = {
        "correct": attention(as_float(causal)),
        "added": attention(causal),
        "inverted": attention(as_float(~causal)),  # the last query sees nothing
    }


def with_torch(mask):
    return torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), attn_mask=torch.tensor(mask))


def layer_of_torch(need_weights):
    layer = torch.nn.MultiheadAttention(8, 1, bias=False, batch_first=True).eval()
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(8))

    def run(mask):
        with torch.no_grad():
            inputs = (torch.tensor(a[0]) for a in (q, k, v))
            return layer(*inputs, attn_mask=~torch.tensor(mask), need_weights=need_weights)[0]

    return run


def with_jax(call):
    return lambda mask: call(*jqkv, mask=jnp.asarray(mask)[None, None]).swapaxes(1, 2)


def with_mlx(mask):
    return mx.fast.scaled_dot_product_attention(*map(mx.array, (q, k, v)), scale=8**-0.5, mask=mx.array(mask))


def with_onnxruntime(mask):
    inputs = {"q": q, "k": k, "v": v, "mask": mask}
    return in_onnxruntime(onnx_model("Attention", inputs, opset=23), inputs)


def with_tinygrad(mask):
    query, key, value, mask = (tinygrad.Tensor(a, device="PYTHON") for a in (q, k, v, mask))
    return query.scaled_dot_product_attention(key, value, attn_mask=mask).numpy()


def meaning(call, mask):
    try:
        y = np.array(call(mask))
    except Exception as error:
        return type(error).__name__
    same = (name for name, other in meanings.items() if np.allclose(y[:, :, :5], other[:, :, :5], atol=1e-4))
    return next(same, "something else")


def of_no_key(call, mask=nothing):
    """Name what the first query gets, which sees no key."""
    row = np.array(call(mask))[0, ..., 0, :]
    if np.isnan(row).all():
        return "NaN"
    if not row.any():
        return "zeros"
    return "mean of all values" if np.allclose(row, v[0].mean(axis=1), atol=1e-5) else "something else"


jax_sdpa, flax_sdpa, keras_sdpa = (
    with_jax(call)
    for call in (
        jax.nn.dot_product_attention,
        flax.linen.dot_product_attention,
        keras.ops.dot_product_attention,
    )
)
masks = [causal, causal.astype(np.int64), causal.astype(np.float32), as_float(causal)]
added = ["correct", "added", "added", "correct"]
inverted = ["correct", "correct", "correct", "inverted"]
rows = {
    name: ([meaning(call, mask) for mask in masks], expected)
    for name, call, expected in (
        ("torch sdpa", with_torch, ["correct", "RuntimeError", "added", "correct"]),
        ("jax.nn.dot_product_attention", jax_sdpa, ["correct", "ValueError", "ValueError", "ValueError"]),
        ("flax.linen.dot_product_attention", flax_sdpa, inverted),
        ("keras.ops.dot_product_attention", keras_sdpa, inverted),
        ("mlx fast sdpa", with_mlx, added),
        ("onnxruntime Attention, opset 23", with_onnxruntime, added),
        ("tinygrad", with_tinygrad, added),
    )
}
mean, low = "mean of all values", np.finfo(np.float32).min
rows |= {
    "no key: torch sdpa, boolean mask": (of_no_key(with_torch), "zeros"),
    "no key: torch sdpa, -inf": (of_no_key(with_torch, as_float(nothing)), "zeros"),
    "no key: torch sdpa, torch.finfo.min": (of_no_key(with_torch, as_float(nothing, low)), mean),
    "no key: torch nn.MultiheadAttention, weights": (of_no_key(layer_of_torch(True)), "NaN"),
    "no key: torch nn.MultiheadAttention, no weights": (of_no_key(layer_of_torch(False)), "zeros"),
    "no key: jax.nn.dot_product_attention": (of_no_key(jax_sdpa), mean),
    "no key: flax.linen.dot_product_attention": (of_no_key(flax_sdpa), mean),
    "no key: keras.ops.dot_product_attention": (of_no_key(keras_sdpa), mean),
    "no key: mlx fast sdpa, boolean mask": (of_no_key(with_mlx), mean),
    "no key: mlx fast sdpa, -inf": (of_no_key(with_mlx, as_float(nothing)), "NaN"),
    "no key: onnxruntime Attention, opset 23": (of_no_key(with_onnxruntime), "zeros"),
    "no key: tinygrad": (of_no_key(with_tinygrad), "NaN"),
}
print("a mask that is boolean, 1 and 0 in int64, 1 and 0 in float32, 0 and -inf; then a query that may see no key")
report(rows)
