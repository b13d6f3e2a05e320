"""The folder of a run: its lock, checkpoints, log, samples, plot, and earlier runs."""

import csv
import io
import itertools
from pathlib import Path

from kvgpt.checkpoint import save_checkpoint
from kvgpt.files import lock_folder, name_in_errors, write_atomically

FILES = ("log.csv", "samples.txt", "ckpt.pt", "last.pt")
COLUMNS = ("step", "tokens", "seconds", "train_loss", "val_loss", "lr", "tokens_per_s", "grad_norm")  # of log.csv


class RunFolder:
    """out_dir: ckpt.pt (best val loss), last.pt (latest step), log.csv, samples.txt, and earlier runs in `previous`."""

    def __init__(self, path):
        self.path = Path(path)
        self.lock_file = None
        self.header = {}
        self.columns = COLUMNS

    def lock(self):
        """Lock the folder, which must exist, until the process ends. Raises ValueError if it is already locked."""
        try:
            self.lock_file = self.lock_file or lock_folder(self.path)
        except BlockingIOError:
            raise ValueError(f"another run is writing to {self.path}: stop it, or change --out_dir") from None

    def begin(self, step, header, bits_per_byte):
        """Prepare for a run that starts at `step`. At step 0, move an earlier run in the folder out of the way.

        header         the part of a checkpoint that stays the same during the run
        bits_per_byte  whether to log val losses in bits per byte too
        Returns (tokens, seconds), what the log has counted so far. Raises OSError, or ValueError if the log is damaged.
        """
        self.header, self.columns = header, COLUMNS + (("val_bpb",) if bits_per_byte else ())
        if not step:
            self.set_aside()
        return self.trim_log(step)

    def set_aside(self):
        """Move the files of an earlier run to a new folder, last.pt last. Nothing is ever overwritten."""
        files = [self.path / name for name in FILES if (self.path / name).exists()]
        if not {"last.pt", "ckpt.pt"} & {file.name for file in files}:  # a log alone is not worth keeping
            return
        previous, numbers = self.path / "previous", itertools.count(2)
        while previous.exists():
            previous = self.path / f"previous-{next(numbers)}"
        previous.mkdir()
        for file in files:
            file.rename(previous / file.name)
        print(f"moved the earlier run in {self.path} to {previous} (--init_from resume would have continued it)")

    def trim_log(self, step):
        """Cut log.csv back to the rows up to `step`. Returns the tokens and seconds of the last row.

        A killed run has rows newer than its last.pt, which the resumed run will write again. A full disk can cut the
        last row short. We rewrite the header because older versions called the column `tokens` `chars`.
        """
        file = self.path / "log.csv"
        lines = file.read_bytes().splitlines(keepends=True) if step and file.is_file() else []
        try:
            rows = [line for line in lines[1:] if line.endswith(b"\n") and int(line.split(b",")[0]) <= step]
            counted = (0, 0.0)
            if rows:
                _, tokens, seconds, *_ = rows[-1].split(b",")
                counted = (int(tokens), float(seconds))
        except ValueError:
            raise ValueError(f"{file} is damaged: remove it to start a new one") from None
        header = ",".join(self.columns) + "\r\n"
        write_atomically({file: header.encode() + b"".join(rows)})
        return counted

    def log(self, row):
        file = self.path / "log.csv"
        with name_in_errors(file), open(file, "a", encoding="utf-8", newline="") as f:
            csv.DictWriter(f, self.columns).writerow(row)

    def add_sample(self, step, text):
        """Append a sample to samples.txt."""
        file = self.path / "samples.txt"
        with name_in_errors(file), open(file, "a", encoding="utf-8", newline="\n") as f:
            f.write(f"=== step {step} ===\n{text}\n\n")

    def save_best(self, state):
        """Write ckpt.pt, the weights of the TrainState, atomically. Raises OSError."""
        save_checkpoint(self.path / "ckpt.pt", self.header | state.state_dict(with_optimizers=False))

    def save_latest(self, state):
        """Write last.pt, the whole TrainState, atomically. Raises OSError."""
        save_checkpoint(self.path / "last.pt", self.header | state.state_dict(with_optimizers=True))


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
    write_atomically({out_dir / "loss.png": picture.getvalue()})
