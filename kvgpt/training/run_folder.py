"""The folder of a run: its lock, its checkpoints, its log, and the run that was there before."""

import csv
import os
import re
from pathlib import Path

from kvgpt.storage.checkpoint import save_checkpoint
from kvgpt.storage.files import name_in_errors, write_atomically

LOG_FIELDS = ("step", "chars", "seconds", "train_loss", "val_loss", "lr", "tokens_per_s", "grad_norm", "muon_share")
SAMPLE_HEADING = "=== step {} ===\n"
COUNT = r"\d{1,18}"
NUMBER = rf"(-?{COUNT}(\.\d{{1,24}})?(e[+-]\d\d)?|inf|nan)"
# older logs lack the last two fields
LOG_ROW = re.compile(rf"{COUNT},{COUNT},{NUMBER}(,{NUMBER}?){{4}}((,{NUMBER}?){{2}})?\r\n", re.ASCII)


def log_rows(file):
    """Return the rows of a log.csv as lists of text, a cell per field. Rows that are cut or damaged are left out."""
    if not file.exists():
        return []
    with open(file, encoding="utf-8", errors="replace", newline="") as f:
        rows = [line.rstrip().split(",") for line in f if LOG_ROW.fullmatch(line)]
    return [row + [""] * (len(LOG_FIELDS) - len(row)) for row in rows]


class RunFolder:
    """out_dir: ckpt.pt (best val loss), last.pt (latest step), log.csv, samples.txt, and `previous`, the run before."""

    def __init__(self, path):
        self.path = Path(path)
        self.lock_file = None
        self.header = {}

    def lock(self):
        """Lock the folder, which exists. The operating system releases the lock when the process ends.

        Raises ValueError if another process holds it.
        """
        if self.lock_file:
            return
        self.lock_file = open(self.path / ".lock", "ab")  # noqa: SIM115
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(self.lock_file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another run is at work in {self.path}: stop it, or choose another --out_dir") from None

    def begin(self, step, header):
        """Prepare for a run that starts at `step`. Sets an earlier run aside if the new one starts at 0.

        header  the part of a checkpoint that stays the same during the run
        Returns (characters, seconds) that the log of this run has counted so far.
        """
        self.header = header
        if not step:
            self.set_aside()
        self.trim_samples(step)
        return self.trim_log(step)

    def set_aside(self):
        """Move an earlier run to the folder `previous`, where it replaces the one before it."""
        names, previous = ("last.pt", "ckpt.pt", "log.csv", "samples.txt"), self.path / "previous"
        if any((self.path / name).is_file() for name in names[:2]):  # a log without a checkpoint is not worth keeping
            previous.mkdir(exist_ok=True)
            for name in names:
                (previous / name).unlink(missing_ok=True)  # no file of another run may stay beside the moved ones
                if (self.path / name).is_file():
                    os.replace(self.path / name, previous / name)
            print(f"{self.path} held a run. It is now in {previous}. --init_from resume would have continued it.")

    def trim_log(self, step):
        """Cut log.csv back to whole rows up to `step`. Returns the characters and seconds of the last row."""
        file = self.path / "log.csv"
        rows = [row for row in log_rows(file) if int(row[0]) <= step]
        write_atomically({file: "".join(",".join(row) + "\r\n" for row in [LOG_FIELDS, *rows]).encode()})
        _, chars, seconds, *_ = rows[-1] if rows else ("0", "0", "0")
        return int(chars), float(seconds)

    def log(self, row):
        file = self.path / "log.csv"
        with name_in_errors(file), open(file, "a", encoding="utf-8", newline="") as f:
            csv.DictWriter(f, LOG_FIELDS).writerow(row)

    def add_sample(self, step, text):
        """Append a sample to samples.txt."""
        file = self.path / "samples.txt"
        with name_in_errors(file), open(file, "a", encoding="utf-8", newline="\n") as f:
            f.write(f"{SAMPLE_HEADING.format(step)}{text}\n\n")

    def trim_samples(self, step):
        """Cut samples.txt back to the samples up to `step`, because a resumed run makes the others again."""
        file = self.path / "samples.txt"
        if file.exists():
            text = file.read_text(encoding="utf-8", errors="replace")
            headings = re.finditer(SAMPLE_HEADING.format(f"({COUNT})"), text)
            end = next((heading.start() for heading in headings if int(heading[1]) > step), len(text))
            write_atomically({file: text[:end].encode()})

    def save_best(self, state):
        """Write ckpt.pt, the weights of the TrainState, atomically. Raises OSError."""
        save_checkpoint(self.path / "ckpt.pt", self.header | state.state_dict(with_optimizers=False))

    def save_latest(self, state):
        """Write last.pt, the whole TrainState, atomically. Raises OSError."""
        save_checkpoint(self.path / "last.pt", self.header | state.state_dict(with_optimizers=True))
