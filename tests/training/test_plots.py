"""kvgpt/training/plots.py: loss.png."""

import shutil
import time

from helpers import SMALL, here, ok, start, unix
from kvgpt.training.plots import plot_loss


def test_plot_draws_this_run_and_the_one_before(data_dir, tmp_path):
    flags = [*SMALL, "--max_iters", 6, "--eval_interval", 2, "--data_dir", data_dir, "--out_dir", tmp_path, "--plot"]
    ok(here(*flags))
    alone = (tmp_path / "loss.png").read_bytes()
    ok(here(*flags))
    both = (tmp_path / "loss.png").read_bytes()
    assert alone[:8] == both[:8] == b"\x89PNG\r\n\x1a\n" and alone != both


def test_the_plot_can_be_seen_while_the_run_goes_on(data_dir, tmp_path):
    flags = ["--max_iters", 10**9, "--eval_interval", 5, "--data_dir", data_dir, "--out_dir", tmp_path, "--plot"]
    process = start(*SMALL, *flags)
    try:
        drawn, since = [], time.monotonic()
        while len(drawn) < 2 and process.poll() is None and time.monotonic() < since + 60:
            content = (tmp_path / "loss.png").read_bytes() if (tmp_path / "loss.png").exists() else b""
            if b"IEND" in content[-12:] and content not in drawn:  # IEND ends a whole PNG
                drawn.append(content)
            time.sleep(0.05)
        assert len(drawn) == 2 and process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_damaged_run_before_stops_no_plot(out):
    """A row that is no row of numbers is left out, and a checkpoint that cannot be read costs the name of its run."""
    previous = out / "previous"
    shutil.copytree(out, previous)
    (previous / "last.pt").write_bytes(b"damaged")
    with open(previous / "log.csv", "a", encoding="utf-8", newline="") as f:
        f.write(f"80,10240,1.2.3,3.0,,0.001,1000,,\r\n80,10240,9.5,x,,0.001,1000,,\r\n80,{'9' * 5000},9.5,3.0,,,,,\r\n")
    plot_loss(out)
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (previous / "last.pt").unlink()
    (previous / "last.pt").mkdir()
    plot_loss(out)


@unix
def test_a_picture_is_whole_at_every_moment(out):
    """A viewer that has the old picture open reads all of it."""
    plot_loss(out)
    whole = (out / "loss.png").read_bytes()
    with open(out / "loss.png", "rb") as old:
        (out / "log.csv").write_text("", encoding="utf-8")
        plot_loss(out)
        assert old.read() == whole != (out / "loss.png").read_bytes()
