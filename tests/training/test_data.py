"""kvgpt/training/data.py: what data/prepare.py writes is read and checked. test_train.py has the mistakes."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers import ok, run, write_data
from kvgpt.training.data import load_dataset, write_prepared


def test_what_is_written_is_read(tmp_path):
    train, val = (np.array(ids, dtype="<u2") for ids in ([0, 1, 2, 1, 0], [2, 0]))
    write_prepared(tmp_path / "new" / "data", "ab😀", train, val, "a test", "ab😀ba😀a".encode())
    data = load_dataset(tmp_path / "new" / "data", block_size=4)
    assert data.chars == "ab😀"
    assert data.train.tolist() == train.tolist() and data.val.tolist() == val.tolist()
    assert data.sha256 == {"train": hashlib.sha256(train).hexdigest(), "val": hashlib.sha256(val).hexdigest()}


def test_data_without_a_hash_of_its_characters_is_read(data_dir, tmp_path):
    """As earlier versions wrote it."""
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    del meta["sha256"]["chars"]
    (data / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert load_dataset(data, 8).chars == meta["chars"]


def test_a_text_that_is_changed_in_place_during_a_run_changes_nothing(data_dir, tmp_path):
    """`cp` writes into the file that is there. A mapped array would then have other ids."""
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    loaded = load_dataset(data, 8)
    with open(data / "train.bin", "r+b") as file:
        file.write(bytes(100))
    assert loaded.sha256["train"] == hashlib.sha256(loaded.train.tobytes()).hexdigest()


def test_a_text_just_long_enough_is_read_and_a_shorter_one_is_refused(tmp_path):
    data = write_data(tmp_path / "data", "abcdefghij" * 2)  # 18 characters to train on, 2 to evaluate
    assert len(load_dataset(data, 17).train) == 18
    with pytest.raises(ValueError, match=r"18 characters.* needs 19.*--block_size"):
        load_dataset(data, 18)
    with pytest.raises(ValueError, match="val text has 1 char"):
        load_dataset(write_data(tmp_path / "short", "abcdefghij"), 2)


def test_preparing_a_text_needs_no_torch():
    """It would take seconds."""
    ok(run("-c", "import sys, kvgpt.training.data; assert 'torch' not in sys.modules"))
