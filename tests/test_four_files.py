"""The kit is four files: alone in a folder, they train, resume and generate as they do in the repository."""

import json
import re
import shutil

import pytest

from helpers import ONE_THREAD, ROOT, SAMPLE, TINY, assert_one_line, here, load, log, ok, run, same, write
from model import save_checkpoint

FILES = ("model.py", "train.py", "sample.py", "data/prepare.py", "data/sample.txt")
MODERN = [*TINY, "--recipe", "modern", "--eval_interval", 10, "--lr_decay_iters", 20]
SLIDE = ["--no-kv_cache", "--verify", "--stop", ":", "--num_samples", 3, "--overflow", "slide", "--max_new_tokens", 90]
SAMPLES = [
    ["--prompt", "First ", "--device", "cpu", *flags]
    for flags in (SLIDE, ["--kv_cache", "--top_k", 5, "--temperature", 1.2, "--seed", 7])
]
NEED_EXTRAS = [
    "sample.py --prompt First --compile",
    "sample.py --prompt First --draft ngram",
    "sample.py --prompt First --engine onnx",
    "sample.py --prompt First --weights int8",
    "sample.py --prompt First --explain",
    "sample.py --prompt First --prompt another",
    "sample.py --prompt First --ckpt out/ckpt.pt --meta meta.pkl",
    "sample.py --prompt First --ckpt tokens/ckpt.pt",
    "train.py --init_from out/ckpt.pt --meta meta.pkl",
    "train.py --data_dir tokens",
    "train.py --loss extras.targets",
    "train.py --mtp_weight 0.5 --max_iters 1",
    "data/prepare.py --input data/sample.txt --tokenizer bpe",
]
MISTAKES = [(command, "the folder extras of the repository", 1) for command in NEED_EXTRAS]
MISTAKES += [("sample.py --ckpt folder", "no checkpoint at folder", 1)]
MISTAKES += [("train.py --init_from folder", "no checkpoint at folder", 1)]
MISTAKES += [(f"{name}.py --dataset x", "unrecognized arguments: --dataset x", 2) for name in ("train", "sample")]

# one process for all commands, because most of the time of each would be the import of torch
EACH = """
import json, sys
from helpers import here
results = [here(*flags, script=f"{sys.argv[1]}/{script}") for script, *flags in json.loads(sys.argv[2])]
print(json.dumps([(result.returncode, result.stdout, result.stderr) for result in results]))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(folder, results): the four files without the rest of the repository, and (code, stdout, stderr) of each command.

    A run of twenty steps is stopped after ten and resumed.
    """
    folder = tmp_path_factory.mktemp("kit")
    for name in ("data", "folder", "tokens"):
        (folder / name).mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    (folder / "folder" / "config.json").write_text("{}", encoding="utf-8")
    write(folder / "tokens", {"tokenizer": "{}"}, 3, [0, 1], [2])
    save_checkpoint(folder / "tokens" / "ckpt.pt", {"model": {}, "model_args": {}, "tokenizer": "{}"})
    commands = [
        ["data/prepare.py", "--input", SAMPLE],
        ["train.py", *MODERN, "--max_iters", 10],
        ["train.py", "--init_from", "resume", "--max_iters", 20],
        *(["sample.py", *flags] for flags in SAMPLES),
        *(command.split() for command, _, _ in MISTAKES),
    ]
    commands = json.dumps([list(map(str, command)) for command in commands])
    env = ONE_THREAD | {"PYTHONPATH": str(ROOT / "tests")}
    return folder, json.loads(ok(run("-c", EACH, folder, commands, cwd=folder, env=env)).stdout)


def test_it_prepares_trains_and_resumes_as_in_the_repository(alone, data_dir, tmp_path):
    """The same model, optimizer and logged losses as without auxiliary targets, which are in extras.

    The checkpoints differ in paths and in n-grams for --draft.
    """
    folder, results = alone
    assert [code for code, _, _ in results[:3]] == [0] * 3, results[:3]
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (folder / "data" / name).read_bytes() == (data_dir / name).read_bytes()
    assert results[1][1].startswith("training without auxiliary targets, which need the folder extras")
    flags = [*MODERN, "--ngram_targets", 0, "--mtp_weight", 0, "--max_iters", 20]
    ok(here(*flags, "--data_dir", data_dir, "--out_dir", tmp_path))
    ours, theirs = load(folder / "out" / "last.pt"), load(tmp_path / "last.pt")
    for name in ("model", "optimizer", "loss", "scaler", "iter_num", "best_val_loss", "model_args", "chars"):
        assert same(ours[name], theirs[name]), name
    assert "ngrams" not in ours
    columns = ("step", "train_loss", "val_loss", "grad_norm")
    rows = [[[row[name] for name in columns] for row in log(out)] for out in (folder / "out", tmp_path)]
    assert rows[0] == rows[1]


def test_it_generates_as_in_the_repository(alone):
    folder, results = alone
    for flags, (code, out, err) in zip(SAMPLES, results[3:]):
        there = ok(here("--ckpt", folder / "out", *flags, script="sample.py"))
        assert code == 0 and out == there.stdout and len(out) > 20, err
        assert "TTFT" in err and "KV cache: " in err
        assert ("3 of 3 samples)" in err) == ("--verify" in flags)


def test_what_needs_extras_and_an_unknown_flag_are_one_line(alone):
    for (command, words, code), result in zip(MISTAKES, alone[1][5:], strict=True):
        assert result[:2] == [code, ""] and words in result[2] and result[2].count("\n") == 1, (command, result)


@pytest.mark.slow
def test_another_package_called_extras_is_not_ours(alone, tmp_path):
    """There is one on PyPI, which testtools needs."""
    (tmp_path / "extras").mkdir()
    (tmp_path / "extras" / "__init__.py").touch()
    folder, _ = alone
    env = ONE_THREAD | {"PYTHONPATH": str(tmp_path)}
    train = ["train.py", "--init_from", "resume", "--max_iters", "20"]
    for command in (train, ["sample.py", "--prompt", "First ", "--max_new_tokens", "3", "--device", "cpu"]):
        ok(run(*command, cwd=folder, env=env))
    result = run("data/prepare.py", "--input", SAMPLE, "--tokenizer", "bpe", "--data_dir", "new", cwd=folder, env=env)
    assert_one_line(result, "needs the folder extras of the repository", code=1)


# -- the tests without extras ------------------------------------------------------------------------------------------

# they call model.py, data/prepare.py or the lesson in one process, so that they need no more than what they import
NO_SCRIPTS = "checkpoint device generation lesson model prepare sampling".split()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_these_tests_need_neither_extras_nor_check_cache(tmp_path):
    """You may delete both folders. All tests are imported, and those run that start sample.py or train.py."""
    for name in (*FILES, "assets/shakespeare.pt", "pyproject.toml", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("tests", "lesson"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "tests"]
    flags += [f"--deselect=tests/test_{name}.py" for name in NO_SCRIPTS]
    result = run("-m", "pytest", *flags, cwd=tmp_path, env=ONE_THREAD, timeout=900)
    assert result.returncode == 0, result.stdout
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 150, result.stdout
