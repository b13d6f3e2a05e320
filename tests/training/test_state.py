"""kvgpt/training/state.py: checkpoints of a run, and resumes."""

import contextlib
import functools
import itertools
import json
import math
import operator
import os
import pickle
import shutil
from collections import OrderedDict

import numpy as np
import pytest
import torch

from helpers import (
    STATEFUL,
    Bomb,
    assert_one_line,
    assert_refused,
    assert_same_run,
    child,
    contents,
    here,
    load,
    log,
    ok,
    plain_val_loss,
    same,
)
from model import GPT, GPTConfig

# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoints_hold_tensors_and_plain_values_under_the_promised_keys(trained, data_dir):
    plain = (dict, OrderedDict, list, tuple, str, int, float, bool, type(None), torch.Tensor)

    def walk(value):
        assert type(value) in plain, type(value)
        parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value if type(value) is list else ()
        for part in parts:
            walk(part)

    keys = "model model_args iter_num best_val_loss config chars data_sha256 ngrams"
    for name, more in (("ckpt.pt", ""), ("last.pt", " optimizer scaler mtp evals_since_best")):
        ckpt = load(trained / name)
        assert set(ckpt) == set((keys + more).split())
        walk(ckpt)
        weights = sum(p.nbytes for p in GPT(GPTConfig(**ckpt["model_args"])).parameters())
        order, codes, counts = (ckpt["ngrams"][key] for key in ("order", "codes", "counts"))
        assert 0 < codes.nbytes + counts.nbytes <= weights / 8
        text = np.fromfile(data_dir / "train.bin", dtype="<u2")
        code, base = int(codes[counts.argmax()]), len(ckpt["chars"])
        digits = [code // base**i % base for i in range(order, -1, -1)]
        assert sum(text[i : i + order + 1].tolist() == digits for i in range(len(text) - order)) == counts.max()
        assert ckpt["chars"] == json.loads((data_dir / "meta.json").read_text(encoding="utf-8"))["chars"]
        assert ckpt["iter_num"] == 60


def test_ckpt_has_the_best_loss_and_last_the_latest(out, data_dir):
    """A worse evaluation must not replace the best weights. The plain loop checks the losses of both files."""
    ids = np.fromfile(data_dir / "val.bin", dtype="<u2")
    before = contents(out)
    worse = "--learning_rate 0.5 --min_lr 0.5 --warmup_iters 0 --max_iters 70".split()
    ok(here("--init_from", "resume", "--out_dir", out, *worse))
    assert (out / "ckpt.pt").read_bytes() == before["ckpt.pt"] != (out / "last.pt").read_bytes()
    best, worst = (float(row["val_loss"]) for row in log(out) if row["val_loss"])
    assert best < worst
    for name, loss in (("ckpt.pt", best), ("last.pt", worst)):
        ckpt = load(out / name)
        model = GPT(GPTConfig(**ckpt["model_args"]))
        model.load_state_dict(ckpt["model"])
        assert ckpt["best_val_loss"] == best
        assert plain_val_loss(model, ids, 32) == pytest.approx(loss, rel=1e-5)


def test_a_best_checkpoint_that_is_gone_is_written_again(out):
    """The run would end with the path of a file that is not there."""
    best = load(out / "ckpt.pt")["best_val_loss"]
    (out / "ckpt.pt").unlink()
    worse = "--learning_rate 0.5 --min_lr 0.5 --warmup_iters 0 --max_iters 70".split()
    result = ok(here("--init_from", "resume", "--out_dir", out, *worse))
    assert f"{out / 'ckpt.pt'} is gone" in result.stderr and len(result.stderr.splitlines()) == 1
    assert load(out / "ckpt.pt")["best_val_loss"] > best


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_a_resume_with_more_threads_than_cores_says_so_in_one_line(out):
    """A run from a larger machine. Its threads would wait for each other at every operation, and nobody know why."""
    ckpt, threads = load(out / "last.pt"), os.cpu_count() + 1
    ckpt["config"]["threads"] = threads
    torch.save(ckpt, out / "last.pt")
    resume = ["--init_from", "resume", "--out_dir", out, "--max_iters"]
    note = ok(here(*resume, 61)).stderr
    assert len(note.splitlines()) == 1 and f"{threads} threads" in note and f"--threads {os.cpu_count()} " in note
    assert ok(here(*resume, 62, "--threads", threads)).stderr == ""  # this number was asked for


@pytest.mark.slow
def test_a_resume_computes_on_the_threads_of_its_run(data_dir, tmp_path):
    """Another number of threads adds the gradients of 512 positions in another order."""
    flags = ["--batch_size", 8, "--block_size", 64, "--n_layer", 1, "--lr_decay_iters", 6, "--data_dir", data_dir]
    out, whole, other = (tmp_path / name for name in ("out", "whole", "other"))
    ok(child(*flags, "--max_iters", 6, "--threads", 2, "--out_dir", whole))
    ok(child(*flags, "--max_iters", 6, "--out_dir", other))
    assert not same(load(whole / "last.pt")["model"], load(other / "last.pt")["model"])
    assert "with 2 threads" in ok(child(*flags, "--max_iters", 3, "--threads", 2, "--out_dir", out)).stdout
    resumed = ok(child("--init_from", "resume", "--max_iters", 6, "--out_dir", out)).stdout
    assert "with 2 threads" in resumed
    assert_same_run(whole, out)


def test_ten_steps_and_ten_after_a_resume_are_twenty_to_the_last_bit(data_dir, tmp_path):
    """Weights, optimizer and random numbers, with dropout and micro-steps. The settings come from the checkpoint."""
    flags = [*STATEFUL, "--lr_decay_iters", 20, "--data_dir", data_dir]
    ok(here(*flags, "--max_iters", 20, "--out_dir", tmp_path / "whole"))
    ok(child(*flags, "--max_iters", 10, "--out_dir", tmp_path / "halves"))
    config = load(tmp_path / "halves" / "last.pt")["config"]
    result = ok(child("--init_from", "resume", "--out_dir", tmp_path / "halves", "--max_iters", 20))
    assert "resuming" in result.stdout and "steps 10..20" in result.stdout
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    assert [int(row["step"]) for row in log(tmp_path / "halves")] == [10, 20]
    resumed = load(tmp_path / "halves" / "last.pt")["config"]
    assert resumed == config | {"max_iters": 20, "init_from": "resume"}


@pytest.mark.parametrize("flag, values", [("weight_decay", (0, 0.9)), ("beta1", (0.1, 0.99)), ("beta2", (0.1, 0.999))])
def test_a_resume_with_another_optimizer_setting_uses_it(flag, values, out, tmp_path):
    """Not the checkpoint's: optimizer.load_state_dict brings the old weight_decay and betas back."""
    for value in values:
        copy = shutil.copytree(out, tmp_path / str(value))
        ok(here("--init_from", "resume", "--out_dir", copy, "--max_iters", 63, f"--{flag}", value))
    a, b = (load(tmp_path / str(value) / "last.pt") for value in values)
    assert (a["config"][flag], b["config"][flag]) == values
    assert not same(a["model"], b["model"])


def test_a_resume_with_another_dropout_or_learning_rate_uses_it(out, tmp_path):
    results = []
    for flags in ([], ["--dropout", "0.5"], ["--learning_rate", "0.01"], ["--grad_clip", "0.001"], ["--seed", "1"]):
        copy = shutil.copytree(out, tmp_path / "-".join(["copy", *flags]))
        ok(here("--init_from", "resume", "--out_dir", copy, "--max_iters", 63, *flags))
        results.append(load(copy / "last.pt"))
    assert all(not same(a["model"], b["model"]) for a, b in itertools.combinations(results, 2))
    assert results[1]["model_args"]["dropout"] == 0.5


# -- a last.pt that cannot be resumed ----------------------------------------------------------------------------------


def one(p):
    return torch.ones(1)


def expanded(p):
    """The right shape, and memory for one number."""
    return torch.ones(1).expand(p.shape)


@pytest.mark.slow
@pytest.mark.parametrize("make", [one, expanded])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_a_state_of_adamw_that_does_not_fit_is_refused(name, make, out):
    """The fused step reads and writes past the end of a tensor that is too small. The process dies of it."""
    ckpt = load(out / "last.pt")
    for state in ckpt["optimizer"][0]["state"].values():
        state[name] = make(state["exp_avg"])
    torch.save(ckpt, out / "last.pt")
    before = contents(out)
    result = child("--init_from", "resume", "--out_dir", out, "--max_iters", 61)
    assert_one_line(result, out / "last.pt", f"optimizer: {name}")
    assert contents(out) == before


ENTRIES = """config data_sha256 optimizer scaler mtp iter_num evals_since_best best_val_loss ngrams chars
model_args.n_layer
config.learning_rate config.n_layer config.recipe config.bias config.data_dir config.patience optimizer.0
optimizer.0.state optimizer.0.state.0 optimizer.0.state.0.exp_avg optimizer.0.param_groups""".split()
VALUES = [None, 5, -1, math.nan, "text", torch.zeros(3), [torch.zeros(2, 2)], {0: {}}]


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_last_checkpoint_with_any_other_entry_is_refused_or_resumed(entry, value, trained, tmp_path):
    """A traceback, a crash, a message of several lines, or a NaN that no loss is ever below."""
    shutil.copytree(trained, tmp_path / "out")
    ckpt = load(tmp_path / "out" / "last.pt")
    *outer, name = (int(part) if part.isdigit() else part for part in entry.split("."))
    functools.reduce(operator.getitem, outer, ckpt)[name] = value
    torch.save(ckpt, tmp_path / "out" / "last.pt")
    try:
        result = here("--init_from", "resume", "--out_dir", tmp_path / "out", "--max_iters", 61)
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}")
    if result.returncode:
        assert_one_line(result)
    else:
        assert math.isfinite(load(tmp_path / "out" / "last.pt")["best_val_loss"])


