"""The logits of reference, without a cache, and how far rounding moves them."""

from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn

from check_cache.adapters import ROWS
from check_cache.attention import Watch, shaped

# How far off a correct cache may be, in units of what rounding alone does to logits: the largest error, and the median.
# The families of transformers that are correct reached 1.9 and 1.0, in three dtypes.
LARGEST, MEDIAN = 4, 1.25
# How much earlier tokens must matter, in units of typical rounding. Below that we would not see a wrong cache.
VISIBLE = 10
PADS = (0, 3, 5)  # padding tokens of each row, fewer than a third of the shortest length


@contextmanager
def changed(modules, change):
    """Replace each weight by change(tensor) for a while. Weights in 8 bits stay, because their layers need them so.

    We restore attributes and buffers too: a forward may write them, or keep a table in the dtype of the moment.
    """
    parts = {part for module in modules for part in module.modules()}
    held = [(content, dict(content)) for part in parts for content in (vars(part), part._buffers)]
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    buffers = {buffer: buffer.clone() for module in modules for buffer in module.buffers()}
    kept = {tensor: tensor.data for tensor in (*parameters, *buffers)}
    try:
        for tensor in kept:
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.data = change(tensor)
        yield
    finally:
        for tensor, data in kept.items():
            tensor.data = data
        for buffer, content in buffers.items():
            buffer.data.copy_(content)
        for content, before in held:
            content.clear()
            content.update(before)


def revealing(tensor, dtype, draw):
    """Return weights in which no bug can hide.

    A norm whose weights are 1 could be applied twice, so we jitter vectors. Matrices of an untrained model are so small
    that attention treats all positions alike, so we scale them up. Zeros would hide what comes before, so we fill them.
    """
    data = tensor.data
    if not isinstance(tensor, nn.Parameter):
        return data.to(dtype)
    if data.dim() < 2:
        return (data + 0.1 * normal(data, draw)).to(dtype)
    deviation = 1 / data.size(-1) ** 0.5
    if not data.any():
        return (deviation * normal(data, draw)).to(dtype)
    return (data * max(1.0, deviation / (data.float().std().item() + 1e-6))).to(dtype)


def normal(tensor, draw):
    """Return random numbers for a tensor, the same on every device."""
    return torch.randn(tensor.shape, generator=draw, device="cpu").to(tensor)


