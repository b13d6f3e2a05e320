"""The scripts and the decoders on a CUDA device, against the same computation on the CPU.

They are skipped without such a device. `TEST_DEVICE=cpu` runs them on the CPU, which tests the tests.
"""

import json
import os

import pytest
import torch

from helpers import (
    DRAFTS,
    FILTERS,
    KINDS,
    ROOT,
    V,
    child,
    lively,
    load,
    log,
    ok,
    prompts,
    run,
    same,
    tokens_differ,
)
from kvgpt.decoding.decode import Decoder
from kvgpt.training.state import pick_dtype
from model import GPT, GPTConfig

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"
pytestmark = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = "--n_layer 2 --n_head 4 --n_embd 64 --block_size 64 --batch_size 16 --eval_interval 50".split()

# -- training ----------------------------------------------------------------------------------------------------------


def train(data_dir, out_dir, *flags, device=DEVICE, timeout=400):
    return ok(child(*SIZES, "--device", device, "--data_dir", data_dir, "--out_dir", out_dir, *flags, timeout=timeout))


def val_losses(out_dir):
    return [float(row["val_loss"]) for row in log(out_dir) if row["val_loss"]]


@pytest.mark.parametrize("recipe", ["modern", "nanogpt"])
def test_a_run_in_float32_learns_what_it_learns_on_the_cpu(recipe, data_dir, tmp_path):
    flags = ["--recipe", recipe, "--dtype", "float32", "--max_iters", 100]
    train(data_dir, tmp_path / "here", *flags)
    train(data_dir, tmp_path / "cpu", *flags, device="cpu")
    assert val_losses(tmp_path / "here") == pytest.approx(val_losses(tmp_path / "cpu"), abs=0.02)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_a_run_in_half_precision_learns_as_one_in_float32(dtype, data_dir, tmp_path):
    if dtype == "float16" and not ON_GPU:
        pytest.skip("float16 trains on CUDA only")
    train(data_dir, tmp_path / "half", "--dtype", dtype, "--max_iters", 100)
    train(data_dir, tmp_path / "float32", "--dtype", "float32", "--max_iters", 100)
    assert val_losses(tmp_path / "half") == pytest.approx(val_losses(tmp_path / "float32"), abs=0.05)
    last = load(tmp_path / "half" / "last.pt")
    assert {p.dtype for p in last["model"].values()} == {torch.float32}
    assert bool(last["scaler"]) == (pick_dtype(dtype, torch.device(DEVICE)) == torch.float16)
    assert {p.device.type for p in last["model"].values()} == {"cpu"}  # a machine without a GPU reads it


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_resume_continues_the_run(dtype, data_dir, tmp_path):
    """Kernels may add in any order, so the losses are equal up to rounding, and the scale of float16 exactly."""
    if dtype == "float16" and not ON_GPU:
        pytest.skip("float16 trains on CUDA only")
    flags = ["--dtype", dtype, "--dropout", 0.1, "--gradient_accumulation_steps", 2, "--lr_decay_iters", 100]
    train(data_dir, tmp_path / "whole", *flags, "--max_iters", 100)
    train(data_dir, tmp_path / "parts", *flags, "--max_iters", 50)
    resume = ["--init_from", "resume", "--max_iters", 100, "--out_dir", tmp_path / "parts"]
    ok(child(*resume, timeout=400))
    assert val_losses(tmp_path / "parts") == pytest.approx(val_losses(tmp_path / "whole"), abs=0.02)
    scalers = [load(tmp_path / name / "last.pt")["scaler"] for name in ("whole", "parts")]
    assert same(*scalers)


def test_a_compiled_run_learns_as_a_plain_one(data_dir, tmp_path):
    flags = ["--max_iters", 100, "--dtype", "float32"]
    assert "compiling" in train(data_dir, tmp_path / "compiled", *flags, "--compile").stderr
    train(data_dir, tmp_path / "plain", *flags)
    assert val_losses(tmp_path / "compiled") == pytest.approx(val_losses(tmp_path / "plain"), abs=0.02)


def test_the_launcher_starts_the_run_that_train_py_is(data_dir, tmp_path):
    flags = [*SIZES, "--device", DEVICE, "--max_iters", 50, "--dtype", "float32", "--data_dir", data_dir]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 1, "train.py"]
    ok(run(*launch, *flags, "--out_dir", tmp_path / "torchrun", timeout=400))
    ok(run("train.py", *flags, "--out_dir", tmp_path / "plain", timeout=400))
    assert val_losses(tmp_path / "torchrun") == pytest.approx(val_losses(tmp_path / "plain"), abs=0.02)


# -- decoding ----------------------------------------------------------------------------------------------------------


def assert_tokens_of_the_cpu(model, got, ragged, steps, seed, filters, **more):
    """model is on the CPU. Equality is up to near-ties, because a GPU rounds logarithms and sums in other ways."""
    for i, (ours, prompt) in enumerate(zip(got, ragged, strict=True)):
        theirs = model.generate(prompt[None], steps, kv_cache=False, samples=[i], seed=seed, **filters, **more)
        assert tokens_differ(model, ours.cpu()[None], theirs, len(prompt), [i], seed, filters) is None


