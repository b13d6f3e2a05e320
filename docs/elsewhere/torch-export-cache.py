# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""torch 2.13.0: torch.export drops a cache in an attribute, and gives every module one cache in a buffer.

A cache that grows (self.keys = torch.cat((self.keys, key))) is a constant of the exported program: every call starts
from the empty cache again. Only strict=True warns of "certain side effects". A buffer that is changed in place is
kept, but program.module() does not copy it: two modules made from one program, and the model it was exported from,
share it, and a file saved later contains what was cached by then. Take copy.deepcopy(program.module()), and save
before the first step.
"""

from report import cache_in_buffers, report

import torch


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


key = torch.ones(1)
loose, strict = (torch.export.export(Attribute(), (key,), strict=strict).module() for strict in (False, True))
attribute, buffer = Attribute(), cache_in_buffers(torch.zeros(8))
program = torch.export.export(buffer, (key,))
first, second = program.module(), program.module()
rows = {
    "attribute, the model itself: keys that each of three steps sees": (three_steps(*3 * [attribute]), [1, 2, 3]),
    "attribute, strict=False": (three_steps(*3 * [loose]), [1, 1, 1]),
    "attribute, strict=True": (three_steps(*3 * [strict]), [1, 1, 1]),
    "buffer: first module, first module, second module": (three_steps(first, first, second), [1, 2, 3]),
    "buffer: tokens in the model that was exported": (buffer.length.item(), 3),
}
torch.export.save(program, "cache.pt2")
saved = torch.export.load("cache.pt2").module().length.item()
report(rows | {"buffer: tokens in a file that is saved now": (saved, 3)})
