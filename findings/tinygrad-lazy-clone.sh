#!/bin/sh
# tinygrad 0.14.0: a clone of the KV cache that is read after the next step has the next step's keys.
#
# clone() promises a separate buffer, but it is lazy like everything else: it copies when it is first read. An assign
# that was realized in between, by a step inside or outside TinyJit, has then already written the new key, and the clone
# has it, too. contiguous() and x + 0 do the same. There is no warning, and a clone that is realized at once is a copy.
#
# It matters if you keep a cache before draft tokens are checked, or share a prompt's cache between two continuations:
# going back restores what you wanted to get rid of. Write cache.clone().realize().
#
# Seen (Linux x86-64, Python 3.11), a cache of zeros, kept, then a step that writes 1, then the kept cache is read:
#                              assign   TinyJit
#   cache.clone()                   1         1
#   cache.contiguous()              1         1
#   cache + 0                       1         1
#   cache.clone().realize()         0         0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq tinygrad==0.14.0
DEV=PYTHON CACHELEVEL=0 venv/bin/python - <<'END'
import sys

from tinygrad import Tensor, TinyJit

keep = {
    "cache.clone()": lambda cache: cache.clone(),
    "cache.contiguous()": lambda cache: cache.contiguous(),
    "cache + 0": lambda cache: cache + 0,
    "cache.clone().realize()": lambda cache: cache.clone().realize(),
}


def kept_after_step(how, jit):
    cache = Tensor.zeros(4).contiguous().realize()

    def step(key):
        return cache[0:1].assign(key).realize()

    if jit:
        step = TinyJit(step)
        for _ in range(3):  # the second call captures
            step(Tensor([0.0]).realize())
    kept = how(cache)
    step(Tensor([1.0]).realize())
    assert cache.tolist() == [1, 0, 0, 0]
    return int(kept.tolist()[0])


seen = {name: [kept_after_step(how, jit) for jit in (False, True)] for name, how in keep.items()}
print(f"{'':23}     assign   TinyJit")
for name, row in seen.items():
    print(f"{name:23} " + "".join(f"{first:10}" for first in row))
if list(seen.values()) != [[1, 1]] * 3 + [[0, 0]]:
    sys.exit("changed: when tinygrad's clone() copies")
END
