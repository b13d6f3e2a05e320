# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "torch==2.13.0", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""jax 0.10.2: on a CPU, from_dlpack with copy=True and device_put may share memory with torch and numpy.

The documentation promises a copy whenever copy=True. But if the array starts at a multiple of 64 bytes, as a new
torch tensor and the data of np.load do, a later write to it changes the "immutable" jax array. At any other address
jax copies. from_dlpack of numpy and torch, and jnp.array and jnp.asarray of a numpy array, always copied. jax 0.8.0
copied with copy=True, 0.8.1 to 0.12.0.1 share.
"""

from report import report

import jax
import jax.numpy as jnp
import numpy as np
import torch

N = 1 << 16


def shares(make, copy):
    """Return whether a copy changes with its source."""
    source = make()
    result = copy(source)
    if isinstance(result, jax.Array):
        result.block_until_ready()
    source[:] = 9
    return float(result[0]) == 9


def aligned(offset):
    """Return a numpy array that starts that many bytes after a multiple of 64."""
    raw = np.zeros(4 * N + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + 4 * N].view(np.float32)


def from_file():
    np.save("zeros.npy", np.zeros(N, np.float32))
    return np.load("zeros.npy", mmap_mode="r+")


def from_dlpack(library):
    return lambda source: library.from_dlpack(source, copy=True)


report(
    {
        f"{library.__name__}.from_dlpack(copy=True): a new tensor, one that starts at [1:]": (
            [shares(lambda start=start: torch.zeros(N)[start:], from_dlpack(library)) for start in (0, 1)],
            [shared, False],
        )
        for library, shared in ((jax.dlpack, True), (jnp, True), (np, False), (torch, False))
    }
    | {
        "jnp.from_dlpack of a new tensor": (shares(lambda: torch.zeros(N), jnp.from_dlpack), True),
        "jnp.array of a new tensor": (shares(lambda: torch.zeros(N), jnp.array), False),
    }
    | {
        f"{name}: numpy at offset 0, 16, from np.load": (
            [shares(make, call) for make in (lambda: aligned(0), lambda: aligned(16), from_file)],
            expected,
        )
        for name, call, expected in (
            ("jax.device_put", jax.device_put, [True, False, True]),
            ("jnp.asarray", jnp.asarray, [False, False, False]),
        )
    }
)
