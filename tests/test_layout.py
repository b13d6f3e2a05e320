"""Who imports whom: the four files stand alone, extras and check_cache import no script, and nothing is a circle."""

import ast
import graphlib

from helpers import ROOT

SCRIPTS = {"train", "sample", "prepare", "draw"}


def source_files():
    """Every .py file of the project but the tests, as {module name: path}."""
    files = {file.stem: file for folder in (ROOT, ROOT / "data", ROOT / "assets") for file in folder.glob("*.py")}
    for file in [*(ROOT / "extras").rglob("*.py"), *(ROOT / "check_cache").glob("*.py")]:
        if "tests" in file.parts:
            continue
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


FILES = source_files()


def ours(nodes):
    """The modules of the project that these nodes import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
IMPORTS = {name: ours(ast.walk(tree)) for name, tree in TREES.items()}
AT_THE_TOP = {name: ours(tree.body) for name, tree in TREES.items()}


def in_package(name):
    return {module for module in FILES if module.partition(".")[0] == name}


def test_the_four_files_import_model_py_at_the_top_and_extras_only_inside():
    """A flag or a file opens extras. tests/test_four_files.py runs them without it."""
    assert {name: AT_THE_TOP[name] for name in ("model", "train", "sample", "prepare")} == {
        "model": set(),
        "train": {"model"},
        "sample": {"model"},
        "prepare": set(),
    }
    assert IMPORTS["model"] == set()
    for name in ("train", "sample", "prepare"):
        assert IMPORTS[name] <= {"model"} | in_package("extras")


def test_extras_imports_model_py_and_no_script():
    for name in in_package("extras") - {"extras.bench", "extras.export"}:
        assert IMPORTS[name] <= {"model"} | in_package("extras"), name


def test_only_bench_and_export_import_scripts():
    users = {name for name, found in IMPORTS.items() if found & SCRIPTS}
    assert users == {"extras.bench", "extras.export"} and all(
        IMPORTS[name] & SCRIPTS <= {"train", "sample"} for name in users
    )


def test_check_cache_is_a_package_of_its_own():
    """It imports nothing of ours, and nothing of ours imports it."""
    package = in_package("check_cache")
    assert "check_cache.check" in package
    for name, found in IMPORTS.items():
        assert found <= package if name in package else not found & package, name


def test_no_import_goes_in_a_circle():
    assert sum(map(len, IMPORTS.values())) > 30  # the parser above sees imports
    list(graphlib.TopologicalSorter(IMPORTS).static_order())
