#!/bin/sh
# torch 2.13.0, jax 0.10.2, mlx 0.32.4, onnxruntime 1.32.0: what a value beyond 448 becomes in float8 (e4m3fn).
#
# 448 is the largest value of this format, which has no infinity. torch and mlx write 448 for everything larger, even
# for infinity. jax writes NaN from 465 on. onnxruntime writes 448, too, and with saturate=0 NaN as jax does, but not
# from 480 to 496: those become 448, while 470 and 500 become NaN.
#
# It matters for a float8 cache: after the same overflow, one library goes on with a key of 448, another has NaN in
# every later token. And a check for infinities or NaN after the conversion finds nothing in torch and mlx.
#
# Seen (Linux x86-64, Python 3.11):
#                             460    470    490    500    inf
#   torch                     448    448    448    448    448
#   mlx                       448    448    448    448    448
#   jax                       448    nan    nan    nan    nan
#   onnxruntime               448    448    448    448    448
#   onnxruntime, saturate=0   448    nan    448    nan    nan
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 jax==0.10.2 "mlx[cpu]==0.32.4" onnx==1.23.2 onnxruntime==1.32.0
ORT_DISABLE_TELEMETRY=1 venv/bin/python - <<'END'
import sys

import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

values = np.array([460, 470, 490, 500, np.inf], np.float32)


def with_onnxruntime(saturate):
    value, node = helper.make_tensor_value_info, helper.make_node
    nodes = [
        node("Cast", ["x"], ["small"], to=TensorProto.FLOAT8E4M3FN, saturate=saturate),
        node("Cast", ["small"], ["y"], to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, [5])], [value("y", TensorProto.FLOAT, [5])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": values})[0]


results = {
    "torch": torch.tensor(values).to(torch.float8_e4m3fn).float(),
    "mlx": mx.from_fp8(mx.to_fp8(mx.array(values)), mx.float32),
    "jax": jnp.asarray(values).astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "onnxruntime": with_onnxruntime(saturate=1),
    "onnxruntime, saturate=0": with_onnxruntime(saturate=0),
}
seen = {name: " ".join(f"{float(y):6g}" for y in ys).split() for name, ys in results.items()}
for name, row in seen.items():
    print(f"{name:26}" + "".join(f"{y:>7}" for y in row))
finite = 5 * ["448"]
expected = dict(zip(seen, [finite, finite, ["448"] + 4 * ["nan"], finite, ["448", "nan", "448", "nan", "nan"]]))
if changed := [name for name in seen if seen[name] != expected[name]]:
    sys.exit(f"changed: {changed}")
END
