"""Characters, and the tokenizers of extras/formats/bpe.py, with tokenizers and transformers as the oracles."""

import json
import os
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Split
from transformers import GPT2Tokenizer

from extra_helpers import TOKENIZER, bpe
from extras.formats.bpe import (
    FAR,
    PIECE,
    BPETokenizer,
    pieces_of,
    read_tokenizer,
    to_json,
    tokenizer_from_json,
    train_bpe,
)
from extras.formats.tokenizer import check_vocab_size, read_vocabulary, tokenizer_from_state
from helpers import CHARS, SAMPLE, ok, run

TEXT = SAMPLE.read_text(encoding="utf-8")
BPE = tokenizer_from_json(bpe())
a_text = st.text(max_size=40)  # any Unicode but surrogates
# white space decides where GPT-2 cuts a text into words
a_spaced_text = st.lists(st.sampled_from(["a", "né", "😀", "1", "!", "'s", " ", "\n", "\t", "\r\n"])).map("".join)


@given(a_text | a_spaced_text)
def test_a_bpe_reads_any_text_as_the_library_does_and_gives_it_back(text):
    library = Tokenizer.from_str(bpe())
    if text:
        assert BPE.encode(text) == library.encode(text).ids
        assert BPE.decode(BPE.encode(text)) == text
    assert len(BPE.vocab) == 512


@given(st.lists(a_spaced_text | st.just("word\nword "), min_size=20, max_size=60).map("".join), st.integers(1, 50))
def test_a_long_text_in_pieces_has_the_tokens_that_it_has_at_once(text, size):
    """Of a tokenizer that has tokens for runs of white space, as GPT-2's has."""
    content = train_bpe("a\n\n\n  b\n \n\t 's\r\n\r\n1   né\n\n" * 9, 265)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("extras.formats.bpe.PIECE", size)
        assert "".join(pieces_of(text, "cut")) == text
        assert [*tokenizer_from_json(content).encode_text(text)] == Tokenizer.from_str(content).encode(text).ids


def test_a_long_text_is_cut():
    """The library's time and memory grow with the square of the length of a word."""
    for text in ("a line\n" * FAR, "one line " * PIECE, "acgt" * FAR):
        pieces = list(pieces_of(text, "cut"))
        assert len(pieces) > 1 and max(map(len, pieces)) <= PIECE + FAR


def test_special_tokens_precede_a_prompt_and_do_not_split_a_text():
    """T5 puts one after a text too, but a model cannot continue after the end."""
    tokenizer = Tokenizer.from_str(bpe())
    tokenizer.post_processor = processors.TemplateProcessing(single="a $0 b", special_tokens=[("a", 64), ("b", 65)])
    tokenizer = tokenizer_from_json(tokenizer.to_str())
    assert tokenizer.encode("one line") == [64, *BPE.encode("one line")]
    assert tokenizer.encode("") == [64]
    assert list(tokenizer.encode_text("one line")) == BPE.encode("one line")


def with_prefix(kind):
    """A tokenizer of words that puts a space before a text: like Llama's, T5's or RoBERTa's."""
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    if kind == "RoBERTa":
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "T5":
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace()
    elif kind == "converted":  # by transformers, from a SentencePiece model
        twice = normalizers.Replace(Regex(r"\A▁"), "▁▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁"), twice])
        tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = Split("▁", "merged_with_next")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator([TEXT, "▁"], trainer)
    return BPETokenizer(tokenizer.to_str())


@pytest.mark.parametrize("kind", ["Llama", "T5", "RoBERTa", "converted"])
def test_ids_of_a_text_depend_neither_on_its_length_nor_on_its_pieces_and_decode_to_it(kind):
    tokenizer = with_prefix(kind)
    for text in (TEXT, TEXT[:30], TEXT[51:], *([] if kind == "T5" else [" " + TEXT])):  # T5 loses a first space
        ids = list(tokenizer.encode_text(text))
        assert tokenizer.decode(ids) == text
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("extras.formats.bpe.PIECE", 50)
            assert ids == list(tokenizer.encode_text(text))


