"""Shared by the tests: the project's root, a way to run its scripts as a user would, and a small prepared text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "data"))  # `import prepare`

# the same examples on every run; more of them, and slow ones, are a matter of --hypothesis-profile
settings.register_profile("kit", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("kit")


def run(*args, timeout=120, env=None, cwd=ROOT, **kwargs):
    """Run `python ARGS` in a process of its own, in the project's root; the completed process, output as text."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **(env or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        **kwargs,
    )


def assert_one_line(result, *words, code=None):
    """A user's mistake: an exit code that is not 0, nothing on stdout, and one line on stderr that has the `words`."""
    assert result.returncode != 0 if code is None else result.returncode == code, (result.returncode, result.stderr)
    assert "Traceback" not in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert str(word) in result.stderr, (word, result.stderr)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """data/sample.txt, prepared."""
    folder = tmp_path_factory.mktemp("data")
    result = run("data/prepare.py", "--input", ROOT / "data" / "sample.txt", "--data_dir", folder)
    assert result.returncode == 0, result.stderr
    return folder


TINY = "--recipe nanogpt --learning_rate 3e-3 --n_layer 2 --n_head 2 --n_embd 32 --block_size 32".split()
TINY += "--batch_size 4 --device cpu".split()


@pytest.fixture(scope="session")
def trained(data_dir, tmp_path_factory):
    """An out_dir after 60 steps of a tiny model on data/sample.txt."""
    folder = tmp_path_factory.mktemp("out")
    result = run("train.py", "--data_dir", data_dir, "--out_dir", folder, *TINY, "--max_iters", "60")
    assert result.returncode == 0, result.stderr
    return folder
