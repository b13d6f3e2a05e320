"""train.py: batches, the step, the loop, and whole runs, also when a signal or a loss that is not finite stops them."""

import itertools
import math
import os
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import (
    BROKEN,
    CPU,
    HEADER,
    SMALL,
    STATEFUL,
    TINY,
    assert_one_line,
    assert_same_run,
    child,
    contents,
    here,
    load,
    log,
    ok,
    same,
    start,
    tiny_run,
    unix,
    write_data,
)
from kvgpt.recipes import TrainConfig
from kvgpt.training.dist import Ranks
from kvgpt.training.meter import Meter
from kvgpt.training.objective import Objective
from kvgpt.training.optim import configure_optimizers
from kvgpt.training.run import RunFolder
from kvgpt.training.signals import StopSignals
from kvgpt.training.state import Diverged
from model import GPT, GPTConfig
from train import get_batch, train

# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_a_pure_function_of_the_seed_and_its_number():
    """No generator has a state that earlier batches have moved."""
    ids, keys = np.arange(3000, dtype="<u2"), list(itertools.product((0, 1, 2**40), (0, 1, 2, 500, 10**9)))
    batches = {}
    for key in keys:
        batches[key] = get_batch(ids, *key, 8, 16, CPU)
    torch.rand(3), np.random.rand(3)
    for key in keys[::-1]:
        assert same(get_batch(ids, *key, 8, 16, CPU), batches[key])
    distinct = {tuple(x[:, 0].tolist()) for x, y in batches.values()}
    assert len(distinct) == len(keys)
    for x, y in batches.values():
        assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x, x[:, :1] + torch.arange(16)) and torch.equal(y, x + 1)


@pytest.mark.parametrize("length", [9, 10, 20])
def test_batches_start_everywhere_up_to_the_last_whole_window(length):
    """An off-by-one would never show the last character, or read past the end of the text."""
    ids = np.arange(length, dtype="<u2")
    starts = {i for number in range(60) for i in get_batch(ids, 3, number, 8, 8, CPU)[0][:, 0].tolist()}
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
        ranks = [get_batch(ids, 7, number, batch_size, block_size, CPU, rank, world) for rank in range(world)]
        whole = torch.empty(batch_size, block_size, dtype=torch.int64)
        for rank, (_, y) in enumerate(ranks):
            whole[rank::world] = y
        assert torch.equal(whole, get_batch(ids, 7, number, batch_size, block_size, CPU)[1])
        rows |= {number * batch_size + i: row.tolist() for i, row in enumerate(whole)}
    predicted = [tuple(rows[i]) for i in range(epoch * an_epoch, (epoch + 1) * an_epoch)]
    characters = sorted(character for row in set(predicted) for character in row)
    assert len(set(characters)) == len(characters) >= length - 2 * block_size
    assert len(predicted) - len(set(predicted)) <= 1


# -- the step ----------------------------------------------------------------------------------------------------------


def gradient_of_one_step(data_dir, out_dir, *flags):
    """{name: gradient} that AdamW saw in a run of one step, whose weights (lr 0) are still those it began with."""
    flags = [*flags, "--learning_rate", "0", "--max_iters", "1", "--data_dir", data_dir, "--out_dir", out_dir]
    ok(here(*SMALL, "--gradient_accumulation_steps", "2", "--batch_size", "4", *flags))
    ckpt = load(out_dir / "last.pt")
    model = GPT(GPTConfig(**ckpt["model_args"]))
    model.load_state_dict(ckpt["model"])
    config = TrainConfig(**ckpt["config"])
    (optimizer,) = configure_optimizers(Objective(model, config), config, CPU)
    optimizer.load_state_dict(*ckpt["optimizer"])
    return model, {name: optimizer.state[p]["exp_avg"] / 0.1 for name, p in model.named_parameters()}


def test_micro_steps_make_the_gradient_of_one_large_batch_and_clipping_bounds_it(data_dir, tmp_path):
    """2 micro-steps of 4 sequences give the mean gradient, neither the sum nor the last. Clipping sees it whole."""
    model, seen = gradient_of_one_step(data_dir, tmp_path / "a", "--grad_clip", "0")
    ids = np.fromfile(data_dir / "train.bin", dtype="<u2")
    x, y = (torch.cat(parts) for parts in zip(*(get_batch(ids, 1337, i, 4, 16, CPU) for i in (0, 1))))
    model(x, y)[1].backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-4, atol=1e-6)

    whole = torch.cat([g.flatten() for g in seen.values()])
    _, seen = gradient_of_one_step(data_dir, tmp_path / "b", "--grad_clip", "0.01")
    clipped = torch.cat([g.flatten() for g in seen.values()])
    assert whole.norm() > 0.1
    torch.testing.assert_close(clipped, whole / whole.norm() * 0.01, rtol=1e-3, atol=1e-7)


