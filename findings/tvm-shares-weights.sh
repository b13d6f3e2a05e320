#!/bin/sh
# apache-tvm 0.27.0.post1 with torch 2.13.0: a compiled program reads torch's weights, and not always the right ones.
#
# from_exported_program wraps the tensors of the torch module instead of copying them, and the compiled program still
# reads that memory. The next optimizer step changes it, too. Constants that are equal when it is compiled are merged,
# as the weights of two new norms are (all ones): afterwards, both follow the first. A program that went through
# export_library and load_module has its own copy.
#
# It matters if you compile a model and train on, or compile once and load a checkpoint later: the program is neither
# the old model nor the new one. Import copy.deepcopy(model) for a snapshot.
#
# Seen (Linux x86-64, Python 3.11), three weights before and after one step of SGD:
#                                      linear    norm 1    norm 2
#   torch, when it is compiled            0.5       1.0       1.0
#   torch, after the step                 0.4       0.8       0.7
#   the compiled program                  0.4       0.8       0.8
#   the same, from a saved library        0.5       1.0       1.0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 apache-tvm==0.27.0.post1 numpy==2.4.6
venv/bin/python -W ignore - <<'END'
import sys

import torch
import tvm
from tvm.relax.frontend.torch import from_exported_program


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Parameter(torch.full((64,), 0.5))
        self.norm_1 = torch.nn.Parameter(torch.ones(64))
        self.norm_2 = torch.nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x * self.linear, x * self.norm_1, x * self.norm_2


def weights(outputs):
    return [round(float(y.numpy()[0]), 4) for y in outputs]


model, x = Block(), torch.ones(64)
executable = tvm.compile(from_exported_program(torch.export.export(model, (x,))), target="llvm")
executable.export_library("model.so")
compiled = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"]
loaded = tvm.relax.VirtualMachine(tvm.runtime.load_module("./model.so"), tvm.cpu())["main"]

seen = {}
with torch.no_grad():
    seen["torch, when it is compiled"] = weights(model(x))
loss = sum(i * y[0] for i, y in enumerate(model(torch.ones(64)), start=1))
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
with torch.no_grad():
    seen["torch, after the step"] = weights(model(x))
seen["the compiled program"] = weights(compiled(tvm.runtime.tensor(x.numpy())))
seen["the same, from a saved library"] = weights(loaded(tvm.runtime.tensor(x.numpy())))
print(f"{'':32}    linear    norm 1    norm 2")
for name, row in seen.items():
    print(f"{name:32}" + "".join(f"{weight:10.1f}" for weight in row))
if list(seen.values()) != [[0.5, 1.0, 1.0], [0.4, 0.8, 0.7], [0.4, 0.8, 0.8], [0.5, 1.0, 1.0]]:
    sys.exit("changed: which weights a compiled program has after a step in torch")
END
