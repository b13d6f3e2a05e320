"""kvgpt/training/data.py: what data/prepare.py wrote is read, checked, and evaluated."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import CPU, SMALL, assert_one_line, assert_refused, here, load, ok, plain_val_loss, unix, write_data
from kvgpt.training.data import evaluate, load_dataset
from model import GPT, GPTConfig

# -- evaluation --------------------------------------------------------------------------------------------------------


@given(length=st.integers(2, 80), block_size=st.integers(1, 40), seed=st.integers(0, 9))
@example(length=8192, block_size=32, seed=0)  # a forward takes 8192 characters at most, in whole windows
@example(length=8193, block_size=32, seed=0)
@example(length=8194, block_size=32, seed=0)
@example(length=20001, block_size=100, seed=0)
@example(length=40, block_size=9000, seed=0)
def test_evaluation_is_one_exact_pass_over_the_text(length, block_size, seed):
    """Not a mean of means: the short last window counts by its characters. And it leaves the model and rng alone."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=block_size, vocab_size=7, n_layer=1, n_head=1, n_embd=8, dropout=0.5)
    model = GPT(config).train()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.7)  # so that every character has a loss of its own
    ids = np.random.default_rng(seed).integers(7, size=length).astype("<u2")
    before = torch.get_rng_state()
    loss = evaluate(model, ids, block_size, CPU, contextlib.nullcontext())
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert loss == pytest.approx(plain_val_loss(model, ids, block_size), rel=1e-5)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["folder", "meta.json", "train.bin", "val.bin"])
def test_data_that_is_not_prepared_is_one_line_that_says_what_to_run(missing, data_dir, tmp_path):
    data = tmp_path / "data"
    if missing != "folder":
        shutil.copytree(data_dir, data)
        (data / missing).unlink()
    result = here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out")
    assert_one_line(result, data, "data/prepare.py")
    assert not (tmp_path / "out").exists()


