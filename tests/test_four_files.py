"""The kit is four files: alone in a folder, they train, resume and generate as they do in the repository."""

import ast
import shutil
import subprocess
import sys
from collections import defaultdict

import pytest

from helpers import (
    ONE_THREAD,
    ROOT,
    SAMPLE,
    STATEFUL,
    TINY,
    assert_one_line,
    child,
    here,
    load,
    log,
    ok,
    run,
    same,
    unix,
)

FILES = ("model.py", "train.py", "sample.py", "data/prepare.py", "data/sample.txt")
MODERN = [*TINY, "--recipe", "modern"]
SLIDE = ["--no-kv_cache", "--verify", "--stop", ":", "--num_samples", 3, "--overflow", "slide", "--max_new_tokens", 90]


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """A folder with the four files, without the rest of the repository, and its own prepared text."""
    folder = tmp_path_factory.mktemp("kit")
    (folder / "data").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    ok(alone(folder, "data/prepare.py", "--input", SAMPLE))
    return folder


def alone(folder, script, *flags, **kwargs):
    return run(script, *flags, cwd=folder, env=ONE_THREAD, **kwargs)


def assert_same_training(a, b):
    """The same model, optimizer and logged losses. The checkpoints differ in paths and in n-grams for --draft."""
    last = load(a / "last.pt"), load(b / "last.pt")
    for name in ("model", "optimizer", "mtp", "scaler", "iter_num", "best_val_loss", "model_args", "chars"):
        assert same(last[0][name], last[1][name]), name
    losses = [[(row["step"], row["train_loss"], row["val_loss"], row["grad_norm"]) for row in log(x)] for x in (a, b)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def trained_alone(kit):
    """The folder of a run of forty steps in the kit: modern recipe, stopped after twenty and resumed."""
    flags = [*MODERN, "--eval_interval", 20, "--lr_decay_iters", 40]
    ok(alone(kit, "train.py", *flags, "--max_iters", 20))
    ok(alone(kit, "train.py", "--init_from", "resume", "--max_iters", 40))
    return kit / "out"


def test_it_prepares_trains_and_resumes_as_in_the_repository(kit, trained_alone, data_dir, tmp_path):
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (kit / "data" / name).read_bytes() == (data_dir / name).read_bytes()
    flags = [*MODERN, "--eval_interval", 20, "--lr_decay_iters", 40, "--max_iters", 40, "--data_dir", data_dir]
    ok(here(*flags, "--out_dir", tmp_path))
    assert_same_training(trained_alone, tmp_path)
    assert load(tmp_path / "last.pt")["ngrams"] and not load(trained_alone / "last.pt")["ngrams"]


@pytest.mark.slow
def test_nanogpts_recipe_too(kit, data_dir, tmp_path):
    flags = [*TINY, "--eval_interval", 20, "--max_iters", 40, "--dropout", 0.1]
    ok(alone(kit, "train.py", *flags, "--out_dir", tmp_path / "alone"))
    ok(child(*flags, "--data_dir", data_dir, "--out_dir", tmp_path / "whole"))
    assert_same_training(tmp_path / "alone", tmp_path / "whole")


@pytest.mark.slow
def test_it_generates_as_in_the_repository(kit, trained_alone):
    for flags in (SLIDE, ["--kv_cache", "--top_k", 5, "--temperature", 1.2, "--seed", 7]):
        flags = ["--prompt", "First ", "--device", "cpu", *flags]
        here, there = alone(kit, "sample.py", *flags), run("sample.py", "--ckpt", trained_alone, *flags)
        assert ok(here).stdout == ok(there).stdout and len(here.stdout) > 20
        assert "TTFT" in here.stderr and "KV cache: " in here.stderr
        assert ("3 of 3 samples)" in here.stderr) == ("--verify" in flags)


@unix
@pytest.mark.slow
def test_it_trains_on_two_processes(kit, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    flags = [*STATEFUL, "--max_iters", 4, "--out_dir", tmp_path]
    result = subprocess.run([*launcher, *map(str, flags)], cwd=kit, capture_output=True, encoding="utf-8", timeout=120)
    assert result.returncode == 0 and "and 1 more" in result.stdout, result.stderr


NEED = [
    ("sample.py", "--compile"),
    ("sample.py", "--draft ngram"),
    ("sample.py", "--engine onnx"),
    ("sample.py", "--weights int8"),
    ("sample.py", "--explain"),
    ("sample.py", "--prompt another"),
    ("sample.py", "--ckpt out/ckpt.pt --meta meta.pkl"),
    ("sample.py", "--ckpt folder"),
    ("train.py", "--plot"),
    ("train.py", "--init_from folder"),
    ("data/prepare.py", "--hold_out"),
    ("data/prepare.py", "--input data/sample.txt --tokenizer bpe"),
]


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", NEED, ids=[" ".join(need) for need in NEED])
def test_what_needs_kvgpt_says_so_in_one_line(script, flags, kit, trained_alone):
    (kit / "folder").mkdir(exist_ok=True)
    (kit / "folder" / "config.json").write_text("{}", encoding="utf-8")
    prompt = ["--prompt", "First "] if script == "sample.py" else []
    result = alone(kit, script, *prompt, *flags.split())
    assert_one_line(result, "needs the folder kvgpt", code=1)
    assert result.stdout == ""


@pytest.mark.slow
def test_an_unknown_flag_is_one_line_without_the_hints(kit):
    for script in ("train.py", "sample.py"):
        assert_one_line(alone(kit, script, "--dataset", "x"), "unrecognized arguments: --dataset x", code=2)


# -- helpers that stand twice ------------------------------------------------------------------------------------------

DIFFERENT = {
    "main": "each script has its own",
    "parse_args": "each script has its own",
    "run_main": "only train.py knows torchrun",
    "pick_device": "only train.py has a GPU per process",
    "sha256": "a helper of three lines",
}


def test_helpers_that_stand_in_several_files_are_equal():
    """The four files do not import each other, so a change to one copy has to reach the rest."""
    found = defaultdict(set)
    files = [ROOT / name for name in FILES if name.endswith(".py")] + [ROOT / "kvgpt" / "cli.py"]
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[node.name].add((file.name, ast.unparse(node)))
    twice = {name: copies for name, copies in found.items() if len(copies) > 1 and name not in DIFFERENT}
    assert {"note", "one_line_errors", "needs_kvgpt", "Parser", "write_atomically", "name_in_errors"} <= twice.keys()
    assert [name for name, copies in twice.items() if len({source for _, source in copies}) > 1] == []
