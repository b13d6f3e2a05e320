"""Draw the losses of a run: train and val loss over the steps.

python -m extras.plot out        draws out/loss.png from out/log.csv, and out/loss-dark.png for a dark page
"""

import csv
import io
import sys
from functools import partial
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # for python extras/plot.py

from extras.cli import Parser, need, one_line_errors, run_main, writing_to
from model import write_atomically

# the colors of the web page: without a cache, and with one
THEMES = {
    "": dict(paper="#fdfcf9", ink="#1d1c1a", quiet="#66625a", off="#b3481c", on="#17608f"),
    "-dark": dict(paper="#171614", ink="#ebe8e1", quiet="#a8a399", off="#f09a6c", on="#74b9ea"),
}


def save_pictures(file, draw):
    """Write a picture for a light page, `file`, and one for a dark page, with -dark in its name. Returns both paths.

    draw(colors) returns a matplotlib Figure. colors: one of THEMES
    """
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for suffix, colors in THEMES.items():
        paper = dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), colors["paper"])
        ink = dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), colors["ink"]
        )
        picture = io.BytesIO()
        with matplotlib.rc_context(paper | ink):
            draw(colors).savefig(picture, format=file.suffix[1:], dpi=110)
        files.append(file.with_stem(file.stem + suffix))
        write_atomically(files[-1], [picture.getvalue()])
    return files


def read_log(file):
    """Return the rows of log.csv, {column: a number, or None where there is none}. Raises OSError or ValueError."""
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            names = ("step", "train_loss", "val_loss")
            return [{name: float(row[name]) if row[name] else None for name in names} for row in csv.DictReader(opened)]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{file} is not the log of a run ({error})") from None


def plot_loss(rows, colors):
    """Return a figure of the rows of read_log. colors: one of THEMES"""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for column, marker, color in (("train_loss", "", "quiet"), ("val_loss", "o", "ink")):
        logged = [row for row in rows if row[column] is not None]
        steps, losses = ([row[key] for row in logged] for key in ("step", column))
        axes.plot(steps, losses, marker=marker, color=colors[color], label=column)
    axes.set(xlabel="step", ylabel="loss in nats per token")
    if losses:
        axes.set(title=f"best val loss {min(losses):.4f}")
    axes.legend()
    return figure


def main():
    parser = Parser(__doc__)
    parser.add_argument("out_dir", type=Path, nargs="?", default=Path("out"), help="the folder of a run (default: out)")
    out_dir = parser.parse_args().out_dir
    with one_line_errors():
        need("extras.plot", "matplotlib")
        rows = read_log(out_dir / "log.csv")
    with writing_to(out_dir, "copy log.csv into a folder that you can write to, and pass that folder"):
        files = save_pictures(out_dir / "loss.png", partial(plot_loss, rows))
    print(*files, sep="\n")


if __name__ == "__main__":
    run_main(main)
