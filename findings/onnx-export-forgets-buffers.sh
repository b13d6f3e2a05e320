#!/bin/sh
# torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0: torch.onnx.export drops the writes to a cache buffer.
#
# torch.export keeps a cache that lives in a buffer. The ONNX exporter starts from the same program, but turns the
# buffer into a constant: the graph has no input or output for it, and there is no error. Each run sees the cache as it
# was at the export, plus its own token.
#
# It matters because the first step agrees with PyTorch, which is what most checks compare. Pass the cache in and out.
#
# Seen (Linux x86-64, Python 3.11), keys that each of three steps sees:
#   torch.export   1 2 3
#   onnxruntime    1 1 1, inputs ['key'], outputs 1
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
ORT_DISABLE_TELEMETRY=1 venv/bin/python -W ignore - <<'END'
import logging
import sys

import onnxruntime
import torch

logging.disable(logging.WARNING)


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(8, 2))
        self.register_buffer("length", torch.tensor([0]))

    def forward(self, key):
        self.keys.index_copy_(0, self.length, key)
        self.length.add_(1)
        return self.keys.sum(dim=0)


key = torch.ones(1, 2)
module = torch.export.export(Cache(), (key,)).module()
in_torch = [int(module(key)[0]) for _ in range(3)]
graph = torch.onnx.export(Cache(), (key,), dynamo=True, verbose=False).model_proto
session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
inputs = [tensor.name for tensor in session.get_inputs()]
in_onnx = [int(session.run(None, {inputs[0]: key.numpy()})[0][0]) for _ in range(3)]
print("torch.export  ", *in_torch)
print("onnxruntime   ", *in_onnx, f"inputs {inputs}, outputs {len(session.get_outputs())}")
if (in_torch, in_onnx, len(inputs)) != ([1, 2, 3], [1, 1, 1], 1):
    sys.exit("changed: the ONNX export of a cache in a buffer keeps its writes, or refuses them")
END
