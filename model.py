"""A GPT with a key/value cache, in one file that needs only torch: the network, the cache, the sampler and the loop.

Read it from top to bottom: GPTConfig, then Head and KVCache (what we keep, and how attention reads it),
CausalSelfAttention, MLP and Block (GPT-2's network with a few modern options), GPT (the model, and what it feeds
itself at each step), and at the end the sampler, whose noise makes a seed give the same text on every path.

Shapes: B rows, T new positions, t positions in the cache, C = n_embd, nh = n_head, nkv = n_kv_head, hs = C / nh (the
head size), V = vocab_size.
"""

import math
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F

# In a new process, PyTorch with Intel's MKL may compute these with few correct digits if the first call runs on several
# threads (pytorch issue 188792). So we make the first call of each here, on one number.
for function in (torch.cos, torch.sin, torch.log, torch.log1p):
    function(torch.ones(1))


def require(settings, name, condition, why):
    if not condition:
        raise ValueError(f"{name}={getattr(settings, name)!r}: {why}")


@dataclass
class GPTConfig:
    """The shape of the network. The defaults are GPT-2's, so nanoGPT's `model_args` build the same network here.

    Raises ValueError, with the field and its value, for a shape that no network can have.
    """

    block_size: int = 1024  # the context length: positions per forward, and slots in the cache
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # biases in Linear and LayerNorm layers
    n_kv_head: int | None = None  # None: n_head; fewer: grouped-query attention; 1: multi-query attention
    mlp_ratio: float = 4  # width of the MLP's hidden layer, in units of n_embd
    activation: str = "gelu"  # "gelu" is exact; "gelu_tanh" is GPT-2's; "swiglu" is Shazeer's (arXiv:2002.05202)
    pos_emb: str = "learned"  # "learned" is GPT-2's table; "rope" is rotary (Su et al. 2021, arXiv:2104.09864)
    norm_first: bool = True  # False: post-LN (Vaswani et al. 2017), without a final norm
    tie_weights: bool = True  # lm_head shares the matrix of wte
    qk_norm: bool = False  # LayerNorm on queries and keys (Henry et al. 2020, arXiv:2010.04245)

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            require(self, name, getattr(self, name) >= 1, "must be at least 1")
        require(self, "dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1")
        require(self, "mlp_ratio", 1 <= self.mlp_ratio * self.n_embd < 2**31, "must give 1 to 2**31 - 1 hidden units")
        require(self, "activation", self.activation in ("gelu", "gelu_tanh", "swiglu"), "no such activation")
        require(self, "pos_emb", self.pos_emb in ("learned", "rope"), "must be learned or rope")
        require(self, "n_embd", self.n_embd % self.n_head == 0, f"must be a multiple of n_head={self.n_head}")
        pairs = self.pos_emb == "learned" or self.head_size % 2 == 0
        require(self, "n_embd", pairs, "rope rotates pairs of coordinates, so n_embd / n_head must be even")
        divides = self.n_kv_head is None or (self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0)
        require(self, "n_kv_head", divides, f"must be None or a divisor of n_head={self.n_head}")

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    @property
    def num_kv_heads(self):
        """n_kv_head with None replaced by n_head."""
        return self.n_kv_head or self.n_head


