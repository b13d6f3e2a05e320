# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.24.0", "ctranslate2==4.8.5", "setuptools==84.2.1"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""transformers 5.24.0, CTranslate2 4.8.5: a short prompt behind four pads needs position_ids in some families.

Logits of the prompt and of the next step are compared with those of the prompt alone, with the attention mask, and
with position_ids in neither call, in both, or only in the prefill. Learned positions need them in both calls. Rotary
ones need them in both or in neither. CTranslate2 pads by itself, and is exact.
"""

from report import report

import ctranslate2
import torch
import transformers
from ctranslate2.converters.transformers import GPT2Loader

gpt = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
opt = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 32}
learned = {
    "GPT2LMHeadModel": gpt,
    "GPTBigCodeForCausalLM": gpt,
    "GPTNeoForCausalLM": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]},
    "XGLMForCausalLM": {"d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 64},
    "CTRLLMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 2, "dff": 64, "n_positions": 64},
    "BioGptForCausalLM": common,
}
from_the_mask = {
    "OPTForCausalLM": opt,
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "FalconForCausalLM, alibi": common | {"alibi": True},
    "MptForCausalLM": {"d_model": 32, "n_layers": 2, "n_heads": 2},
}
rotary = {
    "LlamaForCausalLM": common,
    "GPTJForCausalLM": gpt | {"rotary_dim": 8},
    "CodeGenForCausalLM": gpt | {"n_head": 4, "rotary_dim": 8},
    "FalconForCausalLM": common | {"alibi": False},
    "StableLmForCausalLM": common | {"num_key_value_heads": 2},
}
short, pads = torch.tensor([[5, 3, 8, 9, 4]]), 4
batch = torch.cat((torch.zeros(1, pads, dtype=torch.long), short), dim=1)
step = torch.tensor([[7]])


def build(name, settings):
    torch.manual_seed(0)
    kind = getattr(transformers, name.partition(",")[0])
    tokens = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    model = kind(kind.config_class(**settings, **tokens)).eval()
    for parameter in model.parameters():  # larger weights, so that positions show
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    return model


@torch.no_grad()
def same(model, in_prefill, in_step):
    def run(ids, padding):
        length = ids.size(1)
        mask = torch.ones(1, length + 1, dtype=torch.long)
        mask[:, :padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        first = {"position_ids": positions[:, :length]} if in_prefill and padding else {}
        second = {"position_ids": positions[:, length:]} if in_step and padding else {}
        out = model(ids, attention_mask=mask[:, :length], use_cache=True, **first)
        next_out = model(step, attention_mask=mask, past_key_values=out.past_key_values, use_cache=True, **second)
        return torch.stack((out.logits[0, -1], next_out.logits[0, -1]))

    return bool((run(batch, pads) - run(short, 0)).abs().max() < 1e-3)


def in_ctranslate2():
    """Return whether the greedy text of each prompt in a batch is that of the prompt alone."""
    spec = GPT2Loader().get_model_spec(build("GPT2LMHeadModel", gpt))
    spec.register_vocabulary([f"t{i}" for i in range(50)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t0"
    spec.validate()
    spec.optimize()
    spec.save(".")
    generator = ctranslate2.Generator(".", compute_type="float32", intra_threads=1)
    prompts = [[f"t{i}" for i in row] for row in ([5, 3], [4, 8, 15, 16, 23], [42, 7, 9])]
    batch = [r.sequences_ids for r in generator.generate_batch(prompts, max_length=12)]
    return batch == [generator.generate_batch([prompt], max_length=12)[0].sequences_ids for prompt in prompts]


rows = {"CTranslate2, GPT-2, a batch of different lengths": (in_ctranslate2(), True)}
for families, expected in ((learned, [False, True, False]), (rotary, [True, True, False])):
    for name, settings in families.items():
        model = build(name, settings)
        rows[name] = [same(model, *where) for where in ((False, False), (True, True), (True, False))], expected
for name, settings in from_the_mask.items():  # some of these take no position_ids
    rows[name] = same(build(name, settings), False, False), True
print("as the prompt alone, with position_ids in neither call, in both, only in the prefill")
report(rows)