def test_resume_of_nothing_is_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", words=[tmp_path / "nowhere", "no checkpoint"])
    assert_refused(tmp_path, words=["no checkpoint"])


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
def test_a_truncated_last_checkpoint_is_refused(share, out):
    raw = (out / "last.pt").read_bytes()
    (out / "last.pt").write_bytes(raw[: int(share * len(raw))])
    assert_refused(out, words=[out / "last.pt"])


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\n",
        b"\x00" * 100,
        b"\x80\x02.",
        b"\x80\x02]q\x00.",
        b"0" * 50,
        b"\xff" * 50,
        b"Q.",
        b"PK\x03\x04" + b"\x00" * 60,
    ],
    ids=range(8),
)
def test_a_last_checkpoint_that_is_something_else_is_refused(raw, out):
    (out / "last.pt").write_bytes(raw)
    assert_refused(out, words=[out / "last.pt"])


@pytest.mark.parametrize("kind", ["pickle", "torch", "in the config of a good run"])
def test_a_malicious_last_checkpoint_is_refused_and_runs_nothing(kind, out, tmp_path):
    ckpt, trap = load(out / "last.pt"), tmp_path / "trap"
    if kind == "pickle":
        (out / "last.pt").write_bytes(pickle.dumps(Bomb(trap), protocol=2))
    elif kind == "torch":
        torch.save(Bomb(trap), out / "last.pt")
    else:
        ckpt["config"]["trap"] = Bomb(trap)
        torch.save(ckpt, out / "last.pt")
    assert_refused(out, words=[out / "last.pt"])
    assert not trap.exists()
    with contextlib.suppress(Exception):
        torch.load(out / "last.pt", weights_only=False)
    assert trap.exists()  # the trap works
