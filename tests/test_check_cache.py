"""kvgpt.check_cache: right caches pass, broken ones are found, and the cause is named.

PYTHONPATH=.:data python tests/test_check_cache.py     the seconds that each family takes, for docs/check-your-cache.md
"""

import copy
import json
import os
import re
import shutil
import time

import pytest
import torch

from cache_bugs import BUGS, Attention, Cache, Decoder, tiny
from helpers import ROOT, random_model, run
from kvgpt.check_cache import check_cache
from model import GPTConfig

# -- families of transformers ------------------------------------------------------------------------------------------

GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=61)
COMMON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
LLAMA = dict(COMMON, intermediate_size=48, num_key_value_heads=2, head_dim=8, pad_token_id=0)
WINDOW = dict(LLAMA, sliding_window=12)
HALF_WINDOW = dict(WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
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
    "codegen": dict(GPT2, rotary_dim=4),
    "opt": dict(COMMON, ffn_dim=48, word_embed_proj_dim=32),
    "xglm": dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, vocab_size=61),
    "biogpt": dict(COMMON, intermediate_size=48),
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=61),
    "falcon": COMMON,
    "falcon with ALiBi": dict(COMMON, alibi=True),
    "mpt": dict(d_model=32, n_layers=2, n_heads=4, vocab_size=61),
    "persimmon": dict(COMMON, intermediate_size=48),
    "phi": LLAMA,
    "phi3": WINDOW,
    "llama": LLAMA,
    "llama4_text": dict(LLAMA, **EXPERTS, attention_chunk_size=12, intermediate_size_mlp=48, num_hidden_layers=4),
    "mistral": WINDOW,
    "mixtral": dict(WINDOW, num_local_experts=4),
    "qwen2": dict(WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3": LLAMA,
    "qwen3_moe": dict(LLAMA, **EXPERTS),
    "gemma": LLAMA,
    "gemma2": HALF_WINDOW,
    "gemma3_text": HALF_WINDOW,
    "gpt_oss": dict(HALF_WINDOW, **EXPERTS),
    "cohere": LLAMA,
    "cohere2": HALF_WINDOW,
    "olmo": LLAMA,
    "olmo2": LLAMA,
    "olmo3": WINDOW,
    "stablelm": LLAMA,
    "starcoder2": WINDOW,
    "granite": LLAMA,
    "glm": LLAMA,
    "glm4": LLAMA,
    "smollm3": LLAMA,
    "nemotron": LLAMA,
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
    "mamba": dict(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=61),
    "mamba2": dict(
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        vocab_size=61,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=16,
    ),
    "bamba": dict(
        LLAMA,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=16,
    ),
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
    "recurrent_gemma": dict(
        {**LLAMA, "num_hidden_layers": 3}, lru_width=32, attention_window_size=12, intermediate_size=96
    ),
    "rwkv": dict(hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, vocab_size=61),
}
# Unmodified models of transformers 5.23 whose cache really is wrong, with a word that all their wrong lines contain:
# docs/check-your-cache.md has the causes.
DEFECTS = {
    "falcon with ALiBi": "static cache",
    "bamba": "own cache|static cache",
    "jamba": "chunks|padding|rollback|reset",
    "mamba": "chunks|ones|reset|padding",
    "minimax": "own cache",
    "rwkv": "generate",
}


