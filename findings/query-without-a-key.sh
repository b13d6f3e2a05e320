#!/bin/sh
# torch 2.13.0, jax 0.10.2, flax 0.12.8, keras 3.15.1, mlx 0.32.4, onnxruntime 1.32.0, tinygrad 0.14.0:
# what a query gets that may see no key.
#
# A softmax over no keys is 0 / 0. Depending on library and call, the result is zeros, NaN, or the mean of all values,
# those behind the mask included. In torch it even depends on the form of the mask, and in nn.MultiheadAttention on
# need_weights. In mlx a boolean mask gives the mean and the same mask as -inf gives NaN.
#
# It matters for left padding, where the pad rows see nothing: zeros and means stay in their row, but a NaN spreads to
# every later step through its cached value, because 0 * NaN is NaN.
#
# Seen (Linux x86-64, Python 3.11, float32 on the CPU):
#   torch sdpa, boolean mask                  zeros
#   torch sdpa, -inf                          zeros
#   torch sdpa, torch.finfo.min               mean of all values
#   torch nn.MultiheadAttention, weights      NaN
#   torch nn.MultiheadAttention, no weights   zeros
#   jax.nn.dot_product_attention              mean of all values
#   flax.linen.dot_product_attention          mean of all values
#   keras.ops.dot_product_attention           mean of all values
#   mlx fast sdpa, boolean mask               mean of all values
#   mlx fast sdpa, -inf                       NaN
#   onnxruntime Attention, opset 23           zeros
#   tinygrad                                  NaN
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 jax==0.10.2 flax==0.12.8 keras==3.15.1 "mlx[cpu]==0.32.4" onnx==1.23.2 \
    onnxruntime==1.32.0 tinygrad==0.14.0
KERAS_BACKEND=jax DEV=PYTHON ORT_DISABLE_TELEMETRY=1 venv/bin/python - <<'END'
import sys
import warnings

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
from torch.nn.functional import scaled_dot_product_attention as sdpa

warnings.simplefilter("ignore")
rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 1, 3, 8)).astype(np.float32) for _ in range(3))  # batch, heads, tokens, head size
mask = np.array([[0, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=bool)  # the first query sees nothing
tq, tk, tv, tmask = (torch.tensor(a) for a in (q, k, v, mask))
jq, jk, jv = (jnp.asarray(a.swapaxes(1, 2)) for a in (q, k, v))  # batch, tokens, heads, head size
jmask = jnp.asarray(mask)[None, None]
mq, mk, mv, mmask = (mx.array(a) for a in (q, k, v, mask))


def torch_layer(need_weights):
    layer = torch.nn.MultiheadAttention(8, 1, bias=False, batch_first=True).eval()
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(8))
        return layer(tq[0], tk[0], tv[0], attn_mask=~tmask, need_weights=need_weights)[0]


def onnx_attention():
    value = helper.make_tensor_value_info
    inputs = [value(name, TensorProto.FLOAT, q.shape) for name in "qkv"] + [value("mask", TensorProto.BOOL, [3, 3])]
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
    graph = helper.make_graph([node], "g", inputs, [value("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"q": q, "k": k, "v": v, "mask": mask})[0]


def tinygrad_attention():
    tensors = [tinygrad.Tensor(a, device="PYTHON") for a in (q, k, v, mask)]
    return tensors[0].scaled_dot_product_attention(tensors[1], tensors[2], attn_mask=tensors[3]).numpy()


def masked(low):
    return torch.zeros(3, 3).masked_fill(~tmask, low)


calls = {
    "torch sdpa, boolean mask": lambda: sdpa(tq, tk, tv, attn_mask=tmask),
    "torch sdpa, -inf": lambda: sdpa(tq, tk, tv, attn_mask=masked(-torch.inf)),
    "torch sdpa, torch.finfo.min": lambda: sdpa(tq, tk, tv, attn_mask=masked(torch.finfo(torch.float32).min)),
    "torch nn.MultiheadAttention, weights": lambda: torch_layer(True),
    "torch nn.MultiheadAttention, no weights": lambda: torch_layer(False),
    "jax.nn.dot_product_attention": lambda: jax.nn.dot_product_attention(jq, jk, jv, mask=jmask),
    "flax.linen.dot_product_attention": lambda: flax.linen.dot_product_attention(jq, jk, jv, mask=mask[None, None]),
    "keras.ops.dot_product_attention": lambda: keras.ops.dot_product_attention(jq, jk, jv, mask=mask[None, None]),
    "mlx fast sdpa, boolean mask": lambda: mx.fast.scaled_dot_product_attention(mq, mk, mv, scale=1.0, mask=mmask),
    "mlx fast sdpa, -inf": lambda: mx.fast.scaled_dot_product_attention(
        mq, mk, mv, scale=1.0, mask=mx.where(mmask, 0.0, -mx.inf)
    ),
    "onnxruntime Attention, opset 23": onnx_attention,
    "tinygrad": tinygrad_attention,
}
expected = "zeros, zeros, mean, NaN, zeros, mean, mean, mean, mean, NaN, zeros, NaN".split(", ")
seen = []
for name, call in calls.items():
    row = np.array(call()).reshape(3, 8)[0]  # the first query, in either layout
    kind = "NaN" if np.isnan(row).any() else "zeros" if not row.any() else "something else"
    if np.allclose(row, v[0, 0].mean(axis=0), atol=1e-5):
        kind = "mean"
    seen.append(kind)
    print(f"{name:41} {kind.replace('mean', 'mean of all values')}")
if seen != expected:
    sys.exit(f"changed: {[name for name, a, b in zip(calls, seen, expected) if a != b]}")
END
