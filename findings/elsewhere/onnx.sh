#!/bin/sh
# Rows of docs/elsewhere.md: ONNX Attention, TensorScatter and onnxruntime's MultiHeadAttention in onnx 1.23.2 (the
# reference), onnxruntime 1.27.0 and 1.32.0, and openvino 2026.4.1. "causal" as the number of keys each query sees.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
for version in 1.27.0 1.32.0; do
    "${PYTHON:-python3}" -m venv "venv$version"
    "venv$version/bin/pip" install -qq onnx==1.23.2 "onnxruntime==$version" openvino==2026.4.1
done
cat > onnx_causal.py <<'END'
import sys

import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

onnxruntime.set_default_logger_severity(4)


def model(op, inputs, outputs, domain="", opset=24, **attributes):
    value = helper.make_tensor_value_info
    names = [name if name in inputs else "" for name in ORDER[op]]
    while not names[-1]:
        names.pop()
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, domain=domain, **attributes)],
        "g",
        [value(name, types[name], inputs[name].shape) for name in inputs],
        [value(name, TensorProto.FLOAT, None) for name in outputs],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


ORDER = {
    "Attention": ["q", "k", "v", "mask", "past_key", "past_value", "nonpad"],
    "MultiHeadAttention": ["q", "k", "v"],
    "TensorScatter": ["cache", "update", "slot"],
}


def in_onnxruntime(model, inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def in_onnx(model, inputs):
    return ReferenceEvaluator(model).run(None, inputs)[0]


def in_openvino(model, inputs):
    core = openvino.Core()
    graph = core.read_model(model.SerializeToString())
    return core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs)[0]


def sees(run, queries, past=0, keys=5, nonpad=None, contrib=False):
    """Return how many keys each query sees: all weights are equal, and key j has the value 5**j."""
    q, k = np.zeros((1, 1, queries, 8), np.float32), np.zeros((1, 1, keys, 8), np.float32)
    v = np.broadcast_to((5.0 ** np.arange(keys, dtype=np.float32))[None, None, :, None], k.shape).copy()
    if contrib:
        inputs = {"q": q[:, 0], "k": k[:, 0], "v": v[:, 0]}
        graph = model("MultiHeadAttention", inputs, ["y"], "com.microsoft", num_heads=1, unidirectional=1)
    else:
        inputs = {"q": q, "k": k[:, :, past:], "v": v[:, :, past:]}
        if past:
            inputs |= {"past_key": k[:, :, :past], "past_value": v[:, :, :past]}
        if nonpad:
            inputs["nonpad"] = np.array([nonpad])
        outputs = ["y", "present_key", "present_value"] if past else ["y"]
        graph = model("Attention", inputs, outputs, is_causal=1)
    y = np.asarray(run(graph, inputs)).reshape(queries, 8)[:, 0]
    means = np.array([v[0, 0, :n, 0].mean() for n in range(1, keys + 1)])
    return [int(np.abs(means - value).argmin()) + 1 for value in y]


def scatter(run, mode):
    """Return the slots after a write to slot 4 of 4."""
    cache = np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1)
    inputs = {"cache": cache, "update": np.full((1, 1, 1, 1), 9, np.float32), "slot": np.array([4])}
    try:
        y = run(model("TensorScatter", inputs, ["y"], axis=2, mode=mode), inputs)
        return np.asarray(y).flatten().astype(int).tolist()
    except Exception:
        return "error"


if onnxruntime.__version__ == "1.27.0":
    seen = {"onnxruntime 1.27, Attention, no past, 1 query": sees(in_onnxruntime, 1)}
    expected = [[5]]
else:
    seen, expected = {}, []
    for name, run in (("onnxruntime 1.32", in_onnxruntime), ("onnx", in_onnx), ("openvino", in_openvino)):
        seen[f"{name}, Attention, no past, 1 query"] = sees(run, 1)
        seen[f"{name}, Attention, no past, 3 queries"] = sees(run, 3)
        seen[f"{name}, Attention, past of 2, 3 queries"] = sees(run, 3, past=2)
        seen[f"{name}, Attention, nonpad_kv_seqlen 5 of 8, 3 queries"] = sees(run, 3, keys=8, nonpad=5)
        expected += [[1], [1, 2, 3], [3, 4, 5], [3, 4, 5]]
        if name != "onnx":
            seen[f"{name}, MultiHeadAttention unidirectional, 3 queries"] = sees(run, 3, contrib=True)
            expected.append([1, 2, 5] if run is in_onnxruntime else [1, 2, 3])
        if name != "openvino":
            seen[f"{name}, TensorScatter linear at slot 4 of 4"] = scatter(run, "linear")
            seen[f"{name}, TensorScatter circular at slot 4 of 4"] = scatter(run, "circular")
            expected += ["error", [9, 1, 2, 3]]
print("\n".join(f"{name:70} {result}" for name, result in seen.items()))
if changed := [name for (name, result), e in zip(seen.items(), expected) if result != e]:
    sys.exit(f"changed: {changed}")
END
for version in 1.27.0 1.32.0; do
    ORT_DISABLE_TELEMETRY=1 OPENVINO_TELEMETRY=0 "venv$version/bin/python" onnx_causal.py
done
