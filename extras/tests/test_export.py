"""export.py on the command line, and what sample.py and train.py do with the files that it wrote."""

import contextlib
import re
import shutil
from dataclasses import replace

import pytest
import torch

from extra_helpers import POST_LN, assert_tells_no_paths
from extras.formats.checkpoint import load_checkpoint, load_model
from extras.formats.hf_write import GRAPH
from extras.formats.onnx import OnnxGPT, write_onnx
from helpers import PROMPT, assert_one_line, here, ok, run, sample, save_model, tiny
from model import GPT, PRETRAINED, build_model


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """An out_dir with a checkpoint and its ONNX file."""
    folder = tmp_path_factory.mktemp("out")
    shutil.copy(trained / "ckpt.pt", folder)
    ok(here("--format", "onnx", "--out_dir", folder, script="extras/export.py"))
    return folder


@pytest.mark.slow
def test_the_engine_gives_the_text_of_pytorch(exported, tmp_path):
    flags = ["--prompt", PROMPT, "--num_samples", "2", "--seed", "9"]
    theirs = sample(exported, *flags).stdout
    result = ok(sample(exported, *flags, "--engine", "onnx", "--verify"))
    assert result.stdout == theirs
    assert "2 of 2 samples)" in result.stderr
    cached = 2 * 2 * 2 * 16 * 31 * 2 * 4  # keys and values, layers, heads, head size, tokens fed, rows, bytes
    assert f"= {cached:,} bytes" in result.stderr
    shutil.copy(exported / "onnx" / "model.onnx", tmp_path)  # the file is enough by itself
    flags += ["--engine", "onnx", "--ckpt", tmp_path / "model.onnx", "--no-kv_cache"]
    alone = here(*flags, script="sample.py")
    assert alone.stdout == theirs and "KV cache: off" in alone.stderr, alone.stderr


@pytest.mark.slow
def test_engine_mistakes_are_one_line(exported, tmp_path):
    model, tokenizer = load_model(exported / "ckpt.pt")
    write_onnx(GPT(replace(model.config, block_size=16)).eval(), tokenizer, tmp_path / "other.onnx")
    for flags, words in (
        (["--out_dir", exported, "--prompt", "one"], ["--engine onnx", "needs prompts of equal length"]),
        (["--ckpt", tmp_path / "none.onnx"], ["none.onnx", "python -m extras.export --format onnx"]),
        (["--engine", "torch", "--ckpt", tmp_path / "other.onnx"], ["other.onnx is an ONNX file", "--engine onnx"]),
        (["--out_dir", exported, "--ckpt", tmp_path / "other.onnx"], ["--ckpt and --out_dir both say which model"]),
        (
            ["--out_dir", exported, "--ckpt", tmp_path / "other.onnx", "--verify"],
            ["other.onnx was not exported from", "--out_dir"],
        ),
    ):
        assert_one_line(here("--prompt", PROMPT, "--engine", "onnx", *flags, script="sample.py"), *words)


@pytest.mark.slow
def test_the_files_of_a_hugging_face_folder_are_of_one_model(trained, tmp_path):
    flags = ["--format", "hf", "--ckpt", trained / "ckpt.pt", "--out_dir", tmp_path]
    result = ok(here(*flags, "--onnx", script="extras/export.py"))
    assert len(re.findall(r"greedy text: (\d+) of \1 tokens match", result.stdout)) == 2
    folder = tmp_path / "hf"
    assert_tells_no_paths((path for path in folder.rglob("*") if path.is_file()), tmp_path)
    model, tokenizer = load_model(trained / "ckpt.pt")
    back = load_checkpoint(folder)
    ids = torch.arange(32)[None] % len(tokenizer.vocab)
    with torch.no_grad():
        logits = model(ids)[0]
        assert back["chars"] == tokenizer.vocab and torch.equal(build_model(back).eval()(ids)[0], logits)
        torch.testing.assert_close(OnnxGPT(folder)(ids)[0], logits, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="has its own tokenizer: leave out --meta"):
        load_checkpoint(folder, tmp_path / "meta.pkl")
    again = ok(here(*flags, script="extras/export.py"))  # a graph of older weights must not stay
    assert "removing" in again.stderr and not (folder / GRAPH).exists()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "hf"])
def test_an_export_of_older_weights_is_refused(format, tmp_path):
    save_model(tmp_path, tiny())
    ok(here("--format", format, *["--onnx"] * (format == "hf"), "--out_dir", tmp_path, script="extras/export.py"))
    file = next((tmp_path / format).rglob("model.onnx"))
    ways = [["--out_dir", tmp_path] if format == "onnx" else ["--ckpt", tmp_path / "hf"]]
    ways += [["--ckpt", file], ["--ckpt", file.parent]]
    for way in ways:
        ok(here("--prompt", "a", "--engine", "onnx", *way, script="sample.py"))
    save_model(tmp_path, GPT(tiny().config))  # trained on
    for way in ways:
        result = here("--prompt", "a", "--engine", "onnx", *way, script="sample.py")
        assert_one_line(result, "model.onnx was not exported from", "ckpt.pt", "export again")
        assert result.stdout == ""
    flags = ["--prompt", "a", "--engine", "onnx", "--ckpt"]
    with contextlib.chdir(file.parent):
        assert_one_line(here(*flags, file.name, script="sample.py"), "was not exported from", "export again")
    (tmp_path / "ckpt.pt").rename(tmp_path / "last.pt")  # a run before its first evaluation
    assert_one_line(here(*flags, file, script="sample.py"), "was not exported from", "last.pt", "export again")
    (tmp_path / "last.pt").unlink()
    ok(here(*flags, file, script="sample.py"))


@pytest.mark.slow
def test_export_mistakes_are_one_line(trained, tmp_path):
    save_model(tmp_path, tiny(**POST_LN))
    (tmp_path / "out").touch()
    for flags, words in (
        ([], ["--format"]),
        (["--format", "gguf"], ["gguf"]),
        (["--format", "onnx", "--ckpt", tmp_path / "none.pt"], ["none.pt"]),
        (["--format", "hf", "--out_dir", tmp_path], ["norm_first=False"]),
        (["--format", "web", "--onnx"], ["--onnx", "--format web"]),
        (["--format", "onnx", "--ckpt", PRETRAINED, "--out_dir", tmp_path / "out"], ["out (File exists)"]),
    ):
        assert_one_line(here(*flags, script="extras/export.py"), *words)
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
@pytest.mark.parametrize(["format", "module"], [("onnx", "onnxscript"), ("hf", "transformers")])
def test_a_missing_package_is_one_line_with_the_command(format, module, trained):
    without = (
        f"import sys, runpy; sys.modules[{module!r}] = None; runpy.run_module('extras.export', run_name='__main__')"
    )
    result = run("-c", without, "--format", format, "--ckpt", trained / "ckpt.pt")
    assert_one_line(result, "pip install", module)
