"""start_generation: --compile falls back to what can run here, says so, and changes no token."""

from dataclasses import dataclass

import pytest
import torch

import model as model_py
from extra_helpers import NGRAMS, assert_same_as_alone, needs_compiler, without_minus_one
from extras.decode import decoder as decoder_py
from extras.decode.c_step import CompileError
from extras.decode.decoder import NUM_DRAFTS, Decoder, Generation, start_generation
from helpers import CONTEXT, MODELS, num_threads, prompts
from model import Sampling

MODEL = MODELS[0]
RAGGED = [prompts(1, n, n)[0] for n in (3, 5, 3)]


def chosen(rows, num_new, sampling=None, draft=None, threads=2):
    """Return what start_generation gives for --compile."""
    how = dict(draft=draft, ngrams=NGRAMS, compile=True, weights="float32", threads=threads, slots=CONTEXT)
    return start_generation(MODEL, rows, num_new, sampling or Sampling(seed=1), None, **how)


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    with num_threads(torch.get_num_threads()):
        yield


@pytest.fixture
def no_c(monkeypatch):
    """A function: let the C backend raise this error."""

    def no_c(error):
        def compile_step(*_):
            raise error

        monkeypatch.setattr(decoder_py, "compile_step", compile_step)

    return no_c


def test_a_filter_that_step_c_does_not_have_is_noticed_before_a_second_goes_into_compiling(monkeypatch, no_c, capsys):
    """As somebody would add it to model.py: a field of Sampling and an entry of FILTERS."""

    @dataclass
    class WithSecond(model_py.Sampling):
        only_second: bool | None = None

    def keep_second(ranked, sampling):
        return torch.arange(ranked.size(-1)) == 1

    monkeypatch.setitem(model_py.FILTERS, "only_second", keep_second)
    monkeypatch.setattr(model_py, "Sampling", WithSecond)
    no_c(AssertionError("compiled"))
    sampling = WithSecond(seed=1, only_second=True)
    for draft in (None, "ngram"):
        generation = chosen(RAGGED, 9, sampling, draft)
        assert isinstance(generation, Generation) and torch.get_num_threads() == 2
        said = "step.c has no only_second: decoding without --compile\n"
        assert capsys.readouterr().err.endswith(f": {said}")
        got = without_minus_one(RAGGED, list(generation))
        assert_same_as_alone(MODEL, got, RAGGED, 9, range(3), 1, {}, only_second=True)
    with pytest.raises(AssertionError, match="compiled"):  # a filter that is off costs nothing
        chosen(RAGGED, 9, WithSecond(seed=1))


@pytest.mark.parametrize(
    "error, rows, draft",
    [
        (CompileError("step.c cannot compute this"), RAGGED[::2], None),
        (CompileError("no C compiler works here"), RAGGED[::2], "ngram"),
        (CompileError("no C compiler works here"), RAGGED, None),
    ],
    ids=["another network", "drafts", "two lengths"],
)
def test_without_the_c_backend_a_note_says_why_and_the_tokens_are_the_same(error, rows, draft, no_c, capsys):
    no_c(error)
    generation = chosen(rows, 9, draft=draft, threads=3)
    assert capsys.readouterr().err.endswith(f": {error}: decoding without --compile\n")
    assert torch.get_num_threads() == 3
    got = without_minus_one(rows, list(generation))
    assert_same_as_alone(MODEL, got, rows, 9, range(len(rows)), 1, {})
    assert (generation.offered > 0) == (draft is not None)


@needs_compiler
def test_the_c_backend_has_its_own_threads_and_gives_up_nothing(capsys):
    """Those of torch would wait for work, and take the cores. It may say how long it compiled."""
    generation = chosen(RAGGED, 9, threads=3)
    assert generation.in_c and torch.get_num_threads() == 1 and generation.slots == CONTEXT
    got = without_minus_one(RAGGED, list(generation))
    assert_same_as_alone(MODEL, got, RAGGED, 9, range(3), 1, {})
    out, err = capsys.readouterr()
    assert out == "" and "decoding without" not in err


@pytest.mark.parametrize("draft, more", [(None, 0), ("ngram", NUM_DRAFTS)])
def test_a_cache_has_room_for_the_longest_text_and_its_drafts(draft, more):
    """The report of sample.py counts the slots. They are those of the cache, and no more than the context."""
    for steps, slots in ((4, 5 + 4 + more), (99, CONTEXT)):
        generation = Decoder(MODEL, draft, NGRAMS).stream(RAGGED, steps, seed=1)
        list(generation)
        assert generation.slots == generation.cache.slots == slots
