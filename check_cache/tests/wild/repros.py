"""Bugs of real decoders, shown with nothing but PyTorch and the library itself. test_wild.py runs them."""

import re

import torch


def shows(file, capsys):
    """Run the script of a report. Return whether it prints what the report says, give or take what rounding does."""
    text = file.read_text(encoding="utf-8")
    code, said = re.findall(r"^```(?:python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(code, {})
    shown, said, number = capsys.readouterr().out.strip(), said.strip(), r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
    pairs = zip(re.findall(number, shown), re.findall(number, said))
    close = all(abs(float(got) - float(wanted)) <= 0.5 * float(wanted) + 1e-12 for got, wanted in pairs)
    return close and re.sub(number, "", shown) == re.sub(number, "", said)


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


@torch.no_grad()
def dalle_logits(primed, **options):
    """Return how far the cache moves the worst logit of the next image token, after `primed` tokens at once."""
    from dalle_pytorch import DALLE, DiscreteVAE

    torch.manual_seed(0)
    vae = DiscreteVAE(image_size=64, num_layers=3, num_tokens=64, codebook_dim=32, hidden_dim=16)
    model = DALLE(dim=64, vae=vae, num_text_tokens=50, text_seq_len=6, depth=2, heads=4, dim_head=16, **options).eval()
    text, image, cache, errors = torch.randint(1, 50, (1, 6)), torch.randint(64, (1, 40)), {}, []
    model(text, image[:, :primed], cache=cache)
    for end in range(primed + 1, 30):
        with_cache, without = (model(text, image[:, :end], cache=use)[:, -1] for use in (cache, None))
        errors.append((with_cache - without).abs().max())
    return torch.stack(errors)


@torch.no_grad()
def native_sparse_attention_logits(prompt):
    """Return how far the cache moves the worst logit at each position after a prompt. A block has 4 tokens."""
    from native_sparse_attention_pytorch.transformer import Transformer

    torch.manual_seed(0)
    blocks = dict(compress_block_size=4, compress_block_sliding_stride=4, selection_block_size=4)
    sparse = dict(sliding_window_size=8, num_selected_blocks=2, **blocks)
    sizes = dict(num_tokens=64, dim=32, depth=2, dim_head=8, heads=4, kv_heads=2)
    model = Transformer(**sizes, use_sparse_attn=True, sparse_attn_kwargs=sparse).eval()
    for name, parameter in model.named_parameters():
        if "compress_mem_kv" in name or "strategy" in name:  # zeros before training
            torch.nn.init.normal_(parameter, std=0.5)
    ids, eager = torch.randint(64, (1, 20)), dict(disable_flex=True, disable_triton_kernel=True)
    without, errors = model(ids, **eager), []
    _, cache = model(ids[:, :prompt], return_cache=True, **eager)
    for end in range(prompt + 1, 21):
        logits, cache = model(ids[:, :end], cache=cache, return_cache=True, **eager)
        errors.append((logits[:, -1] - without[:, end - 1]).abs().max())
    return torch.stack(errors)


@torch.no_grad()
def infini_transformer_memory(**options):
    """Return how far feeding a segment token by token moves its memory, relative to the largest entry."""
    from infini_transformer_pytorch import InfiniTransformer

    torch.manual_seed(0)
    model = InfiniTransformer(num_tokens=64, dim=32, depth=1, dim_head=8, heads=4, **options).eval()
    ids, cache = torch.randint(64, (1, 16)), None
    at_once = model(ids, return_new_memories=True)[2][0].kv_mem
    for end in range(1, 17):
        _, cache, memories = model(ids[:, :end], cached_kv=cache, return_new_memories=end == 16)
    return ((memories[0].kv_mem - at_once).abs().max() / at_once.abs().max()).item()


def infini_transformer_forgets():
    """Return whether two prompts of five segments that agree only in the last one have the same continuation."""
    from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

    torch.manual_seed(0)
    model = InfiniTransformer(num_tokens=64, dim=32, depth=1, dim_head=8, heads=4)
    torch.nn.init.zeros_(model.layers[0][0].fastweight_mem.head_gates)  # they start almost closed
    wrapper = InfiniTransformerWrapper(model, segment_length=8)
    prompts = torch.randint(64, (2, 40))
    prompts[1, 32:] = prompts[0, 32:]
    first, second = wrapper.generate(prompt=prompts, seq_len=60, temperature=0.0, filter_fn=lambda logits, **_: logits)
    return torch.equal(first, second)


@torch.no_grad()
def nemotron_h_logits():
    """Return how far the cache moves the worst logit at each of 20 positions after a prompt of 20."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
    mamba = dict(mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=8, expand=2)
    config = AutoConfig.for_model("nemotron_h", layers_block_type=["mamba", "attention"], head_dim=8, **sizes, **mamba)
    model = AutoModelForCausalLM.from_config(config).eval().double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.size(-1) ** -0.5)
    ids, errors = torch.randint(64, (1, 40)), []
    without = model(ids, use_cache=False).logits
    cache = model(ids[:, :20], use_cache=True).past_key_values
    for end in range(20, 40):
        logits = model(ids[:, end : end + 1], past_key_values=cache, use_cache=True).logits
        errors.append((logits[:, -1] - without[:, end]).abs().max())
    return torch.stack(errors)


@torch.no_grad()
def falcon_h1_repeated():
    """Feed a token after the cache of one prompt has been repeated for three samples."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    mamba = dict(mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
    config = AutoConfig.for_model("falcon_h1", head_dim=8, intermediate_size=48, **sizes, **mamba)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = model(torch.randint(64, (1, 20)), use_cache=True).past_key_values
    cache.batch_repeat_interleave(3)
    return model(torch.randint(64, (3, 1)), past_key_values=cache, use_cache=True).logits


@torch.no_grad()
def trim_transformer_features(scale=None):
    """Return how far the cache moves the worst feature at each of 32 positions after a prompt of 8."""
    from trim_transformer.transformer_layers import TrimTransformerEncoder, TrimTransformerEncoderLayer

    torch.manual_seed(0)
    layer = TrimTransformerEncoderLayer(d_model=64, nhead=4, batch_first=True, scale=scale)
    model, x = TrimTransformerEncoder(layer, num_layers=2).eval(), torch.randn(1, 40, 64)
    flags = dict(is_causal=True, use_kv_cache=True, update_kv_cache=True)
    got = torch.cat([model(part, **flags) for part in (x[:, :8], *x[:, 8:].split(1, 1))], 1)
    return (got - model(x, is_causal=True)).abs().amax(-1)[0, 8:]


def axiomlm_greedy(samples, **options):
    """Return how many of 40 greedy tokens per sample differ between generate_with_cache and generate_samples."""
    from types import SimpleNamespace

    from axiomlm.engine.inference import generate_samples, generate_with_cache
    from axiomlm.models.transformer import ModelConfig, Transformer

    torch.manual_seed(0)
    sizes = dict(block_size=64, vocab_size=64, n_layer=2, n_head=4, n_embd=64)
    model = Transformer(ModelConfig(**sizes, **options)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = SimpleNamespace(encode=lambda ids: ids, decode=lambda ids: ids)  # a tokenizer that leaves ids as they are
    greedy = dict(prompt=[*range(10)], num_samples=samples, max_length=50, temperature=0.0)
    with_cache, without = (write(model, ids, "cpu", **greedy) for write in (generate_with_cache, generate_samples))
    return (torch.tensor(with_cache) != torch.tensor(without)).sum().item()


@torch.no_grad()
def audiocraft_features(first, **options):
    """Return how far streaming moves the worst feature, `first` frames at once and then one at a time."""
    from audiocraft.modules.transformer import StreamingTransformer

    torch.manual_seed(0)
    model = StreamingTransformer(64, 4, 2, 128, causal=True, norm_first=True, dropout=0.0, **options).eval()
    frames = torch.randn(1, 40, 64)
    with model.streaming():
        parts = frames[:, :first], *frames[:, first:].split(1, 1)
        got = torch.cat([model(part) for part in parts], 1)
    return (got - model(frames)).abs().max().item()


@torch.no_grad()
def toto_features():
    """Return how far the cache moves the worst feature at each of 64 patches after 16."""
    from toto.model.transformer import Transformer
    from toto.model.util import KVCache

    torch.manual_seed(0)
    sizes = dict(num_layers=2, embed_dim=64, num_heads=4)
    more = dict(mlp_hidden_dim=128, dropout=0.0, spacewise_every_n_layers=2, spacewise_first=False)
    model = Transformer(**sizes, **more, use_memory_efficient_attention=False).eval()
    patches, group = torch.randn(1, 2, 80, 64), torch.zeros(1, 2, 80)
    sizes |= dict(batch_size=1, num_variates=2, transformer_layers=model.layers, max_seq_len=80)
    cache = KVCache(**sizes, use_memory_efficient_attention=False)
    parts = patches[:, :, :16], *patches[:, :, 16:].split(1, 2)
    got = torch.cat([model(part, group[:, :, : part.size(2)], cache) for part in parts], 2)
    return (got - model(patches, group)).abs().amax((0, 1, 3))[16:]


@torch.no_grad()
def fairseq2_logits(chunk):
    """Return how far the cache moves the worst logit at each of 40 positions, fed `chunk` tokens at a time."""
    from fairseq2.models.mistral.config import MistralConfig
    from fairseq2.models.mistral.factory import create_mistral_model
    from fairseq2.nn import BatchLayout, IncrementalStateBag

    torch.manual_seed(0)
    sizes = dict(model_dim=64, num_layers=2, num_attn_heads=4, num_key_value_heads=2, ffn_inner_dim=128)
    model = create_mistral_model(MistralConfig(**sizes, vocab_size=64, max_seq_len=64, attn_window_len=16)).eval()
    ids, state, got = torch.randint(64, (1, 40)), IncrementalStateBag(41), []
    for part in ids.split(chunk, 1):
        got.append(model(part, BatchLayout.of(part), state_bag=state))
        state.increment_step_nr(part.size(1))
    return (torch.cat(got, 1) - model(ids, BatchLayout.of(ids))).abs().amax(-1)[0]


@torch.no_grad()
def mini_infer_greedy(**options):
    """Return how many of 20 greedy tokens differ when an engine gets the same prompt for the second time."""
    from mini_infer.engine import InferenceEngine
    from mini_infer.models.config import Qwen2Config
    from mini_infer.models.qwen2 import Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = Qwen2Config(**sizes, num_key_value_heads=2, head_dim=16)
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    engine, prompt, outputs = InferenceEngine(model, config, device=torch.device("cpu"), **options), [*range(40)], []
    for _ in range(2):
        request = engine.add_request(prompt, max_tokens=20)
        while len(request.output_token_ids) < 20:
            engine.step()
        outputs.append(torch.tensor(request.output_token_ids))
    return (outputs[0] != outputs[1]).sum().item()


@torch.no_grad()
def kvboost_logits(length):
    """Return how far the first logit moves when a prompt of so many tokens comes for the second time."""
    from types import SimpleNamespace

    import transformers
    from kvboost import GenerationMode, KVBoost

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.3)).eval()
    ids_as_text = SimpleNamespace(
        encode=lambda ids, **options: ids, decode=lambda ids, **options: "", eos_token_id=None
    )
    engine = KVBoost(model, ids_as_text, max_cache_bytes=10**9, chunk_size=32, device="cpu")
    ids = torch.randint(64, (length,)).tolist()
    results = [engine.generate(ids, max_new_tokens=1, mode=GenerationMode.PREFIX_CACHE) for _ in range(2)]
    return abs(results[0].first_token_logits - results[1].first_token_logits).max().item()
