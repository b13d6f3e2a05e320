#!/bin/sh
# Rows of docs/elsewhere.md: "causal" in tinygrad 0.14.0, openvino 2026.4.1 and paddlepaddle 3.3.1, as the number of
# keys that the last of 1 and of 3 queries sees, of 5.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq tinygrad==0.14.0 openvino==2026.4.1 paddlepaddle==3.3.1 setuptools
DEV=PYTHON OPENVINO_TELEMETRY=0 venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import numpy as np
import openvino
import openvino.opset13 as ops
import paddle
import tinygrad


def sees(attend):
    """Return how many keys the last of 1 and of 3 queries sees: all weights are equal, and key j has the value 5**j."""
    result = []
    for queries in (1, 3):
        q, k = np.zeros((1, 1, queries, 16), np.float32), np.zeros((1, 1, 5, 16), np.float32)
        value = np.broadcast_to((5.0 ** np.arange(5, dtype=np.float32))[None, None, :, None], k.shape).copy()
        y = np.asarray(attend(q, k, value))[0, 0, -1, 0]
        result += [n for n in range(1, 6) if np.isclose(y, value[0, 0, :n, 0].mean())]
    return result


def with_tinygrad(*arrays):
    q, k, v = map(tinygrad.Tensor, arrays)
    return q.scaled_dot_product_attention(k, v, is_causal=True).numpy()


def with_openvino(*arrays):
    inputs = [ops.parameter(array.shape, np.float32) for array in arrays]
    model = openvino.Model([ops.scaled_dot_product_attention(*inputs, causal=True)], inputs, "attention")
    return openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(list(arrays))[0]


def with_paddle(*arrays):
    q, k, v = (paddle.to_tensor(array.swapaxes(1, 2)) for array in arrays)  # batch, tokens, heads, head size
    y = paddle.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.numpy().swapaxes(1, 2)


seen = {"tinygrad": sees(with_tinygrad), "openvino": sees(with_openvino), "paddle": sees(with_paddle)}
for name, keys in seen.items():
    print(f"{name:10} {keys}")
if changed := [name for name, keys in seen.items() if keys != [1, 3]]:
    sys.exit(f"changed: {changed}")
END
