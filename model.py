"""A GPT with a KV cache, in one file that needs only torch.

Read it from top to bottom: the cache, the network (GPT-2's with a few modern options), the loop (generate), the
sampler, whose noise makes a seed give the same tokens on every path, and the checkpoint, the file of a model.

Shapes: B rows, T new positions, t positions in the cache, C = n_embd, nh = n_head, nkv = n_kv_head, hs = C / nh (the
head size), V = vocab_size.
"""

import io
import math
import os
import warnings
import zipfile
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F


def require(settings, name, condition, why):
    if not condition:
        raise ValueError(f"{name}={getattr(settings, name)!r}: {why}")


# of the MLP: exact GELU, the approximation that GPT-2 uses, and the SiLU of SwiGLU (Shazeer 2020, arXiv:2002.05202)
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "swiglu": F.silu}


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
    n_kv_head: int | None = None  # None: n_head; fewer gives grouped-query attention, 1 multi-query attention
    mlp_ratio: float = 4  # width of the MLP's hidden layer, in units of n_embd
    activation: str = "gelu"  # one of ACTIVATIONS
    pos_emb: str = "learned"  # "learned" is GPT-2's table; "rope" is rotary (Su et al. 2021, arXiv:2104.09864)
    norm_first: bool = True  # False: post-LN (Vaswani et al. 2017), without a final norm
    tie_weights: bool = True  # lm_head and wte share one matrix
    qk_norm: bool = False  # LayerNorm on queries and keys (Henry et al. 2020, arXiv:2010.04245)

    def __post_init__(self):
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")
        require(self, "dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1")
        require(self, "mlp_ratio", 1 <= self.mlp_ratio * self.n_embd < 2**31, "must give 1 to 2**31 - 1 hidden units")
        require(self, "activation", self.activation in ACTIVATIONS, f"must be one of {', '.join(ACTIVATIONS)}")
        require(self, "pos_emb", self.pos_emb in ("learned", "rope"), "must be learned or rope")
        require(self, "n_head", self.n_embd % self.n_head == 0, f"must be a divisor of n_embd={self.n_embd}")
        pairs = self.pos_emb == "learned" or self.head_size % 2 == 0
        require(self, "n_embd", pairs, "rope rotates pairs of coordinates, so n_embd / n_head must be even")
        divides = self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0
        require(self, "n_kv_head", divides, f"must be None or a divisor of n_head={self.n_head}")

    @property
    def head_size(self):
        return self.n_embd // self.n_head


TRAIN_MODE = "the model is in train mode, where there is no cache: call model.eval() first"

# -- the cache ---------------------------------------------------------------------------------------------------------


class KVCache:
    """The keys and values of a batch: `key[layer]` and `value[layer]` are `(B, nkv, slots, hs)`.

    Slot s holds the key or value of the token at position s. Attention is causal, so a later token never changes an
    earlier slot, and we can keep them all: a new token adds one slot and reads every slot so far.

    slots   how many positions fit; None: block_size, which is also the most
    length  the number of filled slots. Lower it to forget the slots beyond it
    """

    def __init__(self, config, batch_size, slots=None):
        self.batch_size = batch_size
        self.slots = min(slots or config.block_size, config.block_size)
        self.length = 0
        self.key = []  # a tensor per layer, allocated by its first update, once dtype and device are known
        self.value = []

    @contextmanager
    def extend(self, start, batch_size, T):
        """Extend the cache by T positions from `start` on. The length grows once the forward inside the `with` is done.

        If that forward fails halfway, say because of Ctrl-C, the length stays as it was. Raises ValueError if the
        positions do not continue where the cache ends, or do not fit.
        """
        if batch_size != self.batch_size:
            raise ValueError(f"the cache is for {self.batch_size} rows, but idx has {batch_size}")
        if start != self.length:
            hint = "prefill from 0 first, feed the next position, or lower the length of the cache to go back"
            raise ValueError(f"pos starts at {start}, but the cache holds {self.length} positions: {hint}")
        if start + T > self.slots:
            raise ValueError(f"{start + T} positions do not fit into a cache of {self.slots} slots")
        yield
        self.length = start + T

    def update(self, layer, pos, k, v):
        """Write k and v `(B, nkv, T, hs)` of a layer at positions pos `(T,)`, right after the filled slots.

        Returns the keys and values of all positions so far, `(B, nkv, length + T, hs)` each.
        """
        if layer == len(self.key):
            # all slots at once, because growing with torch.cat would copy the cache at every step; zeros, because a
            # masked slot has a weight of 0, but 0 times a NaN left in torch.empty is NaN
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
                key, value = (x.new_zeros(*x.shape[:2], self.slots, x.size(3)) for x in (k, v))
            self.key.append(key)
            self.value.append(value)
        self.write(self.key[layer], pos, k)
        self.write(self.value[layer], pos, v)
        t = self.length + k.size(2)
        return self.key[layer].narrow(2, 0, t), self.value[layer].narrow(2, 0, t)

    def write(self, slots, pos, x):
        slots.index_copy_(2, pos, x)

    def mask(self, pos):
        """Return what queries at pos `(T,)` may see. None: a single new token sees every slot, so it needs no mask."""
        return None if len(pos) == 1 else visible(pos, self.length + len(pos))


