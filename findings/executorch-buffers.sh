#!/bin/sh
# executorch 1.5.1 (torch 2.13.0): buffers of an exported model start as zeros, whatever they held.
#
# A .pte file keeps constants, but by default not the contents of buffers that the model writes to. A cache that was
# filled with a system prompt before the export is empty, and a position that was 3 is 0. There is no error.
#
# It matters if you export a model together with a prefilled cache, or with a mask or position in a buffer. Let a pass
# keep them: ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(["keys", "length"])]).
#
# Seen (Linux x86-64, Python 3.11), first slots of the cache and position after one step:
#   torch.export                            [7, 7, 7, 1], position 4
#   executorch                              [1, 0, 0, 0], position 1
#   executorch, InitializedMutableBufferPass [7, 7, 7, 1], position 4
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 executorch==1.5.1
venv/bin/python -W ignore - 2> log <<'END' || { tail -n 1 log; exit 1; }
import sys

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
seen = []
for name, model in models.items():
    keys, length = model(key)
    seen.append((keys.int().tolist(), length.item()))
    print(f"{name:40} {seen[-1][0]}, position {seen[-1][1]}")
if seen != [([7, 7, 7, 1], 4), ([1, 0, 0, 0], 1), ([7, 7, 7, 1], 4)]:
    sys.exit("changed: executorch keeps the contents of buffers by default, or not with the pass")
END