def test_a_run_is_a_plain_loop_of_adamw_steps(data_dir, tmp_path):
    """Six steps from the run's own first weights, with AdamW, clipping and the schedule written out here."""
    flags = "--bias --grad_clip 0.5 --weight_decay 0.3 --beta1 0.8 --beta2 0.95 --warmup_iters 2".split()
    flags = [*SMALL, *flags, "--log_interval", 1, "--lr_decay_iters", 5, "--data_dir", data_dir]
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
        loss = model(*get_batch(ids, 1337, step, 2, 16, CPU))[1]
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


def test_a_modern_run_begins_at_the_uniform_guess_and_has_every_parameter_in_one_group(data_dir, tmp_path):
    flags = [*SMALL, "--recipe", "modern", "--data_dir", data_dir, "--out_dir", tmp_path, "--log_interval", 1]
    ok(here(*flags, "--max_iters", 2))
    rows, ckpt = log(tmp_path), load(tmp_path / "last.pt")
    assert ckpt["model_args"]["pos_emb"] == "rope" and ckpt["model_args"]["qk_norm"]
    states = [len(state["state"]) for state in ckpt["optimizer"]]
    num_parameters = len(list(GPT(GPTConfig(**ckpt["model_args"])).parameters()))
    assert len(states) == 2 and sum(states) == num_parameters + len(ckpt["mtp"])
    assert float(rows[0]["train_loss"]) == pytest.approx(math.log(len(ckpt["chars"])), rel=0.02)


# -- the loop ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def train_here(tmp_path, restored_signals):
    """A function: train(...) in this process, in tmp_path / "out". Returns its result."""
    run = RunFolder(tmp_path / "out")
    run.path.mkdir()
    run.lock()

    def train_here(config, data, state):
        ranks = Ranks()
        meter = Meter(config, state, ranks, *run.begin(state.step, header=dict(chars=data.chars)))
        return train(config, data, state, ranks, run, meter, StopSignals(ranks))

    return train_here


def after_forwards(state, count, action):
    """Call `action` once, during forward number `count` of training."""
    calls = itertools.count(1)

    def hook(module, args, output):
        if next(calls) == count:
            action()

    state.objective.register_forward_hook(hook)


def test_the_loop_ends_at_max_iters_and_begins_at_the_step_of_its_state(train_here, tmp_path):
    config, data, state = tiny_run(max_iters=7, eval_interval=3, log_interval=2)
    before = {name: p.clone() for name, p in state.model.state_dict().items()}
    assert train_here(config, data, state) == 0
    assert state.step == load(tmp_path / "out" / "last.pt")["iter_num"] == 7
    assert not same(state.model.state_dict(), before)
    assert [(row["step"], bool(row["val_loss"])) for row in log(tmp_path / "out")] == [
        ("2", False),
        ("3", True),
        ("4", False),
        ("6", True),
        ("7", True),
    ]

    # nothing is left to do
    files = contents(tmp_path / "out")
    assert train_here(config, data, state) == 0
    assert state.step == 7 and contents(tmp_path / "out") == files

    # two steps are
    config.max_iters = 9
    seen = []
    state.objective.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    assert train_here(config, data, state) == 0
    assert [x.tolist() for x in seen] == [get_batch(data.train, 1337, i, 2, 16, CPU)[0].tolist() for i in (7, 8)]
    assert state.step == load(tmp_path / "out" / "last.pt")["iter_num"] == 9


@unix
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_loop_returns_the_signal_that_stopped_it(name, at, train_here, tmp_path):
    """Sent during a forward. That step is finished and saved, and no step follows."""
    number = getattr(signal, name)
    config, data, state = tiny_run(max_iters=1000, eval_interval=1000)
    after_forwards(state, at, lambda: os.kill(os.getpid(), number))
    assert train_here(config, data, state) == number
    assert state.step == at
    assert contents(tmp_path / "out").keys() == {"last.pt", "log.csv"}
    assert load(tmp_path / "out" / "last.pt")["iter_num"] == at
    assert same(load(tmp_path / "out" / "last.pt")["model"], state.model.state_dict())


def test_the_loop_stops_for_lack_of_progress(train_here, tmp_path):
    config, data, state = tiny_run(max_iters=1000, eval_interval=1, patience=2, learning_rate=0.0)
    assert train_here(config, data, state) == 0
    assert (state.step, state.evals_since_best) == (3, 2)
    assert load(tmp_path / "out" / "ckpt.pt")["iter_num"] == 1


