#!/bin/sh
# torch 2.13.0, jax 0.10.2, mlx 0.32.4, onnxruntime 1.32.0 and four more: the next token if one logit is NaN.
#
# The logit of token 20 is NaN, and the largest number is that of token 40; there are 65 tokens. With argmax, four
# libraries choose token 20 and three choose token 40. onnxruntime disagrees with itself: TopK puts NaN first, ArgMax
# ignores it. So do numpy and mlx, the other way round. Only torch and numpy refuse to draw. jax draws the NaN for
# ever, and so does mlx, unless there is one row: then it draws the last token for ever. mlx-lm does the same, but
# with top_k it draws as if there were no NaN, like onnxruntime. tinygrad draws 65, which is not a token.
#
# It matters because one NaN in a cache then shows up as text, not as an error: the same character for ever, or text
# that looks normal. Check that the logits are finite before you choose.
#
# Seen (Linux x86-64, Python 3.11), with the commonest of 100 drawn tokens in the last column:
#                          argmax    best of top-k or sort    drawn
#   torch                      20                       20    RuntimeError
#   numpy                      20                       40    ValueError
#   jax                        20                       20    20 (100 times)
#   mlx, one row               20                       40    64 (100 times)
#   mlx, 100 rows              20                       40    20 (100 times)
#   mlx-lm, temp=1             20                       40    64 (100 times)
#   mlx-lm, top_k=5            20                       40    40 (64 times)
#   onnxruntime                40                       20    40 (8 times)
#   tinygrad                   40                       40    65 (100 times)
#   openvino                   40                       40    -
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 jax==0.10.2 "mlx[cpu]==0.32.4" mlx-lm==0.32.2 transformers==5.24.0 \
    onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 tinygrad==0.14.0
DEV=PYTHON ORT_DISABLE_TELEMETRY=1 OPENVINO_TELEMETRY=0 venv/bin/python -W ignore - <<'END'
import sys
from collections import Counter

import jax
import mlx.core as mx
import numpy as np
import onnxruntime
import openvino
import tinygrad
import torch
from mlx_lm.sample_utils import make_sampler
from onnx import TensorProto, helper

V, DRAWS = 65, 100
x = np.full(V, -1, np.float32)
x[40], x[20] = 1, np.nan
t, j, m, tiny = torch.tensor(x), jax.numpy.asarray(x), mx.array(x), tinygrad.Tensor(x)
value = helper.make_tensor_value_info


def onnx_model(op, inputs, initializers=(), **attributes):
    """A model whose last output is the token."""
    outputs = ["values", "tokens"] if op == "TopK" else ["tokens"]
    kinds = {"values": TensorProto.FLOAT, "tokens": TensorProto.INT64}
    infos = [value(name, kinds[name], None) for name in outputs]
    node = helper.make_node(op, inputs, outputs, **attributes)
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, [1, V])], infos, initializers)
    opset = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


ARGMAX = onnx_model("ArgMax", ["x"], axis=1)
TOP_1 = onnx_model("TopK", ["x", "k"], [helper.make_tensor("k", TensorProto.INT64, [1], [1])])
DRAW = onnx_model("Multinomial", ["x"], dtype=TensorProto.INT64, sample_size=DRAWS, seed=1.0)


def with_onnxruntime(model):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x[None]})[-1]


def with_openvino(model):
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU")
    return compiled([x[None]])[len(compiled.outputs) - 1]


def one_by_one(sampler):
    mx.random.seed(0)
    return [sampler(m[None]).item() for _ in range(DRAWS)]


def commonest(draw):
    try:
        token, times = Counter(np.asarray(draw()).ravel().tolist()).most_common(1)[0]
        return f"{token} ({times} times)"
    except (RuntimeError, ValueError) as error:
        return type(error).__name__


mlx_best = mx.argmax(m).item(), mx.argsort(-m)[0].item()
greedy = {
    "torch": (t.argmax().item(), t.topk(1).indices.item()),
    "numpy": (x.argmax(), np.argsort(-x)[0]),
    "jax": (j.argmax().item(), jax.lax.top_k(j, 1)[1].item()),
    "mlx, one row": mlx_best,
    "mlx, 100 rows": mlx_best,
    "mlx-lm, temp=1": (make_sampler(temp=0)(m[None]).item(), mlx_best[1]),
    "mlx-lm, top_k=5": (make_sampler(temp=0)(m[None]).item(), mlx_best[1]),
    "onnxruntime": [with_onnxruntime(model).item() for model in (ARGMAX, TOP_1)],
    "tinygrad": (tiny.argmax().item(), tiny.topk(1)[1].item()),
    "openvino": [with_openvino(model).item() for model in (ARGMAX, TOP_1)],
}
p = np.exp(x) / np.exp(x).sum()
draws = {
    "torch": lambda: torch.multinomial(t.softmax(-1), DRAWS, replacement=True),
    "numpy": lambda: np.random.default_rng(0).choice(V, DRAWS, p=p),
    "jax": lambda: jax.random.categorical(jax.random.key(0), j, shape=(DRAWS,)),
    "mlx, one row": lambda: mx.random.categorical(m[None], num_samples=DRAWS),
    "mlx, 100 rows": lambda: mx.random.categorical(mx.broadcast_to(m, (DRAWS, V))),
    "mlx-lm, temp=1": lambda: one_by_one(make_sampler(temp=1.0)),
    "mlx-lm, top_k=5": lambda: one_by_one(make_sampler(temp=1.0, top_k=5)),
    "onnxruntime": lambda: with_onnxruntime(DRAW),
    "tinygrad": lambda: tiny.softmax().multinomial(DRAWS, replacement=True).numpy(),
}
print(f"{'':20} argmax    best of top-k or sort    drawn")
seen = {}
for name, (first, best) in greedy.items():
    drawn = commonest(draws[name]) if name in draws else "-"
    seen[name] = f"{first} {best} {drawn.split()[0]}"
    print(f"{name:20} {first:6} {best:24}    {drawn}")
expected = ["20 20 RuntimeError", "20 40 ValueError", "20 20 20", "20 40 64", "20 40 20", "20 40 64", "20 40 40"]
expected += ["40 20 40", "40 40 65", "40 40 -"]
if changed := [name for name, row in zip(seen, expected, strict=True) if seen[name] != row]:
    sys.exit(f"changed: {changed}")
END
