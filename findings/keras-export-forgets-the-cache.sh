#!/bin/sh
# keras 3.15.1: model.export keeps a KV cache in two formats and drops it in two others.
#
# A decode layer has its cache and its position as weights, and assigns to them in every step. model.export writes it
# in four formats. The SavedModel and the LiteRT file behave like the model. The ONNX and OpenVINO files load and run,
# but have no state: their weights are constants, so every step writes to slot 0 of an empty cache. The only hint is
# the log of tf2onnx, which names the assignments that it removed. OpenVINO's conversion says nothing.
#
# It matters because the first step is correct in all four, so a test of one step passes. For ONNX and OpenVINO, make
# the cache an input and an output of the model, and compare three steps. (onnx-export-forgets-buffers.sh is about the
# export of torch.)
#
# Seen with the backend tensorflow (Linux x86-64, Python 3.11), the cache that steps 1, 2 and 3 return:
#   the model        1 0 0 0, 1 2 0 0, 1 2 3 0
#   tf_saved_model   1 0 0 0, 1 2 0 0, 1 2 3 0
#   litert           1 0 0 0, 1 2 0 0, 1 2 3 0
#   onnx             1 0 0 0, 2 0 0 0, 3 0 0 0
#   openvino         1 0 0 0, 2 0 0 0, 3 0 0 0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq keras==3.15.1 tensorflow==2.21.0 ai-edge-litert==2.3.0 tf2onnx==1.17.0 onnxruntime==1.32.0 \
    openvino==2026.4.1 scipy numpy==2.4.6
export KERAS_BACKEND=tensorflow CUDA_VISIBLE_DEVICES='' TF_CPP_MIN_LOG_LEVEL=3 ORT_DISABLE_TELEMETRY=1
OPENVINO_TELEMETRY=0 venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

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


loaders = {
    "tf_saved_model": ("saved", load_saved_model),
    "litert": ("model.tflite", load_litert),
    "onnx": ("model.onnx", load_onnx),
    "openvino": ("model.xml", load_openvino),
}
token = keras.Input((1,), batch_size=1)
model = keras.Model(token, Cache()(token))
seen = {}
for format, (path, load) in loaders.items():
    model.export(path, format=format, verbose=False)
    seen[format] = three_steps(load(path))
seen = {"the model": three_steps(model), **seen}
for name, steps in seen.items():
    print(f"{name:17}{steps}")
kept, dropped = "1 0 0 0, 1 2 0 0, 1 2 3 0", "1 0 0 0, 2 0 0 0, 3 0 0 0"
if list(seen.values()) != [kept, kept, kept, dropped, dropped]:
    sys.exit("changed: in which formats model.export keeps a cache")
END
