#!/bin/sh
# torch 2.13.0, jax 0.10.2, flax 0.12.8, keras 3.15.1, mlx 0.32.4, onnxruntime 1.32.0, tinygrad 0.14.0:
# a mask of numbers is added in one library and read as booleans in the next.
#
# All agree on a boolean mask. The 1 and 0 of transformers' attention_mask are added to the scores in mlx, onnxruntime
# and tinygrad, and in torch once they are floats: a masked key gets exp(-1) of its weight, not 0. flax and Keras read
# them as booleans, which is correct, but they do the same with 0 and -inf, and so see exactly what is masked. jax
# accepts booleans only.
#
# It matters when a mask moves with a cache. Nothing fails, and padding or the future is read. Convert it to booleans.
#
# Seen (Linux x86-64, Python 3.11, float32 on the CPU):
#                                    boolean    1 and 0, int64   1 and 0, float32   0 and -inf
#   torch sdpa                       correct    RuntimeError     added              correct
#   jax.nn.dot_product_attention     correct    ValueError       ValueError         ValueError
#   flax.linen.dot_product_attention correct    correct          correct            inverted
#   keras.ops.dot_product_attention  correct    correct          correct            inverted
#   mlx fast sdpa                    correct    added            added              correct
#   onnxruntime Attention, opset 23  correct    added            added              correct
#   tinygrad                         correct    added            added              correct
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 jax==0.10.2 flax==0.12.8 keras==3.15.1 "mlx[cpu]==0.32.4" onnx==1.23.2 \
    onnxruntime==1.32.0 tinygrad==0.14.0
export KERAS_BACKEND=jax DEV=PYTHON ORT_DISABLE_TELEMETRY=1
venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import flax.linen
import jax
import jax.numpy as jnp
import keras
import mlx.core as mx
import numpy as np
import onnxruntime
import tinygrad
import torch
from onnx import TensorProto, helper

rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 2, 6, 8)).astype(np.float32) for _ in range(3))  # batch, heads, tokens, head size
jqkv = [jnp.asarray(a.swapaxes(1, 2)) for a in (q, k, v)]  # batch, tokens, heads, head size
causal = np.tril(np.ones((6, 6), dtype=bool))
masks = {
    "boolean": causal,
    "1 and 0, int64": causal.astype(np.int64),
    "1 and 0, float32": causal.astype(np.float32),
    "0 and -inf": np.where(causal, 0, -np.inf).astype(np.float32),
}


def attention(bias):
    """The definition, with a bias that is added to the scores."""
    scores = q @ k.swapaxes(2, 3) / 8**0.5 + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


with np.errstate(invalid="ignore"):
    meanings = {
        "correct": attention(np.where(causal, 0, -np.inf)),
        "added": attention(causal),
        "inverted": attention(np.where(causal, -np.inf, 0)),  # the last query sees nothing
    }


def with_torch(mask):
    return torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), attn_mask=torch.tensor(mask))


def with_jax(call):
    return lambda mask: call(*jqkv, mask=jnp.asarray(mask)[None, None]).swapaxes(1, 2)


def with_mlx(mask):
    return mx.fast.scaled_dot_product_attention(*map(mx.array, (q, k, v)), scale=8**-0.5, mask=mx.array(mask))


def with_onnxruntime(mask):
    value, kind = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype(mask.dtype)
    inputs = [value(name, TensorProto.FLOAT, q.shape) for name in "qkv"] + [value("mask", kind, mask.shape)]
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
    graph = helper.make_graph([node], "g", inputs, [value("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"q": q, "k": k, "v": v, "mask": mask})[0]


def with_tinygrad(mask):
    query, key, value, mask = (tinygrad.Tensor(a, device="PYTHON") for a in (q, k, v, mask))
    return query.scaled_dot_product_attention(key, value, attn_mask=mask).numpy()


calls = {
    "torch sdpa": with_torch,
    "jax.nn.dot_product_attention": with_jax(jax.nn.dot_product_attention),
    "flax.linen.dot_product_attention": with_jax(flax.linen.dot_product_attention),
    "keras.ops.dot_product_attention": with_jax(keras.ops.dot_product_attention),
    "mlx fast sdpa": with_mlx,
    "onnxruntime Attention, opset 23": with_onnxruntime,
    "tinygrad": with_tinygrad,
}


def meaning(call, mask):
    try:
        y = np.array(call(mask))
    except Exception as error:
        return type(error).__name__
    same = (name for name, other in meanings.items() if np.allclose(y[:, :, :5], other[:, :, :5], atol=1e-4))
    return next(same, "something else")


expected = {
    "torch sdpa": ["correct", "RuntimeError", "added", "correct"],
    "jax.nn.dot_product_attention": ["correct", "ValueError", "ValueError", "ValueError"],
    "flax.linen.dot_product_attention": ["correct", "correct", "correct", "inverted"],
    "keras.ops.dot_product_attention": ["correct", "correct", "correct", "inverted"],
    "mlx fast sdpa": ["correct", "added", "added", "correct"],
    "onnxruntime Attention, opset 23": ["correct", "added", "added", "correct"],
    "tinygrad": ["correct", "added", "added", "correct"],
}
seen = {name: [meaning(call, mask) for mask in masks.values()] for name, call in calls.items()}
for name, columns in {"": list(masks), **seen}.items():
    print("{:32} {:10} {:16} {:18} {}".format(name, *columns))
if seen != expected:
    sys.exit(f"changed: {[name for name in calls if seen[name] != expected[name]]}")
END
