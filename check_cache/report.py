"""The results, for people and for programs."""

import re
import textwrap
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

NOT_THEIRS = tuple(str(Path(file).parent) for file in (__file__, torch.__file__))


@dataclass
class Result:
    """The result of one scenario."""

    scenario: str
    cache: str | None
    status: str = "correct"  # or "wrong", "not run", or "fault": of the decoder without a cache
    why: str | None = None  # the cause, or the reason
    rule: str | None = None  # what the scenario has violated
    off: float | None = None  # how far the worst logit is off
    position: int | None = None  # of the first wrong logit
    step: tuple | None = None  # the number of rows and tokens that were fed to get it
    errors: list = field(default_factory=list, repr=False)  # rows, positions, errors, whether the argmax differs, step

    def __str__(self):
        """Return what was wrong, or why it was not run."""
        return f"{self.rule}. {self.why}" if self.rule else self.why or ""

    @property
    def name(self):
        return f"{self.scenario}, {self.cache} cache"


@dataclass(repr=False)
class Report:
    """repr() and str() are for people, `results` is for programs."""

    title: str
    results: list
    beyond: str  # what no scenario covers

    @property
    def exit_code(self):
        """0: correct, 1: wrong, 2: nothing could be checked, or the decoder is wrong without a cache."""
        statuses = {result.status for result in self.results}
        return 1 if "wrong" in statuses else 0 if "correct" in statuses and "fault" not in statuses else 2

    def missing(self, require):
        """Return those of the words in `require` that name no result, or one that was not run."""
        ran = {result.name: result.status != "not run" for result in self.results}
        named = {word: [ran[name] for name in ran if word in name] for word in as_list(require)}
        return [word for word, those in named.items() if not those or not all(those)]

    def assert_correct(self, require=()):
        """Raise AssertionError unless a scenario is correct, none is wrong, and those that `require` names have run."""
        if self.exit_code:
            raise AssertionError(f"the cache is wrong, or could not be checked\n{self}")
        if missing := self.missing(require):
            raise AssertionError(f"required, but not run: {', '.join(missing)}\n{self}")

    def __bool__(self):
        raise TypeError("a Report is neither true nor false: write report.assert_correct(), or report.exit_code == 0")

    def __repr__(self):
        lines = []
        labels = {"wrong": "WRONG  ", "fault": "FAULT  ", "correct": "correct", "not run": "not run"}
        for status, label in labels.items():
            groups = {}  # results with the same cause, apart from rows and positions
            for result in self.results:
                cause = re.sub(r"\d+", "", str(result.why))
                if result.status == status:
                    groups.setdefault((result.cache, cause), []).append(result)
            for (cache, _), results in groups.items():
                names = ", ".join(result.scenario for result in results)
                lines.append(f"{label}  {names}, {cache} cache" + (f": {results[0]}" if results[0].why else ""))
        lines.append(f"beyond   not covered: {self.beyond}")
        wrap = partial(textwrap.fill, width=120, subsequent_indent=" " * 9, break_long_words=False)
        return "\n".join([self.title, *map(wrap, lines)])


def as_list(words):
    return [words] if isinstance(words, str) else list(words or ())


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def describe(error):
    """Return an exception in one line, with the line of their code that it comes from."""
    text, name = first_line(error).rstrip("."), type(error).__name__
    if isinstance(error, NotImplementedError):
        return text
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(NOT_THEIRS)]
    where = f" at {Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
    return f"raises {name}{where}" + (f": {text}" if text != name else "")
