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


def local_attention(window=16, **options):
    from local_attention import LocalTransformer

    sizes = dict(num_tokens=64, dim=64, depth=2, heads=4, dim_head=16, max_seq_len=256, local_attn_window_size=window)
    model = LocalTransformer(**sizes, **options)

    def step(ids, cache):
        """After the first step, feed one token at a time together with all tokens before it, as generate() does."""
        seen, kept = cache or (ids[:, :0], None)
        logits = []
        for part in [ids] if kept is None else ids.split(1, 1):
            seen = torch.cat((seen, part), 1)
            new, kept = model(seen, cache=kept, return_cache=True)
            logits.append(new)
        return torch.cat(logits, 1), (seen, kept)

    return dict(full=model, new=lambda rows, length: None, step=step, context=256, window=window)


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
    new, reset = copies_of(model, setup), lambda cache: cache.reset_caches()
    return dict(full=model, new=new, step=step, reset=reset, context=248, window=window)


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


def llms_from_scratch(name, flags=None, **options):
    """The model keeps the position of the next token, so each cache is a copy of the model with its own KVCache."""
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
    """Jamba: layers with keys and values, and layers with a recurrent state. Its step accepts one token at a time."""
    from mambapy.jamba import JambaLM, JambaLMConfig

    sizes = dict(d_model=64, n_layers=2, mlp_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
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
    """RetNet. Each step is given all tokens so far, and computes only the newest one."""
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
    """Turn a step for one token into a step for any number of tokens."""

    def steps(ids, cache):
        logits = []
        for token in ids.split(1, 1):
            new, cache = step(token, cache)
            logits.append(new)
        return torch.cat(logits, 1), cache

    return steps


class Tokens(nn.Module):
    """Adds token ids and logits to a transformer that turns features into features."""

    def __init__(self, body):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(64, 64), body, nn.Linear(64, 64)

    def forward(self, ids, *args, **options):
        return self.head(self.body(self.embedding(ids), *args, **options))


def moshi(context):
    from moshi.modules.transformer import StreamingTransformer

    sizes = dict(d_model=64, num_heads=4, num_layers=2, dim_feedforward=128)
    model = Tokens(StreamingTransformer(**sizes, causal=True, context=context, positional_embedding="rope"))
    new = copies_of(model, lambda model, rows, length: model.body.streaming_forever(rows))
    return dict(full=model, new=new, step=lambda ids, cache: cache(ids), window=context)


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


def speculative_decoding():
    from speculative_decoding.speculative_decoding import Decoder

    model = Decoder(num_tokens=64, dim=64, depth=2, heads=4, dim_head=16)

    def step(ids, cache):
        seen, state = cache
        seen = torch.cat((seen, ids), 1)
        logits, state = model(seen, cache=state, return_cache=True)
        return logits[:, -ids.size(1) :], (seen, state)

    def change(cache, function):
        seen, (kept, _) = cache
        return function(seen), (function(kept.movedim(-2, 1)).movedim(1, -2), None)

    return dict(
        full=model,
        new=lambda rows, length: (torch.empty(rows, 0, dtype=torch.long), None),
        step=step,
        crop=lambda cache, length: change(cache, lambda part: part[:, :length]),
        reorder=lambda cache, rows: change(cache, lambda part: part[rows]),
    )


def encodec(context):
    """A language model of two codebooks, whose codes we derive from one id."""
    from encodec.model import LMModel

    model = LMModel(n_q=2, card=64, dim=64, num_heads=4, num_layers=2, past_context=context)

    def run(ids, states=None, offset=0):
        probabilities, states, offset = model(torch.stack((ids, (ids + 1) % 64), 1), states, offset)
        return probabilities.log().sum(2).mT, (states, offset)

    return dict(full=run, new=lambda rows, length: (None, 0), step=lambda ids, cache: run(ids, *cache))


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


def dalle(**options):
    """An image of 64 tokens after 6 tokens of text. A step after the first is given all tokens so far."""
    from dalle_pytorch import DALLE, DiscreteVAE

    vae = DiscreteVAE(image_size=64, num_layers=3, num_tokens=64, codebook_dim=32, hidden_dim=16)
    model = DALLE(dim=64, vae=vae, num_text_tokens=50, text_seq_len=6, depth=2, heads=4, dim_head=16, **options)

    def full(ids, text, cache=None):
        return model(text, ids, cache=cache)[:, -ids.size(1) :, model.num_text_tokens :]

    def step(ids, cache, text):
        seen, state = cache
        logits = []
        for part in ids.split(1, 1) if seen.size(1) else [ids]:
            seen = torch.cat((seen, part), 1)
            logits.append(full(seen, text, state)[:, -part.size(1) :])
        return torch.cat(logits, 1), (seen, state)

    def new(rows, length):
        return torch.empty(rows, 0, dtype=torch.long), {}

    inputs = dict(text=torch.randint(1, 50, (8, 6)))
    return dict(model=model, full=full, new=new, step=step, inputs=inputs, vocab_size=64, context=64)


def native_sparse_attention(prompt=4):
    """Blocks of 4 tokens. prompt: the least number of tokens in the first step."""
    from native_sparse_attention_pytorch.transformer import Transformer

    blocks = dict(compress_block_size=4, compress_block_sliding_stride=4, selection_block_size=4)
    sparse = dict(sliding_window_size=8, num_selected_blocks=2, **blocks)
    sizes = dict(num_tokens=64, dim=32, depth=2, dim_head=8, heads=4, kv_heads=2)
    model = Transformer(**sizes, use_sparse_attn=True, sparse_attn_kwargs=sparse)
    eager = dict(disable_flex=True, disable_triton_kernel=True)

    def step(ids, cache):
        seen, state = cache
        if state is None and ids.size(1) < prompt:
            raise NotImplementedError(f"a prompt has at least {prompt} tokens")
        logits = []
        for part in [ids] if state is None else ids.split(1, 1):
            seen = torch.cat((seen, part), 1)
            new, state = model(seen, cache=state, return_cache=True, **eager)
            logits.append(new[:, -part.size(1) :])
        return torch.cat(logits, 1), (seen, state)

    def new(rows, length):
        return torch.empty(rows, 0, dtype=torch.long), None

    return dict(model=model, full=lambda ids: model(ids, **eager), new=new, step=step)


def infini_transformer(generate=False, **options):
    """Segments of 8 tokens. After each, keys and values become a memory."""
    from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

    model = InfiniTransformer(num_tokens=64, dim=32, depth=2, dim_head=8, heads=4, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("head_gates"):
            nn.init.zeros_(parameter)  # they start almost closed
    wrapper = InfiniTransformerWrapper(model, segment_length=8)

    def full(ids):
        logits, memories = [], None
        for segment in ids.split(8, 1):
            new, _, memories = model(segment, past_memories=memories, return_new_memories=True)
            logits.append(new)
        return torch.cat(logits, 1)

    def step(token, cache):
        segment, state, memories = cache
        segment = torch.cat((segment, token), 1)
        ends = segment.size(1) == 8
        logits, state, memories = model(segment, cached_kv=state, past_memories=memories, return_new_memories=ends)
        return logits[:, -1:], (segment[:, :0] if ends else segment, state, memories)

    def greedy(ids, count, use_cache):
        if use_cache:
            same = dict(temperature=0.0, filter_fn=lambda logits, **options: logits)
            return wrapper.generate(prompt=ids, seq_len=ids.size(1) + count, **same)
        for _ in range(count):
            ids = torch.cat((ids, full(ids)[:, -1:].argmax(-1)), 1)
        return ids

    def new(rows, length):
        return torch.empty(rows, 0, dtype=torch.long), None, None

    more = dict(generate=greedy) if generate else {}
    return dict(model=model, full=full, new=new, step=one_by_one(step), **more)


def trim_transformer(scale=None):
    from trim_transformer.transformer_layers import TrimTransformerEncoder, TrimTransformerEncoderLayer

    layer = TrimTransformerEncoderLayer(d_model=64, nhead=4, batch_first=True, scale=scale)
    model = Tokens(TrimTransformerEncoder(layer, num_layers=2))

    def step(ids, cache):
        return cache(ids, is_causal=True, use_kv_cache=True, update_kv_cache=True)

    full, reset = lambda ids: model(ids, is_causal=True), lambda cache: cache.body.clear_kv_cache()
    return dict(full=full, new=copies_of(model), step=step, reset=reset)


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


def toto():
    """Time series of two variates, whose patches we derive from ids."""
    from toto.model.transformer import Transformer
    from toto.model.util import KVCache

    sizes = dict(num_layers=2, embed_dim=64, num_heads=4)
    eager = dict(use_memory_efficient_attention=False)
    layers = dict(mlp_hidden_dim=128, dropout=0.0, spacewise_every_n_layers=2, spacewise_first=False)
    model = Tokens(Transformer(**sizes, **layers, **eager))

    def run(ids, cache=None):
        logits = model(torch.stack((ids, (ids + 1) % 64), 1), torch.zeros(len(ids), 2, ids.size(1)), cache)
        return logits.sum(1)

    def new(rows, length):
        more = dict(transformer_layers=model.body.layers, max_seq_len=length, dtype=model.head.weight.dtype)
        return KVCache(batch_size=rows, num_variates=2, **sizes, **more, **eager)

    return dict(model=model, full=run, new=new, step=run, reset=lambda cache: cache.reset())


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


def espnet():
    """A decoder of speech recognition. It keeps what each layer returns; a step is given all tokens so far."""
    bare("espnet", "espnet.nets", "espnet2", "espnet2.asr", "espnet2.asr.decoder")
    from espnet2.asr.decoder.transformer_decoder import TransformerDecoder, subsequent_mask

    sizes = dict(attention_heads=4, linear_units=128, num_blocks=2)
    model = TransformerDecoder(64, 64, **sizes, dropout_rate=0.0, positional_dropout_rate=0.0)

    def full(ids, memory):
        sizes = (torch.full((len(ids),), x.size(1)) for x in (memory, ids))
        return model(memory, next(sizes), ids, next(sizes))[0].log_softmax(-1)

    def step(ids, cache, memory):
        seen, state = cache
        seen = torch.cat((seen, ids), 1)
        logits, state = model.forward_one_step(seen, subsequent_mask(seen.size(1))[None], memory, cache=state)
        return logits, (seen, state)

    def change(cache, function):
        return function(cache[0]), [function(layer) for layer in cache[1]]

    return dict(
        model=model,
        full=full,
        new=lambda rows, length: (torch.empty(rows, 0, dtype=torch.long), None),
        step=step,
        crop=lambda cache, length: change(cache, lambda part: part[:, :length]),
        reorder=lambda cache, rows: change(cache, lambda part: part[rows]),
        inputs=dict(memory=torch.randn(8, 10, 64)),
        chunk=1,
    )


def pocket_tts(window=None):
    bare("pocket_tts", "pocket_tts.modules")
    from pocket_tts.modules.stateful_module import StatefulModule, increment_steps, init_states
    from pocket_tts.modules.transformer import StreamingTransformer

    sizes = dict(d_model=64, num_heads=4, num_kv_heads=2, num_layers=2, dim_feedforward=128)
    model = Tokens(StreamingTransformer(**sizes, context=window))
    for name, module in model.named_modules():
        if isinstance(module, StatefulModule):
            module._module_absolute_name = name

    def step(ids, cache):
        logits = model(ids, model_state=cache)
        increment_steps(model, cache, ids.size(1))
        return logits

    def crop(cache, length):
        for state in cache.values():
            state["offset"].fill_(length)

    full, new = lambda ids: model(ids, model_state=None), lambda rows, length: init_states(model, rows, length)
    return dict(full=full, new=new, step=step, crop=crop, window=window)


def muscriptor():
    """MIDI from music. Its cache accepts a prompt, then single tokens."""
    bare("muscriptor", "muscriptor.modules")
    from muscriptor.modules.streaming import increment_steps, init_states
    from muscriptor.modules.transformer import StreamingTransformer

    model = Tokens(StreamingTransformer(d_model=64, num_heads=4, num_layers=2, dim_feedforward=128))

    def step(ids, cache):
        logits = model(ids, model_state=cache)
        increment_steps(model, cache, ids.size(1))
        return logits

    return dict(full=model, new=lambda rows, length: init_states(model, rows, length), step=step)


def midigpt():
    bare("midigpt", "midigpt.inference")
    from midigpt.inference.model.gpt2 import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=256, n_embd=64, n_layer=2, n_head=4))

    def change(cache, function):
        return tuple(tuple(function(part) for part in layer) for layer in cache)

    return dict(
        full=model,
        new=lambda rows, length: None,
        step=lambda ids, cache: model(ids, cache),
        crop=lambda cache, length: change(cache, lambda part: part[:, :, :length]),
        reorder=lambda cache, rows: change(cache, lambda part: part[rows]),
        context=256,
    )


def transfusion():
    """Its text only. After the first step, a token sees all others of its step, so it takes one at a time."""
    from transfusion_pytorch import Transfusion

    model = Transfusion(num_text_tokens=64, dim_latent=16, transformer=dict(dim=64, depth=2, dim_head=16, heads=4))

    def step(ids, cache):
        return model.forward_text(ids, return_loss=False, return_kv_cache=True, cache=cache)

    full = lambda ids: model.forward_text(ids, return_loss=False)  # noqa: E731
    return dict(model=model, full=full, new=lambda rows, length: None, step=step, chunk=1)


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
