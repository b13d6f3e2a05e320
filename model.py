"""A GPT with a KV cache, in one file that needs only torch.

Read it from top to bottom: the cache, which stores the keys and values of each attention head; the network,
GPT-2's with a few modern options; the loop, which feeds one token per step; the sampler, whose noise makes a seed give
the same tokens on every path; and the checkpoint, the file of a model.

Shapes: B rows, T new positions, t positions so far, C = n_embd, nh = n_head, nkv = n_kv_head, hs = C / nh (the head
size), V = vocab_size.
"""

import importlib
import io
import math
import operator
import os
import re
import zipfile
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F

# MLP activations: exact GELU, GPT-2's tanh approximation of it, and the SiLU of SwiGLU (Shazeer 2020, arXiv:2002.05202)
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "swiglu": F.silu}


def require(settings, name, condition, why):
    if not condition:
        raise ValueError(f"{name}={getattr(settings, name)!r}: {why}")


@dataclass
class GPTConfig:
    """The shape of the network. The defaults are nanoGPT's. Raises ValueError for an impossible shape."""

    block_size: int = 1024  # the context length: positions per forward, and slots in the cache
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # biases in Linear and LayerNorm layers
    n_kv_head: int | None = None  # None or 0: n_head; fewer is grouped-query attention, 1 multi-query attention
    mlp_ratio: float = 4  # width of the MLP's hidden layer, in units of n_embd
    activation: str = "gelu"  # one of ACTIVATIONS
    pos_emb: str = "learned"  # "learned" is GPT-2's table; "rope" is rotary (Su et al. 2021, arXiv:2104.09864)
    norm_first: bool = True  # False: post-LN (Vaswani et al. 2017), without a final norm
    tie_weights: bool = True  # lm_head and wte share one matrix
    qk_norm: bool = False  # LayerNorm on queries and keys (Henry et al. 2020, arXiv:2010.04245)

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            require(self, name, 1 <= getattr(self, name) < 2**31, "must be 1 to 2**31 - 1")
        require(self, "dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1")
        require(self, "mlp_ratio", 1 <= self.mlp_ratio * self.n_embd < 2**31, "must give 1 to 2**31 - 1 hidden units")
        require(self, "activation", self.activation in ACTIVATIONS, f"must be one of {', '.join(ACTIVATIONS)}")
        require(self, "pos_emb", self.pos_emb in ("learned", "rope"), "must be learned or rope")
        require(self, "n_head", self.n_embd % self.n_head == 0, f"must be a divisor of n_embd={self.n_embd}")
        pairs = self.pos_emb == "learned" or self.head_size % 2 == 0
        require(self, "n_embd", pairs, "rope rotates pairs of coordinates, so n_embd / n_head must be even")
        divides = self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0
        require(self, "n_kv_head", divides, f"must be a divisor of n_head={self.n_head}")

    @property
    def head_size(self):
        return self.n_embd // self.n_head


# -- the cache ---------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """The keys and values of one attention head, one of each per position: `(B, t, hs)`."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor


