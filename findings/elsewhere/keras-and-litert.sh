#!/bin/sh
# Rows of docs/elsewhere.md: keras 3.15.1 and keras-hub 0.32.0 on jax, torch and tensorflow, and LiteRT 2.3.0.
# "causal" as the keys that the last of 1 and of 3 queries sees, of 5; a write to slot 4 of 4; left padding.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq keras==3.15.1 keras-hub==0.32.0 jax==0.10.2 torch==2.13.0 tensorflow==2.21.0 \
    ai-edge-litert==2.3.0
cat > slices.py <<'END'
import sys

import keras
import numpy as np

cache = keras.ops.reshape(keras.ops.arange(4, dtype="float32"), (1, 4, 1))
slots = keras.ops.slice_update(cache, (0, 4, 0), keras.ops.full((1, 1, 1), 9.0))
slots = keras.ops.convert_to_numpy(slots).flatten().astype(int).tolist()
print(f"{keras.backend.backend() + ', slice_update at slot 4 of 4':70} {slots}")
if slots != {"jax": [0, 1, 2, 9], "tensorflow": [0, 1, 2, 9], "torch": [0, 1, 2, 3]}[keras.backend.backend()]:
    sys.exit("changed: keras.ops.slice_update")
END
cat > lite.py <<'END'
import sys

import keras
import numpy as np
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
slots = interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).flatten().astype(int).tolist()
print(f"{'LiteRT, DYNAMIC_UPDATE_SLICE at slot 4 of 4':70} {slots}")
if slots != [0, 1, 2, 9]:
    sys.exit("changed: DYNAMIC_UPDATE_SLICE of LiteRT")
END
for backend in jax torch tensorflow; do
    KERAS_BACKEND=$backend TF_CPP_MIN_LOG_LEVEL=3 venv/bin/python slices.py 2> log || { tail -n 1 log; exit 1; }
done
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 venv/bin/python lite.py 2> log || { tail -n 1 log; exit 1; }
KERAS_BACKEND=jax TF_CPP_MIN_LOG_LEVEL=3 venv/bin/python - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import keras
import keras_hub
import numpy as np

layers = keras.layers
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)


def sees():
    """Return how many keys the last of 1 and of 3 queries sees: all weights are equal, and key j has the value 5**j."""
    result = []
    for queries in (1, 3):
        q, k = np.zeros((1, queries, 1, 16), np.float32), np.zeros((1, 5, 1, 16), np.float32)
        value = np.broadcast_to((5.0 ** np.arange(5, dtype=np.float32))[None, :, None, None], k.shape)
        y = np.asarray(keras.ops.dot_product_attention(q, k, value, is_causal=True))[0, -1, 0, 0]
        result += [n for n in range(1, 6) if np.isclose(y, value[0, :n, 0, 0].mean())]
    return result


def layer_sees(layer):
    """Return the same for one query, from the attention scores."""
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


seen = {
    "keras.ops.dot_product_attention is_causal": sees(),
    "MultiHeadAttention use_causal_mask, 1 query": layer_sees(layers.MultiHeadAttention(1, 8)),
    "GroupQueryAttention use_causal_mask, 1 query": layer_sees(layers.GroupQueryAttention(8, 1, 1)),
    "Attention use_causal_mask, 1 query": layer_sees(layers.Attention()),
    "AdditiveAttention use_causal_mask, 1 query": layer_sees(layers.AdditiveAttention()),
    "keras-hub CachedMultiHeadAttention: last of 4 slots after 5 tokens": overflow(),
    "keras-hub GPT-2, padded on the right: as alone": padded_on_the("right"),
    "keras-hub GPT-2, padded on the left: as alone": padded_on_the("left"),
}
expected = dict(zip(seen, [[1, 3], 1, 1, 1, 1, [4], True, False]))
print("\n".join(f"{name:70} {result}" for name, result in seen.items()))
if changed := [name for name, result in seen.items() if result != expected[name]]:
    sys.exit(f"changed: {changed}")
END
