"""GPT-2's network, with a key/value cache in every attention Head.

Reading order: GPTConfig, Head (attention of one head over its cache), KVCache (the buffers of a layer),
CausalSelfAttention (writes and reads the cache), MLP, Block, GPT (next_logits decides what to feed), decode_tokens (the
generation loop). The sampler is in kvgpt/decoding/sampling.py.

Shapes: B rows per batch, T positions per call, t positions in the cache, C = n_embd, nh = n_head, nkv = n_kv_head,
hs = C / nh (head size), V = vocab_size.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from kvgpt.decoding.sampling import Sampling, context_start, sample_token
from kvgpt.decoding.threads import StepThreads


@dataclass
class GPTConfig:
    """The shape of the network. The defaults are GPT-2's, so nanoGPT's `model_args` build the same network here.

    Raises ValueError, naming field and value, for a shape that no network can have.
    """

    block_size: int = 1024  # context length: positions per forward, and slots in the cache
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
        def require(condition, name, why):
            if not condition:
                raise ValueError(f"{name}={getattr(self, name)!r}: {why}")

        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            is_size = type(getattr(self, name)) is int and 1 <= getattr(self, name) < 2**24
            require(is_size, name, "must be an integer from 1 to 2**24 - 1")
        for name in ("bias", "norm_first", "tie_weights", "qk_norm"):
            require(type(getattr(self, name)) is bool, name, "must be True or False")
        for name in ("dropout", "mlp_ratio"):
            require(type(getattr(self, name)) in (int, float), name, "must be a number")
        require(self.n_embd % self.n_head == 0, "n_embd", f"must be a multiple of n_head={self.n_head}")
        divides = type(self.n_kv_head) is int and self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0
        require(self.n_kv_head is None or divides, "n_kv_head", f"must be None or a divisor of n_head={self.n_head}")
        require(0 <= self.dropout < 1, "dropout", "must be at least 0 and below 1")
        require(1 <= self.mlp_ratio * self.n_embd < 2**31, "mlp_ratio", "must give 1 to 2**31 - 1 hidden units")
        activations = ("gelu", "gelu_tanh", "swiglu")
        require(self.activation in activations, "activation", "must be 'gelu', 'gelu_tanh' or 'swiglu'")
        require(self.pos_emb in ("learned", "rope"), "pos_emb", "must be 'learned' or 'rope'")
        pairs = self.pos_emb == "learned" or self.head_size % 2 == 0
        require(pairs, "n_embd", "rope rotates pairs of coordinates, so n_embd / n_head must be even")

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    @property
    def num_kv_heads(self):
        """n_kv_head with None replaced by n_head."""
        return self.n_kv_head or self.n_head


# -- the cache ---------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """One key/value head: the keys and values of all tokens so far, and attention over them.

    `key_cache` and `value_cache` are None while empty, else `(B, t, hs)`. Slot s holds the key or value of the token at
    position s. Later tokens never change an earlier slot, because attention is causal. A new token adds one slot and
    reads all of them. t is the longest length in the batch; slots past a shorter row's end are never read.

    key_cache and value_cache are views of the layer's KVCache, because the layer computes all its Heads in one batched
    call. A Head has no parameters. A model has n_layer * n_kv_head Heads.
    """

    def __init__(self, cache, index):
        super().__init__()
        self.cache = cache
        self.index = index

    @property
    def key_cache(self):
        return self.cache.key[:, self.index, : max(self.cache.lengths)] if self.cache.lengths else None

    @property
    def value_cache(self):
        return self.cache.value[:, self.index, : max(self.cache.lengths)] if self.cache.lengths else None

    def forward(self, q, pos):
        """Attend with queries q `(B, T, hs)` at positions pos `(B, T)` over this head's own cache.

        Returns the output `(B, T, hs)` and the attention weights `(B, T, t)`. CausalSelfAttention.forward computes the
        same for all heads at once and is what the model runs. explain.py and the tests call this method.
        """
        k, v = self.key_cache, self.value_cache  # (B, t, hs)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))  # (B, T, t)
        visible = torch.arange(k.size(1), device=q.device) <= pos[..., None]  # slot <= position of the query
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return weights @ v, weights


class KVCache:
    """The keys and values of one layer: `key` and `value`, `(B, nkv, block_size, hs)`, allocated once per sequence.

    lengths          positions filled per row, as Python integers; an empty list is an empty cache
    owner            the generation that filled the cache; None: a plain call of forward
    weights_version  counts weight changes. Cached keys and compiled steps are valid for one value only.

    Every layer has its own lengths and owner, because one layer can be cleared or reloaded alone. key and value are
    plain attributes. No state_dict contains them, and DDP does not broadcast them.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.weights_version = 0
        self.clear()

    def clear(self):
        self.key = self.value = self.owner = None
        self.lengths = []

    def invalidate(self):
        """Clear the cache because the weights have changed, or may have."""
        self.clear()
        self.weights_version += 1

    def allocate(self, B, n_kv_head, head_size, dtype, device):
        shape = (2, B, n_kv_head, self.block_size, head_size)
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
            # zeros, because torch.empty may hold NaN, and a masked slot's weight of 0 times NaN is NaN
            self.key, self.value = torch.zeros(shape, dtype=dtype, device=device).unbind()

    def update(self, pos, k, v, num_slots):
        """Write k and v `(B, nkv, T, hs)` at positions pos `(B, T)`; return the first num_slots slots of both.

        A call with another batch size, dtype or device allocates new buffers. Raises ValueError if new buffers would
        drop keys that this call needs. GPT.cached_hidden_states sets `lengths` after every layer has written.
        """
        B, nkv, T, hs = k.shape
        if self.key is None or self.key.size(0) != B or self.key.dtype != k.dtype or self.key.device != k.device:
            if num_slots > T:
                held = "nothing" if self.key is None else f"{self.key.dtype} on {self.key.device}"
                raise ValueError(f"the cache holds {held}, this call made {k.dtype} on {k.device}: prefill again")
            self.allocate(B, nkv, hs, k.dtype, k.device)
        if B == 1:  # one operation instead of several
            slots = pos[0]
            self.key.index_copy_(2, slots, k)
            self.value.index_copy_(2, slots, v)
        else:
            rows = torch.arange(B, device=pos.device)[:, None]
            self.key.transpose(1, 2)[rows, pos] = k.transpose(1, 2)
            self.value.transpose(1, 2)[rows, pos] = v.transpose(1, 2)
        return self.key.narrow(2, 0, num_slots), self.value.narrow(2, 0, num_slots)