def family(name):
    return tiny(name.split()[0], **FAMILIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_caches_of_transformers_are_right_but_for_known_defects(name, dtype):
    """All ways in float32. Half precision differs in its rounding alone, so some ways are enough there."""
    half = dict(modes=["decode", "padding", "chunks of 3", "generate"], caches=("own",))
    report = check_cache(family(name), length=48, dtype=dtype, **({} if dtype == torch.float32 else half))
    assert report.fault is None
    wrong = [result for result in report.results if result.status == "wrong"]
    if name not in DEFECTS:
        assert not report, report
    for result in wrong:
        assert any(word in f"{result.way}, {result.cache} cache" for word in DEFECTS[name].split("|")), report
    assert wrong or name not in DEFECTS or dtype != torch.float32, "transformers has repaired it"
    assert report.exit_code == bool(wrong)


# -- broken caches -----------------------------------------------------------------------------------------------------


def assert_found(name, patch, **options):
    function, cause, caches, _ = BUGS[name]
    report = check_cache(function(patch.setattr), caches=caches, **options)
    wrong = [result.why for result in report.results if result.status == "wrong"]
    assert report and report.exit_code == 1 and wrong, "not found"
    right = [all(words in why for words in cause.split("|")) for why in wrong]
    # once the cause is named, a way that raises has said enough
    assert any(right) and sum(named or "raises" in why for named, why in zip(right, wrong)) >= 0.8 * len(wrong), report


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_broken_cache_is_found_and_the_cause_is_named(name, monkeypatch):
    assert_found(name, monkeypatch, length=96)


@pytest.mark.parametrize(
    "name",
    "rope_begins_at_0_in_each_step table_begins_at_0_in_each_step int8 crop_leaves_one beams_not_reordered "
    "padding_is_seen".split(),
)
def test_six_broken_caches(name, monkeypatch):
    assert_found(name, monkeypatch, length=48)


# -- right caches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [dict(), dict(pos_emb="rope", n_kv_head=2, qk_norm=True, activation="swiglu")])
def test_the_cache_of_this_kit_is_right(network):
    model = random_model(GPTConfig(block_size=48, vocab_size=31, n_layer=2, n_head=4, n_embd=32, **network))
    report = check_cache(model)
    assert not report and report.exit_code == 0, report
    assert "chunks of 3, " in str(report) and "left padding in chunks: this GPT takes no mask" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_adapter_and_a_model_of_transformers(dtype):
    for model in (Decoder(window=12), tiny("llama")):
        report = check_cache(model, length=48, dtype=dtype, modes=["decode", "padding", "rollback", "repeat"])
        assert not report and report.exit_code == 0, report


class Hidden:
    """An adapter that shows no module. So nothing can be run in float64, and its weights cannot be changed."""

    vocab_size = 61

    def __init__(self):
        model = Decoder().eval()
        self.full, self.step = (lambda *args: model.full(*args)), (lambda *args: model.step(*args))

    def new(self, kind, length):
        return Cache(length if kind == "static" else None)


class Inside(Decoder):
    """The model keeps its one cache itself, so a new cache is a copy of the model."""

    def new(self, kind, length):
        other = copy.deepcopy(self)
        other.held = super().new(kind, length)
        other.crop, other.reset = other.held.crop, other.held.reset
        return other

    def step(self, ids, cache, mask, pos):
        return cache(ids, cache.held, mask, pos)


class InDict(Hidden):
    """The cache is a dict, which has an update of its own, and the adapter a generate."""

    def __init__(self):
        super().__init__()
        step = self.step
        self.step = lambda ids, cache, mask, pos: step(ids, cache["cache"], mask, pos)

    def new(self, kind, length):
        return {"cache": super().new(kind, length)}

    def generate(self, prompt):
        raise AssertionError("nobody asked for it")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [Hidden, Inside, InDict])
def test_adapters_that_show_less_are_right_too(adapter, monkeypatch):
    report = check_cache(adapter(), length=48)
    assert not report and report.exit_code == 0, report
    function, cause, _, _ = BUGS["rope_begins_at_0_in_each_step"]
    function(monkeypatch.setattr)
    report = check_cache(adapter(), length=48, modes=["decode"], caches=("own",))
    assert report and report.results[0].why.startswith(cause if adapter is Hidden else "cause unknown"), report


def test_the_model_is_afterwards_what_it_was():
    model = tiny("llama").train().to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_cache(model, length=24, modes=["one row"])
    assert model.training and model.config._attn_implementation == "sdpa"
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])


# -- what is not the cache's fault, or cannot be run -------------------------------------------------------------------


def test_logits_that_depend_on_later_tokens_are_not_the_fault_of_the_cache(monkeypatch):
    """As with dynamic NTK, whose angles depend on the length of the text."""
    rotate = Attention.rotate
    stretched = lambda self, x, pos: rotate(self, x, pos * 20 / max(20, x.size(2)))  # noqa: E731
    monkeypatch.setattr(Attention, "rotate", stretched)
    with pytest.warns(UserWarning, match="nothing could be checked"):
        report = check_cache(Decoder(), length=48)
    assert not report and report.exit_code == 2
    assert "NOT THE CACHE'S FAULT" in str(report) and "when later tokens are left out, from position" in str(report)


