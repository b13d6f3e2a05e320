#!/bin/sh
# torch 2.13.0, jax 0.10.2, keras 3.15.1, mlx 0.32.4, openvino 2026.4.1: rare tokens are never drawn, or too seldom.
#
# One token of 50,257 has the probability 0.999, and the others share the rest: 2e-8 each, 0.1 % together. Samplers
# that add up probabilities in float32 cannot add 2e-8 to 0.999, so torch (when one call draws several tokens) and
# openvino never draw any token that comes after the likely one. jax, keras on jax and mlx add Gumbel noise, which
# they make from a uniform number with 23 or 24 bits. It ends near 17, which is too little to lift so rare a token
# above the likely one. numpy and onnxruntime calculate in float64, and torch uses exponential noise if it draws one
# token per row.
#
# It matters because the tail of a large vocabulary is many tokens of this kind, and a check of a sampler against its
# distribution finds it missing. In jax, pass mode="high", which its documentation recommends for rare events. In
# torch, draw one token per row, or pass float64. In mlx, draw with numpy.
#
# Seen (Linux x86-64, Python 3.11), tail tokens drawn, and the number expected:
#   numpy Generator.choice                198    200
#   torch multinomial, one token           16     20
#   torch multinomial, many tokens          0    200
#   the same, likely token last           204    200
#   torch Categorical                       0    200
#   jax categorical                         0     20
#   jax categorical, mode="high"           26     20
#   keras categorical on jax                0     20
#   mlx categorical                         3     20
#   onnxruntime Multinomial               191    200
#   openvino Multinomial                    0    200
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 jax==0.10.2 keras==3.15.1 "mlx[cpu]==0.32.4" onnx==1.23.2 \
    onnxruntime==1.32.0 openvino==2026.4.1
KERAS_BACKEND=jax ORT_DISABLE_TELEMETRY=1 OPENVINO_TELEMETRY=0 venv/bin/python -W ignore - <<'END'
import sys

import jax
import keras
import mlx.core as mx
import numpy as np
import onnxruntime
import openvino
import torch
from onnx import TensorProto, helper

V, TAIL, MANY, FEW, ROWS = 50_257, 0.001, 200_000, 20_000, 100
p = np.full(V, TAIL / (V - 1))
p[0] = 1 - TAIL
logits, probs = np.log(p).astype(np.float32), torch.tensor(p, dtype=torch.float32)
torch.manual_seed(0)
value = helper.make_tensor_value_info
node = helper.make_node("Multinomial", ["x"], ["y"], dtype=TensorProto.INT32, sample_size=MANY, seed=1.0)
inputs, outputs = [value("x", TensorProto.FLOAT, [1, V])], [value("y", TensorProto.INT32, None)]
graph = helper.make_graph([node], "g", inputs, outputs)
opset = [helper.make_opsetid("", 21)]
onnx_model = helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


def batches(draw):
    """FEW tokens, ROWS at a time."""
    return np.concatenate([np.asarray(draw(seed)).ravel() for seed in range(FEW // ROWS)])


def with_jax(**options):
    draw = jax.jit(lambda key: jax.random.categorical(key, logits, shape=(ROWS,), **options))
    return batches(lambda seed: draw(jax.random.key(seed)))


def with_mlx(seed):
    return mx.random.categorical(mx.broadcast_to(mx.array(logits), (ROWS, V)), key=mx.random.key(seed))


def with_onnxruntime():
    session = onnxruntime.InferenceSession(onnx_model, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": logits[None]})[0]


def with_openvino():
    core = openvino.Core()
    return core.compile_model(core.read_model(onnx_model), "CPU")([logits[None]])[0]


draws = {
    "numpy Generator.choice": lambda: np.random.default_rng(0).choice(V, MANY, p=p),
    "torch multinomial, one token": lambda: batches(lambda _: torch.multinomial(probs.expand(ROWS, V), 1)),
    "torch multinomial, many tokens": lambda: torch.multinomial(probs, MANY, replacement=True),
    "the same, likely token last": lambda: V - 1 - torch.multinomial(probs.flip(0), MANY, replacement=True),
    "torch Categorical": lambda: torch.distributions.Categorical(logits=torch.tensor(logits)).sample((MANY,)),
    "jax categorical": with_jax,
    'jax categorical, mode="high"': lambda: with_jax(mode="high"),
    "keras categorical on jax": lambda: batches(lambda seed: keras.random.categorical(logits[None], ROWS, seed=seed)),
    "mlx categorical": lambda: batches(with_mlx),
    "onnxruntime Multinomial": with_onnxruntime,
    "openvino Multinomial": with_openvino,
}
cut = []
for name, draw in draws.items():
    tokens = np.asarray(draw()).ravel()
    rare, expected = np.count_nonzero(tokens), tokens.size * TAIL
    print(f"{name:34} {rare:6} {expected:6.0f}", flush=True)
    if rare < expected / 2:
        cut.append(name)
expected = ["torch multinomial, many tokens", "torch Categorical", "jax categorical", "keras categorical on jax"]
if cut != expected + ["mlx categorical", "openvino Multinomial"]:
    sys.exit(f"changed: too few rare tokens in {cut}")
END
