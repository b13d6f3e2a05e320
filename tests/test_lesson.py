"""The lesson: three files that write the same text, the diff that its README shows, and the exercise that judges it."""

import ast
import contextlib
import difflib
import io
import re
import shutil
import sys
import types

import pytest
import torch

from check_cache import check_cache, copies_of
from helpers import ROOT, SAMPLE, here, ok, run

LESSON = ROOT / "lesson"
RECOMPUTE, CACHE, PREALLOCATED = FILES = [
    LESSON / name for name in ("1_recompute.py", "2_cache.py", "3_preallocated.py")
]
README = (LESSON / "README.md").read_text(encoding="utf-8")
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def edited(file, *edits):
    """Return the source of a file with edits, (old, new) each."""
    source = file.read_text(encoding="utf-8")
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def load(file, *edits):
    """Return an edited file as a module."""
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    exec(compile(edited(file, *edits), str(file), "exec"), module.__dict__)
    return module


def block(language):
    """Return the only block in this language of lesson/README.md."""
    (content,) = re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return content


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


def assert_equal(found):
    (text, weights), (text_2, weights_2), (text_3, weights_3) = found
    assert len(text) > 200
    assert text == text_2 == text_3
    assert weights.keys() == weights_2.keys()
    assert all(torch.equal(weights[name], weights_2[name]) for name in weights)
    for name, weight in stacked(weights).items():
        torch.testing.assert_close(weights_3[name], weight)


def stacked(weights):
    """Return the weights of separate heads as those of one matrix: query, key and value of head 0, then of head 1."""
    weights = dict(weights)
    for layer in range(2):
        start = f"blocks.{layer}.attention"
        names = [f"{start}.heads.{head}.{part}.weight" for head in range(4) for part in ("query", "key", "value")]
        weights[f"{start}.qkv.weight"] = torch.cat([weights.pop(name) for name in names])
    return weights


@pytest.mark.slow
def test_the_three_texts_are_equal(tmp_path):
    """After a sixteenth of the training."""
    assert_equal(outputs(tmp_path, ("= 800, 4, 6e-3", "= 50, 4, 6e-3")))


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


# -- check_cache judges ------------------------------------------------------------------------------------------------


def exercise(mine=CACHE, *edits):
    """Return the report of the exercise in the README, for another file than 2_cache.py."""
    modules = {"lesson.1_recompute": load(RECOMPUTE), "lesson.2_cache": load(mine, *edits)}
    script = block("python").replace("import_module(", "modules.get(")
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        names = {"modules": modules}
        exec(script, names)
    return names["report"]


def test_the_exercise_calls_the_cache_right():
    report = exercise()
    report.assert_correct()
    right = {result.scenario for result in report.results if result.status == "correct"}
    assert {"decode", "chunks of mixed sizes", "two caches at once", "batches of 1 to 8 rows", "generate"} <= right


POSITION_0 = ("pos + torch.arange(idx.size(1))", "torch.arange(idx.size(1))")
VALIDATION = ("        if pos == 0:  # a new text\n            self.clear_kv_cache()\n", "")
NO_MASK = (".tril(k.size(1) - T)", ".tril(k.size(1) - T if self.training else k.size(1))")
OWN_SLOT = (".tril(k.size(1) - T)", ".tril()")
NO_POS = ("            pos = idx.size(1)\n", "            pos += 1\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit, scenario, cause",
    [
        (POSITION_0, "decode", "wrong on arrival: its position is 0"),
        (VALIDATION, "decode", r"at 2_cache\.py:[0-9]+: .* The cache was not empty at position 0"),
        (NO_MASK, "decode", "sees slot 1, but should not"),
        (OWN_SLOT, "decode", "does not see slot 1, but should"),
        (NO_POS, "generate", "the second call of generate"),
    ],
    ids=["position 0", "validation", "no mask", "mask without an offset", "pos of the loop"],
)
def test_the_exercise_calls_a_trap_wrong(edit, scenario, cause):
    results = {result.scenario: result for result in exercise(CACHE, edit).results}
    assert results[scenario].status == "wrong" and re.search(cause, results[scenario].why)


def preallocated(*edits):
    torch.manual_seed(0)
    model = load(PREALLOCATED, *edits).GPT(50).eval()
    return check_cache(
        full=model,  # at position 0 it takes a new buffer
        new=copies_of(model),
        step=lambda ids, cache, pos: cache(ids, int(pos[0, 0])),
        context=200,
        scenarios=["decode", "chunks", "two caches", "batches"],
    )


def test_the_preallocated_cache_is_right():
    preallocated().assert_correct()


def test_one_slot_too_far_is_wrong():
    report = preallocated(("pos : pos + T, :] = qkv", "pos + (pos > 0) : pos + (pos > 0) + T, :] = qkv"))
    assert report.exit_code == 1, report


def test_all_heads_at_once_compute_what_separate_heads_compute():
    torch.manual_seed(0)
    separate, together = load(RECOMPUTE).GPT(50), load(PREALLOCATED).GPT(50)
    together.load_state_dict(stacked(separate.state_dict()))
    ids = torch.randint(50, (3, 40))
    for mode in (True, False):
        torch.testing.assert_close(together.train(mode)(ids), separate(ids))


def beyond_block_size(step):
    """Return what check_cache says of texts of 32 tokens, with a context of 16 that slides: the model reads the newest.

    step(cache, ids, pos)  the logits of new tokens at positions from pos on
    """
    torch.manual_seed(0)
    shorter = ("block_size, n_layer, n_head, n_embd = 200", "block_size, n_layer, n_head, n_embd = 16")
    right, mine = load(RECOMPUTE, shorter).GPT(50), load(CACHE, shorter).GPT(50)
    mine.load_state_dict(right.state_dict(keep_vars=True), assign=True)

    def full(ids):
        later = [right(ids[:, end - 16 : end])[:, -1:] for end in range(17, ids.size(1) + 1)]
        return torch.cat((right(ids[:, :16]), *later), dim=1)

    def token_by_token(ids, cache, pos):
        start = int(pos[0, 0])
        return torch.cat([step(cache, ids[:, i : i + 1], start + i) for i in range(ids.size(1))], dim=1)

    return check_cache(full=full, new=copies_of(mine), step=token_by_token, length=32, scenarios=["decode"])


@pytest.mark.slow
def test_dropping_the_oldest_slot_at_block_size_is_wrong():
    def drop(cache, ids, pos):
        if pos >= 16:
            for module in cache.modules():
                if hasattr(module, "key_cache"):
                    module.key_cache, module.value_cache = module.key_cache[:, 1:], module.value_cache[:, 1:]
        return cache(ids, min(pos, 15))

    report = beyond_block_size(drop)
    assert report.exit_code == 1, report
    assert min(result.position for result in report.results if result.status == "wrong") == 16


def test_reading_the_newest_tokens_again_at_block_size_is_right():
    def read_again(cache, ids, pos):
        seen = ids if pos == 0 else torch.cat((cache.seen, ids), dim=1)
        cache.seen = seen
        return cache(ids, pos) if pos < 16 else cache(seen[:, -16:])[:, -1:]

    beyond_block_size(read_again).assert_correct()
