#!/bin/sh
# keras-hub 0.32.0: in bfloat16, SinePositionEncoding gives neighbouring positions the same code.
#
# The layer counts positions in its compute dtype. bfloat16 has 8 bits, so above 256 it cannot tell neighbours apart:
# from 1,000 on, 64 positions have 12 codes between them. RotaryEmbedding of the same library counts in float32.
#
# It matters because nothing shows it at the start of a text. Under the policy "bfloat16" or "mixed_bfloat16", order is
# lost a little more with every doubling of the context. Give the layer dtype="float32".
#
# Seen (Linux x86-64, Python 3.11), different codes at 64 positions in a row:
#   from     0: float32 64, bfloat16 64
#   from   256: float32 64, bfloat16 33
#   from  1000: float32 64, bfloat16 12
#   from  4000: float32 64, bfloat16 5
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq keras-hub==0.32.0 keras==3.15.1 jax==0.10.2
KERAS_BACKEND=jax venv/bin/python - <<'END'
import sys

import keras
import numpy as np
from keras_hub.layers import SinePositionEncoding


def codes(dtype, start):
    """Count the different codes at 64 positions in a row."""
    layer = SinePositionEncoding(dtype=dtype)
    rows = layer(keras.ops.zeros((1, 64, 32), dtype), start_index=start)[0]
    return len(np.unique(np.asarray(rows.astype("float32")), axis=0))


seen = {}
for start in (0, 256, 1_000, 4_000):
    seen[start] = codes("float32", start), codes("bfloat16", start)
    print(f"from {start:5}: float32 {seen[start][0]}, bfloat16 {seen[start][1]}")
if not (seen[0] == (64, 64) and seen[4_000][0] == 64 and seen[4_000][1] < 16):
    sys.exit("changed: in bfloat16 every position has its own code")
END
