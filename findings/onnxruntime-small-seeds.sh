#!/bin/sh
# onnxruntime 1.32.0: small seeds are nearly the same seed, and every session of a process draws the same noise.
#
# Each random operator has its own generator, C++'s default_random_engine, seeded with set_seed's number plus the index
# of its node. On Linux this engine multiplies the seed by 16807, so the first number after a seed s is about s * 8e-6,
# below 0.008 for all seeds below 1,000. Seeds 0 and 1 are equal, and an operator draws with seed s + 1 what the next
# one draws with s. Each session starts from the same seed again, even if none was set, and set_seed changes only
# sessions that are created later.
#
# It matters if you sample with seeds 0, 1, 2: with Gumbel noise in the graph, the first token of the first text is
# almost never token 0, a newline in most character vocabularies. And two sessions, say one per user, answer a prompt
# with the same text. Make the noise an input. A large random seed helps, too, or a first run that you throw away.
#
# Seen (Linux x86-64, Python 3.11):
#   RandomUniform, seeds 0, 1, 2, 500: first number        0.00001 0.00001 0.00002 0.00391
#   the same, computed with Python integers                0.00001 0.00001 0.00002 0.00391
#   seeds 0 and 1 draw the same                            True
#   operator 2 with seed 7 is operator 1 with seed 8       True
#   two sessions without a seed draw the same              True
#   token 0 of two equal ones, 1,000 seeds, first draw     3
#   the same, second draw                                  502
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
ORT_DISABLE_TELEMETRY=1 venv/bin/python - <<'END'
import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

onnxruntime.set_default_logger_severity(4)
node, value = helper.make_node, helper.make_tensor_value_info


def serialized(nodes, outputs):
    graph = helper.make_graph(nodes, "g", [value("logits", TensorProto.FLOAT, [1, 2])], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return model.SerializeToString()


uniform = serialized(
    [node("RandomUniformLike", ["logits"], [name]) for name in ("first", "second")],
    [value(name, TensorProto.FLOAT, [1, 2]) for name in ("first", "second")],
)
sampler = serialized(
    [
        node("RandomUniformLike", ["logits"], ["u"]),
        node("Log", ["u"], ["log"]),
        node("Neg", ["log"], ["exponential"]),
        node("Log", ["exponential"], ["negative"]),
        node("Sub", ["logits", "negative"], ["noisy"]),
        node("ArgMax", ["noisy"], ["token"], axis=1, keepdims=0),
    ],
    [value("token", TensorProto.INT64, [1])],
)
logits = {"logits": np.zeros((1, 2), np.float32)}


def session(model, seed=None):
    if seed is not None:
        onnxruntime.set_seed(seed)
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def draw(seed=None):
    return session(uniform, seed).run(None, logits)


def first_by_hand(seed):
    """The first number of minstd_rand0, which replaces a seed of 0 with 1."""
    return (16807 * max(seed, 1) % (2**31 - 1) - 1) / (2**31 - 2)


def numbers(function):
    return " ".join(f"{function(seed):.5f}" for seed in (0, 1, 2, 500))


unseeded = draw(), draw()
samplers = [session(sampler, seed) for seed in range(1000)]
zeros = [sum(int(s.run(None, logits)[0][0] == 0) for s in samplers) for _ in range(2)]
seen = {
    "RandomUniform, seeds 0, 1, 2, 500: first number": numbers(lambda seed: draw(seed)[0][0, 0]),
    "the same, computed with Python integers": numbers(first_by_hand),
    "seeds 0 and 1 draw the same": np.array_equal(draw(0)[0], draw(1)[0]),
    "operator 2 with seed 7 is operator 1 with seed 8": np.array_equal(draw(7)[1], draw(8)[0]),
    "two sessions without a seed draw the same": np.array_equal(unseeded[0], unseeded[1]),
    "token 0 of two equal ones, 1,000 seeds, first draw": zeros[0],
    "the same, second draw": zeros[1],
}
for name, what in seen.items():
    print(f"{name:55}{what}")
if list(seen.values()) != [numbers(first_by_hand)] * 2 + [True] * 3 + [3, 502]:
    sys.exit("changed: what small seeds draw in onnxruntime")
END