@pytest.mark.slow
def test_training_a_bpe_is_deterministic():
    """Whatever order sets and threads have."""
    script = "from extra_helpers import bpe; print(bpe())"
    env = {"PYTHONPATH": os.pathsep.join((".", "data", "tests", "extras/tests"))}
    for seed, threads in (("1", "1"), ("2", "5")):
        env |= {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        assert ok(run("-c", script, env=env)).stdout.rstrip("\n") == bpe()


@pytest.mark.parametrize("vocab_size", [2000, 10**6, 2**31, 10**20])
def test_a_bpe_that_the_text_cannot_fill_is_one_line(vocab_size):
    with pytest.raises(ValueError, match=rf"^--vocab_size {vocab_size} .* at most \d+$") as error:
        train_bpe(TEXT[:3000], vocab_size)
    most = int(str(error.value).split()[-1])
    assert len(tokenizer_from_json(train_bpe(TEXT[:3000], most)).vocab) == most


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_gpt2s_older_files_are_the_tokenizer_that_transformers_makes_of_them(names, tmp_path):
    model = json.loads(bpe())["model"]
    vocab = model["vocab"] | {"<|endoftext|>": 512}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    theirs = GPT2Tokenizer.from_pretrained(tmp_path)
    for old, new in zip(("vocab.json", "merges.txt"), names, strict=True):
        (tmp_path / old).rename(tmp_path / new)
    ours = tokenizer_from_json(read_tokenizer(tmp_path))
    text = TEXT[:2000] + "<|endoftext|>né 😀\n\n\n  end"
    assert ours.encode(text) == theirs(text).input_ids and 512 in ours.encode(text)
    assert ours.decode(ours.encode(text)) == text and len(ours.vocab) == 513
    (tmp_path / names[1]).unlink()
    with pytest.raises(FileNotFoundError, match=names[1]):
        read_tokenizer(tmp_path)


def test_settings_for_training_in_a_tokenizer_json_do_not_change_our_texts():
    tokenizer = Tokenizer.from_str(bpe())
    tokenizer.model.dropout = 0.9
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    assert tokenizer_from_json(tokenizer.to_str()).encode(TEXT[:500]) == BPE.encode(TEXT[:500])


def test_characters_become_a_tokenizer_json_and_come_back(tmp_path):
    (tmp_path / "tokenizer.json").write_text(to_json(TOKENIZER), encoding="utf-8")
    back = tokenizer_from_json(read_tokenizer(tmp_path))
    assert back.state_dict() == {"chars": CHARS} and back.unit == "characters"
    with pytest.raises(ValueError, match="no 'Z' in the vocabulary"):
        back.encode("abZ")


def test_bytes_alone_are_not_taken_for_characters():
    """The tokens of a BPE without merges have names of one character, too."""
    tokenizer = tokenizer_from_json(bpe(256))
    assert tokenizer.unit == "tokens" and len(tokenizer.encode("né")) == 3


def test_a_vocabulary_fits_weights_of_its_size_or_a_little_more():
    """Some pad their weights to a multiple of 128. A character without weights, or the other way round, is damage."""
    check_vocab_size(BPE, 512, "x")
    check_vocab_size(BPE, 512 + 127, "x")
    check_vocab_size(TOKENIZER, len(CHARS), "x")
    for tokenizer, sizes in ((BPE, (511, 512 + 128)), (TOKENIZER, (len(CHARS) - 1, len(CHARS) + 1))):
        for size in sizes:
            with pytest.raises(ValueError, match=r"^x has the weights of .* do not belong together$"):
                check_vocab_size(tokenizer, size, "x")


A_LARGE_ID = '{"model": {"type": "WordLevel", "vocab": {"ab": 0, "cd": 4294967295}, "unk_token": "ab"}}'


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE"}}', "not json", A_LARGE_ID])
def test_a_damaged_tokenizer_is_one_line(content):
    with pytest.raises(ValueError, match=r"^the tokenizer cannot be read: ") as error:
        tokenizer_from_state({"tokenizer": content})
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}: the tokenizer cannot be read: "):
        read_vocabulary(tmp_path)


def test_a_text_without_tokens_or_of_broken_bytes_is_one_line():
    with pytest.raises(ValueError, match="finds no tokens in ''"):
        BPE.encode("")
    with pytest.raises(ValueError, match=r"'ab\\udcff' is not UTF-8|refuses 'ab\\udcff': not UTF-8"):
        BPE.encode(b"ab\xff".decode("utf-8", "surrogateescape"))


def test_without_the_library_one_line_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers"):
        tokenizer_from_json(bpe())


def test_what_a_vocabulary_lacks_is_one_clear_message():
    """As in a folder of characters to which transformers has added a pad token."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<pad>": 2}))
    words.pre_tokenizer = Split("", "isolated")
    unigram = Tokenizer(models.Unigram([("a", 0.0), ("b", 0.0)]))
    for tokenizer in (words, unigram):
        with pytest.raises(ValueError, match="refuses 'abZ': some of it is not in the vocabulary"):
            BPETokenizer(tokenizer.to_str()).encode("abZ")
