#!/bin/sh
# tract 0.23.9: in ONNX's Attention with a past and is_causal, a decode step sees only the oldest token.
#
# The operator has a cache of its own: past_key and past_value go in, and longer ones come out. With is_causal=1, query
# i sees all of the past and the new keys up to its own. tract concatenates correctly, but starts the mask at the first
# key of the past, as if there were none. onnxruntime and the ONNX reference agree on the opposite.
#
# It matters because a prefill has no past, so it is correct, and every step after it attends to the beginning of the
# text, without an error. A single token needs no is_causal, because it may see everything. For several, pass a mask
# of 0 and -inf.
#
# Seen (Linux x86-64, Python 3.11), how many of the keys each query sees, with a past of 4:
#                                  onnx        onnxruntime   tract
#   prefill of 3, is_causal        1 2 3       1 2 3         1 2 3
#   one token, is_causal           5           5             1
#   three tokens, is_causal        5 6 7       5 6 7         1 2 3
#   one token, without             5           5             5
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq tract==0.23.9 numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0
ORT_DISABLE_TELEMETRY=1 venv/bin/python - <<'END'
import sys

import numpy as np
import onnx
import onnxruntime
import tract
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def in_onnx(model, inputs):
    return ReferenceEvaluator(model).run(None, inputs)


def in_onnxruntime(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def in_tract(model, inputs):
    onnx.save(model, "model.onnx")
    outputs = tract.onnx().load("model.onnx").into_model().into_runnable().run(list(inputs.values()))
    return [output.to_numpy().copy() for output in outputs]


def sees(run, past, tokens, causal):
    """Return how many keys each query sees: all scores are equal, and key j has the value 5**j."""
    keys = past + tokens
    zeros = np.zeros((1, 1, keys, 8), np.float32)
    values = np.broadcast_to((5.0 ** np.arange(keys, dtype=np.float32))[None, None, :, None], zeros.shape).copy()
    inputs = {"q": zeros[:, :, past:], "k": zeros[:, :, past:], "v": values[:, :, past:]}
    inputs |= {"past_key": zeros[:, :, :past], "past_value": values[:, :, :past]}
    node = helper.make_node(
        "Attention", ["q", "k", "v", "", "past_key", "past_value"], ["y", "key", "value"], is_causal=causal
    )
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "g",
        [value(name, TensorProto.FLOAT, a.shape) for name, a in inputs.items()],
        [value(name, TensorProto.FLOAT, None) for name in node.output],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    y, _, present = run(model, inputs)
    assert np.array_equal(present, values)  # the cache itself is correct
    means = np.array([values[0, 0, :n, 0].mean() for n in range(1, keys + 1)])
    return " ".join(str(int(abs(means - a).argmin()) + 1) for a in y.reshape(tokens, 8)[:, 0])


cases = {
    "prefill of 3, is_causal": (0, 3, 1),
    "one token, is_causal": (4, 1, 1),
    "three tokens, is_causal": (4, 3, 1),
    "one token, without": (4, 1, 0),
}
print(f"{'':31}onnx        onnxruntime   tract")
seen = []
for name, case in cases.items():
    row = [sees(run, *case) for run in (in_onnx, in_onnxruntime, in_tract)]
    print(f"{name:31}{row[0]:12}{row[1]:14}{row[2]}")
    seen.append(row)
if seen != [["1 2 3"] * 3, ["5", "5", "1"], ["5 6 7", "5 6 7", "1 2 3"], ["5"] * 3]:
    sys.exit("changed: which keys a query sees in ONNX's Attention with a past")
END
