"""Fixtures of extras/tests. Those of tests are there, too."""

import pytest

from extra_helpers import write_gpt2
from helpers import SAMPLE, TINY, here, ok

pytest_plugins = ["shared_fixtures", "prepare_fixtures"]


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """The folder of a random GPT-2 with a BPE of 512 tokens, and a text that is prepared for it."""
    folder = tmp_path_factory.mktemp("gpt2")
    write_gpt2(folder)
    flags = ["--input", SAMPLE, "--tokenizer", folder, "--data_dir", folder / "data"]
    ok(here(*flags, script="data/prepare.py"))
    return folder


@pytest.fixture(scope="session")
def trained(data_dir, tmp_path_factory):
    """The out_dir of tests' fixture `trained`, whose checkpoints also hold n-grams for drafts, by extras.targets."""
    folder = tmp_path_factory.mktemp("out")
    flags = [*TINY, "--loss", "extras.targets", "--ngram_targets", 0, "--mtp_weight", 0, "--max_iters", 60]
    ok(here("--data_dir", data_dir, "--out_dir", folder, *flags))
    return folder
