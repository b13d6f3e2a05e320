#!/bin/sh
# keras-hub 0.32.0: with the cache, GPTNeoXCausalLM gives every new query position 0.
#
# The prompt is correct, because its positions begin at 0. In a decode step the query is rotated by position 0 again,
# while the keys have their own positions, so it looks at the wrong distances.
#
# It matters because generate() always uses the cache: the text is that of a different model, and training and scoring,
# which use no cache, look fine.
#
# Seen (Linux x86-64, Python 3.11):
#   prompt: logits off by 0.00
#   next token: logits off by 1.44
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq keras-hub==0.32.0 keras==3.15.1 jax==0.10.2
KERAS_BACKEND=jax venv/bin/python - > out <<'END'
import keras
from keras_hub.models import GPTNeoXBackbone, GPTNeoXCausalLM

keras.utils.set_random_seed(0)
sizes = dict(vocabulary_size=64, num_layers=2, num_heads=4, hidden_dim=64, intermediate_dim=128, max_sequence_length=64)
model = GPTNeoXCausalLM(backbone=GPTNeoXBackbone(**sizes, dropout=0), preprocessor=None)
for weight in model.weights:
    if len(weight.shape) > 1:
        weight.assign(keras.random.normal(weight.shape, stddev=0.2))
ids = keras.random.randint((1, 40), 0, 64)
without = model({"token_ids": ids, "padding_mask": keras.ops.ones_like(ids)})
logits, _, cache = model.call_with_cache(ids[:, :16], keras.ops.zeros((1, 2, 2, 40, 4, 16)), 0)
print(f"prompt: logits off by {float(keras.ops.max(keras.ops.abs(logits - without[:, :16]))):.2f}")
logits, _, cache = model.call_with_cache(ids[:, 16:17], cache, 16)
print(f"next token: logits off by {float(keras.ops.max(keras.ops.abs(logits - without[:, 16:17]))):.2f}")
END
cat out
if ! { grep -q "prompt: logits off by 0.00" out && ! grep -q "next token: logits off by 0.00" out; }; then
    echo "changed: keras-hub-gpt-neox-cache" >&2
    exit 1
fi
