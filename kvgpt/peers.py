"""Baselines for bench.py: a loop over heads, a padded compiled forward, transformers, llama2.c, a copy in memory.

Each of the first three computes with the weights of the model that it is given. The model must be in eval mode.
"""

import ctypes
import statistics
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from kvgpt.decoding.timing import Timing
from kvgpt.export.hf import to_transformers
from model import Sampling, decode_tokens

# -- a loop over heads -------------------------------------------------------------------------------------------------


class LoopHead(nn.Module):
    """One head with three matrices of its own. Its cache grows by torch.cat, which copies all earlier slots."""

    def __init__(self, query, key, value):
        super().__init__()
        self.query, self.key, self.value = query, key, value
        self.clear_cache()

    def clear_cache(self):
        self.key_cache = self.value_cache = None

    def forward(self, x, kv_cache):
        """x `(B, T, C)` -> `(B, T, hs)`. With kv_cache, x also sees the cached positions and is cached itself."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if kv_cache:
            if self.key_cache is not None:
                k, v = torch.cat((self.key_cache, k), dim=1), torch.cat((self.value_cache, v), dim=1)
            self.key_cache, self.value_cache = k, v
        scores = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5  # (B, T, t)
        T, t = scores.shape[-2:]
        visible = torch.ones(T, t, dtype=torch.bool, device=x.device).tril(t - T)
        return F.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v


class PerHeadLoop(nn.Module):
    """The model with attention as articles about KV caches write it: a Python loop over the heads of a layer.

    kv_cache  keep keys and values in the heads; False feeds the whole context for every token
    Raises ValueError for a network whose attention is not GPT-2's.
    """

    def __init__(self, model, kv_cache):
        super().__init__()
        config = model.config
        own_keys = config.num_kv_heads == config.n_head and not config.qk_norm
        if config.pos_emb != "learned" or not config.norm_first or not own_keys:
            raise ValueError("the loop over heads computes GPT-2's attention only, and this model has another")
        self.model = model
        self.kv_cache = kv_cache
        self.layers = nn.ModuleList()
        for block in model.transformer["h"]:
            linears = split_linear(block.attn.c_attn, 3 * config.n_head)  # queries, keys, values of all heads
            heads = [LoopHead(*linears[i :: config.n_head]) for i in range(config.n_head)]
            self.layers.append(nn.ModuleList(heads))

    def clear_cache(self):
        for heads in self.layers:
            for head in heads:
                head.clear_cache()

    def num_cached(self):
        """Return the number of cached positions."""
        keys = self.layers[0][0].key_cache
        return 0 if keys is None else keys.size(1)

    def forward(self, idx):
        """Return logits `(B, T, V)` for idx `(B, T)`. The first position is the one after the cached positions."""
        start, parts = self.num_cached(), self.model.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(start, start + idx.size(1), device=idx.device))
        for block, heads in zip(parts["h"], self.layers):
            normed = block.ln_1(x)
            x = x + block.attn.c_proj(torch.cat([head(normed, self.kv_cache) for head in heads], dim=-1))
            x = x + block.mlp(block.ln_2(x))
        return self.model.lm_head(parts["ln_f"](x))

    @torch.inference_mode()
    def next_logits(self, tokens, start, end):
        """Return the logits `(B, V)` of the token after tokens[:, start:end]. See decode_tokens."""
        if self.num_cached() == end - 1 - start:
            start = end - 1  # feed the newest token only
        else:
            self.clear_cache()
        return self(tokens[:, start:end])[:, -1]

    def stream(self, idx, max_new_tokens, **sampling):
        """Yield the new tokens, a block `(B, 1)` per step, like GPT.stream."""
        self.clear_cache()
        return decode_tokens(self.next_logits, self.model.config, idx, max_new_tokens, Sampling(**sampling))


def split_linear(linear, num_parts):
    """Return num_parts nn.Linear layers. Their outputs, concatenated, are the output of `linear`."""
    biases = [None] * num_parts if linear.bias is None else linear.bias.detach().chunk(num_parts)
    parts = []
    for weight, bias in zip(linear.weight.detach().chunk(num_parts), biases):
        part = nn.Linear(weight.size(1), weight.size(0), bias=bias is not None, device=weight.device)
        part.weight = nn.Parameter(weight.clone())
        part.bias = None if bias is None else nn.Parameter(bias.clone())
        parts.append(part)
    return parts


# -- a compiled forward without a cache --------------------------------------------------------------------------------


def padded_stream(model):
    """Return stream(idx, max_new_tokens, **sampling) like GPT.stream: torch.compile instead of a cache.

    Every step feeds a context padded to block_size, so that one compiled program serves all steps. Attention is causal,
    so the padding changes no logits before it.
    """
    block_size = model.config.block_size
    torch._dynamo.reset()  # every model recompiles the same code, and torch.compile gives up after eight times

    @torch.compile(dynamic=False)
    def logits_at(context, last):
        return model.lm_head(model.hidden_states(context).index_select(1, last)[:, 0])

    @torch.inference_mode()
    def next_logits(tokens, start, end):
        context = tokens[:, start : start + block_size]  # the slots after `end` are the padding
        if context.size(1) < block_size:
            context = F.pad(context, (0, block_size - context.size(1)))
        # a tensor, because torch.compile would compile again for every new integer
        return logits_at(context, torch.tensor([end - start - 1], device=tokens.device))

    def stream(idx, max_new_tokens, **sampling):
        return decode_tokens(next_logits, model.config, idx, max_new_tokens, Sampling(**sampling))

    return stream


# -- transformers ------------------------------------------------------------------------------------------------------


def transformers_model(model):
    """Return the model as a class of transformers, after a check that both compute the same logits.

    Raises ValueError if transformers is missing or has no class for this network.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("transformers is not installed: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    hf, config = to_transformers(model), model.config
    idx = torch.arange(min(8, config.block_size), device=model.lm_head.weight.device)[None] % config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(hf(idx).logits, model(idx)[0], atol=1e-3, rtol=1e-3)
    return hf


def transformers_run(hf, **options):
    """Return run(idx, max_new_tokens, seed, record), one generation by transformers' generate.

    hf       a result of transformers_model
    options  arguments of generate: use_cache, cache_implementation
    record   called with the new tokens `(B, 1)` of each step
    generate draws its own random numbers, so the tokens differ from the kit's for the same seed.
    """
    from transformers import StoppingCriteriaList

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
            stopping_criteria=StoppingCriteriaList([after_step]),
            **options,
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
void run(int *tokens, int prompt, int length, int threads) {
    int before = omp_get_max_threads(); /* torch's number, too */
    omp_set_num_threads(threads);
    for (int pos = 0; pos < length - 1; pos++) {
        float *logits = forward(&transformer, tokens[pos], pos);
        if (pos + 1 >= prompt) tokens[pos + 1] = sample(&sampler, logits);
    }
    omp_set_num_threads(before);
}
"""


def llama2c_run(config, folder):
    """Return run(idx, max_new_tokens, seed, record) of llama2.c, plain C, for one row. It records one block.

    folder  a clone of llama2.c, which holds run.c
    The model has random weights, because llama2.c computes another network: RMSNorm, and interleaved rotary positions.
    Its MLP is as wide as makes its parameters equal those of `config`. One thread or all are used, the faster number.
    Raises ValueError if there is no run.c or no compiler, and for an odd head size.
    """
    if config.head_size % 2:
        raise ValueError(f"llama2.c rotates pairs of coordinates, and this model has heads of {config.head_size}")
    C, L, nkv, V, S = (
        config.n_embd,
        config.n_layer,
        config.num_kv_heads * config.head_size,
        config.vocab_size,
        config.block_size,
    )
    hidden = int(config.mlp_ratio * C * 2 / 3 / 8 + 0.999) * 8
    num_weights = V * C + L * (2 * C + 2 * C * C + 2 * C * nkv + 3 * C * hidden) + C + S * config.head_size
    header = torch.tensor([C, hidden, L, config.n_head, config.num_kv_heads, V, S], dtype=torch.int32)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        names = ("loop.c", "loop.o", "loop.so", "model.bin")
        source, compiled, program, model = (Path(temporary) / name for name in names)
        source.write_text(LLAMA2C_LOOP, encoding="utf-8")
        flags = ["-Ofast", "-march=native", "-fopenmp", "-w", "-fPIC", f"-I{Path(folder).resolve()}"]
        # linking with -Ofast would make the whole process round subnormal numbers to 0
        for command in (
            ["cc", *flags, "-c", str(source), "-o", str(compiled)],
            ["cc", "-shared", "-fopenmp", str(compiled), "-o", str(program), "-lm"],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True)
            except OSError:
                raise ValueError("llama2.c needs a C compiler named cc") from None
            if done.returncode:
                why = next((line for line in done.stderr.splitlines() if "error" in line), "")
                raise ValueError(f"llama2.c in {folder} cannot be compiled: {why[-200:]}")
        model.write_bytes(header.numpy().tobytes() + (0.02 * torch.randn(num_weights)).numpy().tobytes())
        library = ctypes.CDLL(str(program))
        library.load(str(model).encode(), ctypes.c_float(Sampling.temperature))

    def seconds(tokens, prompt, threads):
        array, began = (ctypes.c_int * len(tokens))(*tokens), time.perf_counter()
        library.run(array, prompt, len(tokens), threads)
        tokens[:] = array
        return time.perf_counter() - began

    several = torch.get_num_threads()
    times = {n: min(seconds([1] * S, 1, n) for _ in range(5)) for n in {1, several}}
    threads = min(times, key=times.get)

    def run(idx, max_new_tokens, seed, record):
        tokens = idx[0].tolist() + [0] * max_new_tokens
        seconds(tokens, idx.size(1), threads)
        record(torch.tensor([tokens[idx.size(1) :]]))

    return run


# -- the machine -------------------------------------------------------------------------------------------------------


@cache
def machine_rates(device):
    """Return the bytes per second that a copy of 256 MB reads and writes, and the operations per second of a product.

    The product has two matrices of 2048 x 2048 float32.
    """
    source, matrix = torch.zeros(2**26, device=device), torch.ones(2048, 2048, device=device)
    target, product, seconds = torch.empty_like(source), torch.empty_like(matrix), []
    for run in [lambda: target.copy_(source)] * 6 + [lambda: torch.mm(matrix, matrix, out=product)] * 6:
        timing = Timing(device)
        run()
        timing.record()
        seconds += timing.times
    return 2 * source.nbytes / statistics.median(seconds[1:6]), 2 * 2048**3 / statistics.median(seconds[7:])
