"""The lesson: three files that write the same text, three with a smaller cache, and the diffs that its README shows."""

import ast
import difflib
import re
import shutil
import sys

import pytest
import torch

from helpers import ROOT, SAMPLE, here, imported_names, ok, run, same
from lesson_files import CACHE, FILES, INT8, MORE, PAGES, PREALLOCATED, README, RECOMPUTE, WINDOW, blocks, edited, load

each_file = pytest.mark.parametrize("file", [*FILES, *MORE], ids=lambda file: file.name)


# -- the files ---------------------------------------------------------------------------------------------------


@each_file
def test_it_needs_only_torch_and_fits_on_a_slide(file):
    source = file.read_text(encoding="utf-8")
    names = {name.partition(".")[0] for name in imported_names(ast.walk(ast.parse(source)))}
    assert names <= {"torch", *sys.stdlib_module_names}
    assert max(map(len, source.splitlines())) <= 100 and len(source.splitlines()) <= 160


def run_copy(folder, file, *edits, end=""):
    """Run an edited file of the lesson in a folder. Returns what it prints."""
    for name in ("lesson", "data"):
        (folder / name).mkdir(exist_ok=True)
    shutil.copy(SAMPLE, folder / "data")
    script = folder / "lesson" / file.name
    script.write_text(edited(file, *edits) + end, encoding="utf-8")
    return ok(run(script, cwd=folder, timeout=800, env={"OMP_NUM_THREADS": "1"})).stdout


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
    """After a fortieth of the training."""
    texts, weights = [], []
    for file in FILES:
        end = "    torch.save(model.state_dict(), 'weights.pt')\n"
        said = run_copy(tmp_path, file, ("= 800, 4, 6e-3", "= 20, 4, 6e-3"), end=end)
        text, seconds = said.rsplit("\n200 characters in ", 1)
        assert re.fullmatch(r"[\d.]+ seconds\n", seconds)
        texts.append(text)
        weights.append(torch.load(tmp_path / "weights.pt"))
    assert len(texts[0]) > 200 and texts == texts[:1] * 3
    assert same(weights[0], weights[1])
    for name, weight in stacked(weights[0]).items():
        torch.testing.assert_close(weights[2][name], weight)


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
    for file in [*FILES, *MORE]:
        lesson = load(file)
        lesson.__file__ = str(tmp_path / "lesson" / file.name)
        assert text.startswith(lesson.read_text()) and len(lesson.read_text()) == int(0.9 * len(text))


def new_lines(before, after):
    """Return a unified diff of two files as lines, without their names."""
    before, after = (file.read_text(encoding="utf-8").splitlines() for file in (before, after))
    return [line.rstrip() for line in difflib.unified_diff(before, after, n=1)][2:]


def test_the_diffs_in_the_readmes_are_the_diffs():
    pairs = [(RECOMPUTE, CACHE), *((PREALLOCATED, file) for file in MORE)]
    for shown, pair, count in zip(blocks("diff"), pairs, (18, 22, 25, 17), strict=True):
        lines = new_lines(*pair)
        assert shown.splitlines() == lines
        assert len([line for line in lines if line.startswith("+")]) == count  # as the README says
    (excerpt,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    hunks = re.findall(r"^@@.*?(?=^@@|\Z)", excerpt, re.M | re.S)
    assert len(hunks) == 3 and all(hunk.strip("\n") in blocks("diff")[0] for hunk in hunks)


# -- the three with a smaller cache ------------------------------------------------------------------------------------


def random_gpt(file, *edits, seed=0):
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)  # as in the files
    try:
        return load(file, *edits).GPT(50).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def prompts(longest):
    """Eight prompts of random lengths."""
    draw = torch.Generator().manual_seed(0)
    for seed, length in enumerate(torch.randint(2, longest, (8,), generator=draw).tolist()):
        yield seed, torch.randint(50, (1, length), generator=draw)