@pytest.mark.parametrize("eval_interval, save_interval", [(2, 1000), (1000, 2), (1000, 1000)])
@pytest.mark.parametrize("at", [1, 2])
def test_weights_that_broke_are_never_saved(at, eval_interval, save_interval, train_here, tmp_path):
    """By the update before a save too, when no loss of training has shown it yet."""
    config, data, state = tiny_run(max_iters=2)
    assert train_here(config, data, state) == 0
    files = contents(tmp_path / "out")
    config, data, _ = tiny_run(max_iters=4, eval_interval=eval_interval, save_interval=save_interval)

    def break_weights(p):
        p.grad.fill_(torch.nan)

    after_forwards(state, at, lambda: state.model.lm_head.weight.register_post_accumulate_grad_hook(break_weights))
    with pytest.raises(Diverged, match="nan"):
        train_here(config, data, state)
    assert contents(tmp_path / "out") == files


# -- a run -------------------------------------------------------------------------------------------------------------


def test_intervals_change_nothing_and_a_run_has_as_many_steps_as_it_says(data_dir, tmp_path):
    """An evaluation that drew random numbers, or left the model in eval mode, would change the weights."""
    for i, (evals, saves, logs) in enumerate([(1, 1, 1), (3, 2, 5), (1000, 1000, 1000)]):
        intervals = ["--eval_interval", evals, "--save_interval", saves, "--log_interval", logs]
        flags = [*STATEFUL, "--max_iters", 7, "--data_dir", data_dir, "--out_dir", tmp_path / str(i)]
        ok((here if i else child)(*flags, *intervals))
        ckpt = load(tmp_path / str(i) / "last.pt")
        assert ckpt["iter_num"] == 7
        assert {state["step"].item() for state in ckpt["optimizer"][0]["state"].values()} == {7}
        assert_same_run(tmp_path / str(i), tmp_path / "0")
        expected = [step for step in range(1, 8) if step == 7 or not (step % evals and step % saves and step % logs)]
        assert [int(row["step"]) for row in log(tmp_path / str(i))] == expected
        assert [bool(row["val_loss"]) for row in log(tmp_path / str(i))] == [s == 7 or s % evals == 0 for s in expected]


def test_the_seed_decides_the_weights(data_dir, tmp_path):
    """The seed decides the first weights too (lr 0 keeps them), not only the batches."""
    flags = [*SMALL, "--learning_rate", 0, "--max_iters", 1, "--data_dir", data_dir]
    weights = []
    for i, seed in enumerate((1, 2, 1)):
        ok(here(*flags, "--seed", seed, "--out_dir", tmp_path / str(i)))
        weights.append(load(tmp_path / str(i) / "last.pt")["model"])
    assert same(weights[0], weights[2]) and not same(weights[0], weights[1])


def test_patience_ends_a_run_that_no_longer_gets_better_and_keeps_its_best(data_dir, tmp_path):
    flags = [*SMALL, "--learning_rate", 0, "--max_iters", 50, "--eval_interval", 2, "--patience", 3]
    result = ok(here(*flags, "--data_dir", data_dir, "--out_dir", tmp_path))
    assert load(tmp_path / "last.pt")["iter_num"] == 8  # the first evaluation is the best, three more are no better
    assert load(tmp_path / "ckpt.pt")["iter_num"] == 2 and "--patience" in result.stdout


def test_max_iters_reached_already_is_said_and_changes_nothing(out):
    before, times = contents(out), {path: path.stat().st_mtime_ns for path in out.glob("[!.]*")}
    for flags in ([], ["--max_iters", "60"], ["--max_iters", "10"]):
        result = ok(here("--init_from", "resume", "--out_dir", out, *flags))
        assert "60" in result.stdout and "already" in result.stdout and len(result.stdout.splitlines()) == 1
    assert contents(out) == before
    assert {path: path.stat().st_mtime_ns for path in out.glob("[!.]*")} == times


@pytest.mark.slow
def test_the_sample_at_the_end_prints_where_the_terminal_has_another_encoding(tmp_path):
    """Hours of training must not end in a UnicodeEncodeError, on a Windows console or with LANG=C."""
    data = write_data(tmp_path / "data", "αβγδε ζηθ\n" * 40)
    flags = [*SMALL, "--max_iters", "1", "--data_dir", data, "--out_dir", tmp_path / "out"]
    result = child(*flags, env={"PYTHONIOENCODING": "cp1252"})
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr


# -- signals -----------------------------------------------------------------------------------------------------------


stop_signals = pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["SIGINT", "SIGTERM"]
)


@pytest.fixture(scope="module")
def interrupt(data_dir, tmp_path_factory):
    """Return (out_dir, exit code, stdout, stderr) of a long run that received the signal `number` while it trained."""
    done = {}

    def interrupt(number):
        if number not in done:
            out = tmp_path_factory.mktemp("interrupted") / "my run"
            flags = [*STATEFUL, "--lr_decay_iters", 300, "--log_interval", 5, "--data_dir", data_dir, "--out_dir", out]
            process = start(*flags, "--max_iters", 10**6)
            stdout = ""
            while "\nstep 15/" not in stdout and (line := process.stdout.readline()):
                stdout += line
            process.send_signal(number)
            rest, stderr = process.communicate(timeout=60)
            done[number] = out, process.returncode, stdout + rest, stderr
        return done[number]

    return interrupt


