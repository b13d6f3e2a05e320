"""kvgpt/training/run.py: checkpoints, log.csv, the lock, and the run that was there before."""

import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helpers import (
    BROKEN,
    HEADER,
    SMALL,
    STATEFUL,
    TINY,
    assert_one_line,
    assert_same_run,
    child,
    contents,
    here,
    linux,
    load,
    log,
    ok,
    run,
    start,
    unix,
)
from kvgpt.training.run import RunFolder, previous_runs

# -- the run before ----------------------------------------------------------------------------------------------------


def test_a_new_run_sets_an_earlier_one_aside(out, data_dir):
    """A forgotten --init_from resume must not cost the run. The run in `previous` can be resumed."""
    before = contents(out)
    result = run("train.py", "--data_dir", data_dir, "--out_dir", out, *TINY, "--max_iters", "5")
    assert result.returncode == 0 and "previous" in result.stdout, result.stderr
    kept = contents(out / "previous")
    assert {name: kept[name] for name in ("ckpt.pt", "last.pt", "log.csv")} == {
        name: before[name] for name in ("ckpt.pt", "last.pt", "log.csv")
    }
    resumed = run("train.py", "--init_from", "resume", "--out_dir", out / "previous", "--max_iters", "61")
    assert resumed.returncode == 0, resumed.stderr


