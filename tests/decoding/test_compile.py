"""The compiled step gives the tokens of model.py for every network, and needs one program per shape."""

import os
import platform
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
    DRAFTS,
    FILTERS,
    MODELS,
    ROOT,
    V,
    a_filter,
    a_model,
    a_seed,
    assert_same_as_alone,
    linux,
    needs_compiler,
    num_threads,
    ok,
    prompts,
    random_model,
    run,
)
from kvgpt.decoding import compile as compiling
from kvgpt.decoding.compile import CompileError
from kvgpt.decoding.decode import Decoder
from model import GPT, GPTConfig

pytestmark = needs_compiler

NETWORKS = [
    dict(n_embd=20, n_head=4, activation="gelu"),  # sizes that fill no vector, and heads of five
    dict(n_embd=48, n_head=3, n_kv_head=1, activation="gelu_tanh", bias=False, mlp_ratio=1.3),
    dict(n_embd=96, n_head=2, activation="swiglu", pos_emb="rope", qk_norm=True, norm_first=False, mlp_ratio=5),
    dict(n_embd=64, n_head=4, n_kv_head=2, vocab_size=130, tie_weights=False, pos_emb="rope"),
    dict(n_embd=2, n_head=1, vocab_size=2, block_size=3, pos_emb="rope"),
]


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_gets_its_tokens(network):
    config = GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | network)
    model = random_model(config)
    idx = torch.randint(config.vocab_size, (2, config.block_size // 2), generator=torch.Generator().manual_seed(1))
    for draft in (None, "ngram"):
        decoder = Decoder(model, draft, compile=True)
        for seed, filters in enumerate(FILTERS):
            got = decoder.generate(idx, config.block_size, seed=seed, **filters)
            assert_same_as_alone(model, got, idx, config.block_size, range(2), seed, filters)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_large_model_is_read_where_it_lies(network, monkeypatch):
    """The step then has no copy of the matrices, and threads and other rows change no bit either."""
    monkeypatch.setattr(compiling, "LARGE", 1)
    monkeypatch.setattr(compiling, "WORK_PER_THREAD", 1)
    config, texts = GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | network), []
    model = random_model(config)
    idx = torch.randint(config.vocab_size, (17, config.block_size // 2), generator=torch.Generator().manual_seed(1))
    for threads, draft, rows in ((1, None, 17), (2, "ngram", 17), (3, None, 2), (1, "ngram", 1)):
        with num_threads(threads):
            texts.append(Decoder(model, draft, compile=True).generate(idx[:rows], config.block_size, seed=1))
    assert_same_as_alone(model, texts[0], idx, config.block_size, range(17), 1, {})
    for other in texts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(texts[0], other))


MEMORY = """
import resource, torch
from kvgpt.decoding.decode import Decoder
from model import GPT, GPTConfig

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

model = GPT(GPTConfig(block_size=64, vocab_size=5000, n_layer=5, n_head=12, n_embd=768)).eval()
idx = torch.zeros(1, 1, dtype=torch.int64)
small = GPT(GPTConfig(block_size=64, vocab_size=50, n_layer=1, n_head=1, n_embd=64)).eval()
Decoder(small, compile=True).generate(idx, 20, seed=0)  # what a first generation takes anyway
before = peak()
Decoder(model, compile=True).generate(idx, 20, seed=0)
print((peak() - before) / sum(4 * p.numel() for p in model.parameters()))
"""


@linux
@pytest.mark.slow
def test_a_large_model_is_in_memory_once():
    assert float(ok(run("-c", MEMORY, env={"MALLOC_ARENA_MAX": "1"})).stdout) < 0.2


def test_of_equal_logits_top_k_keeps_the_lowest_ids():
    """Tokens 2i and 2i + 1 have the same row in the head, so every rank is a tie."""
    model, idx = random_model(MODELS[0].config), prompts(3, 4)
    with torch.no_grad():
        head = model.lm_head.weight
        head[1::2] = head[0 : len(head) // 2 * 2 : 2]
    for k in (1, 3, 5):
        got = Decoder(model, compile=True).generate(idx, 11, seed=k, top_k=k)
        assert all(map(torch.equal, got, model.generate(idx, 11, seed=k, top_k=k)))


@pytest.mark.parametrize("filters", [*FILTERS, dict(temperature=2.0, top_k=50000), dict(temperature=0.0, top_p=0.1)])
def test_a_vocabulary_of_gpt2_gets_its_tokens(filters):
    """With it the noise, the filters and the search for the best take many vectors, and ids are far apart."""
    model = random_model(GPTConfig(block_size=20, vocab_size=50257, n_layer=1, n_head=2, n_embd=16))
    idx = torch.tensor([[50256, 7], [0, 50255]])
    got = Decoder(model, compile=True).generate(idx, 18, seed=3, **filters)
    assert_same_as_alone(model, got, idx, 18, range(2), 3, filters)


@settings(max_examples=20)
@given(a_model, st.sampled_from(sorted(DRAFTS)), a_filter, a_seed)
def test_threads_and_other_rows_change_no_bit(model, draft, filters, seed):
    """Whether a thread computes some outputs of every product or some of the rows, every sum is the same."""
    texts = []
    for threads, rows in ((1, 17), (2, 17), (3, 2), (1, 1)):
        with pytest.MonkeyPatch.context() as patch, num_threads(threads):
            patch.setattr(compiling, "WORK_PER_THREAD", 1)
            texts.append(Decoder(model, **DRAFTS[draft], compile=True).generate(prompts(17, 3)[:rows], 99, seed=seed))
    for other in texts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(texts[0], other))


A_SLEEP = [("looks < LOOKS", "looks < 0")]
NO_THREAD = [("if (pthread_create(pool->ids + i, NULL, serve, pool)) return NULL;", "return NULL;")]
NO_MEMORY = [("if (!memory) return -1;", "free(memory), memory = NULL; if (!memory) return -1;")]


@pytest.fixture
def patched_step(tmp_path, monkeypatch):
    """A function that edits a copy of step.c, so that what a machine does rarely happens always."""

    def patch(replacements):
        text = compiling.SOURCE.read_text(encoding="utf-8")
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (tmp_path / "step.c").write_text(text, encoding="utf-8")
        monkeypatch.setattr(compiling, "SOURCE", tmp_path / "step.c")
        monkeypatch.setattr(compiling, "WORK_PER_THREAD", 1)

    with num_threads(3):
        yield patch


def test_threads_that_sleep_at_every_barrier_change_no_token(patched_step):
    patched_step(A_SLEEP)
    model = random_model(GPTConfig(block_size=80, vocab_size=V, n_layer=2, n_head=4, n_embd=64))
    ragged = [prompts(1, n, n)[0] for n in (3, 70)]
    for draft in DRAFTS.values():
        got = Decoder(model, **draft, compile=True).generate(ragged, 80, seed=3)
        assert_same_as_alone(model, got, ragged, 80, range(2), 3, {})


def test_too_little_memory_is_an_error_of_its_own(patched_step):
    patched_step(NO_MEMORY)
    with pytest.raises(MemoryError, match="the step in C"):
        Decoder(MODELS[0], compile=True).generate(prompts(1, 3), 5)


def test_without_threads_there_is_no_step_in_c(patched_step):
    patched_step(NO_THREAD)
    with pytest.raises(CompileError, match="does not let us start the threads"):
        Decoder(MODELS[0], compile=True)


def test_a_prompt_may_be_longer_than_a_forward():
    model = random_model(GPTConfig(block_size=300, vocab_size=V, n_layer=1, n_head=2, n_embd=16))
    ragged = [prompts(1, n, n)[0] for n in (64, 299, 1, 65, 130, 200)]
    for draft in DRAFTS.values():
        decoder = Decoder(model, **draft, compile=True)
        assert_same_as_alone(model, decoder.generate(ragged, 40, seed=2), ragged, 40, range(6), 2, {})
    many = prompts(150, 3)  # more rows than a forward holds
    assert_same_as_alone(model, Decoder(model, compile=True).generate(many, 9, seed=2), many, 9, range(150), 2, {})


def test_a_new_decoder_takes_the_new_weights():
    model = random_model(GPTConfig(block_size=8, vocab_size=7, n_layer=1, n_head=1, n_embd=8))
    idx = torch.zeros(1, 1, dtype=torch.int64)
    before = model.generate(idx, 7, temperature=0, kv_cache=False)
    assert torch.equal(Decoder(model, compile=True).generate(idx, 7, temperature=0)[0][None], before)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    after = model.generate(idx, 7, temperature=0, kv_cache=False)
    assert not torch.equal(before, after)
    assert torch.equal(Decoder(model, compile=True).generate(idx, 7, temperature=0)[0][None], after)


# -- step.c belongs to one model.py ------------------------------------------------------------------------------------

EDITS = {  # right edits of model.py, after which step.c would write another text, or none
    "window": (
        "if pos.size(1) == 1 and min(self.lengths) == t:",
        "if pos.size(1) == 1 and min(self.lengths) == t < 8:",
    ),
    "gelu": ("F.gelu(x, approximate=self.approximate)", 'F.gelu(x, approximate="tanh")'),
    "eps": ("self.ln_1 = nn.LayerNorm(config.n_embd, bias", "self.ln_1 = nn.LayerNorm(config.n_embd, 1e-4, bias"),
    "norm": ("self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)", "self.ln_2 = nn.RMSNorm(config.n_embd)"),
    "logits": ("return self.lm_head(x)", "return 9 * torch.tanh(self.lm_head(x) / 9)"),
    "sampler": ("score = logits + temperature * noise", "score = logits + 2 * temperature * noise"),
    "loop": ("tokens[:, end] = new", "tokens[:, end] = new.clamp(min=1)"),
}
SAMPLE_COPY = "--prompt CC --seed 4 --device cpu --max_new_tokens 12".split()


def test_step_c_belongs_to_this_model_py():
    """If this fails you have edited model.py. Make step.c compute the same, and put the hash into compile.py."""
    assert compiling.model_sha256() == compiling.MODEL_SHA256


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_after_an_edit_of_model_py_one_line_says_so_and_the_text_is_the_plain_one(edit, tmp_path, trained):
    for name in ("model.py", "sample.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "kvgpt", tmp_path / "kvgpt")
    source = (tmp_path / "model.py").read_text(encoding="utf-8")
    old, new = EDITS[edit]
    assert source.count(old) == 1, old
    (tmp_path / "model.py").write_text(source.replace(old, new), encoding="utf-8")
    flags = ["sample.py", "--ckpt", trained / "ckpt.pt", *SAMPLE_COPY]
    plain, compiled = run(*flags, cwd=tmp_path), run(*flags, "--compile", cwd=tmp_path)
    assert ok(compiled).stdout == ok(plain).stdout
    assert compiled.stderr.count("decoding without --compile") == 1


def test_comments_and_docstrings_are_no_edit(monkeypatch, tmp_path):
    text = Path(compiling.model_py.__file__).read_text(encoding="utf-8")
    for old, new in (("# causal attention within x", "# another"), ('"""Attention and MLP,', '"""Both,')):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "model.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(compiling.model_py, "__file__", str(tmp_path / "model.py"))
    compiling.model_sha256.cache_clear()
    try:
        assert compiling.model_sha256() == compiling.MODEL_SHA256
    finally:
        compiling.model_sha256.cache_clear()


def test_another_layer_in_the_model_is_refused():
    model = random_model(MODELS[8].config, seed=8)
    model.transformer["ln_f"] = torch.nn.RMSNorm(model.config.n_embd)
    with pytest.raises(CompileError, match="RMSNorm"):
        Decoder(model, compile=True)


def test_other_numbers_than_float32_are_refused():
    with pytest.raises(CompileError, match=r"float32.*bfloat16"):
        Decoder(GPT(GPTConfig(8, 7, 1, 1, 8)).bfloat16(), compile=True)


# -- which program is kept where ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_serves_all_models_of_a_shape_and_is_compiled_again_when_anything_changes(
    tmp_path, monkeypatch, capfd
):
    """A stale program would run older code, and a damaged one could do anything."""
    source = Path(shutil.copy(ROOT / "kvgpt" / "decoding" / "step.c", tmp_path))
    monkeypatch.setattr(compiling, "SOURCE", source)

    def compiles(n_embd=8, seed=0, draft=None, rows=1, top_k=None):
        compiling.find_compiler.cache_clear()
        model = random_model(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=n_embd), seed)
        idx = torch.tensor([[1, 2]])
        got = Decoder(model, draft, compile=True).generate(idx.repeat(rows, 1), 6, seed=1, top_k=top_k)
        assert torch.equal(got[0][None], model.generate(idx, 6, seed=1, top_k=top_k))
        stderr = capfd.readouterr().err
        assert stderr.count("\n") == stderr.count("--compile: compiled the step in C in")
        return stderr.count("compiled")

    assert compiles() == 1 and compiles() == 0
    assert compiles(seed=1, draft="ngram", rows=3, top_k=2) == 0
    (program,) = tmp_path.glob("__pycache__/step-*.so")
    assert compiles(n_embd=16) == 1
    damaged = program.with_name("damaged")  # a file of its own, because this process has the program mapped
    damaged.write_bytes(program.read_bytes()[:-1000])
    damaged.replace(program)
    assert compiles() == 1 and compiles() == 0
    with open(source, "a", encoding="utf-8") as f:
        f.write("/* a comment */\n")
    assert compiles() == 1 and compiles() == 0
    with monkeypatch.context() as patch:
        patch.setenv("CC", "cc -O1")
        assert compiles() == 1

    shutil.rmtree(tmp_path / "__pycache__")
    (tmp_path / "__pycache__").write_text("no folder", encoding="utf-8")
    assert compiles() == compiles() == 1


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs the flags of x86")
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_chips_with_shorter_vectors_give_the_same_tokens(flags, monkeypatch):
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} {flags}")
    compiling.find_compiler.cache_clear()
    try:
        for network in NETWORKS[2:4]:
            model = random_model(GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | network))
            idx = prompts(9, 5)
            got = Decoder(model, "ngram", compile=True).generate(idx, 65, seed=1)
            assert_same_as_alone(model, got, idx, 65, range(9), 1, {})
    finally:
        compiling.find_compiler.cache_clear()


def test_a_compiler_that_fails_is_named_with_its_error(monkeypatch):
    monkeypatch.setattr(compiling, "SOURCE", ROOT / "README.md")
    with pytest.raises(CompileError, match="cannot compile the step in C"):
        Decoder(MODELS[0], compile=True)
