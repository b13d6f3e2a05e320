"""check_cache: right caches pass, broken ones are found, and the cause is named."""

import copy
import json
import os
import re
import shutil

import pytest
import torch

from check_cache import check_cache
from check_cache.tests.bugs import BUGS, Attention, Cache, Decoder, tiny
from helpers import ROOT, random_model, run
from model import GPTConfig

# -- broken caches -----------------------------------------------------------------------------------------------------


def assert_found(name, patch, **options):
    function, cause, caches, _ = BUGS[name]
    report = check_cache(function(patch.setattr), caches=caches, **options)
    wrong = [result.why for result in report.results if result.status == "wrong"]
    assert report.exit_code == 1 and wrong, "not found"
    right = [all(words in why for words in cause.split("|")) for why in wrong]
    # once the cause is named, a way that raises has said enough
    assert any(right) and sum(named or "raises" in why for named, why in zip(right, wrong)) >= 0.8 * len(wrong), report


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_broken_cache_is_found_and_the_cause_is_named(name, monkeypatch):
    assert_found(name, monkeypatch, length=96)


@pytest.mark.parametrize(
    "name",
    "rope_begins_at_0_in_each_step table_begins_at_0_in_each_step int8 crop_leaves_one beams_not_reordered "
    "padding_is_seen".split(),
)
def test_six_broken_caches(name, monkeypatch):
    assert_found(name, monkeypatch, length=48)


# -- right caches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [dict(), dict(pos_emb="rope", n_kv_head=2, qk_norm=True, activation="swiglu")])
def test_the_cache_of_this_kit_is_right(network):
    model = random_model(GPTConfig(block_size=48, vocab_size=31, n_layer=2, n_head=4, n_embd=32, **network))
    report = check_cache(model)
    report.assert_right()
    assert "chunks of 3, " in str(report) and "left padding in chunks: this GPT takes no mask" in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_adapter_and_a_model_of_transformers(dtype):
    for model in (Decoder(window=12), tiny("llama")):
        report = check_cache(model, length=48, dtype=dtype, modes=["decode", "padding", "rollback", "repeat"])
        report.assert_right()


class Hidden:
    """An adapter that shows no module. So nothing can be run in float64, and its weights cannot be changed."""

    vocab_size = 61

    def __init__(self):
        model = Decoder().eval()
        self.full, self.step = (lambda *args: model.full(*args)), (lambda *args: model.step(*args))

    def new(self, kind, length):
        return Cache(length if kind == "static" else None)


class Inside(Decoder):
    """The model keeps its one cache itself, so a new cache is a copy of the model."""

    def new(self, kind, length):
        other = copy.deepcopy(self)
        other.held = super().new(kind, length)
        other.crop, other.reset = other.held.crop, other.held.reset
        return other

    def step(self, ids, cache, mask, pos):
        return cache(ids, cache.held, mask, pos)


class InDict(Hidden):
    """The cache is a dict, which has an update of its own, and the adapter a generate."""

    def __init__(self):
        super().__init__()
        step = self.step
        self.step = lambda ids, cache, mask, pos: step(ids, cache["cache"], mask, pos)

    def new(self, kind, length):
        return {"cache": super().new(kind, length)}

    def generate(self, prompt):
        raise AssertionError("nobody asked for it")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [Hidden, Inside, InDict])
def test_adapters_that_show_less_are_right_too(adapter, monkeypatch):
    report = check_cache(adapter(), length=48)
    report.assert_right()
    function, cause, _, _ = BUGS["rope_begins_at_0_in_each_step"]
    function(monkeypatch.setattr)
    report = check_cache(adapter(), length=48, modes=["decode"], caches=("own",))
    assert report and report.results[0].why.startswith(cause if adapter is Hidden else "cause unknown"), report


def test_the_model_is_afterwards_what_it_was():
    model = tiny("llama").train().to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_cache(model, length=24, modes=["one row"])
    assert model.training and model.config._attn_implementation == "sdpa"
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])


# -- what is not the cache's fault, or cannot be run -------------------------------------------------------------------


def test_logits_that_depend_on_later_tokens_are_not_the_fault_of_the_cache(monkeypatch):
    """As with dynamic NTK, whose angles depend on the length of the text."""
    rotate = Attention.rotate
    stretched = lambda self, x, pos: rotate(self, x, pos * 20 / max(20, x.size(2)))  # noqa: E731
    monkeypatch.setattr(Attention, "rotate", stretched)
    with pytest.warns(UserWarning, match="nothing could be checked"):
        report = check_cache(Decoder(), length=48)
    assert report.exit_code == 2
    assert "NOT THE CACHE'S FAULT" in str(report) and "when later tokens are left out, from position" in str(report)


