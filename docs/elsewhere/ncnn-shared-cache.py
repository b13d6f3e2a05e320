# /// script
# requires-python = ">=3.11"
# dependencies = ["ncnn==1.0.20261020", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""ncnn 1.0.20261020: two continuations of one KV cache overwrite each other.

SDPA with a cache (7=1) returns longer keys and values, which look like new arrays. But it reserves room for more
tokens, and the next step writes into the room of its input. If two steps start from the same cache, both results hold
the token of the second. Only when the room is full, here after 16 tokens, does a step copy. ncnn's guide says that
branches need caches of their own, but not how to make one: clone() copies only the rows in use. copied(), below,
copies all.
"""

from report import report

import ncnn
import numpy as np

GRAPH = """7767517
5 8
Input q 0 1 q
Input k 0 1 k
Input v 0 1 v
Input past 0 2 past_k past_v
SDPA attention 5 3 q k v past_k past_v y new_k new_v 7=1
"""
HEADS, SIZE = 2, 8
open("empty.bin", "wb").close()
net = ncnn.Net()
net.load_param_mem(GRAPH)
net.load_model("empty.bin")
rng = np.random.default_rng(0)


def tokens(n):
    """Return queries, keys and values of n tokens."""
    return rng.normal(size=(3, HEADS, n, SIZE)).astype(np.float32)


def step(qkv, cache):
    """Feed one token. Returns its output and the new cache."""
    extractor = net.create_extractor()
    arrays = [np.ascontiguousarray(array) for array in qkv]
    for name, array in zip("qkv", arrays):
        extractor.input(name, ncnn.Mat(array))
    extractor.input("past_k", cache[0])
    extractor.input("past_v", cache[1])
    y, k, v = (extractor.extract(name, 1)[1] for name in ("y", "new_k", "new_v"))  # type 1, as the guide says
    return np.array(y).copy(), (k, v)


def in_numpy(qkv):
    """Return what the last token attends to, without a cache."""
    q, k, v = qkv
    weights = np.exp(q[:, -1:] @ k.swapaxes(1, 2) / np.sqrt(SIZE))
    return weights / weights.sum(-1, keepdims=True) @ v


def copied(cache):
    copies = []
    for array in cache:
        whole = ncnn.Mat(array)  # the same memory, so that array.h stays
        whole.h = array.cstep // array.w
        copy = whole.clone()
        copy.h = array.h
        copies.append(copy)
    return copies


def branch(length, fork):
    prompt, first, other = tokens(length), tokens(2), tokens(1)
    cache = (ncnn.Mat(), ncnn.Mat())
    for i in range(length):
        _, cache = step(prompt[:, :, i : i + 1], cache)
    ours, theirs = fork(cache), fork(cache)
    _, ours = step(first[:, :, :1], ours)
    step(other, theirs)
    y, _ = step(first[:, :, 1:], ours)
    expected = in_numpy(np.concatenate((prompt, first), axis=2))
    mixed = in_numpy(np.concatenate((prompt, other, first[:, :, 1:]), axis=2))
    return float(abs(y - expected).max()), float(abs(y - mixed).max())


shared, copies = ([branch(length, fork) for length in (5, 15, 16, 17)] for fork in (lambda cache: cache, copied))
print("5, 15, 16 and 17 tokens in the prompt: is the second step of the first branch that of numpy?")
report(
    {
        "same cache": ([own < 1e-5 for own, _ in shared], [False, False, True, False]),
        "same cache, the other's token": ([other < 1e-5 for _, other in shared], [True, True, False, True]),
        "copied": ([own < 1e-5 for own, _ in copies], 4 * [True]),
    }
)
