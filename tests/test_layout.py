"""The imports obey the rules of the layout: scripts above kvgpt, kvgpt above model.py, and no circles.

Imports inside functions count too, except where a test says otherwise.
"""

import ast
import graphlib
import sys

import pytest

from helpers import ROOT, ok, run

SCRIPTS = {"train", "sample", "bench", "export", "prepare", "hold_out", "draw"}
FOLDERS = ["decoding", "storage", "training"]  # each may import from those before it


def source_files():
    """Every .py file of the project but the tests, as {module name: path}."""
    files = {file.stem: file for folder in (ROOT, ROOT / "data", ROOT / "assets") for file in folder.glob("*.py")}
    for file in (ROOT / "kvgpt").rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


FILES = source_files()


def imported(tree):
    """The names that the nodes of an AST import: "a.b" for `import a.b`, "a.b.c" for `from a.b import c`."""
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(file):
    """The modules of the project that a file imports, anywhere in it."""
    found = set()
    for name in imported(ast.walk(ast.parse(file.read_text(encoding="utf-8")))):
        name = name.removeprefix("data.")
        parent = name.rpartition(".")[0]
        found |= {name if name in FILES else parent} & FILES.keys()
    return found


def at_module_level(file):
    """The names that a file imports when it is imported itself: all but those in functions."""

    def nodes(parent):
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield node
                yield from nodes(node)

    return set(imported(nodes(ast.parse(file.read_text(encoding="utf-8")))))


IMPORTS = {name: ours(file) for name, file in FILES.items()}


def test_every_file_has_its_place():
    """A module beside the scripts, or a folder of kvgpt, that the rules below do not know."""
    outside = {name for name in FILES if not name.startswith("kvgpt")}
    assert outside == SCRIPTS | {"model"}
    folders = {name.split(".")[1] for name in FILES if name.count(".") == 2}
    assert folders == set(FOLDERS)
    assert {name for name in FILES if name.count(".") == 1} == {
        f"kvgpt.{x}" for x in ("cli", "guard", "baselines", *FOLDERS)
    }
    packages = {name for name, file in FILES.items() if file.name == "__init__.py"}
    assert all(not IMPORTS[name] for name in packages), "an import of a module imports its packages too"
    assert sum(map(len, IMPORTS.values())) > 50  # the parser of this file sees imports


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_scripts_never_import_each_other(script):
    """Code shared by two scripts that stays in one of them."""
    assert not IMPORTS[script] & SCRIPTS


def test_kvgpt_never_imports_a_script():
    """A package that cannot be used, or tested, without the scripts above it."""
    assert {name: found & SCRIPTS for name, found in IMPORTS.items() if name not in SCRIPTS and found & SCRIPTS} == {}


def test_the_model_needs_only_the_sampler_and_the_threads():
    """A network that cannot be read without the rest of the kit."""
    assert IMPORTS["model"] == {"kvgpt.decoding.sampling", "kvgpt.decoding.threads"}


def test_no_module_imports_itself_by_way_of_others():
    """A circle, which works or fails with the order of imports."""
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folders_of_kvgpt_build_on_each_other_in_one_order(folder):
    """Decoding that needs files, files that need training, or a folder that needs what stands beside the folders."""
    allowed = {"model", "kvgpt.cli"}
    for name, found in IMPORTS.items():
        if name.startswith(f"kvgpt.{folder}."):
            below = tuple(f"kvgpt.{each}." for each in FOLDERS[: FOLDERS.index(folder) + 1])
            assert {each for each in found if not each.startswith(below)} <= allowed, name


def test_the_command_line_and_the_files_start_without_torch():
    """A --help, or a prepare.py, that takes seconds because of an import that it does not need."""
    for name in ("kvgpt.guard", "kvgpt.cli", "kvgpt.storage.files"):
        roots = {each.split(".")[0] for each in at_module_level(FILES[name])}
        assert roots <= {"kvgpt", *sys.stdlib_module_names}, name
    assert not IMPORTS["kvgpt.guard"] and IMPORTS["kvgpt.cli"] == {"kvgpt.guard"}
    code = "import sys; sys.path.insert(0, 'data'); import prepare; print('torch' in sys.modules)"
    assert ok(run("-c", code)).stdout == "False\n"


def test_the_oracles_share_no_code_with_the_kit():
    """A mistake that the tests cannot see because they make it too."""
    roots = {name.split(".")[0] for name in imported(ast.walk(ast.parse((ROOT / "tests" / "oracles.py").read_text())))}
    assert roots == {"math", "torch"}
