"""Evaluation: what it reads, that it can be interrupted, and --eval_only and --init_from for any model."""

import itertools
import re
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import (
    SAMPLE,
    STATEFUL,
    TINY,
    assert_one_line,
    assert_same_run,
    contents,
    here,
    load,
    log,
    ok,
    plain_val_loss,
    start,
    write_ids,
)
from model import CharTokenizer, load_model
from train import eval_windows

# -- what it reads -----------------------------------------------------------------------------------------------------


@given(length=st.integers(2, 300), block_size=st.integers(1, 20), most=st.integers(1, 400), at_once=st.integers(1, 9))
def test_windows_cover_the_text_or_are_spread_over_it(length, block_size, most, at_once):
    chunks = list(eval_windows(np.arange(length), block_size, most, at_once))
    windows = [window.tolist() for chunk in chunks for window in chunk]
    assert all(len(chunk) <= at_once for chunk in chunks)
    assert all(b == a + 1 for window in windows for a, b in itertools.pairwise(window))
    predicted = [token for window in windows for token in window[1:]]
    assert len(set(predicted)) == len(predicted)
    if most >= length - 1:
        assert predicted == list(range(1, length))
    elif block_size < length:
        assert len(windows) == max(1, most // block_size)
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(windows)]
        assert not gaps or max(gaps) - min(gaps) <= block_size
        assert windows[0][0] == 0 and (len(windows) == 1 or windows[-1][-1] > length - 1 - block_size)


def test_eval_iters_is_in_batches_and_the_end_of_a_run_reads_everything(data_dir, tmp_path):
    flags = [*TINY, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", 4, "--eval_interval", 2]
    said = ok(here(*flags, "--eval_iters", 3)).stdout
    val = np.fromfile(data_dir / "val.bin", "<u2")
    assert f"an evaluation reads {3 * 4 * 32:,} of {len(val) - 1:,} characters" in said
    model, _ = load_model(tmp_path / "ckpt.pt")
    chunks = np.concatenate(list(eval_windows(val, 32, 3 * 4 * 32, 99)))
    x = torch.from_numpy(chunks.astype(np.int64))
    best = min(float(row["val_loss"]) for row in log(tmp_path) if row["val_loss"])
    assert best == pytest.approx(model(x[:, :-1], targets=x[:, 1:])[1].item(), rel=1e-4)
    (whole,) = re.findall(r", ([\d.]+) on all of the val split", said)
    assert float(whole) == pytest.approx(plain_val_loss(model, val, 32), abs=1e-4)


# -- interrupted -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """(flags, out_dir): a run whose evaluations take long, and the folder of that run undisturbed."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "text.txt").write_text(SAMPLE.read_text(encoding="utf-8") * 50, encoding="utf-8")
    ok(here("--input", folder / "text.txt", "--data_dir", folder / "data", script="data/prepare.py"))
    flags = [*STATEFUL, "--data_dir", folder / "data", "--eval_interval", 2, "--max_iters", 4, "--log_interval", 1]
    flags += ["--eval_iters", 10_000]
    ok(here(*flags, "--out_dir", folder / "whole"))
    return flags, folder / "whole"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_an_evaluation_that_is_stopped_is_done_again_and_the_run_is_the_same(name, long_run, tmp_path):
    """Evaluations of minutes obey Ctrl-C, and a kill costs no step: last.pt is written before."""
    flags, whole = long_run
    out = tmp_path / "out"
    process = start(*flags, "--out_dir", out)
    while not (out / "last.pt").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(getattr(signal, name))
    said, _ = process.communicate(timeout=60)
    assert not (out / "ckpt.pt").exists() and load(out / "last.pt")["iter_num"] == 2
    assert process.returncode == (130 if name == "SIGINT" else -signal.SIGKILL)
    assert ("stopped at step 2 of 4 and saved" in said) == (name == "SIGINT")
    ok(here("--init_from", "resume", "--out_dir", out))
    assert_same_run(whole, out)
    columns = ("step", "tokens", "train_loss", "val_loss", "lr", "grad_norm")
    rows = [[[row[name] for name in columns] for row in log(folder)] for folder in (whole, out)]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_an_evaluation_that_was_stopped_is_done_even_if_the_new_settings_have_none_there(long_run, tmp_path):
    """Otherwise its row would be written again and again."""
    flags, _ = long_run
    process = start(*flags, "--out_dir", tmp_path)
    while not (tmp_path / "last.pt").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    ok(here("--init_from", "resume", "--out_dir", tmp_path, "--eval_interval", 3, "--max_iters", 5))
    rows = log(tmp_path)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    assert [bool(row["val_loss"]) for row in rows] == [False, True, True, False, True]


# -- any model ---------------------------------------------------------------------------------------------------------


def test_eval_only_prints_the_loss_of_a_checkpoint_and_of_a_run_and_writes_nothing(trained, data_dir, tmp_path):
    val = np.fromfile(data_dir / "val.bin", "<u2")
    (tmp_path / "young").mkdir()
    shutil.copy(trained / "last.pt", tmp_path / "young")  # a run before its first evaluation
    young = (tmp_path / "young", "last.pt")
    for source, file in (("ckpt.pt", "ckpt.pt"), ("last.pt", "last.pt"), (".", "ckpt.pt"), young):
        before = contents(trained)
        flags = ["--eval_only", "--data_dir", data_dir, "--out_dir", tmp_path / "out", "--device", "cpu"]
        said = ok(here("--init_from", trained / source, *flags)).stdout
        assert contents(trained) == before and not (tmp_path / "out").exists()
        loss, bits = map(float, re.fullmatch(r"val loss ([\d.]+) \(([\d.]+) bits per byte\): .*\n", said).groups())
        model, tokenizer = load_model(trained / file)
        expected = plain_val_loss(model, val, 32)
        assert loss == pytest.approx(expected, abs=1e-4)
        text = tokenizer.decode(val.tolist())
        assert bits == pytest.approx(expected / np.log(2) * len(text) / len(text.encode()), abs=1e-3)
    for flags in (["--eval_only"], ["--meta", "meta.pkl"]):
        flags += ["--data_dir", data_dir, "--out_dir", tmp_path / "out", "--max_iters", 1]
        assert_one_line(here(*flags), "need a model: pass it as --init_from", code=1)


def test_text_of_other_characters_is_refused_and_the_line_says_how_to_prepare_it(trained, tmp_path):
    write_ids(tmp_path, CharTokenizer("xyz\n"), "xyz\n" * 200)
    result = here("--eval_only", "--init_from", trained / "ckpt.pt", "--data_dir", tmp_path)
    assert_one_line(result, "are not those of the model", f"--tokenizer {trained / 'ckpt.pt'}", code=1)


def test_a_run_that_has_ended_says_so(out, data_dir):
    """By --patience, too: a resume would train on past the end."""
    flags = ["--init_from", "resume", "--out_dir", out]
    assert "has ended at step 60: --max_iters 120 would continue it" in ok(here(*flags)).stdout
    worse = ["--max_iters", 90, "--eval_interval", 5, "--patience", 1, "--learning_rate", 0.5, "--min_lr", 0.5]
    said = ok(here(*flags, *worse)).stdout
    assert "the learning rate now falls until step 90, not 60" in said and "(--patience)" in said
    before = contents(out)
    assert ": a larger --patience would continue it" in ok(here(*flags)).stdout
    assert contents(out) == before
    shutil.rmtree(out)
