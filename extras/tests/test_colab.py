"""docs/colab.ipynb: its saved outputs are what its cells print today, and its solution is right.

python extras/tests/test_colab.py    runs the notebook and saves its outputs in it

The script needs tiny Shakespeare in data/, from data/prepare.py, and works on a copy of it.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]  # this file also runs as a script, which finds no helpers
NOTEBOOK = ROOT / "docs" / "colab.ipynb"
FIGURES = ["triangle", "rows", "attention", "speed", "steps", "loss"]  # ids of the cells that draw one
# ids of the cells that measure no time, and so print the same every time
PLAIN = ["setup", "model", "guess", "count", "triangle", "head", "rows", "attention", "numpy", "check", "broken"]
PLAIN += ["verify"]
TIMED = ["speed", "steps", "compiled"]

pytestmark = pytest.mark.slow  # kernels and training runs

# -- running -----------------------------------------------------------------------------------------------------------


def copy_project(folder):
    """Copy the project to `folder`, without what a run has made."""
    made = shutil.ignore_patterns(".*", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    shutil.copytree(ROOT, folder, ignore=made)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook):
    """Return {id: text} of all code cells in an executed notebook."""
    return {cell.id: "".join(output.get("text", "") for output in cell.outputs) for cell in code_cells(notebook)}


def execute(folder, answers=(), only=None, timeout=None):
    """Return the notebook, executed in `folder`, whose path and progress bars are not in its outputs.

    In a copy of the project that is done in docs/, where Jupyter starts it.

    A command that fails raises CellExecutionError, as a cell does.

    answers  pairs of a text in the cells and what a reader writes in its place
    only     ids of the cells to run; None: all
    timeout  in seconds per cell
    """
    notebook = nbformat.read(NOTEBOOK, 4)
    notebook.cells = [cell for cell in notebook.cells if only is None or cell.id in only]
    for before, after in answers:
        assert sum(before in cell.source for cell in code_cells(notebook)) == 1, before
        for cell in code_cells(notebook):
            cell.source = cell.source.replace(before, after)
    for cell in code_cells(notebook):  # IPython continues after a failed command
        cell.source = re.sub(r"^(!.*)", r"\1\nassert _exit_code == 0", cell.source, flags=re.MULTILINE)
    docs = folder / "docs"
    where = {"metadata": {"path": str(docs if docs.exists() else folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=where, coalesce_streams=True).execute()
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                text = re.sub(r"^ *\d+%\|.*\n", "", output.text, flags=re.MULTILINE)  # the last state of a progress bar
                output.text = text.replace("\r\n", "\n").replace(f"{folder}{os.sep}", "").replace(str(folder), ".")
    return notebook


def store_outputs():
    """Execute the notebook in a copy of the project, and write its outputs into the notebook."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "kit"
        copy_project(folder)
        shutil.copytree(ROOT / "data", folder / "data", dirs_exist_ok=True)
        executed = execute(folder)
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell, done in zip(code_cells(notebook), code_cells(executed)):
        cell.outputs = done.outputs
        cell.execution_count = done.execution_count
    nbformat.write(notebook, NOTEBOOK)


# -- the stored outputs ------------------------------------------------------------------------------------------------

DECIMAL = r"\d+\.\d+"


def assert_same_print(ours, stored):
    """The texts are equal, apart from the last digits of decimals, which may round differently elsewhere."""
    assert re.sub(DECIMAL, "#", ours) == re.sub(DECIMAL, "#", stored)
    assert list(map(float, re.findall(DECIMAL, ours))) == pytest.approx(
        list(map(float, re.findall(DECIMAL, stored))), abs=1e-3
    )


def without_numbers(text):
    """The text with "#" for each number and the spaces that align it."""
    return re.sub(r" *[\d.,]*\d", "#", text)


def test_its_outputs_are_those_of_one_run_without_errors():
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    on_stderr = [output.text for output in outputs if output.get("name") == "stderr"]
    assert all(text.startswith("--compile: compiled the C backend") for text in on_stderr)
    text = "".join(printed(notebook).values())
    assert not re.search(r"Warning|WARNING|Traceback|\d%\||(^|[\s\"'=(])(/\w|~/|[A-Z]:\\)", text)  # nor a local path
    drawing = [cell.id for cell in cells for output in cell.outputs if "image/png" in output.get("data", ())]
    assert drawing == FIGURES
    assert NOTEBOOK.stat().st_size < 1e6


# -- the first cell, without the code around it ------------------------------------------------------------------------