class Reference:
    """Random sequences, their logits without a cache, and how far rounding moves these logits.

    Most scenarios feed rows 0 to 2. Rows 3 to 5 start like them and differ from the end of the first third on. Some
    tokens have the padding id, because a cache must not mistake them for padding.
    """

    def __init__(self, decoder, length, dtype, seed, atol, rtol):
        self.decoder, self.modules, self.length, self.eps = decoder, decoder.modules, length, torch.finfo(dtype).eps
        self.coarse = self.eps**0.6  # how much keys, values and weights may differ, relative to the largest
        self.rtol = 0.0
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(decoder.vocab_size, (ROWS, length), generator=draw, device="cpu")
        ids[torch.rand(ids.shape, generator=draw, device="cpu") < 0.05] = decoder.pad
        fork = length // 3 | 1  # odd, so that it is within a page of a paged cache
        ids[3:6, :fork] = ids[:3, :fork]
        self.ids = torch.tensor(ids.tolist())  # on the device

        # the logits of reference, in float64 if the decoder can run in it
        self.exact = torch.float64
        try:
            self.set_logits()
        except Exception:
            self.exact = dtype
            self.set_logits()

        # Rounding moves logits when the batch has a different shape, or when the last digits of some weights change.
        plain = self.full()
        self.argmax = plain.argmax(-1)
        least = self.logits.std() * self.eps * (1 if self.modules else 64)  # an estimate, if we cannot change weights
        self.rounding = self.error(plain).clamp(min=least)
        for rows, end in ((slice(3), length), (slice(1, 2), length), (slice(3), 2 * length // 3)):
            error = self.error(self.full(rows, end), rows, slice(end))
            self.rounding[rows, :end] = self.rounding[rows, :end].maximum(error)
        for _ in range(3):
            with changed(self.modules, lambda tensor: tensor.data * (1 + self.eps / 8 * normal(tensor, draw))):
                self.rounding = self.rounding.maximum(self.error(self.full()))
        self.limit, self.suspicious = LARGEST * self.rounding.max(), LARGEST * self.rounding.median()
        self.fault = self.fault or self.find_blindness()
        if atol or rtol:  # a cache that rounds on purpose
            self.rtol, self.coarse, atol = rtol or 0.0, 0.3, atol or 0.0
            self.rounding = self.rounding.clamp(min=atol)
            self.limit, self.suspicious = self.limit.clamp(min=atol), self.suspicious.clamp(min=atol)

    def full(self, rows=slice(None), end=None, ids=None):
        """Return logits without a cache, of some rows up to `end`. A decoder may overwrite the ids that it gets."""
        ids = self.ids if ids is None else ids
        return self.decoder.full(ids[rows, :end].clone(), torch.arange(ROWS)[rows])

    def set_logits(self):
        """Set `logits`, and `fault` if they depend on later tokens or other rows, because then no cache can give them.

        The shorter sequences come first, because some decoders remember the longest.
        """
        half, self.fault = self.length // 2, None
        with self.exactly():
            fewer = {"later tokens": self.full(end=half), "other rows": self.full(slice(1), half)}
            self.logits = self.full().double()
        tolerance = self.logits.std() * (1e-4 if self.modules and self.exact == torch.float64 else 300 * self.eps)
        because = None if self.logits.isfinite().all() else "are not finite"
        for what, logits in fewer.items():
            off = self.error(logits, slice(len(logits)), slice(half)).amax(0)
            if (off > tolerance).any() and not because:
                first = (off > tolerance).int().argmax()
                because = f"change by {off.max():.2g} when {what} are left out, from position {first} on"
        if because:
            self.fault = (
                f"not the cache's fault: logits without a cache {because}, so no cache can give the same logits"
            )

    def exactly(self):
        return changed(self.modules, lambda tensor: tensor.data.to(self.exact))

    def error(self, logits, rows=slice(None), positions=slice(None)):
        """Return the error of the worst logit at each position, less what `rtol` allows. NaN counts as infinite."""
        wanted = self.logits[rows, positions]
        error = (logits.double() - wanted).abs_()  # in place, because this is what takes the most memory
        if self.rtol:
            error -= self.rtol * wanted.abs()
        return error.amax(-1).nan_to_num(torch.inf, torch.inf).clamp(min=0)

    def find_blindness(self):
        """Return why a wrong cache could not show in these logits, or None. They must depend on earlier tokens."""
        even, odd = torch.arange(0, self.length, 2), torch.arange(1, self.length, 2)
        shifted = (self.ids + 1) % self.decoder.vocab_size
        others = self.full(slice(3), ids=self.ids.index_copy(1, even, shifted[:, even]))
        matters = self.error(others, slice(3))[:, odd].median()
        noise = self.rounding.median()
        if matters < VISIBLE * noise:
            moved = f"earlier tokens move the logits by {matters:.1g} and rounding by {noise:.1g}"
            return f"we cannot see the cache: {moved}, so a wrong cache would look correct"

    @cached_property
    def sees_padding(self):
        """Whether left padding changes logits even without a cache. We can only tell if `full` accepts a mask."""
        if not self.decoder.full_takes_mask:
            return False
        rows, positions = torch.arange(3)[:, None].expand(3, self.length), torch.arange(self.length)
        positions = positions - torch.tensor(PADS)[:, None]
        real, pos = positions >= 0, positions.clamp(min=0)
        logits = self.decoder.full(self.ids[rows, pos].where(real, self.decoder.pad), rows[:, 0], real.long(), pos)
        return (self.error(logits[real], rows[real], pos[real]) > self.limit).any()

    def watch(self, ids=None):
        """Return [(index of a call of attention, its Read)] for the calls over all tokens, unlike those of a router.

        Slots in front of the text, such as those of a class, an image or memory keys, are the first slots of a Read.
        """
        with Watch() as watch:
            self.full(ids=ids)
        self.calls, whole = len(watch.reads), []
        for i, read in enumerate(watch.reads):
            read = read() if callable(read) else read
            extra, front = (size - self.length for size in read.weights.shape[-2:])
            if 0 <= extra <= front:
                read = shaped(read, len(self.ids))
                read.weights = read.weights[:, :, extra:]
                read.query = None if read.query is None else read.query[:, :, extra:]
                if front == 0 or not read.weights[..., front:].triu(1).any():  # not the slots of cross-attention
                    whole.append((i, read))
        return whole

    @cached_property
    def reads(self):
        with self.exactly():
            return self.watch()

    def differ(self, x, wanted):
        """Whether keys, values or queries (..., size) differ from `wanted` by more than rounding explains."""
        return (x - wanted).abs().amax(-1) > self.coarse * wanted.abs().max()
