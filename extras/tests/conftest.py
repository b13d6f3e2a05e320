"""Fixtures of extras/tests. Those of tests are there, too."""

import pytest

from extra_helpers import write_gpt2
from helpers import SAMPLE, here, ok

pytest_plugins = ["shared_fixtures", "prepare_fixtures"]


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """The folder of a random GPT-2 with a BPE of 512 tokens, and a text that is prepared for it."""
    folder = tmp_path_factory.mktemp("gpt2")
    write_gpt2(folder)
    flags = ["--input", SAMPLE, "--tokenizer", folder, "--data_dir", folder / "data"]
    ok(here(*flags, script="data/prepare.py"))
    return folder
