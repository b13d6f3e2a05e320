"""train.py's RunFolder: log.csv, samples, the lock, the figure, and the run that was there before."""

import pytest

from helpers import (
    BROKEN,
    HEADER,
    SMALL,
    assert_one_line,
    assert_refused,
    child,
    contents,
    here,
    load,
    log,
    ok,
    start,
)
from train import RunFolder

# -- the run before ----------------------------------------------------------------------------------------------------


def test_every_earlier_run_is_kept_and_a_run_that_saved_nothing_is_none(out, data_dir):
    """A forgotten --init_from resume must not cost a run. But one that breaks before its first save left only a log."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", out, "--max_iters", 2]
    first = contents(out)
    assert here(*flags, *BROKEN).returncode != 0
    assert contents(out).keys() == {"log.csv"} and contents(out / "previous") == first
    ok(here(*flags))
    second = contents(out)
    assert f"to {out / 'previous-2'}" in ok(here(*flags)).stdout
    assert contents(out / "previous") == first and contents(out / "previous-2") == second
    assert len([*out.glob("previous*")]) == 2
    ok(here("--init_from", "resume", "--out_dir", out / "previous", "--max_iters", "61"))


# -- log.csv -----------------------------------------------------------------------------------------------------------

ROWS = "20,2560,0.031,4.1,,0.001,47711,1.5\r\n40,5120,0.054,3.7,3.6,4.76e-151,85681,1.2\r\n"


def test_a_row_cut_short_or_newer_than_the_checkpoint_is_dropped_and_others_stay_to_the_byte(tmp_path):
    """A full disk cuts a row short, and a killed run has logged steps that its last.pt does not have."""
    whole, path = ",".join(HEADER) + "\r\n" + ROWS, tmp_path / "log.csv"
    rows = whole.splitlines(keepends=True)
    for cut in range(whole.index("\r\n40,") + 2, len(whole) + 1):
        path.write_bytes(whole[:cut].encode())
        counted = RunFolder(tmp_path).trim_log(60)
        kept = path.read_bytes().decode()
        assert (kept, counted) in (("".join(rows[:2]), (2560, 0.031)), (whole, (5120, 0.054))), whole[:cut][-20:]
    assert RunFolder(tmp_path).trim_log(39) == (2560, 0.031) and path.read_bytes().decode() == "".join(rows[:2])


def test_the_log_of_an_older_version_gets_todays_fields(tmp_path):
    old = "step,chars,seconds,train_loss,val_loss,lr\n20,2560,0.031,4.1,,0.001\n"
    (tmp_path / "log.csv").write_bytes(old.encode())  # an editor or git has changed the ends of lines
    assert RunFolder(tmp_path).trim_log(20) == (2560, 0.031)
    (row,) = log(tmp_path)
    assert row["lr"] == "0.001" and row["grad_norm"] is None


def test_a_damaged_log_is_one_line_and_a_run_goes_on_without_it(out):
    (out / "log.csv").write_bytes((out / "log.csv").read_bytes().replace(b"\n20,", b"\n2x,"))
    assert_refused(out, words=[out / "log.csv", "is damaged: remove it"])
    (out / "log.csv").unlink()
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 61))
    assert [row["step"] for row in log(out)] == ["61"]


# -- samples.txt and loss.png ------------------------------------------------------------------------------------------


def test_samples_go_on_after_a_resume_and_the_next_run_sets_them_aside(data_dir, tmp_path):
    flags = [*SMALL, "--data_dir", data_dir, "--sample_interval", 2, "--lr_decay_iters", 9, "--max_iters"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    ok(here(*flags, 9, "--out_dir", whole))
    ok(here(*flags, 6, "--out_dir", out))
    ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", 9))
    text = (out / "samples.txt").read_text(encoding="utf-8")
    assert text == (whole / "samples.txt").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("===")] == [f"=== step {n} ===" for n in (2, 4, 6, 8)]
    ok(here(*flags, 1, "--out_dir", out))
    assert (out / "previous" / "samples.txt").read_text(encoding="utf-8") == text
    assert not (out / "samples.txt").exists()


def test_samples_newer_than_the_checkpoint_are_dropped(tmp_path):
    """A killed run has written them, and the resumed run will write them again."""
    run = RunFolder(tmp_path)
    (tmp_path / "samples.txt").write_text("notes of a reader\n", encoding="utf-8")
    for step in (2, 4, 10):
        run.add_sample(step, f"\n=== not a header ===\ntext at {step}")
        if step == 4:
            kept = (tmp_path / "samples.txt").read_bytes()
    run.trim_samples(10)
    assert (tmp_path / "samples.txt").read_bytes() != kept
    run.trim_samples(9)
    assert (tmp_path / "samples.txt").read_bytes() == kept


# -- one run per folder, whole at any moment ---------------------------------------------------------------------------


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
            assert_one_line(child(*more), tmp_path, "another run is writing")
        assert not (tmp_path / "previous").exists()
        process.kill()
    ok(child("--init_from", "resume", "--out_dir", tmp_path, "--max_iters", load(tmp_path / "last.pt")["iter_num"] + 2))


def test_an_out_dir_that_cannot_be_made_is_one_line(data_dir, tmp_path):
    (tmp_path / "file").write_text("here first", encoding="utf-8")
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path / "file", "--max_iters", "1")
    assert_one_line(result, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "here first"
