"""The caches of these families of transformers are correct, except for known defects.

One of each style of cache, positions, masks and layers. Others compute with the same code.
"""

import pytest
import torch

from bugs import tiny
from check_cache import check_cache

GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=61)
COMMON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
LLAMA = dict(COMMON, intermediate_size=48, num_key_value_heads=2, head_dim=8, pad_token_id=0)
WINDOW = dict(LLAMA, sliding_window=12)
HALF_WINDOW = dict(WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
MAMBA = dict(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=61)
MAMBA_HEADS = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=16)
FAMILIES = {
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neo": dict(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=12,
        vocab_size=61,
    ),
    "gpt_neox": dict(COMMON, intermediate_size=48),
    "gptj": dict(GPT2, rotary_dim=4),
    "opt": dict(COMMON, ffn_dim=48, word_embed_proj_dim=32),
    "xglm": dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, vocab_size=61),
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=61),
    "falcon": COMMON,
    "falcon with ALiBi": dict(COMMON, alibi=True),
    "mpt": dict(d_model=32, n_layers=2, n_heads=4, vocab_size=61),
    "llama": LLAMA,
    "llama4_text": dict(LLAMA, **EXPERTS, attention_chunk_size=12, intermediate_size_mlp=48, num_hidden_layers=4),
    "mistral": WINDOW,
    "mixtral": dict(WINDOW, num_local_experts=4),
    "qwen2": dict(WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3_moe": dict(LLAMA, **EXPERTS),
    "gemma": LLAMA,
    "gemma2": HALF_WINDOW,
    "gemma3_text": HALF_WINDOW,
    "gpt_oss": dict(HALF_WINDOW, **EXPERTS),
    "stablelm": LLAMA,
    "smollm3": LLAMA,
    "deepseek_v3": dict(
        dict(COMMON, intermediate_size=48, num_key_value_heads=4),
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
    "nemotron_h": dict(
        {**LLAMA, "intermediate_size": 64},
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        expand=2,
    ),
    "falcon_h1": dict(LLAMA, **MAMBA_HEADS, mamba_d_ssm=64),
    "lfm2": dict(LLAMA, layer_types=["conv", "full_attention"]),
    "qwen3_next": dict(
        {**LLAMA, **EXPERTS},
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=24,
    ),
    "mamba": MAMBA,
    "mamba2": dict(MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=16),
    "bamba": dict(LLAMA, **MAMBA_HEADS, attn_layer_indices=[1]),
    "jamba": dict(
        {**LLAMA, "num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "minimax": dict(LLAMA, layer_types=["linear_attention", "full_attention"], num_local_experts=2, block_size=16),
    "zamba2": dict(
        {**LLAMA, "num_key_value_heads": 4, "num_hidden_layers": 4},
        layers_block_type=["mamba", "hybrid"] * 2,
        num_mem_blocks=1,
        adapter_rank=4,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=1,
        mamba_d_state=8,
        chunk_size=16,
    ),
    "git": dict(
        COMMON,
        intermediate_size=48,
        vision_config=dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
        ),
    ),
    "recurrent_gemma": dict(
        {**LLAMA, "num_hidden_layers": 3}, lru_width=32, attention_window_size=12, intermediate_size=96
    ),
    "rwkv": dict(hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, vocab_size=61),
}
# Unmodified models of transformers 5.24 whose cache really is wrong, with words of which each wrong line contains one.
# README.md has the causes.
DEFECTS = {
    "falcon with ALiBi": "static cache",
    "falcon_h1": "repeat|select",
    "nemotron_h": "own cache|static cache",
    "bamba": "own cache|static cache",
    "git": "left padding",
    "lfm2": "rollback",
    "jamba": "chunks",
    "mamba": "chunks",
    "minimax": "own cache",
    "rwkv": "own cache",
    "zamba2": "own cache",
}
# One of each style of cache, mask or router: half precision rounds the same everywhere, but not all of them alike.
HALF = "gpt2 bloom llama gemma3_text llama4_text mixtral qwen3_moe deepseek_v3 qwen3_next lfm2 mamba2".split()
# what depends on the class of the cache alone, which HALF and DEFECTS have all of
METHODS = ["two caches", "prefix", "repeat", "select", "reset", "then reorder"]
CASES = [(name, torch.float32) for name in FAMILIES]
CASES += [(name, torch.bfloat16) for name in HALF]
CASES += [(name, torch.float16) for name in ("llama", "gemma3_text", "qwen3_moe")]


def family(name):
    return tiny(name.split()[0], **FAMILIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", CASES, ids=lambda part: str(part).removeprefix("torch."))
def test_the_caches_of_transformers_are_correct_except_for_known_defects(name, dtype):
    """Half precision only rounds differently, so a few scenarios are enough there."""
    options = dict(length=36, skip=METHODS) if name not in {*HALF, *DEFECTS} else dict(length=48)
    if dtype != torch.float32:
        options = dict(length=48, scenarios=["decode", "padding", "chunks of mixed sizes", "generate"], caches=("own",))
    if name == "recurrent_gemma":  # it returns no cache
        options["scenarios"] = ["generate"]
    report = check_cache(family(name), dtype=dtype, **options)
    wrong = [result for result in report.results if result.status == "wrong"]
    if name not in DEFECTS:
        assert not wrong, report
    for result in wrong:
        assert any(word in f"{result.scenario}, {result.cache} cache" for word in DEFECTS[name].split("|")), report
    assert wrong or name not in DEFECTS or dtype != torch.float32, "transformers has fixed it"
    assert report.exit_code == bool(wrong), report
    if name != "recurrent_gemma":
        assert {"decode", "chunks of mixed sizes"} <= {r.scenario for r in report.results if r.status != "not run"}, (
            report
        )
