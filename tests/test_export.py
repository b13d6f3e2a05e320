"""export.py on the command line, and what sample.py and train.py do with the files that it wrote."""

import shutil
import subprocess
from dataclasses import replace

import onnx
import pytest
import torch

from helpers import (
    CHARS,
    POST_LN,
    PROMPT,
    ROOT,
    STABLELM,
    TINY,
    assert_one_line,
    assert_tells_no_paths,
    full_disk,
    load,
    ok,
    run,
    sample,
    save_model,
    tiny,
    tree,
    unix,
)
from kvgpt.checkpoint import load_model
from kvgpt.engines.onnx import OnnxGPT
from kvgpt.export.hf import GRAPH, export_hf
from kvgpt.export.onnx import export_onnx, write_onnx
from model import GPT


@pytest.fixture(scope="module")
def exported(trained, data_dir, tmp_path_factory):
    """(out_dir with a checkpoint and every ONNX file of it, what export.py said)"""
    folder = tmp_path_factory.mktemp("out")
    shutil.copy(trained / "ckpt.pt", folder)
    flags = ["--format", "onnx", "--int8", "--out_dir", folder, "--data_dir", data_dir]
    return folder, ok(run("export.py", *flags))


def without(module):
    """Return the arguments of Python that run export.py where the import system is told that a module is missing."""
    return "-c", f"import sys, runpy; sys.modules[{module!r}] = None; runpy.run_path('export.py', run_name='__main__')"


def assert_sums_fit(folder):
    """By sha256sum, where there is one."""
    if shutil.which("sha256sum"):
        result = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, encoding="utf-8")
        assert result.returncode == 0, result.stdout + result.stderr
        files = {name for name, raw in tree(folder).items() if raw is not None}
        assert {line.split(": ")[0] for line in result.stdout.splitlines()} == files - {"SHA256SUMS"}


# -- ONNX --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_export_reports_sizes_and_losses(exported, trained):
    folder, result = exported
    assert not result.stderr, result.stderr
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines()[2:])
    val_loss = load(trained / "ckpt.pt")["best_val_loss"]
    for name in ("PyTorch", "model.onnx", "model_int8.onnx"):
        size, loss = lines[name].split(" MB, val loss ")
        assert float(loss) == pytest.approx(val_loss, abs=0.05 if "int8" in name else 1.01e-4)
        if name != "PyTorch":
            assert float(size) == pytest.approx((folder / "onnx" / name).stat().st_size / 1e6, abs=0.0051)
    types = [i.data_type for i in onnx.load(folder / "onnx" / "model_int8.onnx").graph.initializer]
    assert types.count(onnx.TensorProto.INT8) >= 8  # four matrices in each of two layers
    assert_sums_fit(folder / "onnx")


@pytest.mark.slow
def test_the_engine_gives_the_text_of_pytorch(exported, tmp_path):
    flags = ["--prompt", PROMPT, "--num_samples", "2", "--seed", "9"]
    theirs = sample(exported[0], *flags).stdout
    result = ok(sample(exported[0], *flags, "--engine", "onnx", "--verify"))
    assert result.stdout == theirs
    assert "2 of 2 samples match" in result.stderr
    cached = 2 * 2 * 2 * 16 * 31 * 2 * 4  # keys and values, layers, heads, head size, tokens, rows, bytes
    assert f"= {cached:,} bytes" in result.stderr
    shutil.copy(exported[0] / "onnx" / "model.onnx", tmp_path)  # the file is enough by itself
    flags += ["--engine", "onnx", "--ckpt", tmp_path / "model.onnx", "--no-kv_cache"]
    alone = run("sample.py", *flags)
    assert alone.stdout == theirs and "KV cache: off" in alone.stderr, alone.stderr


@pytest.mark.slow
def test_engine_mistakes_are_one_line(exported, tmp_path):
    folder = exported[0]
    model, chars = load_model(folder / "ckpt.pt")
    write_onnx(GPT(replace(model.config, block_size=16)).eval(), chars, tmp_path / "other.onnx")
    for flags, words in (
        (["--prompt", "one"], ["--engine onnx", "3 and 13"]),
        (["--ckpt", tmp_path / "none.onnx"], ["none.onnx", "export.py"]),
        (["--ckpt", tmp_path / "other.onnx", "--verify"], ["--verify", "other.onnx", "export it again"]),
    ):
        assert_one_line(sample(folder, "--prompt", PROMPT, "--engine", "onnx", *flags), *words)


