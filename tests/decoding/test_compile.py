"""The compiled step: the tokens of model.py for every network, from one program per shape."""

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
    lively,
    needs_compiler,
    num_threads,
    prompts,
)
from kvgpt.decoding import compile as compiling
from kvgpt.decoding.compile import CompileError, compile_step
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
    model = lively(config)
    idx = torch.randint(config.vocab_size, (2, config.block_size // 2), generator=torch.Generator().manual_seed(1))
    for draft in (None, "ngram"):
        decoder = Decoder(model, draft, compile=True)
        for seed, filters in enumerate(FILTERS):
            got = decoder.generate(idx, config.block_size, seed=seed, **filters)
            assert_same_as_alone(model, got, idx, config.block_size, range(2), seed, filters)


@settings(max_examples=20)
@given(a_model, st.sampled_from(sorted(DRAFTS)), a_filter, a_seed)
def test_threads_and_other_rows_change_no_bit(model, draft, filters, seed):
    """A thread computes some outputs of every product, or some of the rows. A sum is the same in all cases."""
    texts = []
    for threads, rows in ((1, 17), (2, 17), (3, 2), (1, 1)):
        with pytest.MonkeyPatch.context() as patch, num_threads(threads):
            patch.setattr(compiling, "WORK_PER_THREAD", 1)
            texts.append(Decoder(model, **DRAFTS[draft], compile=True).generate(prompts(17, 3)[:rows], 99, seed=seed))
    for other in texts[1:]:
        assert all(torch.equal(a, b) for a, b in zip(texts[0], other))


A_STALL = [("STALL 1e-3", "STALL -1.0"), ("spins < 20000", "spins < 0")]  # every wait seems to be one
NO_THREAD = [("!pthread_create(ids + started, NULL, work, workers + started)", "0")]
NO_MEMORY = [("if (!memory) return -1;", "free(memory), memory = NULL; if (!memory) return -1;")]


@pytest.fixture
def patched_step(tmp_path, monkeypatch):
    """A function that lets step.c meet what a machine does rarely, by replacements in a copy."""

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


@pytest.mark.parametrize("trouble", [A_STALL, NO_THREAD])
def test_a_thread_that_lost_its_core_or_never_came_changes_no_token(patched_step, trouble):
    patched_step(trouble)
    model = lively(GPTConfig(block_size=80, vocab_size=V, n_layer=2, n_head=4, n_embd=64))
    ragged = [prompts(1, n, n)[0] for n in (3, 70)]
    for draft in DRAFTS.values():
        got = Decoder(model, **draft, compile=True).generate(ragged, 80, seed=3)
        assert_same_as_alone(model, got, ragged, 80, range(2), 3, {})


def test_after_a_stall_one_thread_goes_on_for_a_while(patched_step, monkeypatch):
    patched_step(A_STALL)
    model = lively(GPTConfig(block_size=80, vocab_size=V, n_layer=2, n_head=4, n_embd=64))
    library = compiling.load_library(compiling.shape_macros(model, 0.5))
    threads, clock = [], [0.0]

    class Recorder:
        lanes = library.lanes

        def decode(self, *args):
            threads.append(args[5])
            return library.decode(*args)

    monkeypatch.setattr(compiling, "load_library", lambda macros: Recorder())
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: clock[0])
    decoder = Decoder(model, compile=True)

    def generate():
        threads.clear()
        decoder.generate(prompts(1, 3), 30, seed=1)
        return set(threads)

    decoder._compiled()  # its check has met a stall
    assert generate() == {1}
    clock[0] = 0.2
    assert generate() == {1}
    clock[0] = 0.3
    assert generate() == {3, 1}
    clock[0] = 2.0  # this pause is eight times as long
    assert generate() == {1}


def test_too_little_memory_is_an_error_of_its_own(patched_step):
    patched_step(NO_MEMORY)
    with pytest.raises(MemoryError, match="compiled step"):
        Decoder(MODELS[0], compile=True).generate(prompts(1, 3), 5)


def test_a_prompt_may_be_longer_than_a_forward():
    model = lively(GPTConfig(block_size=300, vocab_size=V, n_layer=1, n_head=2, n_embd=16))
    ragged = [prompts(1, n, n)[0] for n in (64, 299, 1, 65, 130, 200)]
    for draft in DRAFTS.values():
        decoder = Decoder(model, **draft, compile=True)
        assert_same_as_alone(model, decoder.generate(ragged, 40, seed=2), ragged, 40, range(6), 2, {})
    many = prompts(150, 3)  # more rows than a forward holds
    assert_same_as_alone(model, Decoder(model, compile=True).generate(many, 9, seed=2), many, 9, range(150), 2, {})


def test_the_compiled_step_follows_the_weights():
    """They are packed once, and a fused optimizer changes them without a trace in their version counters."""
    model = lively(GPTConfig(block_size=8, vocab_size=7, n_layer=1, n_head=1, n_embd=8))
    decoder, idx = Decoder(model, compile=True), torch.arange(7)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)

    def same():
        (ours,) = decoder.generate(idx[:, :1], 7, seed=1, temperature=0)
        assert torch.equal(ours[None], model.generate(idx[:, :1], 7, seed=1, temperature=0, kv_cache=False))

    same()
    model.train()
    for _ in range(20):
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    list(decoder.stream(idx[:, :1], 3))
    assert model.training and all(module.training for module in model.modules())
    model.eval()
    same()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    same()
    stream, got = decoder.stream(idx[:, :1], 7, seed=1), [0]
    got.append(int(next(stream)[0, 0]))
    with torch.no_grad():
        model.train()
        model.lm_head.weight.mul_(1)
        model.eval()
    got += [int(token) for block in stream for token in block[0]]
    assert got == model.generate(idx[:, :1], 7, seed=1, kv_cache=False)[0].tolist()


