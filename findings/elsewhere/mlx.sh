#!/bin/sh
# Rows of docs/elsewhere.md: mlx 0.32.4 and mlx-lm 0.32.2. "causal" as the keys that the last of 1 and of 3 queries
# sees, of 5; its caches when they are full, cut back, and padded on the left; the 4 slots of an array after a write
# past its end; and RoPE.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "mlx[cpu]==0.32.4" mlx-lm==0.32.2
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import sys

import mlx.core as mx
from mlx_lm.models import gpt2
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, trim_prompt_cache


def causal():
    """Return how many keys the last of 1 and of 3 queries sees: all weights are equal, and key j has the value 5**j."""
    result = []
    for queries in (1, 3):
        q, k = mx.zeros((1, 1, queries, 16)), mx.zeros((1, 1, 5, 16))
        value = mx.broadcast_to((5.0 ** mx.arange(5))[None, None, :, None], k.shape)
        y = mx.fast.scaled_dot_product_attention(q, k, value, scale=1.0, mask="causal")[0, 0, -1, 0]
        result += [n for n in range(1, 6) if mx.allclose(y, value[0, 0, :n, 0].mean()).item()]
    return result


def filled(cache, tokens):
    """Feed single tokens, and return what the slots hold then."""
    for token in range(tokens):
        keys, _ = cache.update_and_fetch(*2 * [mx.full((1, 1, 1, 1), token)])
    return keys[0, 0, :, 0].astype(mx.int32).tolist()


mx.random.seed(0)
sizes = {"n_ctx": 64, "n_positions": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 50}
args = gpt2.ModelArgs("gpt2", layer_norm_epsilon=1e-5, **sizes)
model = gpt2.Model(args)
ids = mx.random.randint(0, 50, (1, 41))


def off(a, b):
    return mx.abs(a - b).max().item()


def after_trim(make):
    """Return how far logits are off after a prefill of 40 tokens, trim(8) and one more token."""
    cache = [make() for _ in range(2)]
    model(ids[:, :40], cache)
    for layer in cache:
        layer.trim(8)
    left = cache[0].offset
    fresh = [make() for _ in range(2)]
    model(ids[:, :left], fresh)
    return off(model(ids[:, 40:], cache)[:, -1], model(ids[:, 40:], fresh)[:, -1])


def left_padding():
    long, short = ids[:, :9], ids[:, 20:25]
    batch = mx.concatenate([mx.concatenate([mx.zeros((1, 4), ids.dtype), short], axis=1), long])
    cache, alone = [BatchKVCache([4, 0]) for _ in range(2)], [KVCache() for _ in range(2)]
    prefill = off(model(batch, cache)[0, -1], model(short, alone)[0, -1])
    step = off(model(mx.array([[7], [7]]), cache)[0, -1], model(mx.array([[7]]), alone)[0, -1])
    return max(prefill, step)


def written(start, tokens):
    slots = mx.zeros(4, mx.int32)
    try:
        slots[start : start + tokens] = mx.ones(tokens, mx.int32)
    except ValueError as error:
        return type(error).__name__
    return slots.tolist()


def changes(copy):
    """Return whether a copy of an array changes when the array is written to."""
    slots = mx.zeros(4)
    saved = copy(slots)
    slots[:1] = 1
    return saved[0].item() == 1


def rope(x, **settings):
    return mx.fast.rope(x, 8, **{"traditional": False, "base": 500000.0, "scale": 1.0, "offset": 10} | settings)


x = mx.random.normal((1, 2, 5, 8))  # row i goes to 2i, row i + 4 to 2i + 1
pairs = mx.array([0, 4, 1, 5, 2, 6, 3, 7])
inverse = 500000.0 ** (-mx.arange(0, 8, 2) / 8)

full = [RotatingKVCache(16) for _ in range(2)]
model(ids[:, :40], full)
seen = {
    'mx.fast.scaled_dot_product_attention mask="causal"': causal(),
    "KVCache: tokens in the slots after 5": filled(KVCache(), 5),
    "RotatingKVCache(4): tokens in the slots after 5": filled(RotatingKVCache(4, keep=0), 5),
    "trim_prompt_cache of a full RotatingKVCache returns": trim_prompt_cache(full, 8),
    "RotatingKVCache.trim(8) of a full cache returns": full[0].trim(8),
    "RotatingKVCache.trim(8): logits off": after_trim(lambda: RotatingKVCache(16)) > 0.01,
    "KVCache.trim(8): logits off": after_trim(KVCache) > 1e-4,
    "KVCache.trim(50) of 40 returns": filled(trimmed := KVCache(), 40) and trimmed.trim(50),
    "BatchKVCache, left padding, learned positions: logits off": left_padding() > 1e-4,
    "slots[4:5] = 1 token": written(4, 1),
    "slots[3:5] = 2 tokens": written(3, 2),
    "saved = slots changes with slots": changes(lambda slots: slots),
    "saved = slots[:] changes with slots": changes(lambda slots: slots[:]),
    "rope, halves permuted to pairs: off": off(rope(x)[..., pairs], rope(x[..., pairs], traditional=True)) > 1e-4,
    "rope, freqs=inv_freq: off": off(rope(x), rope(x, base=None, freqs=inverse)) > 1e-4,
    "rope, freqs=1 / inv_freq: off": off(rope(x), rope(x, base=None, freqs=1 / inverse)) > 1e-4,
}
of_caches = [[5, 5], [0, 1, 2, 3, 4], [4, 1, 2, 3], 0, 8, True, False, 40, False]
of_arrays = [[0, 0, 0, 0], "ValueError", True, False, False, True, False]
expected = dict(zip(seen, of_caches + of_arrays))
print("\n".join(f"{name:70} {result}" for name, result in seen.items()))
if changed := [name for name, result in seen.items() if result != expected[name]]:
    sys.exit(f"changed: {changed}")
END
