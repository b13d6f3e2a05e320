"""The results, for people and for programs."""

import functools
import math
import platform
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

__version__ = "0.5.0"
NOT_THEIRS = str(Path(torch.__file__).parent), functools.__file__, *map(str, Path(__file__).parent.glob("*.py"))
LABELS = {"error": "ERROR  ", "wrong": "WRONG  ", "fault": "FAULT  ", "correct": "correct", "not run": "not run"}
KINDS = {"own": "default", "static": "static", "any": "any"}  # the default cache is the one that a decoder makes


class Verdict(Exception):
    """Ends a scenario. The arguments are the fields of its Result, from `status` on."""

    def __init__(self, status, why, **fields):
        super().__init__(status, why)
        self.fields = dict(status=status, why=why) | fields


@dataclass(frozen=True)
class Result:
    """The result of one scenario with one kind of cache."""

    scenario: str
    cache: str
    status: str  # "correct", "wrong", "not run", "error": of the adapter, or "fault": of the decoder without a cache
    why: str | None = None  # the cause, or the reason
    rule: str | None = None  # what the scenario has violated
    off: float | None = None  # how far the worst logit is off
    limit: float | None = None  # how far it may be off
    position: int | None = None  # of the first wrong logit
    step: tuple[int, int] | None = None  # the number of rows and tokens that were fed to get it


@dataclass(frozen=True, repr=False)
class Report:
    """repr() and str() are for people, `results` is for programs."""

    title: str
    results: list[Result]
    beyond: str  # what we could not see in this decoder, or empty
    must_run: tuple[str, ...] = ()  # scenarios without which the check means little
    facts: dict[str, object] = field(default_factory=dict)  # what the title says: length, rows, dtype, ...

    @property
    def exit_code(self) -> int:
        """0: correct, 1: wrong, 2: too little could be checked, or the adapter or the decoder itself is wrong."""
        statuses = {result.status for result in self.results}
        if "wrong" in statuses:
            return 1
        incomplete = statuses & {"fault", "error"} or "correct" not in statuses or self.missing
        return 2 if incomplete else 0

    @property
    def missing(self) -> dict[str, str]:
        """{name: why not} of the scenarios in `must_run` that were not run with each kind of cache."""
        missing = {}
        for word in self.must_run:
            exact = [result for result in self.results if result.scenario == word]
            named = exact or [result for result in self.results if word in result.scenario]
            reasons = {result.scenario: result.why for result in named if result.status in ("not run", "error")}
            if not {result.scenario for result in named} - {*reasons}:
                missing[word] = next(iter(reasons.values()), "not in this report")
        return missing

    def assert_correct(self, require: str | Iterable[str] = ()) -> None:
        """Raise AssertionError unless a scenario is correct, none is wrong, and those in `require` have run.

        require  names of scenarios, or words: then one of the scenarios whose name contains the word must have run
        """
        __tracebackhide__ = True  # pytest shows the report, and not these lines
        report = replace(self, must_run=(*self.must_run, *as_list(require)))
        if report.exit_code:
            raise AssertionError(f"the cache is wrong, or too little could be checked\n{report}")

    def to_json(self) -> dict[str, object]:
        """Return the report for programs, as report.schema.json describes it."""
        packages = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "transformers")}
        versions = dict(check_cache=__version__, python=platform.python_version(), **packages)
        head = dict(schema=1, versions=versions, seed=0, exit_code=self.exit_code, **self.facts)
        names = dict(off="error", why="cause")
        finite = lambda x: None if x == math.inf else x  # noqa: E731  JSON has no infinity
        results = [{names.get(k, k): finite(v) for k, v in asdict(one).items()} for one in self.results]
        return dict(**head, missing=self.missing, beyond=self.beyond, results=results)

    def __bool__(self):
        raise TypeError("a Report is neither true nor false: write report.assert_correct(), or report.exit_code == 0")

    def text(self, verbose: bool = False) -> str:
        """Return the report for people. With `verbose`, it says why a scenario was not run."""
        lines, groups = [self.title], {}
        absent = [result for result in self.results if result.status == "not run"]
        verbose = verbose or len(absent) == len(self.results)
        for result in self.results if verbose else [one for one in self.results if one not in absent]:
            # an exception comes once and first, and the rest once for each cause, apart from rows and positions
            raised = re.match(r".*?\braises \w+( at \S+)?", str(result.why))
            same = raised[0] if raised else re.sub(r"(?<!layer )\d+", "", str(result.why))
            kind = result.cache if result.status in ("correct", "wrong") and not raised else None
            groups.setdefault(([*LABELS].index(result.status), not raised, same, kind), []).append(result)
        kinds = {result.cache for result in self.results} - {"any"}
        for (status, *_), results in sorted(groups.items(), key=lambda group: group[0][:2]):
            names = ", ".join(dict.fromkeys(result.scenario for result in results))
            which = " and ".join(dict.fromkeys(KINDS[result.cache] for result in results))
            said = ". ".join(text for text in (results[0].rule, results[0].why) if text)
            if len({result.why for result in results}) > 1:
                said = f"in {results[0].scenario}, {said}"
            which = f" ({which} cache)" if len(kinds) > 1 else ""
            lines.append(f"{[*LABELS.values()][status]}  {names}{which}" + (f": {said}" if said else ""))
        if not verbose and absent:
            why = "need what this decoder or adapter lacks: --verbose or text(verbose=True) lists them"
            lines.append(f"not run  {len(absent)} scenarios {why}")
        if self.missing and "correct" in {result.status for result in self.results}:
            missing = "; ".join(f"{name} ({why})" for name, why in self.missing.items())
            lines.append(f"MISSING  required, but not run: {missing}")
        lines += [f"NOTE     beyond this check: {self.beyond}"] if self.beyond else []
        return "\n".join(textwrap.fill(line, 120, subsequent_indent=" " * 9, break_long_words=False) for line in lines)

    __repr__ = text


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
    return isinstance(error, (ValueError, AssertionError)) and str(error) and re.search(r"\b(raise|assert)\b", line)
