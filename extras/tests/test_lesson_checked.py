"""The lesson under check_cache: the exercise of its README, the traps that it names, and the preallocated cache."""

import contextlib
import io
import re

import pytest
import torch

from check_cache import check_cache, copies_of
from lesson_files import CACHE, INT8, PAGES, PREALLOCATED, RECOMPUTE, WINDOW, blocks, load


def exercise(mine=CACHE, *edits):
    """Return the report of the exercise in the README, for another file than 2_cache.py."""
    modules = {"lesson.1_recompute": load(RECOMPUTE), "lesson.2_cache": load(mine, *edits)}
    script = blocks("python")[0].replace("import_module(", "modules.get(")
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
        (VALIDATION, "decode", r"at 2_cache\.py:[0-9]+: Sizes of tensors must match"),
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


# -- a window, pages, int8 ---------------------------------------------------------------------------------------------


def without_cache(model):
    """Return 3_preallocated.py with the parameters of a model, as the model that is right by definition."""
    full = load(PREALLOCATED).GPT(50).eval()
    full.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return full


def window(*edits):
    torch.manual_seed(0)
    model = load(WINDOW, *edits).GPT(50)
    return check_cache(
        full=lambda ids: model.train()(ids),  # in training mode it keeps nothing
        new=copies_of(model),
        step=lambda ids, cache, pos: cache.eval()(ids, int(pos[0, 0])),
        window=32,
    )


def pages(*edits):
    """A cache is a table per row, and the blocks that other rows may read. All are in the pool of one model."""
    torch.manual_seed(0)
    model = load(PAGES, ("16, 100", "16, 4000"), *edits).GPT(50).eval()

    def step(ids, tables, pos):
        logits = []
        for row in range(len(ids)):
            for block in model.blocks:
                block.attention.table, block.attention.shared = list(tables[row][0]), tables[row][1]
            logits.append(model(ids[row : row + 1], int(pos[0, 0])))
            tables[row] = (model.blocks[0].attention.table, tables[row][1])
        return torch.cat(logits)

    def reorder(tables, rows):
        return [(list(tables[row][0]), list(tables[row][0])) for row in rows]

    return check_cache(
        full=without_cache(model),
        new=lambda rows, length: [([], []) for _ in range(rows)],
        step=step,
        reorder=reorder,
        fork=lambda tables: reorder(tables, range(len(tables))),
        context=200,
    )


def int8(*edits):
    torch.manual_seed(0)
    model = load(INT8, *edits).GPT(50).eval()
    return check_cache(
        full=without_cache(model),
        new=copies_of(model),
        step=lambda ids, cache, pos: cache(ids, int(pos[0, 0])),
        context=200,
        atol=0.025,
    )


@pytest.mark.slow
@pytest.mark.parametrize("check, scenario", [(window, "chunks of 34"), (pages, "reorder"), (int8, "decode")])
def test_the_smaller_caches_are_right(check, scenario):
    report = check()
    report.assert_correct()
    assert scenario in {result.scenario for result in report.results if result.status == "correct"}


EMPTY = ("torch.full((window,), -window)", "torch.zeros(window, dtype=torch.long)")
NO_COPY = ("if pos % size and self.table[-1] in self.shared:", "if False:")
NO_ROUNDING = ("(qkv[1:] / scale).round()", "qkv[1:] / scale")


@pytest.mark.slow
@pytest.mark.parametrize(
    "check, edit, scenario, cause",
    [
        (window, EMPTY, "decode", "position 0 sees slot 0 .*but should not"),
        (pages, NO_COPY, "reorder", "cause unknown"),
        (int8, NO_ROUNDING, "decode", "attention reads and sees what it should"),
    ],
    ids=["empty slots", "no copy", "no rounding"],
)
def test_a_mistake_in_a_smaller_cache_is_found(check, edit, scenario, cause):
    results = {result.scenario: result for result in check(edit).results}
    assert results[scenario].status == "wrong" and re.search(cause, results[scenario].why), results[scenario]
