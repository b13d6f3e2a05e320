"""Who imports whom: extras imports no script, check_cache nothing of ours, and nothing is a circle.

tests/test_layout.py has the rules of the four files.
"""

import ast
import graphlib

import pytest

from helpers import ROOT, imported_names, ok, run


def source_files():
    """Every .py file of the project but the tests, as {module name: path}."""
    files = {file.stem: file for folder in (ROOT, ROOT / "data") for file in folder.glob("*.py")}
    for file in [*(ROOT / "extras").rglob("*.py"), *(ROOT / "check_cache").glob("*.py")]:
        if "tests" in file.parts:
            continue
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


FILES = source_files()


def ours(nodes):
    """The modules of the project that these nodes import. data/prepare.py is prepare."""
    return {name.removeprefix("data.") for name in imported_names(nodes)} & FILES.keys()


TREES = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
IMPORTS = {name: ours(ast.walk(tree)) for name, tree in TREES.items()}


def in_package(name):
    return {module for module in FILES if module.partition(".")[0] == name}


def test_extras_imports_model_py_and_no_script():
    """What a script and extras both need is in one of these two."""
    for name in in_package("extras"):
        assert IMPORTS[name] <= {"model"} | in_package("extras"), name


PLAIN = """
import runpy, sys
sys.argv = ["sample.py", "--ckpt", "assets/shakespeare.pt", "--device", "cpu", "--max_new_tokens", "2"]
runpy.run_path("sample.py", run_name="__main__")
print("\\n", *sys.modules)
"""


def test_sample_py_opens_no_door_that_no_flag_or_file_asks_for():
    """A checkpoint of characters is read and sampled by model.py and sample.py alone."""
    *_, modules = ok(run("-c", PLAIN)).stdout.splitlines()
    dear = ("extras.", "tokenizers", "torch._dynamo")  # torch's compiler takes longer to import than a short run
    opened = {name for name in modules.split() if name.startswith(dear)}
    assert opened == {"extras.cli", "extras.hints", "extras.threads"}


def test_check_cache_is_a_package_of_its_own():
    """It imports nothing of ours, and nothing of ours imports it."""
    package = in_package("check_cache")
    assert "check_cache.check" in package
    for name, found in IMPORTS.items():
        assert found <= package if name in package else not found & package, name


def package_of(name):
    """extras.formats for a module in that folder, and a module itself for any other."""
    return name.rpartition(".")[0] if name.startswith(("extras.bench.", "extras.decode.", "extras.formats.")) else name


@pytest.mark.parametrize("node", [str, package_of], ids=["modules", "packages"])
def test_no_import_goes_in_a_circle(node):
    graph = {}
    for name, found in IMPORTS.items():
        graph.setdefault(node(name), set()).update({node(other) for other in found} - {node(name)})
    assert sum(map(len, graph.values())) > 30  # the parser above sees imports
    list(graphlib.TopologicalSorter(graph).static_order())