def test_padding_that_changes_logits_without_a_cache_is_not_its_fault(monkeypatch):
    import transformers

    forward = transformers.GPT2Model.forward
    broken = lambda self, *args, position_ids=None, **kwargs: forward(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(transformers.GPT2Model, "forward", broken)
    report = check_cache(tiny("gpt2"), length=48, modes=["decode", "padding"], caches=("own",))
    assert not report and "padding in chunks: not the cache's fault: padding changes logits without" in str(report)


def test_a_wrong_argument_is_named():
    with pytest.raises(TypeError, match="Linear is no causal language model"):
        check_cache(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"length=500.*the context, 128"):
        check_cache(Decoder(), length=500)
    with pytest.raises(ValueError, match=r"modes=\['beams'\]: the ways are decode, "):
        check_cache(Decoder(), modes=["beams"])


# -- the folder and the command ---------------------------------------------------------------------------------------


SUMS = """
import torch

class Sums(torch.nn.Module):  # the cache is one vector per row: the sum of all embeddings so far
    vocab_size = 9

    def __init__(self):
        super().__init__()
        self.wte, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9)

    def full(self, ids):
        return self.step(ids, 0, None, None)[0]

    def new(self, kind, length):
        if kind == "static":
            raise NotImplementedError("it is one")
        return torch.zeros(1, 1, 8)

    def step(self, ids, cache, mask, pos):
        if mask is not None and not mask.all():
            raise NotImplementedError("no padding")
        sums = cache + self.wte(ids).cumsum(1)
        return self.head(sums.tanh()), sums[:, -1:]
"""


def test_the_folder_can_be_copied_and_needs_only_torch(tmp_path):
    """And it takes a cache that a step makes anew, in a process that knows neither this kit nor transformers."""
    shutil.copytree(ROOT / "check_cache", tmp_path / "check_cache", ignore=shutil.ignore_patterns("tests"))
    (tmp_path / "mine.py").write_text(SUMS, encoding="utf-8")
    result = run("-m", "check_cache", "mine:Sums", "--length", "24", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)
    said = {(r["way"], r["cache"]): (r["status"], r["why"]) for r in content["results"]}
    assert content["exit_code"] == 0 and said["prefix used twice", "own"] == ("right", None)
    assert said["left padding", "own"] == ("not run", "no padding")
    assert said["reorder", "own"] == ("not run", "the cache has no reorder_cache")
    assert said["every way", "static"] == ("not run", "it is one")
    loaded = run("-c", "import check_cache, sys; print(*sys.modules)", cwd=tmp_path).stdout.split()
    assert "torch" in loaded and not {"transformers", "kvgpt", "model", "matplotlib"} & {*loaded}


@pytest.mark.slow
def test_the_command_says_right_wrong_or_cannot_run(tmp_path):
    command = ["-m", "check_cache"]
    tiny("llama").save_pretrained(tmp_path / "llama")
    flags = ["--length", "32", "--modes", "decode", "reorder"]
    picture = tmp_path / "drift.png"
    right = run(*command, tmp_path / "llama", *flags, "--plot", picture)
    assert right.returncode == 0 and "WRONG" not in right.stdout and picture.stat().st_size > 1000, right.stderr
    (tmp_path / "mine.py").write_text(
        "from check_cache.tests import bugs\n\ndef broken():\n    bugs.Cache.reorder_cache = lambda self, rows: None\n"
        "    return bugs.Decoder()\n",
        encoding="utf-8",
    )
    env = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, tmp_path)))}
    wrong = run(*command, "mine:broken", *flags, env=env)
    assert wrong.returncode == 1 and "WRONG    reorder, own cache: logits off by" in wrong.stdout, wrong.stderr
    assert "that is not that of row 0, position 0, but of row 2, position 0" not in wrong.stdout.split("reorder")[0]
    for model, words in ((tmp_path / "nothing", "check_cache: "), ("mine:nothing", "AttributeError")):
        result = run(*command, model, env=env)
        assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_page_shows_what_the_check_says(tmp_path):
    """Each block of Python that is followed by a block of text, up to rounding."""
    page = (ROOT / "docs" / "check-your-cache.md").read_text(encoding="utf-8")
    mine = re.search(r"cat > mine.py <<'EOF'\n(.*?)EOF\n", page, re.DOTALL).group(1)
    (tmp_path / "mine.py").write_text(mine, encoding="utf-8")
    env = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, tmp_path)))}
    pairs = re.findall(r"^```python\n([^`]*)^```\n\n```text\n([^`]*)^```", page, re.MULTILINE)
    assert len(pairs) == 5
    for script, shown in pairs:
        said, shown = (
            re.sub(r"logits off by .*? other argmaxes|by\s+\S+ of its size|\s+", " ", text)
            for text in (run("-c", script, env=env).stdout, shown)
        )
        assert said == shown and "WRONG" in said
