"""Real decoders from published packages, correct and wrong. repros.py shows each bug without check_cache."""

import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from check_cache import check_cache
from wild import repros
from wild.adapters import (
    audiocraft,
    axiomlm,
    curated_transformers,
    dalle,
    encodec,
    espnet,
    fairseq2,
    infini_transformer,
    kvboost,
    litgpt,
    llms_from_scratch,
    local_attention,
    mambapy,
    midigpt,
    mini_infer,
    moshi,
    muscriptor,
    native_sparse_attention,
    pocket_tts,
    speculative_decoding,
    titans,
    torchscale,
    torchtune,
    toto,
    transfusion,
    trim_transformer,
    whisper,
    x_transformers,
    xlstm,
)

PACKAGES = Path(__file__).parent / "wild" / ".packages"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of their packages, whose classes pytest-xdist cannot import to show them
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs wild/.packages: see wild/requirements.txt"),
]
# what these libraries import for text, sound, data and training. Their decoders do not compute with it
UNUSED = {"curated_tokenizers", "dacite", "datasets", "fairscale", "lightning", "lightning_utilities", "mlstm_kernels"}
UNUSED |= {"numba", "omegaconf", "sentencepiece", "sphn", "tensordict", "tiktoken", "timm", "torchao", "torchaudio"}
UNUSED |= {"ema_pytorch", "ftfy", "pkg_resources", "taming", "torchdata", "torchdiffeq", "youtokentome"}
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
    "curated-transformers: Falcon, one key": lambda: curated_transformers("Falcon", n_query_heads=4),
    "curated-transformers: GPT-NeoX": lambda: curated_transformers(
        "GPTNeoX", n_attention_heads=4, intermediate_width=128
    ),
    "curated-transformers: Llama, GQA": lambda: curated_transformers(
        "Llama", n_query_heads=4, n_key_value_heads=2, intermediate_width=128
    ),
    "curated-transformers: MPT, ALiBi": lambda: curated_transformers("MPT", n_attention_heads=4),
    "dalle: without shifted tokens": lambda: dalle(shift_tokens=False),
    "encodec: two codebooks": lambda: encodec(context=1000),
    "encodec: past its context": lambda: encodec(context=16),
    "espnet": espnet,
    "fairseq2: Mistral, up to its window": lambda: fairseq2(window=64),
    "infini-transformer": infini_transformer,
    "litgpt: Pythia": lambda: litgpt("pythia-14m"),
    "litgpt: Gemma 3, one token at a time": lambda: litgpt("Gemma-3-1b-it", most=1, **WINDOWED),
    "LLMs-from-scratch: Llama 3": lambda: llms_from_scratch("llama3"),
    "LLMs-from-scratch: Qwen 3": lambda: llms_from_scratch("qwen3"),
    "local-attention: position bias": lambda: local_attention(use_dynamic_pos_bias=True),
    "mambapy: Jamba": mambapy,
    "midigpt": midigpt,
    "kvboost: a prefix of one chunk": kvboost,
    "mini-infer without its prefix cache": lambda: mini_infer(enable_prefix_caching=False),
    "moshi: up to its context": lambda: moshi(context=64),
    "muscriptor": muscriptor,
    "native-sparse-attention: a prompt of a block": native_sparse_attention,
    "pocket-tts": pocket_tts,
    "pocket-tts: past its window": lambda: pocket_tts(window=WINDOW),
    "speculative-decoding": speculative_decoding,
    "titans: sliding window": lambda: titans(sliding_window_attn=True),
    "torchscale: RetNet": torchscale,
    "torchtune: Llama 3.1": lambda: torchtune("llama3_1"),
    "torchtune: Gemma 2, up to its window": lambda: torchtune("gemma2", head_dim=16, sliding_window_size=64),
    "transfusion: text": transfusion,
    "trim-transformer: a fixed scale": lambda: trim_transformer(scale=0.1),
    "whisper": lambda: whisper() | dict(skip=["chunks", "rollback"]),  # it never feeds several tokens later
    "xlstm: mLSTM": xlstm,
    "x-transformers: absolute": x_transformers,
    "x-transformers: rotary": lambda: x_transformers(rotary_pos_emb=True),
    "x-transformers: GQA": lambda: x_transformers(rotary_pos_emb=True, attn_kv_heads=2),
    "x-transformers: ALiBi": lambda: x_transformers(alibi_pos_bias=True),
}