class KVCache:
    """The keys and values of a batch of texts. Slot i holds those of position i.

    Attention is causal, so a later token never changes an earlier key or value, and we can keep them all: a new token
    fills one more slot and reads every slot so far.

    key, value   a tensor per layer, `(B, nkv, slots, hs)`, because a layer computes all its heads in one call
    length       the number of filled slots. Lower it to forget the slots beyond it
    weights      a copy of the weights that filled it, if GPT.forward made the cache itself
    """

    def __init__(self, key, value):
        self.key = key
        self.value = value
        self.slots = key[0].size(2)
        self.length = 0
        self.weights = None

    @property
    def heads(self):
        """The Heads of all layers, heads[layer][i]. Their tensors are views of what attention reads."""
        return [
            [Head(key[:, i, : self.length], value[:, i, : self.length]) for i in range(key.size(1))]
            for key, value in zip(self.key, self.value)
        ]

    def next_positions(self, idx, pos=None):
        """Return the positions `(T,)` of new tokens idx `(B, T)`, which follow the filled slots.

        pos  if given, must be exactly these positions
        Raises ValueError if it is not, or if there are no slots left.
        """
        T = idx.size(1)
        start = self.length
        if pos is not None and torch.as_tensor(pos).tolist() != list(range(start, start + T)):
            hint = "pass the positions that follow, from 0 for a new text, or lower the length of the cache to go back"
            raise ValueError(f"pos is {pos} for {T} tokens, but the cache holds {start} positions: {hint}")
        if start + T > self.slots:
            raise ValueError(f"{start + T} positions do not fit into a cache of {self.slots} slots")
        return torch.arange(start, start + T, device=idx.device)

    def update(self, layer, pos, k, v):
        """Write k and v `(B, nkv, T, hs)` of a layer to the slots pos `(T,)`, which come after the filled ones.

        Returns the keys and values of all positions so far, `(B, nkv, t, hs)` each.
        """
        key = self.key[layer]
        value = self.value[layer]
        key.index_copy_(2, pos, k.type_as(key))  # under autocast, k and v may have other dtypes
        value.index_copy_(2, pos, v.type_as(value))
        t = self.length + k.size(2)
        return key.narrow(2, 0, t), value.narrow(2, 0, t)

    def mask(self, pos):
        """Return what queries at pos `(..., T)` may see, bool `(..., T, t)`. None: a single query sees every slot.

        Attention without a cache needs none, because it uses is_causal.
        """
        if pos.shape == (1,):
            return None
        return torch.arange(self.length + pos.size(-1), device=pos.device) <= pos[..., None]


def clear_kv_cache(model):
    """Release model.kv_cache, and with it the key_cache and value_cache of every Head."""
    for module in model.modules():
        if isinstance(module, GPT):
            module.kv_cache = None


# -- the network -------------------------------------------------------------------------------------------------------

TRAIN_MODE = "the model is in train mode, where there is no cache: call model.eval() first"


