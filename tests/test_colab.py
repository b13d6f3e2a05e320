"""colab.ipynb: the outputs that it holds, and a shortened run of its cells.

python tests/test_colab.py [FLAGS]    runs the notebook and stores its outputs in it; FLAGS are added to train.py's

The script needs tiny Shakespeare in data/, from data/prepare.py. It leaves data/ and out/ as they are.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_output

ROOT = Path(__file__).resolve().parent.parent  # this file also runs as a script, which finds no helpers
NOTEBOOK = ROOT / "colab.ipynb"
FIGURES = ["curves", "triangle", "rows", "attention", "loss"]  # ids of the cells that draw one


# -- running -----------------------------------------------------------------------------------------------------------


def copy_project(folder):
    """Copy the project to `folder`, without what a run has made."""
    made = shutil.ignore_patterns(".*", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    shutil.copytree(ROOT, folder, ignore=made)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(folder, train_flags="", own_text="", timeout=None):
    """Return the notebook, executed in `folder`, with the sources of its cells changed.

    train_flags  added to the commands that run train.py
    own_text     the value of OWN_TEXT
    timeout      in seconds per cell
    Raises nbclient's CellExecutionError for a cell or a command that fails.
    """
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in code_cells(notebook):
        cell.source = cell.source.replace('OWN_TEXT = ""', f"OWN_TEXT = {own_text!r}")
        cell.source = re.sub(r"(!python train\.py.*)", rf"\1 {train_flags}", cell.source)
        # IPython goes on after a command that has failed
        cell.source = re.sub(r"^( *)(!.*)", r"\1\2\n\1assert _exit_code == 0", cell.source, flags=re.MULTILINE)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources).execute()
    return notebook


def clean(outputs, folder):
    """Return the outputs without the path of `folder` and without progress bars, as one stream per name."""
    cleaned = []
    for output in outputs:
        if output.output_type == "stream" and cleaned and cleaned[-1].get("name") == output.name:
            cleaned[-1].text += output.text
        else:
            cleaned.append(new_output("stream", name=output.name, text=output.text) if "name" in output else output)
    for output in cleaned:
        if output.output_type == "stream":
            text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", output.text.replace("\r\n", "\n"))
            text = re.sub(r"[^\n]*\r", "", text)  # a bar rewrites its line
            text = re.sub(r"^ *\d+%\|[^\n\]]*\]?\n?", "", text, flags=re.MULTILINE)  # the last state of a bar
            output.text = text.replace(f"{folder}{os.sep}", "").replace(str(folder), ".")
    return cleaned


def store_outputs(train_flags):
    """Execute the notebook in a copy of the project with tiny Shakespeare. Write its outputs into the notebook."""
    sys.path[:0] = [str(ROOT), str(ROOT / "data")]
    from prepare import CORPUS_SHA256, CORPUS_URL

    meta = json.loads((ROOT / "data" / "meta.json").read_text(encoding="utf-8"))
    if meta["sha256"]["text"] != CORPUS_SHA256:
        sys.exit("data/ does not hold tiny Shakespeare: run python data/prepare.py first")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "kit"
        copy_project(folder)
        for name in ("train.bin", "val.bin"):
            shutil.copy(ROOT / "data" / name, folder / "data")
        (folder / "data" / "meta.json").write_text(json.dumps(meta | {"source": CORPUS_URL}), encoding="utf-8")
        executed = execute(folder, train_flags)
        notebook = nbformat.read(NOTEBOOK, 4)
        for cell, done in zip(code_cells(notebook), code_cells(executed)):
            cell.outputs, cell.execution_count = clean(done.outputs, folder), done.execution_count
    nbformat.write(notebook, NOTEBOOK)


# -- what the notebook holds -------------------------------------------------------------------------------------------


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def assert_true_outputs(notebook):
    """The cache changes no text and no old row, it saves the work that it should, and every figure is drawn."""
    cells = code_cells(notebook)
    drawing = [cell.id for cell in cells for output in cell.outputs if "image/png" in output.get("data", ())]
    assert drawing == FIGURES
    text = {cell.id: printed(cell) for cell in cells}
    context, prompt = int(re.search(r"context of (\d+)", text["model"]).group(1)), len("O Romeo, ")
    steps = context - prompt
    without = sum(range(prompt, context))  # a step reads all characters before the new one
    assert f"without the cache: {without:,} positions for {steps} new characters" in text["triangle"]
    assert f"with the cache: {context - 1} positions for {steps} new characters" in text["triangle"]
    shapes = r"empty: None\nprefill of positions 0 to 8: \(1, 9, \d+\)\ndecode of position 9: \(1, 10, \d+\)\n"
    assert re.match(shapes, text["head"])
    assert "equal to the last bit: 24 of 24 steps" in text["check"] and "(allclose): True" in text["check"]
    assert "equal: True" in text["equal"] and "1 of 1 samples match" in text["equal"]
    assert "training preset" in text["train"] and "best val loss" in text["train"]
    assert text["trained"].startswith("O Romeo, ")
    assert "model.onnx: logits within" in text["export"]


def test_its_outputs_are_those_of_one_run_without_errors():
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert_true_outputs(notebook)
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    assert not re.search(r"\w(Warning|Error)\b|WARNING|Traceback|\r|\x1b|\d%\|", text)
    assert not re.search(r"(^|[\s\"'=(])(/\w|~/|[A-Z]:\\|file:)", text)  # a path of somebody's machine
    assert NOTEBOOK.stat().st_size < 1_500_000  # a larger one is not shown


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    folder = tmp_path.resolve() / "kit"
    copy_project(folder)
    shorter = "--preset lecture --max_iters 100 --eval_interval 50"
    notebook = execute(folder, shorter, own_text="data/sample.txt", timeout=300)
    for cell in code_cells(notebook):
        cell.outputs = clean(cell.outputs, folder)
    assert_true_outputs(notebook)
    assert (folder / "out" / "own" / "ckpt.pt").exists()


if __name__ == "__main__":
    store_outputs(" ".join(sys.argv[1:]))