def test_a_network_that_was_edited_is_not_replaced_by_another():
    """step.c spells out the network once more. Its text would be the old network's."""
    edits = [
        lambda model: model.transformer.h[1].mlp.register_forward_hook(lambda module, x, y: 0.9 * y),
        lambda model: model.transformer.h[0].attn.c_proj.register_forward_hook(lambda module, x, y: y.roll(1, -1)),
        lambda model: model.lm_head.register_forward_hook(lambda module, x, y: y.flip(-1)),
        lambda model: setattr(model.transformer.ln_f, "eps", 10.0),
    ]
    for edit in edits:
        model = lively(MODELS[8].config, seed=8)
        compile_step(model, 0, None)
        edit(model)
        with pytest.raises(CompileError, match="another network than model"):
            compile_step(model, 0, None)


def test_other_numbers_than_float32_are_refused():
    with pytest.raises(CompileError, match=r"float32.*bfloat16"):
        Decoder(GPT(GPTConfig(8, 7, 1, 1, 8)).bfloat16(), compile=True).stream([torch.tensor([1])], 3)


# -- which program is kept where ---------------------------------------------------------------------------------------


def test_a_program_serves_all_models_of_a_shape_and_is_compiled_again_when_anything_changes(
    tmp_path, monkeypatch, capfd
):
    """A stale program would run older code, and a damaged one could do anything."""
    source = Path(shutil.copy(ROOT / "kvgpt" / "decoding" / "step.c", tmp_path))
    monkeypatch.setattr(compiling, "SOURCE", source)

    def compiles(n_embd=8, seed=0, draft=None, rows=1, top_k=None):
        compiling.find_compiler.cache_clear()
        model = lively(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=n_embd), seed)
        idx = torch.tensor([[1, 2]])
        got = Decoder(model, draft, compile=True).generate(idx.repeat(rows, 1), 6, seed=1, top_k=top_k)
        assert torch.equal(got[0][None], model.generate(idx, 6, seed=1, top_k=top_k))
        stderr = capfd.readouterr().err
        assert stderr.count("\n") == stderr.count("--compile: compiled the decode step in")
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
            model = lively(GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | network))
            idx = prompts(9, 5)
            got = Decoder(model, "ngram", compile=True).generate(idx, 65, seed=1)
            assert_same_as_alone(model, got, idx, 65, range(9), 1, {})
    finally:
        compiling.find_compiler.cache_clear()


def test_a_compiler_that_fails_is_named_with_its_error(monkeypatch):
    monkeypatch.setattr(compiling, "SOURCE", ROOT / "README.md")
    with pytest.raises(CompileError, match="cannot compile the decode step"):
        Decoder(MODELS[0], compile=True).stream([torch.tensor([1])], 3)
