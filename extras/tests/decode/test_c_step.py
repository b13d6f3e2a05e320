"""The compiled step gives the tokens of model.py for every network, and needs one program per shape."""

import copy
import math
import os
import platform
import shutil
import subprocess

import pytest
import torch

from extra_helpers import (
    DRAFTS,
    NETWORKS,
    NGRAMS,
    TEXT,
    assert_same_as_alone,
    copy_of_step,
    needs_compiler,
    without_minus_one,
)
from extras.decode import c_build, c_library, c_pack
from extras.decode import c_step as compiling
from extras.decode.c_step import CompileError, compile_step
from extras.decode.engine import Decoder
from extras.decode.ngrams import count_ngrams, ngram_table
from extras.decode.quantize import round_weights
from extras.decode.speculate import BatchState
from helpers import CONTEXT, FILTERS, MODELS, V, linux, num_threads, ok, prompts, random_model, run, unix
from model import GPT, GPTConfig

pytestmark = needs_compiler


@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_gets_its_tokens(network):
    config = GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | network)
    model = random_model(config)
    idx = torch.randint(config.vocab_size, (2, config.block_size // 2), generator=torch.Generator().manual_seed(1))
    ngrams = count_ngrams(TEXT % config.vocab_size, config.vocab_size, 1000)
    for draft in (None, "ngram"):
        decoder = Decoder(model, draft, ngrams, compile=True)
        for seed, filters in enumerate(FILTERS):
            got = decoder.generate(idx, config.block_size, seed=seed, **filters)
            assert_same_as_alone(model, got, idx, config.block_size, range(2), seed, filters)


def test_of_equal_logits_top_k_keeps_the_lowest_ids():
    """Tokens 2i and 2i + 1 have the same row in the head, so every rank is a tie."""
    model = random_model(MODELS[0].config)
    idx = prompts(3, 4)
    with torch.no_grad():
        head = model.lm_head.weight
        head[1::2] = head[0 : len(head) // 2 * 2 : 2]
    for k in (1, 3, 5):
        got = Decoder(model, compile=True).generate(idx, 11, seed=k, top_k=k)
        assert all(map(torch.equal, got, model.generate(idx, 11, seed=k, top_k=k)))


def test_a_vocabulary_of_gpt2_gets_its_tokens():
    """The noise, the filters and the search for the best then need many vectors, and ids are far apart."""
    model = random_model(GPTConfig(block_size=20, vocab_size=50257, n_layer=1, n_head=2, n_embd=16))
    idx = torch.tensor([[50256, 7], [0, 50255]])
    decoder = Decoder(model, compile=True)
    for filters in (FILTERS[0], FILTERS[1], FILTERS[4], dict(temperature=2.0, top_k=50000)):
        got = decoder.generate(idx, 9, seed=3, **filters)
        assert_same_as_alone(model, got, idx, 9, range(2), 3, filters)


def test_top_p_cuts_where_the_plain_loop_cuts():
    """At this temperature all probabilities are equal, and V * top_p is a whole number, so rounding decides."""
    model = random_model(GPTConfig(block_size=40, vocab_size=20, n_layer=1, n_head=2, n_embd=16))
    idx = prompts(4, 3)
    for seed, filters in enumerate([dict(top_p=0.2), dict(top_p=0.6), dict(top_p=0.3, top_k=10)] * 3):
        sampling = dict(temperature=1e20, seed=seed, **filters)
        got = Decoder(model, compile=True).generate(idx % 20, 37, **sampling)
        assert all(map(torch.equal, got, model.generate(idx % 20, 37, **sampling)))


@pytest.mark.parametrize("rows_per_thread", [4, 1000])  # threads that compute some rows, or some outputs
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_the_cache_of_a_row_has_the_same_bits_in_a_batch_of_any_size(weights, rows_per_thread, monkeypatch):
    """And on any number of threads. Rounding shows in every bit of the keys, and hardly ever in a token."""
    monkeypatch.setattr(compiling, "ROWS_PER_THREAD_SMALL", rows_per_thread)
    monkeypatch.setattr(compiling, "WORK_PER_THREAD", 1)
    model = random_model(GPTConfig(block_size=16, vocab_size=V, n_layer=2, n_head=3, n_embd=96))
    model = round_weights(model) if weights == "int8" else model
    prompt = prompts(1, 3)

    def last_keys(samples):
        """The keys of the last layer, without the slot of the newest token, which is not cached."""
        decoder.generate(prompt.expand(len(samples), 3), 13, seed=1, samples=samples)
        return model.kv_cache.key[-1][:, :, :15].clone()

    decoder = Decoder(model, compile=True, weights=weights)
    alone = {i: last_keys([i])[0] for i in (0, 1, 2, 5, 7, 15, 31, 32, 63)}
    for threads in (2, 3):
        with num_threads(threads):
            decoder = Decoder(model, compile=True, weights=weights)
            for B in (2, 8, 64):
                batch = last_keys(list(range(B)))
                assert all(torch.equal(batch[i], alone[i]) for i in alone if i < B), (threads, B)


@pytest.fixture
def patched_step(tmp_path, monkeypatch):
    """A function that edits a copy of step.c and pool.h, so that something rare happens every time."""

    def patch(replacements):
        copy_of_step(tmp_path, replacements)
        monkeypatch.setattr(c_build, "FLAGS", ["-O1", *c_build.FLAGS[1:]])  # compiles faster
        monkeypatch.setattr(c_build, "SOURCE", tmp_path / "step.c")
        monkeypatch.setattr(compiling, "WORK_PER_THREAD", 1)

    with num_threads(3):
        yield patch


def test_threads_that_sleep_at_every_barrier_change_no_token(patched_step):
    patched_step([("spins < SPINS", "spins < 0")])
    model = random_model(GPTConfig(block_size=80, vocab_size=V, n_layer=2, n_head=4, n_embd=64))
    ragged = [prompts(1, n, n)[0] for n in (50, 70)]
    got = Decoder(model, "ngram", NGRAMS, compile=True).generate(ragged, 80, seed=3)
    assert_same_as_alone(model, got, ragged, 80, range(2), 3, {})


def test_too_little_memory_is_an_error_of_its_own(patched_step):
    patched_step([("pool->memory = malloc(size);", "pool->memory = NULL;")])
    with pytest.raises(MemoryError, match="the C backend"):
        Decoder(MODELS[0], compile=True).generate(prompts(1, 3), 5)


def test_a_prompt_may_be_longer_than_a_forward():
    model = random_model(GPTConfig(block_size=300, vocab_size=V, n_layer=1, n_head=2, n_embd=16))
    ragged = [prompts(1, n, n)[0] for n in (64, 299, 1, 65, 130, 200)]
    for draft in ("one token per step", "n-grams"):
        decoder = Decoder(model, **DRAFTS[draft], compile=True)
        assert_same_as_alone(model, decoder.generate(ragged, 20, seed=2), ragged, 20, range(6), 2, {})
    many = prompts(150, 3)  # more rows than a forward holds
    assert torch.equal(Decoder(model, compile=True).generate(many, 9, seed=2), model.generate(many, 9, seed=2))


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("network", NETWORKS[2:4])
def test_a_decoder_has_copied_all_weights_and_a_new_one_takes_the_new(network, weights):
    model = random_model(GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | network))
    model = round_weights(model) if weights == "int8" else model
    decoder = Decoder(model, compile=True, weights=weights)
    idx = prompts(2, 3)
    before = decoder.generate(idx, 17, seed=1)
    for tensor in (*model.parameters(), *([] if model.rope is None else [model.rope])):
        with torch.no_grad():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(decoder.generate(idx, 17, seed=1), before)
    after = Decoder(model, compile=True).generate(idx, 17, seed=1)
    assert not torch.equal(before, after)
    assert_same_as_alone(model, after, idx, 17, range(2), 1, {})


def test_a_structure_of_another_size_is_an_error(patched_step):
    patched_step([("const float *bias;  /* NULL: no bias */", "const float *bias, *more;")])
    with pytest.raises(TypeError, match=r"Model has \d+ bytes in c_library.py and \d+ in step.c"):
        Decoder(MODELS[0], compile=True)
    with pytest.raises(TypeError, match="Params has the fields"):
        c_library.Params(weight=None)


# -- what reaches step.c has been checked ------------------------------------------------------------------------------

TABLE = ngram_table(NGRAMS, V)


def a_state(model=MODELS[0]):
    """The tensors of a BatchState: two rows with a prompt of three tokens, to be continued to eight."""
    return dict(
        tokens=torch.ones(2, model.config.block_size + 1, dtype=torch.int64),
        end=torch.tensor([3, 3]),
        cached=torch.tensor([0, 0]),
        limit=torch.tensor([8, 8]),
        first_new=torch.tensor([3, 3]),
        sample=torch.tensor([0, 1]),
        seed=torch.tensor([1, 0]),
        temperature=torch.tensor(1.0),
        top_k=torch.tensor(3),
        top_p=torch.tensor(0.5),
    )


def texts_of(state):
    return [row[:end].tolist() for row, end in zip(state["tokens"], state["end"].tolist())]


WRONG_KINDS = {
    "dtype": lambda x: x.double() if x.dtype == torch.float32 else x.int(),
    "bits": lambda x: x.view(torch.int32) if x.dtype == torch.float32 else x.view(torch.float64),
    "shape": lambda x: x[None],
    "rows": lambda x: torch.cat((x, x)) if x.dim() else x.repeat(2),
    "strides": lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x.expand(2),
    "device": lambda x: x.to("meta"),
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy(),
}


@pytest.mark.parametrize("field", a_state())
def test_a_tensor_of_another_kind_never_reaches_step_c(field):
    bind = compile_step(MODELS[0], 3, TABLE)
    state = a_state()
    for wrong in WRONG_KINDS.values():
        with pytest.raises(TypeError):
            bind(BatchState(**state | {field: wrong(state[field])}))
    if field not in ("top_k", "top_p"):
        with pytest.raises(TypeError):
            bind(BatchState(**state | {field: None}))


NAN, INF = math.nan, math.inf


def wrong_values(end):
    """Values out of range, where `end` tokens of a text are known."""
    return dict(
        tokens=(-1, V, 2**40),
        end=(-(2**40), -1, 0, CONTEXT + 2, 2**32 + 3),
        cached=(-(2**40), -1, end, 2**32),
        limit=(-1, CONTEXT + 2, 2**32 + 8, -(2**32) + 8),
        first_new=(-(2**63), end + 1),
        seed=(-1, 2**32),
        temperature=(NAN, INF, -INF, -1.0),
        top_k=(-1, 0),
        top_p=(NAN, INF, -0.1, 1.1),
    )


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("field", wrong_values(3))
def test_a_value_out_of_range_never_reaches_step_c_whenever_it_comes(field, steps_before):
    """Before the first call, or between two. In the last row only, because the first may be right."""
    bind = compile_step(MODELS[0], 3, TABLE)
    for i in range(len(wrong_values(3)[field])):
        state = a_state()
        run, _ = bind(BatchState(**state))
        run(steps_before)
        state[field].view(-1)[-1] = wrong_values(int(state["end"][-1]))[field][i]
        before = texts_of(state)
        with pytest.raises(ValueError, match=f"^{field} is "):
            run(1)
        assert texts_of(state) == before


@pytest.mark.parametrize(
    "table",
    [
        (TABLE[0][:-1], TABLE[1]),
        (TABLE[0], TABLE[1][:-1]),
        (TABLE[0][:, :-1].contiguous(), TABLE[1][:, :-1].contiguous()),
        (TABLE[0].double(), TABLE[1]),
        (TABLE[0], TABLE[1].long()),
        (TABLE[0].T.contiguous().T, TABLE[1]),
        (TABLE[0], TABLE[1].T.contiguous().T),
        (TABLE[0].to("meta"), TABLE[1]),
        (TABLE[0], TABLE[1] + 1),
        (TABLE[0], -TABLE[1]),
        (TABLE[0] * NAN, TABLE[1]),
        (TABLE[0] - INF, TABLE[1]),
        (TABLE[0][:0], TABLE[1][:0]),
        (TABLE[0].tolist(), TABLE[1]),
        TABLE[:1],
        None,
    ],
)
def test_a_table_of_another_kind_never_reaches_step_c(table):
    with pytest.raises((TypeError, ValueError)):
        compile_step(MODELS[0], 3, table)


def test_a_forward_has_room_for_the_newest_token_and_its_drafts(monkeypatch):
    """With one more draft token than fits, no forward would ever hold a row."""
    for wrong in (-1, 64):
        with pytest.raises(ValueError, match=f"num_drafts={wrong}"):
            compile_step(MODELS[0], wrong, TABLE)
    monkeypatch.setattr(compiling, "MIN_CHANCE_SMALL", 0.0)
    model = random_model(GPTConfig(block_size=90, vocab_size=V, n_layer=1, n_head=2, n_embd=16))
    state = a_state(model) | {"limit": torch.tensor([90, 90])}
    run, _ = compile_step(model, 63, TABLE)(BatchState(**state))
    steps, offered, _ = run(100)
    assert offered >= 63 and state["end"].tolist() == [90, 90]
    expected = model.generate(torch.ones(2, 3, dtype=torch.int64), 87, temperature=1.0, top_k=3, top_p=0.5, seed=1)
    assert texts_of(state) == expected.tolist()


def test_a_rotary_table_of_another_kind_is_refused():
    """It is no parameter, so nothing else looks at it."""
    for change, words in ((torch.Tensor.double, "float64"), (lambda rope: rope[:, :-1], "shape")):
        model = random_model(GPTConfig(block_size=8, vocab_size=V, n_layer=1, n_head=2, n_embd=16, pos_emb="rope"))
        model.rope = change(model.rope)
        with pytest.raises(CompileError, match=words):
            Decoder(model, compile=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_cache_is_in_float32_whatever_torch_makes_by_default(dtype):
    """step.c would write beyond the end of a cache in bfloat16."""
    expected = a_state()
    compile_step(MODELS[0], 0, None)(BatchState(**expected))[0](9)
    state = a_state()
    bind = compile_step(MODELS[0], 0, None)
    torch.set_default_dtype(dtype)
    try:
        run, _ = bind(BatchState(**state))
    finally:
        torch.set_default_dtype(torch.float32)
    run(9)
    assert texts_of(state) == texts_of(expected)


def test_a_cache_from_inference_mode_serves_outside_of_it():
    decoder = Decoder(MODELS[0], compile=True)
    idx = prompts(1, 4).expand(3, 4)  # samples of one prompt, whose cache is copied
    with torch.inference_mode():
        inside = decoder.generate(idx, 5, seed=1)
    assert torch.equal(decoder.generate(idx, 5, seed=1), inside)


# -- logits that are infinite or NaN -----------------------------------------------------------------------------------


FINITE = 12  # positions of a model whose logits are finite before, and NaN from there on


@pytest.fixture(scope="module")
def good_and_broken():
    """Two models that differ in the positions from FINITE on, which is where one of them is huge."""
    good = random_model(GPTConfig(block_size=24, vocab_size=V, n_layer=2, n_head=2, n_embd=32))
    broken = copy.deepcopy(good)
    with torch.no_grad():
        broken.transformer["wpe"].weight[FINITE:] = 3e38
    return good, broken


@pytest.mark.parametrize("rows, threads, rows_per_thread", [(1, 1, 1000), (5, 3, 1000), (5, 3, 1), (70, 2, 1000)])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_tokens_before_the_first_nan_come_out_and_the_threads_serve_on(
    weights, draft, rows, threads, rows_per_thread, good_and_broken, monkeypatch
):
    """The rows of a thread, or of a forward, get there at their own time."""
    monkeypatch.setattr(compiling, "WORK_PER_THREAD", 1)
    monkeypatch.setattr(compiling, "ROWS_PER_THREAD_SMALL", rows_per_thread)
    good, broken = (round_weights(copy.deepcopy(m)) if weights == "int8" else m for m in good_and_broken)
    idx = prompts(rows, 3)
    longest = FINITE + 1  # the last one is picked after the last position that is finite
    with num_threads(threads):
        ours, theirs = (Decoder(m, **DRAFTS[draft], compile=True, weights=weights) for m in (broken, good))
        for seed, filters in enumerate(FILTERS[::3]):
            expected = theirs.generate(idx, longest - 3, seed=seed, **filters)
            assert torch.equal(ours.generate(idx, longest - 3, seed=seed, **filters), expected)
            blocks = []
            with pytest.raises(FloatingPointError, match="logits are infinite or NaN"):
                for block in ours.stream(idx, 24, seed=seed, **filters):
                    blocks.append(block)
            texts = without_minus_one(idx, blocks)
            assert all(torch.equal(text, row[: len(text)]) for text, row in zip(texts, expected))
            assert max(map(len, texts)) == longest
            assert draft == "n-grams" or {len(text) for text in texts} == {longest}
            with pytest.raises(FloatingPointError):
                ours.generate(prompts(rows, longest), 1, seed=seed, **filters)  # in the prefill


def test_draft_tokens_that_are_accepted_before_the_first_nan_come_out(good_and_broken, monkeypatch):
    """In the first step too, which may get from a prompt to the first NaN."""
    monkeypatch.setattr(compiling, "MIN_CHANCE_SMALL", 0.0)
    good, broken = good_and_broken
    text = good.generate(prompts(1, 3), 21, temperature=0.0)[0]
    decoder = Decoder(broken, "ngram", count_ngrams(text.numpy(), V, 1000), compile=True)
    for length in range(3, FINITE + 1):
        generation = decoder.stream(text[None, :length], 21, temperature=0.0)
        blocks = []
        with pytest.raises(FloatingPointError):
            for block in generation:
                blocks.append(block)
        assert torch.equal(torch.cat((text[None, :length], *blocks), 1)[0], text[: FINITE + 1])
        assert generation.stats["accepted"] > 0 or length > FINITE - 2


def test_infinite_logits_are_refused_like_nan(good_and_broken):
    """A single one is enough, and finite ones of any size are not."""
    good, _ = good_and_broken
    model = GPT(GPTConfig(**vars(good.config) | dict(bias=True, tie_weights=False, norm_first=False))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.lm_head.weight[:, 0] = torch.linspace(-1e38, 1e38, V)
        for bias in (3.0, -3.0, 3.5, -3.5):  # of the last norm, which is all that the head reads
            model.transformer["h"][-1].ln_2.bias[0] = bias
            decoder = Decoder(model, compile=True)
            for filters in FILTERS:
                if abs(bias) == 3.0:
                    expected = V - 1 if bias > 0 else 0
                    assert (decoder.generate(prompts(1, 3), 4, seed=1, **filters)[0, 3:] == expected).all()
                else:
                    with pytest.raises(FloatingPointError):
                        decoder.generate(prompts(1, 3), 4, seed=1, **filters)


@pytest.mark.parametrize("network", NETWORKS[:3])
def test_where_the_logits_of_pytorch_are_not_finite_there_is_no_text(network):
    """One parameter after the other overflows in a norm, in an activation or in a product, and those of queries and
    keys together in attention alone."""
    model = random_model(GPTConfig(**dict(block_size=20, vocab_size=V, n_layer=1) | network))
    idx = prompts(1, 19)  # PyTorch's attention overlooks NaN in short texts
    overflows = 0
    for name in (*dict(model.named_parameters()), "_norm.weight"):
        for factor in (1e20, 1e30):
            huge = copy.deepcopy(model)
            for parameter, p in huge.named_parameters():
                p.data *= factor if parameter.endswith(name) else 1
            logits = huge(idx)[0][:, -1]
            overflows += not logits.isfinite().all()
            try:
                token = Decoder(huge, compile=True).generate(idx, 1, temperature=0.0)[:, -1]
            except FloatingPointError:
                continue
            assert logits.isfinite().all() and torch.equal(token, logits.argmax(-1)), (name, factor)
    assert overflows


def test_int8_is_refused_on_a_big_endian_machine(monkeypatch):
    """step.c takes four weights out of a word, the lowest byte first."""
    monkeypatch.setattr("sys.byteorder", "big")
    Decoder(MODELS[0], compile=True)
    with pytest.raises(CompileError, match="reads int8 weights on little-endian processors only"):
        Decoder(round_weights(random_model(MODELS[0].config)), compile=True, weights="int8")


# -- threads and processes ---------------------------------------------------------------------------------------------

THREADS = """
import os, threading, torch
from extras.decode import c_step as compiling
from extras.decode.engine import Decoder
from extras.decode.speculate import BatchState
from model import GPT, GPTConfig

torch.set_num_threads(2)
torch.manual_seed(0)
compiling.WORK_PER_THREAD = 1
model = GPT(GPTConfig(block_size=64, vocab_size=23, n_layer=2, n_head=2, n_embd=32)).eval()
decoder = Decoder(model, compile=True)

def text():
    return decoder.generate(torch.zeros(2, 1, dtype=torch.int64), 63, seed=1)[1].tolist()
"""
A_FORK = """
def until_done():
    while not done:
        text()

expected, done = text(), False
busy = threading.Thread(target=until_done, daemon=True)
busy.start()  # so that a call holds the lock when we fork
for _ in range(3):
    child = os.fork()
    if not child:
        same = text() == text() == expected
        decoder = None  # ends the child's threads and leaves the parent's alone
        os._exit(0 if same else 3)  # because a forked child with PyTorch's threads may crash in a normal exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
done = True
busy.join()
assert text() == expected
"""
AN_END = """
names = "tokens end cached limit first_new sample seed".split()
state = BatchState(
    **{name: torch.ones(2, dtype=torch.int64) for name in names} | {"tokens": torch.zeros(2, 65, dtype=torch.int64)},
    temperature=torch.tensor(1.0), top_k=None, top_p=None
)
state.limit.fill_(64)
run, _ = decoder.program(state)
end, cached = state.end.numpy(), state.cached.numpy()

def forever():  # without PyTorch, whose operations abort if the interpreter exits meanwhile
    while True:
        end[:], cached[:] = 1, 0
        run(64)

threading.Thread(target=forever, daemon=True).start()
threading.Event().wait(0.2)
"""


@linux
@pytest.mark.slow
def test_a_child_of_fork_has_threads_of_its_own():
    ok(run("-c", THREADS + A_FORK, timeout=60))


@linux
@pytest.mark.slow
def test_a_daemon_thread_may_decode_while_the_interpreter_ends():
    for _ in range(2):
        assert ok(run("-c", THREADS + AN_END, timeout=60)).stderr == ""


# -- which program is kept where ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_serves_all_models_of_a_shape_and_is_compiled_again_when_anything_changes(
    tmp_path, monkeypatch, capfd
):
    """A stale program would run older code, and a damaged one could do anything."""
    copy_of_step(tmp_path)
    source = tmp_path / "step.c"
    monkeypatch.setattr(c_build, "SOURCE", source)
    monkeypatch.setattr(c_build, "FLAGS", ["-O0", *c_build.FLAGS[1:]])  # compiles faster

    def compiles(n_embd=8, seed=0, draft=None, rows=1, top_k=None):
        c_build.find_compiler.cache_clear()
        model = random_model(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=1, n_embd=n_embd), seed)
        idx = torch.tensor([[1, 2]])
        ngrams = count_ngrams(TEXT % 5, 5, 100)
        got = Decoder(model, draft, ngrams, compile=True).generate(idx.repeat(rows, 1), 6, seed=1, top_k=top_k)
        assert torch.equal(got[0][None], model.generate(idx, 6, seed=1, top_k=top_k))
        stderr = capfd.readouterr().err
        assert stderr.count("\n") == stderr.count("--compile: compiled the C backend in")
        return stderr.count("compiled")

    assert compiles() == 1 and compiles() == 0
    assert compiles(seed=1, draft="ngram", rows=3, top_k=2) == 0
    (program,) = tmp_path.glob("__pycache__/step-*.so")
    assert compiles(n_embd=16) == 1
    damaged = program.with_name("damaged")  # a separate file, because this process has the program mapped
    damaged.write_bytes(program.read_bytes()[:-1000])
    damaged.replace(program)
    assert compiles() == 1 and compiles() == 0
    for file in (source, tmp_path / "pool.h"):
        with open(file, "a", encoding="utf-8") as f:
            f.write("/* a comment */\n")
        assert compiles() == 1 and compiles() == 0
    with monkeypatch.context() as patch:
        patch.setenv("CC", "cc -O1")
        assert compiles() == 1

    shutil.rmtree(tmp_path / "__pycache__")
    (tmp_path / "__pycache__").write_text("no folder", encoding="utf-8")
    assert compiles() == compiles() == 1


# -- compilers and chips -----------------------------------------------------------------------------------------------

CC = os.environ.get("CC", "cc")
x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs the flags of x86")


@pytest.fixture
def use_compiler(monkeypatch):
    """A function that sets $CC, or skips the test where its compiler is not installed."""

    def use(command):
        if not shutil.which(command.split()[0]):
            pytest.skip(f"needs {command}")
        monkeypatch.setenv("CC", command)
        c_build.find_compiler.cache_clear()

    yield use
    c_build.find_compiler.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [pytest.param(f"{CC} -mno-avx512f", marks=x86), pytest.param(f"{CC} -mno-avx", marks=x86), "clang"],
)
def test_shorter_vectors_and_clang_give_the_same_tokens(command, use_compiler):
    use_compiler(command)
    model = random_model(GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | NETWORKS[2]))
    idx = prompts(9, 5)
    for weights in ("float32", "int8"):
        model = round_weights(model) if weights == "int8" else model
        got = Decoder(model, "ngram", NGRAMS, compile=True, weights=weights).generate(idx, 30, seed=1)
        assert_same_as_alone(model, got, idx, 30, range(9), 1, {})


