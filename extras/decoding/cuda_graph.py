"""The CUDA graph: --compile on a GPU.

A step of a small model is a hundred operations, and Python takes longer to launch one than the GPU to compute it. A
CUDA graph records them once and launches them all with one call. It repeats what it recorded, in the same memory and
with the same shapes. So whatever changes from step to step is a tensor on the GPU: the token, its position and the
noise. Attention reads every slot of the cache, and a mask hides the empty ones.

In a graph, the number of operations is what a small step costs. So this is the network of model.py with fewer of them.
"""

import copy
import math
from contextlib import contextmanager
from dataclasses import replace

import torch

from extras.decoding.c_guard import refuse_other_networks
from model import KVCache, rotate, sample_token, visible

TOKENS_AT_ONCE = 32  # we read so many tokens together, because the GPU pauses when we wait for it


class GraphedGPT:
    """A GPT whose step, sampling included, is one CUDA graph: one generation at a time, with batch_size rows.

    slots     of the cache
    sampling  a Sampling, whose settings but for the seed are recorded
    On another device than CUDA there is no graph, and every step is launched as usual. Make a new one after you change
    the model. Raises CompileError if its network is not that of model.py.
    """

    @torch.inference_mode()
    def __init__(self, model, batch_size, slots, sampling):
        refuse_other_networks(model)
        self.model = model
        self.sampling = sampling
        config = model.config
        weight = model.lm_head.weight
        shape = (config.n_layer, 2, batch_size, config.n_kv_head, slots, config.head_size)
        self.kv = weight.new_zeros(shape)  # of all layers in one tensor, so that one operation writes key and value
        self.cache = KVCache(config, batch_size, slots)  # the same memory, for the prefill
        self.cache.key, self.cache.value = list(self.kv[:, 0]), list(self.kv[:, 1])
        positions = torch.arange(slots, device=weight.device)
        self.masks = weight.new_zeros(slots, slots).masked_fill_(~visible(positions, slots), -math.inf)
        self.turns = turns(model, slots)
        self.norm, self.gains, self.shifts = norms_of_heads(model)

        # what a step reads and writes
        self.newest = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        self.pos = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.noise = torch.zeros(batch_size, config.vocab_size, device=weight.device)
        self.replay = self.step
        if weight.is_cuda:
            with matrix_library(batch_size):
                self.step()  # loads what cannot be loaded while recording
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.step()
            self.replay = graph.replay

    def step(self):
        """Replace the newest token of every row by the one after it."""
        self.newest.copy_(sample_token(self.logits(), self.noise, self.sampling))
        self.pos.add_(1)

    def logits(self):
        """Return the logits `(B, V)` after the newest tokens, as GPT.next_logits does."""
        model = self.model
        x = model.transformer["wte"](self.newest)  # (B, C)
        if model.config.pos_emb == "learned":
            x = x + model.transformer["wpe"](self.pos)
        mask = self.masks.index_select(0, self.pos)  # (1, slots)
        turns = shifts = [None] * model.config.n_layer
        if self.turns is not None:
            turn = self.turns.index_select(0, self.pos)  # (1, hs, hs)
            turns = self.gains * turn  # (n_layer, nh + nkv, hs, hs): the norm's weight, then the rotation
            if self.shifts is not None:
                shifts = self.shifts @ turn
        for block, kv, turn, shift in zip(model.transformer["h"], self.kv, turns, shifts):
            if block.norm_first:
                x = self.attend(block.attn, x, block.ln_1(x), kv, mask, turn, shift)
                x = feed_forward(block.mlp, x, block.ln_2(x))
            else:
                x = block.ln_1(self.attend(block.attn, x, x, kv, mask, turn, shift))
                x = block.ln_2(feed_forward(block.mlp, x, x))
        return model.unembed(model.transformer["ln_f"](x) if model.config.norm_first else x)

    def attend(self, attn, residual, x, kv, mask, turn, shift):
        """Return residual + attn(x), `(B, C)`, and write to kv `(2, B, nkv, slots, hs)`, the cache of this layer."""
        B = len(x)
        nh, nkv, hs = attn.n_head, attn.n_kv_head, attn.head_size
        qkv = attn.c_attn(x).view(B, nh + 2 * nkv, hs)
        if turn is not None:
            qk = qkv[:, : nh + nkv]
            turned = self.norm(qk) if attn.qk_norm else qk.clone()
            turn_heads(turned.transpose(0, 1), turn, shift, out=qk.transpose(0, 1))
        new = qkv[:, nh:].view(B, 2, nkv, 1, hs).transpose(0, 1)
        kv.index_copy_(3, self.pos, new)
        k, v = kv.flatten(1, 2)  # (B * nkv, slots, hs)
        q = qkv[:, :nh].reshape(B * nkv, nh // nkv, hs)
        weights = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=hs**-0.5).softmax(-1)
        return add(residual, attn.c_proj, (weights @ v).view(B, -1))

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, seed=None):
        """Yield the new tokens of prompts idx `(B, T)`, `(B, n)` at a time on the CPU: the tokens of `generate`.

        seed  None: that of the Sampling
        Raises ValueError for a prompt that does not fit the context.
        """
        B, T = idx.shape
        config = self.model.config
        sampling = self.sampling if seed is None else replace(self.sampling, seed=seed)
        num_new = sampling.num_new_tokens(T, max_new_tokens, config.block_size)
        text = torch.cat((idx, idx.new_zeros(B, num_new)), dim=1)
        start = 0  # of the context
        read = T  # the tokens before this one were read
        for end, noise in enumerate(sampling.noise(B, num_new, config.vocab_size, idx.device), T):
            full = end - start > config.block_size
            if full:  # slide, as generate does
                start = end - max(1, config.block_size // 2)
            if full or end == T:  # prefill all but the newest token, which the step feeds
                self.cache.length = 0
                if end - start > 1:
                    self.model.next_logits(text[:, start : end - 1], 0, self.cache)
                self.newest.copy_(text[:, end - 1])
                self.pos.fill_(end - 1 - start)
            self.noise.copy_(noise)
            self.replay()
            text[:, end] = self.newest
            if end == T or end + 1 - read == TOKENS_AT_ONCE or end + 1 == T + num_new:
                yield text[:, read : end + 1].cpu()
                read = end + 1


@contextmanager
def matrix_library(rows):
    """Choose the library for the matrix products of a step.

    For 8 or 16 rows of width 128, cuBLAS picks kernels that take 16 times as long as those of cuBLASLt, and for 32 rows
    cuBLAS is faster (H100, torch 2.11). PyTorch says once on stderr that this choice is experimental.
    """
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt" if 1 < rows <= 16 else before)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def turns(model, slots):
    """Return the rotation of each position as a matrix, `(slots, hs, hs)`, so that a single product applies it.

    None: queries and keys stay as they are.
    """
    config = model.config
    one = torch.eye(config.head_size, device=model.lm_head.weight.device)[:, None].expand(-1, slots, -1)
    if config.pos_emb == "rope":
        one = rotate(one[None], *model.rope[:, None, :slots])[0]
    elif not config.qk_norm:
        return None
    return one.transpose(0, 1).to(model.lm_head.weight.dtype).contiguous()


def norms_of_heads(model):
    """Return what q_norm and k_norm share, a norm without weights, and what they do not, of all layers.

    That is weights `(n_layer, nh + nkv, hs, 1)`, and biases `(n_layer, nh + nkv, 1, hs)` or None.
    """
    config = model.config
    attns = [block.attn for block in model.transformer["h"]]
    heads = config.n_head + config.n_kv_head
    if not config.qk_norm:
        return None, model.lm_head.weight.new_ones(config.n_layer, heads, config.head_size, 1), None

    def stacked(name):
        norms = [norm for attn in attns for norm in [attn.q_norm] * config.n_head + [attn.k_norm] * config.n_kv_head]
        return torch.stack([getattr(norm, name) for norm in norms]).view(config.n_layer, heads, -1)

    norm = copy.deepcopy(attns[0].q_norm)
    has_bias = getattr(norm, "bias", None) is not None
    norm.weight = norm.bias = None
    return norm, stacked("weight")[..., None], stacked("bias")[..., None, :] if has_bias else None


def turn_heads(x, turn, shift, out):
    """Write x `(heads, B, hs)` times turn `(heads, hs, hs)` plus shift `(heads, 1, hs)`, or None, to `out`."""
    if shift is None:
        torch.bmm(x, turn, out=out)
    else:
        torch.baddbmm(shift, x, turn, out=out)


def feed_forward(mlp, residual, x):
    """Return residual + mlp(x), `(B, C)`."""
    x = mlp.c_fc(x)
    if mlp.gated:
        gate, x = x.chunk(2, dim=-1)
        x = mlp.activation(gate) * x
    else:
        x = mlp.activation(x)
    return add(residual, mlp.c_proj, x)


def add(residual, linear, x):
    """Return residual + linear(x). Without a bias that is one operation, in place."""
    return residual + linear(x) if linear.bias is not None else residual.addmm_(x, linear.weight.t())
