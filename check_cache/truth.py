"""The right logits, without a cache, and how far rounding moves them."""

from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn

from check_cache.cause import flat, listen

# How far off a right cache may be, in units of what rounding alone does to logits: the largest error, and the mean. The
# right caches of 44 families reached 1.5 and 1.05 in three dtypes. Most bugs are a thousand times as far off.
LARGEST, MEAN = 3, 1.25


@contextmanager
def changed(modules, change):
    """Lend weights, each replaced by change(tensor)."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    kept = {tensor: tensor.data for tensor in tensors if tensor.is_floating_point()}
    try:
        for tensor in kept:
            tensor.data = change(tensor)
        yield
    finally:
        for tensor, data in kept.items():
            tensor.data = data


def revealing(tensor, dtype, draw):
    """Return weights in which no bug can hide.

    A norm with weights of exactly 1 may be applied twice, and a bias of 0 forgotten, so we jitter what has one
    dimension. The matrices of an untrained model are so small that attention sees all positions alike, so we scale
    them up.
    """
    data = tensor.data
    if isinstance(tensor, nn.Parameter) and data.dim() < 2:
        data = data + 0.1 * normal(data, draw)
    elif isinstance(tensor, nn.Parameter):
        data = data * max(1.0, 1 / (data.size(-1) ** 0.5 * data.float().std().item() + 1e-6))
    return data.to(dtype)


def normal(tensor, draw):
    """Return random numbers for a tensor, the same on every device."""
    return torch.randn(tensor.shape, generator=draw, device="cpu").to(tensor)


class Truth:
    """Texts, their logits without a cache, and what rounding does to these.

    Most ways feed texts 0 to 2. Texts 3 to 5 begin like them and differ from the middle on, and two more make a batch
    of eight. Some tokens have the padding id, because a cache must not take them for padding.
    """

    def __init__(self, decoder, modules, length, dtype, seed):
        self.decoder, self.modules, self.length, self.eps = decoder, modules, length, torch.finfo(dtype).eps
        self.pad, self.window = getattr(decoder, "pad", 0), getattr(decoder, "window", None)
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(decoder.vocab_size, (8, length), generator=draw, device="cpu")
        ids[torch.rand(ids.shape, generator=draw, device="cpu") < 0.05] = self.pad
        ids[3:6, : length // 2] = ids[:3, : length // 2]
        self.ids = torch.tensor(ids.tolist())  # on the device

        try:
            self.set_right_logits(torch.float64)
        except RuntimeError:  # some models cannot run in it
            self.set_right_logits(dtype)

        # Rounding moves logits if the batch has another shape, or if the last digits of some weights are others.
        plain = decoder.full(self.ids)
        self.argmax = plain.argmax(-1)
        least = self.logits.std() * self.eps * (1 if modules else 64)  # a guess for weights that we cannot change
        self.rounding = self.error(plain).clamp(min=least)
        for rows, end in ((slice(3), length), (slice(1, 2), length), (slice(3), 2 * length // 3)):
            error = self.error(decoder.full(self.ids[rows, :end]), rows, slice(end))
            self.rounding[rows, :end] = self.rounding[rows, :end].maximum(error)
        for _ in range(3):
            with changed(modules, lambda tensor: tensor.data * (1 + self.eps / 8 * normal(tensor, draw))):
                self.rounding = self.rounding.maximum(self.error(decoder.full(self.ids)))
        self.limit = LARGEST * self.rounding.max()

    def set_right_logits(self, exact):
        self.exact = exact
        with self.exactly():
            self.logits = self.decoder.full(self.ids).double()
            self.fault = self.find_fault()

    def exactly(self):
        return changed(self.modules, lambda tensor: tensor.data.to(self.exact))

    def error(self, logits, rows=slice(None), positions=slice(None)):
        """Return the error of the worst logit at each position. NaN counts as infinite."""
        return (logits.double() - self.logits[rows, positions]).abs().amax(-1).nan_to_num(torch.inf, torch.inf)

    def find_fault(self):
        """Return why no cache can give these logits, or None: they must not depend on later tokens or other rows."""
        if not self.logits.isfinite().all():
            return "logits without a cache are not finite"
        half = self.length // 2
        fewer = {"later tokens": self.ids[:, :half], "other rows": self.ids[:1]}
        tolerance = self.logits.std() * (1e-4 if self.modules and self.exact == torch.float64 else 300 * self.eps)
        for what, ids in fewer.items():
            off = self.error(self.decoder.full(ids)[:, :half], slice(len(ids)), slice(half)).amax(0)
            if (off > tolerance).any():
                first = (off > tolerance).int().argmax()
                change = f"change by {off.max():.2g} when {what} are left out, from position {first} on"
                return f"logits without a cache {change}"

    @cached_property
    def updates(self):
        """What a right cache gets in each update of a forward: (layer, keys (8, L, size), values (8, L, size)).

        They come from a forward whose cache keeps nothing and gives back what it gets. [] if that is wrong already.
        """
        with self.exactly():
            cache = self.decoder.new("own", self.length)
            calls = listen(cache, [], keeps=False)
            output = self.decoder.step(self.ids, cache, None, torch.arange(self.length).expand_as(self.ids))
            logits = output[0] if isinstance(output, tuple) else output
        right = (self.error(logits) <= self.limit).all()
        return [(layer, *flat(new)) for layer, new, _ in calls] if right else []

    def differ(self, x, right):
        """Whether keys or values (..., size) differ from the right ones by more than rounding."""
        return (x - right).abs().amax(-1) > self.eps**0.6 * right.abs().max()
