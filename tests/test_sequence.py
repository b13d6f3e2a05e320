"""Stop texts: each row ends before the first of them, on every path, and no part of one is printed."""

import io
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import assert_each_row_stops, assert_one_line, ok, sample, text_before, texts_of
from model import CharTokenizer
from sample import SEPARATOR, Sequence, num_undecided, write_stream

NAMES = "abc"
TOKENIZER = CharTokenizer(NAMES)
a_text = st.text(NAMES, max_size=30)
some_stops = st.lists(st.text(NAMES, min_size=1, max_size=4), max_size=3)


@given(a_text, a_text, some_stops)
def test_a_text_ends_before_its_first_stop_text(prompt, text, stops):
    """And not before the last one, nor because of one that is in the prompt or begins there."""
    row = Sequence(TOKENIZER.encode(prompt), TOKENIZER, stops).add(TOKENIZER.encode(text))
    assert row.update() == TOKENIZER.decode(row.ids) == prompt + text_before(text, stops)
    assert row.ended == (text_before(text, stops) != text)


@given(a_text, some_stops, st.lists(st.integers(1, 4), min_size=30))
@example("abcab", ["abca", "b"], [4] * 30)  # one stop text inside another
def test_a_text_ends_at_the_same_place_in_blocks_of_any_size(text, stops, sizes):
    """Drafts bring several characters at once, and must not carry a text past the place where single ones end it."""
    ids, row = TOKENIZER.encode(text), Sequence([], TOKENIZER, stops)
    for size in sizes:
        block, ids = ids[:size], ids[size:]
        if row.add(block).ended:
            break
    assert row.update() == TOKENIZER.decode(row.ids) == text_before(text, stops)


@given(a_text, some_stops)
@example("b", ["a", "baa"])
def test_what_is_printed_early_is_never_taken_back(text, stops):
    """No character of a stop text is shown, and no text waits although nothing can follow that would stop it."""
    whole = text_before(text, stops)
    for end in range(len(text) + 1):
        if len(text_before(text[:end], stops)) < end:
            break
        wait = num_undecided(text[:end], stops)
        assert whole.startswith(text[: end - wait])
        if wait:  # some continuation does stop here
            assert any(text_before(text[:end] + stop[wait:], stops) == text[: end - wait] for stop in stops)


def test_a_stream_is_written_as_it_comes_until_every_row_has_ended(monkeypatch):
    """Rows that end are told to the stream, which then spends nothing on them. -1 pads the shorter rows of a block."""
    ended, seen, terminal = [False, False], [], io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(terminal))

    def stream():
        for block in ([[0, 1], [2, -1]], [[0, 1], [2, 1]], [[2, 2], [1, -1]], [[2, 2], [2, 2]]):
            seen.append((terminal.getvalue(), *ended))
            yield torch.tensor(block)

    rows = [Sequence([2], TOKENIZER, ["bab", "bb"]), Sequence([1], TOKENIZER, ["bb"])]
    num_new, times = write_stream(stream(), rows, ended)
    assert [row.ids for row in rows] == [[2, 0], [1, 2, 2]]
    assert terminal.getvalue() == f"ca{SEPARATOR}bcc".encode()
    assert seen == [(b"c", False, False), (b"ca", False, False), (b"ca", True, False)] and ended == [True, True]
    assert num_new == 4  # in the longer row, with its stop string
    assert len(times) == 3 and 0 <= times[0] and times == sorted(times)


# -- sample.py --stop -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--no-kv_cache"]], ids=" ".join)
def test_each_row_stops_on_its_own_whatever_decodes_it(trained, flags):
    assert_each_row_stops(trained, flags)


def test_a_generation_ends_when_all_rows_have_stopped(trained):
    """Otherwise it could go on for minutes after the last stop text."""
    text = texts_of(trained, "First ", 100)[0]
    result = ok(sample(trained, "--prompt", "First ", "--stop", text[8], "--max_new_tokens", "20"))
    assert result.stdout == "First " + text_before(text[6:], [text[8]])
    assert int(re.search(r"(\d+) tokens: TTFT", result.stderr)[1]) < 20


@pytest.mark.slow
def test_a_stop_text_that_cannot_occur_is_one_line(trained):
    assert_one_line(sample(trained, "--stop", "O#"), "'#' is not in the vocabulary", code=1)
    assert_one_line(sample(trained, "--stop", ""), "--stop", "empty", code=2)
    assert_one_line(sample(trained, "--stop", "O", "--explain"), "--explain")
