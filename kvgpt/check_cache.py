"""Is my KV cache right? One call that says so, for any decoder, and names the first wrong key.

    from kvgpt.check_cache import check_cache

    report = check_cache(model)  # a model of transformers, a GPT of this kit, or an adapter
    assert not report, report  # in a pytest

    python -m kvgpt.check_cache FOLDER             a folder that transformers wrote
    python -m kvgpt.check_cache module:function    a function of yours that returns a model or an adapter

A right cache changes no logit. So we compute the logits of a few random texts without a cache, feed the same texts
through the cache in many ways, and compare. Each way differs from plain decoding in one thing. If a logit is wrong, we
feed the texts once more and watch what each layer gives to its cache and gets back, to find where it begins.

The file needs only torch, so you can copy it. An adapter for a decoder of your own is an object with

    vocab_size                     the number of token ids
    full(ids)                      the logits (B, T, V) of ids (B, T), without a cache
    new(kind, length)              an empty cache for `length` tokens. kind is "own" or "static": raise
                                   NotImplementedError, with a reason, for one that you do not have
    step(ids, cache, mask, pos)    the logits (B, T, V) of the next T tokens, which also go into the cache. pos (B, T)
                                   has their positions. mask is None, or (B, t) over all t tokens so far, where 0 is
                                   padding. If the step makes a new cache, return (logits, cache)

An nn.Module that is an attribute of the adapter runs in float64 too, which tells us what rounding does. We try crop,
reorder_cache, batch_repeat_interleave, batch_select_indices and reset if the cache has methods of these names, with the
arguments of transformers. We can watch a cache that has a method update, if it gets new keys and values and returns all
of them, of the shape (B, heads, t, head size).
"""

import argparse
import copy
import importlib
import inspect
import json
import sys
import textwrap
import types
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

# How far off a right cache may be, in units of what rounding alone does to logits: the largest error, and the mean. We
# measured right caches in seven families, and they reached 1.03 and 0.88. Most bugs are a thousand times as far off.
LARGEST, MEAN = 3, 1.25

# the causes
WRONG_VALUE = "the new value is wrong: wrong input or absolute position"
WRONG_KEY = "only the new key is wrong: position ids"
ALL_RIGHT = "all keys and values are right, so mask or heads"
WRONG_AT_ONCE = "wrong with an empty cache, too: input, positions, mask or heads of the cached path"


class Found(Exception):
    """A cause, and its layer."""


# -- models ------------------------------------------------------------------------------------------------------------


