"""The results, for people and for programs."""

import re
import textwrap
from dataclasses import dataclass, field
from functools import partial


@dataclass
class Result:
    """The result of one way to feed the cache."""

    way: str
    cache: str | None
    attention: str | None = None
    status: str = "right"  # or "wrong", or "not run"
    why: str | None = None  # the cause, or the reason
    off: float | None = None  # how far the worst logit is off
    allowed: float | None = None  # how far rounding might move it
    argmaxes: int | None = None  # at how many positions the argmax differs
    row: int | None = None  # where the first wrong logit is
    position: int | None = None
    layer: int | None = None  # counts the calls of attention
    errors: list = field(default_factory=list, repr=False)  # rows, positions, errors, whether the argmax differs

    def __str__(self):
        """Return what was wrong, or why it was not run."""
        if self.off is None or self.status != "wrong":
            return self.why or ""
        layer = "" if self.layer is None else f"layer {self.layer}: "
        return (
            f"logits off by {self.off:.2g} (allowed {self.allowed:.1g}), argmax differs at {self.argmaxes} positions, "
            f"first at row {self.row}, position {self.position}. {layer}{self.why}"
        )

    @property
    def place(self):
        return f"{self.cache} cache" + (f", {self.attention}" if self.attention else "")


@dataclass(repr=False)
class Report:
    """repr() and str() are for people, `results` is for programs.

    fault   None, or why we cannot judge the cache
    beyond  what no way covers
    """

    title: str
    results: list
    fault: str | None
    beyond: str

    @property
    def exit_code(self):
        """0: right, 1: wrong, 2: nothing could be checked."""
        statuses = {result.status for result in self.results}
        return 1 if "wrong" in statuses else 0 if "right" in statuses else 2

    def assert_right(self):
        """Raise AssertionError with the report, unless at least one way is right and none is wrong."""
        if self.exit_code:
            raise AssertionError(f"the cache is wrong, or nothing could be checked\n{self}")

    def __repr__(self):
        lines = [self.fault] if self.fault else []
        for status, label in (("wrong", "WRONG  "), ("right", "right  "), ("not run", "not run")):
            groups = {}  # results with the same cause, apart from rows and positions
            for result in self.results:
                cause = re.sub(r"\d+", "", str(result.why))
                if result.status == status:
                    groups.setdefault((result.place, result.layer, cause), []).append(result)
            for (place, _, _), results in groups.items():
                ways = ", ".join(result.way for result in results)
                lines.append(f"{label}  {ways}, {place}" + (f": {results[0]}" if results[0].why else ""))
        lines.append(f"beyond   not covered: {self.beyond}")
        wrap = partial(textwrap.fill, width=120, subsequent_indent=" " * 9, break_long_words=False)
        return "\n".join([self.title, *map(wrap, lines)])


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def plot(report, file):
    """Plot how far off each way is at each position, and what is allowed. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(yscale="log", xlabel="position", ylabel="error of the worst logit", title=report.title)
    for result in report.results:
        look = dict(label=f"{result.way}, {result.place}") if result.status == "wrong" else dict(color="silver")
        for _, positions, error, _ in result.errors:
            axes.plot(positions.cpu(), error.cpu(), ".", markersize=2, **look)
            look |= dict(label=None, color=axes.lines[-1].get_color())
    allowed = max((result.allowed or 0 for result in report.results), default=0)
    axes.axhspan(0, allowed, color="green", alpha=0.15, label="allowed")
    axes.legend(fontsize="small", markerscale=5)
    figure.savefig(file)
