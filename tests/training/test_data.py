"""kvgpt/training/data.py: what data/prepare.py writes is read and checked. test_train.py has the mistakes."""

import hashlib

import numpy as np
import pytest

from helpers import ok, run
from kvgpt.training.data import load_dataset, write_prepared
from kvgpt.vocabulary import character_vocabulary
from prepare import encode


def test_what_is_written_is_read(tmp_path):
    train, val = (np.array(ids, dtype="<u2") for ids in ([0, 1, 2, 1, 0], [2, 0]))
    write_prepared(tmp_path / "new" / "data", character_vocabulary("ab😀"), train, val, "a test", "ab😀ba😀a".encode())
    data = load_dataset(tmp_path / "new" / "data", block_size=4)
    assert data.vocabulary.stored == {"chars": "ab😀"} and data.val_bytes is None
    assert data.train.tolist() == train.tolist() and data.val.tolist() == val.tolist()
    assert data.sha256 == {"train": hashlib.sha256(train).hexdigest(), "val": hashlib.sha256(val).hexdigest()}


def test_a_text_just_long_enough_is_read_and_a_shorter_one_is_refused(tmp_path):
    vocabulary = character_vocabulary("abcdefghij")
    ids = encode("abcdefghij" * 2, vocabulary)  # 18 characters to train on, 2 to evaluate
    write_prepared(tmp_path, vocabulary, *ids, "a test", b"")
    assert len(load_dataset(tmp_path, 17).train) == 18
    with pytest.raises(ValueError, match=r"18 characters.* needs 19.*--block_size"):
        load_dataset(tmp_path, 18)


def test_preparing_a_text_needs_no_torch():
    """Importing it would take seconds."""
    ok(run("-c", "import sys, kvgpt.training.data; assert 'torch' not in sys.modules"))
