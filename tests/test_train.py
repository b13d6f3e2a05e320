"""train.py: batches, the step, whole runs, mistakes, and what a signal does to a run."""

import itertools
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import (
    ROOT,
    SMALL,
    STATEFUL,
    assert_one_line,
    assert_same_run,
    batch,
    here,
    linux,
    load,
    log,
    needs_extras,
    ok,
    same,
    start,
    unix,
)
from model import GPT, GPTConfig

# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_a_pure_function_of_the_seed_and_its_number():
    """No generator has a state that earlier batches have moved."""
    ids, keys = np.arange(3000, dtype="<u2"), list(itertools.product((0, 1, 2**40), (0, 1, 2, 500, 10**9)))
    batches = {}
    for key in keys:
        batches[key] = batch(ids, *key, 8, 16)
    torch.rand(3), np.random.rand(3)
    for key in keys[::-1]:
        assert same(batch(ids, *key, 8, 16), batches[key])
    distinct = {tuple(x[:, 0].tolist()) for x, y in batches.values()}
    assert len(distinct) == len(keys)
    for x, y in batches.values():
        assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x, x[:, :1] + torch.arange(16)) and torch.equal(y, x + 1)


@pytest.mark.parametrize("length", [9, 10, 20])
def test_batches_start_everywhere_up_to_the_last_whole_window(length):
    """An off-by-one would never show the last character, or read past the end of the text."""
    ids = np.arange(length, dtype="<u2")
    starts = {i for number in range(60) for i in batch(ids, 3, number, 8, 8)[0][:, 0].tolist()}
    assert starts == set(range(length - 8))


@given(
    length=st.integers(10, 400),
    block_size=st.integers(1, 9),
    batch_size=st.integers(1, 6),
    world=st.integers(1, 3),
    epoch=st.integers(0, 5),
)
def test_an_epoch_predicts_every_character_once_whoever_draws_the_batches(length, block_size, batch_size, world, epoch):
    """Except for less than a window at either end of the text."""
    ids, an_epoch, batch_size = np.arange(length, dtype="<u2"), (length - 1) // block_size, batch_size * world
    rows = {}
    for number in range(epoch * an_epoch // batch_size, ((epoch + 1) * an_epoch - 1) // batch_size + 1):
        ranks = [batch(ids, 7, number, batch_size, block_size, rank, world) for rank in range(world)]
        whole = torch.empty(batch_size, block_size, dtype=torch.int64)
        for rank, (_, y) in enumerate(ranks):
            whole[rank::world] = y
        assert torch.equal(whole, batch(ids, 7, number, batch_size, block_size)[1])
        rows |= {number * batch_size + i: row.tolist() for i, row in enumerate(whole)}
    predicted = [tuple(rows[i]) for i in range(epoch * an_epoch, (epoch + 1) * an_epoch)]
    characters = sorted(character for row in set(predicted) for character in row)
    assert len(set(characters)) == len(characters) >= length - 2 * block_size
    assert len(predicted) - len(set(predicted)) <= 1


# -- the step ----------------------------------------------------------------------------------------------------------


def test_a_run_is_a_plain_loop_of_adamw_steps(data_dir, tmp_path):
    """Six steps from the run's own first weights, with AdamW, clipping and the schedule written out here.

    The gradient is the mean of two micro-steps, neither their sum nor the last.
    """
    flags = [*SMALL, "--gradient_accumulation_steps", 2, "--log_interval", 1, "--lr_decay_iters", 5]
    flags += "--bias --grad_clip 0.5 --weight_decay 0.3 --beta1 0.8 --beta2 0.95 --warmup_iters 2".split()
    flags += ["--data_dir", data_dir]
    ok(here(*flags, "--learning_rate", 0, "--weight_decay", 0, "--max_iters", 1, "--out_dir", tmp_path / "first"))
    ok(here(*flags, "--learning_rate", 1e-2, "--min_lr", 1e-3, "--max_iters", 6, "--out_dir", tmp_path / "out"))

    first, last = load(tmp_path / "first" / "last.pt"), load(tmp_path / "out" / "last.pt")
    model = GPT(GPTConfig(**first["model_args"]))
    model.load_state_dict(first["model"])
    ids = np.fromfile(data_dir / "train.bin", dtype="<u2")
    params, losses = list(model.parameters()), []
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    rates = [1e-2 / 3, 2e-2 / 3, 1e-2, 7.75e-3, 3.25e-3, 1e-3]
    for step, lr in enumerate(rates):
        loss = sum(model(*batch(ids, 1337, number, 2, 16))[1] for number in (2 * step, 2 * step + 1)) / 2
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, params)
        scale = min(1.0, 0.5 / math.sqrt(sum(g.double().pow(2).sum().item() for g in grads)))
        assert step or scale < 1
        with torch.no_grad():
            for p, g, (m, v) in zip(params, grads, moments):
                m += 0.2 * (g * scale - m)
                v += 0.05 * ((g * scale) ** 2 - v)
                p *= 1 - lr * (0.3 if p.dim() > 1 else 0)
                p -= lr * (m / (1 - 0.8 ** (step + 1))) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
    for name, p in model.named_parameters():
        torch.testing.assert_close(last["model"][name], p.detach(), rtol=1e-3, atol=1e-5)
    rows = log(tmp_path / "out")
    assert [float(row["train_loss"]) for row in rows] == pytest.approx(losses, rel=1e-4)
    assert [float(row["lr"]) for row in rows] == pytest.approx(rates)


