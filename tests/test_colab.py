"""colab.ipynb: the outputs that it holds, and a shortened run of its cells.

python tests/test_colab.py [FLAGS]    runs the notebook and stores its outputs in it; FLAGS are added to train.py's

The script needs tiny Shakespeare in data/, from data/prepare.py, and works on a copy of it.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

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
    """Return the notebook, executed in `folder`, whose path and progress bars are not in its outputs.

    A cell or a command that fails raises CellExecutionError.

    train_flags  added to the commands that run train.py
    own_text     the value of OWN_TEXT
    timeout      in seconds per cell
    """
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in code_cells(notebook):
        cell.source = cell.source.replace('OWN_TEXT = ""', f"OWN_TEXT = {own_text!r}")
        cell.source = re.sub(r"(!python train\.py.*)", rf"\1 {train_flags}", cell.source)
        # IPython goes on after a command that has failed
        cell.source = re.sub(r"^( *)(!.*)", r"\1\2\n\1assert _exit_code == 0", cell.source, flags=re.MULTILINE)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=where, coalesce_streams=True).execute()
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                text = re.sub(r"^ *\d+%\|.*\n", "", output.text, flags=re.MULTILINE)  # the last state of a progress bar
                output.text = text.replace("\r\n", "\n").replace(f"{folder}{os.sep}", "").replace(str(folder), ".")
    return notebook


def store_outputs(train_flags):
    """Execute the notebook in a copy of the project, and write its outputs into the notebook."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "kit"
        copy_project(folder)
        shutil.copytree(ROOT / "data", folder / "data", dirs_exist_ok=True)
        executed = execute(folder, train_flags)
        notebook = nbformat.read(NOTEBOOK, 4)
        for cell, done in zip(code_cells(notebook), code_cells(executed)):
            cell.outputs, cell.execution_count = done.outputs, done.execution_count
    nbformat.write(notebook, NOTEBOOK)


# -- what the notebook holds -------------------------------------------------------------------------------------------


def assert_true_outputs(notebook):
    """The cache changes no text and no old row, it saves the work that it should, and every figure is drawn."""
    cells = code_cells(notebook)
    drawing = [cell.id for cell in cells for output in cell.outputs if "image/png" in output.get("data", ())]
    assert drawing == FIGURES
    text = {cell.id: "".join(output.get("text", "") for output in cell.outputs) for cell in cells}
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
    text = "".join(output.get("text", "") for output in outputs)
    assert not re.search(r"Warning|WARNING|Traceback|\d%\||(^|[\s\"'=(])(/\w|~/|[A-Z]:\\)", text)  # nor a local path


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    folder = tmp_path.resolve() / "kit"
    copy_project(folder)
    shorter = "--preset lecture --max_iters 100 --eval_interval 50"
    notebook = execute(folder, shorter, own_text="data/sample.txt", timeout=300)
    assert_true_outputs(notebook)
    assert (folder / "out" / "own" / "ckpt.pt").exists()


if __name__ == "__main__":
    store_outputs(" ".join(sys.argv[1:]))
