"""torch.compile for the decode step, where the C backend cannot go: on a GPU, in bfloat16, without a C compiler.

torch.compile needs shapes that stay the same, but a KV cache grows. So this cache always reads all its slots, and a
mask hides the empty ones. On a GPU the step becomes a CUDA graph, which saves launching each operation: nearly all of
the time of a small model.
"""

import warnings

import torch

from model import KVCache, visible


class StaticCache(KVCache):
    """A KVCache that always reads all its slots, so that no shape depends on its length."""

    def update(self, layer, pos, k, v):
        if layer < len(self.key):
            self.write(self.key[layer], pos, k)
            self.write(self.value[layer], pos, v)
        else:
            super().update(layer, pos, k, v)
            for slots in (self.key[layer], self.value[layer]):
                torch._dynamo.mark_static_address(slots)  # so that a CUDA graph may write to it
        return self.key[layer], self.value[layer]

    def mask(self, pos):
        return visible(pos, self.slots)


class CompiledGPT:
    """A GPT whose decode step is compiled, for `generate`: one generation at a time, with batch_size rows.

    Raises RuntimeError if there is no working compiler.
    """

    def __init__(self, model, batch_size):
        self.model = model
        self.config = model.config
        self.cache = StaticCache(model.config, batch_size)
        device = model.lm_head.weight.device
        self.step = torch.compile(self.forward, mode="reduce-overhead" if device.type == "cuda" else "default")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="TensorFloat32")  # it would change tokens
                for _ in range(3):  # allocate the cache, compile the step, record the CUDA graph
                    self.cache.length = 0
                    self.next_logits(torch.zeros(batch_size, 1, dtype=torch.int64, device=device), 0, self.cache)
        except Exception as error:  # a missing compiler raises many kinds of errors
            raise RuntimeError(f"torch.compile does not work here ({type(error).__name__})") from error

    def forward(self, idx, pos, cache):
        return self.model.unembed(self.model.hidden_states(idx, pos, cache)[:, -1])

    def new_cache(self, batch_size, slots):
        """Empty the cache and return it. It is the same one each time, because the graph writes to its memory."""
        self.cache.length = 0
        return self.cache

    @torch.inference_mode()
    def next_logits(self, idx, start, cache):
        B, T = idx.shape
        pos = torch.arange(start, start + T, device=idx.device)
        step = self.step if T == 1 and cache.key else self.forward  # the first forward allocates the cache
        idx = idx.clone(memory_format=torch.contiguous_format)  # other strides would compile the step again
        with cache.extend(start, B, T):
            return step(idx, pos, cache).clone()