def clear_kv_cache(model):
    """Empty every Head's key_cache and value_cache in `model`, any module that contains Heads.

    Call this after changing weights in place in eval mode, because the cache cannot notice such a change. The next
    generation also compiles its step again.
    """
    for module in model.modules():
        if isinstance(module, Head):
            module.cache.invalidate()


def causal_mask(pos, num_slots):
    """Return the mask of visible slots, `(B, 1, T, num_slots)`: slot <= pos. pos is (B, T).

    One rule serves prefill, chunks and single tokens. The rule also hides the padding behind shorter rows.
    """
    return (torch.arange(num_slots, device=pos.device) <= pos[..., None])[:, None]


# -- the network -------------------------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    """Apply rotary position embedding, rotate-half layout: x `(B, n, T, hs)`, cos and sin broadcastable to x.

    Coordinate i is paired with coordinate i + hs / 2. _make_rope has negated the first half of sin. Computes
    x * cos + swapped * sin in few operations, because each operation costs time in eager mode. The compiler fuses `cat`
    well. It would compute the norm before a `roll` again for every element.
    """
    first, second = x.float().chunk(2, dim=-1)  # rotate in float32, whatever the dtype of x
    swapped = torch.cat((second, first), dim=-1)
    return torch.addcmul(x * cos, swapped, sin).type_as(x)


class CausalSelfAttention(nn.Module):
    """All Heads of a layer in one batched call. With n_kv_head < n_head, each Head serves several query heads."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.num_kv_heads
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.head_size, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(self.head_size, bias=config.bias)
            self.k_norm = nn.LayerNorm(self.head_size, bias=config.bias)
        self.qk_norm = config.qk_norm
        self.cache = KVCache(config.block_size)
        self.heads = nn.ModuleList(Head(self.cache, i) for i in range(self.n_kv_head))

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

    def forward(self, x, rope=None, pos=None, num_slots=None, mask=None):
        """x `(B, T, C)` -> `(B, T, C)`. See GPT.hidden_states for the arguments."""
        B, T, C = x.shape
        q, k, v = self.project(x, rope)
        gqa = self.n_kv_head != self.n_head
        if num_slots is None:  # no cache: causal attention within x
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=gqa)
        else:  # write the new keys and values, then read all so far: (B, nkv, num_slots, hs)
            k, v = self.cache.update(pos, k, v, num_slots)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        y = y.transpose(1, 2).reshape(B, T, C)  # (B, nh, T, hs) -> (B, T, nh * hs)
        y = self.c_proj(y)
        return F.dropout(y, self.dropout) if self.training else y

    def allocate_cache(self, B):
        """Make the cache empty, with buffers for B rows."""
        weight = self.c_attn.weight
        self.cache.clear()
        self.cache.allocate(B, self.n_kv_head, self.head_size, weight.dtype, weight.device)

    # train(), load_state_dict(), and to(), half() and cuda(), which call _apply, change or move weights. Keys computed
    # before are no longer valid.

    def train(self, mode=True):
        if mode:
            self.cache.invalidate()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self.cache.invalidate()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args):
        self.cache.invalidate()
        super()._load_from_state_dict(*args)