class CausalSelfAttention(nn.Module):
    """All heads of a layer in one call. With n_kv_head < n_head, each key/value head serves several query heads."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.head_size, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(self.head_size, bias=config.bias)
            self.k_norm = nn.LayerNorm(self.head_size, bias=config.bias)

    def forward(self, x, rope=None, pos=None, mask=None, cache=None):
        """x `(B, T, C)` -> `(B, T, C)`.

        rope   cos and sin at the positions of x, or None
        pos    with a KVCache: the positions of x
        mask   with a KVCache: cache.mask(pos)
        """
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nh + 2 nkv, T, hs)
        q, k, v = qkv.split_with_sizes((self.n_head, self.n_kv_head, self.n_kv_head), dim=1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:  # queries and keys together, to save operations
            q, k = rotate(torch.cat((q, k), dim=1), *rope).split_with_sizes((self.n_head, self.n_kv_head), dim=1)
        gqa = self.n_kv_head != self.n_head
        if cache is None:  # causal attention within x
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=gqa)
        elif self.training:  # the weights are about to change, and with them all keys and values
            raise RuntimeError(TRAIN_MODE)
        else:  # write the new keys and values, then read all so far: (B, nkv, t, hs)
            k, v = cache.update(self.layer, pos, k, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        y = y.transpose(1, 2).reshape(B, T, C)  # (B, nh, T, hs) -> (B, T, nh * hs)
        y = self.c_proj(y)
        return F.dropout(y, self.dropout) if self.training else y


def rotate(x, cos, sin):
    """Apply rotary position embedding to x `(B, n, T, hs)`, with cos and sin of rope_table, `(1, T, hs)` each.

    Coordinate i is paired with i + hs / 2 (the "rotate-half" layout).
    """
    first, second = x.float().chunk(2, dim=-1)  # rotate in float32, whatever the dtype of x
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin).type_as(x)


def rope_table(config):
    """Return cos and sin of the angles at every position, `(2, block_size, hs)` float32 on the CPU, for rotate."""
    hs = config.head_size
    frequency = 10000.0 ** (-torch.arange(0, hs, 2, device="cpu") / hs)
    angle = torch.outer(torch.arange(config.block_size, device="cpu"), frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin()))


class MLP(nn.Module):
    """Two matrices around an activation. SwiGLU needs a third, so for the same size its hidden layer is 2/3 as wide."""

    def __init__(self, config):
        super().__init__()
        self.gated = config.activation == "swiglu"
        hidden = int(config.mlp_ratio * config.n_embd)
        if self.gated:
            hidden = 8 * math.ceil(hidden * 2 / 3 / 8)  # rounded up to a multiple of 8
        self.c_fc = nn.Linear(config.n_embd, 2 * hidden if self.gated else hidden, bias=config.bias)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = config.dropout

    def forward(self, x):
        x = self.c_fc(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            x = self.activation(gate) * x
        else:
            x = self.activation(x)
        x = self.c_proj(x)
        return F.dropout(x, self.dropout) if self.training else x


class Block(nn.Module):
    """Attention and MLP, each with a norm and a residual connection."""

    def __init__(self, config, layer):
        super().__init__()
        self.norm_first = config.norm_first
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, rope=None, pos=None, mask=None, cache=None):
        if self.norm_first:
            x = x + self.attn(self.ln_1(x), rope, pos, mask, cache)
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(x + self.attn(x, rope, pos, mask, cache))
        return self.ln_2(x + self.mlp(x))


class GPT(nn.Module):
    """The language model. Modules and parameters have nanoGPT's names, so its checkpoints load."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.kv_cache = None  # the newest KVCache of new_cache, to look at; forward continues it only if it made it
        self.source = None  # path and step of the checkpoint, for messages
        self.ngrams = None  # counts of the training text, which some checkpoints have, for sample.py --draft
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, config.n_embd)})
        if config.pos_emb == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.transformer["h"] = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        if config.norm_first:
            self.transformer["ln_f"] = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        # not a buffer, because the table would become bfloat16 with the weights
        self.rope = rope_table(config) if config.pos_emb == "rope" else None

        # GPT-2's initialization; c_proj is smaller, because 2 * n_layer of its outputs add up in the residual stream
        residual_std = 0.02 / math.sqrt(2 * config.n_layer)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=residual_std if name.endswith("c_proj") else 0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def zero_init(self):
        """Start every pre-LN block as the identity: c_proj is zero, c_attn and c_fc have std 0.5 / sqrt(fan_in)."""
        for name, p in self.transformer["h"].named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.5 / math.sqrt(p.size(1)))

    @property
    def device(self):
        return self.lm_head.weight.device

    def new_cache(self, batch_size, slots=None):
        """Return an empty KVCache for a batch, with room for `slots` positions; None: for block_size."""
        config = self.config
        shape = (batch_size, config.n_kv_head, min(slots or config.block_size, config.block_size), config.head_size)
        # all slots at once, because growing with torch.cat would copy the cache at every step; zeros, because a masked
        # slot has a weight of 0, but 0 times a NaN left in torch.empty is NaN
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
            key = [self.lm_head.weight.new_zeros(shape) for _ in range(config.n_layer)]
            value = [torch.zeros_like(keys) for keys in key]
        cache = KVCache(key, value)
        self.kv_cache = cache  # to look at; the loop keeps its own reference, because another thread may replace this
        return cache

    def forward(self, idx, targets=None, pos=None, cache=None, last=False):
        """Return logits `(B, T, V)`, and the mean cross-entropy, or None without targets.

        idx      (B, T) int64 token ids
        targets  (B, T) int64 next tokens; -1 is ignored
        pos      (T,) int64, the positions of idx, which continue where the cache ends; None: the next ones
        cache    the KVCache to continue. None: there is none, unless you pass pos. Then a call from position 0 makes
                 one, and later calls continue it
        last     return the logits of the last position only, `(B, V)`, which is all that generation needs, and no loss
        A call with a cache has no gradient. Raises ValueError if pos is not next in the cache, or if the weights have
        changed since the model filled its own, and RuntimeError in train mode.
        """
        if pos is not None and cache is None:
            cache = self._implicit_cache(idx, pos)
        with nullcontext() if cache is None else torch.no_grad():
            x = self.hidden_states(idx, pos, cache)
            logits = self.lm_head(x[:, -1] if last else x)
        if cache is not None:  # only now, so that a forward that fails, or is interrupted, can be repeated
            cache.length += idx.size(1)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1), ignore_index=-1)
        return logits, loss

    def _implicit_cache(self, idx, pos):
        """Return the cache of calls that pass pos alone. Old keys must never be used with new weights."""
        if torch.as_tensor(pos).flatten()[:1].tolist() == [0]:
            cache = self.new_cache(len(idx))
            # a copy, because a fused optimizer changes weights without changing their _version
            cache.weights = [p.detach().clone() for p in self.parameters()]
            return cache

        def same(old, new):
            return (old.device, old.dtype) == (new.device, new.dtype) and torch.equal(old, new)

        cache = self.kv_cache
        if cache and cache.weights and all(map(same, cache.weights, self.parameters())):
            return cache
        why = "no earlier call has left a cache, or the weights have changed since"
        raise ValueError(f"pos is {pos}, but {why}: start at position 0")

    def hidden_states(self, idx, pos=None, cache=None):
        """Return `(B, T, C)`: all of the network but lm_head. Unlike forward, pos makes no cache."""
        T = idx.size(1)
        if not 1 <= T <= self.config.block_size:
            raise ValueError(f"{T} positions; this model accepts 1 to {self.config.block_size} (block_size)")
        mask = None
        if cache is not None:
            pos = cache.next_positions(idx, pos)
            mask = cache.mask(pos)
        elif pos is None:
            pos = torch.arange(T, device=idx.device)
        x = self.transformer["wte"](idx)
        rope = None
        if self.config.pos_emb == "learned":
            x = x + self.transformer["wpe"](pos)
        else:
            if self.rope.device != idx.device:
                self.rope = self.rope.to(idx.device)
            rope = self.rope[:, pos].unsqueeze(-3)  # cos and sin, (1, T, hs) or (B, 1, T, hs) each
        if self.training:
            x = F.dropout(x, self.config.dropout)
        for block in self.transformer["h"]:
            x = block(x, rope, pos, mask, cache)
        return self.transformer["ln_f"](x) if self.config.norm_first else x

    def generate(self, idx, max_new_tokens, *settings, kv_cache=True, cache=None, **more_settings):
        """Return idx `(B, T)` and its continuation, one tensor: what the loop below yields.

        settings  those of Sampling, in order or by name: generate(idx, 100, 0.8, 200) has temperature and top_k
        A model below about 4 million parameters runs best on one thread.
        """
        sampling = Sampling(*settings, **more_settings)
        return torch.cat((idx, *generate(self, idx, max_new_tokens, sampling, kv_cache, cache)), dim=1)