SHAPES = [
    (NETWORKS[2], c_pack.int8_panels),
    (NETWORKS[3], c_pack.panels),
    (NETWORKS[0], c_pack.panels),
    (dict(n_embd=4, n_head=4), c_pack.panels),  # heads of one number
]
COMPILERS = ["cc", "clang", "aarch64-linux-gnu-gcc", "arm-linux-gnueabihf-gcc", "riscv64-linux-gnu-gcc"]
COMPILERS += [pytest.param(f"{CC} {flag}", marks=x86) for flag in ("-mavx2 -mfma", "-mavx512f")]


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMPILERS, "x86_64-w64-mingw32-gcc"])
def test_no_compiler_warns(command, tmp_path):
    command = command.split()
    if not shutil.which(command[0]):
        pytest.skip(f"needs {command[0]}")
    flags = ["-O1", *c_build.FLAGS[1:-1], "-static" if "mingw" in command[0] else "-fPIC"]  # -O3 takes longer
    flags += ["-Wall", "-Wextra", "-Werror"]
    for network, layout in SHAPES if command[0] == "cc" else SHAPES[:1]:
        model = GPT(GPTConfig(**dict(block_size=70, vocab_size=V, n_layer=2) | network))
        macros = [f"-D{k}={v}" for k, v in compiling.shape_macros(model, 0.5, layout).items()]
        compile = [*command, *flags, *macros, c_build.SOURCE, "-o", tmp_path / "step", "-lm"]
        ok(subprocess.run(compile, capture_output=True, text=True))


