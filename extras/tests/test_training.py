"""train.py with extras: tokens that are not characters, n-grams in the checkpoints, the lock, and the plot of a run."""

import math
import re
import sys

import pytest
import torch

from extras.formats.checkpoint import load_model
from helpers import (
    SAMPLE,
    SMALL,
    STATEFUL,
    assert_one_line,
    assert_same_run,
    child,
    here,
    load,
    log,
    ok,
    plain_val_loss,
    progress,
    start,
)
from train import load_dataset


@pytest.mark.slow
def test_a_run_on_tokens_says_tokens_and_bits_per_byte_and_resumes(tmp_path):
    """The unit does not depend on the tokens: here it is computed from the bytes of the val text and its whole loss."""
    data = tmp_path / "data"
    prepare = ["--input", SAMPLE, "--tokenizer", "bpe", "--vocab_size", 300, "--data_dir", data]
    ok(here(*prepare, script="data/prepare.py"))
    flags = [*STATEFUL, "--data_dir", data, "--eval_interval", 3, "--lr_decay_iters", 9]
    whole, out = tmp_path / "whole", tmp_path / "out"
    result = ok(here(*flags, "--max_iters", 9, "--out_dir", whole))
    ok(here(*flags, "--max_iters", 6, "--out_dir", out))
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 9))
    assert_same_run(whole, out)
    assert progress(whole) == progress(out)

    model, tokenizer = load_model(whole / "last.pt")
    val = load_dataset(data, 16)[2]
    text = SAMPLE.read_text(encoding="utf-8")
    assert tokenizer.decode(val.tolist()) == text[int(0.9 * len(text)) :]
    nats = plain_val_loss(model, val, 16)
    bits = nats / math.log(2) * len(val) / len(text[int(0.9 * len(text)) :].encode())
    assert float(log(out)[-1]["val_loss"]) == pytest.approx(nats, rel=1e-5)
    assert " of 64 tokens from " in result.stdout
    written = result.stdout.split("A sample:\n\n")[1].removesuffix("\n")
    assert written.startswith("\n") and len(tokenizer.encode(written)) > 1
    said = ok(here("--eval_only", "--init_from", whole / "last.pt", "--data_dir", data, "--device", "cpu")).stdout
    assert float(said.split()[2]) == pytest.approx(nats, abs=1e-4)
    assert f", {len(val) - 1:,} tokens of the val split\n" in said
    said = ok(
        here("--ckpt", whole / "last.pt", "--data_dir", data, "--device", "cpu", script="extras/evaluate.py")
    ).stdout
    loss, bits_said = re.match(r"loss ([\d.]+) \(perplexity [\d.]+, ([\d.]+) bits per byte\): ", said).groups()
    assert [float(loss), float(bits_said)] == pytest.approx([nats, bits], abs=1e-4)


@pytest.mark.slow
def test_a_run_starts_from_a_checkpoint_on_other_text(trained, tmp_path):
    (tmp_path / "text.txt").write_text(SAMPLE.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    prepare = ["--tokenizer", trained / "ckpt.pt", "--data_dir", tmp_path / "data"]
    ok(here(*prepare, "--input", tmp_path / "text.txt", script="data/prepare.py"))
    flags = ["--init_from", trained, "--data_dir", tmp_path / "data", "--out_dir", tmp_path / "out", "--device", "cpu"]
    ok(here(*flags, "--max_iters", 1, "--learning_rate", 0, "--weight_decay", 0, "--batch_size", 2))
    ours, theirs = load(tmp_path / "out" / "last.pt"), load(trained / "ckpt.pt")
    assert ours["chars"] == theirs["chars"] and ours["model_args"] == theirs["model_args"] | {"dropout": 0.0}
    assert all(torch.equal(p, theirs["model"][name]) for name, p in ours["model"].items())
    (tmp_path / "text.txt").write_text("ROMEO: 中 and é", encoding="utf-8")
    result = here(*prepare, "--input", tmp_path / "text.txt", script="data/prepare.py")
    assert_one_line(result, "no 'é', '中' in the vocabulary", code=1)


def test_the_checkpoints_of_the_modern_recipe_hold_ngrams_for_drafts(data_dir, tmp_path):
    ok(here(*STATEFUL, "--max_iters", 1, "--data_dir", data_dir, "--out_dir", tmp_path))
    for name in ("ckpt.pt", "last.pt"):
        assert len(load(tmp_path / name)["ngrams"]["counts"]) > 0


@pytest.mark.slow
def test_a_second_run_in_an_out_dir_is_refused_until_the_first_is_dead(data_dir, tmp_path):
    """The lock needs no cleaning up, because kill -9 frees it."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", 10**6, "--log_interval", 1]
    process = start(*flags, "--save_interval", 2)
    with process:
        for line in process.stdout:
            if line.startswith("step 4/"):
                break
        for more in (flags, ["--init_from", "resume", "--out_dir", tmp_path]):
            assert_one_line(child(*more), f"another process is writing to {tmp_path}: stop it", code=1)
        assert not (tmp_path / "previous-1").exists()
        process.kill()
    ok(child("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", load(tmp_path / "last.pt")["iter_num"] + 2))


def test_a_run_of_an_older_train_py_goes_on(out):
    """Its config had no loss, had None for none or automatic, and two flags that are now those of extras.evaluate."""
    ckpt = load(out / "last.pt")
    old = dict.fromkeys("text stride n_kv_head eval_iters patience lr_decay_iters threads meta min_lr".split())
    ckpt["config"] |= old | dict(ngram_targets=0.0, mtp_weight=0.0)
    ckpt["mtp"] = ckpt.pop("loss")
    ckpt["model_args"] |= {"n_kv_head": None}
    del ckpt["config"]["loss"]
    torch.save(ckpt, out / "last.pt")
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 61))
    last = load(out / "last.pt")
    assert last["iter_num"] == 61 and last["config"]["loss"] == "cross_entropy"
    assert last["config"]["min_lr"] == last["config"]["learning_rate"] / 10


# -- the plot ----------------------------------------------------------------------------------------------------------


def plot(*args):
    return here(*args, script="extras/plot.py")


@pytest.mark.parametrize("rows", [99, 1, 0], ids=["all rows", "before the first evaluation", "no row"])
def test_the_plot_of_a_run_is_drawn(rows, out):
    pytest.importorskip("matplotlib")
    lines = (out / "log.csv").read_bytes().splitlines(keepends=True)
    (out / "log.csv").write_bytes(b"".join(lines[: 1 + rows]))
    pictures = [out / "loss.png", out / "loss-dark.png"]
    assert ok(plot(out)).stdout.splitlines() == [str(picture) for picture in pictures]
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("log", [None, b"step,train_loss,val_loss\na,2.5,\n", b"loss\n3\n", b"\xff"])
def test_a_log_that_is_missing_or_of_another_kind_is_one_line(log, tmp_path):
    pytest.importorskip("matplotlib")
    if log:
        (tmp_path / "log.csv").write_bytes(log)
    words = f"{tmp_path / 'log.csv'} is not the log of a run (" if log else tmp_path / "log.csv"
    assert_one_line(plot(tmp_path), words, code=1)
    assert not [*tmp_path.glob("*.png")]


def test_a_plot_without_matplotlib_is_one_line(out, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert_one_line(plot(out), "pip install matplotlib", code=1)
    assert not (out / "loss.png").exists()
