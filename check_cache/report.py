"""The results, for people and for programs."""

import functools
import re
import textwrap
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch

NOT_THEIRS = str(Path(torch.__file__).parent), functools.__file__, *map(str, Path(__file__).parent.glob("*.py"))
LABELS = {"wrong": "WRONG  ", "error": "ERROR  ", "fault": "FAULT  ", "correct": "correct", "not run": "not run"}


class Verdict(Exception):
    """Ends a scenario. The arguments are the fields of its Result, from `status` on."""


@dataclass(frozen=True)
class Result:
    """The result of one scenario with one kind of cache."""

    scenario: str
    cache: str
    status: str  # "correct", "wrong", "not run", "error": of the adapter, or "fault": of the decoder without a cache
    why: str | None = None  # the cause, or the reason
    rule: str | None = None  # what the scenario has violated
    off: float | None = None  # how far the worst logit is off
    position: int | None = None  # of the first wrong logit
    step: tuple[int, int] | None = None  # the number of rows and tokens that were fed to get it


@dataclass(frozen=True, repr=False)
class Report:
    """repr() and str() are for people, `results` is for programs."""

    title: str
    results: list[Result]
    beyond: str  # what we could not see in this decoder, or empty
    must_run: tuple[str, ...] = ()  # scenarios without which the check means little

    @property
    def exit_code(self):
        """0: correct, 1: wrong, 2: too little could be checked, or the adapter or the decoder itself is wrong."""
        statuses = {result.status for result in self.results}
        if "wrong" in statuses:
            return 1
        incomplete = statuses & {"fault", "error"} or "correct" not in statuses or self.missing
        return 2 if incomplete else 0

    @property
    def missing(self):
        """The scenarios in `must_run` that were not run, with one kind of cache or all."""
        absent = {result.scenario for result in self.results if result.status in ("not run", "error")}
        ran = {result.scenario for result in self.results} - absent
        names = [name for name in self.must_run if name not in ran]
        return [name if name in absent else f"{name} (not in this report)" for name in names]

    def assert_correct(self, require=()):
        """Raise AssertionError unless a scenario is correct, none is wrong, and those in `require` have run."""
        report = replace(self, must_run=(*self.must_run, *as_list(require)))
        if report.exit_code:
            raise AssertionError(f"the cache is wrong, or too little could be checked\n{report}")

    def __bool__(self):
        raise TypeError("a Report is neither true nor false: write report.assert_correct(), or report.exit_code == 0")

    def __repr__(self):
        lines, groups = [self.title], {}  # of results with the same cause, apart from rows and positions
        for result in sorted(self.results, key=lambda result: [*LABELS].index(result.status)):
            kind = result.cache if result.status in ("correct", "wrong") else None
            same = result.status, kind, re.sub(r"(?<!layer )\d+", "", str(result.why))
            groups.setdefault(same, []).append(result)
        for (status, *_), results in groups.items():
            names = ", ".join(dict.fromkeys(result.scenario for result in results))
            kinds = " and ".join(dict.fromkeys(result.cache for result in results))
            said = ". ".join(text for text in (results[0].rule, results[0].why) if text)
            if len({result.why for result in results}) > 1:
                said = f"in {results[0].scenario}, {said}"
            lines.append(f"{LABELS[status]}  {names}, {kinds} cache" + (f": {said}" if said else ""))
        if self.missing and "correct" in {result.status for result in self.results}:
            lines.append(f"MISSING  required, but not run: {'; '.join(self.missing)}")
        lines += [f"beyond   not covered: {self.beyond}"] if self.beyond else []
        wrapped = [textwrap.fill(line, 120, subsequent_indent=" " * 9, break_long_words=False) for line in lines]
        return "\n".join(wrapped)


def as_list(words):
    return [words] if isinstance(words, str) else list(words or ())


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400]


def describe(error):
    """Return an exception in one line, with the line of their code that it comes from."""
    text, name = first_line(error).rstrip("."), type(error).__name__
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(NOT_THEIRS)]
    where = f" at {Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
    return f"raises {name}{where}" + (f": {text}" if text != name else "")


def refuses(error):
    """Whether an exception says in words that it takes no such step, as opposed to a mistake in its arithmetic."""
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return str(error) and re.search(r"\b(raise|assert)\b", line)
