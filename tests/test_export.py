"""export.py on the command line, and what sample.py and train.py do with the files that it wrote."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch

from helpers import (
    POST_LN,
    PROMPT,
    ROOT,
    STABLELM,
    TINY,
    assert_one_line,
    assert_tells_no_paths,
    full_disk,
    linux,
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
from kvgpt.engines.onnx import write_onnx
from model import GPT


@pytest.fixture(scope="module")
def exported(trained, data_dir, tmp_path_factory):
    """(out_dir with a checkpoint and every ONNX file of it, what export.py said)"""
    folder = tmp_path_factory.mktemp("out")
    shutil.copy(trained / "ckpt.pt", folder)
    flags = ["--format", "onnx", "--int8", "--cacheless", "--out_dir", folder, "--data_dir", data_dir]
    return folder, ok(run("export.py", *flags))


def without(module):
    """Return the arguments of Python that run export.py where the import system is told that a module is missing."""
    return "-c", f"import sys, runpy; sys.modules[{module!r}] = None; runpy.run_path('export.py', run_name='__main__')"


# -- ONNX --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_export_reports_sizes_and_losses(exported, trained):
    """A size or a loss that is not the file's own."""
    folder, result = exported
    assert not result.stderr, result.stderr
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines()[3:])
    val_loss = load(trained / "ckpt.pt")["best_val_loss"]
    for name in ("PyTorch", "model.onnx", "model_cacheless.onnx", "model_int8.onnx"):
        size, loss = lines[name].split(" MB, val loss ")
        assert float(loss) == pytest.approx(val_loss, abs=0.05 if "int8" in name else 1.01e-4)
        if name != "PyTorch":
            assert float(size) == pytest.approx((folder / "onnx" / name).stat().st_size / 1e6, abs=0.0051)
    types = [i.data_type for i in onnx.load(folder / "onnx" / "model_int8.onnx").graph.initializer]
    assert types.count(onnx.TensorProto.INT8) >= 8  # four matrices in each of two layers
    assert_tells_no_paths((folder / "onnx").iterdir(), folder)


@pytest.mark.slow
def test_the_engine_gives_the_text_of_pytorch(exported, tmp_path):
    """Another text by --engine onnx, a wrong account of its memory, or a file that is not enough by itself."""
    flags = ["--prompt", PROMPT, "--num_samples", "2", "--seed", "9"]
    theirs = sample(exported[0], *flags).stdout
    result = ok(sample(exported[0], *flags, "--engine", "onnx", "--verify"))
    assert result.stdout == theirs
    assert "2 of 2 samples match" in result.stderr
    cached = 2 * 2 * 2 * 16 * 31 * 2 * 4  # keys and values, layers, heads, head size, tokens, rows, bytes
    assert f"{cached:,} bytes used of {cached:,} reserved" in result.stderr
    shutil.copytree(exported[0] / "onnx", tmp_path / "onnx")
    alone = run("sample.py", "--out_dir", tmp_path, *flags, "--engine", "onnx", "--no-kv_cache")
    assert alone.stdout == theirs and "KV cache: off" in alone.stderr, alone.stderr


@pytest.mark.slow
def test_engine_mistakes_are_one_line(exported, tmp_path):
    """A traceback, or an answer for flags that ONNX Runtime cannot follow and files that it cannot run."""
    folder = exported[0]
    (tmp_path / "damaged.onnx").write_bytes((folder / "onnx" / "model.onnx").read_bytes()[:2000])
    model, chars = load_model(folder / "ckpt.pt")
    write_onnx(GPT(replace(model.config, block_size=16)).eval(), chars, tmp_path / "other.onnx")
    proto = onnx.load(folder / "onnx" / "model.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "foreign.onnx")
    for flags, words in (
        (["--draft", "ngram"], ["--draft"]),
        (["--compile"], ["--compile"]),
        (["--dtype", "bfloat16"], ["--dtype bfloat16"]),
        (["--device", "cuda"], ["--device cuda"]),
        (["--prompt", "one"], ["--engine onnx", "3 and 13"]),
        (["--prompt", "#"], ["'#'"]),
        (["--ckpt", tmp_path / "none.onnx"], ["none.onnx", "export.py"]),
        (["--ckpt", tmp_path / "damaged.onnx"], ["damaged.onnx"]),
        (["--ckpt", tmp_path / "foreign.onnx"], ["foreign.onnx", "metadata"]),
        (["--ckpt", folder / "onnx" / "model_cacheless.onnx"], ["--no-kv_cache"]),
        (["--ckpt", tmp_path / "other.onnx", "--verify"], ["--verify", "other.onnx", "export it again"]),
    ):
        assert_one_line(sample(folder, "--prompt", PROMPT, "--engine", "onnx", *flags), *words)


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["model_cacheless.onnx", "model_int8.onnx"])
def test_graphs_that_cannot_be_written_leave_the_older_ones(obstacle, tmp_path):
    """A folder under the name of a new graph, or of one that is no longer made, was found after the first change."""
    save_model(tmp_path, tiny(**STABLELM))
    (tmp_path / "onnx" / obstacle).mkdir(parents=True)
    for name in {"model.onnx", "model_int8.onnx"} - {obstacle}:
        (tmp_path / "onnx" / name).write_bytes(b"older")
    before = tree(tmp_path / "onnx")
    assert_one_line(run("export.py", "--format", "onnx", "--cacheless", "--out_dir", tmp_path), obstacle, "folder")
    assert tree(tmp_path / "onnx") == before


