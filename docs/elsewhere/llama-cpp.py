# /// script
# requires-python = ">=3.11"
# dependencies = ["llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""llama.cpp as in llama-cpp-python 0.3.36: an F32 file is not all float32, and n_ctx is rounded up to 256.

A small GPT-2 in a GGUF file of float32 is compared with numpy in float64. The cache is float16, and GELU is a table
in half precision, so logits are off by 0.007, and by 0.006 with an F32 cache. pip compiles llama.cpp: it needs a C++
compiler and five minutes.
"""

from report import report

import math

import gguf
import llama_cpp
import numpy as np

V, C, LAYERS, HEADS, T = 65, 96, 2, 4, 64
rng = np.random.default_rng(0)
weights = {
    "token_embd.weight": rng.normal(size=(V, C)) * 0.3,
    "position_embd.weight": rng.normal(size=(T, C)) * 0.3,
    "output_norm.weight": np.ones(C),
    "output_norm.bias": np.zeros(C),
    "output.weight": rng.normal(size=(V, C)) * 0.3,
}
for i in range(LAYERS):
    for name in ("attn_norm", "ffn_norm"):
        weights |= {f"blk.{i}.{name}.weight": np.ones(C), f"blk.{i}.{name}.bias": np.zeros(C)}
    for name, n_out, n_in in (
        ("attn_qkv", 3 * C, C),
        ("attn_output", C, C),
        ("ffn_up", 4 * C, C),
        ("ffn_down", C, 4 * C),
    ):
        weights[f"blk.{i}.{name}.weight"] = rng.normal(size=(n_out, n_in)) * 0.1
        weights[f"blk.{i}.{name}.bias"] = rng.normal(size=n_out) * 0.1
weights = {name: array.astype(np.float32) for name, array in weights.items()}


def write():
    writer = gguf.GGUFWriter("model.gguf", "gpt2")
    writer.add_context_length(T)
    writer.add_embedding_length(C)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(4 * C)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(V)])
    writer.add_token_types([1] * V)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, array in weights.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def half(x):
    return x.astype(np.float16).astype(np.float64)


def linear(i, name, x):
    return x @ weights[f"blk.{i}.{name}.weight"].T + weights[f"blk.{i}.{name}.bias"]


def logits(ids, activation):
    x = (weights["token_embd.weight"][ids] + weights["position_embd.weight"][: len(ids)]).astype(np.float64)
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(LAYERS):
        heads = [np.split(part, HEADS, -1) for part in np.split(linear(i, "attn_qkv", norm(x)), 3, -1)]
        y = []
        for q, k, v in zip(*heads):
            scores = q @ k.T / math.sqrt(C // HEADS) + future
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            y.append(scores / scores.sum(-1, keepdims=True) @ v)
        x = x + linear(i, "attn_output", np.concatenate(y, -1))
        x = x + linear(i, "ffn_down", activation(linear(i, "ffn_up", norm(x))))
    return norm(x) @ weights["output.weight"].T


def load(n_ctx=T, **settings):
    return llama_cpp.Llama("model.gguf", n_ctx=n_ctx, n_threads=1, logits_all=True, verbose=False, **settings)


write()
ids = rng.integers(0, V, 40)
exact, rounded = logits(ids, gelu), logits(ids, lambda x: half(gelu(half(x))))


def off(**settings):
    """Return how far logits are off, from numpy and from numpy with a GELU in half precision."""
    model = load(flash_attn=False, **settings)
    model.eval(ids.tolist())
    return [float(np.abs(model.scores[:40] - reference).max()) for reference in (exact, rounded)]


default, full = off(), off(type_k=0, type_v=0)
print(f"off with the default cache: {default[0]:.4f}, from a GELU in half precision {default[1]:.4f}")
print(f"off with an F32 cache:      {full[0]:.4f}, from a GELU in half precision {full[1]:.4f}")
report(
    {
        "with either cache, logits are off by more than 0.003": (min(default[0], full[0]) > 0.003, True),
        "GELU in half precision explains the default cache": (default[1] < 0.003, False),
        "GELU in half precision explains most with an F32 cache": (full[1] < full[0] / 3, True),
        "n_ctx=32, 64 and 257 become": ([load(n).n_ctx() for n in (32, 64, 257)], [256, 256, 512]),
    }
)
