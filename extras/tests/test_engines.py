"""sample.py with extras: every engine with every flag, and --compile."""

import re

import pytest

from extra_helpers import needs_compiler
from helpers import assert_one_line, here, ok, run, sample, save_model, tiny

ENGINES = {
    "plain": [],
    "no cache": ["--no_kv_cache"],
    "draft": ["--draft", "ngram"],
    "C": ["--compile"],
    "C, draft": ["--compile", "--draft", "ngram"],
    "int8": ["--weights", "int8"],
    "onnx": ["--engine", "onnx"],
}
CELLS = {  # what is added, and the engines that refuse it
    "seed": ("--seed 5 --top_k 3 --top_p 0.9", []),
    "two prompts": ("--prompt ba", ["no cache"]),
    "prompts of two lengths": ("--prompt b", ["no cache", "onnx"]),
    "samples": ("--num_samples 3", []),
    "two prompts, samples": ("--prompt ba --num_samples 2", ["no cache"]),
    "stop": ("--stop a --stop bb", []),
    "slide": ("--overflow slide --max_new_tokens 40", []),
    "slide, two prompts": ("--overflow slide --max_new_tokens 40 --prompt ba", ["no cache"]),
    "verify": ("--verify", []),
    "verify, stop, samples": ("--verify --stop c --num_samples 2", []),
    "bfloat16": ("--dtype bfloat16", ["onnx"]),
    "explain": ("--explain", ["no cache", "draft", "C", "C, draft", "onnx"]),
    "cache as a value": ("--kv_cache=True", []),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with ckpt.pt and its export."""
    folder = tmp_path_factory.mktemp("exported")
    save_model(folder, tiny())
    done = here("--format", "onnx", "--out_dir", folder, script="extras/export.py")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cell", CELLS)
def test_every_engine_takes_every_flag_or_refuses_it_in_one_line(engine, cell, exported):
    more, refused_by = CELLS[cell]
    if (cell, engine) == ("bfloat16", "C"):
        pytest.skip("torch.compile, in test_gpu.py")
    flags = ["--out_dir", exported, "--device", "cpu", "--prompt", "ab", *more.split()]
    result = here(*flags, *ENGINES[engine], script="sample.py")
    if engine in refused_by:
        assert_one_line(result)
        assert result.stdout == ""
        return
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    if engine != "int8" and cell != "bfloat16":
        assert result.stdout == here(*flags, script="sample.py").stdout


# -- sample.py --compile -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "more", [[], ["--draft", "ngram"], ["--num_samples", 3, "--overflow", "slide", "--max_new_tokens", 50]]
)
def test_the_compiled_step_gives_the_same_text(trained, more):
    flags = ["--prompt", "First ", "--compile", "--max_new_tokens", 20, *more]
    result = ok(sample(trained, *flags, "--verify"))
    assert re.search(r"(\d) of \1 samples\)", result.stderr), result.stderr
    assert re.search(r"verify: [\d.]+ s this way, [\d.]+ s without the cache: ", result.stderr)
    drafts = re.search(r"^sample.py: draft: (\d+) of (\d+) draft tokens accepted, from (.*)$", result.stderr, re.M)
    assert bool(drafts) == ("ngram" in more)
    assert not drafts or (int(drafts[1]) <= int(drafts[2]) and drafts[3] == "n-grams of the training text")
    assert " * 32 slots * " in result.stderr  # the C backend has as many as the context, the plain loop only 26


def test_a_checkpoint_without_ngrams_is_said_to_draft_from_its_own_text(tmp_path):
    save_model(tmp_path, tiny())
    result = ok(sample(tmp_path, "--prompt", "abababab", "--draft", "ngram"))
    line = r"^sample.py: draft: \d+ of \d+ draft tokens accepted, from the text so far: the checkpoint has no n-grams$"
    assert re.search(line, result.stderr, re.M), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("works", [True, False])
def test_without_a_c_compiler_torch_compile_takes_the_step_or_one_line_says_so(works, trained, tmp_path):
    env = {"CC": "/nowhere/cc"} if works else {"CC": "false", "CXX": "false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    flags = ["--prompt", "First ", "--overflow", "slide", "--num_samples", 2, "--max_new_tokens", 60]
    child = ["sample.py", "--out_dir", trained, "--device", "cpu", *flags, "--compile"]
    result = ok(run(*child, env=env, timeout=300))
    assert "compiling with torch.compile instead" in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("decoding without --compile") == (not works)
    assert result.stdout == ok(sample(trained, *flags)).stdout
