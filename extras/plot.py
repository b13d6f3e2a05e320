"""train.py --plot: the losses of a run as a picture."""

import csv
import io

from model import write_atomically


def plot_loss(out_dir):
    """Draw out_dir/loss.png: train and val loss over the tokens read. log.csv must have an evaluation."""
    from matplotlib.figure import Figure

    with open(out_dir / "log.csv", encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for column, marker in (("train_loss", ""), ("val_loss", "o")):
        logged = [row for row in rows if row[column]]
        tokens, losses = ([float(row[key]) for row in logged] for key in ("tokens", column))
        axes.plot(tokens, losses, marker=marker, label=column)
    axes.set(xlabel="tokens of training text", ylabel="loss in nats per token")
    axes.set(title=f"best val loss {min(losses):.4f}")
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture)
    write_atomically({out_dir / "loss.png": [picture.getvalue()]})