def test_every_earlier_run_is_kept_and_a_run_that_saved_nothing_is_none(out, data_dir):
    """A run that replaces an earlier one. A run that broke before its first save leaves only a log."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", out, "--max_iters", 2]
    first = contents(out)
    assert here(*flags, *BROKEN).returncode != 0
    assert contents(out).keys() == {"log.csv"}
    assert contents(out / "previous") == first
    ok(here(*flags, "--plot"))
    assert contents(out / "previous") == first and (out / "loss.png").stat().st_size > 0
    second = {name: content for name, content in contents(out).items() if name in first}
    (out / "log.csv").unlink()
    assert str(out / "previous-2") in ok(here(*flags)).stdout
    assert contents(out / "previous") == first
    assert contents(out / "previous-2") == {name: second[name] for name in ("ckpt.pt", "last.pt")}
    (out / "previous-9").mkdir()
    (out / "previous-x").mkdir()
    ok(here(*flags))
    assert previous_runs(out) == {
        1: out / "previous",
        2: out / "previous-2",
        9: out / "previous-9",
        10: out / "previous-10",
    }
    assert contents(out / "previous-10").keys() == {"ckpt.pt", "last.pt", "log.csv"}


def test_a_batch_that_does_not_fit_moves_no_earlier_run(out, data_dir):
    before = contents(out)
    result = run("train.py", *SMALL, "--data_dir", data_dir, "--out_dir", out, "--batch_size", 2**31 - 1)
    assert_one_line(result, "out of memory", "batch")
    assert contents(out) == before and not (out / "previous").exists()


def begin_and_die(folder, at):
    """Begin a new run in `folder`. The process is killed before its at-th call that changes a file or a folder."""
    calls = itertools.count(1)

    def hook(event, args):
        changes = event in ("os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir")
        if (changes or (event == "open" and args[1] and set(args[1]) & set("wa+"))) and next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    RunFolder(folder).begin(0, {})


@unix
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_run_that_is_set_aside_is_whole_whenever_the_process_is_killed(links, out, tmp_path, monkeypatch):
    """A part of the earlier run here and another part there, which the next start of train.py destroys."""
    if not links:  # as on a file system without them
        monkeypatch.setattr(os, "link", lambda *args: os.stat(tmp_path / "none"))
    (out / "samples.txt").write_text("=== step 60 ===\ntext\n\n", encoding="utf-8")
    whole = contents(out)
    assert len(whole) == 4

    def holders(folder):
        return [each for each in (folder, *previous_runs(folder).values()) if whole.items() <= contents(each).items()]

    for at in itertools.count(1):
        folder = Path(shutil.copytree(out, tmp_path / f"out {at}"))
        process = multiprocessing.get_context("fork").Process(target=begin_and_die, args=(folder, at))
        process.start()
        process.join(60)
        assert holders(folder), at
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        RunFolder(folder).begin(0, {})
        assert folder not in holders(folder) and holders(folder), at
    assert at > 10
    assert contents(folder).keys() == {"log.csv"} and not (folder / ".previous").exists()


# -- log.csv -----------------------------------------------------------------------------------------------------------


def test_a_damaged_log_stops_no_resume(out):
    before = log(out)
    with open(out / "log.csv", "ab") as f:
        f.write(b"\xff\xfe\n6,1,abc,1,1,1,1\r\n6,1,1.2.3,1,1,1,1\r\n")
        f.write(b"%s,1,1,1,1,1,1\r\n6,%s,1,1,1,1,1\r\n" % (2 * (b"9" * 5000,)))
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 61))
    after = log(out)
    assert after[: len(before)] == before and int(after[-1]["step"]) == 61


def test_rows_keep_their_place_whatever_ends_a_line_and_however_small_a_number_is(tmp_path):
    """An editor changes the ends of lines. A tiny learning rate has an exponent of three digits."""
    rows = "20,2560,0.031,4.1,3.9,4.76e-151,47711,1.5,0.1\n40,5120,0.054,3.7,3.6,1e-05,85681,1.2,0.1\n"
    (tmp_path / "log.csv").write_bytes(f"{','.join(HEADER)}\n{rows}".encode())
    assert RunFolder(tmp_path).trim_log(40) == (5120, 0.054)
    assert [row["lr"] for row in log(tmp_path)] == ["4.76e-151", "1e-05"]


def test_rows_past_the_checkpoint_are_cut_on_resume(out):
    """A run that was killed had logged steps that its last.pt does not have. They come again."""
    before = log(out)
    assert [row["step"] for row in before] == ["20", "40", "60"]
    with open(out / "log.csv", "a", encoding="utf-8", newline="") as f:
        f.write("80,10240,9.5,3.0,,0.001,1000,,\r\n100,12800,9.9,2.9,2.9,0.001,1000,,\r\n")
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 90))
    rows = log(out)
    assert rows[:3] == before
    assert [row["step"] for row in rows] == ["20", "40", "60", "80", "90"] and rows[3]["seconds"] != "9.5"
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)


def test_rows_of_an_older_log_get_empty_fields(tmp_path):
    old = "step,chars,seconds,train_loss,val_loss,lr,tokens_per_s\r\n20,2560,0.031,4.1,,0.001,47711\r\n"
    (tmp_path / "log.csv").write_bytes(old.encode())
    assert RunFolder(tmp_path).trim_log(20) == (2560, 0.031)
    assert [(row["tokens_per_s"], row["grad_norm"], row["muon_share"]) for row in log(tmp_path)] == [("47711", "", "")]


def test_a_row_that_a_full_disk_cut_short_does_not_stop_a_resume(tmp_path):
    """Whole rows stay as they are. A row cut anywhere is dropped."""
    rows = "20,2560,0.031,4.1,,0.001,47711,1.5,0.1\r\n40,5120,0.054,3.7,3.6,0.002,85681,1.2,0.1\r\n"
    whole = ",".join(HEADER) + "\r\n" + rows
    rows, path = whole.splitlines(), tmp_path / "log.csv"
    for cut in range(whole.index("\r\n40,") + 2, len(whole) + 1):
        path.write_bytes(whole[:cut].encode())
        try:
            RunFolder(tmp_path).trim_log(60)
        except Exception as error:
            pytest.fail(f"after {whole[:cut].splitlines()[-1]!r}: {type(error).__name__}: {error}")
        kept = path.read_bytes().decode().splitlines()
        assert kept in (rows[:2], rows), whole[:cut].splitlines()[-1]


@linux
def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path):
    """An error that names no file is taken for one of stdout."""
    for name in ("log.csv", "samples.txt"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left.*log\.csv"):
        RunFolder(tmp_path).log({"step": 1})
    with pytest.raises(OSError, match=r"No space left.*samples\.txt"):
        RunFolder(tmp_path).add_sample(1, "text")


# -- samples.txt -------------------------------------------------------------------------------------------------------


def test_samples_of_a_resumed_run_are_those_of_an_undisturbed_one(data_dir, tmp_path):
    """A killed run has samples of steps that its last.pt does not have. They come again. The next run moves them."""
    flags = [*SMALL, "--data_dir", data_dir, "--sample_interval", 2, "--save_interval", 5, "--max_iters"]
    ok(here(*flags, 9, "--out_dir", tmp_path / "whole"))
    ok(here(*flags, 6, "--out_dir", tmp_path / "out"))
    whole, samples = (tmp_path / name / "samples.txt" for name in ("whole", "out"))
    with open(samples, "a", encoding="utf-8") as f:
        f.write("=== step 8 ===\nof another run\n\n=== step 10 ===\ncut sho")
    ok(here("--init_from", "resume", "--out_dir", tmp_path / "out", "--max_iters", 9, "--lr_decay_iters", 9))
    text = samples.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("===")] == [f"=== step {n} ===" for n in (2, 4, 6, 8)]
    assert "another run" not in text and len(text) == len(whole.read_text(encoding="utf-8"))
    ok(here(*flags, 1, "--out_dir", tmp_path / "out"))
    assert (tmp_path / "out" / "previous" / "samples.txt").read_text(encoding="utf-8") == text
    assert not samples.exists()


# -- the folder and its lock -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file/out", "file"])
def test_an_out_dir_that_cannot_be_made_is_one_line(name, data_dir, tmp_path):
    (tmp_path / "file").write_text("here first")
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path / name, "--max_iters", "1")
    assert_one_line(result, "cannot write", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "here first"


NAMES = ("last.pt", "ckpt.pt", "log.csv", "samples.txt", ".lock")
OBSTACLES = [*itertools.product(NAMES, ["mkdir", "mkfifo"]), (".last.pt.tmp", "mkdir")]  # a pipe there is removed


@unix
@pytest.mark.parametrize("name, kind", OBSTACLES)
def test_what_is_in_the_place_of_a_file_is_found_before_the_first_step(name, kind, out, data_dir):
    """At the first save the earlier run has moved, and minutes are lost. A pipe would block for ever."""
    (out / name).unlink(missing_ok=True)
    getattr(os, kind)(out / name)
    before = contents(out)
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", out, "--max_iters", "1", "--sample_interval", "1")
    assert_one_line(result, out / name, "folder" if name.endswith(".tmp") else "not a regular file")
    assert contents(out) == before


def test_a_resume_finds_a_folder_in_the_place_of_the_best_weights_in_one_line(out):
    """The weights are not gone, so the run does not say so."""
    (out / "ckpt.pt").unlink()
    (out / "ckpt.pt").mkdir()
    before = contents(out)
    result = here("--init_from", "resume", "--out_dir", out, "--max_iters", 61)
    assert_one_line(result, out / "ckpt.pt", "not a regular file")
    assert contents(out) == before


@unix
@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to(file.with_name("precious"))])
def test_what_is_in_the_place_of_a_temporary_file_is_removed(make, out):
    """A link that somebody else has made would be followed. A pipe would block for ever."""
    (out / "precious").write_text("precious", encoding="utf-8")
    make(out / ".last.pt.tmp")
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 61))
    assert (out / "precious").read_text(encoding="utf-8") == "precious"
    assert load(out / "last.pt")["iter_num"] == 61 and not (out / "last.pt").is_symlink()


@linux
def test_an_out_dir_where_no_folder_can_be_made_is_one_line_that_says_so(data_dir):
    """The system calls it "no such file", which must not pass for a missing input."""
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", "/proc/none", "--max_iters", "1")
    assert_one_line(result, "cannot write /proc/none", "older checkpoints are whole")


@pytest.mark.slow
def test_a_second_run_in_an_out_dir_is_refused_until_the_first_is_dead(data_dir, tmp_path):
    """The lock needs no cleaning up, because kill -9 frees it."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--max_iters", 10**6, "--log_interval", 1]
    process = start(*flags, "--save_interval", 2)
    with process:
        for line in process.stdout:
            if line.startswith("step 4/"):
                break
        for more in (flags, ["--init_from", "resume", "--out_dir", tmp_path]):
            assert_one_line(child(*more), tmp_path, "another run")
        assert not (tmp_path / "previous").exists()
        process.kill()
    ok(child("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", load(tmp_path / "last.pt")["iter_num"] + 2))