# -- generation --------------------------------------------------------------------------------------------------------


def generate(model, idx, max_new_tokens, sampling, kv_cache=True, cache=None):
    """Yield the next token of every row, `(B, 1)`, step by step.

    model           a GPT, or anything else that can be called like one and has its config, training and new_cache
    idx             (B, T) int64, the prompts
    max_new_tokens  at most this many; unless overflow is "slide", the text ends when the context is full
    sampling        a Sampling
    kv_cache        False: recompute the whole context for every token, which gives the same tokens, more slowly
    cache           a KVCache to use. Afterwards it holds all but the last token, so you may continue with a longer idx,
                    whose noise starts at step 0 again. None: a new cache, which model.kv_cache shows
    Raises ValueError for a prompt that does not fit the context, RuntimeError in train mode, and FloatingPointError for
    logits that are infinite or NaN. If you change the weights between two steps, start again: the cache keeps old keys.
    """
    block_size = model.config.block_size
    num_new = sampling.num_new_tokens(idx.size(1), max_new_tokens, block_size)
    if not kv_cache:
        cache = None
    elif cache is None:
        cache = model.new_cache(len(idx), idx.size(1) + num_new)
    for noise in sampling.noise(len(idx), num_new, model.config.vocab_size, idx.device):
        if model.training:
            raise RuntimeError(TRAIN_MODE)
        context = slide(idx, block_size)
        if cache and context is not idx:  # the context has slid
            cache.length = 0
        # feed what the cache lacks: at first the whole context (prefill), then the newest token (decode)
        fed = context[:, cache.length :] if cache else context
        with torch.inference_mode():
            logits, _ = model(fed, cache=cache, last=True)
        require_finite(logits)
        new = sample_token(logits, noise, sampling)[:, None]
        idx = torch.cat((context, new), dim=1)
        yield new


