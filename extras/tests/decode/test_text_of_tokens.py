"""Texts of tokens that are not characters, and of drafts: what is printed early, and where a stop text ends them."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from extra_helpers import bpe
from extras.formats.bpe import BPETokenizer, tokenizer_from_json
from helpers import text_before
from sample import Text

BPE = tokenizer_from_json(bpe(300))
# mostly bytes that are no text, or characters that are several tokens
some_ids = st.lists(st.integers(0, 299), max_size=25)
some_ids |= st.text("añ語😀�", min_size=1, max_size=9).map(BPE.encode)


@given(some_ids.filter(len), some_ids, st.lists(st.text("aeñ😀 ", min_size=1, max_size=3), max_size=2))
def test_a_text_of_tokens_streams_as_it_is_and_no_character_is_taken_back(prompt, ids, stops):
    """Where a character is spread over tokens, where bytes are no text, and where a stop text begins in a token."""
    assume(BPE.decode(prompt + ids).startswith(BPE.decode(prompt)))  # a user's prompt does not end within a character
    row = Text(prompt, BPE, stops)
    shown = row.new_piece()
    begin = BPE.decode(prompt)
    expected = begin + text_before(BPE.decode(prompt + ids)[len(begin) :], stops)
    for token in ids:
        row.add(token)
        shown += row.new_piece()
        assert expected.startswith(shown), (shown, expected)
        if row.ended:
            break
        if not row.text.endswith("\ufffd"):  # nothing waits but what may be the begin of a stop text
            assert len(row.text) - len(shown) <= max(map(len, stops), default=0)
    assert shown + row.new_piece(final=True) == row.text == expected


def byte_fallback(decoder, hole=0):
    """A tokenizer like Llama 2's: words begin with "▁", and what is no token is spelled in bytes.

    hole  so many ids in the middle have no token
    """
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abé中", "▁a", "ab"]
    vocab = {token: i + hole * (i > 256) for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("a", "b")]))
    tokenizer.model.byte_fallback, tokenizer.model.unk_token = True, "<unk>"
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return BPETokenizer(tokenizer.to_str())


SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
TOKENIZERS = {
    "byte level": BPE,
    "Llama": byte_fallback(decoders.Sequence([*SPACES, decoders.Strip(" ", 1, 0)])),
    "ids without a token": byte_fallback(decoders.Sequence([*SPACES, decoders.Strip(" ", 1, 0)]), hole=200),
    "no strip": byte_fallback(decoders.Sequence(SPACES)),
    "Metaspace": byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "WordPiece": byte_fallback(decoders.WordPiece("▁")),
    "BPE": byte_fallback(decoders.BPEDecoder("b")),
    "CTC": byte_fallback(decoders.CTC("<unk>", "▁")),
    "none": byte_fallback(None),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_what_is_written_is_the_decoding_of_all_tokens(name, data):
    """With every decoder of the library, for ids of text and for any ids."""
    tokenizer = TOKENIZERS[name]
    bytes_of = st.text("aé中👍 ñ", min_size=1, max_size=5).map(tokenizer.encode)
    some = st.lists(bytes_of | st.lists(st.integers(0, len(tokenizer.vocab) - 1), min_size=1, max_size=4), max_size=6)
    prompt, ids = data.draw(bytes_of), list(itertools.chain(*data.draw(some)))
    row = Text(prompt, tokenizer)
    shown = row.new_piece()
    for token in ids:
        row.add(token)
        shown += row.new_piece()
    assert shown + row.new_piece(final=True) == tokenizer.decode(prompt + ids)


def test_a_stop_string_spelled_in_bytes_ends_the_text_at_its_last_byte():
    tokenizer = TOKENIZERS["Llama"]
    row = Text(tokenizer.encode("a"), tokenizer, ["中"])
    for byte in "中".encode():
        assert not row.ended
        row.add(tokenizer.ids[f"<0x{byte:02X}>"])
    assert row.ended and row.text == "a"
