#!/bin/sh
# Rows of docs/elsewhere.md: the full cache of gemma 3.3.0, and which numbers of a head are rotated together in gemma,
# equinox 0.13.8, keras-hub 0.32.0, penzai 0.2.5, mlx 0.32.4, transformers 5.24.0 and the ONNX reference 1.23.2.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "pip>=25.1"  # older ones take minutes to resolve gemma
venv/bin/pip install -qq gemma==3.3.0 jax==0.10.2 flax==0.12.8 tensorflow==2.21.0 equinox==0.13.8 penzai==0.2.5 \
    keras==3.15.1 keras-hub==0.32.0 "mlx[cpu]==0.32.4" onnx==1.23.2 torch==2.13.0 transformers==5.24.0
export KERAS_BACKEND=jax HF_HUB_OFFLINE=1 TF_CPP_MIN_LOG_LEVEL=3
venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import equinox
import jax
import jax.numpy as jnp
import keras_hub
import mlx.core as mx
import mlx.nn
import numpy as np
import torch
from gemma.gm.math._positional_embeddings import apply_rope
from gemma.gm.nn import _modules as gemma
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from penzai import pz
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

x = np.array([[1, 2, 3, 4], [1, 2, 3, 4]], np.float32)  # one head, positions 0 and 1, theta 10000
angles = np.outer(np.arange(2), [1, 0.01]).astype(np.float32)


def slots(*chunks):
    """Feed chunks of so many tokens to a cache of 4 slots, and return the position in each slot."""
    layer = gemma.Attention(1, 1, 8, 8, gemma.AttentionType.GLOBAL, query_pre_attn_scalar=1.0)
    tokens = jnp.ones((1, sum(chunks), 8))
    cache = layer.init_cache(4, 1, 8, 1, jnp.float32)
    parameters = layer.init(jax.random.key(0), tokens[:, :1], jnp.zeros((1, 1), int), cache, jnp.ones((1, 1, 4), bool))
    start = 0
    for n in chunks:
        positions, mask = jnp.arange(start, start + n)[None], jnp.ones((1, n, 4), bool)
        cache, _ = layer.apply(parameters, tokens[:, start : start + n], positions, cache, mask)
        start += n
    return cache["positions"][0].tolist()


def with_penzai():
    rope = pz.nn.ApplyRoPE(positions_input_name="positions", embedding_axis="width", max_wavelength=10000)
    positions = pz.nx.wrap(np.arange(2)).tag("tokens")
    return rope(pz.nx.wrap(x).tag("tokens", "width"), positions=positions).unwrap("tokens", "width")


def with_mlx(traditional):
    return mlx.nn.RoPE(4, traditional=traditional)(mx.array(x[None, None]))


def with_transformers():
    cos, sin = (torch.tensor(np.tile(f(angles), 2))[None] for f in (np.cos, np.sin))
    query = torch.tensor(x)[None, None]
    return apply_rotary_pos_emb(query, query, cos, sin)[0]


def with_onnx(interleaved):
    value = helper.make_tensor_value_info
    inputs = {"x": x[None, None], "cos": np.cos(angles)[None], "sin": np.sin(angles)[None]}
    graph = helper.make_graph(
        [helper.make_node("RotaryEmbedding", list(inputs), ["y"], interleaved=interleaved)],
        "g",
        [value(name, TensorProto.FLOAT, array.shape) for name, array in inputs.items()],
        [value("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    return ReferenceEvaluator(model).run(None, inputs)[0]


def rotated(y):
    """Name the layout that makes y of x."""
    y = np.asarray(y, np.float32).reshape(2, 4)[1]
    cos, sin = np.cos(angles[1]), np.sin(angles[1])
    for name, a, b in (("halves", [0, 1], [2, 3]), ("pairs", [0, 2], [1, 3])):
        if np.allclose([y[a], y[b]], [x[1, a] * cos - x[1, b] * sin, x[1, b] * cos + x[1, a] * sin], atol=1e-3):
            return name


seen = {
    "gemma, 4 slots: positions after 5 tokens": slots(1, 1, 1, 1, 1),
    "gemma, 4 slots: positions after 3 tokens and a chunk of 3": slots(1, 1, 1, 3),
    "gemma": rotated(apply_rope(x[None, :, None], np.arange(2)[None], base_frequency=10000)),
    "equinox": rotated(equinox.nn.RotaryPositionalEmbedding(4)(x)),
    "keras-hub": rotated(keras_hub.layers.RotaryEmbedding()(x[None])),
    "penzai": rotated(with_penzai()),
    "transformers (Llama)": rotated(with_transformers()),
    "mlx": rotated(with_mlx(traditional=False)),
    "mlx, traditional=True": rotated(with_mlx(traditional=True)),
    "ONNX RotaryEmbedding": rotated(with_onnx(interleaved=0)),
    "ONNX RotaryEmbedding, interleaved=1": rotated(with_onnx(interleaved=1)),
}
expected = dict(zip(seen, [[4, 1, 2, 3], [0, 3, 4, 5]] + 6 * ["halves"] + ["pairs", "halves", "pairs"]))
print("\n".join(f"{name:70} {result}" for name, result in seen.items()))
if changed := [name for name, result in seen.items() if result != expected[name]]:
    sys.exit(f"changed: {changed}")
END
