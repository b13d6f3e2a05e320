"""Stop texts: each row ends before the first of them, on every path, and no part of one is printed."""

import io
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import assert_each_row_stops, assert_one_line, ok, sample, text_before, texts_of
from model import CharTokenizer
from sample import SEPARATOR, GeneratedText, write_texts

NAMES = "abc"
TOKENIZER = CharTokenizer(NAMES)
a_text = st.text(NAMES, max_size=30)
some_stops = st.lists(st.text(NAMES, min_size=1, max_size=4), max_size=3)


@given(a_text, a_text, some_stops)
def test_a_text_ends_before_its_first_stop_text(prompt, text, stops):
    """And not before the last one, nor because of one that is in the prompt or begins there."""
    row = GeneratedText(TOKENIZER.encode(prompt), TOKENIZER, stops)
    for token in TOKENIZER.encode(text):
        row.add(token)
        if row.ended:
            break
    assert row.text == prompt + text_before(text, stops)
    assert row.ended == (text_before(text, stops) != text)
    assert (prompt + text).startswith(TOKENIZER.decode(row.ids)) and TOKENIZER.decode(row.ids).startswith(row.text)


@given(a_text, some_stops)
@example("b", ["a", "baa"])
@example("abcab", ["abca", "b"])  # one stop text inside another
def test_what_is_printed_early_is_never_taken_back(text, stops):
    """No character of a stop text is shown, and fewer characters wait than a stop text has."""
    row, shown = GeneratedText([], TOKENIZER, stops), ""
    for token in TOKENIZER.encode(text):
        if row.ended:
            break
        row.add(token)
        assert row.settled().startswith(shown) and text_before(text, stops).startswith(row.settled())
        shown = row.settled()
        assert row.ended or len(row.text) - len(shown) < max(map(len, stops), default=1)


def test_a_stream_is_written_as_it_comes_until_every_row_has_ended(monkeypatch):
    """Rows that end are told to the stream, which then spends nothing on them. -1 pads the shorter rows of a block."""
    ended, seen, terminal = [False, False], [], io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(terminal))

    def stream():
        for block in ([[0, 1], [2, -1]], [[0, 1], [2, 1]], [[2, 2], [1, -1]], [[2, 2], [2, 2]]):
            seen.append((terminal.getvalue(), *ended))
            yield torch.tensor(block)

    rows = [GeneratedText([2], TOKENIZER, ["bab", "bb"]), GeneratedText([1], TOKENIZER, ["bb"])]
    times = write_texts(stream(), rows, ended)
    assert [row.text for row in rows] == ["ca", "bcc"]
    assert terminal.getvalue() == f"ca{SEPARATOR}bcc".encode()
    assert seen == [(b"c", False, False), (b"c", False, False), (b"ca", True, False)] and ended == [True, True]
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
    assert_one_line(sample(trained, "--stop", "O#"), "no '#' in the vocabulary", code=1)
    assert_one_line(sample(trained, "--stop", ""), "--stop", "empty", code=2)
    assert_one_line(sample(trained, "--stop", "O", "--explain"), "--explain")
