"""The files of the lesson, for test_lesson.py and extras/tests/test_lesson_checked.py: as text and as modules."""

import re
import types

from helpers import ROOT

LESSON = ROOT / "lesson"
RECOMPUTE, CACHE, PREALLOCATED = FILES = [
    LESSON / name for name in ("1_recompute.py", "2_cache.py", "3_preallocated.py")
]
WINDOW, PAGES, INT8 = MORE = [LESSON / name for name in ("4_window.py", "5_pages.py", "6_int8.py")]
README = (LESSON / "README.md").read_text(encoding="utf-8")


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


def blocks(language):
    """Return all blocks in this language of lesson/README.md."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
