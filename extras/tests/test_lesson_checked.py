"""The lesson under check_cache: the exercise of its README, the traps that it names, and the preallocated cache."""

import copy
import re

import pytest
import torch

from check_cache import check_cache
from helpers import ROOT, assert_one_line, here, ok, run
from lesson import check
from lesson_files import CACHE, INT8, PAGES, PREALLOCATED, RECOMPUTE, WINDOW, load


def checked(file, *edits):
    """Return the report of lesson/check.py for an edited file."""
    torch.manual_seed(0)
    return check.CHECKS.get(file.stem, check.recompute)(load(file, *edits))


@pytest.mark.parametrize(
    "file, scenarios",
    [
        (CACHE, ["decode", "chunks of mixed sizes", "two caches at once", "batches of 1 to 8 rows", "generate"]),
        (PREALLOCATED, ["decode"]),
        pytest.param(WINDOW, ["chunks around the window"], marks=pytest.mark.slow),
        pytest.param(PAGES, ["reorder"], marks=pytest.mark.slow),
        pytest.param(INT8, ["decode"], marks=pytest.mark.slow),
    ],
)
def test_a_cache_of_the_lesson_is_right(file, scenarios):
    report = checked(file)
    report.assert_correct()
    assert {*scenarios} <= {result.scenario for result in report.results if result.status == "correct"}


POSITION_0 = ("pos + torch.arange(idx.size(1))", "torch.arange(idx.size(1))")
VALIDATION = ("        if pos == 0:  # a new text\n            self.clear_kv_cache()\n", "")
NO_MASK = (".tril(k.size(1) - T)", ".tril(k.size(1) - T if self.training else k.size(1))")
OWN_SLOT = (".tril(k.size(1) - T)", ".tril()")
NO_POS = ("            pos = idx.size(1)\n", "            pos += 1\n")
TOO_FAR = ("pos : pos + T, :] = qkv", "pos + (pos > 0) : pos + (pos > 0) + T, :] = qkv")
EMPTY = ("torch.full((window,), -window)", "torch.zeros(window, dtype=torch.long)")
NO_COPY = ("if self.table[i] in self.shared:", "if False:")
NO_ROUNDING = ("(qkv[1:] / scale).round()", "qkv[1:] / scale")
TRAPS = {
    "position 0": (CACHE, POSITION_0, "decode", "wrong on arrival: its position is 0"),
    "validation": (CACHE, VALIDATION, "decode", r"at 2_cache\.py:[0-9]+: Sizes of tensors must match"),
    "no mask": (CACHE, NO_MASK, "decode", "sees slot 1, but should not"),
    "mask without an offset": (CACHE, OWN_SLOT, "decode", "does not see slot 1, but should"),
    "pos of the loop": (CACHE, NO_POS, "generate", "the first call of generate"),
    "a slot too far": (PREALLOCATED, TOO_FAR, "decode", "written to a different slot"),
    "empty slots": (WINDOW, EMPTY, "decode", "position 0 sees slot 0 .*but should not"),
    "no copy": (PAGES, NO_COPY, "reorder", "holds that of another sequence"),
    "no rounding": (INT8, NO_ROUNDING, "decode", "attention reads and sees what it should"),
}


@pytest.mark.slow
@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_found_with_its_cause(trap):
    file, edit, scenario, cause = TRAPS[trap]
    results = {result.scenario: result for result in checked(file, edit).results}
    assert results[scenario].status == "wrong" and re.search(cause, results[scenario].why), results[scenario]


# -- beyond block_size -------------------------------------------------------------------------------------------------


def beyond_block_size(step):
    """Return what check_cache says of texts of 32 tokens, with a context of 16 that slides: the model reads the newest.

    step(cache, ids, pos)  the logits of new tokens at positions from pos on
    """
    torch.manual_seed(0)
    shorter = ("block_size, n_layer, n_head, n_embd = 200", "block_size, n_layer, n_head, n_embd = 16")
    right = load(RECOMPUTE, shorter).GPT(50)
    mine = load(CACHE, shorter).GPT(50).eval()
    mine.load_state_dict(right.state_dict(keep_vars=True), assign=True)

    def full(ids):
        later = [right(ids[:, end - 16 : end])[:, -1:] for end in range(17, ids.size(1) + 1)]
        return torch.cat((right(ids[:, :16]), *later), dim=1)

    def token_by_token(ids, cache, pos):
        start = int(pos[0, 0])
        return torch.cat([step(cache, ids[:, i : i + 1], start + i) for i in range(ids.size(1))], dim=1)

    return check_cache(
        full=full, new=lambda rows, length: copy.deepcopy(mine), step=token_by_token, length=32, scenarios=["decode"]
    )


@pytest.mark.slow
def test_dropping_the_oldest_slot_at_block_size_is_wrong():
    def drop(cache, ids, pos):
        if pos >= 16:
            for module in cache.modules():
                if hasattr(module, "key_cache"):
                    module.key_cache = module.key_cache[:, 1:]
                    module.value_cache = module.value_cache[:, 1:]
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


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_runs_from_the_command_line_as_the_readme_says():
    """With the name of a file of the lesson, or with a path."""
    for command in (
        ["-m", "lesson.check", "2_cache.py"],
        [ROOT / "lesson" / "check.py", ROOT / "lesson" / "2_cache.py"],
    ):
        assert "scenarios ran, 200 tokens per row" in ok(run(*command)).stdout
    for flags, words in (
        ([], "which file? One of this folder, as in python -m lesson.check 2_cache"),
        (["mine"], "no file lesson/mine.py"),
        (["lesson/none.py"], "no file lesson/none.py"),
    ):
        assert_one_line(here(*flags, script="lesson/check.py"), "check.py: ", words, code=1)
