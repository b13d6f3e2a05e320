"""Fixtures and hypothesis profiles of tests and of extras/tests, which each load this file as a plugin."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from helpers import SAMPLE, TINY, here, ok

torch.set_num_threads(1)

# a shell that starts the tests with & ignores Ctrl-C for them, and so would every process that a test starts
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)

# "kit" takes the same examples on every run. `pytest --hypothesis-profile random` searches for new ones.
untimed = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # another process may take the cores
settings.register_profile("kit", **untimed, derandomize=True, max_examples=40)
settings.register_profile("random", **untimed, max_examples=1000, print_blob=True)
settings.load_profile("kit")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """data/sample.txt, prepared."""
    folder = tmp_path_factory.mktemp("data")
    ok(here("--input", SAMPLE, "--data_dir", folder, script="data/prepare.py"))
    return folder


@pytest.fixture(scope="session")
def trained(data_dir, tmp_path_factory):
    """An out_dir after 60 steps of a tiny model on data/sample.txt."""
    folder = tmp_path_factory.mktemp("out")
    ok(here("--data_dir", data_dir, "--out_dir", folder, *TINY, "--max_iters", "60"))
    return folder


@pytest.fixture
def out(trained, tmp_path):
    """A copy of the trained out_dir, at step 60."""
    return Path(shutil.copytree(trained, tmp_path / "out"))
