"""train.py's load_dataset: what data/prepare.py writes is read and checked. test_train.py has the mistakes."""

import hashlib
import json

import numpy as np
import pytest

from helpers import bpe, ok, run, write_ids
from kvgpt.bpe import tokenizer_from_json
from model import CharTokenizer
from prepare import write
from train import load_dataset


def test_what_is_written_is_read(tmp_path):
    train, val = (np.array(ids, dtype="<u2") for ids in ([0, 1, 2, 1, 0], [2, 0]))
    write(tmp_path / "new" / "data", {"chars": "ab😀"}, 3, train, val, "a test", "ab😀ba😀a".encode())
    data = load_dataset(tmp_path / "new" / "data", block_size=4)
    assert data.tokenizer.state_dict() == {"chars": "ab😀"} and data.val_bytes is None
    assert data.train.tolist() == train.tolist() and data.val.tolist() == val.tolist()
    assert data.sha256 == {"train": hashlib.sha256(train).hexdigest(), "val": hashlib.sha256(val).hexdigest()}


def test_a_text_just_long_enough_is_read_and_a_shorter_one_is_refused(tmp_path):
    tokenizer = CharTokenizer("abcdefghij")
    write_ids(tmp_path, tokenizer, "abcdefghij" * 2)  # 18 characters to train on, 2 to evaluate
    assert len(load_dataset(tmp_path, 17).train) == 18
    with pytest.raises(ValueError, match=r"18 characters.* needs 19.*--block_size"):
        load_dataset(tmp_path, 18)


def test_preparing_characters_needs_no_torch_and_no_bpe():
    """Importing torch would take seconds."""
    foreign = "{'torch', 'tokenizers', 'model', 'kvgpt'}"
    ok(run("-c", f"import sys; sys.path.insert(0, 'data'); import prepare; assert not {foreign} & set(sys.modules)"))


def test_ids_of_another_tokenizer_are_one_line(tmp_path):
    """Even if the hash in meta.json was changed as well."""
    tokenizer = tokenizer_from_json(bpe(300))
    write_ids(tmp_path, tokenizer, "some words " * 20, val_bytes=22)
    assert load_dataset(tmp_path, 4).val_bytes == 22
    other = np.array([1, 2, 50256] * 9, "<u2").tobytes()
    (tmp_path / "val.bin").write_bytes(other)
    with pytest.raises(ValueError, match=r"val\.bin has changed"):
        load_dataset(tmp_path, 4)
    meta = json.loads((tmp_path / "meta.json").read_bytes())
    meta["sha256"]["val"] = hashlib.sha256(other).hexdigest()
    (tmp_path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(ValueError, match=r"val\.bin contains the id 50256, but .* has only 300 tokens"):
        load_dataset(tmp_path, 4)
