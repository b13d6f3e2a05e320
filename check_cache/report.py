"""What came of each way, for people and for programs."""

import textwrap
from dataclasses import dataclass, field
from functools import partial


@dataclass
class Result:
    """What came of one way."""

    way: str
    cache: str | None
    attention: str | None
    status: str = "right"  # or "wrong", or "not run"
    why: str | None = None  # the cause, or the reason
    off: float | None = None  # how far the worst logit is off
    allowed: float | None = None  # how far rounding might move it
    argmaxes: int | None = None  # how many argmaxes are others
    row: int | None = None  # the text of the first wrong logit
    position: int | None = None
    layer: int | None = None
    errors: list = field(default_factory=list, repr=False)  # rows, positions, errors, whether the argmax is another

    def __str__(self):
        where = f"{self.way}, {self.place}: "
        if self.off is None:
            return where + self.why
        layer = "" if self.layer is None else f", layer {self.layer}"
        return (
            f"{where}logits off by {self.off:.2g} (allowed {self.allowed:.1g}), {self.argmaxes} other argmaxes, first "
            f"at row {self.row}, position {self.position}{layer}: {self.why}"
        )

    @property
    def place(self):
        return f"{self.cache} cache" + (f", {self.attention}" if self.attention else "")


@dataclass
class Report:
    """True if a way is wrong. str() is for people, `results` for programs.

    fault  None, or why it is not the cache's fault that logits differ
    """

    title: str
    results: list
    fault: str | None = None

    def __bool__(self):
        return any(result.status == "wrong" for result in self.results)

    @property
    def exit_code(self):
        """0: right, 1: wrong, 2: nothing could be run."""
        return 1 if self else 0 if any(result.status == "right" for result in self.results) else 2

    def __str__(self):
        lines = [f"NOT THE CACHE'S FAULT  {self.fault}, so no cache can give the same logits"] if self.fault else []
        lines += [f"WRONG    {result}" for result in self.results if result.status == "wrong"]
        for status in ("right", "not run"):
            groups = {}
            for result in self.results:
                if result.status == status:
                    groups.setdefault((result.place, result.why), []).append(result.way)
            for (place, why), ways in groups.items():
                lines.append(f"{status:7}  {place}: {', '.join(ways)}" + (f": {why}" if why else ""))
        wrap = partial(textwrap.fill, width=120, subsequent_indent=" " * 9, break_long_words=False)
        return "\n".join([self.title, *map(wrap, lines)])


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def plot(report, file):
    """Draw how far each way is off over position, beside what is allowed. Needs matplotlib."""
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
