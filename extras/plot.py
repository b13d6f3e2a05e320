"""Draw the losses of a run: train and val loss over the steps.

python -m extras.plot out        draws out/loss.png from out/log.csv
"""

import csv
import io
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # for python extras/plot.py

from extras.cli import Parser, need, one_line_errors, run_main, writing_to
from model import write_atomically


def plot_loss(rows):
    """Return a picture of the rows of log.csv, as bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for column, marker in (("train_loss", ""), ("val_loss", "o")):
        logged = [row for row in rows if row[column]]
        steps, losses = ([float(row[key]) for row in logged] for key in ("step", column))
        axes.plot(steps, losses, marker=marker, label=column)
    axes.set(xlabel="step", ylabel="loss in nats per token")
    if losses:
        axes.set(title=f"best val loss {min(losses):.4f}")
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()


def main():
    parser = Parser(__doc__)
    parser.add_argument("out_dir", type=Path, nargs="?", default=Path("out"), help="the folder of a run (default: out)")
    out_dir = parser.parse_args().out_dir
    with one_line_errors():
        need("extras.plot", "matplotlib")
    with open(out_dir / "log.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with writing_to(out_dir, "copy log.csv into a folder that you can write to, and pass that folder"):
        write_atomically(out_dir / "loss.png", [plot_loss(rows)])
    print(out_dir / "loss.png")


if __name__ == "__main__":
    run_main(main)
