#!/bin/sh
# Rows of docs/elsewhere.md: jax 0.10.2 and flax 0.12.8. "causal" as the keys that the last of 1 and of 3 queries sees,
# of 5; and the tokens in the 4 slots of a flax cache after 7.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq jax==0.10.2 flax==0.12.8
venv/bin/python - <<'END'
import sys

import jax
import jax.numpy as jnp
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


def nnx_layer():
    layer = nnx.MultiHeadAttention(num_heads=1, in_features=4, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((1, 4, 4))
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


def linen_overflow():
    layer = linen.MultiHeadDotProductAttention(num_heads=1, decode=True)
    variables = layer.init(jax.random.key(1), x[:, :4])
    cache = variables["cache"]
    for t in range(7):
        _, cache = layer.apply({"params": variables["params"], "cache": cache}, x[:, t : t + 1], mutable=["cache"])
        cache = cache["cache"]
    key = variables["params"]["key"]
    return slots(cache["cached_key"], jnp.einsum("btd,dhe->bthe", x, key["kernel"]) + key["bias"])


seen = {
    "jax.nn.dot_product_attention is_causal": sees(is_causal=True),
    "jax.nn.dot_product_attention local_window_size=(4, 0)": sees(local_window_size=(4, 0)),
    "flax nnx, decode and is_causal: every step equals the first": nnx_causal(),
    "flax nnx: tokens in the slots": nnx_overflow(),
    "flax linen: tokens in the slots": linen_overflow(),
}
expected = dict(zip(seen, [[1, 3], [1, 3], True, [0, 1, 2, 6], [0, 1, 2, 6]]))
print("\n".join(f"{name:70} {result}" for name, result in seen.items()))
if changed := [name for name, result in seen.items() if result != expected[name]]:
    sys.exit(f"changed: {changed}")
END
