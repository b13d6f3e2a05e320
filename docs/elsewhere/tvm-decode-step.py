# /// script
# requires-python = ">=3.11"
# dependencies = ["apache-tvm==0.27.0.post1", "torch==2.13.0", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""apache-tvm 0.27.0.post1 with torch 2.13.0: in an imported decode step, writes to a cache in a buffer are dropped.

from_exported_program accepts the module without a warning, but every step is the first. An integer position times or
divided by a Python float stays an integer, too. Make the cache an input and an output, and write position.float().
"""

from report import cache_in_buffers, report

import copy

import torch
import tvm
from tvm.relax.frontend.torch import from_exported_program


class Quarter(torch.nn.Module):
    def forward(self, position):
        return position / 4


def three_calls(module, x):
    """Return the sums of three results of the module in torch, and of three after the import into TVM."""
    imported = from_exported_program(torch.export.export(copy.deepcopy(module), (x,)))
    main = tvm.relax.VirtualMachine(tvm.compile(imported, target="llvm"), tvm.cpu())["main"]
    arg = tvm.runtime.tensor(x.numpy())
    return [module(x).sum().item() for _ in range(3)], [main(arg)[0].numpy().sum().item() for _ in range(3)]


steps, position = three_calls(cache_in_buffers(torch.zeros(8)), torch.ones(1)), three_calls(Quarter(), torch.tensor(3))
report(
    {
        "tokens in the cache, torch": (steps[0], [1.0, 2.0, 3.0]),
        "tokens in the cache, TVM": (steps[1], [1.0, 1.0, 1.0]),
        "position 3 divided by 4, torch": (position[0], [0.75, 0.75, 0.75]),
        "position 3 divided by 4, TVM": (position[1], [0, 0, 0]),
    }
)
