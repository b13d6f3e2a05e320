"""What bench.py measures beside the kit: the cache as articles write it, transformers, and llama2.c."""

import ctypes
import subprocess
import tempfile
import timeit
from pathlib import Path

import torch
from torch.nn import functional as F

from model import Sampling, decode_tokens


@torch.no_grad()
def require_same_logits(other, model):
    """Raise ValueError unless other(idx) gives the model's logits over a whole context.

    A peer knows the networks of this kit, but not what you make of model.py.
    """
    idx = torch.arange(model.config.block_size, device=model.lm_head.weight.device)[None] % model.config.vocab_size
    if not torch.allclose(other(idx), model(idx)[0], atol=1e-3, rtol=1e-3):
        raise ValueError("it computes another network than this model.py")


# -- a loop over heads -------------------------------------------------------------------------------------------------


class LoopHead:
    """Head i of a layer, with matrices of its own and a cache that torch.cat copies at every step."""

    def __init__(self, attn, i):
        n, (weight, bias) = attn.n_head, (attn.c_attn.weight, attn.c_attn.bias)
        weights = weight.chunk(3 * n)[i::n]  # query, key and value
        biases = [None] * 3 if bias is None else bias.chunk(3 * n)[i::n]
        self.projections = list(zip(weights, biases))
        self.key_cache = self.value_cache = None

    def __call__(self, x):
        """x `(B, T, C)` -> `(B, T, hs)`. The T positions see the cached ones, and are cached themselves."""
        q, k, v = (F.linear(x, weight, bias) for weight, bias in self.projections)
        if self.key_cache is not None:
            k, v = torch.cat((self.key_cache, k), dim=1), torch.cat((self.value_cache, v), dim=1)
        self.key_cache, self.value_cache = k, v
        scores = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5  # (B, T, S)
        T, S = scores.shape[-2:]
        visible = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        return F.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v


class PerHeadLoop:
    """One generation by the model's own weights, with a Python loop over the heads of each layer."""

    def __init__(self, model):
        self.model, self.num_cached = model, 0
        self.layers = [[LoopHead(block.attn, i) for i in range(block.attn.n_head)] for block in model.transformer["h"]]

    def __call__(self, idx):
        """Return the logits `(B, T, V)` for idx `(B, T)`, which follows the cached positions."""
        parts, pos = self.model.transformer, torch.arange(self.num_cached, self.num_cached + idx.size(1))
        x = parts["wte"](idx) + parts["wpe"](pos.to(idx.device))
        for block, heads in zip(parts["h"], self.layers):
            normed = block.ln_1(x)
            x = x + block.attn.c_proj(torch.cat([head(normed) for head in heads], dim=-1))
            x = x + block.mlp(block.ln_2(x))
        self.num_cached += idx.size(1)
        return self.model.unembed(parts["ln_f"](x))

    @torch.inference_mode()
    def next_logits(self, tokens, start, end):
        return self(tokens[:, self.num_cached : end])[:, -1]


def per_head_loop(model):
    """Return stream(idx, max_new_tokens, seed=seed), like GPT.stream. Raises ValueError unless attention is GPT-2's."""
    config = model.config
    if config.pos_emb != "learned" or config.qk_norm or not config.norm_first or config.num_kv_heads != config.n_head:
        raise ValueError("the loop over heads computes GPT-2's attention, and this model has another")
    require_same_logits(PerHeadLoop(model), model)

    def stream(idx, max_new_tokens, seed):
        return decode_tokens(PerHeadLoop(model).next_logits, config, idx, max_new_tokens, Sampling(seed=seed))

    return stream


# -- transformers ------------------------------------------------------------------------------------------------------


