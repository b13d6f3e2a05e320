"""Is the cache in one of these files correct? We ask check_cache, which compares it with a model without a cache.

    python -m lesson.check 2_cache
    python -m lesson.check mine        yours, in lesson/mine.py: 1_recompute.py with a cache
    python -m lesson.check 5_pages

The weights are random. It takes up to a minute, and exits with 1 if the cache is wrong.
"""

import copy
import sys
from importlib import import_module
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    sys.exit(f"lesson/check.py: {error}: activate the environment, or install it as README.md says")

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # for python lesson/check.py
from check_cache import check_cache


def recompute(lesson):
    """2_cache.py or yours. `full` is the first file, which is right by definition."""
    right, mine = import_module("lesson.1_recompute").GPT(50), lesson.GPT(50)
    mine.load_state_dict(right.state_dict(keep_vars=True), assign=True)  # the two share their weights
    with torch.no_grad():
        mine.eval()(torch.zeros(2, 10, dtype=torch.long))  # a validation batch: nothing of it may stay

    def generate(ids, count, use_cache):
        torch.manual_seed(0)
        return (mine if use_cache else right).generate(ids, count)

    return check_cache(
        full=right,
        new=lambda rows, length: copy.deepcopy(mine),
        step=lambda ids, cache, pos: cache(ids, int(pos[0, 0])),
        generate=generate,
        context=200,
    )


def preallocated(lesson, **settings):
    """A file with all heads in one matrix. In train mode it keeps nothing, so there it is its own `full`."""
    model = lesson.GPT(50)
    return check_cache(
        full=lambda ids: model.train()(ids),
        new=lambda rows, length: copy.deepcopy(model),
        step=lambda ids, cache, pos: cache.eval()(ids, int(pos[0, 0])),
        **settings,
    )


def pages(lesson):
    """Here a cache is a list: for each row its table, and the pages that other rows may read. They share one pool."""
    lesson.num_pages = 4000
    model = lesson.GPT(50)

    def step(ids, rows, pos):
        logits = []
        for i, (table, shared) in enumerate(rows):
            for block in model.eval().blocks:
                block.attention.table, block.attention.shared = list(table), shared
            logits.append(model(ids[i : i + 1], int(pos[0, 0])))
            rows[i] = (model.blocks[0].attention.table, shared)
        return torch.cat(logits)

    def reorder(rows, chosen):
        return [(rows[i][0], rows[i][0]) for i in chosen]

    return check_cache(
        full=lambda ids: model.train()(ids),
        new=lambda rows, length: [([], [])] * rows,
        step=step,
        reorder=reorder,
        fork=lambda rows: reorder(rows, range(len(rows))),
        context=200,
    )


CHECKS = {
    "3_preallocated": lambda lesson: preallocated(lesson, context=200),
    "4_window": lambda lesson: preallocated(lesson, window=32),
    "5_pages": pages,
    "6_int8": lambda lesson: preallocated(lesson, context=200, atol=0.025),  # so much rounding is allowed
}


if __name__ == "__main__":
    name = " ".join(sys.argv[1:])
    if name in ("-h", "--help"):
        sys.exit(print(__doc__.strip()))
    if not name:
        sys.exit("lesson/check.py: which file? One of this folder, as in python -m lesson.check 2_cache")
    name = Path(name).name.removesuffix(".py")  # also of lesson/2_cache.py
    if not Path(__file__).with_name(f"{name}.py").is_file():
        sys.exit(f"lesson/check.py: no file lesson/{name}.py: name one of this folder, such as 2_cache")
    torch.manual_seed(0)
    report = CHECKS.get(name, recompute)(import_module(f"lesson.{name}"))
    print(report)
    sys.exit(report.exit_code)
