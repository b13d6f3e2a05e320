#!/bin/sh
# Rows of docs/elsewhere.md: jax 0.10.2 and flax 0.12.8. "causal" as the keys that the last of 1 and of 3 queries sees,
# of 5; the tokens in the 4 slots of a flax cache after 7, and the 4 slots of an array after a write past its end; and
# which arrays share the memory of a tensor of torch 2.13.0.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq jax==0.10.2 flax==0.12.8 torch==2.13.0
venv/bin/python - <<'END'
import sys

import jax
import jax.numpy as jnp
import torch
from flax import linen, nnx


def sees(**settings):
    """Return how many keys the last of 1 and of 3 queries sees: all weights are equal, and key j has the value 5**j."""
    result = []
    for queries in (1, 3):
        q, k = jnp.zeros((1, queries, 1, 16)), jnp.zeros((1, 5, 1, 16))
        value = jnp.broadcast_to((5.0 ** jnp.arange(5))[None, :, None, None], k.shape)
        y = jax.nn.dot_product_attention(q, k, value, **settings)[0, -1, 0, 0]
        result += [n for n in range(1, 6) if jnp.isclose(y, value[0, :n, 0, 0].mean())]
    return result


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


def shares_memory(copy):
    source = torch.zeros(1 << 14)
    result = jax.block_until_ready(copy(source))
    source[:] = 1
    return float(result[0]) == 1


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
seen = {
    "jax.nn.dot_product_attention": sees(),
    "jax.nn.dot_product_attention key_value_seq_lengths=3": sees(key_value_seq_lengths=three),
    "the same with is_causal": sees(key_value_seq_lengths=three, is_causal=True),
    "jax.nn.dot_product_attention is_causal": sees(is_causal=True),
    "jax.nn.dot_product_attention local_window_size=(4, 0)": sees(local_window_size=(4, 0)),
    "flax nnx, decode and is_causal: every step equals the first": nnx_causal(),
    "flax nnx: tokens in the slots": nnx_overflow(),
    "flax nnx: a chunk of 3": nnx_chunk(),
    "flax nnx: exact after cache_index was set back": nnx_rollback(),
    "flax linen: tokens in the slots": linen_overflow(),
    ".at[4].set": empty.at[4].set(1).tolist(),
    ".at[3 and 4].set": empty.at[jnp.arange(3, 5)].set(tokens).tolist(),
    "lax.dynamic_update_slice of 2 tokens at 3": jax.lax.dynamic_update_slice(empty, tokens, (3,)).tolist(),
    "jax.numpy.from_dlpack shares memory with a tensor": shares_memory(jnp.from_dlpack),
    "jax.numpy.array shares memory with a tensor": shares_memory(jnp.array),
}
causal = [[5, 5], [3, 3], [1, 3], [1, 3], [1, 3]]
of_flax = [True, [0, 1, 2, 6], "Autoregressive cache shape error", True, [0, 1, 2, 6]]
of_jax = [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], True, False]
expected = dict(zip(seen, causal + of_flax + of_jax))
print("\n".join(f"{name:70} {result}" for name, result in seen.items()))
if changed := [name for name, result in seen.items() if result != expected[name]]:
    sys.exit(f"changed: {changed}")
END
