# /// script
# requires-python = ">=3.11"
# dependencies = ["tensorflow==2.21.0", "ai-edge-litert==2.3.0", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""ai-edge-litert 2.3.0, tensorflow 2.21.0: reset_all_variables() leaves a KV cache as it is.

A decode step with its cache and its position in two tf.Variables is converted to LiteRT. Between two prompts, neither
reset_all_variables() nor allocate_tensors() changes them, because a tf.Variable becomes a resource, which both skip,
so the second prompt continues the first. The file also contains what the cache held when it was converted. Give the
model a second signature that assigns zeros, and call it before every prompt, including the first.
"""

from report import report

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


def slots(numbers):
    return " ".join((numbers.split() + ["0"] * SLOTS)[:SLOTS])


rows = {}
for kind in (Interpreter, tf.lite.Interpreter):
    name = kind.__module__.partition(".")[0]
    interpreter = new_interpreter(kind, model)
    rows[f"{name}: step 1"] = step(interpreter, 1), slots("1")
    rows[f"{name}: step 2"] = step(interpreter, 2), slots("1 2")
    interpreter.reset_all_variables()
    rows[f"{name}: reset_all_variables, step 3"] = step(interpreter, 3), slots("1 2 3")
    interpreter.allocate_tensors()
    rows[f"{name}: allocate_tensors, step 4"] = step(interpreter, 4), slots("1 2 3 4")
    rows[f"{name}: new interpreter, step 5"] = step(new_interpreter(kind, model), 5), slots("5")
    rows[f"{name}: converted after step 9, step 5"] = step(new_interpreter(kind, tried_before), 5), slots("9 5")
    interpreter.get_signature_runner("reset")()
    rows[f"{name}: reset as a signature, step 6"] = step(interpreter, 6), slots("6")
report(rows)