@unix
@stop_signals
def test_a_run_stopped_by_a_signal_and_resumed_is_the_undisturbed_run(number, interrupt, data_dir, tmp_path):
    """The step in progress is finished and saved. No batch is trained twice."""
    out, code, stdout, stderr = interrupt(number)
    assert code == 128 + number, stderr
    assert stderr == "" and "--init_from resume" in stdout.splitlines()[-1]
    out = Path(shutil.copytree(out, tmp_path / "out"))
    stopped = load(out / "last.pt")["iter_num"]
    assert stopped >= 15 and f"step {stopped} " in stdout.splitlines()[-1]
    ok(child("--init_from", "resume", "--out_dir", out, "--max_iters", stopped + 8))
    flags = [*STATEFUL, "--lr_decay_iters", 300, "--data_dir", data_dir, "--out_dir", tmp_path / "whole"]
    ok(here(*flags, "--max_iters", stopped + 8))
    assert_same_run(out, tmp_path / "whole")
    assert [int(row["step"]) for row in log(out)][-1] == stopped + 8


@unix
@stop_signals
def test_the_line_that_says_how_to_resume_can_be_pasted(number, interrupt):
    """An out_dir with a space needs quotes."""
    out, _, stdout, _ = interrupt(number)
    words = shlex.split(stdout.splitlines()[-1].partition("python train.py ")[2])
    assert words == ["--init_from", "resume", "--out_dir", str(out)]


@unix
@pytest.mark.slow
def test_a_signal_that_comes_while_a_line_is_printed_is_a_saved_stop_too(data_dir, tmp_path):
    """A signal sent in response to a line arrives at the end of a step, after the decision whether to save. Here nobody
    reads the pipe, so the process stands still in its print.
    """
    never = [x for name in ("save_interval", "eval_interval", "max_iters") for x in (f"--{name}", 10**6)]
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--log_interval", 1, *never]
    process = start(*flags, pipesize=4096)
    path, size, since = tmp_path / "log.csv", 0, time.monotonic()
    while time.monotonic() - since < (1 if size > 1000 else 60):
        time.sleep(0.05)
        if path.exists() and path.stat().st_size != size:
            size, since = path.stat().st_size, time.monotonic()
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert (tmp_path / "last.pt").exists(), stdout.splitlines()[-1]
    assert f"step {load(tmp_path / 'last.pt')['iter_num']} " in stdout.splitlines()[-1]


# -- a loss that is not finite -----------------------------------------------------------------------------------------


def assert_stopped(result, out, before):
    assert result.returncode not in (0, 2), result.stdout
    assert len(result.stderr.splitlines()) == 1 and "stopped at step" in result.stderr
    assert "nan" in result.stderr or "inf" in result.stderr or "finite" in result.stderr
    after = contents(out)
    assert (after["ckpt.pt"], after["last.pt"]) == (before["ckpt.pt"], before["last.pt"])
    assert all(math.isfinite(float(row[name] or 0)) for row in log(out) for name in HEADER)
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", "62"))  # and a sane rate goes on from there
    assert math.isfinite(float(log(out)[-1]["val_loss"]))


@pytest.mark.parametrize("intervals", ["", "--log_interval 1", "--save_interval 10 --log_interval 1000"])
def test_a_loss_that_becomes_nan_stops_the_run_before_it_is_saved(intervals, out):
    """Also one between two saves that no line of progress has shown."""
    before = contents(out)
    result = here("--init_from", "resume", "--out_dir", out, "--max_iters", 200, *BROKEN, *intervals.split())
    assert_stopped(result, out, before)


@pytest.mark.parametrize(
    "flags", ["--max_iters 61", "--max_iters 200 --eval_interval 61", "--max_iters 200 --save_interval 1"]
)
def test_a_checkpoint_is_not_replaced_by_weights_whose_loss_is_nan(flags, out):
    """The last update before a save broke the weights. They are finite and huge, but their val loss is NaN."""
    before = contents(out)
    result = here("--init_from", "resume", "--out_dir", out, *BROKEN, *flags.split())
    assert_stopped(result, out, before)


def test_a_run_that_breaks_from_the_start_says_so(data_dir, tmp_path):
    """From a real process, and with nothing saved before."""
    flags = [*TINY, *BROKEN, "--max_iters", 50, "--data_dir", data_dir, "--out_dir", tmp_path]
    result = child(*flags)
    assert_one_line(result, "stopped at step", "--learning_rate")
    assert not (tmp_path / "last.pt").exists() and not (tmp_path / "ckpt.pt").exists()
