#!/bin/sh
# openvino 2026.4.1: reordering the cache by beam_idx changes which keys `causal` shows, and stores the cache in 8 bits.
#
# Two stateful models on a CPU consist of ReadValue, Concat, ScaledDotProductAttention with causal, and Assign. One of
# them also gathers its past by beam_idx, as exported LLMs do. The index is always 0 here, so the reorder does nothing.
# But it makes OpenVINO fuse the cache into the attention, which changes what `causal` means: a new token sees the
# whole text, while without beam_idx it sees only the oldest key (the top left alignment of the specification). The
# fused cache also has 8 bits, even if INFERENCE_PRECISION_HINT is f32, unless you set KV_CACHE_PRECISION. The first
# call, on an empty cache, is exact in both models, so testing the prefill reveals nothing.
#
# It matters because the same decode step is correct with beam_idx and wrong without it. Pass a mask instead of causal:
# that gives the right keys in both.
#
# Seen (Linux x86-64, Python 3.11), with INFERENCE_PRECISION_HINT f32: the keys that each query sees
#                                  3 tokens   1 more   2 more   error of the cache
#   without beam_idx               1 2 3      1        1 2      0e+00
#   with beam_idx                  1 2 3      4        5 6      1e-02
#   with it, KV_CACHE_PRECISION    1 2 3      4        5 6      0e+00
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq openvino==2026.4.1 numpy==2.4.6
OPENVINO_TELEMETRY=0 venv/bin/python -W ignore - <<'END'
import sys

import numpy as np
import openvino
import openvino.opset13 as ops
from openvino.op.util import Variable, VariableInfo

HEADS, SIZE = 2, 16


def make_model(reorder):
    """Attention over a cache (batch, heads, tokens, size) that starts empty and keeps what each call brings."""
    inputs = [ops.parameter([-1, HEADS, -1, SIZE], np.float32) for _ in range(3)]
    beam_idx = ops.parameter([-1], np.int32)
    query, new, cache, writes = inputs[0], inputs[1:], [], []
    zero = ops.constant(np.int64(0))
    batch = ops.gather(ops.shape_of(query), ops.constant(np.array([0])), zero)
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, ops.constant(np.array([HEADS, 0, SIZE]))], 0))
    for name, tensor in zip(("key", "value"), new):
        info = VariableInfo()
        info.data_shape, info.data_type = openvino.PartialShape([-1, HEADS, -1, SIZE]), openvino.Type.f32
        info.variable_id = name
        variable = Variable(info)
        past = ops.read_value(empty, variable)
        if reorder:
            past = ops.gather(past, beam_idx, zero)
        cache.append(ops.concat([past, tensor], 2))
        writes.append(ops.assign(cache[-1], variable))
    y = ops.scaled_dot_product_attention(query, *cache, causal=True)
    return openvino.Model([ops.result(y)], writes, inputs + [beam_idx] * reorder)


def first(n, query, key, value):
    """Return one query's attention to the first n keys, by hand."""
    scores = np.einsum("hd,hnd->hn", query, key[:, :n]) / SIZE**0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hn,hnd->hd", weights / weights.sum(-1, keepdims=True), value[:, :n])


def run(reorder, **precision):
    config = {"INFERENCE_PRECISION_HINT": "f32", **precision}
    request = openvino.Core().compile_model(make_model(reorder), "CPU", config).create_infer_request()
    rng = np.random.default_rng(0)
    keys, values = np.zeros((2, HEADS, 0, SIZE), np.float32)
    seen = []
    for tokens in (3, 1, 2):
        query, key, value = rng.standard_normal((3, HEADS, tokens, SIZE), np.float32)
        keys, values = np.concatenate([keys, key], 1), np.concatenate([values, value], 1)
        arrays = [query[None], key[None], value[None]] + [np.zeros(1, np.int32)] * reorder
        y = request.infer(arrays)[0][0]
        seen.append("")
        for i in range(tokens):
            errors = [abs(y[:, i] - first(n, query[:, i], keys, values)).max() for n in range(1, keys.shape[1] + 1)]
            seen[-1] += f"{np.argmin(errors) + 1} " if min(errors) < 0.02 else "? "
    states = {state.name: state.state.data for state in request.query_state()}
    return *seen, max(abs(states["key"][0] - keys).max(), abs(states["value"][0] - values).max())


print(f"{'':31}{'3 tokens':11}{'1 more':9}{'2 more':9}error of the cache")
seen = {
    "without beam_idx": run(False),
    "with beam_idx": run(True),
    "with it, KV_CACHE_PRECISION": run(True, KV_CACHE_PRECISION="f32"),
}
for name, row in seen.items():
    print("{:31}{:11}{:9}{:9}{:.0e}".format(name, *row))
plain, fused, exact = seen.values()
if plain[:3] != ("1 2 3 ", "1 ", "1 2 ") or not fused[:3] == exact[:3] == ("1 2 3 ", "4 ", "5 6 "):
    sys.exit("changed: which keys a causal query sees with and without beam_idx")
if plain[3] or exact[3] or not 1e-3 < fused[3] < 0.1:
    sys.exit("changed: the precision of the cache with beam_idx")
END
