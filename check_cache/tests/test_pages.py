"""Engines share pages among prompts and look them up by content. A key that leaves something out gives wrong text."""

import pytest
import torch

from bugs import Cache, Decoder
from check_cache import check_cache

KEYS = {
    "all tokens so far": lambda ids, begin, end: ids[:end],
    "tokens of the page": lambda ids, begin, end: ids[begin:end],
    "tokens and place": lambda ids, begin, end: (begin, ids[begin:end]),
    "last tokens before it and tokens": lambda ids, begin, end: ids[max(0, begin - 3) : end],
}


class Shares(Cache):
    """Keeps each full page in `store`, and the pages of a prompt that are there already are read from it.

    A prompt stops looking at the first page that is not there, if it `walks`.
    """

    def __init__(self, store, key, size, walks):
        super().__init__()
        self.store, self.key, self.size, self.walks = store, key, size, walks
        self.ids = None

    def update(self, key, value, layer):
        prompt = self.lengths[layer] == 0
        super().update(key, value, layer)
        held = self.keys[layer].clone(), self.values[layer].clone()
        for row, ids in enumerate(self.ids.tolist()):
            walking = prompt
            for begin in range(0, len(ids) - self.size + 1, self.size):
                page = slice(begin, begin + self.size)
                name = layer, str(self.key(ids, begin, begin + self.size))
                if walking and name in self.store:
                    for kept, shared in zip(held, self.store[name]):
                        kept[row, :, page] = shared
                else:
                    walking = walking and not self.walks
                    self.store.setdefault(name, [kept[row, :, page].clone() for kept in held])
        self.keys[layer], self.values[layer] = held
        return held


def engine(key, size, walks):
    model, store = Decoder("learned"), {}
    model.context = 256
    model.wpe = torch.nn.Embedding(256, model.wpe.embedding_dim)

    def step(ids, cache, pos):
        cache.ids = ids if cache.ids is None else torch.cat((cache.ids, ids), 1)
        return model(ids, cache, None, pos)

    new = lambda rows, length: Shares(store, KEYS[key], size, walks)  # noqa: E731
    return dict(full=model.full, new=new, step=step, context=256)


def verdict(key, size=8, walks=False, length=60):
    report = check_cache(**engine(key, size, walks), length=length, scenarios=["equal pages"])
    return report.results[0].status, report


@pytest.mark.parametrize("key", list(KEYS)[1:])
@pytest.mark.parametrize("length", [40, *(pytest.param(length, marks=pytest.mark.slow) for length in (60, 90, 200))])
def test_a_page_that_is_looked_up_by_too_little(key, length):
    for size in (4, 8, 16):
        status, report = verdict(key, size, length=length)
        assert status == "wrong", (size, report)


@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("size", [4, 16])
def test_a_page_that_is_looked_up_by_all_tokens_so_far(size, walks):
    status, report = verdict("all tokens so far", size, walks, length=90)
    assert status == "correct", report


@pytest.mark.parametrize("key", ["tokens and place", "last tokens before it and tokens"])
def test_an_engine_that_stops_at_the_first_page_that_is_not_there(key):
    status, report = verdict(key, 8, walks=True)
    assert status == "wrong", report
