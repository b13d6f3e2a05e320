# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "transformers==5.24.0", "hqq==0.2.8.post1"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""transformers 5.24.0, hqq 0.2.8.post1: with the default axes of QuantizedCache, text depends on the rest of the batch.

With axis 0, the default, a quantization group is every n-th number of the whole tensor, so it mixes rows, heads and
tokens. Whenever 128 tokens have gathered, the whole cache is dequantized and quantized again in other groups, and old
keys drift further from their value. Pass axis_key=1, axis_value=1, as the documentation recommends without saying
why.
"""

from report import report

import torch
from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

PROMPT, LENGTHS = 128, (128, 256, 512, 1024, 2048)
AXES = {"default axes": {}, "axis_key=1, axis_value=1": {"axis_key": 1, "axis_value": 1}}
config = LlamaConfig(
    vocab_size=65,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=2,
    max_position_embeddings=4096,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=None,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
prompts = torch.randint(1, config.vocab_size, (2, 20))
keys = torch.randn(1, 2, max(LENGTHS) + 1, 64)


def errors(axes):
    """The relative error of the prompt's keys, when the cache has each of these lengths."""
    cache, prompt = QuantizedCache("hqq", config, **axes), keys[:, :, :PROMPT]
    cache.update(prompt, prompt, 0)
    for length in range(PROMPT, max(LENGTHS) + 1):
        new = keys[:, :, length : length + 1]
        seen, _ = cache.update(new, new, 0)
        if length in LENGTHS:
            yield ((seen[:, :, :PROMPT] - prompt).norm() / prompt.norm()).item()


def text(rows, axes):
    cache = QuantizedCache("hqq", config, **axes)
    new = model.generate(rows, past_key_values=cache, max_new_tokens=100, do_sample=False)
    return new[0, rows.shape[1] :].tolist()


def first_difference(axes):
    """The first new token of row 0 that differs if row 1 is in the batch, too."""
    pairs = zip(text(prompts[:1], axes), text(prompts, axes))
    return next((i for i, (alone, batched) in enumerate(pairs) if alone != batched), None)


print(f"tokens in the cache: {LENGTHS}; the error of old keys, and the first new token that differs in a batch of two")
expected = {"default axes": [0.086, 0.11, 0.15, 0.21, 0.31], "axis_key=1, axis_value=1": 5 * [0.086]}
rows = {f"{name}: error of the first 128 keys": (list(errors(axes)), expected[name]) for name, axes in AXES.items()}
for name, axes in AXES.items():
    rows[f"{name}: text of row 0 differs in a batch"] = first_difference(axes) is not None, name == "default axes"
report(rows)
