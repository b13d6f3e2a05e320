#!/bin/sh
# Rows of docs/elsewhere.md: llama.cpp as in llama-cpp-python 0.3.36, with a small GPT-2 in a GGUF file of float32
# (gguf 0.19.0), against numpy in float64: how far the logits are off with each cache, before and after numpy's GELU is
# rounded to half precision, and the size of the context that one gets. pip compiles it, so a C++ compiler is needed,
# and five minutes.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq llama-cpp-python==0.3.36 gguf==0.19.0
venv/bin/python - <<'END' 2> log || { tail -n 1 log; exit 1; }
import math
import sys

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


def logits(ids, activation):
    x = (weights["token_embd.weight"][ids] + weights["position_embd.weight"][: len(ids)]).astype(np.float64)
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(LAYERS):

        def linear(name, x):
            return x @ weights[f"blk.{i}.{name}.weight"].T + weights[f"blk.{i}.{name}.bias"]

        heads = [np.split(part, HEADS, -1) for part in np.split(linear("attn_qkv", norm(x)), 3, -1)]
        y = []
        for q, k, v in zip(*heads):
            scores = q @ k.T / math.sqrt(C // HEADS) + future
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            y.append(scores / scores.sum(-1, keepdims=True) @ v)
        x = x + linear("attn_output", np.concatenate(y, -1))
        x = x + linear("ffn_down", activation(linear("ffn_up", norm(x))))
    return norm(x) @ weights["output.weight"].T


def load(n_ctx=T, **settings):
    return llama_cpp.Llama("model.gguf", n_ctx=n_ctx, n_threads=1, logits_all=True, verbose=False, **settings)


write()
ids = rng.integers(0, V, 40)
off, exact, rounded = {}, logits(ids, gelu), logits(ids, lambda x: half(gelu(half(x))))
for name, settings in (("default", {}), ("F32", {"type_k": 0, "type_v": 0})):
    model = load(flash_attn=False, **settings)
    model.eval(ids.tolist())
    off[name] = [np.abs(model.scores[:40] - reference).max() for reference in (exact, rounded)]
    print(f"{name + ' cache: logits off, and with a GELU in half precision':70} {off[name][0]:.4f} {off[name][1]:.4f}")
sizes = {n: load(n).n_ctx() for n in (32, 64, 257)}
print(f"{'n_ctx':70} {sizes}")
default, full = off["default"], off["F32"]
if not (default[0] > 0.003 and default[1] > 0.003 and full[0] > 0.003 and full[1] < full[0] / 3):
    sys.exit("changed: the precision of an F32 file")
if sizes != {32: 256, 64: 256, 257: 512}:
    sys.exit("changed: n_ctx")
END