def test_without_the_code_every_cell_says_so_in_one_line(tmp_path):
    notebook = nbformat.read(NOTEBOOK, 4)
    notebook.cells = [cell for cell in notebook.cells if cell.id in ("setup", "model", "head", "train")]
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True, resources=where).execute()
    first, *rest = (cell.outputs for cell in notebook.cells[:-1])
    assert first[-1].traceback[0].startswith("Only the notebook is here: upload a zip file")
    for outputs in rest:
        assert [output.get("text", "")[:34] for output in outputs] == ["The code of kvGPT is not here yet:"]


@pytest.mark.parametrize(
    ["source", "words"],
    [
        ("file:///nowhere", "git cannot clone file:///nowhere: "),
        ("my/kvgpt", "SOURCE is my/kvgpt, a folder without model.py. An address begins with https://"),
        ("", "kit.zip cannot be unpacked (kit.zip is not a zip file): upload it again."),
    ],
)
def test_a_source_that_is_not_the_code_is_one_line(source, words, tmp_path):
    if not source:
        (tmp_path / "kit.zip").write_bytes(b"PK")
    with pytest.raises(Exception) as raised:
        execute(tmp_path, [('SOURCE = ""', f"SOURCE = {source!r}")], only=["setup"], timeout=100)
    error = raised.value.traceback.rpartition("------------------")[2].strip()
    assert error.startswith(words)


def test_a_command_after_a_restart_names_what_is_missing(tmp_path):
    """IPython would pass the words "{out_dir}" on to the script."""
    for cell, name in (("train", "data_dir"), ("trained", "out_dir")):
        with pytest.raises(Exception, match=f"name '{name}' is not defined"):
            execute(tmp_path, only=[cell], timeout=100)


@pytest.mark.parametrize("way", ["zip", "address"])
def test_the_first_cell_fetches_the_code_and_an_upload_is_found(way, tmp_path):
    copy_project(tmp_path / "origin" / "kit")
    (tmp_path / "colab").mkdir()
    shutil.copy(ROOT / "data" / "sample.txt", tmp_path / "colab" / "mine.txt")
    answers = [('TEXT_FILE = ""', 'TEXT_FILE = "mine.txt"')]
    if way == "zip":  # with a folder in it, as hosts make them
        shutil.make_archive(tmp_path / "colab" / "kit", "zip", tmp_path / "origin")
    else:
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path / "origin" / "kit"]
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
            subprocess.run([*git, *command], check=True)
        answers.append(('SOURCE = ""', f"SOURCE = {(tmp_path / 'origin' / 'kit').as_uri()!r}"))
    text = printed(execute(tmp_path / "colab", answers, only=["setup", "model", "prepare"], timeout=100))
    assert text["model"] == printed(nbformat.read(NOTEBOOK, 4))["model"]
    assert "characters to learn from" in text["prepare"]


# -- the exercises -----------------------------------------------------------------------------------------------------

WRITE = "self.key_cache[pos], self.value_cache[pos] = k, v"
READ = "keys, values = self.key_cache[: pos + 1], self.value_cache[: pos + 1]"
MIX = "output = weights @ values"


def test_the_solution_has_the_answers_with_which_every_cell_runs():
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, 4).cells}
    solution = re.search(r"```python\n(.*?)```", cells["solution"], re.DOTALL).group(1)
    kept = [line for line in cells["numpy"].splitlines() if "..." not in line]
    assert [line for line in solution.splitlines() if line not in kept] == [f"        {x}" for x in (WRITE, READ, MIX)]


# -- the whole notebook ------------------------------------------------------------------------------------------------


def test_every_cell_runs_and_a_reader_can_answer(tmp_path):
    folder = tmp_path.resolve() / "kit"
    copy_project(folder)
    answers = [
        ("guess_without = 0", "guess_without = 31415"),
        ("guess_with = 0", "guess_with = 255"),
        ("...  # 1. keep", f"{WRITE}  # keep"),
        ("keys, values = ...  #", f"{READ}  #"),
        ("output = ...  #", f"{MIX}  #"),
        ("guess_speedup = 0", "guess_speedup = 100"),
        ('TEXT_FILE = ""', 'TEXT_FILE = "data/sample.txt"'),
        ("--eval_interval 400", "--preset lecture --max_iters 100 --eval_interval 50"),
    ]
    text = printed(execute(folder, answers, timeout=300))
    stored = printed(nbformat.read(NOTEBOOK, 4))
    for name in PLAIN:
        if name not in ("setup", "count", "check"):
            assert_same_print(text[name], stored[name])
    assert text["count"].count("Right.") == 2 and text["check"].startswith("Right: ")
    for name in TIMED:
        assert without_numbers(text[name]) == without_numbers(stored[name])
    assert "steps 0..100 of 512 characters" in text["train"] and "best val loss" in text["train"]
    assert "1 of 1 samples)" in text["trained"] and (folder / "out" / "own" / "ckpt.pt").exists()


if __name__ == "__main__":
    store_outputs()
