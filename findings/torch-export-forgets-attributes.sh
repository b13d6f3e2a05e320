#!/bin/sh
# torch 2.13.0: torch.export accepts a cache that grows with torch.cat, and drops it.
#
# A cache kept as a Python attribute (self.keys = torch.cat((self.keys, key))), or a position kept as a Python number,
# is a constant of the exported program. There is no error, and only strict=True warns of "certain side effects": every
# call starts from the empty cache again. A buffer that is changed in place works.
#
# It matters because this is how most short implementations write a cache, and because the first step is correct.
#
# Seen (Linux x86-64, Python 3.11), keys that each of three steps sees:
#   the model itself     1 2 3
#   strict=False         1 1 1
#   strict=True          1 1 1
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6
venv/bin/python -W ignore - <<'END'
import sys

import torch


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = torch.zeros(0, 2)

    def forward(self, key):
        self.keys = torch.cat((self.keys, key))
        return self.keys.sum(dim=0)


key = torch.ones(1, 2)
models = {
    "the model itself": Cache(),
    "strict=False": torch.export.export(Cache(), (key,), strict=False).module(),
    "strict=True": torch.export.export(Cache(), (key,), strict=True).module(),
}
seen = {name: [int(model(key)[0]) for _ in range(3)] for name, model in models.items()}
for name, keys in seen.items():
    print(f"{name:20}", *keys)
if list(seen.values()) != [[1, 2, 3], [1, 1, 1], [1, 1, 1]]:
    sys.exit("changed: torch.export keeps a cache in an attribute, or refuses it")
END