def visible(pos, slots):
    """Return which of `slots` slots a query at each position pos `(..., T)` may see, bool `(..., T, slots)`.

    All masks come from here. Two cases need none: a single new token, and attention without a cache, by is_causal.
    """
    return torch.arange(slots, device=pos.device) <= pos[..., None]


class Head:
    """One key/value head of a layer: `key_cache` and `value_cache`, `(B, t, hs)` of the KVCache used last, or None.

    A Head computes nothing, because a layer computes all its heads in one batched call.
    """

    def __init__(self, attn, index):
        self.attn = attn
        self.index = index

    @property
    def key_cache(self):
        return self._view("key")

    @property
    def value_cache(self):
        return self._view("value")

    def _view(self, kind):
        cache = self.attn.cache
        if cache is None or cache.length == 0:
            return None
        return getattr(cache, kind)[self.attn.layer][:, self.index, : cache.length]


def clear_kv_cache(model):
    """Empty the key_cache and value_cache of every Head, which frees their memory.

    Call it after changing weights in place in eval mode, which we cannot detect: they must never meet old keys.
    """
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            module.cache = None
        elif isinstance(module, GPT):
            module.own_cache = None


# -- the network -------------------------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    """Apply rotary position embedding to x `(B, n, T, hs)`, with cos and sin `(1, T, hs)` of GPT.rope.

    Coordinate i is paired with i + hs / 2 (the "rotate-half" layout). The first half of sin is already negated, which
    saves operations: in eager mode, every one costs time.
    """
    first, second = x.float().chunk(2, dim=-1)  # rotate in float32, whatever the dtype of x
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * cos, swapped, sin).type_as(x)


class CausalSelfAttention(nn.Module):
    """All heads of a layer in one batched call."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.cache = None  # the KVCache that was used last, for `heads` to show
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

    @property
    def heads(self):
        """The Heads of this layer. With n_kv_head < n_head, each of them serves several query heads."""
        return [Head(self, i) for i in range(self.n_kv_head)]

    def project(self, x, rope=None):
        """Return q `(B, nh, T, hs)`, k and v `(B, nkv, T, hs)` of x `(B, T, C)`. rope: cos and sin at x's positions."""
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nh + 2 nkv, T, hs)
        q, k, v = qkv.split_with_sizes((self.n_head, self.n_kv_head, self.n_kv_head), dim=1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:  # queries and keys together, to save operations
            q, k = rotate(torch.cat((q, k), dim=1), *rope).split_with_sizes((self.n_head, self.n_kv_head), dim=1)
        return q, k, v

    def forward(self, x, rope=None, pos=None, mask=None, cache=None):
        """x `(B, T, C)` -> `(B, T, C)`. With a KVCache, pos are the positions of x, and mask is cache.mask(pos)."""
        B, T, C = x.shape
        q, k, v = self.project(x, rope)
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
        self.own_cache = None  # of calls with pos and without a cache
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, config.n_embd)})
        if config.pos_emb == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.transformer["h"] = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        if config.norm_first:
            self.transformer["ln_f"] = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        self._make_rope()

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

    def _make_rope(self):
        """Make the rotary table `(2, block_size, hs)`, cos and sin, in float32 whatever the dtype of the weights."""
        self.rope = None
        if self.config.pos_emb == "rope":
            hs = self.config.head_size
            device = self.lm_head.weight.device
            frequency = 10000.0 ** (-torch.arange(0, hs, 2, device=device) / hs)
            angle = torch.outer(torch.arange(self.config.block_size, device=device), frequency).repeat(1, 2)
            sign = torch.ones(hs, device=device).index_fill_(0, torch.arange(hs // 2, device=device), -1.0)
            self.rope = torch.stack((angle.cos(), angle.sin() * sign))

    # Changed weights must never meet old keys, so we empty the model's cache wherever weights change or move. to() and
    # half() call _apply.

    def train(self, mode=True):
        if mode:
            clear_kv_cache(self)
        return super().train(mode)

    def _load_from_state_dict(self, *args):
        clear_kv_cache(self)
        super()._load_from_state_dict(*args)

    def _apply(self, fn, recurse=True):
        clear_kv_cache(self)
        super()._apply(fn, recurse)
        self._make_rope()  # on the device of the weights
        return self

    def forward(self, idx, targets=None, pos=None, cache=None):
        """Return logits `(B, T, V)` for every position, and the mean cross-entropy, or None without targets.

        idx      (B, T) int64 token ids
        targets  (B, T) int64 next tokens; -1 is ignored
        pos      (T,) int64, the positions of idx, which continue where the cache ends: the call uses the cache, and
                 has no gradient. None: positions 0 to T - 1 without a cache
        cache    the KVCache to use; None: the model's own, which a call with pos from 0 starts again
        Raises TypeError for another pos, ValueError if it is not next in the cache, and RuntimeError in train mode.
        """
        if pos is None and cache is None:
            logits = self.unembed(self.hidden_states(idx))
        else:
            B, T = idx.shape
            is_pos = isinstance(pos, torch.Tensor) and pos.dtype == torch.int64 and pos.shape == (T,) != (0,)
            start = pos[0].item() if is_pos else -1
            if start < 0 or pos.tolist() != list(range(start, start + T)):
                raise TypeError(f"pos is {pos!r}: pass the position of every token, rising by one: torch.arange({T})")
            if cache is None:
                if start == 0 or self.own_cache is None:
                    self.own_cache = self.new_cache(B)
                cache = self.own_cache
            with torch.no_grad(), cache.extend(start, B, T):
                logits = self.unembed(self.hidden_states(idx, pos, cache))
        return logits, None if targets is None else self.loss(logits, targets)

    def loss(self, logits, targets):
        """Return the mean cross-entropy of logits `(B, T, V)`. targets: ids `(B, T)`, or distributions `(B, T, V)`."""
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1), ignore_index=-1)

    @torch.inference_mode()
    def next_logits(self, idx, start=0, cache=None):
        """Return the logits `(B, V)` of the token after idx `(B, T)`, whose first token is at position `start`.

        cache  the KVCache that holds the positions before, to which idx is added; None: idx is the whole context
        """
        if self.training:
            raise RuntimeError(TRAIN_MODE)
        B, T = idx.shape
        pos = torch.arange(start, start + T, device=idx.device)
        with cache.extend(start, B, T) if cache is not None else nullcontext():
            return self.unembed(self.hidden_states(idx, pos, cache)[:, -1])

    def hidden_states(self, idx, pos=None, cache=None):
        """Return `(B, T, C)`: all of the network but lm_head.

        pos    int64 positions of idx, (T,), or (B, T) without a KVCache; None: 0 to T - 1
        cache  the KVCache to write to at pos, and to read; None: attention within idx
        """
        T = idx.size(1)
        block_size = self.config.block_size
        if not 1 <= T <= block_size:
            raise ValueError(f"{T} positions; this model accepts 1 to {block_size} (block_size)")
        if pos is None:
            pos = torch.arange(T, device=idx.device)
        x = self.transformer["wte"](idx)
        rope = None
        if self.config.pos_emb == "learned":
            x = x + self.transformer["wpe"](pos)
        else:
            rope = self.rope[:, pos].unsqueeze(-3)  # cos and sin, (1, T, hs) or (B, 1, T, hs) each
        if self.training:
            x = F.dropout(x, self.config.dropout)
        mask = None
        if cache is not None:
            mask = cache.mask(pos)
            for block in self.transformer["h"]:
                block.attn.cache = cache  # for the Heads; it frees the one before
        for block in self.transformer["h"]:
            x = block(x, rope, pos, mask, cache)
        return self.transformer["ln_f"](x) if self.config.norm_first else x

    def unembed(self, x):
        """Return the logits `(..., V)` of hidden states `(..., C)`. All logits are computed here."""
        return self.lm_head(x)

    def new_cache(self, batch_size, slots=None):
        """Return an empty KVCache for a batch, with room for `slots` positions; None: for block_size."""
        return KVCache(self.config, batch_size, slots)

    def generate(self, idx, max_new_tokens, *settings, kv_cache=True, cache=None, **more_settings):
        """Return idx `(B, T)` and its continuation, one tensor.

        max_new_tokens  at most this many; unless overflow is "slide", the text ends when the context is full
        kv_cache        False recomputes the whole context for every token: the same tokens, more slowly
        cache           from new_cache, to continue later: it keeps all but the last token, for a call with a longer idx
        settings        those of Sampling, in order or by name: generate(idx, 100, 0.8, 200) has temperature and top_k
        The Heads show the cache until clear_kv_cache frees it. Raises ValueError for invalid arguments, and
        RuntimeError in train mode. A model below about 4 million parameters runs best on one thread.
        """
        sampling = Sampling(*settings, **more_settings)
        new = [token[:, None] for token, _ in generate(self, idx, max_new_tokens, sampling, kv_cache, cache)]
        return torch.cat((idx, *new), dim=1)


