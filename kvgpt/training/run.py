"""The folder of a run: its lock, its checkpoints, its log, and the runs that were there before."""

import csv
import os
import re
import shutil
from pathlib import Path

from kvgpt.checkpoint import save_checkpoint
from kvgpt.files import (
    keep_copy,
    lock_folder,
    name_in_errors,
    sync_folder,
    write_atomically,
)

FILES = ("last.pt", "ckpt.pt", "log.csv", "samples.txt")
LOG_FIELDS = ("step", "chars", "seconds", "train_loss", "val_loss", "lr", "tokens_per_s", "grad_norm", "muon_share")
SAMPLE_HEADING = "=== step {} ===\n"
COUNT = r"\d{1,18}"
NUMBER = rf"(-?{COUNT}(\.\d{{1,24}})?(e[+-]\d{{2,3}})?|inf|nan)"
# older logs lack the last two fields; editors and git change \r\n to \n
LOG_ROW = re.compile(rf"{COUNT},{COUNT},{NUMBER}(,{NUMBER}?){{4}}((,{NUMBER}?){{2}})?\r?\n", re.ASCII)


def log_rows(file):
    """Return the rows of a log.csv as lists of text, a cell per field. Rows that are cut or damaged are left out."""
    if not file.is_file():
        return []
    with open(file, encoding="utf-8", errors="replace", newline="") as f:
        rows = [line.rstrip().split(",") for line in f if LOG_ROW.fullmatch(line)]
    return [row + [""] * (len(LOG_FIELDS) - len(row)) for row in rows]


def previous_runs(out_dir):
    """Return {number: folder} of the runs that were set aside: `previous` is 1, `previous-2` is 2, and so on."""
    names = ((path, re.fullmatch(r"previous(?:-(\d{1,18}))?", path.name)) for path in out_dir.glob("previous*"))
    return {int(match[1] or 1): path for path, match in names if match}


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
        """Move an earlier run to a new folder, `previous`, `previous-2` and so on. Raises OSError.

        The run is whole in out_dir or in the new folder at any moment, because one rename makes the folder.
        """
        files = [self.path / name for name in FILES if (self.path / name).is_file()]
        if not {"last.pt", "ckpt.pt"} & {file.name for file in files}:  # a log alone is not worth keeping
            return
        number = max(previous_runs(self.path), default=0) + 1
        previous, copies = self.path / ("previous" if number == 1 else f"previous-{number}"), self.path / ".previous"
        shutil.rmtree(copies, ignore_errors=True)  # copies that a killed process has left
        copies.mkdir()
        for file in files:
            keep_copy(file, copies / file.name)
        sync_folder(copies)
        os.rename(copies, previous)
        sync_folder(self.path)
        for file in files:
            file.unlink()
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
        if file.is_file():
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