class MLP(nn.Module):
    """Two matrices around an activation. SwiGLU has three matrices of 2/3 the width, and as many parameters."""

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

    def __init__(self, config):
        super().__init__()
        self.norm_first = config.norm_first
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, *attn_args):  # attn_args: rope, pos, num_slots, mask
        if self.norm_first:
            x = x + self.attn(self.ln_1(x), *attn_args)
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(x + self.attn(x, *attn_args))
        return self.ln_2(x + self.mlp(x))


class GPT(nn.Module):
    """The language model. Names of modules and parameters are nanoGPT's, so nanoGPT's checkpoints load."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, config.n_embd)})
        if config.pos_emb == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.transformer["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        if config.norm_first:
            self.transformer["ln_f"] = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        self._make_rope()
        self.caches = [block.attn.cache for block in self.transformer["h"]]  # one per layer

        # GPT-2's initialization; c_proj is smaller, because 2 * n_layer outputs of c_proj add up in the residual stream
        residual_std = 0.02 / math.sqrt(2 * config.n_layer)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=residual_std if name.endswith("c_proj") else 0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def zero_init(self):
        """Replace GPT-2's initialization: c_proj is zero, c_attn and c_fc have std 0.5 / sqrt(fan_in).

        Every pre-LN block then starts as the identity.
        """
        for name, p in self.transformer["h"].named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.5 / math.sqrt(p.size(1)))

    def _make_rope(self):
        """Make the rotary table `(2, block_size, hs)`: cos and sin, in float32 whatever the dtype of the weights."""
        self.rope = None
        if self.config.pos_emb == "rope":
            hs, device = self.config.head_size, self.lm_head.weight.device
            frequency = 10000.0 ** (-torch.arange(0, hs, 2, device=device) / hs)
            angle = torch.outer(torch.arange(self.config.block_size, device=device), frequency).repeat(1, 2)
            sign = torch.ones(hs, device=device).index_fill_(0, torch.arange(hs // 2, device=device), -1.0)
            self.rope = torch.stack((angle.cos(), angle.sin() * sign))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._make_rope()  # on the device of the weights
        return self

    def forward(self, idx, targets=None, pos=None):
        """Return logits `(B, T, V)` for every position, and the mean cross-entropy, or None without targets.

        idx      (B, T) int64 token ids
        targets  (B, T) int64 next tokens; -1 is ignored
        pos      None: positions 0..T-1, no cache. Else absolute positions, int64, (T,) for all rows or (B, T), rising
                 by one. In eval mode the call then goes through the cache: keys and values are written at pos, every
                 query sees the slots up to its own pos, and slots beyond the newest pos are forgotten. A cached call
                 has no gradient. In train mode pos only places the tokens.
        A call without pos never touches the cache, so an evaluation cannot fill the cache by accident.
        Raises ValueError for a T or pos beyond block_size, and for a pos that would leave a gap in the cache.
        """
        if pos is None:
            logits = self.lm_head(self.hidden_states(idx))
        else:
            pos, lengths = self._check_pos(idx, pos)
            if self.training:
                logits = self.lm_head(self.hidden_states(idx, pos))
            else:
                with torch.no_grad():
                    logits = self.lm_head(self.cached_hidden_states(idx, pos, lengths))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        return logits, loss

    def hidden_states(self, idx, pos=None, num_slots=None, mask=None):
        """Return `(B, T, C)`, the network without its lm_head. `pos` is trusted.

        pos        (B, T) positions of the tokens; None: 0..T-1
        num_slots  None: causal attention within idx. Else write to the caches at pos and attend over num_slots slots:
                   t of them, or block_size in a CUDA graph
        mask       bool, True where a query may look, broadcastable to (B, nh, T, num_slots); None: everywhere
        """
        if pos is None:
            T = idx.size(1)
            if not 1 <= T <= self.config.block_size:
                raise ValueError(f"{T} positions; this model takes 1 to {self.config.block_size} (block_size)")
            pos = torch.arange(T, device=idx.device)[None]  # (1, T)
        x = self.transformer["wte"](idx)
        rope = None
        if self.config.pos_emb == "learned":
            x = x + self.transformer["wpe"](pos)
        else:
            rope = self.rope[:, pos][:, :, None]  # cos and sin, (B, 1, T, hs) each
        if self.training:
            x = F.dropout(x, self.config.dropout)
        for block in self.transformer["h"]:
            x = block(x, rope, pos, num_slots, mask)
        return self.transformer["ln_f"](x) if self.config.norm_first else x

    def cached_hidden_states(self, idx, pos, lengths, owner=None):
        """Return `(B, T, C)` like hidden_states, through the caches.

        lengths  cache lengths after this call, one per row. Python integers avoid a GPU synchronization
        owner    see `cached_lengths`
        """
        num_slots = max(lengths)
        # one query per row, and all rows equally long: there is nothing to hide
        sees_all = idx.size(1) == 1 and min(lengths) == num_slots
        mask = None if sees_all else causal_mask(pos, num_slots)
        try:
            x = self.hidden_states(idx, pos, num_slots, mask)
        except BaseException:
            self.clear_caches()  # some layers were written, some not
            raise
        self.set_cached_lengths(lengths, owner)
        return x

    def cached_lengths(self, owner=None):
        """Return the cache lengths per row, or None if a cache is empty or `owner` was not the last to write it.

        A generation passes itself as owner and so notices that another call has used or cleared a cache.
        """
        lengths = self.caches[0].lengths
        same = all(cache.owner is owner and cache.lengths == lengths for cache in self.caches)
        return lengths if same and lengths else None

    def set_cached_lengths(self, lengths, owner=None):
        for cache in self.caches:
            cache.lengths, cache.owner = lengths, owner

    def clear_caches(self):
        for cache in self.caches:
            cache.clear()

    def cache_bytes(self):
        """Return (used, reserved): bytes of the keys and values written so far, and bytes of their buffers."""
        pairs = [
            (tensor, max(cache.lengths))
            for cache in self.caches
            if cache.lengths
            for tensor in (cache.key, cache.value)
        ]
        return sum(tensor[:, :, :t].nbytes for tensor, t in pairs), sum(tensor.nbytes for tensor, _ in pairs)

    def _check_pos(self, idx, pos):
        """Return pos as (B, T), and the cache lengths per row after a call at pos. Raises ValueError; see forward."""
        B, T = idx.shape
        if pos.dtype != torch.int64 or pos.shape not in ((T,), (B, T)):
            raise ValueError(f"pos is {pos.dtype} {tuple(pos.shape)}; expected int64 {(T,)} or {(B, T)}")
        pos = pos.expand(B, T)
        rows = pos.tolist()
        if not rows:
            raise ValueError("an empty batch")
        held = self.cached_lengths() or [0] * B
        held = held if len(held) == B else [0] * B
        for i, row in enumerate(rows):
            if not row or row != list(range(row[0], row[0] + T)):
                raise ValueError(f"pos must rise by one along a row, got {row}")
            if row[0] < 0 or row[-1] >= self.config.block_size:
                raise ValueError(f"pos {row[0]}..{row[-1]} is outside 0..{self.config.block_size - 1} (block_size)")
            if row[0] > held[i] and not self.training:
                raise ValueError(
                    f"pos starts at {row[0]}, but the cache holds {held[i]} positions of row {i}: "
                    "prefill first, with pos from 0"
                )
        return pos, [row[-1] + 1 for row in rows]

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Return idx `(B, T)` and its continuation, `(B, T + n)`. n is max_new_tokens, at most block_size - T.

        kv_cache  False recomputes the whole context for every token, which gives the same tokens more slowly
        sampling  temperature, top_k, top_p, seed, samples, overflow: see Sampling
        Raises ValueError for invalid arguments.
        """
        with eval_mode(self):
            return torch.cat((idx, *self.stream(idx, max_new_tokens, kv_cache=kv_cache, **sampling)), dim=1)

    def stream(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Yield the new tokens of `generate`, a block `(B, 1)` per step. The arguments are checked at the call.

        Call model.eval() first. In train mode every step prefills, because the return to train mode empties the caches.
        """
        owner = object()  # stands for this generation in the caches
        next_logits = self.next_logits(kv_cache, owner)
        blocks = decode_tokens(next_logits, self.config, idx, max_new_tokens, Sampling(**sampling))
        return self.release_cache_after(blocks, owner)

    def next_logits(self, kv_cache, owner=None):
        """Return the function that `decode_tokens` calls at every step. It feeds the model, through the cache or not.

        owner  see `cached_lengths`; None: an object of its own
        """
        owner = owner or object()
        positions = torch.arange(self.config.block_size, device=self.lm_head.weight.device)
        threads = StepThreads(sum(p.numel() for p in self.parameters()))

        def uncached_logits(tokens, start, end):
            context = tokens[:, start:end]
            with torch.inference_mode(), eval_mode(self), threads.for_tokens(context.numel()):
                return self.lm_head(self.hidden_states(context)[:, -1])

        def cached_logits(tokens, start, end):
            # Decode feeds the newest token. Prefill feeds the whole context: in the first step, after the context has
            # moved, and after another call has used the cache.
            B = len(tokens)
            decodes = self.cached_lengths(owner) == [end - 1 - start] * B
            first = end - 1 if decodes else start
            pos = positions[first - start : end - start].expand(B, -1)
            with torch.inference_mode(), eval_mode(self), threads.for_tokens(pos.numel()):
                x = self.cached_hidden_states(tokens[:, first:end], pos, [end - start] * B, owner)
                return self.lm_head(x[:, -1])

        return cached_logits if kv_cache else uncached_logits

    def release_cache_after(self, blocks, owner):
        """Yield from `blocks`, then clear the caches if they still belong to `owner`."""
        try:
            yield from blocks
        finally:
            if self.cached_lengths(owner):
                self.clear_caches()


def decode_tokens(next_logits, config, idx, max_new_tokens, sampling):
    """Return an iterator over the continuation of idx `(B, T)`, a block of new tokens `(B, 1)` per step.

    next_logits(tokens, start, end) returns the logits `(B, V)` of the token after tokens[:, start:end], without a
    gradient. This is the one loop that samples a token per step: with and without the cache, in PyTorch and in other
    engines.
    Raises ValueError for invalid arguments.
    """
    B, T = idx.shape
    num_new = sampling.num_new_tokens(T, max_new_tokens, config.block_size)
    sample_ids = sampling.sample_ids(B, idx.device)

    def steps():  # a generator of its own, so that the checks above run at the call
        tokens = F.pad(idx, (0, num_new))
        noises = sampling.noise(sample_ids, num_new, config.vocab_size)
        start = 0
        for end, noise in zip(range(T, T + num_new), noises):  # end: index of the new token
            start = context_start(start, end, config.block_size)
            new = sample_token(next_logits(tokens, start, end), noise, *sampling.filters)
            tokens[:, end] = new
            yield new[:, None]

    return steps()


@contextmanager
def eval_mode(model):
    """Put the model in eval mode inside the block. Each module gets its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()] if model.training else []
    if modes:
        model.eval()
    try:
        yield
    finally:
        if modes:
            model.train()  # empties the caches, because training may change the weights
        for module, training in modes:
            module.training = training