# -- the cache ---------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """One key/value head: what it remembers of all tokens so far, and attention over that.

    `key_cache` and `value_cache` are None while empty, else `(B, t, hs)`: slot s holds the key or value of the token at
    position s. Attention is causal, so a later token never changes an earlier slot. That is why we may keep them: a new
    token adds one slot and reads them all.

    A Head has no weights of its own, and its two caches are views of the model's KVCache, because a layer computes all
    its heads in one batched call. There are n_layer * n_kv_head of them.
    """

    def __init__(self, cache, layer, index):
        super().__init__()
        self.cache, self.layer, self.index = cache, layer, index

    @property
    def key_cache(self):
        return self.cache.of_head(self.cache.key, self.layer, self.index)

    @property
    def value_cache(self):
        return self.cache.of_head(self.cache.value, self.layer, self.index)

    def forward(self, q, pos):
        """Attend with queries q `(B, T, hs)` at positions pos `(B, T)`, one head spelled out.

        Returns the output `(B, T, hs)` and the attention weights `(B, T, t)`. The model itself runs
        CausalSelfAttention.forward, which does the same for all heads at once; --explain and the tests call this one.
        """
        k, v = self.key_cache, self.value_cache  # (B, t, hs)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))  # (B, T, t)
        visible = torch.arange(k.size(1), device=q.device) <= pos[..., None]  # slot <= position of the query
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return weights @ v, weights


class KVCache:
    """The keys and values of all layers: `key[layer]` and `value[layer]` are `(B, nkv, block_size, hs)`.

    lengths  filled slots per row, as Python integers, so that no step has to wait for a GPU; [] is an empty cache
    owner    the generation that fills the cache; None for somebody who calls GPT.forward by hand

    They are plain attributes and not buffers, so that they stay out of state_dict and DDP does not broadcast them.
    """

    lock = threading.RLock()  # one for all caches, because a lock cannot be copied with its model

    def __init__(self, n_layer, block_size):
        self.n_layer, self.block_size = n_layer, block_size
        self.clear()

    def clear(self):
        with self.lock:
            self.key = self.value = self.owner = None
            self.lengths = []

    @contextmanager
    def step(self, owner=None):
        """Lend the cache to `owner` for one forward, empty if anybody else has used it since.

        The owner looks at `lengths` to see what is there, and sets it to what will be there after the forward. A
        forward that fails leaves some layers written and some not, so then we forget everything.
        """
        with self.lock:
            if self.owner is not owner:
                self.clear()
                self.owner = owner
            try:
                yield
            except BaseException:
                self.clear()
                raise

    def update(self, layer, pos, k, v):
        """Write a layer's k and v `(B, nkv, T, hs)` at positions pos `(B, T)`. Returns all t slots of both."""
        (B, nkv, T, hs), t = k.shape, max(self.lengths)
        held = self.key[0] if self.key else None
        if held is None or (len(held), held.dtype, held.device) != (B, k.dtype, k.device):
            if t > T:
                raise ValueError(f"the cache holds no keys in {k.dtype} on {k.device} for this batch: prefill again")
            # We allocate the full length at once, because growing with torch.cat would copy the cache at every step. It
            # begins as zeros, because a masked slot has a weight of 0, but 0 times a NaN of torch.empty is NaN.
            shape = (2, self.n_layer, B, nkv, self.block_size, hs)
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
                key, value = torch.zeros(shape, dtype=k.dtype, device=k.device)
            self.key, self.value = key.unbind(), value.unbind()
        key, value = self.key[layer], self.value[layer]
        if B == 1:  # one operation where the general case takes several
            key.index_copy_(2, pos[0], k)
            value.index_copy_(2, pos[0], v)
        else:
            rows = torch.arange(B, device=pos.device)[:, None]
            key.transpose(1, 2)[rows, pos] = k.transpose(1, 2)
            value.transpose(1, 2)[rows, pos] = v.transpose(1, 2)
        return key.narrow(2, 0, t), value.narrow(2, 0, t)

    def take(self, rows):
        """Make row i a copy of row rows[i], so that the samples of a prompt can share its prefill."""
        with torch.inference_mode(False):  # as above
            self.key, self.value = ([x[rows] for x in layers] for layers in (self.key, self.value))
        self.lengths = [self.lengths[row] for row in rows]

    def of_head(self, buffers, layer, index):
        return None if buffers is None else buffers[layer][:, index, : max(self.lengths)]

    def mask(self, pos):
        """Return what each query may see, `(B, 1, T, t)`: the slots up to its own position. None: all of them.

        One rule serves a prefill, a chunk and a single token, and it hides the padding of shorter rows.
        """
        t = max(self.lengths)
        if pos.size(1) == 1 and min(self.lengths) == t:
            return None
        return (torch.arange(t, device=pos.device) <= pos[..., None])[:, None]


def clear_kv_cache(model):
    """Empty the key_cache and value_cache of every Head in `model`, any module that contains Heads.

    Needed by hand only after changing weights in place in eval mode, which nothing here can notice.
    """
    for module in model.modules():
        if isinstance(module, Head):
            module.cache.clear()


