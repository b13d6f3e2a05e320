"""Who imports whom: of the four files, three import model.py, and none needs extras to be there."""

import ast

from helpers import ROOT, imported_names

FILES = {"model": "model.py", "train": "train.py", "sample": "sample.py", "prepare": "data/prepare.py"}
PROJECT = {*FILES, "draw", "extras", "check_cache"}
TREES = {name: ast.parse((ROOT / file).read_text(encoding="utf-8")) for name, file in FILES.items()}


def top(tree):
    """The nodes at the top of a file, and those that it tries there."""
    return [inner for node in tree.body for inner in (node.body if isinstance(node, ast.Try) else [node])]


def ours(nodes):
    """The files and packages of the project that these nodes import."""
    return {name.partition(".")[0] for name in imported_names(nodes)} & PROJECT


def doors(name):
    """The modules of extras that a file opens by name, as in extras("decode.engine", ...)."""
    calls = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if getattr(call.func, "id", None) == "extras"}


def test_the_four_files_import_model_py_and_extras_alone():
    """sample.py and prepare.py need extras only for a flag or a file. test_four_files.py runs all without it."""
    at_top = {"model": set(), "train": {"model"}, "sample": {"model"}, "prepare": set()}
    assert {name: ours(top(tree)) for name, tree in TREES.items()} == at_top
    assert {name: ours(ast.walk(tree)) for name, tree in TREES.items()} == at_top | {"prepare": {"extras"}}
    assert doors("model") == set()
    both = {"cli", "formats.checkpoint"}
    assert doors("sample") == both | {"formats.onnx", "decode.engine", "decode.explain", "decode.quantize"}
    assert doors("train") == both | {"targets", "formats.nanogpt", "formats.tokenizer"}
