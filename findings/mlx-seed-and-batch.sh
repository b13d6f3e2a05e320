#!/bin/sh
# mlx 0.32.4: the first row of a batch draws a different token when the batch grows.
#
# Same seed, same logits in every row. In jax 0.10.2 and numpy 2.4.6 the first row draws the same token alone and
# in a batch of 8. In mlx the random numbers depend on the shape of the whole batch, so the token changes.
#
# It matters if you compare a sampled text with and without batching: in mlx a difference proves nothing about the
# cache. Draw each row with its own key (mx.random.split) and a shape of one row.
#
# Seen (Linux x86-64, Python 3.11), the first row's token in a batch of 1, 2, 4 and 8:
#   jax   [728, 728, 728, 728]
#   numpy [855, 855, 855, 855]
#   mlx   [418, 373, 390, 321]
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "mlx[cpu]==0.32.4" jax==0.10.2 numpy==2.4.6
venv/bin/python - <<'END'
import sys

import jax
import mlx.core as mx
import numpy as np

V = 1_000
draws = {
    "jax": lambda rows: jax.random.categorical(jax.random.key(0), jax.numpy.zeros((rows, V)))[0],
    "numpy": lambda rows: np.random.default_rng(0).gumbel(size=(rows, V)).argmax(1)[0],
    "mlx": lambda rows: mx.random.categorical(mx.zeros((rows, V)), key=mx.random.key(0))[0].item(),
}
seen = {name: [int(draw(rows)) for rows in (1, 2, 4, 8)] for name, draw in draws.items()}
for name, tokens in seen.items():
    print(f"{name:5} {tokens}")
if {name for name, tokens in seen.items() if len(set(tokens)) > 1} != {"mlx"}:
    sys.exit("changed: which libraries draw the first row independently of the batch")
END
