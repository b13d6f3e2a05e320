"""colab.ipynb, as it lies in the repository and as it runs, headless and shortened."""

import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from helpers import ROOT

NOTEBOOK = ROOT / "colab.ipynb"


def test_it_is_stripped_wants_a_gpu_and_names_one_repository():
    """Outputs of somebody's run, a session without a GPU, a badge of another repository, or a torch beside Colab's."""
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert notebook.metadata["accelerator"] == "GPU"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    repository = re.search(r'^REPO = "https://github.com/(.*?)"', code[0].source).group(1)
    badge = f"colab.research.google.com/github/{repository}/blob/main/colab.ipynb"
    assert badge in notebook.cells[0].source and badge in (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"pip install.*\btorch\b", "".join(cell.source for cell in code))  # Colab has its own


@pytest.mark.slow
def test_every_cell_runs(tmp_path, monkeypatch):
    """A cell that fails, draws nothing, shows other shapes than the cache has, or fills the page with progress."""
    folder = tmp_path / "kit"
    skip = shutil.ignore_patterns(".*", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    shutil.copytree(ROOT, folder, ignore=skip)
    monkeypatch.setenv("KIT_QUICK", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(folder / "colab.ipynb", 4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 3
    assert "equal: True" in text and "4 of 4 samples match" in text
    assert re.search(r"before: None\nprefill: \(1, 9, \d+\)\ndecode at 9: \(1, 10, \d+\)", text)
    assert "cleared: None" in text and "model.onnx: logits within" in text
    for cell in notebook.cells:  # a bar rewrites its line, and the notebook keeps every version of it
        said = "".join(output.text for output in cell.get("outputs", ()) if output.output_type == "stream")
        assert len(re.split(r"[\r\n]+", said)) < 60, cell.source
