"""kvgpt/training/device.py: the dtype of the forward, and torch.compile."""

import math
import shutil

import pytest
import torch

import train
from helpers import CPU, SMALL, assert_one_line, child, here, load, log, ok, same, tiny_run
from kvgpt.training.device import compile_module, pick_dtype
from kvgpt.training.dist import Ranks
from kvgpt.training.ngram_targets import ngram_targets

# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_a_dtype_that_the_device_cannot_train_in_is_one_line(data_dir, tmp_path):
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--dtype", "float16")
    assert_one_line(result, "--dtype float16")


def test_a_gpu_that_only_emulates_bfloat16_gets_float16(monkeypatch):
    """A T4 answers as this stand-in does: yes, unless it is asked for more than emulation."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert pick_dtype("auto", torch.device("cuda")) == torch.float16


def test_bfloat16_trains_on_the_cpu_and_keeps_float32_weights(data_dir, tmp_path):
    ok(here(*SMALL, "--dtype", "bfloat16", "--max_iters", 3, "--data_dir", data_dir, "--out_dir", tmp_path))
    assert {p.dtype for p in load(tmp_path / "last.pt")["model"].values()} == {torch.float32}
    assert math.isfinite(float(log(tmp_path)[-1]["val_loss"]))


def test_bfloat16_is_the_dtype_of_the_forward_and_never_of_the_weights():
    """A run that ignored --dtype trained as well as one that used it."""
    config, data, state = tiny_run(dtype="bfloat16")
    outputs, gradients = [], []
    state.model.lm_head.register_forward_hook(lambda module, args, logits: outputs.append(logits.dtype))
    for p in state.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.dtype))
    loss, _, _ = train.train_step(config, data, state, Ranks())
    assert set(outputs) == {torch.bfloat16}
    outputs.clear()
    train.val_loss(config, data, state, Ranks())
    assert set(outputs) == {torch.bfloat16}
    assert loss.dtype == torch.float32 and set(gradients) == {torch.float32}
    assert {p.dtype for p in state.model.parameters()} == {torch.float32}
    moments = [value for values in state.optimizers[0].state.values() for value in values.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}


def test_a_run_in_bfloat16_has_other_losses_than_one_in_float32(data_dir, tmp_path):
    """Of the same weights, because the learning rate is 0: those of the step, and those of the evaluation."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        flags = [*SMALL, "--learning_rate", 0, "--max_iters", 1, "--data_dir", data_dir, "--dtype", dtype]
        result = ok(here(*flags, "--out_dir", tmp_path / dtype))
        assert f"in {dtype}:" in result.stdout
        (row,) = log(tmp_path / dtype)
        losses[dtype] = [float(row[name]) for name in ("train_loss", "val_loss")]
    assert same(*(load(tmp_path / dtype / "last.pt")["model"] for dtype in losses))
    for exact, rounded in zip(*losses.values()):
        assert exact != rounded and exact == pytest.approx(rounded, rel=0.01)


# -- torch.compile -----------------------------------------------------------------------------------------------------


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")


@pytest.fixture
def captured():
    """A function: how many operations torch.compile has taken over since the test began."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["calls_captured"]
    torch._dynamo.reset()


@needs_compiler
@pytest.mark.slow
def test_a_compiled_step_is_the_plain_step(captured):
    """A --compile that compiled nothing trained as well."""
    weights, losses = [], []
    for compiled in (False, True):
        config, data, state = tiny_run(gradient_accumulation_steps=2, ngram_targets=0.5, mtp_weight=0.3)
        data.ngram_targets = ngram_targets(data.train, len(data.chars), CPU)
        if compiled:
            state.objective = compile_module(state.objective)
            assert isinstance(state.objective, torch._dynamo.eval_frame.OptimizedModule)
        losses.append([train.train_step(config, data, state, Ranks())[0].item() for _ in range(3)])
        weights.append(state.state_dict(with_optimizers=False)["model"])
        assert (captured() > 10) == compiled  # compile_module tries the compiler on one operation
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert weights[0].keys() == weights[1].keys()
    for name, p in weights[0].items():
        torch.testing.assert_close(p, weights[1][name], rtol=1e-2, atol=1e-4)


@needs_compiler
@pytest.mark.slow
def test_the_flag_compiles_the_step_of_a_run(captured, data_dir, tmp_path):
    for flags, expected in ([], False), (["--compile"], True):
        result = ok(here(*SMALL, "--max_iters", 2, "--data_dir", data_dir, "--out_dir", tmp_path, *flags))
        assert (captured() > 10) == expected == ("--compile: compiling" in result.stderr)


@pytest.mark.slow
def test_without_a_compiler_a_run_says_so_and_trains(data_dir, tmp_path):
    env = {"CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}  # nothing compiled earlier
    flags = [*SMALL, "--max_iters", 2, "--compile", "--data_dir", data_dir, "--out_dir", tmp_path / "out"]
    result = ok(child(*flags, env=env, timeout=300))
    assert result.stderr.startswith("--compile: no working compiler") and len(result.stderr.splitlines()) == 1
    assert load(tmp_path / "out" / "last.pt")["iter_num"] == 2


@pytest.mark.slow
def test_a_compiled_run_trains_or_says_why_not(data_dir, tmp_path):
    """Its checkpoint has no trace of torch.compile. The names are the model's own, and a plain run resumes it."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path]
    result = ok(child(*flags, "--max_iters", 3, "--compile", timeout=600))
    assert "--compile" in result.stderr
    assert not any(key.startswith("_orig_mod") for key in load(tmp_path / "last.pt")["model"])
    ok(here("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", 4, "--compile=False"))
