"""open_engine: --compile falls back to what can run here, says so, and changes no token."""

from types import SimpleNamespace

import pytest
import torch

from extra_helpers import NGRAMS, assert_same_as_alone, needs_compiler, without_minus_one
from extras.decode import engine
from extras.decode.c_step import CompileError
from extras.decode.engine import NUM_DRAFTS, Decoder, open_engine
from helpers import CONTEXT, MODELS, num_threads, prompts, random_model
from model import CharTokenizer, Sampling
from sample import generate_texts

MODEL = random_model(MODELS[0].config)
MODEL.ngrams = NGRAMS
RAGGED = [prompts(1, n, n)[0] for n in (3, 5, 3)]


def compiled(rows, num_new, stats, draft=None):
    """The blocks of --compile."""
    texts = [SimpleNamespace(prompt=row.tolist(), ended=False) for row in rows]
    return open_engine(MODEL, texts, num_new, Sampling(seed=1), stats, draft=draft, compile=True)


@pytest.fixture(autouse=True)
def three_threads():
    with num_threads(3):
        yield


@pytest.mark.parametrize(
    "error, rows, draft",
    [
        (CompileError("step.c cannot compute this"), RAGGED[::2], None),
        (CompileError("no C compiler works here"), RAGGED[::2], "ngram"),
        (CompileError("no C compiler works here"), RAGGED, None),
    ],
    ids=["another network", "drafts", "two lengths"],
)
def test_without_the_c_backend_a_note_says_why_and_the_tokens_are_the_same(error, rows, draft, monkeypatch, capsys):
    def compile_step(*_):
        raise error

    monkeypatch.setattr(engine, "compile_step", compile_step)
    stats = {}
    got = without_minus_one(rows, list(compiled(rows, 9, stats, draft)))
    assert capsys.readouterr().err.endswith(f": {error}: decoding without --compile\n")
    assert_same_as_alone(MODEL, got, rows, 9, range(len(rows)), 1, {})
    assert (stats["offered"] > 0) == (draft is not None)


@needs_compiler
def test_the_c_backend_has_its_own_threads_and_gives_up_nothing(capsys):
    """Those of torch would wait for work, and take the cores. It may say how long it compiled."""
    blocks = compiled(RAGGED, 9, {})
    assert torch.get_num_threads() == 1
    assert_same_as_alone(MODEL, without_minus_one(RAGGED, list(blocks)), RAGGED, 9, range(3), 1, {})
    assert MODEL.kv_cache.slots == CONTEXT
    out, err = capsys.readouterr()
    assert out == "" and "decoding without" not in err


@pytest.mark.parametrize("draft, more", [(None, 0), ("ngram", NUM_DRAFTS)])
def test_a_cache_has_room_for_the_longest_text_and_its_drafts(draft, more):
    """The report of sample.py counts the slots. They are no more than the context."""
    for steps, slots in ((4, 5 + 4 + more), (99, CONTEXT)):
        list(Decoder(MODEL, draft, NGRAMS).stream(RAGGED, steps, seed=1))
        assert MODEL.kv_cache.slots == slots


def test_texts_from_python_leave_torchs_threads_as_they_were():
    tokenizer = CharTokenizer("".join(chr(ord("a") + i) for i in range(MODEL.config.vocab_size)))
    for how in ({}, dict(draft="ngram"), dict(compile=True)):
        generate_texts(MODEL, tokenizer, ["ab", "abc"], 9, **how)
        assert torch.get_num_threads() == 3
