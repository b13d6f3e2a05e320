"""The numbers that the page shows are PyTorch's: the exported graph, asked in Node.js by the modules of the page."""

import json
import shutil
import subprocess

import pytest
import torch

from extra_helpers import attend
from extras.decode.explain import watch
from extras.formats.compare import own_text
from extras.formats.webpage import START
from extras.tests.web.conftest import CONFIG, WEB, ids_of
from helpers import ok
from oracles import per_head_logits

pytestmark = pytest.mark.slow


PROMPT = ids_of("A cab, dad? ")
T, STEPS, SAMPLING = len(PROMPT), 18, dict(temperature=1.0, seed=3)
MASKED = 7  # a column
POSITIONS = [0, 1, 2, 2, 5, 6, 7, 8, 20, 21, 22, 30]  # of the prompt


@pytest.fixture(scope="module")
def answers(page):
    if not shutil.which("node"):
        pytest.skip("no node")
    plan = dict(prompt=PROMPT, steps=STEPS, sampling=SAMPLING, positions=POSITIONS, masked=MASKED)
    command = ["node", WEB / "tests" / "numbers.mjs", page, json.dumps(plan)]
    return json.loads(ok(subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)).stdout)


@pytest.fixture(scope="module")
def text(model):
    """The ids of the run, from PyTorch."""
    return model.generate(torch.tensor([PROMPT]), STEPS, **SAMPLING)[0].tolist()


def logits_of(model, *args, **kwargs):
    return per_head_logits(model.state_dict(), vars(CONFIG), *args, **kwargs)


def assert_probabilities(got, logits, **tolerance):
    torch.testing.assert_close(torch.tensor(got), logits.softmax(-1).float(), **tolerance)


def test_text_and_probabilities(answers, model, text):
    assert answers["ids"] == text
    assert_probabilities(answers["probabilities"], logits_of(model, text)[T - 1 : -1])


def test_the_columns_and_the_attention_of_every_head(answers, model, text):
    """Keys and values are those in each Head's cache. Weights and mix are those of the newest query."""
    fed = torch.tensor([text[:-1]])
    for layer, (kept, attention) in enumerate(zip(answers["kept"], answers["attention"], strict=True)):
        with watch(model, layer) as seen:
            model(fed, pos=torch.arange(fed.size(1)))
        heads = model.kv_cache.heads[layer]
        for head, keys, values in zip(heads, *kept, strict=True):
            torch.testing.assert_close(torch.tensor(keys), head.key_cache.flatten(), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(torch.tensor(values), head.value_cache.flatten(), atol=1e-4, rtol=1e-4)
        assert len(attention) == CONFIG.n_head
        for i, (weights, mix) in enumerate(attention):
            head = heads[i * CONFIG.n_kv_head // CONFIG.n_head]
            out, expected = attend(head, seen["q"][:, i, -1:], seen["pos"][-1:])
            torch.testing.assert_close(torch.tensor(weights), expected.flatten(), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(torch.tensor(mix), out.flatten(), atol=1e-5, rtol=1e-4)


def test_at_other_positions_and_with_a_masked_column(answers, model):
    allowed = torch.ones(T, T).tril() == 1
    allowed[MASKED + 1 :, MASKED] = False
    for got, expected in (("moved", dict(positions=POSITIONS)), ("masked", dict(allowed=allowed))):
        logits = logits_of(model, PROMPT, **expected)[-1].float()
        torch.testing.assert_close(torch.tensor(answers[got]), logits, atol=1e-4, rtol=1e-4)


def test_the_page_opens_in_the_head_that_looks_most_at_the_character_before(page, model):
    text = own_text(model)
    pos = torch.arange(text.size(1))
    shares = {}
    for layer in range(CONFIG.n_layer):
        with watch(model, layer) as seen:
            model(text, pos=pos)
        for i in range(CONFIG.n_head):
            head = model.kv_cache.heads[layer][i * CONFIG.n_kv_head // CONFIG.n_head]
            _, weights = attend(head, seen["q"][:, i], pos)
            shares[layer, i] = weights[:, pos[1:], pos[:-1]].mean().item()
    best = max(shares, key=shares.get)
    start = json.loads((page / "model.json").read_text(encoding="utf-8"))["start"]
    assert (start["layer"], start["head"]) == best
    assert start["previous"] == pytest.approx(shares[best], abs=0.005)


def test_the_first_picture(page, model):
    opening = json.loads((page / "model.json").read_text(encoding="utf-8"))["opening"]
    ids, given = opening["ids"], opening["given"]
    sampling = {name: START[name] for name in ("temperature", "seed")}
    prompt = torch.tensor([ids_of(START["prompt"])])
    assert ids == model.generate(prompt, len(ids) - given, **sampling)[0].tolist()
