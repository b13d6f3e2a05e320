"""train.py's load_dataset: what data/prepare.py writes is read and checked. test_train.py has the mistakes."""

import hashlib

import numpy as np
import pytest

from helpers import here, ok, run, write_ids
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
    assert meta["sha256"] == {"train": hashlib.sha256(train).hexdigest(), "val": hashlib.sha256(val).hexdigest()}


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