def compiler_that(does, folder):
    """The path of a compiler that preprocesses everything, and otherwise does what this shell script says."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-E*) exec cc "$@" ;; esac\n{does}\n')
    compiler.chmod(0o755)
    return str(compiler)


@unix
def test_where_the_assembler_refuses_the_chip_we_compile_for_any(patched_step, use_compiler, tmp_path):
    patched_step([])
    use_compiler(compiler_that('case "$*" in *=native*) exit 1 ;; esac\nexec cc "$@"', tmp_path))
    got = Decoder(MODELS[0], compile=True).generate(prompts(2, 3), 9, seed=1)
    assert_same_as_alone(MODELS[0], got, prompts(2, 3), 9, range(2), 1, {})


STRANGE = {  # what a compiler does instead of compiling, and words of our line
    "echo 'the license has expired' >&2; exit 3": "the license has expired",
    "echo 'the license has expired'; exit 3": "the license has expired",
    "echo 'step.s: Messages:' >&2; echo 'step.s:7: Error: no such thing' >&2; exit 1": "(step.s:7: Error: no such",
    "exit 3": "exit code 3",
    "exit 0": "No such file",
    "while [ $# -gt 2 ]; do shift; done; cc -shared -x c /dev/null -o $1": "symbol",  # an empty library
}


@unix
@pytest.mark.parametrize("instead", STRANGE)
def test_a_compiler_of_another_kind_is_one_line(instead, patched_step, use_compiler, tmp_path):
    patched_step([])
    use_compiler(compiler_that(instead, tmp_path))
    with pytest.raises(CompileError) as error:
        Decoder(MODELS[0], compile=True)
    assert STRANGE[instead] in str(error.value) and "\n" not in str(error.value)