def pair_of_models(kind, **sizes):
    """Return the same model on the CPU and on the device."""
    sizes = dict(block_size=48, vocab_size=V, n_layer=2, n_head=4, n_embd=32) | sizes
    here = lively(GPTConfig(**sizes, **kind))
    there = GPT(here.config).eval()
    there.load_state_dict(here.state_dict())
    return here, there.to(DEVICE)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_eager_tokens_are_those_of_the_cpu(kind):
    here, there = pair_of_models(kind)
    ragged = [prompts(1, n, n)[0] for n in (1, 9, 30)]
    for seed, filters in enumerate(FILTERS):
        for kv_cache in (True, False):
            got = there.generate(prompts(3, 7).to(DEVICE), 30, kv_cache=kv_cache, seed=seed, **filters)
            assert_tokens_of_the_cpu(here, got, prompts(3, 7), 30, seed, filters)
        for draft in DRAFTS.values():
            got = Decoder(there, **draft).generate([row.to(DEVICE) for row in ragged], 40, seed=seed, **filters)
            assert_tokens_of_the_cpu(here, got, ragged, 40, seed, filters)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[5], KINDS[-2], KINDS[-1]], ids=str)
def test_compiled_tokens_are_those_of_the_cpu(kind):
    here, there = pair_of_models(kind)
    ragged = [prompts(1, n, n)[0] for n in (1, 9, 30)]
    for draft in DRAFTS.values():
        decoder = Decoder(there, **draft, compile=True)
        for seed, filters in enumerate(FILTERS[1:3]):  # one graph without filters, one with top_k
            got = decoder.generate([row.to(DEVICE) for row in ragged], 40, seed=seed, **filters)
            assert_tokens_of_the_cpu(here, got, ragged, 40, seed, filters)
        got = decoder.generate([row.to(DEVICE) for row in prompts(3, 5)], 100, seed=3, overflow="slide")
        assert_tokens_of_the_cpu(here, got, prompts(3, 5), 100, 3, {}, overflow="slide")


def test_a_graph_serves_later_texts_and_new_weights_need_another():
    here, there = pair_of_models(KINDS[-1])
    decoder = Decoder(there, compile=True)
    for seed in range(3):
        got = decoder.generate(prompts(2, 5).to(DEVICE), 20, seed=seed)
        assert_tokens_of_the_cpu(here, got, prompts(2, 5), 20, seed, {})
    weights = lively(here.config, seed=9).state_dict()
    for model in (here, there):
        model.load_state_dict(weights)
    got = decoder.generate(prompts(2, 5).to(DEVICE), 20, seed=1)
    assert_tokens_of_the_cpu(here, got, prompts(2, 5), 20, 1, {})


@pytest.mark.skipif(not ON_GPU, reason="counts memory of a CUDA device")
def test_generations_leave_no_memory_behind():
    _, there = pair_of_models(KINDS[-1])
    decoders = [Decoder(there), Decoder(there, compile=True)]
    held = []
    for seed in range(12):
        for decoder in decoders:
            decoder.generate(prompts(4, 5).to(DEVICE), 20, seed=seed)
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[2]


# -- the scripts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--draft", "ngram"], ["--compile"], ["--draft", "ngram", "--compile"]], ids=str)
def test_sample_verifies_its_texts(flags):
    command = ["sample.py", "--ckpt", ROOT / "assets" / "shakespeare.pt", "--device", DEVICE, "--num_samples", 3]
    result = ok(run(*command, "--prompt", "O Romeo, ", "--verify", *flags, timeout=400))
    assert "samples match" in result.stderr + result.stdout


def test_bench_measures_the_device(tmp_path):
    file = tmp_path / "rows.json"
    flags = ["--shapes", "2/2/32/64", "--device", DEVICE, "--repeats", 2, "--variants", "uncached", "eager", "compile"]
    result = ok(run("bench.py", *flags, "--csv", tmp_path / "rows.csv", "--json", file, timeout=400))
    assert f"on {DEVICE}" in result.stdout and "same tokens as a forward without a cache" in result.stdout
    assert file.stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="make gpu itself")
def test_a_report_that_runs_out_of_time_names_every_part():
    result = run("tests/gpu_report.py", "--minutes", 0.5)
    assert result.returncode == 1
    report = json.loads((ROOT / "out" / "report_cpu" / "report.json").read_text(encoding="utf-8"))
    text = (ROOT / "out" / "report_cpu" / "report.md").read_text(encoding="utf-8")
    assert len(report["parts"]) == 6 and all(f"| {name} |" in text for name in report["parts"])
    stopped = [name for name, part in report["parts"].items() if part["exit_code"] is None]
    assert "nanogpt" in stopped and all(f"The end of {name}" in text for name in stopped)
    assert report["machine"]["torch"] == torch.__version__
