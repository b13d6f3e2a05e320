"""A GPT whose attention heads remember: GPT-2's network, with a key/value cache in every Head.

To read in order: GPTConfig, Head (what is remembered), KVCache (where it lies), CausalSelfAttention (who writes and
reads it), MLP, Block, GPT, generation (prefill, then one token a step), and sampling, whose noise makes a token a
function of (logits, seed, sample, step) alone, so that every way of decoding picks the same tokens.

Shapes: B rows in a batch, T positions in a call, t positions cached so far, C = n_embd, nh = n_head, nkv = n_kv_head,
hs = C / nh, the head size.
"""

import math
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    """The network's shape. The defaults are GPT-2's, so a nanoGPT `model_args` dict builds the network it always did.

    Raises ValueError, naming the field and the value, for anything that no network can have.
    """

    block_size: int = 1024  # the context: positions a forward, or the cache, can hold
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in the Linears and LayerNorms
    n_kv_head: int | None = None  # None: n_head; fewer: grouped-query attention; 1: multi-query
    mlp_ratio: float = 4  # width of the MLP's hidden layer, in units of n_embd
    activation: str = "gelu"  # "gelu" is exact, "gelu_tanh" GPT-2's approximation; "swiglu" (arXiv:2002.05202)
    pos_emb: str = "learned"  # a table, as GPT-2; or "rope", rotary (Su et al. 2021, arXiv:2104.09864)
    norm_first: bool = True  # False: post-LN as in Vaswani et al. 2017, then without a final norm
    tie_weights: bool = True  # lm_head shares wte's matrix
    qk_norm: bool = False  # a LayerNorm on every query and key: attention weights by direction, not by length

    def __post_init__(self):
        def require(condition, name, why):
            if not condition:
                raise ValueError(f"{name}={getattr(self, name)!r}: {why}")

        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            is_size = type(getattr(self, name)) is int and 1 <= getattr(self, name) < 2**24
            require(is_size, name, "must be an integer >= 1, and no network has one >= 2**24")
        for name in ("bias", "norm_first", "tie_weights", "qk_norm"):
            require(type(getattr(self, name)) is bool, name, "must be True or False")
        require(self.n_embd % self.n_head == 0, "n_embd", f"must be a multiple of n_head={self.n_head}")
        require(
            self.n_kv_head is None
            or (type(self.n_kv_head) is int and self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0),
            "n_kv_head",
            f"must be None or a divisor of n_head={self.n_head}",
        )
        is_number = [type(x) in (int, float) for x in (self.dropout, self.mlp_ratio)]
        require(is_number[0] and 0 <= self.dropout < 1, "dropout", "must be in [0, 1)")
        require(
            is_number[1] and 1 <= self.mlp_ratio * self.n_embd < 2**31, "mlp_ratio", "must be positive and not huge"
        )
        activations = ("gelu", "gelu_tanh", "swiglu")
        require(self.activation in activations, "activation", "must be 'gelu', 'gelu_tanh' or 'swiglu'")
        require(self.pos_emb in ("learned", "rope"), "pos_emb", "must be 'learned' or 'rope'")
        if self.pos_emb == "rope":
            require(self.head_size % 2 == 0, "n_embd", "rope turns pairs: n_embd / n_head must be even")

    @property
    def head_size(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        """n_kv_head, also where that is None."""
        return self.n_kv_head or self.n_head


class Head(nn.Module):
    """One key/value head of a layer, and what it remembers of the tokens that went through it.

    `key_cache` and `value_cache` are None while empty, else `(B, t, head_size)`: slot s is what the token at position s
    was projected to (a rotary key: and turned by s), t the longest length in the batch; a shorter row ends earlier, and
    what follows there is never read. A causal model never changes a slot again: a new token adds one, and reads all.
    Both are views on the layer's KVCache, made when read: all Heads of a layer are computed in one batched call, which
    wants their keys side by side. There are `n_layer * n_kv_head` Heads in a model; they have no parameters.
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


class KVCache:
    """One layer's keys and values, `(B, n_kv_head, block_size, head_size)` each, allocated once and written in place.

    `lengths` says, in Python integers, how many positions of each row are filled; an empty list is an empty cache. It
    is replaced, never changed, so whoever holds the list can tell by `is` that nobody has used the cache since.
    The tensors are no registered buffers: they belong to no state_dict, and DDP does not broadcast them.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.epoch = 0  # of the weights: what was made from them, keys or a compiled step, belongs to one
        self.clear()

    def clear(self):
        self.key = self.value = None
        self.lengths = []

    def outdate(self):
        self.clear()
        self.epoch += 1

    def write(self, pos, k, v, end):
        """Store k and v `(B, nkv, T, hs)` at the absolute positions pos, `(T,)` for all rows or `(B, T)` for each.

        Returns the first `end` slots of both, `(B, nkv, end, hs)`. The buffers are those of the last call if they fit
        this one's batch, dtype and device, else new; what a sequence has behind it is never lost that way unnoticed.
        """
        B, nkv, T, hs = k.shape
        if self.key is None or self.key.size(0) != B or self.key.dtype != k.dtype or self.key.device != k.device:
            if end > T:
                raise ValueError(f"the cache holds {self.key.dtype}, this call made {k.dtype}: prefill again")
            self.reserve(B, nkv, hs, k.dtype, k.device)
        if pos.dim() == 1:
            self.key.index_copy_(2, pos, k)
            self.value.index_copy_(2, pos, v)
        else:
            rows = torch.arange(B, device=pos.device)[:, None]
            self.key.transpose(1, 2)[rows, pos] = k.transpose(1, 2)
            self.value.transpose(1, 2)[rows, pos] = v.transpose(1, 2)
        return self.key[:, :, :end], self.value[:, :, :end]

    def reserve(self, B, n_kv_head, head_size, dtype, device):
        shape = (2, B, n_kv_head, self.block_size, head_size)
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written to outside of it
            # zeros, not empty: a masked slot still meets a probability of 0, and 0 * NaN is NaN
            self.key, self.value = torch.zeros(shape, dtype=dtype, device=device).unbind()


def clear_kv_cache(model):
    """Empty every Head's key_cache and value_cache in `model` (any module that contains Heads), freeing the memory. A
    Decoder compiles its step again then: the weights may be others."""
    for module in model.modules():
        if isinstance(module, Head):
            module.cache.outdate()


def rotate(x, cos, sin):
    """Rotary position embedding in the rotate-half layout: x `(B, n, T, hs)`, cos and sin broadcastable to it, the
    first half of sin negated: coordinate i makes a pair with the one half a head away, which roll brings to it."""
    wide = x.float()  # turned in float32, whatever the dtype of x
    return torch.addcmul(wide * cos, wide.roll(x.size(-1) // 2, -1), sin).type_as(x)


class CausalSelfAttention(nn.Module):
    """All Heads of a layer in one batched call. n_kv_head < n_head: each key/value head serves several query heads."""

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.kv_heads
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.c_attn = Linear(config.n_embd, (self.n_head + 2 * self.n_kv_head) * self.head_size, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(self.head_size, bias=config.bias)
            self.k_norm = nn.LayerNorm(self.head_size, bias=config.bias)
        self.qk_norm = config.qk_norm
        self.cache = KVCache(config.block_size)
        self.heads = nn.ModuleList(Head(self.cache, i) for i in range(self.n_kv_head))

    def forward(self, x, rope=None, pos=None, mask=None, end=None):
        """x `(B, T, C)` -> `(B, T, C)`. With `pos`: through the cache, whose first `end` slots are visible as far as
        `mask`, True where a query may look, allows. Without: plain causal attention over x."""
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, -1, self.head_size).transpose(1, 2)  # (B, nh + 2 nkv, T, hs)
        q, k, v = qkv.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)

        gqa = self.n_kv_head != self.n_head
        if pos is not None:
            k, v = self.cache.write(pos, k, v, end)  # (B, nkv, end, hs): this call's and all before
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        else:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=gqa)
        y = y.transpose(1, 2).reshape(B, T, C)  # (B, nh, T, hs) -> (B, T, nh * hs)
        y = self.c_proj(y)
        return F.dropout(y, self.dropout) if self.training else y  # else it only costs a call

    def reserve_cache(self, B):
        """An empty cache, allocated already, for a batch of B rows."""
        weight = self.c_attn.weight
        self.cache.clear()
        self.cache.reserve(B, self.n_kv_head, self.head_size, weight.dtype, weight.device)

    # Whatever changes the weights, or takes them elsewhere, makes the keys computed with them worthless.

    def train(self, mode=True):
        if mode:
            self.cache.outdate()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self.cache.outdate()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args):
        self.cache.outdate()
        super()._load_from_state_dict(*args)


