"""Adapters of real decoders. Each function returns the arguments of check_cache for a small model with the options."""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from bugs import copies_of


def bare(*names):
    """Let us import modules of these packages without their __init__, which imports all of the library."""
    for name in names:
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [*find_spec(name).submodule_search_locations]
            sys.modules[name] = module


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
    """most: how many tokens to feed to the cache at a time."""
    from litgpt.config import Config
    from litgpt.model import GPT

    sizes = dict(n_layer=2, n_embd=64, n_head=4, head_size=16, intermediate_size=128, padded_vocab_size=64)
    model = GPT(Config.from_name(name, block_size=512, **sizes, **options))

    def step(ids, cache, pos):
        parts = zip(ids.split(most or ids.size(1), 1), pos[0].split(most or ids.size(1)))
        return torch.cat([cache(*part) for part in parts], 1)

    new = copies_of(model, lambda model, rows, length: model.set_kv_cache(rows, length))
    return dict(full=model, new=new, step=step, window=options.get("sliding_window_size"))


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

    def full(ids):
        return run(ids, None, None, None).logits

    return dict(full=full, new=lambda rows, length: None, step=step)


class Tokens(nn.Module):
    """Adds token ids and logits to a transformer that turns features into features."""

    def __init__(self, body):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(64, 64), body, nn.Linear(64, 64)

    def forward(self, ids, *args, **options):
        return self.head(self.body(self.embedding(ids), *args, **options))


def audiocraft(**options):
    for name in ("xformers", "xformers.ops"):  # of which it uses this
        sys.modules[name] = SimpleNamespace(unbind=torch.unbind, memory_efficient_attention=None)
    sys.modules["xformers"].ops, sys.modules["xformers.ops"].LowerTriangularMask = sys.modules["xformers.ops"], object
    bare("audiocraft", "audiocraft.modules")
    from audiocraft.modules.transformer import StreamingModule, StreamingTransformer

    options = dict(custom=True) | options
    model = Tokens(StreamingTransformer(64, 4, 2, 128, causal=True, norm_first=True, dropout=0.0, **options))

    def setup(model, rows, length):
        for module in model.modules():
            if isinstance(module, StreamingModule):
                module._is_streaming = True  # as in `with model.streaming()`

    step, reset = lambda ids, cache: cache(ids), lambda cache: cache.body.reset_streaming()
    return dict(full=model, new=copies_of(model, setup), step=step, reset=reset, window=options.get("past_context"))


def fairseq2(window):
    """Mistral. Its parallelism asks which processes there are: one."""
    bare("fairseq2", "fairseq2.models", "fairseq2.models.mistral")
    import fairseq2.runtime.dependency as dependency
    from fairseq2.gang import create_fake_gangs

    cpu = torch.device("cpu")
    known = dict(get_current_gangs=lambda device: create_fake_gangs(cpu), get_current_device=lambda: cpu)
    dependency._resolver = SimpleNamespace(resolve=lambda kind: SimpleNamespace(**known))
    from fairseq2.models.mistral.config import MistralConfig
    from fairseq2.models.mistral.factory import create_mistral_model
    from fairseq2.nn import BatchLayout, IncrementalStateBag

    sizes = dict(model_dim=64, num_layers=2, num_attn_heads=4, num_key_value_heads=2, ffn_inner_dim=128)
    model = create_mistral_model(MistralConfig(**sizes, vocab_size=64, max_seq_len=256, attn_window_len=window))

    def step(ids, cache):
        logits = model(ids, BatchLayout.of(ids), state_bag=cache)
        cache.increment_step_nr(ids.size(1))
        return logits

    return dict(
        full=lambda ids: model(ids, BatchLayout.of(ids)),
        new=lambda rows, length: IncrementalStateBag(length + 1),
        step=step,
        reorder=lambda cache, rows: cache.reorder(rows),
        context=256,
        window=window,
    )
