"""The logits of reference, without a cache, and how far rounding moves them."""

from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn

from check_cache.adapters import ROWS, TWIN, Weights
from check_cache.attention import Watch, read_of
from check_cache.report import Verdict

# How far off a correct cache may be, in units of what rounding alone does to logits: the largest error, and the median.
# The families of transformers that are correct reached 1.9 and 1.0, in three dtypes.
LARGEST, MEDIAN = 4, 1.25
# If we can change the shape of the input, but no weights, we measure too little rounding: in float32 down to 1 / 2.5,
# and down to 1 / 5.7 on a CPU without AVX-512.
UNSEEN = 8
# How much earlier tokens must matter, in units of typical rounding. Below that we would not see a wrong cache.
VISIBLE = 10


@contextmanager
def changed(modules, change=lambda tensor: tensor.data):
    """Replace each weight, except those in 8 bits, for a while, in eval mode. Restore what a forward writes, too."""
    parts = {part for module in modules for part in module.modules()}
    weights = [part for part in parts if isinstance(part, Weights) and not part.passed]
    held = [(content, dict(content)) for part in parts for content in (vars(part), part._buffers)]
    kept = {tensor: tensor.data for module in modules for tensor in (*module.parameters(), *module.buffers())}
    try:
        for tensor in kept:
            if not isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.clone()  # because a forward may write to buffers
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                tensor.data = change(tensor)
        for part in weights:
            part.write()
        for module in modules:
            module.eval()
        yield
    finally:
        for tensor, data in kept.items():
            tensor.data = data
        for content, before in held:
            content.clear()
            content.update(before)
        for part in weights:
            part.write()


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
    data = data if data.any() else deviation * normal(data, draw)
    return (data * max(1.0, deviation / (data.float().std().item() + 1e-6))).to(dtype)


def normal(tensor, draw):
    """Return random numbers for a tensor, the same on every device."""
    return torch.randn(tensor.shape, generator=draw, device="cpu").to(tensor)


def find_unread(decoder):
    """Return why we must not perturb the weights that we found, or None.

    `full` and `step` may run on copies that nobody uses again, or each on a module of its own, with equal weights.
    """
    draw = torch.Generator().manual_seed(0)
    try:
        with changed(decoder.modules):
            before = decoder.first_logits()
        for modules in (decoder.modules, *decoder.called):
            with changed(modules, lambda tensor: tensor.data + 0.1 * normal(tensor, draw)):
                after = decoder.first_logits()
            full, step = (not torch.allclose(x, y, 0.01, 0.0, equal_nan=True) for x, y in zip(before, after))
            if full != step:
                return "full and step read different weights: let them share their parameters"
            if decoder.modules and not full and modules is decoder.modules:
                return "full and step do not read the weights that we found: if they copy a module, pass it as model="
    except (Exception, SystemExit):  # it will raise again
        return None


def draw_texts(sizes, vocab_size, pad, draw):
    """Return ids (ROWS, length), some of which are the padding id, because a cache must not mistake them for padding.

    Rows 3 to 5 begin like rows 0 to 2. Rows 6 and 7 begin differently from rows 0 and 1 and then go on like them, so
    what is kept under its tokens alone is wrong for them.
    """
    ids = torch.randint(vocab_size, (ROWS, sizes.length), generator=draw, device="cpu")
    ids[torch.rand(ids.shape, generator=draw, device="cpu") < 0.05] = pad
    ids[TWIN : 2 * TWIN, : sizes.fork] = ids[:TWIN, : sizes.fork]
    for row, begins in ((0, 3), (1, min(7, sizes.fork - 4))):
        ids[row + 2 * TWIN] = ids[row]
        ids[row + 2 * TWIN, :begins] = (ids[row, :begins] + 1) % vocab_size
    return torch.tensor(ids.tolist())  # on the device