# -- Hugging Face ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_there_and_back_by_the_command_line(trained, data_dir, tmp_path):
    """Out by export.py, in by train.py with a learning rate of 0, and the logits are the same; then it resumes."""
    ok(run("export.py", "--format", "hf", "--ckpt", trained / "ckpt.pt", "--out_dir", tmp_path))
    assert_sums_fit(tmp_path / "hf")
    flags = [*TINY, "--learning_rate", 0, "--data_dir", data_dir, "--out_dir", tmp_path / "back"]
    ok(run("train.py", *flags, "--init_from", tmp_path / "hf", "--max_iters", 2))
    there, back = (load_model(folder / "ckpt.pt")[0] for folder in (trained, tmp_path / "back"))
    ids = torch.arange(32)[None] % there.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(back(ids)[0], there(ids)[0], atol=1e-5, rtol=0)
    result = run("train.py", "--init_from", "resume", "--out_dir", tmp_path / "back", "--max_iters", 3)
    assert result.returncode == 0 and "steps 2..3" in result.stdout, result.stderr
    assert_one_line(run("train.py", *flags, "--init_from", tmp_path / "hf", "--n_layer", 3), "n_layer 2", "3")


@pytest.mark.slow
def test_the_graph_in_a_folder_is_of_the_model_beside_it(tmp_path):
    """Without the packages of the graph the rest is written, and the graph of an earlier model does not stay."""
    flags, folder = ["--format", "hf", "--ckpt", tmp_path / "ckpt.pt", "--out_dir", tmp_path], tmp_path / "hf"
    ids = torch.arange(24)[None] % len(CHARS)
    for model in (tiny(), tiny(**STABLELM)):
        save_model(tmp_path, model)
        assert ok(run("export.py", *flags)).stdout.count("logits within") == 2
        with torch.no_grad():
            torch.testing.assert_close(OnnxGPT(folder / GRAPH)(ids)[0], model(ids)[0], atol=1e-4, rtol=0)
        assert_tells_no_paths((path for path in folder.rglob("*") if path.is_file()), tmp_path)
    result = ok(run(*without("onnxscript"), *flags))
    (line,) = result.stderr.splitlines()
    assert "pip install onnx onnxscript onnxruntime" in line
    assert result.stdout.count("logits within") == 1 and not (folder / GRAPH).exists()


# -- every format ------------------------------------------------------------------------------------------------------

needs_runtime = pytest.mark.skipif(
    not (ROOT / "web" / "node_modules" / "onnxruntime-web").is_dir(), reason="no web/node_modules: run npm ci in web"
)


@unix
@pytest.mark.slow
@pytest.mark.parametrize(
    ["format", "limit"], [("onnx", 10**4), ("hf", 10**4), pytest.param("web", 10**6, marks=needs_runtime)]
)
def test_a_full_disk_leaves_the_older_export(format, limit, tmp_path):
    save_model(tmp_path, tiny(**STABLELM))
    (tmp_path / format).mkdir()
    for name in ("model.onnx", "config.json", "index.html"):
        (tmp_path / format / name).write_bytes(b"older")
    before = tree(tmp_path / format)
    assert_one_line(run("export.py", "--format", format, "--out_dir", tmp_path, preexec_fn=full_disk(limit)))
    assert {name: raw for name, raw in tree(tmp_path / format).items() if raw is not None} == before


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2])
def test_the_smallest_contexts_are_exported(block_size, tmp_path):
    export_hf(tiny(**STABLELM, block_size=block_size), CHARS, tmp_path, graph=True)


@pytest.mark.slow
def test_no_graph_of_an_earlier_model_stays(tmp_path):
    export_onnx(tiny(block_size=3), CHARS, tmp_path, tmp_path, int8=True)
    export_onnx(tiny(), CHARS, tmp_path, tmp_path)
    assert tree(tmp_path).keys() == {"model.onnx", "SHA256SUMS"}


@pytest.mark.slow
def test_export_mistakes_are_one_line(trained, tmp_path):
    save_model(tmp_path, tiny(**POST_LN))
    for flags, words in (
        ([], ["--format"]),
        (["--format", "gguf"], ["gguf"]),
        (["--format", "hf", "--int8"], ["--int8"]),
        (["--format", "onnx", "--ckpt", tmp_path / "none.pt"], ["none.pt"]),
        (["--format", "hf", "--out_dir", tmp_path], ["norm_first=False"]),
    ):
        assert_one_line(run("export.py", *flags), *words)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(["format", "module"], [("onnx", "onnxscript"), ("hf", "transformers")])
def test_a_missing_package_is_one_line_with_the_command(format, module, trained):
    result = run(*without(module), "--format", format, "--ckpt", trained / "ckpt.pt")
    assert_one_line(result, "pip install", module)
