# /// script
# requires-python = ">=3.11"
# dependencies = ["mindspore==2.10.0", "numpy==1.26.4"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""mindspore 2.10.0 on a CPU: under jit, a cache keeps k[i:i+1, :] = key and forgets k[i:i+1] = key.

The cache is a Parameter of a Cell. Eagerly, every way to write a slot keeps it. Compiled with jit or in GRAPH_MODE it
depends on the spelling. A write that is lost is visible until the end of its call, so a step sees its own key, but no
step sees an earlier one. Compare two steps with eager mode, or give ops.assign the whole cache.
"""

from report import report

import importlib
import sys

import mindspore as ms
import numpy as np

sys.path.insert(0, "")  # cells are written to the working folder
ms.set_device("CPU")
WRITES = (
    "k[i] = key",
    "k[i:i+1] = key",
    "k[i:i+1, :] = key",
    "k[i, :] = key",
    "k[..., i, :] = key",
    "k[ops.arange(4) == i] = key[0]",
    "k[self.n] = key; self.n += 1",
)
# jit reads a cell's source, so that it has to be in a file.
CELL = """
import numpy as np
from mindspore import Parameter, Tensor, jit, nn, ops

class Cache(nn.Cell):
    def __init__(self):
        super().__init__()
        self.k = Parameter(Tensor(np.zeros((4, 2), np.float32)), requires_grad=False)
        self.n = 0

    {decorator}
    def construct(self, key, i):
        self.{write}
        return self.k.sum()
"""


def filled_slots(number, write, decorator="", mode=ms.PYNATIVE_MODE):
    name = f"cache_{number}_{mode}_{decorator[1:]}"
    with open(name + ".py", "w") as file:
        file.write(CELL.format(write=write, decorator=decorator))
    importlib.invalidate_caches()
    ms.set_context(mode=mode)
    cache = importlib.import_module(name).Cache()
    key = ms.Tensor(np.ones(2, np.float32))
    for i in range(3):
        assert cache(key, i).asnumpy() >= 2, "a step does not see its own key"
    return int(cache.k.asnumpy().sum()) // 2


def three_modes(number, write):
    eager, jit = filled_slots(number, write), filled_slots(number, write, "@jit")
    return [eager, jit, filled_slots(number, write, mode=ms.GRAPH_MODE)]


print("filled slots after three steps: eager, jit, graph")
expected = zip(WRITES, (3, 0, 3, 0, 3, 0, 0))
report({write: (three_modes(n, write), [3, kept, kept]) for n, (write, kept) in enumerate(expected)})
