#!/bin/sh
# mindspore 2.10.0 on a CPU: under jit, a cache keeps k[i] = key and forgets k[i:i+1] = key when the call is over.
#
# The cache is a Parameter of a Cell. Eagerly, every way to write a slot keeps it. Compiled with jit or in GRAPH_MODE,
# which the documentation says supports all of these indices, it depends on the spelling: k[i:i+1, :] is kept, and
# k[i:i+1] is not. A write that is lost is visible until the end of its call, so a step sees its own key, but no step
# sees an earlier one. A position in a Python attribute stays at 0, and its writes are lost, too. Nothing warns.
#
# It matters because a prefill that writes k[:T] is lost, because one call never shows it, and because a colon that
# means nothing elsewhere decides. Compare two steps with eager mode, or give ops.assign the whole cache.
#
# Seen (Linux x86-64, Python 3.11), filled slots of a cache of shape (tokens, size) after three steps:
#                                     eager       jit     graph
#   k[i] = key                            3         3         3
#   k[i:i+1] = key                        3         0         0
#   k[i:i+1, :] = key                     3         3         3
#   k[i, :] = key                         3         0         0
#   k[..., i, :] = key                    3         3         3
#   k[ops.arange(4) == i] = key[0]        3         0         0
#   k[self.n] = key; self.n += 1          3         0         0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq mindspore==2.10.0 numpy==1.26.4
GLOG_v=3 venv/bin/python -W ignore - <<'END'
import importlib
import sys

import mindspore as ms
import numpy as np

sys.path.insert(0, ".")
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


seen = []
print(f"{'':30}     eager       jit     graph")
for n, write in enumerate(WRITES):
    seen.append([filled_slots(n, write), filled_slots(n, write, "@jit"), filled_slots(n, write, mode=ms.GRAPH_MODE)])
    print(f"{write:30}{seen[-1][0]:10}{seen[-1][1]:10}{seen[-1][2]:10}")
if seen != [[3, kept, kept] for kept in (3, 0, 3, 0, 3, 0, 0)]:
    sys.exit("changed: which writes to a cache mindspore keeps under jit")
END
