"""sample.py --engine hf: other people's models, and the caches of transformers, through our loop and --verify."""

import json
import shutil

import pytest
import torch
import transformers

from helpers import ROOT, assert_one_line, ok, run
from kvgpt.interop.transformers import HuggingFaceGPT

BLOCK_SIZE = 48
TEXT = (ROOT / "data" / "sample.txt").read_text(encoding="utf-8")
COMMON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=BLOCK_SIZE)
CONFIGS = {
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=BLOCK_SIZE),
    "llama": dict(intermediate_size=64, num_key_value_heads=2, **COMMON),
    "mistral": dict(intermediate_size=64, num_key_value_heads=1, sliding_window=8, **COMMON),
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4),
}
BREAK_THE_CACHE = """
import runpy, sys
from transformers import DynamicCache
update = DynamicCache.update
def broken(self, key, value, *args, **kwargs):
    keys, values = update(self, key, value, *args, **kwargs)
    return keys.roll(1, dims=-2), values  # every key at the place of another value
DynamicCache.update = broken
sys.argv = ["sample.py", *sys.argv[1:]]
runpy.run_path("sample.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE of 400 tokens, so that a token is a word, a part of one, or a part of a character."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXT.splitlines(keepends=True), vocab_size=400, special_tokens=["<|end|>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<|end|>")


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tokenizer, tmp_path_factory):
    """A folder that transformers wrote: random weights, large enough for texts that vary."""
    path = tmp_path_factory.mktemp(request.param)
    config = transformers.AutoConfig.for_model(request.param, vocab_size=400, **CONFIGS[request.param])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


only_llama = pytest.mark.parametrize("folder", ["llama"], indirect=True)


def hf(folder, *flags, **kwargs):
    return run("sample.py", "--engine", "hf", "--ckpt", folder, "--max_new_tokens", "30", *flags, **kwargs)


@pytest.mark.slow
def test_the_text_is_that_of_generate_and_the_cache_changes_nothing(folder, tokenizer):
    prompt = "The cat sat — né"
    result = ok(hf(folder, "--prompt", prompt, "--temperature", "0", "--verify"))
    assert "1 of 1 samples match" in result.stderr or "near-tie" in result.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    greedy = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, **greedy)
    expected = tokenizer.decode(theirs[0], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert result.stdout == expected and expected.startswith(prompt)
    flags = ["--prompt", prompt, "--num_samples", "3", "--verify"]
    sampled = ok(hf(folder, *flags, "--no-kv_cache"))
    assert sampled.stdout == ok(hf(folder, *flags)).stdout and sampled.stdout != result.stdout


@pytest.mark.slow
@only_llama
def test_a_broken_cache_is_found(folder):
    flags = ["--engine", "hf", "--ckpt", folder, "--prompt", "The cat", "--max_new_tokens", "30", "--verify"]
    result = run("-c", BREAK_THE_CACHE, *flags)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "DIFFERENT at row 0" in result.stderr and "Logits of the two" in result.stderr


@pytest.mark.slow
@only_llama
def test_a_model_that_brings_code_is_refused_and_runs_none(folder, tmp_path):
    """transformers asks on stdin whether to run it, and takes the first answer that comes."""
    mine = shutil.copytree(folder, tmp_path / "mine")
    (mine / "code.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')", encoding="utf-8")
    amend(mine, model_type="mine", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    assert_one_line(hf(mine, "--prompt", "The cat", input="y\n"), "cannot be read", mine)
    assert not (tmp_path / "harm").exists()


@only_llama
def test_weights_that_are_missing_or_not_finite_are_refused(folder, tmp_path):
    """transformers itself gives missing ones random numbers."""
    mine = shutil.copytree(folder, tmp_path / "mine")
    amend(mine, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lack model\.layers\.2"):
        HuggingFaceGPT(mine)
    amend(mine, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(mine)
    with torch.no_grad():
        model.lm_head.weight[1, 2] = torch.nan
    model.save_pretrained(mine)
    with pytest.raises(ValueError, match="NaN"):
        HuggingFaceGPT(mine)


def amend(folder, **entries):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | entries
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.slow
@only_llama
def test_a_long_context_ends_after_64_tokens_and_verify_names_the_better_check(folder, tmp_path):
    mine = shutil.copytree(folder, tmp_path / "mine")
    amend(mine, max_position_embeddings=131072)
    result = ok(run("sample.py", "--engine", "hf", "--ckpt", mine, "--prompt", "The cat", "--verify"))
    assert "64 new tokens, compared" in result.stderr
    assert f"python -m check_cache {mine} compares logits" in result.stderr


def test_a_model_without_such_a_cache_is_refused_in_one_line(tokenizer, tmp_path):
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=400)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no usable cache: MambaForCausalLM returns no past_key_values"):
        HuggingFaceGPT(tmp_path)
