"""Evaluation: what it reads, and --eval_only and --init_from for any model."""

import itertools
import math
import re
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import train
from helpers import TINY, assert_one_line, contents, here, load, log, ok, plain_val_loss, random_model, same, write_ids
from model import GPT, CharTokenizer, GPTConfig, load_model
from train import evaluate

# -- what it reads -----------------------------------------------------------------------------------------------------


def read_windows(ids, block_size, num_tokens, at_once=99):
    """The windows that evaluate feeds to a model, batch by batch, each with its targets, `(B, T + 1)`."""
    batches = []

    def model(x, y):
        is_known = y >= 0  # -1 follows the end of the text
        assert torch.equal(x[:, 1:][is_known[:, :-1]], y[:, :-1][is_known[:, :-1]])
        batches.append([torch.cat((row[:1], targets[known])) for row, targets, known in zip(x, y, is_known)])
        return None, torch.zeros(())

    # a vocabulary so large that at_once windows are all whose logits fit
    model.config = SimpleNamespace(block_size=block_size, vocab_size=2**27 // (block_size * at_once))
    model.device = "cpu"
    model.eval = model.train = lambda: None
    evaluate(model, ids, num_tokens, nullcontext())
    return batches


@given(length=st.integers(2, 80), block_size=st.integers(1, 40), seed=st.integers(0, 9))
@example(length=8193, block_size=32, seed=0)  # a forward takes 8192 characters at most, in whole windows
@example(length=8194, block_size=32, seed=0)
@example(length=20001, block_size=100, seed=0)
@example(length=40, block_size=9000, seed=0)
def test_evaluation_is_one_exact_pass_over_the_text(length, block_size, seed):
    """Not a mean of means: the short last window counts by its characters. And it leaves the model and rng alone."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=block_size, vocab_size=7, n_layer=1, n_head=1, n_embd=8, dropout=0.5)
    model = GPT(config).train()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.7)  # so that no two characters have the same loss
    ids = np.random.default_rng(seed).integers(7, size=length).astype("<u2")
    before = torch.get_rng_state()
    loss = evaluate(model, ids, math.inf, nullcontext())
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert loss == pytest.approx(plain_val_loss(model, ids, block_size), rel=1e-5)


@given(length=st.integers(2, 300), block_size=st.integers(1, 20), most=st.integers(1, 400), at_once=st.integers(1, 9))
def test_windows_cover_the_text_or_are_spread_over_it(length, block_size, most, at_once):
    chunks = read_windows(np.arange(length), block_size, most, at_once)
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


@given(length=st.integers(2, 300), block_size=st.integers(1, 20), most=st.integers(1, 400), world=st.integers(1, 4))
def test_processes_share_the_windows_and_none_is_read_twice(length, block_size, most, world):
    """Here the sums that they would exchange are added by hand: those of losses, and those of tokens."""
    model = random_model(GPTConfig(block_size=block_size, vocab_size=20, n_layer=1, n_head=2, n_embd=16))
    ids = np.random.default_rng(0).integers(20, size=length).astype("<u2")

    def sums(world):
        sent = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "all_reduce", lambda value, op=None: 0 if op else sent.append(value) or 1.0)
            patch.setattr(train, "WORLD_SIZE", world)
            for rank in range(world):
                patch.setattr(train, "RANK", rank)
                evaluate(model, ids, most, nullcontext())
        return sum(sent[::2]), sum(sent[1::2])

    alone = sums(1)
    assert sums(world) == pytest.approx(alone, rel=1e-5)
    assert evaluate(model, ids, most, nullcontext()) == pytest.approx(alone[0] / alone[1])


def test_eval_iters_is_in_batches(data_dir, tmp_path):
    flags = [*TINY, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", 4, "--eval_interval", 2]
    ok(here(*flags, "--eval_iters", 3))
    val = np.fromfile(data_dir / "val.bin", "<u2")
    assert 3 * 4 * 32 < len(val) - 1
    model, _ = load_model(tmp_path / "ckpt.pt")
    x = torch.stack([window for batch in read_windows(val.astype(np.int64), 32, 3 * 4 * 32) for window in batch])
    assert x.shape == (3 * 4, 33)
    best = min(float(row["val_loss"]) for row in log(tmp_path) if row["val_loss"])
    loss = model(x[:, :-1], targets=x[:, 1:])[1].item()
    assert best == pytest.approx(loss, rel=1e-4)
    flags = ["--init_from", tmp_path / "ckpt.pt", "--data_dir", data_dir, "--eval_only", "--device", "cpu"]
    said = ok(here(*flags, "--batch_size", 4, "--eval_iters", 3)).stdout
    assert float(said.split()[2]) == pytest.approx(loss, abs=1e-4) and " 384 characters of the val split" in said


# -- any model ---------------------------------------------------------------------------------------------------------


def test_a_start_that_nothing_improves_on_stays_the_best(trained, data_dir, tmp_path):
    flags = ["--init_from", trained, "--data_dir", data_dir, "--device", "cpu"]
    start = re.match(r"val loss ([\d.]+)", ok(here(*flags, "--eval_only")).stdout)[1]
    spoil = ["--learning_rate", 5, "--optimizer", "adamw", "--max_iters", 3, "--eval_interval", 1, "--log_interval", 1]
    said = ok(here(*flags, *spoil, "--lr_decay", "none", "--out_dir", tmp_path)).stdout
    assert f"best val loss {start}: " in said and all(f"val {start}" not in line for line in said.splitlines()[2:5])
    best = load(tmp_path / "ckpt.pt")
    assert best["iter_num"] == 0 and same(best["model"], load(trained / "ckpt.pt")["model"])  # from step 0


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
        numbers = re.match(r"val loss ([\d.]+) \(perplexity ([\d.]+)\): ", said).groups()
        loss, perplexity = map(float, numbers)
        model, _ = load_model(trained / file)
        expected = plain_val_loss(model, val, 32)
        assert (loss, perplexity) == pytest.approx((expected, np.exp(expected)), abs=2e-3)
    huge = load(trained / "ckpt.pt")
    for name in ("transformer.wte.weight", "lm_head.weight"):
        huge["model"][name] = huge["model"][name] * 1e6
    torch.save(huge, tmp_path / "huge.pt")
    flags = ["--eval_only", "--data_dir", data_dir, "--device", "cpu"]
    assert "(perplexity inf)" in ok(here("--init_from", tmp_path / "huge.pt", *flags)).stdout
    for flags in (["--eval_only"], ["--meta", "meta.pkl"]):
        flags += ["--data_dir", data_dir, "--out_dir", tmp_path / "out", "--max_iters", 1]
        assert_one_line(here(*flags), "need a trained model: pass it as --init_from", code=1)


def test_eval_only_of_a_run_reads_the_whole_val_split_whatever_the_run_read(data_dir, tmp_path):
    ok(here(*TINY, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", 1, "--eval_iters", 1))
    said = ok(here("--init_from", "resume", "--out_dir", tmp_path, "--eval_only")).stdout
    val = np.fromfile(data_dir / "val.bin", "<u2")
    assert f" {len(val) - 1:,} characters of the val split" in said
    loss = plain_val_loss(load_model(tmp_path / "last.pt")[0], val, 32)
    assert float(said.split()[2]) == pytest.approx(loss, abs=1e-4)


def test_text_of_other_characters_is_refused_and_the_line_says_how_to_prepare_it(trained, tmp_path):
    write_ids(tmp_path, CharTokenizer("xyz\n"), "xyz\n" * 200)
    result = here("--eval_only", "--init_from", trained / "ckpt.pt", "--data_dir", tmp_path)
    assert_one_line(result, "are not those of the model", f"--tokenizer {trained / 'ckpt.pt'}", code=1)


def test_a_run_that_has_ended_says_so_and_changes_no_file(out, data_dir):
    """By --patience, too: a resume would train on past the end."""
    flags = ["--init_from", "resume", "--out_dir", out]
    before = contents(out)
    said = ok(here(*flags)).stdout
    more = f"python train.py --init_from resume --out_dir={out} --max_iters 120"
    assert f"finished at step 60; to train longer: {more}\nbest val loss " in said
    assert "A sample:" in said
    ok(here(*flags, "--max_iters", 30))
    assert contents(out) == before
    worse = ["--max_iters", 90, "--eval_interval", 5, "--patience", 1, "--learning_rate", 0.5, "--min_lr", 0.5]
    said = ok(here(*flags, *worse)).stdout
    assert "stopped at step 65: 1 evaluations without a better val loss (--patience)" in said
    before = contents(out)
    assert "stopped at step 65: " in ok(here(*flags)).stdout
    assert contents(out) == before
    assert "step 66/90" not in said and "step 70/90" in ok(here(*flags, "--patience", 2)).stdout
