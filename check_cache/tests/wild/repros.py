"""Bugs of real decoders, shown with nothing but PyTorch and the library itself. test_wild.py runs them."""

import torch


def x_transformers_greedy(**options):
    """Return how many of 160 greedy tokens differ with the cache."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **options)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=256, attn_layers=layers)).eval()
    prompt = torch.randint(64, (4, 8))
    with_cache, without = (model.generate(prompt, 40, temperature=0.0, cache_kv=use) for use in (True, False))
    return (with_cache != without).sum().item()


@torch.no_grad()
def x_transformers_leak(**options):
    """Return how far the first 20 logits move when 20 tokens follow. In a causal decoder, they cannot move."""
    from x_transformers import Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **options)
    model = TransformerWrapper(num_tokens=64, max_seq_len=256, attn_layers=layers).eval()
    ids = torch.randint(64, (1, 40))
    return (model(ids)[:, :20] - model(ids[:, :20])).abs().max().item()


@torch.no_grad()
def litgpt_logits(name, chunks, **options):
    """Return how far the cache moves the worst logit at each of 40 positions, fed in chunks of these sizes."""
    from litgpt.config import Config
    from litgpt.model import GPT

    torch.manual_seed(0)
    small = dict(n_layer=2, n_embd=64, n_head=4, head_size=16, intermediate_size=128, padded_vocab_size=64)
    model = GPT(Config.from_name(name, block_size=64, **small, **options)).eval()
    ids, pos = torch.randint(64, (1, 40)), torch.arange(40)
    without = model(ids)
    model.set_kv_cache(batch_size=1)
    got = torch.cat([model(*part) for part in zip(ids.split(chunks, 1), pos.split(chunks))], 1)
    return (got - without).abs().amax(-1)[0]


def local_attention_greedy(**options):
    """Return how many of 480 greedy tokens differ with the cache, which generate() uses unless told otherwise."""
    from local_attention import LocalTransformer

    torch.manual_seed(0)
    sizes = dict(num_tokens=64, dim=64, depth=2, heads=4, dim_head=16, max_seq_len=256, local_attn_window_size=16)
    model = LocalTransformer(**sizes, **options).eval()
    prompt = torch.randint(64, (4, 8))
    with_cache, without = (model.generate(prompt, 120, temperature=0.0, use_kv_cache=use) for use in (True, False))
    return (with_cache != without).sum().item()


@torch.no_grad()
def local_attention_logits(**options):
    """Return how far the cache moves the worst logit at each position from 8 on, fed as generate() feeds it."""
    from local_attention import LocalTransformer

    torch.manual_seed(0)
    sizes = dict(num_tokens=64, dim=64, depth=2, heads=4, dim_head=16, max_seq_len=256, local_attn_window_size=16)
    model = LocalTransformer(**sizes, **options).eval()
    ids, cache, errors = torch.randint(64, (1, 64)), None, []
    without = model(ids)
    for end in range(9, 65):
        logits, cache = model(ids[:, :end], cache=cache, return_cache=True)
        errors.append((logits[:, -1] - without[:, end - 1]).abs().max())
    return torch.stack(errors)


def torchtune_gemma2_greedy(window):
    """Return how many of 160 greedy tokens (top_k=1) differ with the cache."""
    from torchtune.generation import generate
    from torchtune.models.gemma2 import gemma2

    torch.manual_seed(0)
    sizes = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, embed_dim=64, intermediate_dim=128)
    model = gemma2(vocab_size=64, max_seq_len=64, sliding_window_size=window, **sizes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    prompt = torch.randint(1, 64, (4, 8))
    without, _ = generate(model, prompt, max_generated_tokens=40, top_k=1)
    model.setup_caches(batch_size=4, dtype=torch.float32, decoder_max_seq_len=48)
    with_cache, _ = generate(model, prompt, max_generated_tokens=40, top_k=1)
    return (with_cache != without).sum().item()


@torch.no_grad()
def moshi_stream(chunk, context):
    """Return how far streaming moves the output at each of 40 frames, fed `chunk` frames at a time."""
    from moshi.modules.transformer import StreamingTransformer

    torch.manual_seed(0)
    options = dict(causal=True, context=context, positional_embedding="rope")
    model = StreamingTransformer(d_model=64, num_heads=4, num_layers=2, dim_feedforward=128, **options).eval()
    frames = torch.randn(1, 40, 64)
    without = model(frames)
    with model.streaming(1):
        got = torch.cat([model(part) for part in frames.split(chunk, 1)], 1)
    return (got - without).abs().amax(-1)[0]


@torch.no_grad()
def llms_from_scratch_gpt2(**options):
    """Return how far the cache moves the logits of the ninth token."""
    from llms_from_scratch.kv_cache.gpt2 import GPTModel, KVCache

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, context_length=64, emb_dim=64, n_heads=4, n_layers=2, drop_rate=0.0)
    model, cache = GPTModel(dict(sizes, qkv_bias=False)).eval(), KVCache(n_layers=2)
    ids = torch.randint(64, (1, 9))
    without = model(ids)[:, -1]
    model(ids[:, :8], cache=cache, **options)
    return (model(ids[:, 8:], cache=cache, **options)[:, -1] - without).abs().max().item()


def titans_greedy(prompt=16, **options):
    """Return how many of 160 greedy tokens differ with the cache. A segment has 16 tokens."""
    from titans_pytorch import MemoryAsContextTransformer

    torch.manual_seed(0)
    sizes = dict(num_tokens=64, dim=64, depth=2, segment_len=16, dim_head=16, heads=4, neural_memory_layers=())
    model = MemoryAsContextTransformer(**sizes, num_residual_streams=1, **options).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(64, (4, prompt))
    greedy = dict(seq_len=prompt + 40, temperature=0.0, show_progress=False)
    with_cache, without = (model.sample(ids, use_cache=use, **greedy) for use in (True, False))
    return (with_cache != without).sum().item()