# -- the network -------------------------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    """Apply rotary position embedding to x `(B, n, T, hs)`, with cos and sin `(B, 1, T, hs)` of GPT.rope.

    Coordinate i is paired with i + hs / 2 (the "rotate-half" layout). The first half of sin is negated already, so a
    rotation is x * cos + swapped * sin: few operations, because in eager mode each of them costs time.
    """
    first, second = x.float().chunk(2, dim=-1)  # rotate in float32, whatever the dtype of x
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * cos, swapped, sin).type_as(x)


class CausalSelfAttention(nn.Module):
    """All heads of a layer in one batched call. With n_kv_head < n_head, each Head serves several query heads."""

    def __init__(self, config, cache, layer):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_size = config.n_head, config.num_kv_heads, config.head_size
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.head_size, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(self.head_size, bias=config.bias)
            self.k_norm = nn.LayerNorm(self.head_size, bias=config.bias)
        self.cache, self.layer = cache, layer
        self.heads = nn.ModuleList(Head(cache, layer, i) for i in range(self.n_kv_head))

    def project(self, x, rope=None):
        """Return q `(B, nh, T, hs)`, k and v `(B, nkv, T, hs)` of x `(B, T, C)`. rope: cos and sin at x's positions."""
        B, T, C = x.shape
        nh, nkv = self.n_head, self.n_kv_head
        qkv = self.c_attn(x).view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nh + 2 nkv, T, hs)
        q, k, v = qkv.split_with_sizes((nh, nkv, nkv), dim=1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:  # queries and keys together, because each operation costs time
            q, k = rotate(torch.cat((q, k), dim=1), *rope).split_with_sizes((nh, nkv), dim=1)
        return q, k, v

    def forward(self, x, rope=None, pos=None, mask=None):
        """x `(B, T, C)` -> `(B, T, C)`. pos `(B, T)`: go through the cache; mask: see KVCache.mask."""
        B, T, C = x.shape
        q, k, v = self.project(x, rope)
        gqa = self.n_kv_head != self.n_head
        if self.training or pos is None:  # no cache: causal attention within x
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=gqa)
        else:  # write the new keys and values, then read all so far: (B, nkv, t, hs)
            k, v = self.cache.update(self.layer, pos, k, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        y = y.transpose(1, 2).reshape(B, T, C)  # (B, nh, T, hs) -> (B, T, nh * hs)
        y = self.c_proj(y)
        return F.dropout(y, self.dropout) if self.training else y


class MLP(nn.Module):
    """Two matrices around an activation. SwiGLU needs a third, so each gets 2/3 of the width: as many parameters."""

    def __init__(self, config):
        super().__init__()
        self.gated = config.activation == "swiglu"
        hidden = int(config.mlp_ratio * config.n_embd)
        if self.gated:
            hidden = 8 * math.ceil(hidden * 2 / 3 / 8)
        self.c_fc = nn.Linear(config.n_embd, 2 * hidden if self.gated else hidden, bias=config.bias)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.dropout = config.dropout

    def forward(self, x):
        x = self.c_fc(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        else:
            x = F.gelu(x, approximate=self.approximate)
        x = self.c_proj(x)
        return F.dropout(x, self.dropout) if self.training else x


class Block(nn.Module):
    """Attention and MLP, each with a norm and a residual connection."""

    def __init__(self, config, cache, layer):
        super().__init__()
        self.norm_first = config.norm_first
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, cache, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, *attn_args):  # attn_args: rope, pos, mask
        if self.norm_first:
            x = x + self.attn(self.ln_1(x), *attn_args)
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(x + self.attn(x, *attn_args))
        return self.ln_2(x + self.mlp(x))


class GPT(nn.Module):
    """The language model. Modules and parameters have nanoGPT's names, so nanoGPT's checkpoints load."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.cache = KVCache(config.n_layer, config.block_size)
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, config.n_embd)})
        if config.pos_emb == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.transformer["h"] = nn.ModuleList(Block(config, self.cache, i) for i in range(config.n_layer))
        if config.norm_first:
            self.transformer["ln_f"] = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        self._make_rope()

        # GPT-2's initialization; c_proj is smaller, because 2 * n_layer outputs of c_proj add up in the residual stream
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
            hs, device = self.config.head_size, self.lm_head.weight.device
            frequency = 10000.0 ** (-torch.arange(0, hs, 2, device=device) / hs)
            angle = torch.outer(torch.arange(self.config.block_size, device=device), frequency).repeat(1, 2)
            sign = torch.ones(hs, device=device).index_fill_(0, torch.arange(hs // 2, device=device), -1.0)
            self.rope = torch.stack((angle.cos(), angle.sin() * sign))

    # Changed weights must never meet old keys. So we empty the cache wherever weights change or move: when training
    # begins, when weights are loaded, and in _apply, which to(), half() and cuda() all call.

    def train(self, mode=True):
        if mode:
            self.cache.clear()
        return super().train(mode)

    def _load_from_state_dict(self, *args):
        self.cache.clear()
        super()._load_from_state_dict(*args)

    def _apply(self, fn, recurse=True):
        self.cache.clear()
        super()._apply(fn, recurse)
        self._make_rope()  # on the device of the weights
        return self

    def forward(self, idx, targets=None, pos=None):
        """Return logits `(B, T, V)` for every position, and the mean cross-entropy, or None without targets.

        idx      (B, T) int64 token ids
        targets  (B, T) int64 next tokens; -1 is ignored
        pos      None: positions 0 to T - 1, and the cache is neither read nor written, so an evaluation cannot fill it.
                 Else absolute positions, int64, (T,) for all rows or (B, T), rising by one. In eval mode the call then
                 goes through the cache: it writes at pos, each query sees the slots up to its own, and what lay beyond
                 the newest pos is forgotten. Such a call has no gradient. In train mode pos only places the tokens.
        Raises ValueError for positions beyond block_size, and for a pos that would leave a gap in the cache.
        """
        if pos is not None:
            pos, lengths = self._check_pos(idx, pos)
        if pos is None or self.training:
            logits = self.unembed(self.hidden_states(idx, pos))
        else:
            with torch.no_grad(), self.cache.step():
                self.cache.lengths = lengths
                logits = self.unembed(self.hidden_states(idx, pos))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        return logits, loss

    def hidden_states(self, idx, pos=None):
        """Return `(B, T, C)`: all of the network but lm_head. We trust the caller with pos and the cache's lengths."""
        if pos is None and not 1 <= idx.size(1) <= self.config.block_size:
            raise ValueError(f"{idx.size(1)} positions; this model takes 1 to {self.config.block_size} (block_size)")
        places = torch.arange(idx.size(1), device=idx.device)[None] if pos is None else pos  # (1 or B, T)
        x = self.transformer["wte"](idx)
        rope = None
        if self.config.pos_emb == "learned":
            x = x + self.transformer["wpe"](places)
        else:
            rope = self.rope[:, places][:, :, None]  # cos and sin, (B, 1, T, hs) each
        if self.training:
            x = F.dropout(x, self.config.dropout)
        mask = None if pos is None or self.training else self.cache.mask(pos)
        for block in self.transformer["h"]:
            x = block(x, rope, pos, mask)
        return self.transformer["ln_f"](x) if self.config.norm_first else x

    def unembed(self, x):
        """Return the logits `(..., V)` of hidden states `(..., C)`: the one place where they are made."""
        return self.lm_head(x)

    def _check_pos(self, idx, pos):
        """Return pos as (B, T), and the cache lengths per row after a call at pos. Raises ValueError; see forward."""
        B, T = idx.shape
        if pos.dtype != torch.int64 or pos.shape not in ((T,), (B, T)) or not pos.numel():
            raise ValueError(f"pos is {pos.dtype} {tuple(pos.shape)}; expected int64 {(T,)} or {(B, T)}")
        held = self.cache.lengths if self.cache.owner is None and len(self.cache.lengths) == B else [0] * B
        pos, lengths = pos.expand(B, T), []
        for i, row in enumerate(pos.tolist()):
            if row != list(range(row[0], row[0] + T)):
                raise ValueError(f"pos must rise by one along a row, got {row}")
            if row[0] < 0 or row[-1] >= self.config.block_size:
                raise ValueError(f"pos {row[0]}..{row[-1]} is outside 0..{self.config.block_size - 1} (block_size)")
            if row[0] > held[i] and not self.training:
                raise ValueError(
                    f"pos starts at {row[0]}, but the cache holds {held[i]} positions of row {i}: "
                    "prefill first, with pos from 0"
                )
            lengths.append(row[-1] + 1)
        return pos, lengths

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Return idx `(B, T)` and its continuation, `(B, T + n)`. n is max_new_tokens, at most block_size - T.

        kv_cache  False recomputes the whole context for every token, which gives the same tokens more slowly
        sampling  temperature, top_k, top_p, seed, samples, overflow: see Sampling
        Raises ValueError for arguments that make no sense.
        """
        with eval_mode(self):
            return torch.cat((idx, *self.stream(idx, max_new_tokens, kv_cache=kv_cache, **sampling)), dim=1)

    def stream(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Yield the new tokens of `generate`, a block `(B, 1)` per step. Call model.eval() first."""
        owner = object() if kv_cache else None  # stands for this generation in the cache
        next_logits = partial(self.next_logits, owner=owner)
        blocks = decode_tokens(next_logits, self.config, idx, max_new_tokens, Sampling(**sampling))
        return self.release_cache_after(blocks, owner)

    def release_cache_after(self, blocks, owner):
        """Yield from `blocks`, then give back the memory of the cache, unless somebody else uses it by now."""
        try:
            yield from blocks
        finally:
            with self.cache.lock:
                if owner is not None and self.cache.owner is owner:
                    self.cache.clear()

    @torch.inference_mode()
    def next_logits(self, tokens, start, end, owner=None):
        """Return the logits `(B, V)` of the token after tokens[:, start:end]. owner None: without the cache."""
        if self.training:  # somebody trains between our steps
            with eval_mode(self):
                return self.next_logits(tokens, start, end, owner)
        if owner is None:
            return self.unembed(self.hidden_states(tokens[:, start:end])[:, -1])
        B = len(tokens)
        with self.cache.step(owner):
            # A decode step feeds the newest token alone. We prefill, which feeds the whole context, in the first step,
            # after the context has moved, and after somebody else has used the cache.
            decodes = self.cache.lengths == [end - 1 - start] * B
            first = end - 1 if decodes else start
            fed = tokens[:, first:end]
            if fed.size(1) > 1 and (fed == fed[0]).all():  # the samples of one prompt share its prefill
                fed = fed[:1]
            pos = torch.arange(first - start, end - start, device=tokens.device).expand(len(fed), -1)
            self.cache.lengths = [end - start] * len(fed)
            logits = self.unembed(self.hidden_states(fed, pos)[:, -1])
            if len(fed) < B:
                self.cache.take([0] * B)
            return logits.expand(B, -1)


@contextmanager
def eval_mode(model):
    """Put the model in eval mode inside the block. Each module gets its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    was_training = any(training for _, training in modes)
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()  # empties the cache, because training may change the weights
            for module, training in modes:
                module.training = training


def decode_tokens(next_logits, config, idx, max_new_tokens, sampling):
    """Return an iterator over the continuation of idx `(B, T)`, a block of new tokens `(B, 1)` per step.

    This is the one loop that samples a token per step, with and without the cache, for this model and for others:
    next_logits(tokens, start, end) returns the logits `(B, V)` of the token after tokens[:, start:end].
    Raises ValueError for arguments that make no sense, at the call and not at the first token.
    """
    B, T = idx.shape
    num_new = sampling.num_new_tokens(T, max_new_tokens, config.block_size)
    sample_ids = sampling.sample_ids(B, idx.device)

    def steps():
        tokens = F.pad(idx, (0, num_new))
        start = 0
        noises = sampling.noise(sample_ids, num_new, config.vocab_size)
        for end, noise in zip(range(T, T + num_new), noises):  # end: index of the new token
            start = context_start(start, end, config.block_size)
            new = sample_token(next_logits(tokens, start, end), noise, *sampling.filters)
            tokens[:, end] = new
            yield new[:, None]

    return steps()


# -- the sampler -------------------------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """The settings of one generation. Raises ValueError, with the field and its value, for one that makes no sense.

    temperature  0 is greedy (the largest logit, ties to the lowest id), 1 the model's own distribution; less than 1
                 favours likely tokens
    top_k        sample from the k likeliest tokens
    top_p        sample from the fewest likeliest tokens whose probabilities add up to top_p
    seed         0 <= seed < 2**64; None draws a seed from torch's global generator
    samples      row i uses the noise of sample samples[i]; None: of sample i
    overflow     "stop" ends at a full context, "slide" goes on: see context_start
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
        require(self, "seed", 0 <= self.seed < 2**64, "must be at least 0 and below 2**64")
        require(self, "overflow", self.overflow in ("stop", "slide"), "must be 'stop' or 'slide'")

    @property
    def filters(self):
        """The arguments of sample_token after the noise."""
        return self.temperature, self.top_k, self.top_p

    def sample_ids(self, B, device):
        """Return `samples` as an int64 tensor (B,). Raises ValueError if it does not name B samples."""
        samples = range(B) if self.samples is None else self.samples
        samples = torch.as_tensor(samples, dtype=torch.int64, device=device)
        if B < 1 or samples.shape != (B,):
            raise ValueError(f"samples has shape {tuple(samples.shape)}; {B} prompts need {(B,)}, and at least one")
        return samples

    def num_new_tokens(self, T, max_new_tokens, block_size):
        """Return the number of new tokens for a prompt of T tokens. Raises ValueError if the prompt does not fit."""
        if T < 1 or (self.overflow == "stop" and T > block_size):
            raise ValueError(f"a prompt of {T} tokens; this model takes 1 to {block_size} (block_size)")
        return max(0, max_new_tokens if self.overflow == "slide" else min(max_new_tokens, block_size - T))

    def noise(self, sample_ids, steps, vocab_size):
        """Yield the noise of steps 0, 1, ..., `(B, V)` each. Making it for 64 steps at once is cheaper."""
        at_once = max(1, min(64, 2**22 // (len(sample_ids) * vocab_size)))
        for first in range(0, steps, at_once):
            some_steps = torch.arange(first, min(first + at_once, steps), device=sample_ids.device)
            yield from gumbel_noise(self.seed, sample_ids, some_steps, vocab_size).unbind(1)


def context_start(start, end, block_size):
    """Return the index of the first token that the model sees when it predicts token `end`.

    A context keeps its start while it fits. When it is full we cut it to its newest half and begin again at position 0,
    so a cache has to be filled anew only once every half context.
    """
    return start if end - start <= block_size else end - max(1, block_size // 2)


def sample_token(logits, noise, temperature, top_k=None, top_p=None):
    """Pick tokens, `(...,)` int64, from logits and Gumbel noise, `(..., V)` each.

    argmax(logits / temperature + noise) is a sample of softmax(logits / temperature): the Gumbel-max trick. We multiply
    the noise by the temperature instead, which needs no division and is greedy at 0. top_k keeps exactly k tokens, ties
    to the lowest id. top_p then keeps the likeliest of them, up to and including the one that crosses top_p. The
    filters and the temperature may be tensors.
    """
    logits = logits.float()
    score = logits + temperature * noise
    if top_k is None and top_p is None:
        return score.argmax(-1)

    # filter in order of likelihood; a stable sort keeps ties in order of id
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    score = score.gather(-1, ids)
    rank = torch.arange(ids.size(-1), device=ids.device)
    if top_k is not None:
        ranked = ranked.masked_fill(rank >= top_k, -math.inf)
        score = score.masked_fill(rank >= top_k, -math.inf)
    if top_p is not None:
        divisor = torch.as_tensor(temperature, device=ids.device).clamp(min=1e-30)  # no division by 0
        probs = torch.softmax((ranked - ranked[..., :1]) / divisor, dim=-1)
        beyond = probs.cumsum(-1) - probs >= top_p
        score = score.masked_fill(beyond & (rank > 0), -math.inf)
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)


def gumbel_noise(seed, samples, steps, vocab_size):
    """Return standard Gumbel noise, `(B, S, V)` float32, always finite.

    seed     an integer, or a pair of tensors: its low and its high 32 bits
    samples  (B,) int64
    steps    (S,) int64 for all rows, or (B, S)
    The noise is a hash of (seed, sample, step, token id) and nothing else. So every way to decode draws the same noise,
    and picks the same token from the same logits. The hash applies the 32-bit finalizer "lowbias32" of Chris Wellons to
    one counter after the other.
    """
    low32 = 0xFFFFFFFF

    def mix(h):
        h = (h ^ (h >> 16)) * 0x7FEB352D & low32
        h = (h ^ (h >> 15)) * 0x846CA68B & low32
        return h ^ (h >> 16)

    low, high = (seed & low32, seed >> 32) if isinstance(seed, int) else seed
    ids = torch.arange(vocab_size, device=steps.device)
    h = 0
    for counter in (low, high, samples[:, None, None], steps[..., None], ids):
        h = mix(h ^ mix(counter + 0x9E3779B9 & low32))  # mix(0) is 0, hence the constant
    # float32 is finest near 0, and the largest noise comes from there; exactly 1 would give infinite noise
    uniform = ((h.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
