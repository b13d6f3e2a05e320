#!/bin/sh
# jax 0.10.2: on a CPU, jnp.from_dlpack(x, copy=True) shares the memory of x instead of copying it.
#
# The documentation promises a copy whenever copy=True, even on the same device. But if x starts at a multiple of 64
# bytes, as a new torch tensor does, a later write to x changes the "immutable" jax array. At any other address it is a
# copy, and numpy.from_dlpack and torch.from_dlpack always copy. jax 0.8.0 did so, too; 0.8.1 to 0.12.0.1 share.
#
# It matters if you hand torch's KV cache to jax: a snapshot made with copy=True changes with torch's next step. Use
# jnp.array(x). (jax-device-put-shares-memory.sh is about device_put, which promises no copy.)
#
# Seen (Linux x86-64, Python 3.11), the first element after the source was set to 9:
#                              jax.dlpack    jnp   numpy   torch
#   a new tensor                        9      9       0       0
#   a new tensor from [1:]              0      0       0       0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq jax==0.10.2 torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'END'
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch


def first_after_write(library, start):
    cache = torch.zeros(1024)[start:]
    copy = library.from_dlpack(cache, copy=True)
    if isinstance(copy, jax.Array):
        copy.block_until_ready()
    cache.fill_(9)
    return int(copy[0])


seen = {}
print(27 * " " + "jax.dlpack    jnp   numpy   torch")
for start, name in enumerate(("a new tensor", "a new tensor from [1:]")):
    seen[name] = [first_after_write(library, start) for library in (jax.dlpack, jnp, np, torch)]
    print("{:27}{:10}{:7}{:8}{:8}".format(name, *seen[name]))
if list(seen.values()) != [[9, 9, 0, 0], [0, 0, 0, 0]]:
    sys.exit("changed: when from_dlpack(copy=True) copies")
END
