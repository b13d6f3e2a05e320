# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "setuptools==84.2.1"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0: a cache compiled with AOTInductor counts to 1 and overwrites the second slot for ever.

A module has two buffers, the keys and their number. In eager mode, under torch.compile and after torch.export it
fills slots 0, 1, 2, 3. Compiled ahead of time, the number is read as the constant that it was at compile time: the
first call writes slot 0, and all later calls slot 1. The first two tokens are correct, so a short check passes. Needs
a C++ compiler.

Upstream: pytorch/pytorch#165444.
"""

from report import cache_in_buffers, report

import torch


def program():
    return torch.export.export(cache_in_buffers(torch.zeros(4, 1)), (torch.ones(1, 1),))


package = torch._inductor.aoti_compile_and_package(program(), package_path="cache.pt2")
models = {
    "torch.export": program().module(),
    "torch.compile": torch.compile(cache_in_buffers(torch.zeros(4, 1))),
    "AOTInductor": torch._inductor.aoti_load_package(package),
}


def slots(model):
    """Return the cache after four calls."""
    for number in (1.0, 2.0, 3.0, 4.0):
        keys = model(torch.full((1, 1), number))
    return keys.flatten().int().tolist()


expected = {"torch.export": [1, 2, 3, 4], "torch.compile": [1, 2, 3, 4], "AOTInductor": [1, 4, 0, 0]}
report({name: (slots(model), expected[name]) for name, model in models.items()})
