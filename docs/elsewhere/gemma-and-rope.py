# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gemma==3.3.0", "jax==0.10.2", "flax==0.12.8", "tensorflow==2.21.0", "equinox==0.13.8", "penzai==0.2.5",
#     "keras==3.15.1", "keras-hub==0.32.0", "mlx[cpu]==0.32.4", "onnx==1.23.2", "torch==2.13.0",
#     "transformers==5.24.0",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""gemma 3.3.0, equinox 0.13.8, keras-hub 0.32.0, penzai 0.2.5, mlx 0.32.4, transformers 5.24.0, ONNX: RoPE layouts.

A layout says which numbers of a head are rotated together: the first half with the second, or neighbours in pairs.
The first rows fill a cache of gemma with four slots: one token too many wraps, and a chunk moves back until it fits.
"""

from report import layout, onnx_model, report

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
from onnx.reference import ReferenceEvaluator
from penzai import pz
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

x = np.array([[1, 2, 3, 4], [1, 2, 3, 4]], np.float32)  # one head, positions 0 and 1
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
    inputs = {"x": x[None, None], "cos": np.cos(angles)[None], "sin": np.sin(angles)[None]}
    model = onnx_model("RotaryEmbedding", inputs, opset=23, interleaved=interleaved)
    return ReferenceEvaluator(model).run(None, inputs)[0]


def rotated(y):
    return layout(np.asarray(y, np.float32).reshape(2, 4)[1])


report(
    {
        "gemma, 4 slots: positions after 5 tokens": (slots(1, 1, 1, 1, 1), [4, 1, 2, 3]),
        "gemma, 4 slots: positions after 3 tokens and a chunk of 3": (slots(1, 1, 1, 3), [0, 3, 4, 5]),
        "gemma": (rotated(apply_rope(x[None, :, None], np.arange(2)[None], base_frequency=10000)), "halves"),
        "equinox": (rotated(equinox.nn.RotaryPositionalEmbedding(4)(x)), "halves"),
        "keras-hub": (rotated(keras_hub.layers.RotaryEmbedding()(x[None])), "halves"),
        "penzai": (rotated(with_penzai()), "halves"),
        "transformers (Llama)": (rotated(with_transformers()), "halves"),
        "mlx": (rotated(with_mlx(traditional=False)), "halves"),
        "mlx, traditional=True": (rotated(with_mlx(traditional=True)), "pairs"),
        "ONNX RotaryEmbedding": (rotated(with_onnx(interleaved=0)), "halves"),
        "ONNX RotaryEmbedding, interleaved=1": (rotated(with_onnx(interleaved=1)), "pairs"),
    }
)
