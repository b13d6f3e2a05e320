#!/bin/sh
# jax 0.10.2, flax 0.12.8, keras 3.15.1, openvino 2026.4.1, onnxruntime 1.32.0, tinygrad 0.14.0, torch 2.13.0:
# the position after the last row of a learned table.
#
# A table of positions has as many rows as the context. Asked for the row after the last, torch and onnxruntime raise
# an error. jax indexing returns the last row, jnp.take (and with it the Embed layers of flax and Keras on jax) returns
# NaN, and openvino and tinygrad return zeros. None of these five says anything.
#
# It matters because a model that runs one token past its context goes on in three different ways: with a repeated
# position, with none, or with NaN in the cache of every layer. Check the length before the step.
#
# Seen (Linux x86-64, Python 3.11), row 4 of a table with rows 1, 2, 3, 4:
#   torch embedding        IndexError
#   onnxruntime Gather     InvalidArgument
#   jax table[i]           4
#   jax.numpy.take         nan
#   flax nnx.Embed         nan
#   keras Embedding (jax)  nan
#   openvino Gather        0
#   tinygrad table[i]      0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 jax==0.10.2 flax==0.12.8 keras==3.15.1 onnx==1.23.2 onnxruntime==1.32.0 \
    openvino==2026.4.1 tinygrad==0.14.0
KERAS_BACKEND=jax DEV=PYTHON ORT_DISABLE_TELEMETRY=1 OPENVINO_TELEMETRY=0 venv/bin/python - <<'END'
import sys

import jax.numpy as jnp
import keras
import numpy as np
import onnxruntime
import openvino
import tinygrad
import torch
from flax import nnx
from onnx import TensorProto, helper

table = np.arange(1, 5, dtype=np.float32)[:, None]
i = np.array([4])
onnxruntime.set_default_logger_severity(4)
value = helper.make_tensor_value_info
inputs = [value("table", TensorProto.FLOAT, [4, 1]), value("i", TensorProto.INT64, [1])]
graph = helper.make_graph(
    [helper.make_node("Gather", ["table", "i"], ["y"])], "g", inputs, [value("y", TensorProto.FLOAT, None)]
)
onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()


def with_onnxruntime():
    session = onnxruntime.InferenceSession(onnx_model, providers=["CPUExecutionProvider"])
    return session.run(None, {"table": table, "i": i})[0]


def with_openvino():
    core = openvino.Core()
    return core.compile_model(core.read_model(onnx_model), "CPU")([table, i])[0]


def with_flax():
    layer = nnx.Embed(4, 1, rngs=nnx.Rngs(0))
    layer.embedding[...] = jnp.asarray(table)
    return layer(jnp.asarray(i))


def with_keras():
    layer = keras.layers.Embedding(4, 1)
    layer.build((1,))
    layer.embeddings.assign(table)
    return layer(i)


calls = {
    "torch embedding": lambda: torch.nn.functional.embedding(torch.tensor(i), torch.tensor(table)),
    "onnxruntime Gather": with_onnxruntime,
    "jax table[i]": lambda: jnp.asarray(table)[jnp.asarray(i)],
    "jax.numpy.take": lambda: jnp.take(jnp.asarray(table), i, axis=0),
    "flax nnx.Embed": with_flax,
    "keras Embedding (jax)": with_keras,
    "openvino Gather": with_openvino,
    "tinygrad table[i]": lambda: tinygrad.Tensor(table)[tinygrad.Tensor(i)].numpy(),
}
seen = []
for name, call in calls.items():
    try:
        seen.append(f"{np.asarray(call()).item():g}")
    except Exception as error:
        seen.append(type(error).__name__)
    print(f"{name:22} {seen[-1]}")
expected = ["IndexError", "InvalidArgument", "4", "nan", "nan", "nan", "0", "0"]
if seen != expected:
    sys.exit(f"changed: {[name for name, a, b in zip(calls, seen, expected) if a != b]}")
END
