#!/bin/sh
# jax 0.10.2: jax.random.categorical on bfloat16 logits picks only small token ids.
#
# categorical adds Gumbel noise in the dtype of the logits. In bfloat16 the noise takes so few values that hundreds of
# tokens tie for the largest one, and argmax gives a tie to the smallest id. With 50,257 equal logits, 2,000 draws never
# go past token 922 of 50,256. mode="high" only helps in part. torch.multinomial and mlx draw from all ids.
#
# It matters because a model in bfloat16 hands its logits straight to categorical, and the text just looks a bit dull.
# Convert the logits to float32 first.
#
# Seen (Linux x86-64, Python 3.11):
#   float32   mean id 24701, largest 50212, different ids 1952
#   bfloat16  mean id   122, largest   922, different ids  410
#   float16   mean id   996, largest  6715, different ids 1343
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq jax==0.10.2
venv/bin/python - <<'END'
import sys

import jax
import jax.numpy as jnp

largest = {}
for dtype in ("float32", "bfloat16", "float16"):
    logits = jnp.zeros(50_257, dtype)
    keys = jax.random.split(jax.random.key(0), 2_000)
    ids = jax.jit(lambda keys: jax.lax.map(lambda key: jax.random.categorical(key, logits), keys))(keys)
    largest[dtype] = int(ids.max())
    print(f"{dtype:9} mean id {int(ids.mean()):5}, largest {ids.max():5}, different ids {len(jnp.unique(ids)):4}")
if not (largest["float32"] > 50_000 and largest["bfloat16"] < 2_000):
    sys.exit("changed: bfloat16 logits reach ids that they did not reach in jax 0.10.2")
END