# -- Hugging Face ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_there_and_back_by_the_command_line(trained, data_dir, tmp_path):
    """Out by export.py, in by train.py with a learning rate of 0, and the loss is what it was; then it resumes."""
    ok(run("export.py", "--format", "hf", "--ckpt", trained / "ckpt.pt", "--out_dir", tmp_path))
    flags = [*TINY, "--learning_rate", 0, "--data_dir", data_dir, "--out_dir", tmp_path / "back"]
    ok(run("train.py", *flags, "--init_from", tmp_path / "hf", "--max_iters", 2))
    there, back = (load_model(folder / "ckpt.pt")[0] for folder in (trained, tmp_path / "back"))
    ids = torch.arange(32)[None] % there.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(back(ids)[0], there(ids)[0], atol=1e-5, rtol=0)
    result = run("train.py", "--init_from", "resume", "--out_dir", tmp_path / "back", "--max_iters", 3)
    assert result.returncode == 0 and "steps 2..3" in result.stdout, result.stderr
    for extra, words in ((["--n_layer", 3], ["n_layer 2", "3"]), (["--init_from", tmp_path], ["config.json"])):
        flags = ["--init_from", tmp_path / "hf", *extra, "--data_dir", data_dir, "--out_dir", tmp_path / "no"]
        assert_one_line(run("train.py", *flags), *words)
    (tmp_path / "other").mkdir()
    text = tmp_path / "other.txt"
    text.write_text("other words, other characters: 0123456789 " * 40, encoding="utf-8")
    ok(run("data/prepare.py", "--input", text, "--data_dir", tmp_path / "other"))
    flags = ["--init_from", tmp_path / "hf", "--data_dir", tmp_path / "other", "--out_dir", tmp_path / "no"]
    assert_one_line(run("train.py", *flags), "other characters", "hf")


@pytest.mark.slow
def test_a_folder_is_written_without_the_packages_of_the_graph(tmp_path):
    """A refusal for a part that transformers does not need, an earlier model's graph, or no word about the lack."""
    save_model(tmp_path, tiny(**STABLELM))
    flags = ["--format", "hf", "--ckpt", tmp_path / "ckpt.pt", "--out_dir", tmp_path]
    whole = ok(run("export.py", *flags))
    assert whole.stdout.count("logits within") == 2 and (tmp_path / "hf" / "onnx" / "model.onnx").is_file()
    result = ok(run(*without("onnxscript"), *flags))
    (line,) = result.stderr.splitlines()
    assert str(Path("onnx", "model.onnx")) in line and "pip install onnx onnxscript onnxruntime" in line
    assert result.stdout.count("logits within") == 1 and not (tmp_path / "hf" / "onnx" / "model.onnx").exists()


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ["name", "locale"],
    [(b"\xfc", {}), ("ü".encode(), {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})],
    ids=["not UTF-8", "LC_ALL=C"],
)
def test_the_folder_may_have_any_name(name, locale, tmp_path):
    """A traceback from safetensors, which opens names in UTF-8 only, and a folder that is left."""
    save_model(tmp_path, tiny(**STABLELM))
    out = tmp_path / os.fsdecode(name)
    ok(run("export.py", "--format", "hf", "--ckpt", tmp_path / "ckpt.pt", "--out_dir", out, env=locale))
    assert {"config.json", "model.safetensors", "onnx/model.onnx"} <= tree(out / "hf").keys()


