"""The CUDA graph: --compile on a GPU.

A step of a small model is a hundred operations, and Python takes longer to launch one than the GPU to compute it. A
CUDA graph records them once and launches them all with one call. It repeats what it recorded, in the same memory and
with the same shapes. So whatever changes from step to step is a tensor on the GPU: the token, its position and the
noise. Attention reads every slot of the cache, and a mask hides the empty ones.

In a graph, the number of operations is what a small step costs. So this is the network of model.py with fewer of them:
one writes keys and values, one applies the norm's weight and the rotation, one multiplies a matrix and adds to the
residual stream, and the mask of every position is made in advance.
"""

import copy
import math
from contextlib import contextmanager
from dataclasses import replace

import torch

from extras.decode.c_library import CompileError
from extras.decode.guard import refuse_other_networks
from model import NOT_FINITE, TRAIN_MODE, rotate, sample_token, slide

TOKENS_AT_ONCE = 32  # that we read together, because the GPU pauses while we wait for it


class GraphedGPT:
    """A GPT whose step, sampling included, is one CUDA graph: one generation at a time, with batch_size rows.

    slots     of the cache
    sampling  a Sampling, whose settings are recorded, except the seed
    On any other device there is no graph, and every step is launched as usual. Make a new one after you change or move
    the model: the graph reads its weights where they were, and has copies of those of q_norm and k_norm. Raises
    CompileError if the network is not that of model.py.
    """

    @torch.inference_mode()
    def __init__(self, model, batch_size, slots, sampling):
        refuse_other_networks(model, graph=True)
        self.model = model
        self.sampling = sampling
        config = model.config
        weight = model.lm_head.weight
        if weight.is_cuda and weight.get_device() != torch.cuda.current_device():
            why = f"a CUDA graph needs PyTorch's current GPU, not {weight.device}: choose it with CUDA_VISIBLE_DEVICES"
            raise CompileError(why)
        self.cache = model.new_cache(batch_size, slots)
        # all keys and values in one tensor, so that one operation writes those of a layer
        shape = (config.n_layer, 2, batch_size, config.n_kv_head, self.cache.slots, config.head_size)
        self.kv = weight.new_zeros(shape)
        self.cache.key = list(self.kv[:, 0])
        self.cache.value = list(self.kv[:, 1])
        (visible,) = self.cache.mask(torch.arange(self.cache.slots, device=weight.device)[None])
        self.masks = torch.zeros_like(visible, dtype=weight.dtype).masked_fill_(~visible, -math.inf)
        self.rotations = rotation_matrices(model, self.cache.slots)
        self.norm, self.norm_weights, self.norm_biases = norms_of_heads(model)

        # what a step reads and writes
        self.newest = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        self.pos = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.noise = torch.zeros(batch_size, config.vocab_size, device=weight.device)
        self.finite = torch.zeros((), device=weight.device)  # NaN once a logit was infinite or NaN
        self.stream_number = 0  # of the stream that was started last
        self.replay = self.step
        if weight.is_cuda:
            with matrix_library(batch_size):
                self.step()  # CUDA loads kernels when they are first used, which it cannot do while recording
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.step()
            self.replay = graph.replay

    def step(self):
        """Replace the newest token of every row by the one after it."""
        logits = self.logits()
        self.finite.add_(logits.float().sum() * 0)
        self.newest.copy_(sample_token(logits, self.noise, self.sampling))
        self.pos.add_(1)

    def logits(self):
        """Feed the newest tokens, write their keys and values, and return the logits `(B, V)` after them."""
        model = self.model
        x = model.transformer["wte"](self.newest)  # (B, C)
        if model.config.pos_emb == "learned":
            x = x + model.transformer["wpe"](self.pos)
        mask = self.masks.index_select(0, self.pos)  # (1, slots)
        # The norm of a head multiplies by its weight and adds its bias, and then rope rotates. All that is a matrix and
        # a bias per layer and head, (hs, hs) and (1, hs).
        matrices = biases = [None] * model.config.n_layer
        if self.rotations is not None:
            rotation = self.rotations.index_select(0, self.pos)  # (1, hs, hs)
            matrices = self.norm_weights * rotation
            if self.norm_biases is not None:
                biases = self.norm_biases @ rotation
        for block, kv, matrix, bias in zip(model.transformer["h"], self.kv, matrices, biases):
            if block.norm_first:
                x = self.attend(block.attn, x, block.ln_1(x), kv, mask, matrix, bias)
                x = feed_forward(block.mlp, x, block.ln_2(x))
            else:
                x = block.ln_1(self.attend(block.attn, x, x, kv, mask, matrix, bias))
                x = block.ln_2(feed_forward(block.mlp, x, x))
        return model.lm_head(model.transformer["ln_f"](x) if model.config.norm_first else x)

    def attend(self, attn, residual, x, kv, mask, matrix, bias):
        """Return residual + attn(x), `(B, C)`, and write to kv `(2, B, nkv, slots, hs)`, the cache of this layer."""
        B = len(x)
        nh, nkv, hs = attn.n_head, attn.n_kv_head, attn.head_size
        qkv = attn.c_attn(x).view(B, nh + 2 * nkv, hs)
        if matrix is not None:
            qk = qkv[:, : nh + nkv]
            normed = self.norm(qk) if attn.qk_norm else qk.clone()
            heads, out = normed.transpose(0, 1), qk.transpose(0, 1)  # (nh + nkv, B, hs)
            if bias is None:
                torch.bmm(heads, matrix, out=out)
            else:
                torch.baddbmm(bias, heads, matrix, out=out)
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
        Raises ValueError for a prompt that does not fit the context, and when the slots are full, FloatingPointError
        for logits that are infinite or NaN, and RuntimeError in train mode, or if a later stream has taken the cache.
        """
        B, T = idx.shape
        config = self.model.config
        sampling = self.sampling if seed is None else replace(self.sampling, seed=seed)
        num_new = sampling.num_new_tokens(T, max_new_tokens, config.block_size)
        self.stream_number += 1
        number = self.stream_number
        self.model.kv_cache = self.cache
        self.finite.zero_()
        text = torch.cat((idx, idx.new_zeros(B, num_new)), dim=1)
        start = 0  # of the context
        read = T  # where the tokens begin that nobody has read yet
        for end, noise in enumerate(sampling.noise(B, num_new, config.vocab_size, idx.device), T):
            if self.model.training:
                raise RuntimeError(TRAIN_MODE)
            if number != self.stream_number:
                raise RuntimeError("this CUDA graph has one cache, and a later stream has taken it")
            full = end - start > config.block_size
            start = end - slide(text[:, start:end], config.block_size).size(1)
            if full or end == T:  # prefill all but the newest token, which the step feeds
                self.kv.zero_()  # because 0 times a NaN of the text before would be NaN
                self.cache.length = 0
                if end - start > 1:
                    self.model(text[:, start : end - 1], cache=self.cache, last=True)
                self.newest.copy_(text[:, end - 1])
                self.pos.fill_(end - 1 - start)
            if self.cache.length == self.cache.slots:  # the graph would write past the end
                raise ValueError(f"a cache of {self.cache.slots} slots is full")
            self.noise.copy_(noise)
            self.replay()
            self.cache.length += 1
            text[:, end] = self.newest
            if end == T or end + 1 - read == TOKENS_AT_ONCE or end + 1 == T + num_new:
                tokens = text[:, read : end + 1].cpu()
                if not self.finite.isfinite():
                    raise FloatingPointError(NOT_FINITE)
                yield tokens
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


def rotation_matrices(model, slots):
    """Return rope at each position as a matrix, `(slots, hs, hs)`, or None if queries and keys stay as they are."""
    config = model.config
    weight = model.lm_head.weight
    rows = torch.eye(config.head_size, device=weight.device)[:, None].expand(-1, slots, -1)
    if config.pos_emb == "rope":
        rows = rotate(rows[None], *model.rope.to(weight.device)[:, None, :slots])[0]
    elif not config.qk_norm:
        return None
    return rows.transpose(0, 1).to(weight.dtype).contiguous()


def norms_of_heads(model):
    """Return a norm without weight and bias, and the weights and biases of q_norm and k_norm for all heads.

    Weights are `(n_layer, nh + nkv, hs, 1)`, and biases `(n_layer, nh + nkv, 1, hs)` or None. Without qk_norm, there is
    no norm, and the weights are ones.
    """
    config = model.config
    heads = config.n_head + config.n_kv_head
    if not config.qk_norm:
        return None, model.lm_head.weight.new_ones(config.n_layer, heads, config.head_size, 1), None
    attns = [block.attn for block in model.transformer["h"]]
    norms = [norm for attn in attns for norm in [attn.q_norm] * config.n_head + [attn.k_norm] * config.n_kv_head]
    weights = torch.stack([norm.weight for norm in norms]).view(config.n_layer, heads, -1, 1)
    biases = [getattr(norm, "bias", None) for norm in norms]
    if all(bias is None for bias in biases):
        biases = None
    else:
        zeros = torch.zeros_like(norms[0].weight)
        biases = torch.stack([zeros if bias is None else bias for bias in biases]).view(config.n_layer, heads, 1, -1)
    norm = copy.deepcopy(norms[0])  # of the same kind, with the same eps
    norm.weight = norm.bias = None
    return norm, weights, biases


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
