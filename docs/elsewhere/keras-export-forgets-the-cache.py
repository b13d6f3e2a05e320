# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "keras==3.15.1", "tensorflow==2.21.0", "ai-edge-litert==2.3.0", "tf2onnx==1.17.0", "onnxruntime==1.32.0",
#     "openvino==2026.4.1", "scipy==1.17.1", "numpy==2.4.6",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""keras 3.15.1 on tensorflow 2.21.0: model.export keeps a KV cache in two formats and drops it in two others.

A decode layer has its cache and its position as weights, and assigns to them in every step. The SavedModel and the
LiteRT file behave like the model. The ONNX and OpenVINO files load and run, but their weights are constants, so every
step writes to slot 0 of an empty cache, and a test of one step passes. Make the cache an input and an output.
"""

from report import report

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import onnxruntime
import openvino
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from keras import ops

SLOTS = 4


class Cache(keras.layers.Layer):
    """Write the input to the next slot, and return the cache."""

    def build(self, shape):
        self.cache = self.add_weight(shape=(1, SLOTS), initializer="zeros", trainable=False)
        self.position = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, x):
        cache = ops.where(ops.arange(SLOTS) == self.position, x, self.cache)
        self.cache.assign(cache)
        self.position.assign(self.position + 1)
        return cache

    def compute_output_shape(self, shape):
        return 1, SLOTS


def load_saved_model(path):
    saved = tf.saved_model.load(path)
    return lambda x: saved.serve(x)


def load_litert(path):
    interpreter = Interpreter(path)
    runner = interpreter.get_signature_runner()
    (name,) = runner.get_input_details()
    return lambda x: next(iter(runner(**{name: x}).values()))


def load_onnx(path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {session.get_inputs()[0].name: x})[0]


def load_openvino(path):
    request = openvino.Core().compile_model(path, "CPU").create_infer_request()
    return lambda x: request.infer([x])[0].copy()


def three_steps(step):
    answers = [np.asarray(step(np.full((1, 1), n, np.float32)))[0] for n in (1, 2, 3)]
    return ", ".join(" ".join(str(int(slot)) for slot in cache) for cache in answers)


token = keras.Input((1,), batch_size=1)
model = keras.Model(token, Cache()(token))
kept, dropped = "1 0 0 0, 1 2 0 0, 1 2 3 0", "1 0 0 0, 2 0 0 0, 3 0 0 0"
rows = {}
for format, path, load, expected in (
    ("tf_saved_model", "saved", load_saved_model, kept),
    ("litert", "model.tflite", load_litert, kept),
    ("onnx", "model.onnx", load_onnx, dropped),
    ("openvino", "model.xml", load_openvino, dropped),
):
    model.export(path, format=format, verbose=False)
    rows[format] = three_steps(load(path)), expected
rows["the model"] = three_steps(model), kept
print("what steps 1, 2 and 3 return")
report(rows)
