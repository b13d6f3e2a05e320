"""The decode step as a CUDA graph: --compile on a GPU.

A step of a small model is a hundred operations, and Python takes longer to launch one than the GPU to compute it. A
CUDA graph records them once and launches them all with one call. It repeats what it recorded, in the same memory and
with the same shapes. So whatever changes from step to step is a tensor on the GPU: the token, its position, where its
noise is. Attention reads every slot of the cache, and a mask hides the empty ones.
"""

import math

import torch

from model import KVCache, gumbel_noise, sample_token
from sample import num_slots

STEPS_AT_ONCE = 8  # we read the tokens of so many steps together, because the GPU pauses when we wait for it


class StaticCache(KVCache):
    """A KVCache whose decode step reads all slots, so that no shape depends on its length."""

    def update(self, layer, pos, k, v):
        filled = super().update(layer, pos, k, v)
        return filled if self.length == 0 else (self.key[layer], self.value[layer])

    def mask(self, pos):
        if self.length == 0:  # a prefill
            return super().mask(pos)
        hidden = torch.arange(self.slots, device=pos.device) > pos[:, None]
        dtype = self.key[0].dtype  # with a bool mask, every layer would make a mask of this dtype
        return torch.zeros(1, self.slots, device=pos.device, dtype=dtype).masked_fill(hidden, -math.inf)


@torch.inference_mode()
def graph_blocks(model, idx, max_new_tokens, sampling):
    """Yield the new tokens of prompts idx `(B, T)`, `(B, n)` on the CPU: those of `generate`.

    On another device than CUDA there is no graph, and every step is launched as usual. Raises what `generate` raises.
    """
    B, T = idx.shape
    device = idx.device
    config = model.config
    half = max(1, config.block_size // 2)
    num_new = sampling.num_new_tokens(T, max_new_tokens, config.block_size)
    cache = StaticCache(config, B, num_slots(T, num_new, config.block_size))
    at_once = max(1, min(64, 2**22 // (B * config.vocab_size)))  # steps of noise
    samples = sampling.samples_of(B, device)
    noise = torch.empty(at_once, B, config.vocab_size, device=device)
    text = torch.cat((idx, idx.new_zeros(B, num_new)), dim=1)
    newest = idx[:, -1:].clone()
    at = torch.zeros(3, 1, dtype=torch.int64, device=device)  # of the newest token: its position, its place in the
    pos, place, step = at  # text, and the row of `noise` for the token after it

    def append(logits):
        """Sample the next token of every row, and move on to it."""
        newest.copy_(sample_token(logits, noise.index_select(0, step)[0], sampling)[:, None])
        at.add_(1)
        text.index_copy_(1, place, newest)

    def decode():
        append(model.unembed(model.hidden_states(newest, pos, cache)[:, -1]))

    replay = None
    end = T  # the number of tokens so far
    held = 0  # the number of tokens in the cache; 0: it starts again
    read = T  # the tokens before this one were read
    for i in range(num_new):
        if i % at_once == 0:
            steps = torch.arange(i, min(i + at_once, num_new), device=device)
            noise[: len(steps)] = gumbel_noise(sampling.seed, samples, steps, config.vocab_size).transpose(0, 1)
            step.zero_()
        if held == cache.slots:  # the context is full: slide
            held = 0
        if held == 0:  # prefill
            context = text[:, :end] if end <= config.block_size else text[:, end - half : end]
            held = context.size(1)
            cache.length = 0
            logits = model.next_logits(context, 0, cache)
            pos.fill_(held - 1)
            place.fill_(end - 1)
            append(logits)
        else:
            held += 1
            if replay is None:  # the first step loads what the graph must find loaded
                decode()
                replay = record(decode) if device.type == "cuda" else decode
            else:
                replay()
        end += 1
        if i == 0 or end - read == STEPS_AT_ONCE or i == num_new - 1:
            yield text[:, read:end].cpu()
            read = end


def record(function):
    """Return what calls a function of no arguments as a CUDA graph. It records the function without running it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
