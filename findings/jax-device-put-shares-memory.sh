#!/bin/sh
# jax 0.10.2: on a CPU, jax.device_put of a numpy array may share its memory, depending on its address.
#
# If the array starts at a multiple of 64 bytes, device_put copies nothing, and a later write to the numpy array changes
# the "immutable" jax array. At any other address it copies. jnp.asarray and jnp.array always copied here.
#
# It matters because np.save aligns its data to 64 bytes, so an array from np.load(..., mmap_mode=...) is always shared,
# and np.empty is only sometimes: a buffer of tokens that is refilled for every batch changes the batch before it, on
# some runs. Use jnp.array.
#
# Seen (Linux x86-64, Python 3.11), the first element after the numpy array was set to 9:
#   offset  0 from a multiple of 64: device_put 9.0, jnp.asarray 0.0
#   offset 16 from a multiple of 64: device_put 0.0, jnp.asarray 0.0
#   np.load with mmap_mode="r+":     device_put 9.0, jnp.asarray 0.0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq jax==0.10.2 numpy==2.4.6
venv/bin/python - <<'END'
import sys

import jax
import jax.numpy as jnp
import numpy as np

N = 1 << 16


def aligned(offset):
    """Return N zeros that start offset bytes after a multiple of 64."""
    raw = np.zeros(4 * N + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + 4 * N].view(np.float32)


def from_file():
    np.save("zeros.npy", np.zeros(N, np.float32))
    return np.load("zeros.npy", mmap_mode="r+")


def first_after_write(make, to_jax):
    array = make()
    copy = jax.block_until_ready(to_jax(array))
    array[:] = 9
    return float(copy[0])


seen = {}
for name, make in {
    "offset  0 from a multiple of 64:": lambda: aligned(0),
    "offset 16 from a multiple of 64:": lambda: aligned(16),
    'np.load with mmap_mode="r+":': from_file,
}.items():
    seen[name] = [first_after_write(make, to_jax) for to_jax in (jax.device_put, jnp.asarray)]
    print(f"{name:32} device_put {seen[name][0]}, jnp.asarray {seen[name][1]}")
if list(seen.values()) != [[9, 0], [0, 0], [9, 0]]:
    sys.exit("changed: when jax.device_put shares memory with numpy")
END
