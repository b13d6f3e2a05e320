# /// script
# requires-python = ">=3.11"
# dependencies = ["mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""mlx 0.32.4, mlx-lm 0.32.2: causal ends in the bottom right, and a full RotatingKVCache cannot be trimmed.

Also: what the caches do when they are full, cut back or padded on the left, a write past the end of an array with
four slots, what shares memory, and how RoPE layouts and frequencies convert.

Upstream: ml-explore/mlx-lm#1512 (RotatingKVCache.trim).
"""

from report import report, sees

import mlx.core as mx
from mlx_lm.models import gpt2
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache, trim_prompt_cache


def causal(*qkv):
    q, k, v = map(mx.array, qkv)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal")


def filled(cache, tokens):
    """Feed single tokens, and return what the slots hold then."""
    for token in range(tokens):
        keys, _ = cache.update_and_fetch(*2 * [mx.full((1, 1, 1, 1), token)])
    return keys[0, 0, :, 0].astype(mx.int32).tolist()


mx.random.seed(0)
sizes = {"n_ctx": 64, "n_positions": 64, "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 50}
model = gpt2.Model(gpt2.ModelArgs("gpt2", layer_norm_epsilon=1e-5, **sizes))
ids = mx.random.randint(0, 50, (1, 41))


def exact(a, b):
    return mx.abs(a - b).max().item() < 1e-4


def exact_after_trim(make):
    """Prefill 40 tokens, trim(8), feed one more token, and compare with a fresh prefill."""
    cache = [make() for _ in range(2)]
    model(ids[:, :40], cache)
    for layer in cache:
        layer.trim(8)
    left = cache[0].offset
    fresh = [make() for _ in range(2)]
    model(ids[:, :left], fresh)
    return exact(model(ids[:, 40:], cache)[:, -1], model(ids[:, 40:], fresh)[:, -1])


def trimmed(cache, tokens, n):
    """Return what trim(n) returns after that many tokens."""
    filled(cache, tokens)
    return cache.trim(n)


def exact_with_padding():
    long, short = ids[:, :9], ids[:, 20:25]
    batch = mx.concatenate([mx.concatenate([mx.zeros((1, 4), ids.dtype), short], axis=1), long])
    cache, alone = [BatchKVCache([4, 0]) for _ in range(2)], [KVCache() for _ in range(2)]
    prefill = exact(model(batch, cache)[0, -1], model(short, alone)[0, -1])
    return prefill and exact(model(mx.array([[7], [7]]), cache)[0, -1], model(mx.array([[7]]), alone)[0, -1])


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
inv_freq = 500000.0 ** (-mx.arange(0, 8, 2) / 8)

full = [RotatingKVCache(16) for _ in range(2)]
model(ids[:, :40], full)
report(
    {
        'scaled_dot_product_attention mask="causal"': ([sees(causal, 1), sees(causal, 3)], [[5], [3, 4, 5]]),
        "KVCache: tokens in the slots after 5": (filled(KVCache(), 5), [0, 1, 2, 3, 4]),
        "RotatingKVCache(4): tokens in the slots after 5": (filled(RotatingKVCache(4, keep=0), 5), [4, 1, 2, 3]),
        "trim_prompt_cache of a full RotatingKVCache returns": (trim_prompt_cache(full, 8), 0),
        "RotatingKVCache.trim(8) of a full cache returns": (full[0].trim(8), 8),
        "RotatingKVCache.trim(8): exact": (exact_after_trim(lambda: RotatingKVCache(16)), False),
        "KVCache.trim(8): exact": (exact_after_trim(KVCache), True),
        "KVCache.trim(50) of 40 returns": (trimmed(KVCache(), 40, 50), 40),
        "BatchKVCache, left padding, learned positions: exact": (exact_with_padding(), True),
        "slots[4:5] = 1 token": (written(4, 1), [0, 0, 0, 0]),
        "slots[3:5] = 2 tokens": (written(3, 2), "ValueError"),
        "saved = slots changes with slots": (changes(lambda slots: slots), True),
        "saved = slots[:] changes with slots": (changes(lambda slots: slots[:]), False),
        "rope, halves permuted to pairs: exact": (
            exact(rope(x)[..., pairs], rope(x[..., pairs], traditional=True)),
            True,
        ),
        "rope, freqs=inv_freq: exact": (exact(rope(x), rope(x, base=None, freqs=inv_freq)), False),
        "rope, freqs=1 / inv_freq: exact": (exact(rope(x), rope(x, base=None, freqs=1 / inv_freq)), True),
    }
)
