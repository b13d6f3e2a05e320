# /// script
# requires-python = ">=3.11"
# dependencies = ["openvino==2026.4.1", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""openvino 2026.4.1: reordering the cache by beam_idx changes which keys causal shows, and stores the cache in 8 bits.

Two stateful models consist of ReadValue, Concat, ScaledDotProductAttention with causal, and Assign. One of them also
gathers its past by beam_idx, as exported LLMs do, which is always 0 here. This makes OpenVINO fuse the cache into the
attention: a new token then sees the whole text, without it only the oldest key (the top left of the specification).
The fused cache has 8 bits unless you set KV_CACHE_PRECISION. The first call is exact in both. Pass a mask instead of
causal.
"""

from report import report

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
        counts = []
        for i in range(tokens):
            errors = [abs(y[:, i] - first(n, query[:, i], keys, values)).max() for n in range(1, keys.shape[1] + 1)]
            counts.append(str(np.argmin(errors) + 1) if min(errors) < 0.02 else "?")
        seen.append(" ".join(counts))
    states = {state.name: state.state.data for state in request.query_state()}
    return [*seen, float(max(abs(states["key"][0] - keys).max(), abs(states["value"][0] - values).max()))]


print("the keys that each of 3, 1 and 2 new queries sees, and the error of the cache")
report(
    {
        "without beam_idx": (run(False), ["1 2 3", "1", "1 2", 0.0]),
        "with beam_idx": (run(True), ["1 2 3", "4", "5 6", 0.011]),
        "with it and KV_CACHE_PRECISION": (run(True, KV_CACHE_PRECISION="f32"), ["1 2 3", "4", "5 6", 0.0]),
    }
)
