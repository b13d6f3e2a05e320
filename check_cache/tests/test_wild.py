"""Real decoders from the package index, right and wrong. repros.py shows each bug without check_cache."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from check_cache import check_cache, copies_of
from check_cache.tests.wild import repros

PACKAGES = Path(__file__).parent / "wild" / ".packages"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs make check_cache/tests/wild/.packages"),
]
# what these libraries import for text, sound, data and training. Their decoders compute nothing with it
UNUSED = {"curated_tokenizers", "dacite", "datasets", "fairscale", "lightning", "lightning_utilities", "mlstm_kernels"}
UNUSED |= {"omegaconf", "sentencepiece", "sphn", "tiktoken", "timm", "torchao", "torchdata"}
WINDOW = 16


class Unused(MetaPathFinder, Loader):
    """Makes `import` find an empty module for each that nothing is computed with."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec):
        return MagicMock()

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module", autouse=True)
def packages():
    """Let these tests, and no others, import the libraries."""
    unused = Unused()
    sys.path.append(str(PACKAGES))
    sys.meta_path.append(unused)
    yield
    sys.meta_path.remove(unused)
    sys.path.remove(str(PACKAGES))
    for name in [name for name in sys.modules if name.split(".")[0] in UNUSED]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Adapters. Each returns the arguments of check_cache for a small model with these options


def x_transformers(**options):
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, verbose=False, **options)
    net = TransformerWrapper(num_tokens=64, max_seq_len=256, attn_layers=layers)
    loop = AutoregressiveWrapper(net)

    def step(ids, cache):
        new = dict(input_not_include_cache=True, cache_age=ids.size(1))
        return net(ids, cache=cache, return_intermediates=True, **new)

    def change(cache, function):
        for layer in cache.attn_intermediates:
            layer.cached_kv = [function(part) for part in layer.cached_kv]

    def crop(cache, length):
        change(cache, lambda part: part[..., :length, :])
        cache.cache_length = length

    return dict(
        full=net,
        new=lambda rows, length: None,
        step=step,
        crop=crop,
        reorder=lambda cache, rows: change(cache, lambda part: part[rows]),
        generate=lambda ids, count, use_cache: loop.generate(ids, count, temperature=0.0, cache_kv=use_cache),
        context=256,
    )


def litgpt(name, most=None, **options):
    """most: how many tokens at a time go into the cache."""
    from litgpt.config import Config
    from litgpt.model import GPT

    sizes = dict(n_layer=2, n_embd=64, n_head=4, head_size=16, intermediate_size=128, padded_vocab_size=64)
    model = GPT(Config.from_name(name, block_size=512, **sizes, **options))

    def step(ids, cache, pos):
        parts = zip(ids.split(most or ids.size(1), 1), pos[0].split(most or ids.size(1)))
        return torch.cat([cache(*part) for part in parts], 1)

    new = copies_of(model, lambda model, rows, length: model.set_kv_cache(rows, length))
    return dict(full=model, new=new, step=step, window=options.get("sliding_window_size"))


def local_attention(**options):
    from local_attention import LocalTransformer

    sizes = dict(num_tokens=64, dim=64, depth=2, heads=4, dim_head=16, max_seq_len=256)
    model = LocalTransformer(**sizes, local_attn_window_size=WINDOW, **options)

    def step(ids, cache):
        """Feed one token at a time after the first step, with all tokens before it, as generate() does."""
        seen, kept = cache or (ids[:, :0], None)
        logits = []
        for part in [ids] if kept is None else ids.split(1, 1):
            seen = torch.cat((seen, part), 1)
            new, kept = model(seen, cache=kept, return_cache=True)
            logits.append(new)
        return torch.cat(logits, 1), (seen, kept)

    return dict(full=model, new=lambda rows, length: None, step=step, context=256, window=WINDOW)


def torchtune(name, **options):
    from torchtune.models.gemma2 import gemma2
    from torchtune.models.llama3_1 import llama3_1

    build = dict(gemma2=gemma2, llama3_1=llama3_1)[name]
    sizes = dict(num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, intermediate_dim=128)
    model = build(vocab_size=64, max_seq_len=256, **sizes, **options)

    def setup(model, rows, length):
        dtype = next(model.parameters()).dtype
        model.setup_caches(batch_size=rows, dtype=dtype, decoder_max_seq_len=length)

    def step(ids, cache, pos):
        seen = torch.arange(cache.decoder_max_cache_seq_len) <= pos[..., None]
        return cache(ids, mask=seen, input_pos=pos)

    window = options.get("sliding_window_size")
    return dict(full=model, new=copies_of(model, setup), step=step, context=248, window=window)


