"""Stop texts: each row ends before the first of them, on every path, and no part of one is printed."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from helpers import ok, sample, text_before, texts_of
from model import CharTokenizer
from sample import Text

NAMES = "abc"
TOKENIZER = CharTokenizer(NAMES)
a_text = st.text(NAMES, max_size=30)
some_text = st.text(NAMES, min_size=1, max_size=30)
some_stops = st.lists(st.text(NAMES, min_size=1, max_size=4), max_size=3)


@given(some_text, a_text, some_stops, st.sets(st.integers(0, 30)))
def test_a_text_ends_before_its_first_stop_text(prompt, text, stops, cuts):
    """And not before the last one, nor because of one that is in the prompt or begins there, wherever we print."""
    row = Text(TOKENIZER.encode(prompt), TOKENIZER, stops)
    for number, token in enumerate(TOKENIZER.encode(text)):
        row.add(token)
        if number in cuts:
            row.new_piece()
    assert row.text == prompt + text_before(text, stops)
    assert row.ended == (text_before(text, stops) != text)
    ours = TOKENIZER.decode(row.prompt + row.new)
    assert (prompt + text).startswith(ours) and ours.startswith(row.text)


@given(a_text, some_stops)
@example("b", ["a", "baa"])
@example("abcab", ["abca", "b"])  # one stop text inside another
def test_what_is_printed_early_is_never_taken_back(text, stops):
    """No character of a stop text is shown, and fewer characters wait than a stop text has."""
    row = Text(TOKENIZER.encode("c"), TOKENIZER, stops)
    shown = row.new_piece()
    for token in TOKENIZER.encode(text):
        if row.ended:
            break
        row.add(token)
        shown += row.new_piece()
        assert ("c" + text_before(text, stops)).startswith(shown)
        assert row.ended or len(row.text) - len(shown) <= max(map(len, stops), default=0)
    assert shown + row.new_piece(final=True) == "c" + text_before(text, stops)


# -- sample.py --stop -------------------------------------------------------------------------------------------------


def test_a_generation_ends_when_all_rows_have_stopped(trained):
    """Otherwise it could go on for minutes after the last stop text."""
    text = texts_of(trained, "First ", 100)[0]
    result = ok(sample(trained, "--prompt", "First ", "--stop", text[8], "--max_new_tokens", "20"))
    assert result.stdout == "First " + text_before(text[6:], [text[8]])
    assert int(re.search(r"(\d+) tokens: TTFT", result.stderr)[1]) < 20
