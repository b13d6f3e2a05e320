"""kvgpt/training/plots.py: loss.png."""

import time

from helpers import SMALL, here, ok, start


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
