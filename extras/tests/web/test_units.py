"""Tests with `node --test` of the modules that need no browser. test_web.py tests the page as a whole."""

import re
import shutil
import subprocess

import pytest

from extras.formats.webpage import with_modules
from helpers import ROOT

PAGE = ROOT / "extras" / "web" / "page"
HTML = (PAGE / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", sorted((PAGE.parent / "tests").glob("*.test.mjs")), ids=lambda file: file.name)
def test_its_unit_tests_pass(file):
    if not shutil.which("node"):
        pytest.skip("no node")
    result = subprocess.run(["node", "--test", file], capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout


def test_all_modules_are_preloaded():
    """Otherwise the browser requests them one after the other, as it finds the imports."""
    ours = {file.relative_to(PAGE).as_posix() for file in PAGE.rglob("*.js")}
    runtime = {"ort/ort.wasm.min.mjs", "ort/ort-wasm-simd-threaded.mjs"}
    preloaded = re.findall(r'rel="modulepreload" href="([^"]+)"', with_modules(HTML, ours | runtime | {"page.png"}))
    assert sorted(preloaded) == sorted((ours | runtime) - {"app.js", "start.js"})  # those are in <script>
