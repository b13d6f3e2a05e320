"""data/prepare.py with extras: tokens that are not characters, text that a tokenizer loses, and records of JSON."""

import io
import json
import random
from functools import partial
from hashlib import sha256

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from extra_helpers import bpe
from extras.formats.bpe import train_bpe
from extras.formats.records import warn_if_sorted
from helpers import SAMPLE, SMALL, assert_one_line, here, ok, tree
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


# -- text that a tokenizer loses ---------------------------------------------------------------------------------------

CAT = "the cat sat on the mat and the dog sat on the log\n" * 40
FISH = "The Bär ate 30 fishes. 東京 is far away, said the cat.\n" * 60
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def learned(kind, learned_from, tokenizer, **options):
    tokenizer.train_from_iterator([learned_from], getattr(trainers, f"{kind}Trainer")(**options))
    return tokenizer


def whitespace(model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def byte_level(text=FISH, alphabet=ALPHABET):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return learned("Bpe", text, tokenizer, vocab_size=300, initial_alphabet=alphabet)


def bytes_without_decoder():
    tokenizer = byte_level()
    tokenizer.decoder = None
    return tokenizer


def lower_case():
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def no_unknown_token():
    return learned("Bpe", CAT, whitespace(models.BPE()), vocab_size=49, special_tokens=["<unk>"])


def words(text=CAT):
    return learned("WordLevel", text, whitespace(models.WordLevel(unk_token="[UNK]")), special_tokens=["[UNK]"])


def unigram():
    """It names its unknown token by id."""
    options = dict(unk_token="<unk>", special_tokens=["<unk>"], vocab_size=40)
    return learned("Unigram", CAT, Tokenizer(models.Unigram()), **options)


@pytest.fixture
def prepare(call, tmp_path):
    """prepare(tokenizer, *flags) encodes FISH with it."""

    def prepare(tokenizer, *flags):
        (tmp_path / "fish.txt").write_text(FISH, encoding="utf-8")
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return call("--input", tmp_path / "fish.txt", "--tokenizer", tmp_path, "--data_dir", tmp_path / "data", *flags)

    return prepare


@pytest.mark.parametrize(
    "make, back, why",
    [
        (no_unknown_token, "he at e s he s s a a", "it drops "),
        (lambda: byte_level(CAT, []), "he  ate  shes  s a a", "it drops "),
        (bytes_without_decoder, "The ĠBÃ¤r Ġate Ġ30 Ġ", "it has no decoder"),
        (lower_case, "the bär ate 30 fishe", "it folds case"),
        (lambda: words(FISH), "he Bär ate 30 fishes . ", "it changes spaces"),
    ],
)
def test_text_that_does_not_come_back_is_reported(make, back, why, prepare):
    assert ok(prepare(byte_level())).stderr == ""
    line = ok(prepare(make())).stderr.strip()
    assert line.startswith("prepare.py: the tokenizer gives ") and "\n" not in line
    assert "Bär ate 30 fishe" in line and f"becomes '{back}" in line and why in line


@pytest.mark.parametrize(
    "make, said",
    [
        (words, ["87% of the tokens are [UNK]", "--force takes it"]),
        (unigram, ["of the tokens are <unk>", "--force takes it"]),
        (lambda: Tokenizer(models.BPE()), ["the tokenizer finds no tokens in the text"]),
    ],
)
def test_a_tokenizer_that_hardly_knows_the_text_is_one_line(make, said, prepare, tmp_path):
    assert_one_line(prepare(make()), *said, code=1)
    assert not (tmp_path / "data").exists()
    if make is words:
        assert said[0] in ok(prepare(words(), "--force")).stderr


def test_a_tokenizer_without_newlines_gets_another_default_prompt(prepare, tmp_path):
    """A training run ends with a sample, and sample.py needs no --prompt."""
    ok(prepare(words(FISH)))
    ok(here(*SMALL, "--max_iters", 2, "--data_dir", tmp_path / "data", "--out_dir", tmp_path / "out"))
    assert ok(here("--out_dir", tmp_path / "out", "--device", "cpu", script="sample.py")).stdout


# -- records ----------------------------------------------------------------------------------------------------------

RECORDS = [
    ('{"text": "One.", "id": "a"}\n{"id": "b", "text": "Zw\\u00f6lf.\\r\\n"}\n', ".jsonl", (), "One.\n\nZwölf.\n\n\n"),
    ('[{"q": "Who?", "n": 1}, {"q": "I.", "n": 2}]', ".json", (), "Who?\n\nI.\n\n"),
    ('["One.", "Two.\\r\\n"]', ".JSON", (), "One.\n\nTwo.\n\n\n"),
    ('{"q": "Who?"}\n \n{"q": "I."}', ".ndjson", (), "Who?\n\nI.\n\n"),
    ('{"q": "Who?", "a": "I."}\n', ".jsonl", ("--field", "a"), "I.\n\n"),
    ('[{"q": "Who?"},\n {"q": "I."}]', ".jsonl", (), "Who?\n\nI.\n\n"),
    ('{"q": "Who?"}\n{"q": "I."}', ".json", (), "Who?\n\nI.\n\n"),
]


@pytest.mark.parametrize("content, suffix, flags, text", RECORDS)
def test_records_are_documents_with_a_blank_line_after_each(content, suffix, flags, text, call, tmp_path):
    file = tmp_path / f"records{suffix}"
    file.write_text(content, encoding="utf-8")
    ok(call("--input", file, "--val", SAMPLE, "--data_dir", tmp_path / "data", *flags))
    meta = json.loads((tmp_path / "data" / "meta.json").read_text(encoding="utf-8"))
    raw = (tmp_path / "data" / "train.bin").read_bytes()
    assert "".join(meta["chars"][i] for i in memoryview(raw).cast("H")) == text


def test_records_for_a_model_end_with_its_end_token(call, tmp_path):
    """An old folder of RoBERTa's kind has one in its vocabulary. Weights have no room for GPT-2's."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["</s>"])
    tokenizer.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"</s>": len(vocab)}), encoding="utf-8")
    (tmp_path / "a.json").write_text('["One.", "Two."]', encoding="utf-8")
    flags = ["--tokenizer", tmp_path, "--data_dir", tmp_path / "data", "--val", SAMPLE]
    ok(call("--input", tmp_path / "a.json", *flags))
    ids = memoryview((tmp_path / "data" / "train.bin").read_bytes()).cast("H").tolist()
    end = tokenizer.token_to_id("</s>")
    assert ids.count(end) == 2 and ids[-1] == end
    assert len(load_dataset(tmp_path / "data")[0].vocab) == end + 1


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("tokenizer.json", '["a", "b"]', ["pass a tokenizer.json of the library tokenizers"]),
        ("tokenizer.json", '{"a": 0, "b": 1}', ["pass a tokenizer.json of the library tokenizers"]),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", ["is a Git LFS pointer", "git lfs pull"]),
        ("vocab.json", '{"model": 0, "a": 1}', ["pass a tokenizer.json of the library tokenizers"]),
        ("vocab.txt", "1 'a' 1\n", ["pass a tokenizer.json of the library tokenizers"]),
        ("other.model", "minbpe v1\n", ["pass a tokenizer.json of the library tokenizers"]),
        ("tokenizer.model.v1", "\n\x0e\n\x05<unk>\udcff", ["is a SentencePiece model", "writes a tokenizer.json"]),
    ],
)
def test_what_is_no_tokenizer_is_one_line(name, content, words, call, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    result = call("--input", SAMPLE, "--tokenizer", tmp_path / name, "--data_dir", tmp_path / "data")
    assert_one_line(result, *words, code=1)


def test_a_config_that_git_lfs_has_not_fetched_is_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\n"
    (tmp_path / "config.json").write_text(pointer, encoding="utf-8")
    result = here("--ckpt", tmp_path, script="sample.py")
    assert_one_line(result, "is a Git LFS pointer and not the file itself: run git lfs pull", code=1)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.jsonl", '{"q": "Who?", "a": "I."}\n', ["the fields are a, q", "--field NAME"]),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', ["the fields are messages", "write each chat as one text"]),
        ("a.jsonl", '{"id": "1", "messages": []}\n', ["the fields are id, messages", "write each chat as one text"]),
        ("a.json", '[{"role": "user", "content": "I."}]', ["the fields are content, role", "write each chat"]),
        ("a.jsonl", '{"q": "Who?"}\n{broken\n', ["a.jsonl is not JSON", "line 2"]),
        ("a.jsonl", "\udcff\udcfe{\0", ["is not UTF-8 (invalid start byte): convert it first"]),
        ("a.jsonl", '{"id": "1", "text": "I."}\n{"id": "2", "text": null}', ["record 2 of", "has null in text"]),
        ("a.jsonl", '{"text": "I."}\n{"text": "\\ud83d"}', ["record 2 of", '"\\ud83d", half of a character, in text']),
        ("a.jsonl", '{"text": "I."}\n{"id": 2}', ["record 2 of", "has null in text; its fields are id"]),
        ("a.json", '["I.", 5]', ["record 2 of", "has 5 in text"]),
        ("a.json", "[]", ["has no records"]),
        ("a.jsonl", '{"text": ""}\n', ["has 0 characters"]),
        ("a.json", '{"version": "1", "data": []}', ["the fields are data, version"]),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", ["is a Git LFS pointer"]),
        ("a.jsonl.gz", "x", ["is a compressed file: unpack it first"]),
        ("a.csv", "a,b\n", ["is a table", "from_csv", ".csv')"]),
        ("a.tsv", "a\tb\n", ["is a table", "from_csv", ".tsv', sep='\\t')"]),
        ("a.parquet", "PAR1", ["is a Parquet file", "from_parquet"]),
        ("a.pdf", "%PDF", ["is a PDF: pdftotext"]),
        ("a.npy", "x", ["is a file of numbers", "train.bin and val.bin"]),
        ("a.txt", "version https://git-lfs.github.com/spec/v1\noid ab\n", ["is a Git LFS pointer", "git lfs pull"]),
    ],
)
def test_a_file_without_text_of_its_own_is_one_line(name, content, words, call, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    result = call("--input", tmp_path / name, "--data_dir", tmp_path / "data")
    assert_one_line(result, *words, tmp_path / name, code=1)
    assert not (tmp_path / "data").exists()


# -- sorted text -------------------------------------------------------------------------------------------------------

ORDERS = [sorted, partial(sorted, reverse=True), partial(sorted, key=len), partial(sorted, key=lambda s: s.split()[1])]


@pytest.mark.parametrize("begin", ["", "the name is "])
@pytest.mark.parametrize("order", ORDERS, ids=["A to Z", "Z to A", "by length", "by the second word"])
def test_sorted_lines_are_noticed(order, begin, call, text, tmp_path):
    """The last tenth of names in alphabetical order has only the last letters, so its loss says nothing."""
    draw = random.Random(0)
    names = ["".join(draw.choices("ABCDEFGHabcdefgh", k=draw.randint(2, 9))).capitalize() for _ in range(400)]
    lines = [f"{a} {b}" for a, b in zip(names[::2], names[1::2])]
    for number, arranged in enumerate((order(lines), lines)):
        text.write_text("\n".join(begin + line for line in arranged), encoding="utf-8")
        result = ok(call("--input", text, "--data_dir", tmp_path / f"data{number}"))
        assert ("the lines are sorted" in result.stderr) == (arranged is not lines)
    text.write_text("\n".join(order(lines)), encoding="utf-8")
    (tmp_path / "val.txt").write_text("Abe Had\n" * 40, encoding="utf-8")
    result = ok(call("--input", text, "--val", tmp_path / "val.txt", "--data_dir", tmp_path / "own"))
    assert "sorted" not in result.stderr  # --val is what the line would ask for


@pytest.mark.parametrize("lines", [["ab"] * 99, ["ab", "", "abc", ""] * 30, ["ACGT" * 20] * 60 + ["AC"]], ids=len)
def test_lines_that_are_all_alike_are_not_sorted(lines, capsys):
    warn_if_sorted("\n".join(lines))
    warn_if_sorted(SAMPLE.read_text(encoding="utf-8"))
    assert capsys.readouterr().err == ""
