# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.24.0", "gguf==0.19.0", "accelerate==1.15.0", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""transformers 5.24.0: loading a GGUF file drops its RoPE scaling.

The file says how a model stretches its positions: rope.scaling.type and factor, or, for Llama 3.1 and later, a tensor
rope_freqs.weight. llama.cpp uses them. from_pretrained(gguf_file=...) reads the RoPE base, but leaves the scaling at
"default" and ignores the tensor, without a warning. Set config.rope_parameters yourself.
"""

from report import report

import gguf
import numpy as np
import torch
import transformers

vocab, width, heads, kv_heads, hidden, head_size = 64, 64, 4, 2, 96, 16


def write(scaling=None, factors=None):
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_context_length(4_096)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(vocab)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(512)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([1] * vocab)
    shapes = {"token_embd": (vocab, width), "output": (vocab, width)}
    shapes |= {f"blk.0.{name}": (width, width) for name in ("attn_q", "attn_output")}
    shapes |= {f"blk.0.{name}": (kv_heads * head_size, width) for name in ("attn_k", "attn_v")}
    shapes |= {"blk.0.ffn_gate": (hidden, width), "blk.0.ffn_up": (hidden, width), "blk.0.ffn_down": (width, hidden)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", 0.3 * rng.normal(size=shape).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(**settings):
    """Return the type and base of the RoPE that transformers reads, and logits."""
    write(**settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf")
    rope = model.config.rope_parameters
    with torch.no_grad():
        return [rope["rope_type"], int(rope["rope_theta"])], model(torch.arange(60)[None]).logits


rope, without = load()
rows = {"no scaling": (rope, ["default", 500_000])}
for name, settings in {
    "linear, factor 8": {"scaling": "linear"},
    "yarn, factor 8": {"scaling": "yarn"},
    "rope_freqs.weight": {"factors": [1, 1, 1, 1, 2, 4, 8, 8]},
}.items():
    rope, logits = load(**settings)
    rows[name] = rope, ["default", 500_000]
    rows[f"{name}: logits equal to those without scaling"] = torch.equal(logits, without), True
report(rows)
