# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.2", "flax==0.12.8"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""jax 0.10.2 and flax 0.12.8: is_causal starts in the top left, and a full cache overwrites its last slot.

Causal is shown as the keys that each of 1 and of 3 queries sees, of 5. The caches of flax and the arrays have four
slots. With decode=True, flax's nnx.MultiHeadAttention has a cache, and is_causal then shows every step only token 0.
"""

from report import report, sees

import jax
import jax.numpy as jnp
from flax import linen, nnx


def causal(**settings):
    def attend(*qkv):
        q, k, v = (jnp.asarray(array.swapaxes(1, 2)) for array in qkv)  # batch, tokens, heads, head size
        return jax.nn.dot_product_attention(q, k, v, **settings)

    return [sees(attend, 1), sees(attend, 3)]


x = jax.random.normal(jax.random.key(0), (1, 7, 4))


def slots(cached, keys):
    return [t for row in cached[0] for t in range(7) if jnp.allclose(row, keys[0, t], atol=1e-5)]


def nnx_layer(size=4):
    layer = nnx.MultiHeadAttention(num_heads=1, in_features=4, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((1, size, 4))
    return layer


def nnx_causal():
    layer = nnx_layer()
    steps = [layer(x[:, t : t + 1], is_causal=True) for t in range(4)]
    return all(jnp.array_equal(step, steps[0]) for step in steps)


def nnx_overflow():
    layer = nnx_layer()
    for t in range(7):
        layer(x[:, t : t + 1])
    return slots(layer.cached_key[...], layer.key(x))


def nnx_rollback():
    """Return whether token 4 is as in a fresh cache after tokens 0 to 5, with the index set back to 4."""
    layer, fresh = nnx_layer(7), nnx_layer(7)
    for t in (0, 1, 2, 3, 6, 5):
        layer(x[:, t : t + 1])
    layer.cache_index[...] = jnp.array(4, layer.cache_index[...].dtype)
    for t in range(4):
        fresh(x[:, t : t + 1])
    return jnp.allclose(layer(x[:, 4:5]), fresh(x[:, 4:5]), atol=1e-5).item()


def nnx_chunk():
    try:
        return nnx_layer()(x[:, :3]).shape
    except ValueError as error:
        return str(error).partition(",")[0]


def linen_overflow():
    layer = linen.MultiHeadDotProductAttention(num_heads=1, decode=True)
    variables = layer.init(jax.random.key(1), x[:, :4])
    cache = variables["cache"]
    for t in range(7):
        _, cache = layer.apply({"params": variables["params"], "cache": cache}, x[:, t : t + 1], mutable=["cache"])
        cache = cache["cache"]
    key = variables["params"]["key"]
    return slots(cache["cached_key"], jnp.einsum("btd,dhe->bthe", x, key["kernel"]) + key["bias"])


three, empty, tokens = jnp.array([3]), jnp.zeros(4, int), jnp.ones(2, int)
top_left = [[1], [1, 2, 3]]
report(
    {
        "jax.nn.dot_product_attention": (causal(), [[5], [5, 5, 5]]),
        "key_value_seq_lengths=3": (causal(key_value_seq_lengths=three), [[3], [3, 3, 3]]),
        "key_value_seq_lengths=3, is_causal": (causal(key_value_seq_lengths=three, is_causal=True), top_left),
        "is_causal": (causal(is_causal=True), top_left),
        "local_window_size=(4, 0)": (causal(local_window_size=(4, 0)), top_left),
        "flax nnx, decode and is_causal: every step equals the first": (nnx_causal(), True),
        "flax nnx: tokens in the slots after 7": (nnx_overflow(), [0, 1, 2, 6]),
        "flax nnx: a chunk of 3": (nnx_chunk(), "Autoregressive cache shape error"),
        "flax nnx: exact after cache_index was set back": (nnx_rollback(), True),
        "flax linen: tokens in the slots after 7": (linen_overflow(), [0, 1, 2, 6]),
        ".at[4].set": (empty.at[4].set(1).tolist(), [0, 0, 0, 0]),
        ".at[3 and 4].set": (empty.at[jnp.arange(3, 5)].set(tokens).tolist(), [0, 0, 0, 1]),
        "lax.dynamic_update_slice of 2 tokens at 3": (
            jax.lax.dynamic_update_slice(empty, tokens, (3,)).tolist(),
            [0, 0, 1, 1],
        ),
    }
)
