"""check_cache and kvGPT: our cache is correct, and the folder check_cache can be copied without the rest."""

import re
import shutil
import tomllib

import pytest
import torch

from check_cache import check_cache
from extras.decode.speculate import RaggedCache
from helpers import ROOT, ok, random_model, run
from model import GPTConfig, KVCache

FOLDER = ROOT / "check_cache"

# -- the cache of kvGPT ------------------------------------------------------------------------------------------------


def select_rows(cache, rows):
    """Make row i a copy of row rows[i]."""
    cache.key = [key[rows] for key in cache.key]
    cache.value = [value[rows] for value in cache.value]


def kvgpt(model):
    """Return the adapter of kvGPT's GPT, whose rows are all at the same position."""
    return dict(
        full=lambda ids: model(ids)[0],
        new=lambda rows, length: model.new_cache(rows),
        step=lambda ids, cache, pos: model(ids, pos=pos[0], cache=cache)[0],
        crop=lambda cache, length: setattr(cache, "length", length),
        reorder=lambda cache, rows: select_rows(cache, rows.tolist()),
        reset=lambda cache: setattr(cache, "length", 0),
        generate=lambda ids, count, use_cache: model.generate(ids, count, temperature=0, kv_cache=use_cache),
        context=model.config.block_size,
    )


@pytest.mark.parametrize("network", [dict(), dict(pos_emb="rope", n_kv_head=2, qk_norm=True, activation="swiglu")])
def test_the_cache_of_kvgpt_is_correct(network):
    model = random_model(GPTConfig(block_size=48, vocab_size=31, n_layer=2, n_head=4, n_embd=32, **network))
    report = check_cache(**kvgpt(model))
    report.assert_correct()
    said = {result.scenario: (result.status, result.why) for result in report.results}
    assert said["chunks of mixed sizes"] == said["reorder"] == said["generate"] == ("correct", None)
    assert said["left padding"] == ("not run", "the step takes no mask")


def test_projections_of_zeros_hide_nothing(monkeypatch):
    model = random_model(GPTConfig(block_size=48, vocab_size=31, n_layer=2, n_head=4, n_embd=32))
    model.zero_init()
    check_cache(**kvgpt(model), scenarios=["decode"]).assert_correct()
    update = KVCache.update
    monkeypatch.setattr(KVCache, "update", lambda *args: [x.flip(-1) for x in update(*args)])
    assert check_cache(**kvgpt(model), scenarios=["decode"]).exit_code == 1
    assert not model.transformer.h[0].attn.c_proj.weight.any()  # restored


def test_rows_of_different_lengths(monkeypatch):
    """A cache whose slot is the position, as with input_pos or start_pos: shorter rows are padded on the right."""
    model = random_model(GPTConfig(block_size=48, vocab_size=31, n_layer=2, n_head=4, n_embd=32))

    def step(ids, cache, pos, lengths):
        pos = pos[:, :1] + torch.arange(ids.size(1))  # rises over the padding, too
        cache.length = int(pos[:, 0].max())
        return model(ids, pos=pos, cache=cache)[0]

    def new(rows, length):
        plain = model.new_cache(rows)
        return RaggedCache(plain.key, plain.value)

    adapter = kvgpt(model) | dict(step=step, new=new, scenarios="different")
    check_cache(**adapter).assert_correct(require="rows of different lengths")
    mask = RaggedCache.mask
    monkeypatch.setattr(RaggedCache, "mask", lambda self, pos: mask(self, pos.amax(0, keepdim=True).expand_as(pos)))
    report = check_cache(**adapter)
    assert report.exit_code == 1 and "but should not" in report.results[0].why, report


# -- the folder --------------------------------------------------------------------------------------------------------


def test_what_the_folder_repeats_is_the_same():
    """Its license, and the versions that its tests need."""
    assert (FOLDER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    ours, its = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["dev"]
        for folder in (ROOT, FOLDER)
    )
    assert {*its} <= {*ours}


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Return a copy of the folder, alone, and a function that runs Python where the copy is installed."""
    skip = shutil.ignore_patterns(".*", "__pycache__")
    copy = shutil.copytree(FOLDER, tmp_path_factory.mktemp("empty") / "check_cache", ignore=skip)
    site, before = tmp_path_factory.mktemp("site"), {*copy.rglob("*")}
    ok(run("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", site, ".", cwd=copy))
    assert {*copy.rglob("*")} == before  # a build leaves nothing in the source
    return copy, lambda *args, cwd: run(*args, cwd=cwd, env={"PYTHONPATH": str(site)}, timeout=600)


@pytest.mark.slow
def test_the_folder_can_be_copied_and_needs_only_torch(copied, tmp_path):
    """The command check-cache checks the example of its README, and imports neither kvGPT nor transformers."""
    copy, python = copied
    page = (copy / "README.md").read_text(encoding="utf-8")
    mine = re.search(r"^```python mine.py\n([^`]*)^```", page, re.MULTILINE)[1]
    (tmp_path / "mine.py").write_text(mine, encoding="utf-8")
    entry = "from importlib.metadata import entry_points as all; (entry,) = all(name='check-cache'); entry.load()()"
    result = ok(python("-c", entry, "mine:Decoder", "--length", "24", cwd=tmp_path))
    assert "9 of 28 scenarios ran, 24 tokens per row" in result.stdout, result.stdout
    result = ok(python("-c", entry, "--version", cwd=tmp_path))
    assert result.stdout.startswith("check-cache ") and (copy / "py.typed").exists()
    loaded = python("-c", "import check_cache, sys; print(*sys.modules)", cwd=tmp_path).stdout.split()
    assert "torch" in loaded and not {"transformers", "extras", "model", "matplotlib"} & {*loaded}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["check_cache", "another-name"])
def test_its_own_tests_run_in_the_copy(name, copied, tmp_path):
    """They test the files of the folder, or the installed package if the folder has another name.

    All are imported, and a few run, because `make test` runs them all in this repository.
    """
    copy, python = copied
    folder = shutil.copytree(copy, tmp_path / name)
    some = "int8 or a_page_that or without_generate or readme_lists"
    result = python("-m", "pytest", "-q", "-m", "not slow", "-k", some, cwd=folder)
    assert result.returncode == 0, result.stdout
    assert re.search(r"^[0-9]+ passed, [0-9]+ deselected", result.stdout, re.MULTILINE), result.stdout  # none skipped
