"""The number of threads of a step: what the search picks, and that nothing else notices it."""

import pytest
import torch

from helpers import num_threads, tiny
from kvgpt.decoding import threads
from kvgpt.decoding.decode import Decoder
from kvgpt.decoding.threads import StepThreads, fastest


def choices(steps, cost):
    """Return what `fastest` picks for `steps` steps. cost(step, num_threads) returns seconds and share on a core."""
    search, picked = fastest(2), []
    choice = next(search)
    for step in range(steps):
        seconds, share = cost(step, choice)
        picked.append(choice)
        choice = search.send((seconds, share, seconds))
    return picked


def test_two_threads_stay_where_they_are_faster():
    picked = choices(1000, lambda step, n: (0.010 / n, 1.0))
    assert picked.count(2) > 950


def test_one_thread_stays_where_two_are_slower():
    """A trial that goes on although it has lost."""
    picked = choices(1000, lambda step, n: (0.010 * n, 1.0))
    assert picked.count(1) > 900


def test_a_busy_machine_is_never_tried_with_two_threads():
    picked = choices(1000, lambda step, n: (0.010, 0.6))
    assert set(picked) == {1}


def test_a_stall_ends_two_threads():
    """A second process that begins later: from then on a step on two threads takes a hundred times as long."""
    began = 500
    picked = choices(1000, lambda step, n: (0.010 / n if step < began or n == 1 else 1.0, 1.0 if step < began else 0.6))
    assert picked[began - 1] == 2
    assert picked[began + 1 :].count(2) == 0


@pytest.mark.parametrize("way", ["eager", "uncached", "draft", "ragged"])
def test_the_number_of_threads_is_restored_and_changes_no_token(way, monkeypatch):
    """Steps on another number of threads that leave it behind, or that pick other tokens."""
    model, idx = tiny(block_size=32), torch.zeros(1, 1, dtype=torch.int64)
    ways = {
        "eager": lambda: model.stream(idx, 31, seed=1),
        "uncached": lambda: model.stream(idx, 31, seed=1, kv_cache=False),
        "draft": lambda: Decoder(model, "ngram").stream(idx, 31, seed=1),
        "ragged": lambda: Decoder(model).stream([idx[0], idx[0].repeat(3)], 31, seed=1),
    }
    used = []

    def alternate(all_threads):
        while True:
            for n in (all_threads, 1):
                used.append(n)
                yield n

    with num_threads(2):
        expected = torch.cat(list(ways[way]()), dim=1)
        monkeypatch.setattr(threads, "SMALL_STEP", 0)
        monkeypatch.setattr(threads, "fastest", alternate)
        blocks = []
        for block in ways[way]():
            assert torch.get_num_threads() == 2
            blocks.append(block)
        assert torch.equal(torch.cat(blocks, dim=1), expected)
        assert {1, 2} <= set(used)


def test_a_step_that_fails_restores_the_number_of_threads():
    with num_threads(2):
        with pytest.raises(RuntimeError), StepThreads(1000).for_tokens(1) as number:
            assert number == torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 2
