"""The folder of a run: log.csv, and the run that was there before."""

from helpers import (
    BROKEN,
    HEADER,
    SMALL,
    contents,
    here,
    load,
    log,
    ok,
)
from train import begin_folder

# -- the run before ----------------------------------------------------------------------------------------------------


def test_every_earlier_run_is_kept_and_a_run_that_saved_nothing_is_none(out, data_dir):
    """A forgotten --init_from resume must not cost a run. But one that breaks before its first save left only a log."""
    flags = [*SMALL, "--data_dir", data_dir, "--out_dir", out, "--max_iters", 2]
    first = contents(out)
    assert here(*flags, *BROKEN).returncode != 0
    assert contents(out).keys() == {"log.csv"} and contents(out / "previous-1") == first
    ok(here(*flags))
    second = contents(out)
    assert f"to {out / 'previous-2'}" in ok(here(*flags)).stdout
    assert contents(out / "previous-1") == first and contents(out / "previous-2") == second
    assert len([*out.glob("previous-*")]) == 2
    ok(here("--init_from", "resume", "--out_dir", out / "previous-1", "--max_iters", "61"))


# -- log.csv -----------------------------------------------------------------------------------------------------------

ROWS = "20,0.031,4.1,,0.001,47711,1.5\r\n40,0.054,3.7,3.6,4.76e-151,85681,1.2\r\n"


def test_a_row_cut_short_or_newer_than_the_checkpoint_is_dropped_and_others_stay_to_the_byte(tmp_path):
    """A full disk cuts a row short, and a killed run has logged steps that its last.pt does not have."""
    whole, path = ",".join(HEADER) + "\r\n" + ROWS, tmp_path / "log.csv"
    first = "".join(whole.splitlines(keepends=True)[:2])

    def kept(content, newest):
        path.write_bytes(content.encode())
        begin_folder(tmp_path, newest)
        return path.read_bytes().decode()

    for cut in range(whole.index("\r\n40,") + 2, len(whole) + 1):
        assert kept(whole[:cut], 60) == (whole if cut == len(whole) else first), whole[:cut][-20:]
    assert kept(whole, 39) == first
    assert kept(whole, 40) == whole
    assert kept(whole, 20) == first  # the row of the step is still due


def test_a_damaged_row_of_the_log_is_dropped_and_the_others_stay(out):
    lines = (out / "log.csv").read_bytes().splitlines(keepends=True)
    for damaged in (lines[:1] + [b"2x" + lines[1][2:]] + lines[2:], []):  # or the whole file is empty
        (out / "log.csv").write_bytes(b"".join(damaged))
        more = load(out / "last.pt")["iter_num"] + 1
        ok(here("--init_from", "resume", "--out_dir", out, "--max_iters", more))
        assert (out / "log.csv").read_bytes().startswith(b"".join(lines[:1] + lines[2:] if damaged else lines[:1]))
        assert [row["step"] for row in log(out)][-1] == str(more)