def curated_transformers(name, **options):
    from curated_transformers import models
    from curated_transformers.layers import AttentionMask

    sizes = dict(dtype=torch.float32, hidden_width=64, n_hidden_layers=2, n_pieces=64)
    config = getattr(models, f"{name}Config")(**sizes, **options)
    model = getattr(models, f"{name}CausalLM")(config)

    def run(ids, cache, mask, pos):
        mask = torch.ones_like(ids) if mask is None else mask
        return model(ids, AttentionMask(mask.bool()), cache=cache, positions=pos, store_cache=True)

    def step(ids, cache, mask, pos):
        if mask is None:
            mask = torch.ones(len(ids), (cache[0].key.size(2) if cache else 0) + ids.size(1))
        output = run(ids, cache, mask, pos)
        return output.logits, output.cache

    def full(ids, mask, pos):
        return run(ids, None, mask, pos).logits

    return dict(full=full, new=lambda rows, length: None, step=step)


def llms_from_scratch(name, flags=None, **options):
    """The position of the next token is in the model, so a cache is a copy of the model that has a KVCache."""
    from llms_from_scratch.kv_cache.gpt2 import GPTModel
    from llms_from_scratch.kv_cache.llama3 import Llama3Model
    from llms_from_scratch.kv_cache.qwen3 import Qwen3Model
    from llms_from_scratch.kv_cache.utils import KVCache

    build = dict(gpt2=GPTModel, llama3=Llama3Model, qwen3=Qwen3Model)[name]
    config = dict(vocab_size=64, context_length=256, emb_dim=64, n_heads=4, n_layers=2, hidden_dim=128, n_kv_groups=2)
    config |= dict(head_dim=16, qk_norm=True, rope_base=1e4, rope_freq=None, dtype=torch.float32)
    model = build(config | dict(drop_rate=0.0, qkv_bias=False))

    def setup(model, rows, length):
        model.kv_cache = KVCache(n_layers=2)

    def step(ids, cache):
        return cache(ids, cache=cache.kv_cache, **(flags or {}))

    return dict(full=model, new=copies_of(model, setup), step=step)


