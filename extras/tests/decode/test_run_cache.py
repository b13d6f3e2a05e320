"""The cache that a run of each engine leaves: --verify compares it, and its Heads are views of what attention reads."""

import pytest
import torch

from extra_helpers import NGRAMS, needs_compiler
from extras.decode.cuda_graph import GraphedGPT
from helpers import CONTEXT, MODELS, V, random_model
from model import CharTokenizer, Sampling
from sample import Text, generate_texts, verify

TOKENIZER = CharTokenizer("".join(chr(ord("a") + i) for i in range(V)))
STEPS = 9
SETTINGS = dict(seed=3, temperature=1.0)


def engine(**how):
    def rows_of(model, prompts):
        stats = {}
        generate_texts(model, TOKENIZER, prompts, STEPS, stats=stats, **how, **SETTINGS)
        return stats["rows"]

    return rows_of


def cuda_graph(model, prompts):
    """As sample.py --compile on a GPU. Here, its steps are launched one by one."""
    rows = [Text(TOKENIZER.encode(prompt), TOKENIZER) for prompt in prompts]
    sampling = Sampling(samples=[0] * len(rows), **SETTINGS)
    graphed = GraphedGPT(model, len(rows), CONTEXT, sampling)
    for block in graphed.stream(torch.tensor([row.prompt for row in rows]), STEPS):
        for row, tokens in zip(rows, block.tolist()):
            row.add(tokens)
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
    rows_of, prompts = request.param
    model = random_model(MODELS[9].config)
    model.ngrams = NGRAMS
    return model, rows_of(model, prompts)


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("slot", [0, 9])
def test_verify_sees_one_damaged_slot_of_the_cache_that_the_run_has_left(row, slot, ran, capsys):
    """The tokens are right, so only the cache tells."""
    model, rows = ran
    cache = model.kv_cache
    assert verify(model, rows, cache, SETTINGS, num_samples=1) == 0 and "verify: OK" in capsys.readouterr().err
    with torch.inference_mode():
        cache.value[1][row, 0, slot, 0] += 0.1
    assert verify(model, rows, cache, SETTINGS, num_samples=1) == 1
    assert f"verify: DIFFERENT at row {row}: logits, keys or values" in capsys.readouterr().err


def test_zeros_in_the_view_of_a_head_move_the_logits(ran):
    model, rows = ran
    cache = model.kv_cache
    cache.length = 8  # positions that every row has

    def logits():
        cache.length = 8
        return model(torch.zeros(2, 1, dtype=torch.int64), cache=cache, last=True)[0]

    with torch.inference_mode():
        before = logits()
        cache.length = 8
        cache.heads[0][1].key_cache.zero_()
        assert not torch.allclose(logits(), before, atol=1e-3)
