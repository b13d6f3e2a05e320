"""train.py's load_dataset: what data/prepare.py writes is read and checked. test_train.py has the mistakes."""

import hashlib
import json

import numpy as np
import pytest

from helpers import SAMPLE, here, ok, run, write_ids
from model import CharTokenizer
from train import load_dataset


def test_what_is_written_is_read(tmp_path):
    text = "ab😀ba" * 4
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    ok(here("--input", tmp_path / "in.txt", "--data_dir", tmp_path / "new", script="data/prepare.py"))
    tokenizer, train_read, val_read, meta = load_dataset(tmp_path / "new", 1)
    assert tokenizer.state_dict() == {"chars": "ab😀"}
    train, val = (np.array(["ab😀".index(char) for char in part], "<u2") for part in (text[:18], text[18:]))
    assert train_read.tolist() == train.tolist() and val_read.tolist() == val.tolist()
    hashed = {"train": train, "val": val, "vocabulary": "ab😀".encode()}
    assert meta["sha256"] == {name: hashlib.sha256(content).hexdigest() for name, content in hashed.items()}


def test_a_vocabulary_that_has_changed_is_noticed(tmp_path):
    """Two swapped characters train as well as before, and the sample has the wrong letters."""
    ok(here("--input", SAMPLE, "--data_dir", tmp_path, script="data/prepare.py"))
    meta = tmp_path / "meta.json"
    content = json.loads(meta.read_text(encoding="utf-8"))
    content["chars"] = content["chars"].translate(str.maketrans("ex", "xe"))
    meta.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="the vocabulary has changed"):
        load_dataset(tmp_path)
    del content["sha256"]["vocabulary"]  # an older folder
    meta.write_text(json.dumps(content), encoding="utf-8")
    assert load_dataset(tmp_path)[0].vocab == content["chars"]


@pytest.mark.parametrize(
    "val, line",
    [
        (np.array([3], "<u2").tobytes(), "val.bin has the id 3, but the vocabulary has 3 tokens"),
        (b"", "val.bin has 0 bytes, and a token takes 2"),
        (b"\0\0\0", "val.bin has 3 bytes, and a token takes 2"),
    ],
)
def test_ids_that_another_program_wrote_are_checked(val, line, tmp_path):
    write_ids(tmp_path, CharTokenizer("abc"), "abc" * 20)
    (tmp_path / "val.bin").write_bytes(val)
    meta = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    meta["sha256"]["val"] = hashlib.sha256(val).hexdigest()
    (tmp_path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(ValueError, match=line):
        load_dataset(tmp_path)


def test_a_text_just_long_enough_is_read_and_a_shorter_one_is_refused(tmp_path):
    tokenizer = CharTokenizer("abcdefghij")
    write_ids(tmp_path, tokenizer, "abcdefghij" * 2)  # 18 characters to train on, 2 to evaluate
    assert len(load_dataset(tmp_path, 18)[1]) == 18
    with pytest.raises(ValueError, match="18 characters for training and 2 for validation, but we need 19 and 2"):
        load_dataset(tmp_path, 19)
    write_ids(tmp_path, tokenizer, "abcdefghij")
    with pytest.raises(ValueError, match="9 characters for training and 1 for validation, but"):
        load_dataset(tmp_path, 5)


def test_preparing_characters_needs_no_torch_and_no_bpe():
    """Importing torch would take seconds."""
    foreign = "{'torch', 'tokenizers', 'model', 'extras'}"
    ok(run("-c", f"import sys; sys.path.insert(0, 'data'); import prepare; assert not {foreign} & set(sys.modules)"))