def slide(idx, block_size):
    """Return the context of the next token after idx `(..., T)`: all of it while it fits, then its newest half.

    The half starts at position 0 again, so all of its keys and values change and we prefill again, but only once every
    half context.
    """
    return idx if idx.size(-1) <= block_size else idx[..., -max(1, block_size // 2) :]


def num_threads(model, fed):
    """Return how many threads to use for a step that feeds `fed` tokens: a small step needs only one."""
    multiply_adds = fed * sum(p.numel() for p in model.parameters())
    return 1 if multiply_adds < 2**22 else torch.get_num_threads()


# -- the sampler -------------------------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """The settings of one generation. Raises ValueError for an invalid one.

    temperature  0 is greedy (the largest logit, ties to the lowest id), 1 is the model's distribution
    top_k        sample from the k most likely tokens
    top_p        sample from the smallest set of most likely tokens whose probabilities add up to top_p
    seed         0 <= seed < 2**64; None draws a seed from torch's global generator
    samples      row i uses the noise of sample samples[i]; by default, of sample i
    overflow     "stop" ends when the context is full, "slide" continues with its newest half
    Add new settings at the end, because callers of GPT.generate may pass them by position.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    samples: list | None = None
    overflow: str = "stop"

    def __post_init__(self):
        if self.seed is None:
            self.seed = torch.randint(2**63 - 1, ())
        self.seed = operator.index(self.seed)  # as a plain int, because NumPy's would overflow in gumbel_noise
        require(self, "temperature", 0 <= self.temperature < 1e30, "must be at least 0 and below 1e30")
        require(self, "top_k", self.top_k is None or 1 <= self.top_k < 2**63, "must be at least 1 and below 2**63")
        require(self, "top_p", self.top_p is None or 0 < self.top_p <= 1, "must be above 0 and at most 1")
        require(self, "seed", 0 <= self.seed < 2**64, "must be at least 0 and below 2**64")
        require(self, "overflow", self.overflow in ("stop", "slide"), "must be 'stop' or 'slide'")

    def num_new_tokens(self, T, max_new_tokens, block_size):
        """Return the number of new tokens for a prompt of T tokens. Raises ValueError if the prompt does not fit."""
        if T < 1 or (self.overflow == "stop" and T > block_size):
            raise ValueError(f"a prompt of {T} tokens; this model accepts 1 to {block_size} (block_size)")
        return max(0, max_new_tokens if self.overflow == "slide" else min(max_new_tokens, block_size - T))

    def noise(self, B, steps, vocab_size, device):
        """Yield the noise of steps 0, 1, ..., `(B, V)` each. We compute up to 64 steps at once, which is cheaper."""
        samples = torch.as_tensor(range(B) if self.samples is None else self.samples, device=device)
        if B < 1 or samples.shape != (B,) or samples.is_floating_point():
            raise ValueError(f"samples is {samples.tolist()}: {B} rows need a whole number each, and at least one")
        at_once = max(1, min(64, 2**22 // (B * vocab_size)))
        for first in range(0, steps, at_once):
            some_steps = torch.arange(first, min(first + at_once, steps), device=device)
            yield from gumbel_noise(self.seed, samples.long(), some_steps, vocab_size).unbind(1)


def sample_token(logits, noise, sampling):
    """Pick tokens, `(...,)` int64, from logits and Gumbel noise, `(..., V)` each.

    argmax(logits / temperature + noise) is a sample of softmax(logits / temperature): the Gumbel-max trick. We multiply
    the noise by the temperature instead, which is greedy at 0.
    """
    logits = logits.float()
    if sampling.top_k is None and sampling.top_p is None:
        return (logits + sampling.temperature * noise).argmax(-1)
    # from the most to the least likely; a stable sort keeps ties in order of id
    logits, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        logits[..., sampling.top_k :] = -math.inf
    if sampling.top_p is not None:  # keep up to and including the token whose probability crosses top_p
        probs = torch.softmax((logits - logits[..., :1]) / max(sampling.temperature, 1e-30), dim=-1)  # no division by 0
        keep = probs.cumsum(-1) - probs < sampling.top_p
        keep[..., 0] = True
        logits = logits.masked_fill(~keep, -math.inf)
    score = logits + sampling.temperature * noise.gather(-1, ids)
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)


NOT_FINITE = "the logits are infinite or NaN, so there is no next token: train again, or use an older checkpoint"


def require_finite(logits):
    if not logits.isfinite().all():
        raise FloatingPointError(NOT_FINITE)


# A full and a cached forward differ by up to 5e-5, so rounding can reorder logits that are closer than NEAR_TIE.
NEAR_TIE = 1e-4


def near_tie(logits, noise, token, sampling):
    """Return whether rounding alone can explain that a token, an id, was picked from logits `(V,)`.

    It must win once we raise its logit and lower that of our own pick, by NEAR_TIE / 2 each. All logits on either side
    move along, so that the edge of top_p between the two moves as well.
    """
    logits = logits.float()
    pick = sample_token(logits, noise, sampling)
    raised = logits > logits[pick] if logits[token] >= logits[pick] else logits <= logits[token]
    raised[token] = True
    moved = logits + torch.where(raised, NEAR_TIE / 2, -NEAR_TIE / 2)
    return sample_token(moved, noise, sampling).item() == token


def gumbel_noise(seed, samples, steps, vocab_size):
    """Return standard Gumbel noise, `(B, S, V)` float32, always finite, of samples `(B,)` and steps `(S,)` or `(B, S)`.

    It is a hash of (seed, sample, step, token id) and nothing else, so every way to decode gets the same noise. The
    hash applies the 32-bit finalizer "lowbias32" by Chris Wellons to one counter after another.
    """
    low32 = 0xFFFFFFFF

    def mix(h):
        h = (h ^ (h >> 16)) * 0x7FEB352D & low32
        h = (h ^ (h >> 15)) * 0x846CA68B & low32
        return h ^ (h >> 16)

    ids = torch.arange(vocab_size, device=steps.device)
    h = 0
    for counter in (seed & low32, seed >> 32, samples[:, None, None], steps[..., None], ids):
        h = mix(h ^ mix(counter + 0x9E3779B9 & low32))  # mix(0) is 0, hence the constant
    # the largest noise comes from values near 0, where float32 is finest; exactly 1 would give infinite noise
    uniform = ((h.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


# With Intel's MKL, these may have few correct digits if the first call in a process runs on several threads (pytorch
# issue 188792). So we call them on one number first.
for function in (torch.cos, torch.sin, torch.log, torch.log1p):
    function(torch.ones(1))


# -- the checkpoint ----------------------------------------------------------------------------------------------------


class CharTokenizer:
    """Token i is the i-th character of `vocab`.

    The tokenizers in extras have the same methods. Their tokens may end in the middle of a character, hence `stream`.
    """

    unit = "characters"  # the word for tokens in messages
    stop_pattern = staticmethod(re.escape)  # a regular expression that finds a stop string in the text of tokens

    def __init__(self, chars):
        self.vocab = chars
        self.ids = {char: i for i, char in enumerate(chars)}
        self.default_prompt = "\n" if "\n" in self.ids else chars[0]

    def encode(self, text):
        """Return the ids of the text as a list. Raises ValueError for characters outside the vocabulary."""
        unknown = sorted(set(text) - set(self.ids))
        if unknown:
            hint = " (in a shell, $'\\n' is a newline)" if "\\" in unknown else ""
            raise ValueError(f"no {', '.join(map(repr, unknown[:20]))} in the vocabulary {self.vocab[:200]!r}{hint}")
        return [self.ids[char] for char in text]

    def decode(self, ids):
        return "".join([self.vocab[i] for i in ids])

    def stream(self):
        """Return a function from the next ids to (text, pending): pending is what later ids may still change."""
        return lambda ids: (self.decode(ids), "")

    def state_dict(self):
        """Return what a checkpoint saves."""
        return {"chars": self.vocab}


def write_atomically(path, pieces):
    """Write bytes to a file: even after a power cut or on a full disk, all of them or none. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(path, checkpoint):
    """Write a checkpoint, a dict of tensors and plain values, atomically. Raises OSError."""
    buffer = io.BytesIO()  # because torch.save raises many kinds of errors on a full disk
    torch.save(checkpoint, buffer)
    write_atomically(Path(path), [buffer.getbuffer()])


PRETRAINED = Path(__file__).resolve().parent / "assets" / "shakespeare.pt"


def find_checkpoint(path=None):
    """Return the file of a checkpoint: in the folder of a run ckpt.pt, or before its first evaluation last.pt.

    path  a file or a folder; None: the last run, in out, or if there is none, the pretrained model
    """
    folder = Path(path or "out")
    for file in (folder / "ckpt.pt", folder / "last.pt"):
        if file.exists():
            return file
    return folder if path else PRETRAINED


@contextmanager
def reading(path):
    """Turn any error inside the block into a ValueError of one line, which says that the file is damaged."""
    try:
        yield
    except Exception as error:  # damaged content can raise anything, and torch adds pages of advice
        why = " ".join(str(error).split()).partition(". ")[0][:200] or repr(error)
        if found := re.search(r"GLOBAL (\S+) was not", str(error)):
            why = f"it contains {found[1]}, which could run code"
        raise ValueError(f"{path} is damaged, or not a checkpoint of a GPT: {why}") from None


def load_checkpoint(path):
    """Return what train.py, or nanoGPT, has saved, a dict, with its "path" for messages. Runs no code.

    It has at least "model", a state_dict, and "model_args", the fields of GPTConfig. If tokens are characters, "chars"
    is the vocabulary.

    path  a file, or the folder of a run
    Raises OSError or ValueError.
    """
    path = find_checkpoint(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: run python train.py, or pass a file such as out/ckpt.pt")
    with reading(path):
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():  # torch.load does not check the CRC-32
            raise ValueError("a checksum is wrong")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict) or not {"model", "model_args"} <= checkpoint.keys():
            raise ValueError("it does not have the model and model_args that train.py and nanoGPT save")
        vocab_size = GPTConfig(**checkpoint["model_args"]).vocab_size
        if "chars" in checkpoint and len(checkpoint["chars"]) != vocab_size:
            raise ValueError(f"it has weights for {vocab_size} tokens, but {len(checkpoint['chars'])} characters")
    return {**checkpoint, "path": path}


def build_model(checkpoint):
    """Return the GPT of a checkpoint, on the CPU, with its weights in float32. Raises ValueError if they do not fit."""
    path = checkpoint["path"]
    with reading(path):
        config = GPTConfig(**checkpoint["model_args"])
        if config.n_layer > len(checkpoint["model"]):  # before we build a billion layers
            raise ValueError(f"n_layer is {config.n_layer}, but it has {len(checkpoint['model'])} weights")
        model = GPT(config)
        model.load_state_dict({name: p.float() for name, p in checkpoint["model"].items()}, assign=True)
        for name, p in model.state_dict().items():
            if not (checkpoint["model"][name].is_floating_point() and p.isfinite().all()):  # integers would need scales
                raise ValueError(f"{name} must be floating-point numbers, without infinity or NaN")
        if config.tie_weights:
            if not torch.equal(model.transformer["wte"].weight, model.lm_head.weight):
                raise ValueError("wte and lm_head differ, although tie_weights makes them one matrix")
            model.transformer["wte"].weight = model.lm_head.weight  # assign=True has untied them
    model.source = f"{path}, step {checkpoint.get('iter_num', 'unknown')}"
    model.ngrams = checkpoint.get("ngrams")
    return model


def load_model(path):
    """Return (model, tokenizer): a GPT on the CPU, in eval mode, and a CharTokenizer. Raises OSError or ValueError.

    path  a checkpoint, or the folder of a run
    """
    checkpoint = load_checkpoint(path)
    if "chars" not in checkpoint:
        hint = "other tokens, and nanoGPT's with --meta, need extras/formats/checkpoint.py"
        raise ValueError(f"{checkpoint['path']} has no characters: {hint}, in the folder extras of the repository")
    return build_model(checkpoint).eval(), CharTokenizer(checkpoint["chars"])


# -- helpers -----------------------------------------------------------------------------------------------------------


def extras(module, what=None):
    """Import a module of the folder extras. Without the folder, return None, or raise ValueError if `what` needs it."""
    found = (Path(__file__).resolve().parent / "extras").is_dir()
    if what and not found:
        raise ValueError(f"{what} needs the folder extras of the repository, next to model.py")
    return importlib.import_module(f"extras.{module}") if found else None


def pick_device(name):
    """Return the torch.device for --device; "auto" is a GPU if there is one. Raises ValueError if it does not work."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).tolist()
    except Exception as error:  # every backend raises its own kind
        kinds = "pass cpu, cuda (an NVIDIA GPU) or mps (the GPU of a Mac)"
        why = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"--device {name} cannot be used here: {kinds} ({why})") from None
    return torch.device(name)
