# /// script
# requires-python = ">=3.11"
# dependencies = ["executorch==1.5.1", "torch==2.13.0"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""executorch 1.5.1 with torch 2.13.0: buffers of an exported model start as zeros, whatever they held.

A .pte file keeps constants, but by default not the contents of buffers that the model writes to. A cache that was
filled with a system prompt before the export is empty, and a position that was 3 is 0. The pass
InitializedMutableBufferPass(["keys", "length"]) keeps them.

Upstream: pytorch/executorch#5068.
"""

from report import report

import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.runtime import Runtime


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.tensor([7.0, 7, 7, 0]))  # three tokens were cached before the export
        self.register_buffer("length", torch.tensor([3]))

    def forward(self, key):
        self.keys.index_copy_(0, self.length, key)
        self.length.add_(1)
        return self.keys.clone(), self.length.clone()


def executorch(name, passes):
    config = ExecutorchBackendConfig(passes=passes)
    with open(name, "wb") as file:
        file.write(to_edge(torch.export.export(Cache(), (key,))).to_executorch(config).buffer)
    return lambda key: Runtime.get().load_program(name).load_method("forward").execute((key,))


key = torch.ones(1)
models = {
    "torch.export": torch.export.export(Cache(), (key,)).module(),
    "executorch": executorch("default.pte", []),
    "executorch, InitializedMutableBufferPass": executorch(
        "kept.pte", [InitializedMutableBufferPass(["keys", "length"])]
    ),
}


def state(model):
    """Return the slots and the position after one step."""
    keys, length = model(key)
    return [keys.int().tolist(), length.item()]


kept, empty = [[7, 7, 7, 1], 4], [[1, 0, 0, 0], 1]
report({name: (state(model), empty if name == "executorch" else kept) for name, model in models.items()})
