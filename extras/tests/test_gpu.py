"""Training and generation on a CUDA device, against the same computation on the CPU.

They are skipped without such a device. `TEST_DEVICE=cpu` runs them on the CPU, which tests the tests.
"""

import os

import pytest
import torch

from extra_helpers import DRAFTS
from extras.decode.cuda_graph import GraphedGPT
from extras.decode.engine import Decoder
from helpers import (
    FILTERS,
    KINDS,
    ROOT,
    V,
    child,
    here,
    load,
    log,
    ok,
    prompts,
    random_model,
    same,
    sample,
    tokens_differ,
)
from model import GPT, GPTConfig, Sampling

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
ON_GPU = DEVICE != "cpu"
pytestmark = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = "--preset cpu --n_layer 2 --n_head 4 --n_embd 64 --block_size 64 --batch_size 16 --eval_interval 25".split()
SOME_FILTERS = FILTERS if ON_GPU else FILTERS[1::2]
needs_float16 = pytest.mark.skipif(not ON_GPU, reason="float16 needs CUDA to train")

# -- training ----------------------------------------------------------------------------------------------------------


def train(data_dir, out_dir, *flags, device=DEVICE):
    # in a process of its own, because the pretend device of test_device.py leaves no pinned memory in this one
    return ok(child(*SIZES, "--device", device, "--data_dir", data_dir, "--out_dir", out_dir, *flags))


def val_losses(out_dir):
    return [float(row["val_loss"]) for row in log(out_dir) if row["val_loss"]]


@pytest.mark.parametrize("recipe", ["modern", "nanogpt"])
def test_a_run_in_float32_learns_what_it_learns_on_the_cpu(recipe, data_dir, tmp_path):
    flags = ["--recipe", recipe, "--dtype", "float32", "--max_iters", 50]
    train(data_dir, tmp_path / "here", *flags)
    train(data_dir, tmp_path / "cpu", *flags, device="cpu")
    assert val_losses(tmp_path / "here") == pytest.approx(val_losses(tmp_path / "cpu"), abs=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=needs_float16)])
def test_a_run_in_half_precision_learns_as_one_in_float32_and_is_read_on_a_cpu(dtype, data_dir, tmp_path):
    train(data_dir, tmp_path / "half", "--dtype", dtype, "--max_iters", 50)
    train(data_dir, tmp_path / "float32", "--dtype", "float32", "--max_iters", 50)
    assert val_losses(tmp_path / "half") == pytest.approx(val_losses(tmp_path / "float32"), abs=0.05)
    last = load(tmp_path / "half" / "last.pt")
    assert {(p.dtype, p.device.type) for p in last["model"].values()} == {(torch.float32, "cpu")}
    assert bool(last["scaler"]) == (dtype == "float16")
    ok(sample(tmp_path / "half", "--verify"))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=needs_float16)])
def test_a_resume_continues_the_run(dtype, data_dir, tmp_path):
    """Kernels may add in any order, so the losses are equal up to rounding, and the scale of float16 exactly."""
    flags = ["--dtype", dtype, "--dropout", 0.1, "--gradient_accumulation_steps", 2, "--lr_decay_iters", 50]
    train(data_dir, tmp_path / "whole", *flags, "--max_iters", 50)
    train(data_dir, tmp_path / "parts", *flags, "--max_iters", 25)
    ok(child("--init_from", "resume", "--max_iters", 50, "--out_dir", tmp_path / "parts"))
    assert val_losses(tmp_path / "parts") == pytest.approx(val_losses(tmp_path / "whole"), abs=0.02)
    scalers = [load(tmp_path / name / "last.pt")["scaler"] for name in ("whole", "parts")]
    assert same(*scalers)


# -- generation --------------------------------------------------------------------------------------------------------


def assert_tokens_of_the_cpu(model, got, ragged, steps, seed, filters):
    """model is on the CPU. Equality is up to near-ties, because a GPU rounds logarithms and sums in other ways."""
    for i, (ours, prompt) in enumerate(zip(got, ragged, strict=True)):
        theirs = model.generate(prompt[None], steps, kv_cache=False, samples=[i], seed=seed, **filters)
        assert tokens_differ(model, ours.cpu()[None], theirs, len(prompt), [i], seed, filters) is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_are_those_of_the_cpu(kind):
    on_cpu = random_model(GPTConfig(block_size=48, vocab_size=V, n_layer=2, n_head=4, n_embd=32, **kind))
    there = GPT(on_cpu.config).eval()
    there.load_state_dict(on_cpu.state_dict())
    there.to(DEVICE)
    ragged = [prompts(1, n, n)[0] for n in (1, 9, 30)]
    for seed, filters in enumerate(SOME_FILTERS):
        for kv_cache in (True, False):
            got = there.generate(prompts(3, 7).to(DEVICE), 30, kv_cache=kv_cache, seed=seed, **filters)
            assert_tokens_of_the_cpu(on_cpu, got, prompts(3, 7), 30, seed, filters)
        for overflow, steps in (("stop", 40), ("slide", 60)):
            settings = dict(filters, overflow=overflow)
            graphed = GraphedGPT(there, 3, 7 + steps, Sampling(**settings))
            for twice in range(2):  # the second generation replays the graph of the first
                blocks = graphed.stream(prompts(3, 7, twice).to(DEVICE), steps, seed)
                got = torch.cat([prompts(3, 7, twice), *blocks], dim=1)
                assert_tokens_of_the_cpu(on_cpu, got, prompts(3, 7, twice), steps, seed, settings)
        for draft in DRAFTS.values():
            got = Decoder(there, **draft).generate([row.to(DEVICE) for row in ragged], 40, seed=seed, **filters)
            assert_tokens_of_the_cpu(on_cpu, got, ragged, 40, seed, filters)


@pytest.mark.parametrize("flags", [[], ["--draft", "ngram"], ["--compile"], ["--draft", "ngram", "--compile"]], ids=str)
def test_sample_verifies_its_texts(flags):
    """On a GPU, --compile is a CUDA graph, which has no drafts."""
    command = ["--ckpt", ROOT / "assets" / "shakespeare.pt", "--device", DEVICE, "--num_samples", 3]
    result = ok(here(*command, "--prompt", "O Romeo, ", "--verify", *flags, script="sample.py"))
    assert "3 of 3 samples)" in result.stderr
    assert result.stderr.count("leaving out --draft") == (ON_GPU and len(flags) == 3)


@pytest.mark.parametrize("kind", [{}, dict(pos_emb="rope", qk_norm=True)], ids=str)
def test_a_graph_in_bfloat16_computes_the_same_up_to_rounding(kind):
    model = random_model(GPTConfig(block_size=40, vocab_size=V, n_layer=2, n_head=4, n_embd=64, **kind))
    model.to(DEVICE, torch.bfloat16)
    graphed = GraphedGPT(model, 2, 40, Sampling(temperature=0))
    text = prompts(2, 40).to(DEVICE)
    cache = model.new_cache(2)
    with torch.inference_mode():
        for i in range(40):
            graphed.newest.copy_(text[:, i])
            graphed.pos.fill_(i)
            expected, _ = model(text[:, i : i + 1], cache=cache, last=True)
            torch.testing.assert_close(graphed.logits(), expected, atol=0.3, rtol=0.02)