def transformers_run(model):
    """Return run(idx, max_new_tokens, seed, record): a generation by transformers' class for the same network.

    `generate` draws its own random numbers. Raises ValueError if transformers has no class for this network.
    """
    import transformers

    from kvgpt.export.hf import to_transformers

    transformers.logging.set_verbosity_error()
    hf = to_transformers(model)
    require_same_logits(lambda idx: hf(idx).logits, model)

    def run(idx, max_new_tokens, seed, record):
        def after_step(ids, scores, **_):  # a stopping criterion that never stops
            record(ids[:, -1:])
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        torch.manual_seed(seed)
        hf.generate(
            idx,
            attention_mask=torch.ones_like(idx),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=Sampling.temperature,
            top_k=0,
            stopping_criteria=transformers.StoppingCriteriaList([after_step]),
        )

    return run


# -- llama2.c ----------------------------------------------------------------------------------------------------------

# the functions of llama2.c in a loop over one text, without its tokenizer and its printing
LLAMA2C_LOOP = """
#define TESTING
#include "run.c"
#include <omp.h>
static Transformer transformer;
static Sampler sampler;
void load(char *file, float temperature) {
    build_transformer(&transformer, file);
    build_sampler(&sampler, transformer.config.vocab_size, temperature, 1.0f, 1);
}
void run(int *tokens, int length, int threads) {
    int before = omp_get_max_threads(); /* torch's number, too */
    omp_set_num_threads(threads);
    for (int pos = 0; pos < length - 1; pos++)
        tokens[pos + 1] = sample(&sampler, forward(&transformer, tokens[pos], pos));
    omp_set_num_threads(before);
}
"""


def llama2c_run(config, folder):
    """Return run(idx, max_new_tokens, seed, record) of llama2.c, for one token. It records the whole text as one block.

    llama2.c computes another network, with RMSNorm and interleaved rotary positions, so we give it random weights and
    an MLP that makes its parameters as many as those of `config`. Raises ValueError without a clone of it in `folder`.
    """
    if not folder or not Path(folder, "run.c").is_file():
        raise ValueError("--llama2c must name a clone of llama2.c, which holds run.c")
    C, L, V, S = config.n_embd, config.n_layer, config.vocab_size, config.block_size
    kv_width = config.num_kv_heads * config.head_size
    hidden = int(config.mlp_ratio * C * 2 / 3 / 8 + 0.999) * 8
    num_weights = V * C + L * (2 * C + 2 * C * C + 2 * C * kv_width + 3 * C * hidden) + C + S * config.head_size
    header = torch.tensor([C, hidden, L, config.n_head, config.num_kv_heads, V, S], dtype=torch.int32)

    with tempfile.TemporaryDirectory() as temporary:
        source, compiled, program, weights = (Path(temporary) / name for name in ("loop.c", "loop.o", "loop.so", "bin"))
        source.write_text(LLAMA2C_LOOP, encoding="utf-8")
        flags = ["-Ofast", "-march=native", "-fopenmp", "-w", "-fPIC", f"-I{Path(folder).resolve()}"]
        subprocess.run(["cc", *flags, "-c", source, "-o", compiled], check=True)
        # linked without -Ofast, which would make the whole process round subnormal numbers to 0
        subprocess.run(["cc", "-shared", "-fopenmp", compiled, "-o", program, "-lm"], check=True)
        weights.write_bytes(header.numpy().tobytes() + (0.02 * torch.randn(num_weights)).numpy().tobytes())
        library = ctypes.CDLL(str(program))
        library.load(str(weights).encode(), ctypes.c_float(Sampling.temperature))

    def generate(first, length, threads):
        tokens = (ctypes.c_int * length)(first)
        library.run(tokens, length, threads)
        return tokens[1:]

    def seconds(threads):
        return min(timeit.repeat(lambda: generate(1, S, threads), number=1))

    threads = min({1, torch.get_num_threads()}, key=seconds)

    def run(idx, max_new_tokens, seed, record):
        if idx.numel() > 1:
            raise ValueError("llama2.c writes one text at a time, from one token: leave out --batch")
        record(torch.tensor([generate(idx.item(), 1 + max_new_tokens, threads)]))

    return run