def test_a_modern_run_begins_with_blocks_that_are_the_identity(data_dir, tmp_path):
    flags = [*SMALL, "--recipe", "modern", "--learning_rate", 0, "--max_iters", 1, "--data_dir", data_dir]
    ok(here(*flags, "--out_dir", tmp_path))
    weights = load(tmp_path / "last.pt")["model"]
    projections = [weights[f"transformer.h.0.{name}.c_proj.weight"] for name in ("attn", "mlp")]
    assert not any(projection.any() for projection in projections)
    assert len(load(tmp_path / "last.pt")["optimizer"]) == 2  # AdamW and Muon


def test_dropout_has_other_masks_in_every_step_and_micro_step_but_the_same_in_a_resume(data_dir, tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    flags = [*SMALL, "--dropout", 0.1, "--gradient_accumulation_steps", 2, "--data_dir", data_dir]
    for name, steps in (("whole", 2), ("halves", 1)):
        ok(here(*flags, "--max_iters", steps, "--out_dir", tmp_path / name))
    ok(here("--init_from", "resume", "--max_iters", 2, "--out_dir", tmp_path / "halves"))
    whole, first, second = seeds[:5], seeds[5:8], seeds[8:]
    assert whole == first + second[1:] and len(set(whole)) == 5  # the first is --seed, for the weights
    assert second[0] == whole[0]


# -- a run -------------------------------------------------------------------------------------------------------------


def test_intervals_change_nothing_and_a_run_has_as_many_steps_as_it_says(data_dir, tmp_path):
    """An evaluation that drew random numbers, or left the model in eval mode, would change the weights."""
    for i, (evals, saves, logs) in enumerate([(1, 1, 1), (3, 2, 5), (1000, 1000, 1000)]):
        intervals = ["--eval_interval", evals, "--save_interval", saves, "--log_interval", logs]
        flags = [*STATEFUL, "--max_iters", 7, "--data_dir", data_dir, "--out_dir", tmp_path / str(i)]
        ok(here(*flags, *intervals))
        ckpt = load(tmp_path / str(i) / "last.pt")
        assert ckpt["iter_num"] == 7
        assert {state["step"].item() for state in ckpt["optimizer"][0]["state"].values()} == {7}
        assert_same_run(tmp_path / str(i), tmp_path / "0")
        expected = [step for step in range(1, 8) if step == 7 or not (step % evals and step % saves and step % logs)]
        assert [int(row["step"]) for row in log(tmp_path / str(i))] == expected
        assert [bool(row["val_loss"]) for row in log(tmp_path / str(i))] == [s == 7 or s % evals == 0 for s in expected]


# -- mistakes ----------------------------------------------------------------------------------------------------------


DAMAGE = [  # a file of the data, how it changes, and what the line says
    ("meta.json", lambda raw: raw[:12], "no usable data in {data} ("),
    ("meta.json", lambda raw: b"[]", "no usable data in {data} ("),
    ("meta.json", lambda raw: raw.replace(b"abc", b"aba"), "(vocabulary has changed)"),
    ("train.bin", lambda raw: raw[::-1], "(train has changed): run python data/prepare.py"),
    ("val.bin", lambda raw: raw[:-2], "(val has changed): run python data/prepare.py"),
]
MISTAKES = [  # flags, and what the line says
    ("--learning_rate 0 --min_lr 1e-4", "--min_lr 0.0001 is above --learning_rate 0.0"),
    ("--block_size 100000", "for validation, but we need 100001 and 2: use longer text or a smaller --block_size"),
    ("--n_embd 65 --n_head 4", "n_head=4: must be a divisor of n_embd=65"),
    ("--dtype float16", "--dtype float16 needs CUDA to train"),
    *(
        (f"--{flags}", f"--{flags.split(' --')[0]}")
        for flags in (
            "block_size 3000000 --n_embd 8",
            "n_embd 1000000",
            "mlp_ratio 1000000.0 --n_embd 128",
            "n_layer 100000000",
            "batch_size 1000000000",
        )
    ),
    ("--beta2 1", "Invalid beta parameter at index 1: 1.0"),
    ("--loss cross_entropy --mtp_weight 0.3", "--ngram_targets and --mtp_weight need --loss extras.targets"),
    ("--threads -1", "--threads -1 is not a number from 0 to "),
    ("--out_dir train.py", "File exists: 'train.py'"),
    ("--device nonsense", "--device nonsense cannot be used here"),
    ("--init_from out/none", "no checkpoint at out/none"),
    ("--data_dir none", "run python data/prepare.py --data_dir none (--input FILE for your own text), or pass"),
    ("--init_from resume", "no checkpoint at "),
]


@pytest.mark.parametrize("name, change, line", DAMAGE)
def test_data_that_has_changed_is_one_line(name, change, line, data_dir, tmp_path):
    data = Path(shutil.copytree(data_dir, tmp_path / "data"))
    (data / name).write_bytes(change((data / name).read_bytes()))
    result = here(*SMALL, "--data_dir", data, "--out_dir", tmp_path / "out")
    assert_one_line(result, line.format(data=data), data, code=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, line", MISTAKES, ids=[flags for flags, _ in MISTAKES])
def test_a_mistake_in_the_flags_is_one_line(flags, line, data_dir, tmp_path):
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path / "out", *flags.split())
    assert_one_line(result, line)
    assert not (tmp_path / "out").exists()


@linux
@pytest.mark.slow
def test_a_full_disk_is_one_line(data_dir, tmp_path):
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path / "out"]
    with open("/dev/full", "wb") as full:
        command = [sys.executable, ROOT / "train.py", *map(str, flags)]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    result.stdout = ""
    assert_one_line(result, "train.py: [Errno 28] No space left on device", code=1)


