#!/bin/sh
# mlx 0.32.4 on a CPU: mx.softmax in bfloat16 sums to far more than 1.
#
# The sum of the exponentials stays in the dtype of the input. A bfloat16 sum of ones stops growing at 256, so with more
# than 256 equal scores the probabilities are too large. softmax(..., precise=True) sums in float32, and
# mx.fast.scaled_dot_product_attention is correct, too. In float16 the same happens at 2,048.
#
# It matters because attention written out by hand is correct for a short cache and then scales its output up as the
# cache grows: 4 times at 1,024 keys, 64 times at 16,384. Probabilities over a vocabulary are off in the same way.
#
# Seen (Linux x86-64, Python 3.11, the CPU backend):
#     256 equal scores: the softmax sums to 1.0, precise 1.0, attention by hand over values of 1 gives 1.0, fused 1.0
#    1024 equal scores: the softmax sums to 4.0, precise 1.0, attention by hand over values of 1 gives 4.0, fused 1.0
#   16384 equal scores: the softmax sums to 64.0, precise 1.0, attention by hand over values of 1 gives 64.0, fused 1.0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "mlx[cpu]==0.32.4"
venv/bin/python - <<'END'
import sys

import mlx.core as mx

mx.set_default_device(mx.cpu)
by_hand = {}
for keys in (256, 1_024, 16_384):
    q = mx.zeros((1, 1, 1, 8), mx.bfloat16)
    k, v = (make((1, 1, keys, 8), mx.bfloat16) for make in (mx.zeros, mx.ones))
    weights = mx.softmax(q @ k.swapaxes(-1, -2), axis=-1)
    precise = mx.softmax(q @ k.swapaxes(-1, -2), axis=-1, precise=True)
    by_hand[keys] = (weights @ v)[0, 0, 0, 0].item()
    fused = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0)[0, 0, 0, 0].item()
    total, precise = (w.astype(mx.float32).sum().item() for w in (weights, precise))
    print(
        f"{keys:5} equal scores: the softmax sums to {total}, precise {precise},"
        f" attention by hand over values of 1 gives {by_hand[keys]}, fused {fused}"
    )
if not (by_hand[256] == 1 and by_hand[16_384] > 8):
    sys.exit("changed: mx.softmax in bfloat16 sums to about 1 on the CPU")
END
