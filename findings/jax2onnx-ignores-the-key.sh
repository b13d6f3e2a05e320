#!/bin/sh
# jax2onnx 0.17.0: a converted sampler ignores its key, and two draws with different keys are equal.
#
# jax.random.categorical becomes ONNX's Multinomial with seed 0, and the key becomes an input that nothing reads. With
# onnxruntime 1.32.0, the draw depends only on how often the session has run: the same key gives different tokens at
# every call, and each new session starts the same sequence over, whatever the key. Since every Multinomial has seed 0,
# two draws in one graph return the same tokens. There is no warning. (The script converts to opset 21. From opset 22
# on, the sampler becomes a RandomUniformLike, also with seed 0, which onnxruntime does not implement yet.
# openvino-multinomial-repeats.sh shows what OpenVINO makes of a Multinomial.)
#
# It matters because the seed no longer chooses the text: every session begins with the same one, and two samples that
# should be independent are identical. Make the noise outside of the graph: pass jax.random.gumbel(key, logits.shape)
# as an input, and take the argmax of logits + noise. That gives the tokens of jax.
#
# Seen (Linux x86-64, Python 3.11), 12 tokens from a and from b, which have different keys; b's is always the same:
#                                jax                           onnxruntime
#   key 7                        133230223213 321223223023     021232020023 021232020023
#   key 7 again                  133230223213 321223223023     222301313303 222301313303
#   key 8                        232333223122 321223223023     121030212001 121030212001
#   key 8 in a new session       232333223122 321223223023     021232020023 021232020023
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq jax2onnx==0.17.0 jax==0.10.2 flax==0.12.8 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
JAX_PLATFORMS=cpu ORT_DISABLE_TELEMETRY=1 venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import jax
import numpy as np
import onnxruntime
from jax2onnx import to_onnx

KEYS = [np.array([0, i], np.uint32) for i in range(9)]
logits = np.log(np.tile(np.float32([0.1, 0.2, 0.3, 0.4]), (12, 1)))


def sample(key_a, key_b, logits):
    return jax.random.categorical(key_a, logits), jax.random.categorical(key_b, logits)


shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (KEYS[0], KEYS[0], logits)]
onnx_model = to_onnx(sample, shapes, opset=21).SerializeToString()


def new_session():
    session = onnxruntime.InferenceSession(onnx_model, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return lambda *arrays: session.run(None, dict(zip(names, arrays)))


def draw(sampler, i):
    """Return a's tokens with key i, and b's with key 1."""
    return ["".join(map(str, np.asarray(tokens).tolist())) for tokens in sampler(KEYS[i], KEYS[1], logits)]


first, second = new_session(), new_session()
rows = {
    "key 7": (draw(sample, 7), draw(first, 7)),
    "key 7 again": (draw(sample, 7), draw(first, 7)),
    "key 8": (draw(sample, 8), draw(first, 8)),
    "key 8 in a new session": (draw(sample, 8), draw(second, 8)),
}
print(f"{'':29}{'jax':30}onnxruntime")
for name, (expected, converted) in rows.items():
    print("{:29}{:30}{}".format(name, " ".join(expected), " ".join(converted)))


def same(draws):
    """Compare a's tokens with one key, with two keys in two sessions, and a's with b's."""
    seven, seven_again, eight, eight_in_new_session = (a for a, _ in draws)
    return seven == seven_again, seven == eight_in_new_session, all(a == b for a, b in draws)


in_jax, converted = map(same, zip(*rows.values()))
if in_jax != (True, False, False) or converted != (False, True, True):
    sys.exit("changed: what a converted sampler does with its key")
END