def test_padding_that_changes_logits_without_a_cache_is_not_its_fault(monkeypatch):
    import transformers

    forward = transformers.GPT2Model.forward
    broken = lambda self, *args, position_ids=None, **kwargs: forward(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(transformers.GPT2Model, "forward", broken)
    report = check_cache(tiny("gpt2"), length=48, modes=["decode", "padding"], caches=("own",))
    assert not report and "padding in chunks: not the cache's fault: padding changes logits without" in str(report)


def test_a_wrong_argument_is_named():
    with pytest.raises(TypeError, match="Linear is no causal language model"):
        check_cache(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"length=500.*the context, 128"):
        check_cache(Decoder(), length=500)
    with pytest.raises(ValueError, match=r"modes=\['beams'\]: the ways are decode, "):
        check_cache(Decoder(), modes=["beams"])


# -- the file and the command ------------------------------------------------------------------------------------------


SUMS = """
import torch

class Sums(torch.nn.Module):  # the cache is one vector per row: the sum of all embeddings so far
    vocab_size = 9

    def __init__(self):
        super().__init__()
        self.wte, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9)

    def full(self, ids):
        return self.step(ids, 0, None, None)[0]

    def new(self, kind, length):
        if kind == "static":
            raise NotImplementedError("it is one")
        return torch.zeros(1, 1, 8)

    def step(self, ids, cache, mask, pos):
        if mask is not None and not mask.all():
            raise NotImplementedError("no padding")
        sums = cache + self.wte(ids).cumsum(1)
        return self.head(sums.tanh()), sums[:, -1:]
"""


def test_the_file_can_be_copied_and_needs_only_torch(tmp_path):
    """And it takes a cache that a step makes anew, in a process that knows neither this kit nor transformers."""
    shutil.copy(ROOT / "kvgpt" / "check_cache.py", tmp_path)
    (tmp_path / "mine.py").write_text(SUMS, encoding="utf-8")
    result = run("-m", "check_cache", "mine:Sums", "--length", "24", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    said = {(r["way"], r["cache"]): (r["status"], r["why"]) for r in content["results"]}
    assert content["exit_code"] == 0 and said["prefix used twice", "own"] == ("right", None)
    assert said["left padding", "own"] == ("not run", "no padding")
    assert said["reorder", "own"] == ("not run", "the cache has no reorder_cache")
    assert said["every way", "static"] == ("not run", "it is one")
    loaded = run("-c", "import check_cache, sys; print(*sys.modules)", cwd=tmp_path).stdout.split()
    assert "torch" in loaded and not {"transformers", "kvgpt", "model", "matplotlib"} & set(loaded)


@pytest.mark.slow
def test_the_command_says_right_wrong_or_cannot_run(tmp_path):
    command = ["-m", "kvgpt.check_cache"]
    tiny("llama").save_pretrained(tmp_path / "llama")
    flags = ["--length", "32", "--modes", "decode", "reorder"]
    picture = tmp_path / "drift.png"
    right = run(*command, tmp_path / "llama", *flags, "--plot", picture)
    assert right.returncode == 0 and "WRONG" not in right.stdout and picture.stat().st_size > 1000, right.stderr
    (tmp_path / "mine.py").write_text(
        "import cache_bugs\n\ndef broken():\n    cache_bugs.Cache.reorder_cache = lambda self, rows: None\n"
        "    return cache_bugs.Decoder()\n",
        encoding="utf-8",
    )
    env = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", tmp_path)))}
    wrong = run(*command, "mine:broken", *flags, env=env)
    assert wrong.returncode == 1 and "WRONG    reorder, own cache: logits off by" in wrong.stdout, wrong.stderr
    assert "that is not that of row 0, position 0, but of row 2, position 0" not in wrong.stdout.split("reorder")[0]
    for model, words in ((tmp_path / "nothing", "check_cache: "), ("mine:nothing", "AttributeError")):
        result = run(*command, model, env=env)
        assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_page_shows_what_the_check_says(tmp_path):
    """Each block of Python that is followed by a block of text, up to rounding."""
    page = (ROOT / "docs" / "check-your-cache.md").read_text(encoding="utf-8")
    mine = re.search(r"cat > mine.py <<'EOF'\n(.*?)EOF\n", page, re.DOTALL).group(1)
    (tmp_path / "mine.py").write_text(mine, encoding="utf-8")
    env = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, tmp_path)))}
    pairs = re.findall(r"^```python\n([^`]*)^```\n\n```text\n([^`]*)^```", page, re.MULTILINE)
    assert len(pairs) == 5
    for script, shown in pairs:
        said, shown = (
            re.sub(r"logits off by .*? other argmaxes|by\s+\S+ of its size|\s+", " ", text)
            for text in (run("-c", script, env=env).stdout, shown)
        )
        assert said == shown and "WRONG" in said


if __name__ == "__main__":
    torch.set_num_threads(2)
    print("| family | seconds | right | wrong | not run |\n|---|---|---|---|---|")
    for name in FAMILIES:
        began = time.perf_counter()
        report = check_cache(family(name))
        counts = [sum(r.status == status for r in report.results) for status in ("right", "wrong", "not run")]
        print(f"| {name} | {time.perf_counter() - began:.1f} | {' | '.join(map(str, counts))} |", flush=True)
