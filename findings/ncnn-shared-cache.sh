#!/bin/sh
# ncnn 1.0.20261020: two continuations of one KV cache overwrite each other.
#
# SDPA with a cache (7=1) takes keys and values and returns longer ones, which look like new arrays. But it reserves
# room for more tokens, and the next step writes into the room of its input. If two steps start from the same cache,
# both results hold the token of the second. Only when the room is full, here after 16 tokens, does a step make a copy.
#
# It matters for several samples or beams of one prompt, and for a prompt that is computed once and kept: the first step
# of each branch is correct, the second reads the other branch's token. A test with a prompt of exactly 16 tokens sees
# nothing. ncnn's guide says that branches need caches of their own, but not how to make one: clone() copies only the
# rows in use, and keys are packed in blocks of 16 tokens. `copied`, below, copies the reserved rows as well.
#
# Seen (Linux x86-64, Python 3.11), largest difference between the second step of the first branch and numpy:
#   tokens in the prompt                     5      15      16      17
#   same cache                           4e-01   5e-01   9e-08   2e-01
#   same cache, the other's token        1e-07   1e-07   2e-01   1e-07
#   copied                               1e-07   1e-07   1e-07   2e-07
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq ncnn==1.0.20261020 numpy==2.4.6
venv/bin/python - <<'END'
import sys

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
    return abs(y - expected).max(), abs(y - mixed).max()


lengths = (5, 15, 16, 17)
shared = [branch(length, lambda cache: cache) for length in lengths]
copies = [branch(length, copied) for length in lengths]
rows = {
    "same cache": [alone for alone, _ in shared],
    "same cache, the other's token": [mixed for _, mixed in shared],
    "copied": [alone for alone, _ in copies],
}
print(f"{'tokens in the prompt':34}" + "".join(f"{length:8}" for length in lengths))
for name, row in rows.items():
    print(f"{name:34}" + "".join(f"{error:8.0e}" for error in row))
correct = [[error < 1e-5 for error in row] for row in rows.values()]
if correct != [[False, False, True, False], [True, True, False, True], 4 * [True]]:
    sys.exit("changed: which tokens a continued cache of ncnn holds")
END
