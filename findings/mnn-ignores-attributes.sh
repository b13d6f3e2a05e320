#!/bin/sh
# MNN 3.6.1: converted from ONNX, operators lose attributes and large integers, without a message.
#
# MNN reads a graph with the cache as input and output, a past of length 0 included, and computes it correctly. But
# scattering with reduction="add" overwrites, except along a single axis. ArgMax ignores select_last_index, and TopK
# returns equal values in any order. An int64 constant ends at 2**30, Round rounds halves away from 0, and the two
# kinds of Gelu are one function between them. Negative indices are not counted from the end, either. The ONNX reference
# and onnxruntime agree on every line.
#
# It matters for a sampler in the graph: a penalty that counts tokens counts to 1, a seed or a hash is cut off, and ties
# are broken differently. Nothing fails, so compare the outputs with onnxruntime once.
#
# Seen (Linux x86-64, Python 3.11):
#                                           ONNX                 MNN
#   ScatterND, add 9 to slot 1              [0, 10, 2, 3]        [0, 9, 2, 3]
#   ScatterElements, add 9, one axis        [0, 10, 2, 3]        [0, 10, 2, 3]
#   ScatterElements, add 9, two axes        [0, 10, 2, 3]        [0, 9, 2, 3]
#   ArgMax, select_last_index=1             [2]                  [1]
#   TopK of five equal values               [0, 1, 2, 3, 4]      another order
#   3 + a constant of 2**40                 [1099511627779]      [1073741827]
#   Round of 0.5, 1.5, 2.5                  [0, 2, 2]            [1, 2, 3]
#   Gelu, off by                            4e-07                5e-04
#   Gelu, approximate="tanh", off by        4e-07                2e-04
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq MNN==3.6.1 numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
ORT_DISABLE_TELEMETRY=1 venv/bin/python - <<'END' > out || { tail -n 1 out; exit 1; }
import math
import sys

import _tools  # MNN's converter; its command line tool would install a package and report what it converts
import MNN
import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator


def graph(op, inputs, outputs, constants, **attributes):
    names = [*inputs, *constants]
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        [helper.make_node(op, names, outputs, **attributes)],
        "g",
        [value(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for name, a in inputs.items()],
        [value(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(a, name) for name, a in constants.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def in_mnn(model, inputs, outputs):
    onnx.save(model, "model.onnx")
    _tools.mnnconvert(["", "-f", "ONNX", "--modelFile", "model.onnx", "--MNNModel", "model.mnn", "--bizCode", "x"])
    module = MNN.nn.load_module_from_file("model.mnn", list(inputs), list(outputs))
    variables = []
    for a in inputs.values():
        kind = MNN.expr.float if a.dtype == np.float32 else MNN.expr.int  # it has no other integers
        variables.append(MNN.expr.const(a.flatten().tolist(), list(a.shape), MNN.expr.NCHW, kind))
    return [np.array(y.read()) for y in module.forward(variables)]


def run(op, inputs, outputs, constants=None, **attributes):
    """Return the last output, flattened, in ONNX and in MNN."""
    model = graph(op, inputs, outputs, constants or {}, **attributes)
    expected = ReferenceEvaluator(model).run(None, inputs)[-1]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.allclose(session.run(None, inputs)[-1], expected, atol=1e-6)
    return expected.flatten(), in_mnn(model, inputs, outputs)[-1].flatten()


FLOAT, INT = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
slots, one, nine = np.arange(4, dtype=np.float32), np.array([1]), np.array([9], dtype=np.float32)
logits = np.array([[3, 7, 7, 1]], dtype=np.float32)
add = {"reduction": "add"}
found = {
    "ScatterND, add 9 to slot 1": run("ScatterND", {"x": slots, "i": one[:, None], "u": nine}, {"y": FLOAT}, **add),
    "ScatterElements, add 9, one axis": run("ScatterElements", {"x": slots, "i": one, "u": nine}, {"y": FLOAT}, **add),
    "ScatterElements, add 9, two axes": run(
        "ScatterElements", {"x": slots[None], "i": one[None], "u": nine[None]}, {"y": FLOAT}, axis=1, **add
    ),
    "ArgMax, select_last_index=1": run("ArgMax", {"x": logits}, {"y": INT}, axis=1, select_last_index=1),
    "TopK of five equal values": run("TopK", {"x": logits[:, [1] * 5]}, {"v": FLOAT, "i": INT}, {"k": np.array([5])}),
    "3 + a constant of 2**40": run("Add", {"x": np.array([3])}, {"z": INT}, {"y": np.array([2**40])}),
    "Round of 0.5, 1.5, 2.5": run("Round", {"x": slots[:3] + 0.5}, {"y": FLOAT}),
}
rows = {}
for name, results in found.items():
    rows[name] = [str([int(x) for x in y]) for y in results]
if sorted(found["TopK of five equal values"][1]) == [0, 1, 2, 3, 4] != list(found["TopK of five equal values"][1]):
    rows["TopK of five equal values"][1] = "another order"
x = np.linspace(-8, 8, 4001, dtype=np.float32)
exact = np.array([0.5 * a * (1 + math.erf(a / math.sqrt(2))) for a in x.tolist()])
tanh = np.array([0.5 * a * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) for a in x.tolist()])
for name, attributes, by_hand in (("Gelu", {}, exact), ('Gelu, approximate="tanh"', {"approximate": "tanh"}, tanh)):
    results = run("Gelu", {"x": x}, {"y": FLOAT}, **attributes)
    rows[f"{name}, off by"] = [f"{abs(y - by_hand).max():.0e}" for y in results]
print(f"{'':40}{'ONNX':21}MNN")
for name, (a, b) in rows.items():
    print(f"{name:40}{a:21}{b}")
expected = ["[0, 9, 2, 3]", "[0, 10, 2, 3]", "[0, 9, 2, 3]", "[1]", "another order", "[1073741827]", "[1, 2, 3]"]
expected += ["5e-04", "2e-04"]
if changed := [name for (name, (_, b)), e in zip(rows.items(), expected) if b != e]:
    print(f"changed: {changed}")
    sys.exit(1)
END
sed -n '/ONNX  *MNN/,$p' out
