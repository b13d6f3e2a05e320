"""The folder of a run: its lock, checkpoints, log, samples and figure, and the runs that were there before."""

import csv
import io
import itertools
import re
from pathlib import Path

from kvgpt.checkpoint import load_checkpoint, save_checkpoint
from kvgpt.files import lock_folder, name_in_errors, write_atomically

FILES = ("log.csv", "samples.txt", "ckpt.pt", "last.pt")
LOG_FIELDS = ("step", "chars", "seconds", "train_loss", "val_loss", "lr", "tokens_per_s", "grad_norm")
SAMPLE_HEADING = "=== step {} ===\n"


def read_log(folder):
    """Return the rows of log.csv in a folder as dicts of text. A last row that a full disk has cut is left out."""
    file = folder / "log.csv"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return list(csv.DictReader(lines, restval=""))


def previous_folder(out_dir, number):
    return out_dir / ("previous" if number == 1 else f"previous-{number}")


def previous_runs(out_dir):
    """Return the folders of the runs that were set aside, the oldest first: `previous`, `previous-2` and so on."""
    folders = (previous_folder(out_dir, number) for number in itertools.count(1))
    return list(itertools.takewhile(Path.exists, folders))


class RunFolder:
    """out_dir: ckpt.pt (best val loss), last.pt (latest step), log.csv, samples.txt, and earlier runs in `previous`."""

    def __init__(self, path):
        self.path = Path(path)
        self.lock_file = None
        self.header = {}

    def lock(self):
        """Lock the folder, which exists, until the process ends. Raises ValueError if another process has locked it."""
        try:
            self.lock_file = self.lock_file or lock_folder(self.path)
        except BlockingIOError:
            raise ValueError(f"another run is at work in {self.path}: stop it, or choose another --out_dir") from None

    def begin(self, step, header):
        """Prepare for a run that starts at `step`. If that is 0, set aside the run that the folder holds.

        header  the part of a checkpoint that stays the same during the run
        Returns (characters, seconds) that the log of this run has counted so far. Raises OSError, or ValueError if the
        log is damaged.
        """
        self.header = header
        if not step:
            self.set_aside()
        self.trim_samples(step)
        return self.trim_log(step)

    def set_aside(self):
        """Move the files of an earlier run to a new folder. last.pt goes last, and nothing is ever replaced."""
        files = [self.path / name for name in FILES if (self.path / name).exists()]
        if not {"last.pt", "ckpt.pt"} & {file.name for file in files}:  # a log alone is not worth keeping
            return
        previous = previous_folder(self.path, len(previous_runs(self.path)) + 1)
        previous.mkdir()
        for file in files:
            file.rename(previous / file.name)
        print(f"{self.path} held a run. It is now in {previous}. --init_from resume would have continued it.")

    # -- log.csv and samples.txt: a resume cuts what came after last.pt, because it makes that again -------------------

    def trim_log(self, step):
        """Cut log.csv back to the rows up to `step`. Returns the characters and seconds of the last row."""
        file = self.path / "log.csv"
        try:
            rows = [row for row in read_log(self.path) if int(row["step"]) <= step]
            counted = (int(rows[-1]["chars"]), float(rows[-1]["seconds"])) if rows else (0, 0.0)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} is damaged: remove it, and the run begins a new one") from None
        text = io.StringIO()
        writer = csv.DictWriter(text, LOG_FIELDS, extrasaction="ignore")  # older versions wrote another column
        writer.writeheader()
        writer.writerows(rows)
        write_atomically({file: text.getvalue().encode()})
        return counted

    def log(self, row):
        file = self.path / "log.csv"
        with name_in_errors(file), open(file, "a", encoding="utf-8", newline="") as f:
            csv.DictWriter(f, LOG_FIELDS).writerow(row)

    def trim_samples(self, step):
        """Cut samples.txt back to the samples up to `step`."""
        file = self.path / "samples.txt"
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            headings = re.finditer(SAMPLE_HEADING.format(r"(\d+)"), text)
            end = next((heading.start() for heading in headings if int(heading[1]) > step), len(text))
            write_atomically({file: text[:end].encode()})

    def add_sample(self, step, text):
        """Append a sample to samples.txt."""
        file = self.path / "samples.txt"
        with name_in_errors(file), open(file, "a", encoding="utf-8", newline="\n") as f:
            f.write(f"{SAMPLE_HEADING.format(step)}{text}\n\n")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_best(self, state):
        """Write ckpt.pt, the weights of the TrainState, atomically. Raises OSError."""
        save_checkpoint(self.path / "ckpt.pt", self.header | state.state_dict(with_optimizers=False))

    def save_latest(self, state):
        """Write last.pt, the whole TrainState, atomically. Raises OSError."""
        save_checkpoint(self.path / "last.pt", self.header | state.state_dict(with_optimizers=True))


# -- the figure --------------------------------------------------------------------------------------------------------

X_LABELS = {"chars": "characters of training text", "seconds": "seconds, evaluations included"}


def plot_loss(out_dir):
    """Draw out_dir/loss.png from log.csv: losses over characters and over seconds, those of the run before in gray."""
    from matplotlib.figure import Figure

    runs = [(folder, "tab:gray") for folder in previous_runs(out_dir)[-1:]] + [(out_dir, "tab:blue")]
    curves = [(run_name(folder), read_log(folder), color) for folder, color in runs]
    figure = Figure(figsize=(11, 4), layout="constrained", facecolor="white")
    for axes, x in zip(figure.subplots(1, 2, sharey=True), X_LABELS):
        for name, rows, color in curves:
            plot_run(axes, x, name, rows, color)
        axes.set(xlabel=X_LABELS[x])
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="loss in nats per character")
    figure.axes[1].legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110)
    write_atomically({out_dir / "loss.png": picture.getvalue()})


def run_name(folder):
    """Return the preset and recipe of a run, or its folder if its checkpoint does not say."""
    try:
        config = load_checkpoint(folder / "last.pt").training["config"]
        return f"{config['preset']}, {config['recipe']}"
    except (OSError, ValueError, KeyError):
        return str(folder)


def plot_run(axes, x, name, rows, color):
    """Draw the train and val loss of one run over the log column x, and mark the best val loss."""
    scored = [row for row in rows if row["val_loss"]]
    for column, points, style, label in (
        ("train_loss", rows, dict(alpha=0.35), "train"),
        ("val_loss", scored, dict(marker="o", markersize=3), "val"),
    ):
        xs, losses = ([float(row[key]) for row in points] for key in (x, column))
        axes.plot(xs, losses, color=color, label=f"{name}: {label}", **style)
    best = min(scored, key=lambda row: float(row["val_loss"]), default=None)
    if best:
        point = float(best[x]), float(best["val_loss"])
        axes.plot(*point, "*", markersize=13, color=color)
        axes.annotate(f"{point[1]:.3f}", point, (-2, -13), textcoords="offset points")
