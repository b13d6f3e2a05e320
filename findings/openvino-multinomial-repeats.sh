#!/bin/sh
# openvino 2026.4.1, onnxruntime 1.32.0, onnx 1.23.2: a seed in an ONNX graph makes every draw the same, or not.
#
# A graph that samples its next token has a random operator with a seed. In onnxruntime, the draws continue from run to
# run, and a new session begins again. In openvino, so do RandomUniformLike and Bernoulli. But Multinomial, the operator
# for tokens, returns the same draw in every run, even without a seed. The ONNX reference repeats all of them.
#
# It matters if you export the sampling with the model: in openvino, every step of the text then has the same noise,
# and a model that is unsure writes one token again and again. Pass the random numbers as an input.
#
# Seen (Linux x86-64, Python 3.11), 50 tokens drawn three times from equal logits:
#                                  onnxruntime   openvino       onnx
#   RandomUniformLike, seed        continues     continues      repeats
#   Bernoulli, seed                continues     continues      repeats
#   Multinomial, seed              continues     repeats        has none
#   Multinomial, no seed           continues     repeats        has none
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1
ORT_DISABLE_TELEMETRY=1 OPENVINO_TELEMETRY=0 venv/bin/python - <<'END'
import sys

import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def in_onnxruntime(model):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def in_openvino(model):
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU")
    return lambda x: np.array(compiled([x])[0])


def in_onnx(model):
    reference = ReferenceEvaluator(model)
    return lambda x: reference.run(None, {"x": x})[0]


def draws(load, op, **attributes):
    x = np.full((1, 50), 0.5, np.float32)
    kind = TensorProto.INT32 if op == "Multinomial" else TensorProto.FLOAT
    value = helper.make_tensor_value_info
    node = helper.make_node(op, ["x"], ["y"], dtype=kind, **attributes)
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, x.shape)], [value("y", kind, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    try:
        run = load(model)
    except NotImplementedError:
        return "has none"
    first, second, third = (run(x) for _ in range(3))
    return "repeats" if (first == second).all() and (first == third).all() else "continues"


cases = {
    "RandomUniformLike, seed": ("RandomUniformLike", {"seed": 1.0}),
    "Bernoulli, seed": ("Bernoulli", {"seed": 1.0}),
    "Multinomial, seed": ("Multinomial", {"seed": 1.0, "sample_size": 50}),
    "Multinomial, no seed": ("Multinomial", {"sample_size": 50}),
}
seen = {
    name: [draws(load, op, **attributes) for load in (in_onnxruntime, in_openvino, in_onnx)]
    for name, (op, attributes) in cases.items()
}
for name, row in seen.items():
    print(f"{name:26}" + "".join(f"{result:14}" for result in row))
uniform, tokens = ["continues", "continues", "repeats"], ["continues", "repeats", "has none"]
expected = dict(zip(seen, [uniform, uniform, tokens, tokens]))
if changed := [name for name in seen if seen[name] != expected[name]]:
    sys.exit(f"changed: {changed}")
END
