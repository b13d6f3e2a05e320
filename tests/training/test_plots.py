"""kvgpt/training/plots.py: loss.png."""

from helpers import SMALL, here, ok


def test_plot_draws_this_run_and_the_one_before(data_dir, tmp_path):
    flags = [*SMALL, "--max_iters", 6, "--eval_interval", 2, "--data_dir", data_dir, "--out_dir", tmp_path, "--plot"]
    ok(here(*flags))
    alone = (tmp_path / "loss.png").read_bytes()
    ok(here(*flags))
    both = (tmp_path / "loss.png").read_bytes()
    assert alone[:8] == both[:8] == b"\x89PNG\r\n\x1a\n" and alone != both
