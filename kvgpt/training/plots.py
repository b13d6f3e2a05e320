"""Figures of a run."""

import io
import math

from kvgpt.checkpoint import load_checkpoint
from kvgpt.files import write_atomically
from kvgpt.training.run import LOG_FIELDS, log_rows, previous_runs

X_LABELS = {"chars": "characters of training text", "seconds": "seconds, evaluations included"}


def plot_loss(out_dir):
    """Draw out_dir/loss.png from log.csv: losses over characters and over seconds, those of the run before in gray."""
    from matplotlib.figure import Figure

    runs = [(out_dir, "tab:blue")]
    if previous := previous_runs(out_dir):
        runs.insert(0, (previous[max(previous)], "tab:gray"))
    figure = Figure(figsize=(11, 4), layout="constrained", facecolor="white")
    for axes, x in zip(figure.subplots(1, 2, sharey=True), X_LABELS):
        for folder, color in runs:
            if all((folder / name).exists() for name in ("log.csv", "last.pt")):
                plot_run(axes, folder, x, color)
        axes.set(xlabel=X_LABELS[x])
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="loss in nats per character")
    figure.axes[1].legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    write_atomically({out_dir / "loss.png": picture.getvalue()})


def plot_run(axes, folder, x, color):
    """Draw the train and val loss of one run over the log column x, and mark the best val loss."""
    rows = [dict(zip(LOG_FIELDS, (float(cell or "nan") for cell in row))) for row in log_rows(folder / "log.csv")]
    try:
        config = load_checkpoint(folder / "last.pt").training["config"]
        name = f"{config['preset']}, {config['recipe']}"
    except (OSError, ValueError, KeyError, TypeError):  # a damaged checkpoint, or one of another program
        name = folder.name
    scored = [row for row in rows if not math.isnan(row["val_loss"])]
    train, val = [row["train_loss"] for row in rows], [row["val_loss"] for row in scored]
    axes.plot([row[x] for row in rows], train, color=color, alpha=0.35, label=f"{name}: train")
    axes.plot([row[x] for row in scored], val, "o-", ms=3, color=color, label=f"{name}: val")
    best = min(scored, key=lambda row: row["val_loss"], default=None)
    if best:
        point = best[x], best["val_loss"]
        axes.plot(*point, "*", ms=13, color=color)
        axes.annotate(f"{best['val_loss']:.3f}", point, (-2, -13), textcoords="offset points")
