# /// script
# requires-python = ">=3.11"
# dependencies = ["onnx==1.23.2", "onnxruntime==1.32.0", "openvino==2026.4.1", "tract==0.23.9", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# [tool.elsewhere]
# versions = ["onnxruntime==1.27.0"]
# ///
"""onnx 1.23.2, onnxruntime 1.27.0 and 1.32.0, openvino 2026.4.1, tract 0.23.9: is_causal in ONNX's Attention.

Shown as the number of keys that each query sees. With a past, it ends in the bottom right, except in tract, where
every step after the prefill sees only the beginning of the text. Without one it starts in the top left, but in
onnxruntime 1.27 a single query sees all keys. unidirectional of onnxruntime's MultiHeadAttention is the top left, but
its last query sees all. TensorScatter past the end is an error, or wraps with mode circular.

Upstream: microsoft/onnxruntime#29020, onnx/onnx#8054.
"""

from report import in_onnxruntime, onnx_model, report, sees

import numpy as np
import onnx
import onnxruntime
import openvino
import tract
from onnx.reference import ReferenceEvaluator

onnxruntime.set_default_logger_severity(4)


def in_onnx(model, inputs):
    return ReferenceEvaluator(model).run(None, inputs)[0]


def in_openvino(model, inputs):
    core = openvino.Core()
    graph = core.read_model(model.SerializeToString())
    return core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(inputs)[0]


def in_tract(model, inputs):
    onnx.save(model, "model.onnx")
    outputs = tract.onnx().load("model.onnx").into_model().into_runnable().run(list(inputs.values()))
    return outputs[0].to_numpy().copy()


def causal(run, queries, past=0, keys=5, nonpad=None, is_causal=1, opset=24):
    def attend(q, k, v):
        inputs = {"q": q, "k": k[:, :, past:], "v": v[:, :, past:]}
        names, outputs = ["q", "k", "v"], ["y"]
        if past or run is in_tract:
            inputs |= {"past_key": k[:, :, :past], "past_value": v[:, :, :past]}
            names, outputs = ["q", "k", "v", "", "past_key", "past_value"], ["y", "key", "value"]
        if nonpad:
            inputs["nonpad"] = np.array([nonpad])
            names = ["q", "k", "v", "", "", "", "nonpad"]
        return run(onnx_model("Attention", inputs, outputs, opset, names, is_causal=is_causal), inputs)

    return sees(attend, queries, keys)


def unidirectional(run):
    def attend(q, k, v):
        inputs = {"q": q[:, 0], "k": k[:, 0], "v": v[:, 0]}
        settings = {"domain": "com.microsoft", "num_heads": 1, "unidirectional": 1}
        return run(onnx_model("MultiHeadAttention", inputs, **settings), inputs)

    return sees(attend, 3)


def scatter(run, mode):
    """Return the slots after a write to slot 4 of 4."""
    cache = np.arange(4, dtype=np.float32).reshape(1, 1, 4, 1)
    inputs = {"cache": cache, "update": np.full((1, 1, 1, 1), 9, np.float32), "slot": np.array([4])}
    try:
        y = run(onnx_model("TensorScatter", inputs, axis=2, mode=mode), inputs)
    except Exception:
        return "error"
    return np.asarray(y).flatten().astype(int).tolist()


if onnxruntime.__version__ == "1.27.0":
    report({"onnxruntime 1.27, no past, 1 query": (causal(in_onnxruntime, 1), [5])})
rows = {}
for name, run in (("onnxruntime 1.32", in_onnxruntime), ("onnx", in_onnx), ("openvino", in_openvino)):
    rows[f"{name}, no past, 1 query"] = causal(run, 1), [1]
    rows[f"{name}, no past, 3 queries"] = causal(run, 3), [1, 2, 3]
    rows[f"{name}, past of 2, 3 queries"] = causal(run, 3, past=2), [3, 4, 5]
    rows[f"{name}, nonpad_kv_seqlen 5 of 8, 3 queries"] = causal(run, 3, keys=8, nonpad=5), [3, 4, 5]
rows["tract, prefill of 3"] = causal(in_tract, 3, keys=3, opset=23), [1, 2, 3]
rows["tract, past of 4, 1 query"] = causal(in_tract, 1, past=4, opset=23), [1]
rows["tract, past of 2, 3 queries"] = causal(in_tract, 3, past=2, opset=23), [1, 2, 3]
rows["tract, past of 4, 1 query, without is_causal"] = causal(in_tract, 1, past=4, is_causal=0, opset=23), [5]
rows["onnxruntime 1.32, MultiHeadAttention unidirectional, 3 queries"] = unidirectional(in_onnxruntime), [1, 2, 5]
rows["openvino, MultiHeadAttention unidirectional, 3 queries"] = unidirectional(in_openvino), [1, 2, 3]
for name, run in (("onnxruntime 1.32", in_onnxruntime), ("onnx", in_onnx)):
    rows[f"{name}, TensorScatter linear at slot 4 of 4"] = scatter(run, "linear"), "error"
    rows[f"{name}, TensorScatter circular at slot 4 of 4"] = scatter(run, "circular"), [9, 1, 2, 3]
report(rows)
