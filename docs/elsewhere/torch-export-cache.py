# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "numpy==2.4.6", "onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0", "setuptools==84.2.1",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0: an exported cache is dropped if it is in an attribute, and in a buffer three exporters differ.

A cache that grows (self.keys = torch.cat((self.keys, key))) is a constant of the program of torch.export: every call
starts from the empty cache again. Only strict=True warns of "certain side effects". A buffer that is changed in place
is kept, but program.module() does not copy it: two modules made from one program, and the model it was exported from,
share it, and a file saved later contains what was cached by then. Take copy.deepcopy(program.module()), and save
before the first step.

torch.onnx.export starts from the same program, but turns the buffer into a constant. Compiled ahead of time with
AOTInductor, which needs a C++ compiler, the number of keys is the constant that it was at compile time: the first call
writes slot 0, and all later calls slot 1. There is no error, and the first step is correct in both.

Upstream: pytorch/pytorch#123971 (torch.onnx.export), pytorch/pytorch#165444 (AOTInductor).
"""

from report import cache_in_buffers, report

import logging

import onnxruntime
import torch

logging.disable(logging.WARNING)
SLOTS = 4


class Attribute(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = torch.zeros(0)

    def forward(self, key):
        self.keys = torch.cat((self.keys, key))
        return self.keys.clone()


def three_steps(*models):
    """Return how many keys each of three steps sees."""
    return [int(model(key).sum()) for model in models]


def in_onnxruntime():
    graph = torch.onnx.export(cache_in_buffers(torch.zeros(SLOTS)), (key,), dynamo=True, verbose=False).model_proto
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    (name,) = [tensor.name for tensor in session.get_inputs()]
    return lambda key: session.run(None, {name: key.numpy()})[0]


def in_aotinductor():
    program = torch.export.export(cache_in_buffers(torch.zeros(SLOTS)), (key,))
    return torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path="aoti.pt2"))


key = torch.ones(1)
loose, strict = (torch.export.export(Attribute(), (key,), strict=strict).module() for strict in (False, True))
attribute, buffer = Attribute(), cache_in_buffers(torch.zeros(SLOTS))
program = torch.export.export(buffer, (key,))
first, second = program.module(), program.module()
onnx, compiled = in_onnxruntime(), in_aotinductor()
rows = {
    "attribute, the model itself: keys that each of three steps sees": (three_steps(*3 * [attribute]), [1, 2, 3]),
    "attribute, strict=False": (three_steps(*3 * [loose]), [1, 1, 1]),
    "attribute, strict=True": (three_steps(*3 * [strict]), [1, 1, 1]),
    "buffer: first module, first module, second module": (three_steps(first, first, second), [1, 2, 3]),
    "buffer: tokens in the model that was exported": (buffer.length.item(), 3),
    "buffer, torch.onnx.export": (three_steps(*3 * [onnx]), [1, 1, 1]),
    "buffer, AOTInductor": (three_steps(*3 * [compiled]), [1, 2, 2]),
}
torch.export.save(program, "cache.pt2")
saved = torch.export.load("cache.pt2").module().length.item()
report(rows | {"buffer: tokens in a file that is saved now": (saved, 3)})