# what is wrong: (the adapter, a proof without check_cache, what the report says about it)
WRONG = {
    "audiocraft: rotary, a first chunk longer than its context": (
        lambda: audiocraft(past_context=WINDOW, **ROPE),
        lambda: repros.audiocraft_features(WINDOW + 1, custom=True, past_context=WINDOW, **ROPE) > 0.01,
        "the new key of row 0, position 17 is wrong on arrival: its position is 16",
    ),
    "audiocraft: rotary, memory_efficient": (
        lambda: audiocraft(memory_efficient=True, custom=False, **ROPE),
        lambda: repros.audiocraft_features(8, memory_efficient=True, **ROPE) > 0.01,
        "position 16 is wrong on arrival: its position is 4",  # the number of heads
    ),
    "AxiomLM: learned positions, as in GPT-2": (
        lambda: axiomlm(arch="classic"),
        lambda: repros.axiomlm_greedy(2, arch="classic") > 40,
        "position 16 are wrong on arrival: its position is 0",
    ),
    "AxiomLM: sliding window": (
        lambda: axiomlm(sliding_window=WINDOW),
        lambda: repros.axiomlm_greedy(2, sliding_window=WINDOW) > 40,
        "position 16 sees slot 0, but should not",
    ),
    "AxiomLM: the paged cache, for a single sample": (
        lambda: axiomlm(paged=True),
        lambda: repros.axiomlm_greedy(1) > 20,
        "layer 1: slot 0 should hold the key of row 0, position 0, but holds something else",
    ),
    "fairseq2: Mistral, chunks past its window": (
        lambda: fairseq2(WINDOW),
        lambda: (repros.fairseq2_logits(4)[WINDOW:] > 0.01).all(),
        "which is in no slot",
    ),
    "toto": (
        toto,
        lambda: (repros.toto_features() > 5e-5).all(),
        "slot 0 should hold the key of row 0, position 0, but holds it rounded or scaled",
    ),
    "dalle: shifted tokens, the default": (
        dalle,
        lambda: (repros.dalle_logits(10) > 1e-3).all(),
        "wrong on arrival: a state that earlier tokens leave before attention",
    ),
    "infini-transformer: learned_delta_update": (
        lambda: infini_transformer(learned_delta_update=True),
        lambda: repros.infini_transformer_memory(learned_delta_update=True) > 0.1,
        "logits off by .* in a step of 3 rows and 16 tokens",
    ),
    "infini-transformer: generate": (
        lambda: infini_transformer(generate=True),
        repros.infini_transformer_forgets,
        "chooses different tokens",
    ),
    "native-sparse-attention: a prompt shorter than a block": (
        lambda: native_sparse_attention(prompt=1),
        lambda: (repros.native_sparse_attention_logits(2) > 0.01).any(),
        "WRONG decode from 1 token: ",
    ),
    "litgpt: Gemma 2": (
        lambda: litgpt("Gemma-2-2b", **GEMMA_2),
        lambda: (repros.litgpt_logits("Gemma-2-2b", [10] + [1] * 30, **GEMMA_2) > 0.01).all(),
        "sees slot 1, but should not",
    ),
    "litgpt: Gemma 3, chunks over a full window": (
        lambda: litgpt("Gemma-3-1b-it", most=8, **WINDOWED),
        lambda: (repros.litgpt_logits("Gemma-3-1b-it", [8] * 5, **WINDOWED)[WINDOW:] > 0.01).all(),
        "needs position [0-9]+, which is in no slot",
    ),
    "LLMs-from-scratch: GPT-2, the cache as generate() gives it": (
        lambda: llms_from_scratch("gpt2"),
        lambda: repros.llms_from_scratch_gpt2() > 0.1,
        "needs position [0-9]+, which is in no slot",
    ),
    "LLMs-from-scratch: GPT-2, use_cache=True": (
        lambda: llms_from_scratch("gpt2", flags=dict(use_cache=True)),
        lambda: raises(RuntimeError, repros.llms_from_scratch_gpt2, use_cache=True),
        "raises RuntimeError",
    ),
    "local-attention: rotary, the default": (
        local_attention,
        lambda: repros.local_attention_greedy() > 20,
        "logits off by",
    ),
    "local-attention: qk_rmsnorm": (
        lambda: local_attention(use_dynamic_pos_bias=True, qk_rmsnorm=True),
        lambda: repros.local_attention_greedy(use_dynamic_pos_bias=True, qk_rmsnorm=True) > 100,
        "logits off by",
    ),
    "local-attention: exact_windowsize=False": (
        lambda: local_attention(use_dynamic_pos_bias=True, exact_windowsize=False),
        lambda: repros.local_attention_logits(use_dynamic_pos_bias=True, exact_windowsize=False)[31 - 8] > 0.01,
        "logits off by",
    ),
    "kvboost: a prefix of several chunks": (
        kvboost,
        lambda: repros.kvboost_logits(100) > 0.1,
        "WRONG decode.*first at row 0, position 64, .*layer 1: slot 32 should hold the key and value of row 0",
    ),
    "mini-infer: a prefix that it knows": (
        mini_infer,
        lambda: repros.mini_infer_greedy() > 10,
        "WRONG generate: the (first|third) call of generate",
    ),
    "moshi: two frames at a time over a full context": (
        lambda: moshi(context=WINDOW),
        lambda: (repros.moshi_stream(2, WINDOW)[WINDOW::2] > 0.01).all(),
        "needs position [0-9]+, which is in no slot",
    ),
    "titans: a prompt that ends within a segment": (
        titans,
        lambda: repros.titans_greedy(prompt=24) > 20,
        "WRONG prefix used twice.*we see no attention over all tokens",
    ),
    "titans: persistent keys": (
        lambda: titans(num_persist_mem_tokens=4),
        lambda: repros.titans_greedy(num_persist_mem_tokens=4) > 5,
        "we see no attention over all tokens",
    ),
    "titans: persistent keys, sliding window": (
        lambda: titans(num_persist_mem_tokens=4, sliding_window_attn=True),
        lambda: repros.titans_greedy(num_persist_mem_tokens=4, sliding_window_attn=True) > 5,
        "we see no attention over all tokens",
    ),
    "torchtune: Gemma 2 past its window": (
        lambda: torchtune("gemma2", head_dim=16, sliding_window_size=WINDOW),
        lambda: repros.torchtune_gemma2_greedy(8) > 10,
        "position 16 sees slot 0, but should not",
    ),
    "x-transformers: shift_tokens": (
        lambda: x_transformers(shift_tokens=1),
        lambda: repros.x_transformers_greedy(shift_tokens=1) > 50,
        "layer 0: the new key and value of row 0, position 16",
    ),
    "x-transformers: attn_data_dependent_alibi": (
        lambda: x_transformers(attn_data_dependent_alibi=True),
        lambda: repros.x_transformers_greedy(attn_data_dependent_alibi=True) > 10,
        "position 16 gives slot 0 a weight of",
    ),
    "x-transformers: attn_data_dependent_alibi_per_row": (
        lambda: x_transformers(**PER_ROW),
        lambda: repros.x_transformers_greedy(**PER_ROW) > 50,
        "logits off by",
    ),
}


