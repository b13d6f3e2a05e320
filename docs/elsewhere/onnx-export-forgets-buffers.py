# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0: torch.onnx.export drops the writes to a cache in a buffer.

torch.export keeps such a cache. The ONNX exporter starts from the same program, but turns the buffer into a constant:
the graph has no input or output for it, and there is no error. Each run sees the cache as it was at the export, plus
its own token, so the first step agrees with PyTorch. Pass the cache in and out.

Upstream: pytorch/pytorch#123971.
"""

from report import cache_in_buffers, report

import logging

import onnxruntime
import torch

logging.disable(logging.WARNING)


key = torch.ones(1)
module = torch.export.export(cache_in_buffers(torch.zeros(8)), (key,)).module()
graph = torch.onnx.export(cache_in_buffers(torch.zeros(8)), (key,), dynamo=True, verbose=False).model_proto
session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
inputs = [tensor.name for tensor in session.get_inputs()]
in_torch = [int(module(key).sum()) for _ in range(3)]
in_onnx = [int(session.run(None, {inputs[0]: key.numpy()})[0].sum()) for _ in range(3)]
report(
    {
        "torch.export: keys that each of three steps sees": (in_torch, [1, 2, 3]),
        "onnxruntime: keys that each of three steps sees": (in_onnx, [1, 1, 1]),
        "inputs of the graph": (inputs, ["key"]),
        "outputs of the graph": (len(session.get_outputs()), 1),
    }
)
