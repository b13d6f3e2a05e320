# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "keras==3.15.1", "keras-hub==0.32.0", "jax==0.10.2", "torch==2.13.0", "tensorflow==2.21.0",
#     "ai-edge-litert==2.3.0", "numpy==2.4.6",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""keras 3.15.1, keras-hub 0.32.0, ai-edge-litert 2.3.0: causal starts in the top left, and full caches overwrite.

Causal is shown as the keys that each of 1 and of 3 queries sees, of 5. slice_update at slot 4 of 4 overwrites the
last slot on jax and tensorflow, and does nothing on torch. keras-hub's GPT-2 reads padding on the left as text.
"""

from report import report, sees

import json
import os
import subprocess
import sys

import keras
import keras_hub
import numpy as np

layers = keras.layers
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)


def slots_of_keras():
    """Return four slots after a write to slot 4."""
    cache = keras.ops.reshape(keras.ops.arange(4, dtype="float32"), (1, 4, 1))
    slots = keras.ops.slice_update(cache, (0, 4, 0), keras.ops.full((1, 1, 1), 9.0))
    return keras.ops.convert_to_numpy(slots).flatten().astype(int).tolist()


def slots_of_litert():
    """Return the same from the DYNAMIC_UPDATE_SLICE that keras on tensorflow is converted to."""
    import tensorflow as tf
    from ai_edge_litert.interpreter import Interpreter

    write = tf.function(lambda cache, token, slot: keras.ops.slice_update(cache, (slot, 0), token))
    specs = tf.TensorSpec((4, 1)), tf.TensorSpec((1, 1)), tf.TensorSpec((), tf.int32)
    model = tf.lite.TFLiteConverter.from_concrete_functions([write.get_concrete_function(*specs)]).convert()
    interpreter = Interpreter(model_content=model)
    interpreter.allocate_tensors()
    values = {(4, 1): np.arange(4, dtype=np.float32)[:, None], (1, 1): np.float32([[9]]), (): np.int32(4)}
    for tensor in interpreter.get_input_details():
        interpreter.set_tensor(tensor["index"], values[tuple(tensor["shape"])])
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).flatten().astype(int).tolist()


def on(backend, function):
    """Run a function of this script in a process of its own, because keras chooses its backend when it is imported."""
    environment = os.environ | {"KERAS_BACKEND": backend}
    command = [sys.executable, __file__, function.__name__]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


if len(sys.argv) > 1:
    print({"slots_of_keras": slots_of_keras, "slots_of_litert": slots_of_litert}[sys.argv[1]]())
    sys.exit()


def causal(*qkv):
    q, k, v = (array.swapaxes(1, 2) for array in qkv)  # batch, tokens, heads, head size
    return keras.ops.dot_product_attention(q, k, v, is_causal=True)


def layer_sees(layer):
    """Return how many keys one query sees, from the attention scores."""
    q, k = rng.normal(size=(1, 1, 8)).astype(np.float32), rng.normal(size=(1, 5, 8)).astype(np.float32)
    inputs = ([q, k],) if isinstance(layer, layers.Attention) else (q, k)  # AdditiveAttention is one, too
    _, scores = layer(*inputs, use_causal_mask=True, return_attention_scores=True)
    return int((np.asarray(scores).reshape(-1, 5)[0] > 1e-6).sum())


def overflow():
    """Return which of 5 tokens is in the last of 4 slots."""
    layer = keras_hub.layers.CachedMultiHeadAttention(num_heads=1, key_dim=4)
    x = rng.normal(size=(1, 5, 4)).astype(np.float32)
    cache = np.zeros((1, 2, 4, 1, 4), np.float32)
    layer.build(x.shape, x.shape)
    for t in range(5):
        _, cache = layer(x[:, t : t + 1], x[:, t : t + 1], cache=cache, cache_update_index=t)
    keys = np.asarray(layer._key_dense(x))[0]
    return [t for t in range(5) if np.allclose(np.asarray(cache)[0, 0, 3], keys[t], atol=1e-5)]


def padded_on_the(side):
    """Return whether logits of a short prompt are those that it gets alone."""
    model = keras_hub.models.GPT2Backbone(50, 2, 2, 32, 64, max_sequence_length=32)
    ids = rng.integers(1, 50, size=(1, 5))
    width = ((0, 0), (4, 0) if side == "left" else (0, 4))
    alone = model({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    batch = model({"token_ids": np.pad(ids, width), "padding_mask": np.pad(np.ones_like(ids), width)})
    batch = np.asarray(batch)[:, 4:] if side == "left" else np.asarray(batch)[:, :5]
    return bool(np.abs(batch - np.asarray(alone)).max() < 1e-3)


report(
    {
        "keras.ops.dot_product_attention is_causal": ([sees(causal, 1), sees(causal, 3)], [[1], [1, 2, 3]]),
        "MultiHeadAttention use_causal_mask, 1 query": (layer_sees(layers.MultiHeadAttention(1, 8)), 1),
        "GroupQueryAttention use_causal_mask, 1 query": (layer_sees(layers.GroupQueryAttention(8, 1, 1)), 1),
        "Attention use_causal_mask, 1 query": (layer_sees(layers.Attention()), 1),
        "AdditiveAttention use_causal_mask, 1 query": (layer_sees(layers.AdditiveAttention()), 1),
        "keras-hub CachedMultiHeadAttention: last of 4 slots after 5 tokens": (overflow(), [4]),
        "keras-hub GPT-2, padded on the right: as alone": (padded_on_the("right"), True),
        "keras-hub GPT-2, padded on the left: as alone": (padded_on_the("left"), False),
        "jax, slice_update at slot 4 of 4": (on("jax", slots_of_keras), [0, 1, 2, 9]),
        "tensorflow, slice_update at slot 4 of 4": (on("tensorflow", slots_of_keras), [0, 1, 2, 9]),
        "torch, slice_update at slot 4 of 4": (on("torch", slots_of_keras), [0, 1, 2, 3]),
        "LiteRT, DYNAMIC_UPDATE_SLICE at slot 4 of 4": (on("tensorflow", slots_of_litert), [0, 1, 2, 9]),
    }
)
