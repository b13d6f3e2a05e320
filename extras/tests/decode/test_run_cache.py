"""The cache and the threads that a run of each engine leaves.

--verify compares the cache, and its Heads are views of what attention reads.
"""

import pytest
import torch

from extra_helpers import NGRAMS, needs_compiler
from extras.decode.cuda_graph import GraphedGPT
from extras.decode.engine import NUM_DRAFTS, Decoder, open_engine
from helpers import CONTEXT, MODELS, V, num_threads, prompts, random_model
from model import CharTokenizer, Sampling
from sample import Text, generate_texts, verify

TOKENIZER = CharTokenizer("".join(chr(ord("a") + i) for i in range(V)))
STEPS = 9
SETTINGS = dict(seed=3, temperature=1.0)


def engine(draft=None, compile=False):
    def run(model, prompts):
        texts = generate_texts(model, TOKENIZER, prompts, STEPS, draft=draft, compile=compile, **SETTINGS)
        return [row for [row] in texts]

    return run


def cuda_graph(model, prompts):
    """As sample.py --compile on a GPU. Here, its steps are launched one by one."""
    sampling = Sampling(samples=[0], **SETTINGS)
    rows = [Text(TOKENIZER.encode(prompt), TOKENIZER, sampling=sampling) for prompt in prompts]
    graphed = GraphedGPT(model, len(rows), CONTEXT, Sampling(samples=[0] * len(rows), **SETTINGS))
    for block in graphed.stream(torch.tensor([row.prompt for row in rows]), STEPS):
        for row, tokens in zip(rows, block.tolist()):
            for token in tokens:
                row.add(token)
    return rows


ENGINES = {
    "plain": (engine(), ["abc", "cab"]),
    "two lengths": (engine(), ["abc", "ab"]),
    "drafts": (engine(draft="ngram"), ["abc", "ab"]),
    "C": pytest.param((engine(compile=True), ["abc", "ab"]), marks=needs_compiler),
    "C, drafts": pytest.param((engine(compile=True, draft="ngram"), ["abc", "ab"]), marks=needs_compiler),
    "CUDA graph": (cuda_graph, ["abc", "cab"]),
}


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def ran(request):
    """A model after a run of an engine, and the rows of the run."""
    run, texts = request.param
    model = random_model(MODELS[9].config)
    model.ngrams = NGRAMS
    return model, run(model, texts)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("slot", [0, 9])
def test_verify_sees_one_damaged_slot_of_the_cache_that_the_run_has_left(row, slot, ran, capsys):
    """The tokens are right, so only the cache tells."""
    model, rows = ran
    cache = model.kv_cache
    verify(model, rows, cache)
    assert "verify: OK" in capsys.readouterr().err
    with torch.inference_mode():
        cache.value[1][row, 0, slot, 0] += 0.1
    with pytest.raises(SystemExit, match=f"verify: DIFFERENT at row {row}: logits, keys or values"):
        verify(model, rows, cache)


@pytest.mark.parametrize(
    "how", [{}, dict(draft="ngram"), pytest.param(dict(compile=True), marks=needs_compiler)], ids=str
)
def test_a_run_that_a_stop_string_ends_leaves_a_cache_to_continue(how):
    """An engine may have gone on after it: what it fed there does not count."""
    model = random_model(MODELS[9].config)
    model.ngrams = NGRAMS
    assert generate_texts(model, TOKENIZER, ["abc"], 0, **how)[0][0].text == "abc"
    text = str(generate_texts(model, TOKENIZER, ["abc"], seed=1, temperature=1.0)[0][0])
    said = str(generate_texts(model, TOKENIZER, ["abc"], stop=[text[6]], seed=1, temperature=1.0, **how)[0][0])
    assert said == text[: text.index(text[6], 3)]
    assert ("draft" in how) == hasattr(model.kv_cache, "drafts")  # for the report of sample.py
    asked = torch.tensor([TOKENIZER.encode(text[: len(said) + 1] + "d")])  # the stop string, and a question
    answer = model.generate(asked, 4, seed=2, cache=model.kv_cache)
    assert torch.equal(answer, model.generate(asked, 4, seed=2, kv_cache=False))


@needs_compiler
def test_the_next_run_leaves_the_cache_of_the_last_one_alone():
    """The C backend uses the memory of finished runs again, but not while somebody still looks at it."""
    model = random_model(MODELS[9].config)
    decoder = Decoder(model, compile=True)
    decoder.generate(torch.tensor([[1, 2, 3]]), 5, seed=1)
    cache = model.kv_cache
    before = cache.key[0].clone()
    decoder.generate(torch.tensor([[4, 5, 6]]), 5, seed=2)
    assert model.kv_cache is not cache and torch.equal(cache.key[0], before)


@pytest.mark.parametrize("draft, more", [(None, 0), ("ngram", NUM_DRAFTS)])
def test_a_cache_has_room_for_the_longest_text_and_its_drafts(draft, more):
    """The report of sample.py counts the slots. They are no more than the context."""
    model = MODELS[0]
    for steps, slots in ((4, 5 + 4 + more), (99, CONTEXT)):
        list(Decoder(model, draft, NGRAMS).stream([prompts(1, n)[0] for n in (3, 5, 3)], steps, seed=1))
        assert model.kv_cache.slots == slots


@needs_compiler
def test_the_c_backend_has_its_own_threads_and_says_only_that_it_compiles(capsys):
    """Those of torch would wait for work, and take the cores. Afterwards torch has its threads again."""
    model = random_model(MODELS[9].config)
    model.ngrams = NGRAMS
    rows = [Text(TOKENIZER.encode(text), TOKENIZER) for text in ("ab", "abc")]
    with num_threads(3):
        open_engine(model, rows, 9, Sampling(seed=1), compile=True)
        assert torch.get_num_threads() == 1
        torch.set_num_threads(3)
        for how in ({}, dict(draft="ngram"), dict(compile=True)):
            generate_texts(model, TOKENIZER, ["ab", "abc"], 9, **how)
            assert torch.get_num_threads() == 3
    assert model.kv_cache.slots == CONTEXT  # step.c has room for any text
    out, err = capsys.readouterr()
    assert out == "" and "decoding without" not in err