class MLP(nn.Module):
    """Two matrices around an activation. With swiglu three, of as many parameters: half of c_fc gates the other."""

    def __init__(self, config):
        super().__init__()
        self.gated = config.activation == "swiglu"
        hidden = int(config.mlp_ratio * config.n_embd)
        if self.gated:
            hidden = 8 * math.ceil(hidden * 2 / 3 / 8)
        self.c_fc = Linear(config.n_embd, 2 * hidden if self.gated else hidden, bias=config.bias)
        self.c_proj = Linear(hidden, config.n_embd, bias=config.bias)
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
    def __init__(self, config):
        super().__init__()
        self.norm_first = config.norm_first
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, *cache_args):
        if self.norm_first:
            x = x + self.attn(self.ln_1(x), *cache_args)
            return x + self.mlp(self.ln_2(x))
        x = self.ln_1(x + self.attn(x, *cache_args))
        return self.ln_2(x + self.mlp(x))


class GPT(nn.Module):
    """The language model. Module and parameter names are nanoGPT's, so its checkpoints load (checkpoint.py)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, config.n_embd)})
        if config.pos_emb == "learned":
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        self.transformer["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        if config.norm_first:
            self.transformer["ln_f"] = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.transformer["wte"].weight = self.lm_head.weight
        self._make_rope()

        # GPT-2's initialization: what is added to the residual stream is scaled by the number of additions
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(
                    module.weight, std=0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj") else 0.02
                )
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def zero_init(self):
        """Another initialization than GPT-2's: c_proj is zero, so that every block begins by adding nothing; c_attn and
        c_fc have the standard deviation 0.5 / sqrt(fan_in)."""
        for name, p in self.transformer["h"].named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.5 / math.sqrt(p.size(1)))

    def _make_rope(self):
        """The rotary tables, cos and sin `(block_size, hs)`: no weights, so float32 whatever the dtype of the model."""
        self.rope = None
        if self.config.pos_emb == "rope":
            hs, device = self.config.head_size, self.lm_head.weight.device
            frequency = 10000.0 ** (-torch.arange(0, hs, 2, device=device) / hs)
            angle = torch.outer(torch.arange(self.config.block_size, device=device), frequency).repeat(1, 2)
            sign = torch.ones(hs, device=device).index_fill_(0, torch.arange(hs // 2, device=device), -1.0)
            self.rope = angle.cos(), angle.sin() * sign

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._make_rope()  # where the weights are now
        return self

    def forward(self, idx, targets=None, pos=None):
        """Logits for every position, and the mean cross-entropy if there are targets.

        idx      (B, T) int64 token ids
        targets  (B, T) int64 next tokens, -1 where none is wanted
        pos      absolute positions, int64, (T,) for all rows or (B, T) for each, rising by one. None: 0..T-1 and no
                 cache. Given, in eval mode: the Heads' caches are written at pos and attended over as far as each pos,
                 and whatever they held beyond pos is forgotten; no gradients. In train mode the cache is not used.
        Returns (logits (B, T, vocab_size), loss or None). Raises ValueError for a T or pos that reaches past
        block_size, and for a pos that starts past what the cache holds: there would be zeros in between.
        """
        lengths = None if pos is None else self.check_pos(idx, pos)
        cached = pos is not None and not self.training
        with torch.set_grad_enabled(torch.is_grad_enabled() and not cached):  # keys of earlier calls have no graph
            logits = self.lm_head(self.features(idx, pos, lengths))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        return logits, loss

    def check_pos(self, idx, pos):
        """The cache lengths, one for each row, that a call at `pos` leaves behind; ValueError if it cannot be made."""
        B, T = idx.shape
        if pos.dtype != torch.int64 or pos.shape not in ((T,), (B, T)):
            raise ValueError(f"pos is {pos.dtype} {tuple(pos.shape)}; expected int64 {(T,)} or {(B, T)}")
        rows = pos.expand(B, T).tolist()
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
        return [row[-1] + 1 for row in rows]

    def cached_lengths(self):
        """The list of lengths that all layers' caches share, or None if they are empty or not at the same state."""
        lengths = self.transformer["h"][0].attn.cache.lengths
        same = all(block.attn.cache.lengths is lengths for block in self.transformer["h"])
        return lengths if same and lengths else None

    def set_cached_lengths(self, lengths):
        for block in self.transformer["h"]:
            block.attn.cache.lengths = lengths

    def features(self, idx, pos=None, lengths=None, mask=None):
        """The network without its lm_head: `(B, T, C)`. As forward, but pos is trusted, and `lengths`, the cache
        lengths after this call as Python integers, comes with it, so that nothing here waits for the device. Where
        they are not known in Python, None: every slot is looked at, under a mask, in caches that are there already.
        `mask`, broadcastable to (B, nh, T, slots), is for caches that keep other slots than block_size (export.py).
        Without pos, and in train mode, no layer sees its cache: with `not self.training` alone an evaluation would
        fill it."""
        T = idx.size(1)
        cached = pos is not None and not self.training
        if pos is None:
            if not 1 <= T <= self.config.block_size:
                raise ValueError(f"{T} positions; this model takes 1 to {self.config.block_size} (block_size)")
            where = torch.arange(T, device=idx.device)
        else:
            where = pos

        x = self.transformer["wte"](idx)
        rope = None
        if self.config.pos_emb == "learned":
            x = x + self.transformer["wpe"](where)
        else:
            rope = [table[where] if where.dim() == 1 else table[where][:, None] for table in self.rope]
        if self.training:
            x = F.dropout(x, self.config.dropout)

        end = None
        if not cached:
            pos = None
        elif mask is None:
            end = self.config.block_size if lengths is None else max(lengths)
            if lengths is None or T > 1 or min(lengths) < end:  # else a lone query may look at every slot
                mask = torch.arange(end, device=idx.device) <= pos[..., None]  # (T, end) or (B, T, end)
                mask = mask if pos.dim() == 1 else mask[:, None]
        try:
            for block in self.transformer["h"]:
                x = block(x, rope, pos, mask, end)
        except BaseException:
            clear_kv_cache(self)  # some layers were written, some not
            raise
        if cached and lengths is not None:
            self.set_cached_lengths(lengths)
        return self.transformer["ln_f"](x) if self.config.norm_first else x

    def generate(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """idx `(B, T)` and its continuation, `(B, T + n)`: n = max_new_tokens, or as many as fit. See `stream`."""
        with eval_mode(self):
            new = list(self.stream(idx, max_new_tokens, kv_cache=kv_cache, **sampling))
        return torch.cat((idx, torch.stack(new, dim=1)), dim=1) if new else idx

    def stream(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Generate, yielding each step's tokens `(B,)` as they come, until max_new_tokens or a full context.

        idx       (B, T) int64 prompts, 1 <= T, and T <= block_size unless overflow is "slide"
        kv_cache  False recomputes the whole sequence for every token: the same tokens, slower
        sampling  temperature, top_k, top_p, seed, samples, overflow: see Sampling
        Raises ValueError for impossible arguments.
        """
        (B, T), sampling = idx.shape, Sampling(**sampling)
        steps = sampling.steps(T, max_new_tokens, self.config.block_size)
        return self._decode(idx, steps, kv_cache, sampling, sampling.rows(B, idx.device))

    def _decode(self, idx, steps, kv_cache, sampling, samples):
        """The loop of `stream`: prefill, then one token a step, each fed back at the next."""
        (B, T), V, block_size = idx.shape, self.config.vocab_size, self.config.block_size
        positions = torch.arange(block_size, device=idx.device)
        tokens = torch.cat((idx, idx.new_zeros(B, steps)), dim=1)
        begin = 0  # where in the text the context begins: the token there is at position 0
        lengths = None  # what this generator left in the cache
        try:
            for step, noise in enumerate(sampling.noise(samples, steps, V)):
                end = T + step
                if slide(begin, end, block_size) != begin:
                    begin, lengths = slide(begin, end, block_size), None
                with torch.inference_mode(), eval_mode(self):
                    if not kv_cache:
                        x = self.features(tokens[:, begin:end])
                    else:
                        # decode one token; prefill first, or again if somebody cleared or used the cache since
                        start = end - 1 if lengths is not None and self.cached_lengths() is lengths else begin
                        lengths = [end - begin] * B
                        x = self.features(tokens[:, start:end], positions[start - begin : end - begin], lengths)
                    logits = self.lm_head(x[:, -1])
                    tokens[:, end] = sample_token(logits, noise, *sampling.filters)
                yield tokens[:, end].clone()
        finally:
            if lengths is not None and self.cached_lengths() is lengths:
                for block in self.transformer["h"]:
                    block.attn.cache.clear()


def slide(begin, end, block_size):
    """Where the context of the tokens begin..end begins: at `begin` while it fits, else half a context back."""
    return begin if end - begin <= block_size else end - max(1, block_size // 2)


@contextmanager
def eval_mode(model):
    """Inside, the model is in eval mode; afterwards each of its modules is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()] if model.training else []
    if modes:
        model.eval()
    try:
        yield
    finally:
        if modes:
            model.train()  # empties the caches: training may change the weights
        for module, training in modes:
            module.training = training


@dataclass
class Sampling:
    """How tokens are picked, and what happens at a full context. Raises ValueError for what cannot be.

    temperature  0 is greedy: the likeliest token, ties to the lowest id
    top_k        sample among the k likeliest; top_p: among the fewest likeliest that have this much probability
    seed         0 <= seed < 2**64; None draws one from torch's global generator
    samples      row i draws the noise of sample samples[i]; None: of sample i
    overflow     "stop" ends with a full context. "slide" goes on: once a token has been sampled from a full context,
                 the newest half, max(1, block_size // 2) tokens, is kept and prefilled at positions from 0; a prompt
                 longer than the context starts from as many. So a token costs the same at any length
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    samples: Sequence[int] | None = None
    overflow: str = "stop"

    def __post_init__(self):
        def require(condition, name, why):
            if not condition:
                raise ValueError(f"{name}={getattr(self, name)!r}: {why}")

        require(0 <= self.temperature < 1e30, "temperature", "must be a number >= 0, and far below float32's largest")
        top_k_fits = self.top_k is None or (isinstance(self.top_k, int) and self.top_k >= 1)
        require(top_k_fits, "top_k", "must be an integer >= 1")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        if self.seed is None:
            self.seed = int(torch.randint(2**63 - 1, ()))
        seed_fits = isinstance(self.seed, int) and 0 <= self.seed < 2**64
        require(seed_fits, "seed", "must be an integer, at least 0 and below 2**64")
        require(self.overflow in ("stop", "slide"), "overflow", "must be 'stop' or 'slide'")

    @property
    def filters(self):
        return self.temperature, self.top_k, self.top_p

    def rows(self, B, device):
        """samples as a tensor (B,)."""
        samples = range(B) if self.samples is None else self.samples
        samples = torch.as_tensor(samples, dtype=torch.int64, device=device)
        if B < 1 or samples.shape != (B,):
            raise ValueError(f"samples has shape {tuple(samples.shape)}; {B} prompts need {(B,)}, and at least one")
        return samples

    def noise(self, samples, steps, vocab_size):
        """Yield the noise `(B, vocab_size)` of one step after the other, made for a few megabytes of them at a time."""
        some = max(1, min(64, 2**22 // (len(samples) * vocab_size)))
        for step in range(0, steps, some):
            places = torch.arange(step, min(step + some, steps), device=samples.device)
            yield from gumbel_noise(self.seed, samples, places, vocab_size).unbind(1)

    def steps(self, T, max_new_tokens, block_size):
        """How many tokens a prompt of T tokens gets."""
        if T < 1 or (self.overflow == "stop" and T > block_size):
            raise ValueError(f"a prompt of {T} tokens; this model takes 1 to {block_size} (block_size)")
        return max(0, max_new_tokens if self.overflow == "slide" else min(max_new_tokens, block_size - T))


def sample_token(logits, noise, temperature=1.0, top_k=None, top_p=None):
    """Pick tokens: `(...,)` int64 from logits and Gumbel noise, `(..., V)` both.

    argmax(logits / temperature + noise) is a draw from softmax(logits / temperature), the Gumbel-max trick, and the
    same pick as torch.multinomial's argmax(probabilities / Exp(1) noise), noise being -log of that. Multiplied through
    by the temperature it needs no division, and at 0 it is greedy. Filters keep exactly top_k, ties to the lowest id,
    then the likeliest of these up to and with the one that crosses top_p. They and the temperature may be tensors.
    """
    logits = logits.float()
    score = logits + temperature * noise
    if top_k is None and top_p is None:
        return score.argmax(-1)
    ranked, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    score = score.gather(-1, ids)
    if top_k is not None:
        beyond = torch.arange(ids.size(-1), device=ids.device) >= top_k
        ranked, score = ranked.masked_fill(beyond, -math.inf), score.masked_fill(beyond, -math.inf)
    if top_p is not None:
        cold = torch.as_tensor(temperature, device=ids.device).clamp(min=1e-30)  # at 0 the likeliest has it all
        probs = torch.softmax((ranked - ranked[..., :1]) / cold, dim=-1)
        rank0 = torch.arange(ids.size(-1), device=ids.device) == 0  # stays whatever top_p
        score = score.masked_fill((probs.cumsum(-1) - probs >= top_p) & ~rank0, -math.inf)
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)


def gumbel_noise(seed, samples, steps, vocab_size):
    """Standard Gumbel noise, -log of Exp(1) noise, as a pure function of (seed, sample, step, token id).

    samples (B,), steps (S,) for all or (B, S) for each, int64 -> (B, S, vocab_size) float32, always finite; seed an
    integer, or a pair of tensors, its low and its high 32 bits. Counters, not a generator with a state: whoever asks
    for the noise of a token gets the same, in whatever order, batch or program it is asked for.
    The hash is the 32-bit finalizer "lowbias32" by Chris Wellons, applied to one counter after the other.
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
    # 32 bits keep their resolution near 0, where the winners of a race of exponentials are; 1.0 must not be reached
    uniform = ((h.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


class Linear(nn.Linear):
    """nn.Linear, except that generating on a CPU multiplies a few rows by a large matrix from the other side.

    x W^T on one core, or W x^T, of two columns at least, on all of them, is a matter of which library call torch takes.
    At 6/6/384/256 on two cores a step is half again as fast.
    """

    def forward(self, x):
        large = self.in_features * self.out_features >= 2**17  # smaller ones are done before another core has woken up
        few = large and x.numel() <= 8 * self.in_features
        if few and torch.is_inference_mode_enabled() and x.dtype == torch.float32 and x.device.type == "cpu":
            rows = x.reshape(-1, self.in_features)
            y = self.weight @ (rows if len(rows) > 1 else rows.repeat(2, 1)).t()
            y = y[:, : len(rows)].t().reshape(*x.shape[:-1], -1)
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)
