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


def titans(**options):
    """Titans without its neural memory. Each step is given all tokens so far, and computes only the newest one."""
    from titans_pytorch import MemoryAsContextTransformer

    sizes = dict(num_tokens=64, dim=64, depth=2, segment_len=16, dim_head=16, heads=4, neural_memory_layers=())
    model = MemoryAsContextTransformer(**sizes, num_residual_streams=1, **options)

    def step(ids, cache):
        seen, state = cache
        logits = []
        for part in [ids] if state is None else ids.split(1, 1):
            seen = torch.cat((seen, part), 1)
            new, state = model(seen, cache=state, return_cache=True)
            logits.append(new[:, -part.size(1) :])
        return torch.cat(logits, 1), (seen, state)

    def new(rows, length):
        return torch.empty(rows, 0, dtype=torch.long), None

    return dict(full=model, new=new, step=step)


def whisper():
    """Hooks keep a dict whose keys are modules. It masks a chunk wrongly, but never feeds one."""
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(
        ModelDimensions(8, 10, 64, 4, 1, n_vocab=64, n_text_ctx=128, n_text_state=64, n_text_head=4, n_text_layer=2)
    )
    nn.init.normal_(model.decoder.positional_embedding)  # torch.empty until a checkpoint is loaded

    def step(ids, cache, audio):
        cache, hooks = model.install_kv_cache_hooks(cache)
        try:
            return model.decoder(ids, audio, kv_cache=cache), cache
        finally:
            for hook in hooks:
                hook.remove()

    return dict(
        model=model,
        full=lambda ids, audio: model.decoder(ids, audio),
        new=lambda rows, length: {},
        step=step,
        reorder=lambda cache, rows: {module: kept[rows] for module, kept in cache.items()},
        inputs=dict(audio=torch.randn(8, 10, 64)),
        context=128,
    )


def axiomlm(paged=False, **options):
    """paged: the cache of generate_with_cache() for a single sample."""
    from axiomlm.engine.paged_cache import PagedKVCache, SequenceContext
    from axiomlm.models.transformer import ModelConfig, Transformer

    model = Transformer(ModelConfig(block_size=256, vocab_size=64, n_layer=2, n_head=4, n_embd=64, **options))

    def new(rows, length):
        return [[SequenceContext(PagedKVCache(16, 16, 2, 4, 16))] * 2 for _ in range(rows)] if paged else [None] * 2

    def step(ids, cache):
        if paged:  # a SequenceContext is of one row
            return torch.cat([model(row[None], kv_caches=held)[0] for row, held in zip(ids, cache)])
        logits, _, cache = model(ids, kv_caches=cache)
        return logits, cache

    return dict(full=model, new=new, step=step, context=256, window=options.get("sliding_window"))


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


def mini_infer(**options):
    """Its model, and the loop of its engine, which shares pages among all requests."""
    from mini_infer.engine import InferenceEngine
    from mini_infer.models.config import Qwen2Config
    from mini_infer.models.qwen2 import Qwen2ForCausalLM

    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = Qwen2Config(**sizes, num_key_value_heads=2, head_dim=16)
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():  # with small weights, it repeats its last token whatever comes before
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    engine = InferenceEngine(model, config, device=torch.device("cpu"), **options)

    def with_cache(prompt, count):
        request = engine.add_request(prompt, max_tokens=count)
        while len(request.output_token_ids) < count:
            engine.step()
        return request.output_token_ids

    def without(prompt, count):
        ids = torch.tensor([prompt])
        for _ in range(count):
            ids = torch.cat((ids, model(ids)[0][:, -1:].argmax(-1)), dim=1)
        return ids[0, len(prompt) :].tolist()

    def generate(ids, count, use_cache):
        return torch.tensor([(with_cache if use_cache else without)(row, count) for row in ids.tolist()])

    step = lambda ids, cache: model(ids, past_key_values=cache)  # noqa: E731
    return dict(full=model, new=lambda rows, length: None, step=step, generate=generate)


def kvboost(chunk_size=32):
    """Its cache of prefixes: a step gives the engine all tokens so far, which reuses the chunks that it knows."""
    import transformers
    from kvboost import GenerationMode, KVBoost

    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    ids_as_text = SimpleNamespace(
        encode=lambda ids, **options: ids, decode=lambda ids, **options: "", eos_token_id=None
    )
    engine = KVBoost(model, ids_as_text, max_cache_bytes=10**9, chunk_size=chunk_size, device="cpu")

    def new(rows, length):
        engine.reset_cache()
        return [[] for _ in range(rows)]

    def step(ids, texts):
        logits = []
        for text, tokens in zip(texts, ids.tolist()):
            text += tokens
            result = engine.generate(list(text), max_new_tokens=1, mode=GenerationMode.PREFIX_CACHE)
            logits.append(torch.tensor(result.first_token_logits))
        return torch.stack(logits)

    return dict(model=model, full=lambda ids: model(ids).logits, new=new, step=step)