@needs_extras
@unix
def test_a_folder_that_vanishes_is_one_line(data_dir, tmp_path):
    process = start(*SMALL, "--max_iters", 10**6, "--data_dir", data_dir, "--out_dir", tmp_path / "out")
    while not (tmp_path / "out" / "last.pt").exists():
        assert process.poll() is None
        time.sleep(0.05)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and len(err.splitlines()) == 1, err
    assert err.startswith(f"train.py: {tmp_path / 'out'}") and "No such file" in err


# -- signals -----------------------------------------------------------------------------------------------------------


@unix
@pytest.mark.slow
def test_a_run_stopped_by_ctrl_c_and_resumed_is_the_undisturbed_run(data_dir, tmp_path, monkeypatch):
    """The step in progress is finished and saved, no batch is trained twice, and the command that is printed works.

    Its log has one row more, at the step where it stopped.
    """
    out_dir = "-it's"
    flags = [*STATEFUL, "--lr_decay_iters", 300, "--log_interval", 5, "--data_dir", data_dir]
    process = start(*flags, f"--out_dir={out_dir}", "--max_iters", 10**6, cwd=tmp_path)
    stdout = ""
    while "\nstep 15/" not in stdout and (line := process.stdout.readline()):
        stdout += line
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr == "", stderr
    stopped = load(tmp_path / out_dir / "last.pt")["iter_num"]
    last = rest.splitlines()[-1]
    assert stopped >= 15 and f"stopped at step {stopped} " in last
    assert int(log(tmp_path / out_dir)[-1]["step"]) == stopped

    words = shlex.split(last.partition("to continue: python train.py ")[2])
    more = ["--max_iters", stopped + 8]
    monkeypatch.chdir(tmp_path)
    ok(here(*words, *more))
    ok(here(*flags, *more, "--out_dir", tmp_path / "whole"))
    assert_same_run(tmp_path / out_dir, tmp_path / "whole")
    ours, theirs = ([row["step"] for row in log(tmp_path / folder)] for folder in (out_dir, "whole"))
    assert sorted({*theirs, str(stopped)}, key=int) == ours
