#!/bin/sh
# torch 2.13.0: a cache compiled with AOTInductor counts to 1 and overwrites the second slot for ever.
#
# A module with two buffers, keys and their number, adds one key per call. In eager mode, under torch.compile and after
# torch.export it fills slots 0, 1, 2, 3. Compiled ahead of time, the number is read as the constant that it was at
# compile time: the first call writes slot 0, and all later calls write slot 1. No error, no warning.
#
# It matters because the first two tokens are correct, and a short check passes. Pass the position as an input.
#
# Seen (Linux x86-64, Python 3.11, gcc 12), the slots after the keys 1, 2, 3, 4:
#   torch.export    [1, 2, 3, 4]
#   torch.compile   [1, 2, 3, 4]
#   AOTInductor     [1, 4, 0, 0]
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 setuptools
venv/bin/python -W ignore - <<'END'
import sys

import torch


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 1))
        self.register_buffer("length", torch.tensor([0]))

    def forward(self, key):
        self.keys.index_copy_(0, self.length, key)
        self.length.add_(1)
        return self.keys.clone()


def program():
    return torch.export.export(Cache(), (torch.ones(1, 1),))


package = torch._inductor.aoti_compile_and_package(program(), package_path="cache.pt2")
models = {
    "torch.export": program().module(),
    "torch.compile": torch.compile(Cache()),
    "AOTInductor": torch._inductor.aoti_load_package(package),
}
seen = {}
for name, model in models.items():
    for number in (1.0, 2.0, 3.0, 4.0):
        slots = model(torch.full((1, 1), number))
    seen[name] = slots.flatten().int().tolist()
    print(f"{name:15} {seen[name]}")
if list(seen.values()) != [[1, 2, 3, 4], [1, 2, 3, 4], [1, 4, 0, 0]]:
    sys.exit("changed: AOTInductor updates a position that lives in a buffer")
END
