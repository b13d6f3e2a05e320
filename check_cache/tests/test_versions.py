"""test_transformers.py with older releases of transformers, which `make check` installs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.4", "5.23"])
def test_an_older_release(version):
    packages = TESTS / "versions" / version / ".packages"
    if not packages.is_dir():
        pytest.skip(f"pip install --no-deps --target {packages} -r {packages.parent / 'requirements.txt'}")
    paths = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    check = f"import transformers as t; assert t.__version__.startswith('{version}.'), t.__version__"
    for command in (["-c", check], ["-m", "pytest", "-q", str(TESTS / "test_transformers.py")]):
        run = subprocess.run(
            [sys.executable, *command],
            cwd=TESTS.parent,
            env=os.environ | dict(PYTHONPATH=paths),
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout
