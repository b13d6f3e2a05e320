# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.24.0", "mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""mlx-lm 0.32.2: the RoPE base of a folder that transformers 5.24.0 saved is ignored for Llama and other families.

transformers 5 writes rope_theta only inside rope_parameters. mlx-lm's Llama looks for it at the top level of
config.json, does not find it, and takes its own default, 10,000. So do Mistral, Phi-3, OLMo 2 and Qwen2, whose
default is 1,000,000. A scaling is ignored, too. Qwen3 reads rope_parameters. Copy rope_theta and rope_scaling to the
top level of config.json.

Upstream: ml-explore/mlx-lm#953.
"""

from report import report

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model

sizes = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
folder = Path("model")
config_file = folder / "config.json"


def base(theta):
    return {"rope_type": "default", "rope_theta": theta}


def off(family, rope, copy=False):
    """Save a random model with transformers, load it with mlx-lm, and return the largest difference of a logit."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, rope_parameters=rope, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # larger weights, so that positions show
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    if copy:
        config = json.loads(config_file.read_text())
        config_file.write_text(json.dumps(config | {"rope_theta": rope["rope_theta"], "rope_scaling": rope}))
    ids = torch.randint(0, 50, (1, 20))
    with torch.no_grad():
        logits = model(ids).logits.numpy()
    return float(np.abs(np.array(load_model(folder)[0](mx.array(ids.numpy()))) - logits).max())


print("the largest difference of a logit between transformers and mlx-lm")
report(
    {
        "llama, base 10000": (off("llama", base(10000.0)), 0.0),
        "llama, base 500000": (off("llama", base(500000.0)), 3.1),
        "llama, base 500000, copied to the top level": (off("llama", base(500000.0), copy=True), 0.0),
        "llama, llama3 scaling": (off("llama", llama3), 4.5),
        "llama, llama3 scaling, copied": (off("llama", llama3, copy=True), 0.0),
        "mistral, base 500000": (off("mistral", base(500000.0)), 3.1),
        "phi3, base 500000": (off("phi3", base(500000.0)), 1.9),
        "olmo2, base 500000": (off("olmo2", base(500000.0)), 1.1),
        "qwen2, base 10000": (off("qwen2", base(10000.0)), 2.8),
        "qwen3, base 500000": (off("qwen3", base(500000.0)), 0.0),
    }
)
