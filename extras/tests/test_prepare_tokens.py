"""data/prepare.py with extras: tokens that are not characters."""

import io
import json
from hashlib import sha256

import pytest
from tokenizers import Tokenizer

from extra_helpers import bpe
from extras.formats.bpe import train_bpe
from helpers import SAMPLE, ok, tree
from prepare_fixtures import BODY, assert_nothing_changed
from train import load_dataset


def assert_tokens(folder, raw, tokenizer):
    """The folder holds the tokens that a tokenizers.Tokenizer makes of the two parts of the text."""
    meta = json.loads((folder / "meta.json").read_bytes())
    _, train, val, _ = load_dataset(folder, 2)
    text = io.StringIO(raw.decode(), newline=None).read()
    parts = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]
    assert [train.tolist(), val.tolist()] == [tokenizer.encode(part).ids for part in parts]
    assert meta["tokenizer"] == tokenizer.to_str()


def test_a_bpe_is_learned_from_the_part_for_training(call, tmp_path):
    """The val text stays unseen, and a run on characters is compared on the same val text."""
    ok(call("--input", SAMPLE, "--tokenizer", "bpe", "--vocab_size", 400, "--data_dir", tmp_path))
    raw = SAMPLE.read_bytes()
    text = raw.decode()
    assert_tokens(tmp_path, raw, Tokenizer.from_str(train_bpe(text[: int(0.9 * len(text))], 400)))


def test_a_folder_or_a_file_brings_its_tokenizer(call, text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe(), encoding="utf-8")
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        ok(call("--input", text, "--tokenizer", name, "--data_dir", tmp_path / "data"))
        assert_tokens(tmp_path / "data", BODY, Tokenizer.from_str(bpe()))


def test_the_same_text_is_prepared_again_for_other_tokens(call, server, tmp_path):
    """With --tokenizer always: what a name stands for may have changed. Without, characters that are there stay."""
    flags = ["--data_dir", tmp_path]
    corpus = dict(CORPUS_URL=server.url, CORPUS_SHA256=sha256(BODY).hexdigest())
    learned = [["--tokenizer", "bpe", "--vocab_size", size] for size in (260, 261, 261)]
    for num_times, more in enumerate(([], *learned, []), start=1):
        ok(call(*flags, *more, **corpus))
        assert len(server.asked) == num_times
        tokenizer = load_dataset(tmp_path, 2)[0]
        assert len(tokenizer.vocab) == more[-1] if more else tokenizer.unit == "characters"
    assert "nothing to do" in ok(call(*flags, **corpus)).stdout and len(server.asked) == num_times
    server.answer = 404, {}, b""
    before = tree(tmp_path)
    assert_nothing_changed(call(*flags, "--tokenizer", "bpe", **corpus), tmp_path, before, "404", "nothing was changed")


@pytest.mark.parametrize(
    "flags, raw, words",
    [
        ("--input in.txt --tokenizer bpe --vocab_size 9999", BODY, ["--vocab_size 9999 is too large", "at most"]),
        ("--input in.txt --tokenizer bpe --vocab_size 255", BODY, ["--vocab_size 255 is below 256"]),
        ("--input in.txt --tokenizer none", BODY, ["there is no tokenizer at none"]),
        ("--input in.txt --tokenizer old", BODY, ["there is no tokenizer at old", "tokenizer.json"]),
        ("--input in.txt --tokenizer none.pkl", BODY, ["prepare.py: there is no none.pkl"]),
        ("--input in.txt --tokenizer gpt2", BODY, ["no tokenizer at gpt2", "hf download openai-community/gpt2"]),
        ("--input in.txt --tokenizer in.txt", BODY, ["tokenizer cannot be read"]),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing_too(flags, raw, words, call, text, old, tmp_path, monkeypatch):
    text.write_bytes(raw)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_nothing_changed(call("--data_dir", "old", *flags.split()), tmp_path, before, *words)
