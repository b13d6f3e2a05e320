"""Who imports whom: model.py and check_cache stand alone, scripts never import each other, and nothing is a circle."""

import ast
import graphlib

import pytest

from helpers import ROOT, ok, run

SCRIPTS = {"train", "sample", "bench", "export", "prepare", "draw"}


def source_files():
    """Every .py file of the project but the tests, as {module name: path}."""
    files = {file.stem: file for folder in (ROOT, ROOT / "data", ROOT / "assets") for file in folder.glob("*.py")}
    for file in [*(ROOT / "kvgpt").rglob("*.py"), *(ROOT / "check_cache").glob("*.py")]:
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


FILES = source_files()


def ours(file):
    """The modules of the project that a file imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


IMPORTS = {name: ours(file) for name, file in FILES.items()}


def test_model_py_can_be_copied_into_another_project(tmp_path):
    """One file, torch and the standard library: it trains a step and generates in a folder without the rest."""
    (tmp_path / "model.py").write_bytes(FILES["model"].read_bytes())
    script = (
        "import sys, torch; from model import GPT, GPTConfig\n"
        "model = GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=2, n_embd=8))\n"
        "idx = torch.zeros(1, 4, dtype=torch.int64)\n"
        "model(idx, idx)[1].backward()\n"
        "assert model.generate(idx, 9, seed=1).shape == (1, 8)\n"
        "assert not [name for name in sys.modules if name.startswith('kvgpt')]\n"
    )
    ok(run("-c", script, cwd=tmp_path))


def test_scripts_never_import_each_other():
    assert {name: found & SCRIPTS for name, found in IMPORTS.items() if found & SCRIPTS} == {}


def test_check_cache_is_a_room_of_its_own():
    """It imports nothing of ours, and nothing of ours imports it."""
    room = {name for name in IMPORTS if name.partition(".")[0] == "check_cache"}
    assert "check_cache.check" in room
    for name, found in IMPORTS.items():
        assert found <= room if name in room else not found & room, name


def test_no_import_goes_in_a_circle():
    assert sum(map(len, IMPORTS.values())) > 30  # the parser above sees imports
    list(graphlib.TopologicalSorter(IMPORTS).static_order())


@pytest.mark.slow
def test_a_script_loads_only_what_its_run_needs():
    """`train.py` loads no exporter, and `sample.py` nothing that only training needs."""
    for script, foreign in (("train", "kvgpt.interop"), ("sample", "kvgpt.interop"), ("sample", "kvgpt.training")):
        loaded = ok(run("-c", f"import sys, {script}; print(*sys.modules)")).stdout.split()
        assert not [name for name in loaded if name.startswith(foreign)], script