@unix
def test_a_data_dir_that_is_a_file_is_one_line(tmp_path):
    """Not NotADirectoryError's "cannot write": nothing is written there."""
    (tmp_path / "text.txt").write_text("abc")
    result = here(*SMALL, "--data_dir", tmp_path / "text.txt", "--out_dir", tmp_path / "out")
    assert_one_line(result, "cannot read the data", tmp_path / "text.txt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"\xff\xfe" + raw,
        lambda raw: b"[]",
        lambda raw: b"null",
        lambda raw: b'{"chars": "ab"}',
        lambda raw: raw.replace(b'"sha256": {', b'"sha256": null, "x": {'),
        lambda raw: raw.replace(b'"chars": "', b'"chars": 5, "x": "'),
        lambda raw: raw.replace(b'"chars": "', b'"chars": null, "x": "'),
        lambda raw: raw.replace(b'"chars": "', b'"chars": "ab", "x": "'),
    ],
    ids="empty half no-utf8 list null no-sha256 null-sha256 int-chars null-chars two-chars".split(),
)
def test_a_damaged_meta_json_is_one_line_that_names_it(damage, data_dir, tmp_path):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    raw = (data / "meta.json").read_bytes()
    assert damage(raw) != raw
    (data / "meta.json").write_bytes(damage(raw))
    try:
        result = here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out", "--max_iters", 1)
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}")
    assert_one_line(result, "meta.json")


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda chars: chars[:-1] + chars[0], "twice"),
        (lambda chars: chars[:-1] + "\ud800", "surrogate"),
        (lambda chars: chars[:-1] + "é", "have changed"),
    ],
    ids=["a character twice", "half a surrogate pair", "another character"],
)
def test_characters_that_no_model_can_have_are_refused_before_the_training(change, word, data_dir, tmp_path):
    """A run to its end, and a checkpoint that nothing reads. The last one needs the hash that prepare.py wrote."""
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    meta["chars"] = change(meta["chars"])
    if word != "have changed":
        del meta["sha256"]["chars"]  # as earlier versions wrote it
    (data / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    result = here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out", "--max_iters", 1)
    assert_one_line(result, data / "meta.json", word, "data/prepare.py")
    assert not (tmp_path / "out").exists()


def test_data_without_a_hash_of_its_characters_is_read(data_dir, tmp_path):
    """As earlier versions wrote it."""
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    assert meta["sha256"].pop("chars") == hashlib.sha256(meta["chars"].encode()).hexdigest()
    (data / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert load_dataset(data, 8).chars == meta["chars"]


@unix
@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin"])
def test_a_pipe_among_the_data_does_not_block(name, data_dir, tmp_path):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    (data / name).unlink()
    os.mkfifo(data / name)
    assert_one_line(here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out"), data / name, "not a regular file")


@unix
def test_the_text_of_a_run_is_the_text_that_was_hashed(tmp_path):
    """Another data/prepare.py writes at the worst moment: before any call of C that the reading makes."""
    whole = [write_data(tmp_path / name, text * 99) for name, text in (("one", "abcd"), ("two", "dcba"))]
    for at in itertools.count():
        data, other = (Path(shutil.copytree(each, tmp_path / f"{each.name} {at}")) for each in whole)
        calls = itertools.count()

        def writer(frame, event, arg):
            if event == "c_call" and next(calls) == at:  # noqa: B023
                sys.setprofile(None)
                for file in other.iterdir():  # noqa: B023
                    os.replace(file, data / file.name)  # noqa: B023

        sys.setprofile(writer)
        with contextlib.suppress(ValueError):
            loaded = load_dataset(data, 8)
            sys.setprofile(None)
            for split in ("train", "val"):
                assert loaded.sha256[split] == hashlib.sha256(getattr(loaded, split).tobytes()).hexdigest(), at
        sys.setprofile(None)
        if next(calls) <= at:
            break
    assert at > 20


@unix
@pytest.mark.parametrize("size", [0, None], ids=["cut", "overwritten"])
def test_a_text_that_is_changed_in_place_during_a_run_changes_nothing(size, data_dir, tmp_path):
    """`cp` writes into the file that is there. A mapped array then has other ids, or the process ends by SIGBUS."""
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    loaded = load_dataset(data, 8)
    for split in ("train", "val"):
        with open(data / f"{split}.bin", "r+b") as file:
            file.truncate(size)
            file.write(bytes(100))
        assert loaded.sha256[split] == hashlib.sha256(getattr(loaded, split).tobytes()).hexdigest()


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_bin_file_changed_behind_meta_jsons_back_is_refused(split, data_dir, tmp_path):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    raw = bytearray((data / f"{split}.bin").read_bytes())
    raw[100] ^= 1
    (data / f"{split}.bin").write_bytes(raw)
    assert_one_line(here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out"), f"{split}.bin", "prepare.py")
    assert not (tmp_path / "out").exists()


def test_a_text_shorter_than_the_context_is_one_line_and_one_just_long_enough_trains(tmp_path):
    data, flags = write_data(tmp_path / "data", "abcdefghij" * 2), [*SMALL, "--max_iters", "1"]  # 18 to train on
    result = here(*flags, "--data_dir", data, "--out_dir", tmp_path / "out", "--block_size", "18")
    assert_one_line(result, "18 characters", "block_size")
    assert not (tmp_path / "out").exists()
    ok(here(*flags, "--data_dir", data, "--out_dir", tmp_path / "out", "--block_size", "17"))


def test_a_resume_on_changed_data_is_refused(out, data_dir, tmp_path):
    """The same characters in another order, whole files with their right hashes: another text nevertheless."""
    chars = load(out / "last.pt")["chars"]
    write_data(tmp_path / "data", chars * 40)
    assert_refused(out, "--data_dir", tmp_path / "data", words=[tmp_path / "data", "changed"])


def test_a_resume_on_another_vocabulary_is_refused(out, data_dir, tmp_path):
    """The same ids, meaning other characters: the .bin files and their hashes are the same."""
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    meta = json.loads((data / "meta.json").read_text(encoding="utf-8"))
    meta["chars"] = meta["chars"][:-1] + "é"
    meta["sha256"]["chars"] = hashlib.sha256(meta["chars"].encode()).hexdigest()
    (data / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert_refused(out, "--data_dir", data, words=[data, "characters"])
