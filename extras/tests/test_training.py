"""train.py with extras: tokens that are not characters, --plot, and n-grams in the checkpoints."""

import csv
import math
import re
import sys

import pytest
import torch

from extras.checkpoint import load_model
from helpers import HEADER, SAMPLE, SMALL, STATEFUL, assert_one_line, assert_same_run, here, load, ok, plain_val_loss
from train import load_dataset


@pytest.mark.slow
def test_a_run_on_tokens_says_tokens_and_bits_per_byte_and_resumes(tmp_path):
    """The unit does not depend on the tokens: here it is computed from the bytes of the val text and its whole loss."""
    data = tmp_path / "data"
    prepare = ["--input", SAMPLE, "--tokenizer", "bpe", "--vocab_size", 300, "--data_dir", data]
    ok(here(*prepare, script="data/prepare.py"))
    flags = [*STATEFUL, "--data_dir", data, "--eval_interval", 3, "--lr_decay_iters", 9, "--sample_interval", 6]
    whole, out = tmp_path / "whole", tmp_path / "out"
    result = ok(here(*flags, "--max_iters", 9, "--out_dir", whole))
    ok(here(*flags, "--max_iters", 6, "--out_dir", out))
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 9))
    assert_same_run(whole, out)

    with open(out / "log.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == [*HEADER, "val_bpb"]
    assert [int(row["tokens"]) for row in rows] == [3 * 64, 6 * 64, 9 * 64]
    model, tokenizer = load_model(whole / "last.pt")
    val = load_dataset(data, 16).val
    text = SAMPLE.read_text(encoding="utf-8")
    assert tokenizer.decode(val.tolist()) == text[int(0.9 * len(text)) :]
    nats = plain_val_loss(model, val, 16)
    bits = nats / math.log(2) * len(val) / len(text[int(0.9 * len(text)) :].encode())
    assert float(rows[-1]["val_loss"]) == pytest.approx(nats, rel=1e-5)
    assert float(rows[-1]["val_bpb"]) == pytest.approx(bits, rel=1e-5)
    assert f"val {nats:.4f} ({bits:.4f} bits per byte)" in result.stdout and " of 64 tokens\n" in result.stdout
    assert re.search(r"^best val loss \d\.\d{4} \(\d\.\d{4} bits per byte\): ", result.stdout, re.MULTILINE)
    written = (whole / "samples.txt").read_text(encoding="utf-8").split("===\n")[1]
    start = torch.tensor([tokenizer.encode("\n")])
    assert written.startswith("\n") and len(tokenizer.encode(written)) >= start.size(1)


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
    assert_one_line(result, "the model never saw 'é', '中'", code=1)


def test_the_checkpoints_of_a_run_hold_ngrams_for_drafts(trained):
    for name in ("ckpt.pt", "last.pt"):
        assert len(load(trained / name)["ngrams"]["counts"]) > 0


# -- --plot ------------------------------------------------------------------------------------------------------------


def test_plot_draws_the_losses(data_dir, tmp_path):
    pytest.importorskip("matplotlib")
    flags = [*SMALL, "--max_iters", 6, "--eval_interval", 4, "--log_interval", 1, "--data_dir", data_dir, "--plot"]
    ok(here(*flags, "--out_dir", tmp_path))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_is_one_line(data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path / "out", "--plot")
    assert_one_line(result, "pip install matplotlib")
    assert not (tmp_path / "out").exists()