def mambapy():
    """Jamba: layers with keys and values, and layers with a recurrent state. It takes one token at a time."""
    from mambapy.jamba import JambaLM, JambaLMConfig

    sizes = dict(d_model=64, n_layers=4, mlp_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    model = JambaLM(JambaLMConfig(**sizes, num_experts=1, attn_layer_offset=1, attn_layer_period=2))

    def new(rows, length):
        return [layer.get_empty_cache(rows, None) for layer in model.jamba.layers]

    return dict(full=model, new=new, step=one_by_one(model.step))


def xlstm():
    from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMLMModel, xLSTMLMModelConfig

    block = mLSTMBlockConfig(mLSTMLayerConfig(num_heads=4))
    sizes = dict(context_length=256, num_blocks=2, embedding_dim=64, vocab_size=64)
    model = xLSTMLMModel(xLSTMLMModelConfig(mlstm_block=block, **sizes))
    model.reset_parameters()
    return dict(full=model, new=lambda rows, length: {}, step=one_by_one(model.step), context=256)


def torchscale():
    """RetNet, which takes all tokens so far in each step, and computes the newest one."""
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder

    sizes = dict(decoder_embed_dim=64, decoder_value_embed_dim=128, decoder_ffn_embed_dim=128, decoder_layers=2)
    config = RetNetConfig(vocab_size=64, decoder_retention_heads=4, **sizes)
    model = RetNetDecoder(config, embed_tokens=nn.Embedding(64, 64))

    def step(token, cache):
        seen, state = cache
        seen = torch.cat((seen, token), 1)
        return model(seen, incremental_state=state)[0], (seen, state)

    def new(rows, length):
        return torch.empty(rows, 0, dtype=torch.long), {}

    return dict(full=model, new=new, step=one_by_one(step), context=256)


def one_by_one(step):
    """Return a step that takes any number of tokens, from one that takes one."""

    def steps(ids, cache):
        logits = []
        for token in ids.split(1, 1):
            new, cache = step(token, cache)
            logits.append(new)
        return torch.cat(logits, 1), cache

    return steps


class Moshi(nn.Module):
    """Token ids in, and logits out, around moshi's transformer, which makes frames of frames."""

    def __init__(self, context):
        from moshi.modules.transformer import StreamingTransformer

        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        sizes = dict(d_model=64, num_heads=4, num_layers=2, dim_feedforward=128)
        options = dict(causal=True, context=context, positional_embedding="rope")
        self.transformer = StreamingTransformer(**sizes, **options)

    def forward(self, ids):
        return self.head(self.transformer(self.embedding(ids)))


def moshi(context):
    model = Moshi(context)
    new = copies_of(model, lambda model, rows, length: model.transformer.streaming_forever(rows))
    return dict(full=model, new=new, step=lambda ids, cache: cache(ids), window=context)


WINDOWED = dict(sliding_window_size=WINDOW, sliding_window_indices=[1, 1], rope_indices=[1, 1])
GEMMA_2 = dict(sliding_window_size=64, sliding_window_indices=[1, 0])  # the window is longer than the texts

RIGHT = {
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
    "litgpt: Pythia": lambda: litgpt("pythia-14m"),
    "litgpt: Gemma 3, one token at a time": lambda: litgpt("Gemma-3-1b-it", most=1, **WINDOWED),
    "LLMs-from-scratch: Llama 3": lambda: llms_from_scratch("llama3"),
    "LLMs-from-scratch: Qwen 3": lambda: llms_from_scratch("qwen3"),
    "local-attention: position bias": lambda: local_attention(use_dynamic_pos_bias=True),
    "mambapy: Jamba": mambapy,
    "moshi: up to its context": lambda: moshi(context=64),
    "torchscale: RetNet": torchscale,
    "torchtune: Llama 3.1": lambda: torchtune("llama3_1"),
    "torchtune: Gemma 2, up to its window": lambda: torchtune("gemma2", head_dim=16, sliding_window_size=64),
    "xlstm: mLSTM": xlstm,
    "x-transformers: absolute": x_transformers,
    "x-transformers: rotary": lambda: x_transformers(rotary_pos_emb=True),
    "x-transformers: GQA": lambda: x_transformers(rotary_pos_emb=True, attn_kv_heads=2),
    "x-transformers: ALiBi": lambda: x_transformers(alibi_pos_bias=True),
}

# what is wrong: (the adapter, whether it is wrong without check_cache, what the report says of it)
WRONG = {
    "litgpt: Gemma 2": (
        lambda: litgpt("Gemma-2-2b", **GEMMA_2),
        lambda: (repros.litgpt_logits("Gemma-2-2b", [10] + [1] * 30, **GEMMA_2) > 0.01).all(),
        "sees slot 1, and should not",
    ),
    "litgpt: Gemma 3, chunks over a full window": (
        lambda: litgpt("Gemma-3-1b-it", most=8, **WINDOWED),
        lambda: (repros.litgpt_logits("Gemma-3-1b-it", [8] * 5, **WINDOWED)[WINDOW:] > 0.01).all(),
        "sees slot 0 (position 16), and should not",
    ),
    "LLMs-from-scratch: GPT-2, the cache as generate() gives it": (
        lambda: llms_from_scratch("gpt2"),
        lambda: repros.llms_from_scratch_gpt2() > 0.1,
        "attention reads 1 slots and needs 17",
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
    "moshi: two frames at a time over a full context": (
        lambda: moshi(context=WINDOW),
        lambda: (repros.moshi_stream(2, WINDOW)[WINDOW::2] > 0.01).all(),
        "position 15 gives slot 2 a weight of",
    ),
    "torchtune: Gemma 2 past its window": (
        lambda: torchtune("gemma2", head_dim=16, sliding_window_size=WINDOW),
        lambda: repros.torchtune_gemma2_greedy(8) > 10,
        "position 16 sees slot 0, and should not",
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
}


def raises(error, function, **options):
    with pytest.raises(error):
        function(**options)
    return True


def said(report):
    """Return the text of a report as one line, whatever its line breaks are."""
    return " ".join(str(report).split())


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    check_cache(**RIGHT[name](), length=48).assert_right()


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    adapter, proof, cause = WRONG[name]
    assert proof()
    torch.manual_seed(0)
    report = check_cache(**adapter(), length=48)
    assert report.exit_code == 1
    assert cause in said(report)


def test_repros_find_nothing_in_right_decoders():
    assert (repros.litgpt_logits("pythia-14m", [8] * 5) < 1e-4).all()
    assert (repros.litgpt_logits("Gemma-3-1b-it", [8] * 2 + [1] * 24, **WINDOWED) < 1e-4).all()
    assert (repros.local_attention_logits(use_dynamic_pos_bias=True) < 1e-4).all()
    assert (repros.moshi_stream(1, WINDOW) < 1e-4).all()
    assert repros.local_attention_greedy(use_dynamic_pos_bias=True) == 0
    assert repros.torchtune_gemma2_greedy(64) == 0
    for options in (dict(), dict(rotary_pos_emb=True), dict(alibi_pos_bias=True)):
        assert repros.x_transformers_greedy(**options) == repros.x_transformers_leak(**options) == 0


@pytest.mark.parametrize("option", ["attn_orthog_projected_values", "orthog_residual"])
def test_a_decoder_that_sees_later_tokens_without_a_cache(option):
    """No cache can be right then, so the report blames the decoder."""
    assert repros.x_transformers_leak(**{option: True}) > 1e-3
    report = check_cache(**x_transformers(**{option: True}), length=48)
    assert report.exit_code == 2
    assert "when later tokens are left out" in said(report)