# -- generation --------------------------------------------------------------------------------------------------------


def generate(model, idx, max_new_tokens, sampling, kv_cache=True, cache=None, forced=None):
    """Yield the next token of every row, `(B,)`, and the logits that it was picked from, `(B, V)`, step by step.

    model     a GPT, or anything with its config, new_cache(B, slots) and next_logits(idx, start, cache)
    idx       (B, T) int64, the prompts
    sampling  a Sampling
    kv_cache  False: recompute the whole context for every token
    cache     a KVCache that already holds the prompts, except at least their last token; None: an empty one
    forced    (B, max_new_tokens) int64: continue with these tokens instead of the sampled ones (teacher forcing)
    Raises ValueError for a prompt that does not fit the context.
    """
    B, T = idx.shape
    config = model.config
    num_new = sampling.num_new_tokens(T, max_new_tokens, config.block_size)
    noises = sampling.noise(B, num_new, config.vocab_size, idx.device)
    context = idx
    for step, noise in enumerate(noises):
        if context.size(1) > config.block_size:
            # slide: keep the newest half of a full context. It starts at position 0 again, so all of its keys and
            # values change, and we prefill again, but only once every half context
            context = context[:, -max(1, config.block_size // 2) :]
            cache = None
        if not kv_cache:  # recompute the whole context
            logits = model.next_logits(context)
        elif cache is None:  # prefill: feed the whole context, and keep its keys and values
            cache = model.new_cache(B, min(config.block_size, context.size(1) + num_new - step))
            logits = model.next_logits(context, 0, cache)
        else:  # decode: feed what the cache does not hold yet, the newest token
            logits = model.next_logits(context[:, cache.length :], cache.length, cache)
        new = sample_token(logits, noise, sampling)
        fed = new if forced is None else forced[:, step]
        context = torch.cat((context, fed[:, None]), dim=1)
        yield new, logits


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
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    samples: Sequence[int] | None = None
    overflow: str = "stop"

    def __post_init__(self):
        if self.seed is None:
            self.seed = int(torch.randint(2**63 - 1, ()))
        require(self, "temperature", 0 <= self.temperature < 1e30, "must be a number >= 0 and below 1e30")
        require(self, "top_k", self.top_k is None or self.top_k >= 1, "must be at least 1")
        require(self, "top_p", self.top_p is None or 0 < self.top_p <= 1, "must be above 0 and at most 1")
        whole = 0 <= self.seed < 2**64 and int(self.seed) == self.seed
        require(self, "seed", whole, "must be a whole number, at least 0 and below 2**64")
        self.seed = int(self.seed)  # from NumPy's integers, which would overflow in gumbel_noise
        require(self, "overflow", self.overflow in ("stop", "slide"), "must be 'stop' or 'slide'")

    def num_new_tokens(self, T, max_new_tokens, block_size):
        """Return the number of new tokens for a prompt of T tokens. Raises ValueError if the prompt does not fit."""
        if T < 1 or (self.overflow == "stop" and T > block_size):
            raise ValueError(f"a prompt of {T} tokens; this model accepts 1 to {block_size} (block_size)")
        return max(0, max_new_tokens if self.overflow == "slide" else min(max_new_tokens, block_size - T))

    def samples_of(self, B, device):
        """Return `samples` as an int64 tensor (B,). Raises ValueError."""
        samples = torch.as_tensor(range(B) if self.samples is None else self.samples, device=device)
        if B < 1 or samples.shape != (B,) or samples.is_floating_point():
            raise ValueError(f"samples is {samples.tolist()}: {B} rows need a whole number each, and at least one")
        return samples.long()

    def noise(self, B, steps, vocab_size, device):
        """Yield the noise of steps 0, 1, ..., `(B, V)` each. We compute up to 64 steps at once, which is cheaper."""
        samples = self.samples_of(B, device)
        at_once = max(1, min(64, 2**22 // (B * vocab_size)))
        for first in range(0, steps, at_once):
            some_steps = torch.arange(first, min(first + at_once, steps), device=device)
            yield from gumbel_noise(self.seed, samples, some_steps, vocab_size).unbind(1)


def sample_token(logits, noise, sampling):
    """Pick tokens, `(...,)` int64, from logits and Gumbel noise, `(..., V)` each.

    argmax(logits / temperature + noise) is a sample of softmax(logits / temperature): the Gumbel-max trick. We multiply
    the noise by the temperature instead, which is greedy at 0. FILTERS leave out unlikely tokens, one after another.
    """
    logits = logits.float()
    score = logits + sampling.temperature * noise
    filters = [keep for name, keep in FILTERS.items() if getattr(sampling, name) is not None]
    if not filters:
        return score.argmax(-1)
    # filter in order of likelihood; a stable sort keeps ties in order of id
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    for keep in filters:
        ranked = ranked.masked_fill(~keep(ranked, sampling), -math.inf)
    score = score.gather(-1, ids).masked_fill(ranked == -math.inf, -math.inf)
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)


def keep_top_k(ranked, sampling):
    """Keep exactly the top_k most likely tokens, `(V,)` bool. ranked: logits `(..., V)`, the largest first."""
    return torch.arange(ranked.size(-1), device=ranked.device) < sampling.top_k


def keep_top_p(ranked, sampling):
    """Keep the most likely tokens, up to and including the one whose probability crosses top_p, `(..., V)` bool."""
    probs = torch.softmax((ranked - ranked[..., :1]) / max(sampling.temperature, 1e-30), dim=-1)  # no division by 0
    keep = probs.cumsum(-1) - probs < sampling.top_p
    keep[..., 0] = True
    return keep


FILTERS = {"top_k": keep_top_k, "top_p": keep_top_p}  # a setting of Sampling, and the filter that it turns on


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


# With Intel's MKL, PyTorch may compute these with few correct digits if the first call in a process runs on several
# threads (pytorch issue 188792). So we call them on one number first.
for function in (torch.cos, torch.sin, torch.log, torch.log1p):
    function(torch.ones(1))


# -- the checkpoint ----------------------------------------------------------------------------------------------------


class CharTokenizer:
    """Token i is the i-th character of `vocab`. Raises ValueError if one occurs twice."""

    unit = "characters"  # what messages call tokens

    def __init__(self, chars):
        self.vocab = chars
        self.ids = {char: i for i, char in enumerate(chars)}
        if not chars or len(self.ids) < len(chars):
            raise ValueError(f"the vocabulary is damaged: of {len(chars)} characters only {len(self.ids)} are distinct")
        self.default_prompt = "\n" if "\n" in self.ids else chars[0]

    def encode(self, text):
        """Return the ids of the text as a list. Raises ValueError for characters outside the vocabulary."""
        unknown = sorted(set(text) - set(self.ids))
        if unknown:
            raise ValueError(f"no {', '.join(map(repr, unknown[:20]))} in the vocabulary {self.vocab[:200]!r}")
        return [self.ids[char] for char in text]

    def decode(self, ids):
        return "".join([self.vocab[i] for i in ids])

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


def checkpoint_file(path):
    """Return the file of a checkpoint: in the folder of a run ckpt.pt, or before its first evaluation last.pt."""
    path = Path(path)
    if not path.is_dir():
        return path
    return path / ("ckpt.pt" if (path / "ckpt.pt").exists() or not (path / "last.pt").exists() else "last.pt")


def load_checkpoint(path):
    """Return a checkpoint, a dict, with its "path" for messages. Runs no code. Raises OSError or ValueError.

    path  a file, or the folder of a run
    It has the state_dict "model", "model_args" for GPTConfig, and "chars" if the tokens are characters.
    """
    path = checkpoint_file(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}: run python train.py, or pass a file such as out/ckpt.pt")
    try:
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():  # torch.load does not check the CRC-32
            raise zipfile.BadZipFile
        with warnings.catch_warnings(action="ignore"):  # about files that torch did not write
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        complete = "model" in checkpoint and checkpoint.get("model_args", {"": 0}).keys() <= vars(GPTConfig).keys()
    except PermissionError:
        raise
    except Exception:  # a damaged file can raise anything, with pages of advice
        why = "it is damaged, not a checkpoint, or contains objects that could run code"
        raise ValueError(f"{path} cannot be loaded: {why}") from None
    if not complete:  # a bare state_dict, or the model_args of llama2.c
        raise ValueError(f"{path} has no weights with model_args of a GPT, so it is not from train.py or nanoGPT")
    return {**checkpoint, "path": path}


def build_model(checkpoint):
    """Return the GPT of a checkpoint, on the CPU, with its tensors. Raises ValueError if they do not fit."""
    path = checkpoint["path"]
    try:
        model = GPT(GPTConfig(**checkpoint["model_args"]))
        weights = {name.removeprefix("_orig_mod."): p.float() for name, p in checkpoint["model"].items()}
        missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
        if wrong := (missing[:2] + unexpected)[:3]:
            raise ValueError(f"{len(missing)} keys missing, {len(unexpected)} unknown: {wrong}")
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        *_, why = str(error).strip().splitlines()  # load_state_dict has a line for each mismatch of shapes
        raise ValueError(f"the weights in {path} do not fit its model_args: {why.strip()[:200]}") from None
    if model.config.tie_weights:  # assign=True has untied them
        model.transformer["wte"].weight = model.lm_head.weight
    for name, p in model.named_parameters():
        if not torch.isfinite(torch.stack(p.detach().aminmax())).all():
            raise ValueError(f"{path} contains infinity or NaN in {name}: use an older file, or train again")
    return model


def char_tokenizer(checkpoint):
    """Return the CharTokenizer of a checkpoint. Raises ValueError if it has none, or one that does not fit."""
    path = checkpoint["path"]
    vocab_size = checkpoint["model_args"]["vocab_size"]
    if "chars" not in checkpoint:
        raise ValueError(
            f"{path} has no characters: pass nanoGPT's meta.pkl as --meta, or use extras/formats/checkpoint.py"
        )
    try:
        tokenizer = CharTokenizer(checkpoint["chars"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if len(tokenizer.vocab) != vocab_size:
        raise ValueError(f"{path} has weights for {vocab_size:,} tokens, but {len(tokenizer.vocab):,} characters")
    return tokenizer


def pick_device(name):
    """Return the torch.device for --device; "auto" is a GPU if there is one. Raises ValueError if it does not work."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).tolist()
    except Exception as error:  # every backend raises its own kind
        why = str(error).strip().partition("\n")[0].partition(". ")[0]
        if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
            why = "it is cpu, cuda (a GPU) or mps (the GPU of a Mac)"
        raise ValueError(f"--device {name} cannot be used here: {why}") from None
    return torch.device(name)


def load_model(path):
    """Return (model, tokenizer): a GPT on the CPU, in eval mode, and a CharTokenizer. Raises OSError or ValueError."""
    checkpoint = load_checkpoint(path)
    return build_model(checkpoint).eval(), char_tokenizer(checkpoint)
