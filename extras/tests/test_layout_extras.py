"""Who imports whom: extras and check_cache import no script, and nothing is a circle.

tests/test_layout.py has the rules of the four files.
"""

import ast
import graphlib

from helpers import ROOT, imported_names

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
    return imported_names(nodes) & FILES.keys()


TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
IMPORTS = {name: ours(ast.walk(tree)) for name, tree in TREES.items()}


def in_package(name):
    return {module for module in FILES if module.partition(".")[0] == name}


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


def test_helpers_that_stand_in_a_script_too_are_equal():
    """tests/test_four_files.py compares those of the four files with each other."""

    def functions(name):
        return {node.name: ast.unparse(node) for node in TREES[name].body if isinstance(node, ast.FunctionDef)}

    ours = functions("extras.cli")
    twice = {(file, name) for file in ("train", "sample", "prepare") for name in ours.keys() & functions(file).keys()}
    assert {name for _, name in twice} >= {"note", "fail", "one_line_errors"}
    assert [(file, name) for file, name in twice if functions(file)[name] != ours[name]] == []
