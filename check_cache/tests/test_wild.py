"""Real decoders from published packages, correct and wrong. wild/reports shows each bug without check_cache."""

import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from check_cache import check_cache
from reports import reports, shows
from wild.adapters import audiocraft, curated_transformers, fairseq2, litgpt, x_transformers

PACKAGES = Path(__file__).parent / "wild" / ".packages"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of their packages, whose classes pytest-xdist cannot import to show them
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs wild/.packages: see wild/requirements.txt"),
]
# what these libraries import for text, sound, data and training. Their decoders do not compute with it
UNUSED = {"curated_tokenizers", "dacite", "datasets", "lightning", "lightning_utilities"}
UNUSED |= {"numba", "omegaconf", "sentencepiece", "sphn", "tensordict", "tiktoken", "timm", "torchao", "torchaudio"}
UNUSED |= {"ftfy", "pkg_resources", "taming", "torchdata", "youtokentome"}
WINDOW = 16


class Unused(MetaPathFinder, Loader):
    """Makes `import` find an empty module for each name in UNUSED."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec):
        return MagicMock()

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module", autouse=True)
def packages():
    """Let these tests import the libraries, and no other tests."""
    unused = Unused()
    sys.path.append(str(PACKAGES))
    sys.meta_path.append(unused)
    audiocraft(), fairseq2(WINDOW)  # the scripts of their reports need what these put in place of other packages
    yield
    sys.meta_path.remove(unused)
    sys.path.remove(str(PACKAGES))
    for name in [name for name in sys.modules if name.split(".")[0] in UNUSED]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


WINDOWED = dict(sliding_window_size=WINDOW, sliding_window_indices=[1, 1], rope_indices=[1, 1])
GEMMA_2 = dict(sliding_window_size=64, sliding_window_indices=[1, 0])  # the window is longer than the sequences
PER_ROW = dict(attn_data_dependent_alibi=True, attn_data_dependent_alibi_per_row=True)

ROPE = dict(positional_embedding="rope")

CORRECT = {
    "audiocraft: MusicGen's positions": audiocraft,
    "audiocraft: past its context": lambda: audiocraft(past_context=WINDOW),
    "curated-transformers: Falcon, ALiBi": lambda: curated_transformers(
        "Falcon", n_query_heads=4, n_key_value_heads=4, use_alibi=True, use_parallel_attention=False
    ),
    "curated-transformers: Llama, GQA": lambda: curated_transformers(
        "Llama", n_query_heads=4, n_key_value_heads=2, intermediate_width=128
    ),
    "fairseq2: Mistral, up to its window": lambda: fairseq2(window=64),
    "litgpt: Pythia": lambda: litgpt("pythia-14m"),
    "litgpt: Gemma 3, one token at a time": lambda: litgpt("Gemma-3-1b-it", most=1, **WINDOWED),
    "x-transformers: absolute": x_transformers,
    "x-transformers: rotary": lambda: x_transformers(rotary_pos_emb=True),
    "x-transformers: GQA": lambda: x_transformers(rotary_pos_emb=True, attn_kv_heads=2),
    "x-transformers: ALiBi": lambda: x_transformers(alibi_pos_bias=True),
}

# what is wrong: (the adapter, what the check says about it)
WRONG = {
    "audiocraft: rotary, a first chunk longer than its context": (
        lambda: audiocraft(past_context=WINDOW, **ROPE),
        "the new key of row 0, position 17 is wrong on arrival: its position is 16",
    ),
    "audiocraft: rotary, memory_efficient": (
        lambda: audiocraft(memory_efficient=True, custom=False, **ROPE),
        "position 16 is wrong on arrival: its position is 4",  # the number of heads
    ),
    "fairseq2: Mistral, chunks past its window": (lambda: fairseq2(WINDOW), "which is in no slot"),
    "litgpt: Gemma 2": (lambda: litgpt("Gemma-2-2b", **GEMMA_2), "sees slot 1, but should not"),
    "litgpt: Gemma 3, chunks over a full window": (
        lambda: litgpt("Gemma-3-1b-it", most=8, **WINDOWED),
        "needs position [0-9]+, which is in no slot",
    ),
    "x-transformers: shift_tokens": (
        lambda: x_transformers(shift_tokens=1),
        "layer 0: the new key and value of row 0, position 16",
    ),
    "x-transformers: attn_data_dependent_alibi": (
        lambda: x_transformers(attn_data_dependent_alibi=True),
        "position 16 gives slot 0 a weight of",
    ),
    "x-transformers: attn_data_dependent_alibi_per_row": (lambda: x_transformers(**PER_ROW), "logits off by"),
}


def said(report):
    """Return a report as one line, without its line breaks."""
    return " ".join(str(report).split())


@pytest.mark.parametrize("name", CORRECT)
def test_correct(name):
    check_cache(**CORRECT[name](), length=48).assert_correct()


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    adapter, cause = WRONG[name]
    report = check_cache(**adapter(), length=48)
    assert report.exit_code == 1
    assert re.search(cause, said(report)), report


@pytest.mark.parametrize("option", ["attn_orthog_projected_values", "orthog_residual"])
def test_a_decoder_that_sees_later_tokens_without_a_cache(option):
    """Then no cache can be correct, so the report blames the decoder."""
    report = check_cache(**x_transformers(**{option: True}), length=48)
    assert report.exit_code == 2
    assert "when later tokens are left out" in said(report)


@pytest.mark.parametrize(("code", "said"), reports(Path(__file__).parent / "wild" / "reports"))
def test_a_report_shows_what_it_says(code, said, capsys):
    assert shows(code, said, capsys)