@pytest.mark.slow
def test_a_ring_gives_the_text_of_the_same_window_without_a_cache():
    """In training mode the model keeps nothing. Prompts are longer than the ring, and the text than block_size."""
    model = random_gpt(WINDOW)
    for seed, idx in prompts(90):
        torch.manual_seed(seed)
        cached = model.generate(idx, 230)
        torch.manual_seed(seed)
        with torch.no_grad():
            for _ in range(230):
                probs = model.train()(idx)[:, -1].softmax(dim=-1)
                idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        assert torch.equal(model.eval() and cached, idx)


@pytest.mark.slow
def test_texts_that_share_pages_are_what_each_is_alone():
    paged, alone = random_gpt(PAGES, ("16, 100", "16, 999")), random_gpt(PREALLOCATED)
    attention = paged.blocks[0].attention
    for seed, idx in prompts(60):
        T, texts = idx.size(1), []
        paged.generate(idx, 1)
        prompt, before = attention.table, attention.used
        for i in range(3):  # each from the pages of the prompt
            torch.manual_seed(seed + i)
            texts.append((paged.generate(idx, 40, T - 1, prompt), attention.table))
        for i, (text, table) in enumerate(texts):
            torch.manual_seed(seed + i)
            assert torch.equal(text, alone.generate(idx, 40))
            assert table[: (T - 1) // 16] == prompt[: (T - 1) // 16]  # full pages are not copied
        assert attention.used - before == 3 * (-(-(T + 39) // 16) - (T - 1) // 16)
        # none has written to a page of another: each can go on
        for i, (text, table) in enumerate(texts):
            torch.manual_seed(seed)
            more = paged.generate(text, 5, T + 39, table)
            torch.manual_seed(seed)
            assert torch.equal(more, alone.generate(text, 5)), i


@pytest.mark.parametrize("same", [20, 32])
def test_a_prompt_that_goes_on_differently_leaves_shared_pages_alone(same):
    """Its chunk begins in the middle of a page and reaches into the next, or begins with a page."""
    paged, alone = random_gpt(PAGES), random_gpt(PREALLOCATED)
    first = torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(0))
    other = first.where(torch.arange(40) < same, (first + 1) % 50)
    paged.generate(first, 5)
    table = paged.blocks[0].attention.table
    pages = [block.attention.pool[:, :, table].clone() for block in paged.blocks]
    torch.manual_seed(1)
    text = paged.generate(other, 5, same, table)
    torch.manual_seed(1)
    assert torch.equal(text, alone.generate(other, 5))
    for block, before in zip(paged.blocks, pages):
        assert torch.equal(block.attention.pool[:, :, table], before)


def test_int8_is_off_by_rounding_only():
    """The largest error of a number is half a step of its vector."""
    rounded, exact = random_gpt(INT8), random_gpt(PREALLOCATED)
    ids = torch.randint(50, (3, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = rounded(ids)
        assert 0 < (logits - exact(ids)).abs().max() < 0.1
        assert torch.equal(rounded.train()(ids), exact(ids))
    first = rounded.blocks[0].attention
    there = exact.blocks[0].attention.kv_cache[..., :60, :]
    scale = first.scale[..., :60, :]
    assert ((first.kv_cache[..., :60, :] * scale - there).abs() <= 0.501 * scale).all()
    assert first.kv_cache.dtype == torch.int8 and (first.kv_cache[..., :60, :].abs().amax(-1) == 127).all()


@pytest.mark.slow
def test_each_of_them_ends_with_its_time_and_its_memory(tmp_path):
    for file, last in zip(MORE, ("65,536 bytes", "58 pages", "64,000 bytes"), strict=True):
        lines = run_copy(tmp_path, file, ("= 800, 4, 6e-3", "= 5, 4, 6e-3")).splitlines()
        assert lines[-1].startswith(last) and f"{last.split()[0]} " in blocks("diff")[0] + README
        assert any(line.endswith(" seconds") for line in lines[-3:])
