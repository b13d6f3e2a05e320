#!/bin/sh
# ai-edge-litert 2.3.0, tensorflow 2.21.0: reset_all_variables() leaves a KV cache as it is.
#
# A decode step with its cache and its position in two tf.Variables is converted to LiteRT. Between two prompts,
# Interpreter.reset_all_variables() changes nothing, and neither does allocate_tensors(): the second text is appended
# to the first and sees its tokens. A tf.Variable is converted to a resource, which both calls skip. The same is true
# of tf.lite.Interpreter. The file also contains what the cache held when it was converted, so if you tried the model
# before, even a new interpreter does not start empty.
#
# It matters because nothing fails: the second prompt is answered as if it continued the first. Give the model a second
# signature that assigns zeros, and call it before every prompt, including the first.
#
# Seen (Linux x86-64, Python 3.11), the slots of the cache after step N has written the number N:
#   step 1                           1 0 0 0 0 0 0 0
#   step 2                           1 2 0 0 0 0 0 0
#   reset_all_variables, step 3      1 2 3 0 0 0 0 0
#   allocate_tensors, step 4         1 2 3 4 0 0 0 0
#   new interpreter, step 5          5 0 0 0 0 0 0 0
#   converted after step 9, step 5   9 5 0 0 0 0 0 0
#   reset as a signature, step 6     6 0 0 0 0 0 0 0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq tensorflow==2.21.0 ai-edge-litert==2.3.0 numpy==2.4.6
CUDA_VISIBLE_DEVICES='' TF_CPP_MIN_LOG_LEVEL=3 venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

SLOTS = 8


class Decoder(tf.Module):
    def __init__(self):
        self.cache = tf.Variable(tf.zeros(SLOTS))
        self.position = tf.Variable(0)

    @tf.function(input_signature=[tf.TensorSpec([], name="x")])
    def step(self, x):
        """Write x to the next slot, and return the cache."""
        self.cache.assign(tf.where(tf.range(SLOTS) == self.position, x, self.cache))
        self.position.assign_add(1)
        return {"y": self.cache.read_value()}

    @tf.function(input_signature=[])
    def reset(self):
        self.cache.assign(tf.zeros(SLOTS))
        self.position.assign(0)
        return {"position": self.position.read_value()}


def convert(decoder):
    tf.saved_model.save(decoder, "saved", signatures={"step": decoder.step, "reset": decoder.reset})
    return tf.lite.TFLiteConverter.from_saved_model("saved").convert()


def new_interpreter(kind, model):
    interpreter = kind(model_content=model)
    interpreter.allocate_tensors()
    return interpreter


def step(interpreter, x):
    y = interpreter.get_signature_runner("step")(x=np.float32(x))["y"]
    return " ".join(str(int(slot)) for slot in y)


decoder = Decoder()
model = convert(decoder)
decoder.step(9.0)
tried_before = convert(decoder)
seen = {}
for kind in (Interpreter, tf.lite.Interpreter):
    interpreter = new_interpreter(kind, model)
    rows = {"step 1": step(interpreter, 1), "step 2": step(interpreter, 2)}
    interpreter.reset_all_variables()
    rows["reset_all_variables, step 3"] = step(interpreter, 3)
    interpreter.allocate_tensors()
    rows["allocate_tensors, step 4"] = step(interpreter, 4)
    rows["new interpreter, step 5"] = step(new_interpreter(kind, model), 5)
    rows["converted after step 9, step 5"] = step(new_interpreter(kind, tried_before), 5)
    interpreter.get_signature_runner("reset")()
    rows["reset as a signature, step 6"] = step(interpreter, 6)
    seen[kind] = list(rows.values())
for name, slots in rows.items():
    print(f"{name:33}{slots}")
expected = ["1", "1 2", "1 2 3", "1 2 3 4", "5", "9 5", "6"]
expected = [" ".join((slots.split() + ["0"] * SLOTS)[:SLOTS]) for slots in expected]
if any(slots != expected for slots in seen.values()):
    sys.exit("changed: what resets a cache in LiteRT")
END