class Reference:
    """Random sequences, their logits without a cache, and how far rounding moves these logits."""

    def __init__(self, decoder, sizes, dtype, atol):
        self.decoder, self.modules, self.length = decoder, decoder.perturbed, sizes.length
        self.eps, length, draw = torch.finfo(dtype).eps, sizes.length, torch.Generator().manual_seed(0)
        self.coarse = 0.3 if atol else self.eps**0.6  # how far off keys, values and weights may be, of the largest
        self.ids = draw_texts(sizes, decoder.vocab_size, decoder.pad, draw)
        self.set_logits(dtype)
        # Rounding moves logits when the batch has a different shape, or when the last digits of some weights change.
        least = self.logits.std() * self.eps * (1 if decoder.converts else 64)  # an estimate, if not in float64
        self.rounding = self.error(self.full()).clamp(min=least)
        for rows, end in ((slice(3), length), (slice(1, 2), length), (slice(3), 2 * length // 3)):
            error = self.error(self.full(rows, end), rows, slice(end))
            self.rounding[rows, :end] = self.rounding[rows, :end].maximum(error)
        for _ in range(3):
            with changed(self.modules, lambda tensor: tensor.data * (1 + self.eps / 8 * normal(tensor, draw))):
                self.rounding = self.rounding.maximum(self.error(self.full()))
        if not self.modules:
            self.rounding *= UNSEEN
        self.find_blindness()
        self.limit = (LARGEST * self.rounding.max()).clamp(min=atol)
        self.rounding = self.rounding.clamp(min=atol)

    def full(self, rows=slice(None), end=None, ids=None):
        """Return logits without a cache, of some rows up to `end`. A decoder may overwrite the ids that it gets."""
        ids = self.ids if ids is None else ids
        return self.decoder.full(ids[rows, :end].clone(), torch.arange(ROWS)[rows])

    def set_logits(self, dtype):
        """Set `logits`. Shorter sequences come first, because some decoders remember the longest."""
        half = self.length // 2
        for self.exact in (torch.float64, torch.float32, dtype):  # the first that the decoder can run in
            try:
                with self.exactly():
                    fewer = {"later tokens": self.full(end=half), "other rows": self.full(slice(1), half)}
                    self.logits = self.full().double()
                break
            except Exception:
                if self.exact == dtype:
                    raise
        if not self.logits.isfinite().all():
            raise Verdict("fault", "not the cache's fault: logits without a cache are not finite")
        exact = self.decoder.converts and self.exact == torch.float64
        tolerance = self.logits.std() * (1e-4 if exact else 300 * self.eps)
        for what, logits in fewer.items():
            off = self.error(logits, slice(len(logits)), slice(half)).amax(0) > tolerance
            if off.any():
                why = f"change when {what} are left out, from position {off.int().argmax()} on"
                raise Verdict("fault", f"not the cache's fault: logits without a cache {why}")

    def exactly(self):
        return changed(self.modules, lambda tensor: tensor.data.to(self.exact))

    def error(self, logits, rows=slice(None), positions=slice(None)):
        """Return the error of the worst logit at each position. NaN counts as infinite."""
        error = (logits.double() - self.logits[rows, positions]).abs_()  # in place: this takes the most memory
        return error.amax(-1).nan_to_num(torch.inf, torch.inf)

    def find_blindness(self):
        """It is a fault if a wrong cache could not show in these logits. They must depend on earlier tokens."""
        others = self.ids.clone()
        others[:, ::2] = (others[:, ::2] + 1) % self.decoder.vocab_size
        matters, noise = self.error(self.full(slice(3), ids=others), slice(3))[:, 1::2].median(), self.rounding.median()
        if matters < VISIBLE * noise:
            moved = "earlier tokens move the logits no more than rounding does"
            raise Verdict("fault", f"we cannot see the cache: {moved}, so a wrong cache would look correct")

    def watch(self, row, ids):
        """Return the calls of attention over all tokens of a row: [(index, slots in front of the text, Read)]."""
        with Watch() as watch:
            self.full(slice(row, row + 1), ids=ids)
        whole, self.calls = [], len(watch.reads)
        for i, read in enumerate(watch.reads):
            read = read() if callable(read) else read
            skip, front = (size - self.length for size in read.weights.shape[-2:])
            if 0 <= skip <= front:
                read = read_of(read, 0, 1, self.length, front)
                if front == 0 or not read.weights.triu(1).any():  # neither cross-attention nor a router
                    whole.append((i, front, read))
        return whole

    @cached_property
    def reads(self):
        """The same with a list of the Reads of all rows. Each runs alone, as some decoders do."""
        with self.exactly():
            rows = [self.watch(row, self.ids) for row in range(ROWS)]
        return [(*calls[0][:2], [read for *_, read in calls]) for calls in zip(*rows)]

    def differ(self, x, wanted):
        """Whether keys, values or queries (..., size) differ from `wanted` by more than rounding explains."""
        return (x - wanted).abs().amax(-1) > self.coarse * wanted.abs().max()