# -- saves -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_last_is_written_at_every_save_interval(data_dir, tmp_path):
    """With save_interval 3 and no evaluation before step 8, a run killed at step 8 leaves step 6 behind."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path, "--save_interval", 3, "--eval_interval", 1000]
    process = start(*flags, "--max_iters", 10**6, "--log_interval", 1)
    for line in process.stdout:
        if line.startswith("step 8/"):
            process.kill()
            break
    process.communicate(timeout=60)
    assert load(tmp_path / "last.pt")["iter_num"] % 3 == 0 and load(tmp_path / "last.pt")["iter_num"] >= 6
    assert not (tmp_path / "ckpt.pt").exists()


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_weights_of_an_undisturbed_one(data_dir, tmp_path):
    """kill -9, at least 20 times, from the first import to the last save. Each time the folder can be resumed."""
    flags = [*STATEFUL, "--save_interval", 7, "--eval_interval", 11, "--log_interval", 3, "--data_dir", data_dir]
    steps, out, rng = 1500, tmp_path / "out", np.random.default_rng(0)
    ok(child(*flags, "--max_iters", steps, "--out_dir", tmp_path / "whole"))
    kills, progress = 0, set()
    while not (out / "last.pt").exists() or load(out / "last.pt")["iter_num"] < steps:
        assert kills < 300, "it gets nowhere"
        resume = ["--init_from", "resume"] if (out / "last.pt").exists() else []
        process = start(*flags, *resume, "--max_iters", steps, "--out_dir", out)
        if kills < 25 or not resume:
            for line in process.stdout:  # mostly past the imports, which take longer than anything else
                if line.startswith("step") or rng.random() < 0.1:
                    break
            time.sleep(rng.uniform(0, 0.25))
            process.kill()
            kills += 1
        _, stderr = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL) and "Traceback" not in stderr, stderr
        if (out / "last.pt").exists():
            progress.add(load(out / "last.pt")["iter_num"])
            log(out)
    assert kills >= 20 and len(progress) > 5
    assert_same_run(tmp_path / "whole", out)
    assert [row["step"] for row in log(out)] == [row["step"] for row in log(tmp_path / "whole")]
    assert not [path for path in out.iterdir() if path.suffix == ".tmp"]