def raises(error, function, **options):
    with pytest.raises(error):
        function(**options)
    return True


def said(report):
    """Return a report as one line, without its line breaks."""
    return " ".join(str(report).split())


@pytest.mark.parametrize("name", CORRECT)
def test_correct(name):
    check_cache(**CORRECT[name](), length=48).assert_correct()


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    adapter, proof, cause = WRONG[name]
    assert proof()
    torch.manual_seed(0)
    report = check_cache(**adapter(), length=100 if name.startswith("kvboost") else 48)
    assert report.exit_code == 1
    assert re.search(cause, said(report)), report


def test_repros_find_nothing_in_correct_decoders():
    assert repros.audiocraft_features(WINDOW, custom=True, past_context=WINDOW, **ROPE) < 1e-5
    assert repros.audiocraft_features(32, custom=True, past_context=WINDOW) < 1e-5
    assert repros.audiocraft_features(8, memory_efficient=True) < 1e-5
    assert repros.axiomlm_greedy(2) == 0
    assert repros.mini_infer_greedy(enable_prefix_caching=False) == 0
    assert repros.kvboost_logits(44) < 1e-4
    assert (repros.fairseq2_logits(1) < 1e-4).all() and (repros.fairseq2_logits(40) < 1e-4).all()
    assert (repros.trim_transformer_features(scale=0.1) < 1e-4).all()
    assert (repros.litgpt_logits("pythia-14m", [8] * 5) < 1e-4).all()
    assert (repros.litgpt_logits("Gemma-3-1b-it", [8] * 2 + [1] * 24, **WINDOWED) < 1e-4).all()
    assert (repros.local_attention_logits(use_dynamic_pos_bias=True) < 1e-4).all()
    assert (repros.moshi_stream(1, WINDOW) < 1e-4).all()
    assert repros.local_attention_greedy(use_dynamic_pos_bias=True) == 0
    assert repros.torchtune_gemma2_greedy(64) == 0
    assert (repros.dalle_logits(10, shift_tokens=False) < 1e-4).all() and (repros.dalle_logits(0) < 1e-4).all()
    assert (repros.native_sparse_attention_logits(4) < 1e-4).all()
    assert repros.infini_transformer_memory() < 1e-4
    assert repros.titans_greedy() == repros.titans_greedy(prompt=24, sliding_window_attn=True) == 0
    for options in (dict(), dict(rotary_pos_emb=True), dict(alibi_pos_bias=True)):
        assert repros.x_transformers_greedy(**options) == repros.x_transformers_leak(**options) == 0


@pytest.mark.parametrize("option", ["attn_orthog_projected_values", "orthog_residual"])
def test_a_decoder_that_sees_later_tokens_without_a_cache(option):
    """Then no cache can be correct, so the report blames the decoder."""
    assert repros.x_transformers_leak(**{option: True}) > 1e-3
    report = check_cache(**x_transformers(**{option: True}), length=48)
    assert report.exit_code == 2
    assert "when later tokens are left out" in said(report)


def test_a_decoder_whose_logits_depend_on_the_length_of_its_input():
    assert (repros.trim_transformer_features() > 1).all()
    report = check_cache(**trim_transformer(), length=48)
    assert report.exit_code == 2
    assert "when later tokens are left out, from position 0 on" in said(report)


REPORTS = sorted((Path(__file__).parent / "wild" / "reports").glob("*.md"))


@pytest.mark.parametrize("file", REPORTS, ids=lambda file: file.stem)
def test_a_report_shows_what_it_says(file, capsys):
    assert repros.shows(file, capsys)


def test_defects_of_transformers():
    """test_families.py runs the checker on these."""
    assert (repros.nemotron_h_logits() > 1e-6).any()
    assert raises(RuntimeError, repros.falcon_h1_repeated)