# -- the page ----------------------------------------------------------------------------------------------------------

needs_runtime = pytest.mark.skipif(
    not (ROOT / "web" / "node_modules" / "onnxruntime-web").is_dir(), reason="no web/node_modules: run npm ci in web"
)


@unix
@needs_runtime
@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["index.html", "model.onnx.gz", "a full disk"])
def test_a_page_that_cannot_be_written_leaves_the_older_one(obstacle, tmp_path):
    """Pages and scripts of two versions, a page that is cut, or a folder in the place of one and exit code 0."""
    save_model(tmp_path, tiny(**STABLELM))
    (tmp_path / "web").mkdir()
    for name in ("app.js", "model.json"):
        (tmp_path / "web" / name).write_bytes(b"older")
    limit = 10**6  # above the graph and the page, below the runtime
    if obstacle == "a full disk":
        obstacle = "ort-wasm-simd-threaded.wasm.gz"
    else:
        (tmp_path / "web" / obstacle).mkdir()
        limit = 10**9
    before = tree(tmp_path / "web")
    result = run("export.py", "--format", "web", "--out_dir", tmp_path, preexec_fn=full_disk(limit))
    assert_one_line(result, tmp_path / "web", obstacle)
    assert tree(tmp_path / "web") == before


@unix
@needs_runtime
@pytest.mark.slow
def test_a_link_in_the_place_of_the_page_becomes_a_file(tmp_path):
    """An error without a reason for a link to the source of the page, or a file behind a link that is changed."""
    save_model(tmp_path, tiny(**STABLELM))
    (tmp_path / "web").mkdir()
    source = ROOT / "web" / "page" / "index.html"
    (tmp_path / "kept").write_bytes(b"kept")
    for name, target in {"index.html": source, "app.js": tmp_path / "kept"}.items():
        (tmp_path / "web" / name).symlink_to(target)
    ok(run("export.py", "--format", "web", "--out_dir", tmp_path))
    assert (tmp_path / "kept").read_bytes() == b"kept"
    files = tree(tmp_path / "web")
    assert files["index.html"] == source.read_bytes() and not (tmp_path / "web" / "index.html").is_symlink()


# -- every format ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_the_smallest_contexts_are_exported_or_refused(block_size, tmp_path):
    """A context too short for the check or for the exporter: a traceback, or files of an earlier run left beside."""
    save_model(tmp_path, tiny(**STABLELM, block_size=block_size))
    for flags in (["hf"], ["onnx", "--int8"], ["onnx", "--cacheless"]):
        result = run("export.py", "--out_dir", tmp_path, "--format", *flags)
        if "--cacheless" in flags and block_size < 3:
            assert_one_line(result, f"{block_size}", "--cacheless")
        else:
            assert result.returncode == 0 and "logits within" in result.stdout, result.stderr
    assert (tmp_path / "onnx" / "model_int8.onnx").exists() == (block_size < 3)  # of the run before, else removed


@pytest.mark.slow
def test_export_mistakes_are_one_line(trained, tmp_path):
    """A traceback, or a folder that is begun for a network that cannot be exported."""
    save_model(tmp_path, tiny(**POST_LN))
    (tmp_path / "file").write_text("in the way")
    for flags, words in (
        ([], ["--format"]),
        (["--format", "gguf"], ["gguf"]),
        (["--format", "hf", "--int8"], ["--int8"]),
        (["--format", "onnx", "--ckpt", tmp_path / "none.pt"], ["none.pt"]),
        (["--format", "hf", "--out_dir", tmp_path], ["norm_first=False"]),
        (["--format", "onnx", "--ckpt", trained / "ckpt.pt", "--out_dir", tmp_path / "file"], ["file"]),
    ):
        assert_one_line(run("export.py", *flags), *words)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(["format", "module"], [("onnx", "onnxscript"), ("hf", "transformers")])
def test_a_missing_package_is_one_line_with_the_command(format, module, trained):
    """A traceback from an import."""
    result = run(*without(module), "--format", format, "--ckpt", trained / "ckpt.pt")
    assert_one_line(result, "pip install", module)
