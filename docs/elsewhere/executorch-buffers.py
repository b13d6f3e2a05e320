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

from report import cache_in_buffers, report

import torch
from executorch.exir import ExecutorchBackendConfig, to_edge
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from executorch.runtime import Runtime


def cache():
    """Three tokens were cached before the export."""
    return cache_in_buffers(torch.tensor([7.0, 7, 7, 0]), length=3)


def executorch(name, passes):
    config = ExecutorchBackendConfig(passes=passes)
    with open(name, "wb") as file:
        file.write(to_edge(torch.export.export(cache(), (key,))).to_executorch(config).buffer)
    return lambda key: Runtime.get().load_program(name).load_method("forward").execute((key,))


key = torch.ones(1)
models = {
    "torch.export": torch.export.export(cache(), (key,)).module(),
    "executorch": executorch("default.pte", []),
    "executorch, InitializedMutableBufferPass": executorch(
        "kept.pte", [InitializedMutableBufferPass(["keys", "length"])]
    ),
}


def slots(model):
    """Return the slots after one step. executorch returns a list of outputs."""
    keys = model(key)
    return (keys if isinstance(keys, torch.Tensor) else keys[0]).int().tolist()


kept, empty = [7, 7, 7, 1], [1, 0, 0, 0]
report({name: (slots(model), empty if name == "executorch" else kept) for name, model in models.items()})
