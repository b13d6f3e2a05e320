"""Timing: the figures of serving, against figures computed by hand."""

import pytest

from extras.bench.__main__ import Timing


def summary(times, sizes, num_tokens):
    timing = Timing()
    timing.times = times
    timing.sizes = sizes
    return timing.summary(num_tokens)


@pytest.mark.parametrize(
    "times, sizes, num_tokens, expected",
    [
        # one token per step in 3 rows. Gaps of 4, 10 and 8 ms: the 99th percentile is 98% of the way from 8 to 10
        (
            [0.010, 0.014, 0.024, 0.032],
            [1, 1, 1, 1],
            12,
            dict(ttft_ms=10, tpot_ms=22 / 3, itl_p50_ms=8, itl_p99_ms=9.96, e2e_ms=32, tokens_per_s=375),
        ),
        # one step only: there is no gap, and no token after the first step
        ([0.25], [1], 2, dict(ttft_ms=250, tpot_ms=0, itl_p50_ms=0, itl_p99_ms=0, e2e_ms=250, tokens_per_s=8)),
        # blocks of several tokens: 300 ms for the 6 tokens after the first block, in gaps of 100 and 200 ms
        (
            [0.1, 0.2, 0.4],
            [1, 4, 2],
            7,
            dict(ttft_ms=100, tpot_ms=50, itl_p50_ms=150, itl_p99_ms=199, e2e_ms=400, tokens_per_s=17.5),
        ),
    ],
    ids=["three rows", "one step", "blocks"],
)
def test_the_figures_are_those_computed_by_hand(times, sizes, num_tokens, expected):
    assert summary(times, sizes, num_tokens) == pytest.approx(expected, rel=1e-9)


def test_record_keeps_one_time_and_one_size_per_step():
    timing = Timing()
    for size in (1, 4, 2):
        timing.record(size)
    timing.record()
    assert timing.sizes == [1, 4, 2, 1]
    assert len(timing.times) == 4 and 0 <= timing.times[0] and timing.times == sorted(timing.times)
