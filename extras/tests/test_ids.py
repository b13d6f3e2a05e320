"""A model whose tokens are not text, such as moves or notes: sample.py reads and writes ids."""

import pytest

from extras.formats.tokenizer import IdTokenizer
from helpers import CHARS, assert_one_line, here, load, ok, save_model, texts_of, tiny
from model import CharTokenizer, save_checkpoint
from sample import Text

NOTE = "it has no vocabulary, so this is ids"


@pytest.fixture
def ids(tmp_path):
    """A checkpoint as nanoGPT saves it, and the same model with characters in run/ckpt.pt."""
    (tmp_path / "run").mkdir()
    save_model(tmp_path / "run", tiny())
    content = load(tmp_path / "run" / "ckpt.pt")
    save_checkpoint(tmp_path / "ids.pt", {name: content[name] for name in ("model", "model_args", "iter_num")})
    return tmp_path / "ids.pt"


@pytest.mark.parametrize(
    "flags", [[], ["--no-kv_cache"], ["--compile"], ["--overflow", "slide", "--max_new_tokens", 40]], ids=str
)
def test_the_text_is_the_ids_of_the_same_model(flags, ids):
    flags = [*flags, "--device", "cpu", "--num_samples", 2, "--verify"]
    result = ok(here("--ckpt", ids, "--prompt", " 3 11\n0", *flags, script="sample.py"))
    theirs = ok(
        here("--ckpt", ids.parent / "run", "--prompt", CHARS[3] + CHARS[11] + CHARS[0], *flags, script="sample.py")
    )
    expected = [" ".join(str(CHARS.index(c)) for c in text) for text in theirs.stdout.split("\n---------------\n")]
    assert result.stdout.split("\n---------------\n") == expected
    assert result.stderr.count(NOTE) == 1 and "2 of 2 samples)" in result.stderr


def test_without_a_prompt_it_starts_from_the_first_id(ids):
    result = ok(here("--ckpt", ids, "--max_new_tokens", 3, "--device", "cpu", script="sample.py"))
    expected = texts_of(ids.parent / "run", "\n", 3)[0]
    assert [*map(int, result.stdout.split())] == CharTokenizer(CHARS).encode(expected)


@pytest.mark.parametrize("prompt", ["O Romeo", "3 12", "-1", "3,4", "1.5", " ", "²"])
def test_a_prompt_that_is_not_ids_is_one_line_that_names_meta(prompt, ids):
    result = here("--ckpt", ids, f"--prompt={prompt}", script="sample.py")
    result.stderr = "".join(line for line in result.stderr.splitlines(keepends=True) if NOTE not in line)
    assert_one_line(result, "is not an id", "ids from 0 to 11, such as '5 17 3'", "--meta", code=1)


@pytest.mark.parametrize("kind", ["hf", "onnx", "web"])
def test_an_export_says_that_it_needs_a_vocabulary(kind, ids, tmp_path):
    result = here("--format", kind, "--ckpt", ids, "--out_dir", tmp_path, script="extras/export.py")
    assert_one_line(result, f"{ids} has no vocabulary: pass nanoGPT's meta.pkl, or a tokenizer, as --meta", code=1)


def test_a_stop_string_is_whole_ids():
    """The text of 1 ends that of 11."""
    text = Text([1, 2], IdTokenizer(99), ["1", "7  8"])
    shown = text.new_piece()
    for token in (11, 7, 9, 17, 8, 7):
        text.add(token)
        shown += text.new_piece()
        assert not text.ended and text.text.startswith(shown)
    text.add(8)
    assert text.ended and text.text == shown + text.new_piece() == "1 2 11 7 9 17 8"
    assert text.new == [11, 7, 9, 17, 8, 7, 8]