class Transformers:
    """The adapter of a causal language model of transformers."""

    def __init__(self, model):
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.vocab_size = model.get_output_embeddings().weight.size(0)
        self.context = getattr(self.config, "max_position_embeddings", None)
        windows = "sliding_window", "attention_chunk_size", "window_size", "attention_window_size"
        self.window = next(filter(None, (getattr(self.config, name, None) for name in windows)), None)
        self.pad = getattr(self.config, "pad_token_id", None) or 0
        self.takes = inspect.signature(model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in self.takes else "past_key_values"

    def attentions(self):
        """Switch to each implementation of attention, and yield (its name, None or why we cannot)."""
        own = self.config._attn_implementation
        for name in (own, "eager" if own != "eager" else "sdpa"):
            try:
                self.model.set_attn_implementation(name)
                yield name, None
            except (ValueError, ImportError) as error:
                yield name, first_line(error)
        self.model.set_attn_implementation(own)

    def run(self, **inputs):
        experts = getattr(self.config, "_experts_implementation", None)
        if experts and self.model.dtype == torch.float64:  # their fast kernels have no float64
            self.model.set_experts_implementation("eager")
        try:
            return self.model(**inputs)
        finally:
            if experts:
                self.model.set_experts_implementation(experts)

    def full(self, ids, mask=None, pos=None):
        return self.run(input_ids=ids, use_cache=False, **self.placed(mask, pos)).logits

    def new(self, kind, length):
        import transformers

        if kind == "own":  # as generate() does; None lets the model make one
            has_default = self.model._supports_default_dynamic_cache()
            return transformers.DynamicCache(config=self.config) if has_default else None
        if kind == "static" and self.model._can_compile_fullgraph:
            return transformers.StaticCache(config=self.config, max_cache_len=length)
        if kind == "quantized":
            return transformers.QuantizedCache("fp8", config=self.config)
        raise NotImplementedError("transformers offers none for this model (_can_compile_fullgraph)")

    def step(self, ids, cache, mask, pos):
        make_mask = getattr(self.model, "create_masks_for_generate", None)
        if make_mask and mask is not None and getattr(cache, "is_compileable", False):  # as generate() does
            mask = make_mask(self.config, self.model.get_input_embeddings()(ids), mask, cache)
        output = self.run(input_ids=ids, use_cache=True, **{self.cache_name: cache}, **self.placed(mask, pos))
        return output.logits, getattr(output, self.cache_name, None)

    def placed(self, mask, pos):
        """Return the arguments for mask and positions. Without a mask the model has to find the positions itself."""
        given = {"attention_mask": mask, "position_ids": pos} if mask is not None else {}
        return {name: value for name, value in given.items() if name in self.takes}


class Kit:
    """The adapter of this kit's GPT. Its modules share one cache, so each new cache brings a copy of the model."""

    def __init__(self, model):
        self.model, self.vocab_size, self.context = model, model.config.vocab_size, model.config.block_size

    def full(self, ids):
        return self.model(ids)[0]

    def new(self, kind, length):
        if kind != "own":
            raise NotImplementedError("the cache of this GPT is static already")
        model = copy.deepcopy(self.model)
        model.cache.model, model.cache.reset = model, model.cache.clear
        model.cache.crop = lambda count: None  # pos says how much of the cache is valid
        return model.cache

    def step(self, ids, cache, mask, pos):
        if mask is not None and not mask.all():
            raise NotImplementedError("this GPT takes no mask, because it pads on the right")
        return cache.model(ids, pos=pos)[0]


def adapter_of(model):
    if all(hasattr(model, name) for name in ("full", "new", "step", "vocab_size")):
        return model
    if hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None:
        return Transformers(model)
    if hasattr(model, "cache") and hasattr(getattr(model, "config", None), "block_size"):
        return Kit(model)
    raise TypeError(
        f"{type(model).__name__} is no causal language model of transformers, no GPT of this kit, and no adapter, "
        "which has vocab_size, full, new and step"
    )


# -- weights -----------------------------------------------------------------------------------------------------------


@contextmanager
def changed(modules, change):
    """Lend parameters and buffers, each replaced by change(tensor), if it is of floating point."""
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


# -- the right logits, and how far rounding moves them -----------------------------------------------------------------


class Truth:
    """Texts, their logits without a cache, and what rounding does to these.

    Most ways feed texts 0 to 2. Texts 3 to 5 begin like them and differ after the prefix, and two more make a batch of
    eight. Some tokens have the padding id, because a cache must not take them for padding.
    """

    def __init__(self, decoder, modules, length, dtype, seed):
        draw, eps = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps
        self.decoder, self.modules, self.length, self.eps = decoder, modules, length, eps
        self.pad, self.window = getattr(decoder, "pad", 0), getattr(decoder, "window", None)
        ids = torch.randint(decoder.vocab_size, (8, length), generator=draw, device="cpu")
        ids[torch.rand(ids.shape, generator=draw, device="cpu") < 0.05] = self.pad
        ids[3:6, : length // 2] = ids[:3, : length // 2]
        self.ids = torch.tensor(ids.tolist())  # on the device

        # the right logits, in float64 if the model can
        self.exact = bool(modules)
        try:
            self.set_logits(1e-4)
        except (RuntimeError, TypeError):
            self.exact = False
            self.set_logits(300 * eps)

        # what rounding does: other shapes, and other last digits of some weights
        plain = decoder.full(self.ids)
        self.argmax = plain.argmax(-1)
        least = self.logits.std() * eps * (1 if modules else 64)  # a guess for weights that we cannot change
        self.rounding = self.error(plain).clamp(min=least)
        for rows, end in ((slice(3), length), (slice(1), length), (slice(1, 2), length), (slice(3), 2 * length // 3)):
            error = self.error(decoder.full(self.ids[rows, :end]), rows, slice(end))
            self.rounding[rows, :end] = self.rounding[rows, :end].maximum(error)
        self.rounding = self.rounding.maximum(self.nudged(eps / 8, draw))
        # A router of experts that is near a tie makes single positions jump, so larger nudges set the limit.
        limit = self.rounding.maximum(self.nudged(eps, draw))
        self.limit = LARGEST * limit.clamp(min=limit.flatten().quantile(0.95))

    def exactly(self):
        return changed(self.modules if self.exact else [], lambda tensor: tensor.data.double())

    def set_logits(self, tolerance):
        """Set the right logits, and `fault`: why no cache can give them, if they depend on later tokens or on rows."""
        end, other = self.length // 2, self.ids.clone()
        other[:, end:] = other[:, end:].roll(1, 0)
        changes = {
            "when later tokens change": other,
            "when later tokens are left out": self.ids[:, :end],
            "when other rows are left out": self.ids[:1],
        }
        with self.exactly():
            self.logits = self.decoder.full(self.ids).double()
            self.fault = None if self.logits.isfinite().all() else "logits without a cache are not finite"
            for what, ids in changes.items():
                off = self.error(self.decoder.full(ids)[:, :end], slice(len(ids)), slice(end)).amax(0)
                wrong = (off > tolerance * self.logits.std()).nonzero()
                if len(wrong) and not self.fault:
                    first = wrong[0].item()
                    self.fault = f"logits without a cache change by {off.max():.2g} {what}, from position {first} on"

    def nudged(self, size, draw):
        """Return the largest errors, without a cache, of three models whose weights differ a little."""
        errors = []
        for _ in range(3):
            with changed(self.modules, lambda tensor: tensor.data * (1 + size * normal(tensor, draw))):
                errors.append(self.error(self.decoder.full(self.ids)))
        return torch.stack(errors).amax(0)

    def error(self, logits, rows=slice(None), positions=slice(None)):
        """Return the error of the worst logit at each position. NaN counts as infinite."""
        return (logits.double() - self.logits[rows, positions]).abs().amax(-1).nan_to_num(torch.inf, torch.inf)

    @cached_property
    def updates(self):
        """What the cache should get in each update of a forward: (layer, keys and values (8, L, size), tolerances).

        They come from a forward whose cache keeps nothing and gives back what it gets.
        """

        def forward():
            cache = self.decoder.new("own", self.length)
            calls = listen(cache, keeps=False)
            output = self.decoder.step(self.ids, cache, None, torch.arange(self.length).expand_as(self.ids))
            return output[0] if isinstance(output, tuple) else output, calls

        with self.exactly():
            _, right = forward()
        logits, rounded = forward()
        if (self.error(logits) > self.limit).any():
            raise Found(WRONG_AT_ONCE, None)
        updates = []
        for (layer, exact, _), (_, near, _) in zip(right, rounded):
            off = [(a - b).abs().max().clamp(min=self.eps * a.abs().max()) for a, b in zip(exact, near)]
            updates.append((layer, exact, [2 * LARGEST * x for x in off]))
        return updates


# -- feeding a cache ---------------------------------------------------------------------------------------------------

PADS = (0, 5, 11)  # padding tokens of each row


class Stream:
    """A batch of texts on its way through one cache.

    kind    the kind of cache; None feeds the model without one
    errors  a list that gets (text, position, error, other argmax) of all logits, in order
    watch   whether to raise Found as soon as something is wrong
    rows    the text that each row of the batch takes its tokens from
    pads    how many padding tokens each row begins with, or None
    masked  whether to pass a mask where nothing is padding
    """

    def __init__(self, truth, kind, errors, watch=False, rows=(0, 1, 2), pads=None, masked=False):
        self.truth, self.kind, self.errors, self.watch, self.fed = truth, kind, errors, watch, 0
        self.rows, self.pads, self.masked = torch.tensor([*rows]), torch.tensor(pads or [0]), masked or pads is not None
        room = truth.length + 8  # some slots of a static cache stay empty
        self.cache = truth.decoder.new(kind, room) if kind else None

    def feed(self, count, guesses=0):
        """Feed the next `count` tokens of each row, and compare their logits. Guesses are tokens of another text."""
        truth, T = self.truth, count + guesses
        rows = self.rows[:, None].expand(-1, T)
        positions = (torch.arange(self.fed, self.fed + T) - self.pads[:, None]).expand(len(rows), T)  # < 0 is padding
        real, pos = positions >= 0, positions.clamp(min=0)
        ids = truth.ids[rows + 3 * (torch.arange(T) >= count), pos].where(real, truth.pad)
        mask = None
        if self.masked:
            mask = (torch.arange(self.fed + T) >= self.pads[:, None]).expand(len(rows), -1).long()

        calls = listen(self.cache) if self.watch else None
        output = truth.decoder.step(ids, self.cache, mask, pos) if self.kind else truth.decoder.full(ids, mask, pos)
        logits, self.cache = output if isinstance(output, tuple) else (output, self.cache)
        if self.kind and self.cache is None:
            raise NotImplementedError("neither new nor step returns a cache")
        self.fed += T

        rows, pos, real, logits = rows[:, :count], pos[:, :count], real[:, :count], logits[:, :count]
        error, other = truth.error(logits, rows, pos), logits.argmax(-1) != truth.argmax[rows, pos]
        order = real.T.nonzero(as_tuple=True)[::-1]  # by position, then by row
        self.errors.append([x[order] for x in (rows, pos, error, other)])
        if self.watch:
            find_cause(self, calls, positions, count)
            if (error > truth.limit[rows, pos])[real].any():
                raise Found(ALL_RIGHT, truth.updates[-1][0])

    def feed_until(self, end, size=1):
        while self.fed < min(end, self.truth.length):
            self.feed(min(size, end - self.fed))

    def take_back(self, count):
        self.call("crop", -count)
        self.fed -= count

    def call(self, name, *args):
        """Call a method of the cache."""
        if not hasattr(self.cache, name):
            raise NotImplementedError(f"the cache has no {name}")
        try:
            new = getattr(self.cache, name)(*args)
        except AttributeError as error:  # a cache of transformers asks each of its layers
            raise NotImplementedError(first_line(error)) from None
        self.cache = self.cache if new is None else new


# -- the ways ----------------------------------------------------------------------------------------------------------
# Each takes `start`, which makes a Stream. P is the length of a prefix, and n a number of single tokens that is enough.


def decode(start, P, end, **options):
    """A prefill, then token after token."""
    stream = start(**options)
    stream.feed(P)
    stream.feed_until(end)


def prefix_twice(start, P, n):
    """Two texts with one prefix, which is computed once. Then both go on in turn."""
    first = start()
    first.feed(P)
    second = copy.copy(first)
    second.rows = first.rows + 3
    try:
        second.cache = copy.deepcopy(first.cache)
    except TypeError as error:
        raise NotImplementedError(f"copy.deepcopy of the cache: {first_line(error)}") from None
    for _ in range(n):
        first.feed(1)
        second.feed(1)


def two_at_once(start, P, n):
    """Two caches of one model, in turn: they must not share anything."""
    first, second = start(), start(rows=(5, 6, 7))
    for count in (P, *[1] * n):
        first.feed(count)
        second.feed(count)


def rollback(start, P, n, everything=False):
    """Speculative decoding: feed a token and some guesses, then take the guesses back."""
    stream = start()
    stream.feed(P)
    if getattr(stream.cache, "is_croppable", True) is False:
        raise NotImplementedError("the cache says that it cannot be cropped (is_croppable)")
    if hasattr(stream.cache, "activate_past_recording"):  # in transformers a window has to know before
        stream.call("activate_past_recording")
    steps = [(1, guesses) for guesses in (4, 1, 3, 2) * (n // 4)]
    if everything:
        stream.take_back(P)
        steps = [(P, 4), *steps]
    for count, guesses in steps:
        stream.feed(count, guesses)
        stream.take_back(guesses)


def rearrange(start, P, n, method, argument, rows):
    """After a method of the cache, the batch has other rows, for example those of the best beams."""
    stream = start()
    stream.feed(P)
    stream.call(method, argument)
    stream.rows = torch.tensor(rows)
    stream.feed_until(P + n)


def reset(start, P, n, L):
    """A second text in the cache of a first."""
    stream = start(rows=(5, 6, 7))
    stream.feed_until(L, size=P)
    stream.call("reset")
    stream.fed, stream.rows = 0, torch.tensor([0, 1, 2])
    stream.feed(P)
    stream.feed_until(P + n)


def ways_for(window, L):
    """Return {name: way}. L is the length of a text."""
    half, third, n = L // 2, L // 3, min(24, L // 4)
    sizes = (3, window - 1, window + 2) if window and 4 < window < L else (3, min(50, half + 1))
    beams = torch.tensor([2, 0, 0])
    return {
        "decode": lambda start: decode(start, third, L),
        "decode from 1 token": lambda start: decode(start, 1, third),
        "decode from 2 tokens": lambda start: decode(start, 2, third),
        **{f"chunks of {size}": lambda start, size=size: start().feed_until(L, size) for size in sizes},
        "mask of ones": lambda start: decode(start, third, third + n, masked=True),
        "mask of ones in chunks": lambda start: start(masked=True).feed_until(L, 7),
        "left padding": lambda start: decode(start, third, third + 2 * n, pads=PADS),
        "left padding in chunks": lambda start: start(pads=PADS).feed_until(L, 3),
        "prefix used twice": lambda start: prefix_twice(start, half, n),
        "two texts at once": lambda start: two_at_once(start, third, n),
        "speculative rollback": lambda start: rollback(start, half, n),
        "rollback of everything": lambda start: rollback(start, min(half, (window or L) - 1), n, everything=True),
        "reorder": lambda start: rearrange(start, half, n, "reorder_cache", beams, (2, 0, 0)),
        "repeat": lambda start: rearrange(start, half, n, "batch_repeat_interleave", 2, (0, 3, 1, 4, 2, 5)),
        "select": lambda start: rearrange(start, half, n, "batch_select_indices", beams[:2], (2, 0)),
        "second text after reset": lambda start: reset(start, third, n, L),
        "eight rows": lambda start: decode(start, third, third + n, rows=range(8)),
        "one row": lambda start: decode(start, third, third + n, rows=(1,)),
    }


# what a second implementation of attention may compute in another way
SECOND = ("decode", "chunks of 3", "mask of ones in chunks", "left padding", "left padding in chunks")


# -- the cause ---------------------------------------------------------------------------------------------------------


def keys_and_values(given):
    return [x for x in given if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.is_floating_point()][:2]


def flat(given):
    """Return copies of the keys and values among `given`, (B, heads, t, head size) -> (B, t, heads * head size)."""
    return [x.transpose(1, -2).flatten(2).to(torch.float64, copy=True) for x in keys_and_values(given)]


def listen(cache, keeps=True):
    """Return a list that gets each update of the cache from now on: (layer, what it got, what it gave back).

    keeps  False: the cache keeps nothing, and gives back what it gets
    """
    calls, update = [], type(cache).update

    def noted(cache, *args, **kwargs):
        given = (*args, *kwargs.values())
        layer, got = next((x for x in given if type(x) is int), len(calls)), flat(given)
        held = update(cache, *args, **kwargs) if keeps else keys_and_values(given)
        calls.append((layer, got, flat(held)))
        return held

    cache.update = types.MethodType(noted, cache)  # a bound method, so that copy.deepcopy binds it to the copy
    return calls


def find_cause(stream, calls, positions, count):
    """Raise Found if an update of a step is wrong. The step fed `positions`, of which `count` are no guesses."""
    rows, fed, updates = stream.rows[:, None], stream.fed, stream.truth.updates
    if len(calls) != len(updates):
        raise Found(f"a step has {len(calls)} updates of the cache, where a forward has {len(updates)}", None)
    for i, ((_, new, held), (layer, right, tolerance)) in enumerate(zip(calls, updates)):
        # does the cache give back what it got, in this step and before?
        needed, (B, slots) = min(fed, stream.truth.window or fed), held[1].shape[:2]
        if B != len(rows) or slots < needed:
            size = f"{B} rows of {slots} slots, where it needs {len(rows)} of {needed}"
            raise Found(f"the cache gave back {size}", layer)
        places = (torch.arange(fed)[-slots:] - stream.pads[:, None]).expand(B, -1)  # a window has dropped the others
        expected = [x[rows, places.clamp(min=0)] for x in right]
        for x, own in zip(expected, new):
            x[:, -own.size(1) :] = own[:, -x.size(1) :]
        off = [
            ((x[:, : places.size(1)] - y).abs().amax(-1) > limit) & (places >= 0)
            for x, y, limit in zip(held, expected, tolerance)
        ]
        wrong = (off[0] | off[1]).T.nonzero()
        if len(wrong):
            slot, row = wrong[0].tolist()
            parts = [part for part in (0, 1) if off[part][row, slot]]
            given = {part: (held[part][row, slot], expected[part][row, slot]) for part in parts}
            text = stream.rows[row].item()
            name, place = "value" if 1 in parts else "key", f"row {text}, position {places[row, slot].item()}"
            owner = find_owner(stream.truth, i, given, text)
            raise Found(f"the cache gave back a {name} that is not that of {place}, {owner}", layer)

        # did the layer give it the right thing? We do not ask about guesses.
        real, pos = positions[:, :count] >= 0, positions[:, :count].clamp(min=0)
        key_wrong, value_wrong = (
            ((x[:, :count] - y[rows, pos]).abs().amax(-1) > limit)[real].any()
            for x, y, limit in zip(new, right, tolerance)
        )
        if value_wrong and i > 0:  # the layer before got what is right, and gave what is wrong
            raise Found(ALL_RIGHT, updates[i - 1][0])
        if value_wrong or key_wrong:
            raise Found(WRONG_VALUE if value_wrong else WRONG_KEY, layer)


def find_owner(truth, i, given, text):
    """Say whose key or value the cache gave back. given: {0 for the key, 1 for the value: (it, the right one)}."""
    off = max((x - y).abs().max() / y.abs().max() for x, y in given.values())
    if off < 0.1:
        return f"but that one rounded, off by {off:.1g} of its size"
    if not any(x.any() for x, _ in given.values()):
        return "but zeros, as in an empty slot"
    for layer, right, tolerance in (truth.updates[i], *truth.updates):
        same = torch.ones(truth.ids.shape, dtype=torch.bool)
        for part, (x, _) in given.items():
            same &= (right[part] - x).abs().amax(-1) <= tolerance[part]
        if same.any():
            owner = text if same[text].any() else same.any(1).int().argmax().item()
            row = f"row {owner}" if owner in (0, 1, 2, text) else "another text or a rejected guess"
            where = "" if layer == truth.updates[i][0] else f"layer {layer}, "
            return f"but of {where}{row}, position {same[owner].int().argmax().item()}"
    return "but of nothing that is right, for example a rejected guess"


# -- the report --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What came of one way."""

    way: str
    cache: str
    attention: str | None
    status: str = "right"  # or "wrong", or "not run"
    why: str | None = None  # the cause, or the reason
    off: float | None = None  # how far the worst logit is off
    allowed: float | None = None  # how far rounding might move it
    argmaxes: int | None = None  # how many argmaxes are others
    row: int | None = None  # the text of the first wrong logit
    position: int | None = None
    layer: int | None = None
    drift: list = field(default_factory=list, repr=False)  # (position, error) of all logits


@dataclass
class Report:
    """True if a way is wrong. str() is for people, `results` for programs.

    fault  None, or why it is not the cache's fault that logits differ
    """

    title: str
    results: list
    fault: str | None = None

    def __bool__(self):
        return any(result.status == "wrong" for result in self.results)

    @property
    def exit_code(self):
        """0: right, 1: wrong, 2: nothing could be run."""
        return 1 if self else 0 if any(result.status == "right" for result in self.results) else 2

    def __str__(self):
        wrong, groups = [], {"right": {}, "not run": {}}
        for result in self.results:
            where = f"{result.cache} cache" + (f", {result.attention}" if result.attention else "")
            if result.status != "wrong":
                groups[result.status].setdefault((where, result.why), []).append(result.way)
                continue
            text = f"{result.way}, {where}: "
            if result.off is not None:
                text += (
                    f"logits off by {result.off:.2g} (allowed {result.allowed:.1g}), {result.argmaxes} other argmaxes, "
                )
                text += f"first at row {result.row}, position {result.position}"
                text += ": " if result.layer is None else f", layer {result.layer}: "
            wrong.append(("WRONG", text + result.why))
        lines = [("NOT THE CACHE'S FAULT", f"{self.fault}, so no cache can give the same logits")] if self.fault else []
        lines += wrong
        for status, group in groups.items():
            for (where, why), ways in group.items():
                lines.append((status, f"{where}: {', '.join(ways)}" + (f": {why}" if why else "")))
        wrap = partial(textwrap.fill, width=120, subsequent_indent=" " * 9, break_long_words=False)
        return "\n".join([self.title, *(wrap(f"{status:7}  {text}") for status, text in lines)])


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def plot(report, file):
    """Draw how far each way is off over position, beside what is allowed. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(yscale="log", xlabel="position", ylabel="error of the worst logit", title=report.title)
    for result in report.results:
        if result.drift:
            wrong = result.status == "wrong"
            look = dict(label=f"{result.way}, {result.cache} cache") if wrong else dict(color="silver")
            axes.plot(*zip(*result.drift), ".", markersize=2, **look)
    allowed = max((result.allowed or 0 for result in report.results), default=0)
    axes.axhspan(0, allowed, color="green", alpha=0.15, label="allowed")
    axes.legend(fontsize="small", markerscale=5)
    figure.savefig(file)


# -- the check ---------------------------------------------------------------------------------------------------------


def examine(truth, kind, attention, name, way):
    """Return the Result of one way."""
    result, errors = Result(name, kind, attention), []
    try:
        way(partial(Stream, truth, kind, errors))
    except NotImplementedError as reason:
        result.status, result.why = "not run", first_line(reason)
        return result
    except Exception as error:
        result.status, result.why = "wrong", f"raises {type(error).__name__}: {first_line(error)}"
        return result

    rows, positions, error, other = (torch.cat(column) for column in zip(*errors))
    limit, rounding = truth.limit[rows, positions], truth.rounding[rows, positions]
    worst = (error / limit).argmax()
    result.off, result.allowed, result.argmaxes = error[worst].item(), limit[worst].item(), int(other.sum())
    result.drift = list(zip(positions.tolist(), error.tolist()))
    if kind == "quantized" or (error[worst] <= limit[worst] and error.mean() <= MEAN * rounding.mean()):
        return result  # a quantized cache has other logits, but must not raise
    if name.startswith("left padding") and padding_matters(truth):
        result.status, result.why = "not run", "not the cache's fault: padding changes logits without a cache, too"
        return result

    first = (error > limit).int().argmax() if error[worst] > limit[worst] else worst
    result.status, result.row, result.position = "wrong", rows[first].item(), positions[first].item()
    try:
        way(partial(Stream, truth, kind, [], True))
        result.why = ALL_RIGHT
    except Found as found:
        result.why, result.layer = found.args
    except Exception as reason:  # a cache that is built in another way than we know
        result.why = f"cause unknown, because {first_line(reason)}"
    return result


def padding_matters(truth):
    """Whether left padding changes logits even without a cache. We can only ask a model of transformers."""
    if not isinstance(truth.decoder, Transformers):
        return False
    errors = []
    Stream(truth, None, errors, pads=PADS).feed(truth.length)
    rows, positions, error, _ = errors[0]
    return (error > truth.limit[rows, positions]).any()


def check_cache(model, length=None, dtype=torch.float32, device=None, caches=("own", "static"), modes=None, seed=0):
    """Return a Report, which is true if the cache of `model` is wrong.

    model   a model of transformers, a GPT of this kit, or an adapter. Its weights are others during the check
    length  tokens per text. None: 300, or three sliding windows, and at most the context or 1024
    dtype   of weights and cache; device: where to move the model, None leaves it where it is
    caches  the kinds of cache to ask for: "own", "static" and "quantized", of which we see only whether it raises
    modes   only the ways whose name contains one of these words
    Raises TypeError for another object, and ValueError for a length or words that do not work.
    """
    decoder = adapter_of(model)
    context, window = getattr(decoder, "context", None), getattr(decoder, "window", None)
    most = context or length or 1024
    length = length or min(max(300, 3 * (window or 0)), most, 1024)
    if not 24 <= length <= most:
        raise ValueError(f"length={length}: must be at least 24, and at most the context, {most}")
    ways = ways_for(window, length)
    chosen = {name: way for name, way in ways.items() if any(word in name for word in modes or [""])}
    if not chosen:
        raise ValueError(f"modes={modes!r}: the ways are {', '.join(ways)}")

    results, fault = [], None
    not_run = partial(Result, status="not run")
    if window and length < 2 * window:
        results.append(not_run(f"past the window of {window}", "any", None, why=f"takes a length of {3 * window}"))
    holders = (decoder, *getattr(decoder, "__dict__", {}).values())
    modules = [holder for holder in holders if isinstance(holder, nn.Module)]
    training = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval().to(device)
    device = torch.device(device or next((p.device for module in modules for p in module.parameters()), "cpu"))
    weights = partial(revealing, dtype=dtype, draw=torch.Generator().manual_seed(seed))
    with torch.no_grad(), device, changed(modules, weights):
        for attention, why_not in getattr(decoder, "attentions", lambda: [(None, None)])():
            if why_not:
                results.append(not_run("every way", "any", attention, why=why_not))
                continue
            truth = Truth(decoder, modules, length, dtype, seed)
            fault = fault or truth.fault
            for kind in () if fault else caches:
                try:
                    decoder.new(kind, length)
                except Exception as reason:
                    results.append(not_run("every way", kind, attention, why=first_line(reason)))
                    continue
                for name, way in chosen.items():
                    show(f"{name}, {kind} cache")
                    results.append(examine(truth, kind, attention, name, way))
            chosen = {name: way for name, way in chosen.items() if name in SECOND}
    show("")
    for part, mode in training.items():
        part.training = mode
    report = Report(f"{type(model).__name__}, {length} tokens, {str(dtype)[6:]} on {device}", results, fault)
    if report.exit_code == 2:
        warnings.warn(f"nothing could be checked: {report}", stacklevel=2)
    return report


def show(what):
    """Show on a terminal what runs."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


# -- the command line --------------------------------------------------------------------------------------------------


def load(name):
    """Return what the function of a module returns, or the model in a folder of transformers."""
    module, _, function = name.rpartition(":")
    if module and function.isidentifier():
        return getattr(importlib.import_module(module), function)()
    if not Path(name, "config.json").is_file():
        raise ValueError("it is neither a folder of transformers, which has a config.json, nor module:function")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(name, local_files_only=True, trust_remote_code=False)


def main():
    parser = argparse.ArgumentParser(prog="check_cache", description="Is the KV cache of a model right?")
    add = parser.add_argument
    add("model", help="a folder of transformers, or module:function, which returns a model or an adapter")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", help="for example cuda (default: where the model is)")
    add("--modes", nargs="+", metavar="WORD", help="only the ways whose name contains a word: chunks padding")
    add("--length", type=int, help="tokens per text (default: 300, or three sliding windows, at most the context)")
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="FILE", help="draw how far each way is off over position")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        dtype = getattr(torch, args.dtype)
        report = check_cache(load(args.model), args.length, dtype, args.device, modes=args.modes)
        if args.plot:
            plot(report, args.plot)
    except Exception as error:
        install = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        parser.exit(2, f"check_cache: {args.model}: {type(error).__name__}: {first_line(error)}{install}\n")
    if args.json:
        results = [{**vars(result), "drift": None} for result in report.results]
        print(json.dumps({**vars(report), "exit_code": report.exit_code, "results": results}))
    else:
        print(report)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
