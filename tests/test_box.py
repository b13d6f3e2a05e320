"""The model that comes with the code, and the scripts that use it before any training."""

import json
import shutil
from contextlib import nullcontext
from xml.etree import ElementTree

import pytest
import torch

from helpers import ROOT, assert_one_line, ok, run
from kvgpt.checkpoint import load_checkpoint
from kvgpt.cli import MODEL_IN_THE_BOX
from kvgpt.training.data import load_dataset
from kvgpt.training.objective import evaluate

NOTE = f"no checkpoint in out: using {MODEL_IN_THE_BOX.name}"


def test_it_is_small_and_has_no_state_of_its_training():
    """An optimizer, a path or a flag of the machine that trained it; a file that makes every clone slow."""
    assert MODEL_IN_THE_BOX.stat().st_size <= 4e6
    checkpoint = load_checkpoint(MODEL_IN_THE_BOX)
    model, _ = checkpoint.build_language_model()
    weights = sum(p.nbytes for p in model.parameters())
    ngrams = checkpoint.checked_ngrams()
    assert ngrams["order"] == 4 and 0 < ngrams["codes"].nbytes + ngrams["counts"].nbytes <= weights / 8
    assert not {"optimizer", "scaler"} & checkpoint.training.keys()
    assert str(ROOT).encode() not in MODEL_IN_THE_BOX.read_bytes()


@pytest.mark.slow
def test_its_val_loss_is_the_one_in_the_file():
    """Weights of another run than the one that the docs describe."""
    checkpoint = load_checkpoint(MODEL_IN_THE_BOX)
    try:
        data = load_dataset(ROOT / "data", checkpoint.model_args["block_size"])
    except ValueError:
        pytest.skip("needs the corpus: python data/prepare.py")
    if data.sha256 != checkpoint.training["data_sha256"]:
        pytest.skip("data/ holds another text")
    model, _ = checkpoint.build_language_model()
    loss = evaluate(model, data.val, model.config.block_size, torch.device("cpu"), nullcontext())
    assert loss == pytest.approx(checkpoint.best_val_loss, abs=1e-4) and loss < 1.48


def test_sample_uses_it_only_if_nothing_was_named_and_out_is_empty(trained, tmp_path):
    """A typo in a path that gives a text of another model; a trained model that is passed over."""
    script, flags = ROOT / "sample.py", ["--prompt", "O ", "--max_new_tokens", "9", "--device", "cpu"]
    result = ok(run(script, *flags, cwd=tmp_path))
    assert result.stderr.splitlines()[0].endswith("a model that comes with the code") and NOTE in result.stderr
    named = ok(run(script, *flags, "--ckpt", MODEL_IN_THE_BOX, cwd=tmp_path))
    assert named.stdout == result.stdout and NOTE not in named.stderr
    assert_one_line(run(script, *flags, "--out_dir", "out", cwd=tmp_path), "no checkpoint at out")
    assert_one_line(run(script, *flags, "--ckpt", "out/ckpt.pt", cwd=tmp_path), "no checkpoint at out")
    shutil.copytree(trained, tmp_path / "out")
    own = ok(run(script, *flags, cwd=tmp_path))
    assert NOTE not in own.stderr and own.stdout == ok(run(script, *flags, "--out_dir", trained)).stdout


@pytest.mark.parametrize("left", ["last.pt", "a link", "a folder"])
def test_a_run_without_a_checkpoint_is_never_passed_over(left, trained, tmp_path):
    """The text of another model, given out as the user's own."""
    out = tmp_path / "out"
    out.mkdir()
    if left == "last.pt":
        shutil.copy(trained / "last.pt", out)
    elif left == "a link":
        (out / "ckpt.pt").symlink_to("nowhere.pt")
    elif left == "a folder":
        (out / "ckpt.pt").mkdir()
    result = run(ROOT / "sample.py", "--device", "cpu", cwd=tmp_path)
    assert_one_line(result, "ckpt.pt", *(["--ckpt out/last.pt"] if left == "last.pt" else []))


@pytest.mark.slow
def test_export_and_bench_use_it_too(tmp_path):
    """A command of the README that needs a training first."""
    result = ok(run(ROOT / "export.py", "--format", "hf", cwd=tmp_path))
    assert NOTE in result.stderr and json.loads((tmp_path / "out" / "hf" / "config.json").read_text(encoding="utf-8"))
    result = ok(run(ROOT / "export.py", "--format", "onnx", cwd=tmp_path))
    assert NOTE in result.stderr
    flags = ["--engine", "onnx", "--prompt", "O ", "--max_new_tokens", "40", "--verify"]
    result = ok(run(ROOT / "sample.py", *flags, cwd=tmp_path))
    assert NOTE in result.stderr and "1 of 1 samples match" in result.stderr
    ckpt = torch.load(MODEL_IN_THE_BOX, weights_only=True)
    ckpt["model"]["lm_head.weight"] = ckpt["model"]["lm_head.weight"] + 1e-3
    torch.save(ckpt, tmp_path / "out" / "ckpt.pt")
    assert_one_line(run(ROOT / "sample.py", *flags, cwd=tmp_path), "of another model: export it again")
    (tmp_path / "out" / "ckpt.pt").unlink()
    result = ok(run(ROOT / "bench.py", "--variants", "eager", "draft", "--repeats", "1", cwd=tmp_path))
    assert NOTE in result.stderr and "4/4/128/256" in result.stdout


def test_the_animation_shows_the_text_of_the_model():
    """An old drawing beside a new model: the animation shows a text that sample.py does not give."""
    spans = ElementTree.parse(ROOT / "assets" / "typing.svg").iter("{http://www.w3.org/2000/svg}text")
    typed = ["".join(span.itertext()) for span in spans if "typed" in span.get("class", "")]
    flags = ["--prompt", "O Romeo, ", "--seed", "183", "--device", "cpu"]
    text = ok(run(ROOT / "sample.py", "--ckpt", MODEL_IN_THE_BOX, *flags)).stdout
    assert typed == 2 * text.split("\n")
    assert (ROOT / "assets" / "typing.svg").stat().st_size < 2e6
