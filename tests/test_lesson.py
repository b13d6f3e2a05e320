"""The lesson: three files that write the same text, and the diff that its README shows."""

import ast
import difflib
import re
import shutil
import sys

import pytest
import torch

from helpers import ROOT, SAMPLE, here, ok, run
from lesson_files import CACHE, FILES, PREALLOCATED, RECOMPUTE, block, edited, load

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


# -- the three files ---------------------------------------------------------------------------------------------------


@each_file
def test_it_needs_only_torch_and_fits_on_a_slide(file):
    source = file.read_text(encoding="utf-8")
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert {name.partition(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}
    assert max(map(len, source.splitlines())) <= 100


def outputs(folder, *edits):
    """Run the three files in a copy of the lesson. Returns the losses and the text of each, and its weights."""
    (folder / "lesson").mkdir()
    (folder / "data").mkdir()
    shutil.copy(SAMPLE, folder / "data")
    found = []
    for file in FILES:
        script = folder / "lesson" / file.name
        script.write_text(edited(file, *edits) + "    torch.save(model.state_dict(), 'weights.pt')\n", encoding="utf-8")
        said = ok(run(script, cwd=folder, timeout=800, env={"OMP_NUM_THREADS": "1"})).stdout
        text, seconds = said.rsplit("\n200 characters in ", 1)
        assert re.fullmatch(r"[\d.]+ seconds\n", seconds)
        found.append((text, torch.load(folder / "weights.pt")))
    return found


def stacked(weights):
    """Return the weights of separate heads as those of one matrix: query, key and value of head 0, then of head 1."""
    weights = dict(weights)
    for layer in range(2):
        start = f"blocks.{layer}.attention"
        names = [f"{start}.heads.{head}.{part}.weight" for head in range(4) for part in ("query", "key", "value")]
        weights[f"{start}.qkv.weight"] = torch.cat([weights.pop(name) for name in names])
    return weights


def assert_equal(found):
    (text, weights), (text_2, weights_2), (text_3, weights_3) = found
    assert len(text) > 200
    assert text == text_2 == text_3
    assert weights.keys() == weights_2.keys()
    assert all(torch.equal(weights[name], weights_2[name]) for name in weights)
    for name, weight in stacked(weights).items():
        torch.testing.assert_close(weights_3[name], weight)


@pytest.mark.slow
def test_the_three_texts_are_equal(tmp_path):
    """After a sixteenth of the training."""
    assert_equal(outputs(tmp_path, ("= 800, 4, 6e-3", "= 50, 4, 6e-3")))


def test_all_heads_at_once_compute_what_separate_heads_compute():
    torch.manual_seed(0)
    separate, together = load(RECOMPUTE).GPT(50), load(PREALLOCATED).GPT(50)
    together.load_state_dict(stacked(separate.state_dict()))
    ids = torch.randint(50, (3, 40))
    for mode in (True, False):
        torch.testing.assert_close(together.train(mode)(ids), separate(ids))


def test_it_reads_what_prepare_wrote(tmp_path):
    text = SAMPLE.read_text(encoding="utf-8")
    ok(here("--input", SAMPLE, "--data_dir", tmp_path / "data", script="data/prepare.py"))
    for file in FILES:
        lesson = load(file)
        lesson.__file__ = str(tmp_path / "lesson" / file.name)
        assert text.startswith(lesson.read_text()) and len(lesson.read_text()) == int(0.9 * len(text))


def test_the_diff_in_the_two_readmes_is_the_diff():
    before, after = (file.read_text(encoding="utf-8").splitlines() for file in (RECOMPUTE, CACHE))
    lines = [line.rstrip() for line in difflib.unified_diff(before, after, n=1)][2:]  # without the names of the files
    assert block("diff").splitlines() == lines
    (excerpt,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    hunks = re.findall(r"^@@.*?(?=^@@|\Z)", excerpt, re.M | re.S)
    assert len(hunks) == 3 and all(hunk.strip("\n") in block("diff") for hunk in hunks)
    assert len([line for line in lines if line.startswith("+")]) == 18  # as the README says
