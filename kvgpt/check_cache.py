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
    new(kind, length)              an empty cache for `length` tokens, or None if the model keeps its one cache itself.
                                   kind is "own" or "static": raise NotImplementedError, with a reason, for one that
                                   you do not have
    step(ids, cache, mask, pos)    the logits (B, T, V) of the next T tokens, which also go into the cache. pos (B, T)
                                   has their positions. mask is None, or (B, t) over all t tokens so far, where 0 is
                                   padding. If the step makes a new cache, return (logits, cache)

An nn.Module that is an attribute of the adapter runs in float64 too, which tells us what rounding does. We try crop,
reorder_cache, batch_repeat_interleave, batch_select_indices and reset if the cache has methods of these names, with the
arguments of transformers. We can watch a cache that has update(key, value, ...), if it returns all keys and values, of
the shape (B, heads, t, head size).
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

import torch
from torch import nn

# How far off a right cache may be, in units of what rounding alone does to logits: the largest error, and the mean. In
# all models and dtypes that we tried they stay below 1.0 and 0.9, and most bugs are a thousand times as far off.
LARGEST, MEAN = 3, 1.25

# the causes
WRONG_VALUE = "the new value is wrong: wrong input or absolute position"
WRONG_KEY = "only the new key is wrong: position ids"
ALL_RIGHT = "all keys and values are right, so mask or heads"


class NotRun(Exception):
    """Why a way cannot be run."""


class Found(Exception):
    """A cause, and its layer."""


# -- models ------------------------------------------------------------------------------------------------------------


WINDOWS = "sliding_window", "attention_chunk_size", "window_size", "attention_window_size"


class Transformers:
    """The adapter of a causal language model of transformers."""

    def __init__(self, model):
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.vocab_size = model.get_output_embeddings().weight.size(0)
        self.context = getattr(self.config, "max_position_embeddings", None)
        sizes = (getattr(self.config, name, None) for name in WINDOWS)
        self.window = next(filter(None, sizes), None)
        pad = getattr(self.config, "pad_token_id", None)
        self.pad = pad if isinstance(pad, int) and 0 <= pad < self.vocab_size else 0
        self.takes = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in ("past_key_values", "cache_params") if name in self.takes), None)

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

        if self.cache_name is None:
            raise NotImplementedError("its forward takes no past_key_values")
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
        if (
            make_mask and mask is not None and getattr(cache, "is_compileable", False)
        ):  # what generate() does with a static cache
            mask = make_mask(self.config, self.model.get_input_embeddings()(ids), mask, cache)
        output = self.run(input_ids=ids, use_cache=True, **{self.cache_name: cache}, **self.placed(mask, pos))
        if getattr(output, self.cache_name, None) is None:
            raise NotImplementedError(f"its forward returns no {self.cache_name}")
        return output.logits, output[self.cache_name]

    def placed(self, mask, pos):
        """Return the arguments for mask and positions. Without a mask the model has to find the positions itself."""
        given = {"attention_mask": mask, "position_ids": pos} if mask is not None else {}
        return {name: value for name, value in given.items() if name in self.takes}


class Kit:
    """The adapter of this kit's GPT, in which several modules hold the one cache."""

    def __init__(self, model):
        self.model, self.vocab_size, self.context = model, model.config.vocab_size, model.config.block_size

    def full(self, ids):
        return self.model(ids)[0]

    def new(self, kind, length):
        if kind != "own":
            raise NotImplementedError("the cache of this GPT is static already")
        cache = type(self.model.cache)(self.model.config.n_layer, self.model.config.block_size)
        cache.crop, cache.reset = keep_all, cache.clear  # pos says how much of the cache is valid
        return cache

    def step(self, ids, cache, mask, pos):
        if mask is not None and not mask.all():
            raise NotImplementedError("this GPT takes no mask, because it pads on the right")
        holders = [module for module in self.model.modules() if hasattr(module, "cache")]
        own = self.model.cache
        try:
            for module in holders:
                module.cache = cache
            return self.model(ids, pos=pos)[0]
        finally:
            for module in holders:
                module.cache = own


def keep_all(count):
    """Stand in for crop where nothing has to be removed."""


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


def revealing(dtype, draw):
    """Return a change to weights in which no bug can hide.

    A norm with weights of exactly 1 may be applied twice, and a bias of 0 forgotten, so we jitter what has one
    dimension. The matrices of an untrained model are so small that attention sees all positions alike, so we scale
    them up.
    """

    def change(tensor):
        data = tensor.data
        if isinstance(tensor, nn.Parameter) and data.dim() < 2:
            data = data + 0.1 * normal(data, draw)
        elif isinstance(tensor, nn.Parameter):
            data = data * max(1.0, 1 / (data.size(-1) ** 0.5 * data.float().std().item() + 1e-6))
        return data.to(dtype)

    return change


def normal(tensor, draw):
    """Return random numbers for a tensor, the same on every device."""
    return torch.randn(tensor.shape, generator=draw, device="cpu").to(tensor)


# -- the right logits, and how far rounding moves them -----------------------------------------------------------------


class Truth:
    """Texts, their logits without a cache, and what rounding does to these.

    Most ways feed texts 0 to 2. Texts 3 to 5 begin like them and differ after the prefix, and two more make a batch of
    eight. Some tokens have the padding id, because a cache must not take them for padding.
    """

    def __init__(self, decoder, modules, length, seed, dtype):
        draw = torch.Generator().manual_seed(seed)
        self.decoder, self.length, self.dtype, self.watch = decoder, length, dtype, None
        self.pad, self.window = getattr(decoder, "pad", 0), getattr(decoder, "window", None)
        ids = torch.randint(decoder.vocab_size, (8, length), generator=draw, device="cpu")
        ids[torch.rand(ids.shape, generator=draw, device="cpu") < 0.05] = self.pad
        ids[3:6, : length // 2] = ids[:3, : length // 2]
        self.ids = torch.tensor(ids.tolist())  # on the device

        # the right logits, in float64 if the model can
        self.modules = modules if sum(p.numel() for module in modules for p in module.parameters()) < 1e9 else []
        try:
            with self.exactly():
                self.logits = decoder.full(self.ids).double()
                self.fault = self.find_dependence(1e-4 if self.modules else 300 * torch.finfo(dtype).eps)
        except RuntimeError:
            if not self.modules:
                raise
            self.modules = []  # an operation that has no float64
            self.logits = decoder.full(self.ids).double()
            self.fault = self.find_dependence(300 * torch.finfo(dtype).eps)

        # what rounding does: other shapes, and other last digits of some weights
        plain, eps = decoder.full(self.ids), torch.finfo(dtype).eps
        self.argmax = plain.argmax(-1)
        least = self.logits.std() * eps * (1 if modules else 64)  # a guess for weights that we cannot change
        self.rounding = self.error(plain, slice(8), slice(length)).clamp(min=least)
        for rows, end in ((slice(3), length), (slice(1), length), (slice(1, 2), length), (slice(3), 2 * length // 3)):
            error = self.error(decoder.full(self.ids[rows, :end]), rows, slice(end))
            self.rounding[rows, :end] = self.rounding[rows, :end].maximum(error)
        self.rounding = self.rounding.maximum(self.nudged(modules, eps / 8, draw))
        # A router of experts that is near a tie makes single positions jump, so larger nudges set the limit.
        limit = self.rounding.maximum(self.nudged(modules, eps, draw))
        self.limit = LARGEST * limit.clamp(min=limit.flatten().quantile(0.95))

    def nudged(self, modules, size, draw):
        """Return the largest errors, without a cache, of three models whose weights differ a little."""
        errors = []
        for _ in range(3):
            with changed(modules, lambda tensor: tensor.data * (1 + size * normal(tensor, draw))):
                errors.append(self.error(self.decoder.full(self.ids), slice(8), slice(self.length)))
        return torch.stack(errors).amax(0)

    def exactly(self):
        return changed(self.modules, lambda tensor: tensor.data.double())

    def error(self, logits, rows, positions):
        """Return the error of the worst logit at each position. NaN counts as infinite."""
        return (logits.double() - self.logits[rows, positions]).abs().amax(-1).nan_to_num(torch.inf, torch.inf)

    def find_dependence(self, tolerance):
        """Return a sentence if logits without a cache depend on what no cache can know: later tokens, other rows."""
        end, other = self.length // 2, self.ids.clone()
        other[:, end:] = other[:, end:].roll(1, 0)
        for what, ids in (
            ("when later tokens change", other),
            ("when later tokens are left out", self.ids[:, :end]),
            ("when other rows are left out", self.ids[:1]),
        ):
            off = self.error(self.decoder.full(ids)[:, :end], slice(len(ids)), slice(end)).amax(0)
            wrong = (off > tolerance * self.logits.std()).nonzero()
            if len(wrong):
                return f"logits without a cache change by {off.max():.2g} {what}, from position {wrong[0].item()} on"
        return None if self.logits.isfinite().all() else "logits without a cache are not finite"


# -- feeding a cache ---------------------------------------------------------------------------------------------------

PADS = (0, 5, 11)  # padding tokens of each row


class Stream:
    """A batch of texts on its way through one cache.

    kind    the kind of cache; None feeds the model without one
    watch   None, or a Watch that looks for the cause
    errors  of all logits so far, in order: (error, limit, rounding, other argmax, row, position), tensors
    rows    the text that each row of the batch takes its tokens from
    pads    how many padding tokens each row begins with, or None
    masked  whether to pass a mask where nothing is padding
    """

    def __init__(self, truth, kind, watch, errors, rows=(0, 1, 2), pads=None, masked=False):
        self.truth, self.kind, self.watch, self.errors, self.fed = truth, kind, watch, errors, 0
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
        if self.watch:
            self.watch.begin(self.cache)
        output = truth.decoder.step(ids, self.cache, mask, pos) if self.kind else truth.decoder.full(ids, mask, pos)
        logits, self.cache = output if isinstance(output, tuple) else (output, self.cache)
        self.fed += T

        rows, pos, real, logits = rows[:, :count], pos[:, :count], real[:, :count], logits[:, :count]
        error, limit = truth.error(logits, rows, pos), truth.limit[rows, pos]
        if self.watch:
            self.watch.end(self, positions, count, bool((error > limit)[real].any()))
        order = real.T.nonzero(as_tuple=True)[::-1]  # by position, then by row
        other = logits.argmax(-1) != truth.argmax[rows, pos]
        self.errors.append([x[order] for x in (error, limit, truth.rounding[rows, pos], other, rows, pos)])

    def feed_until(self, end, size=1):
        while self.fed < min(end, self.truth.length):
            self.feed(min(size, end - self.fed))

    def must_have_cache(self):
        if self.cache is None:
            raise NotRun("new returned None, so the model has one cache of its own")

    def call(self, name, *args):
        """Call a method of the cache."""
        method = getattr(self.cache, name, None)
        if method is None:
            raise NotRun(f"the cache has no {name}")
        try:
            new = method(*args)
        except AttributeError as error:  # a cache of transformers asks each of its layers
            raise NotRun(first_line(error)) from None
        self.cache = self.cache if new is None else new


# -- the ways ----------------------------------------------------------------------------------------------------------
# Each takes `start`, which makes a Stream. P is the length of a prefix, and n a number of single tokens that is enough.


def decode(start, P, end, **options):
    """A prefill, then token after token."""
    stream = start(**options)
    stream.feed(P)
    stream.feed_until(end)


def left_padding(start, P, n, L):
    """Rows of different lengths that end together."""
    stream = start(pads=PADS)
    stream.feed(P)
    stream.feed_until(P + 2 * n)
    stream.feed_until(L, size=7)


def prefix_twice(start, P, n):
    """Two texts with one prefix, which is computed once. Then both go on in turn."""
    first = start()
    first.feed(P)
    first.must_have_cache()
    second = copy.copy(first)
    second.rows = first.rows + 3
    try:
        second.cache = copy.deepcopy(first.cache)
    except TypeError as error:
        raise NotRun(f"copy.deepcopy of the cache: {first_line(error)}") from None
    for _ in range(n):
        first.feed(1)
        second.feed(1)


def two_at_once(start, P, n):
    """Two caches of one model, in turn: they must not share anything."""
    streams = start(), start(rows=(5, 6, 7))
    for count in (P, *[1] * n):
        for stream in streams:
            stream.feed(count)
            stream.must_have_cache()


def rollback(start, P, n, everything=False):
    """Speculative decoding: feed a token and some guesses, then take the guesses back."""
    stream = start()
    stream.feed(P)
    if getattr(stream.cache, "is_croppable", True) is False:
        raise NotRun("the cache says that it cannot be cropped (is_croppable)")
    records = hasattr(stream.cache, "activate_past_recording")
    if records:  # in transformers a window has to know before, and wants a crop after every step from then on
        stream.call("activate_past_recording")
    if everything:
        stream.call("crop", -P)
        stream.fed = 0
        stream.feed(P)
        if records:
            stream.call("crop", 0)
    for guesses in (4, 1, 3, 2) * (n // 4):
        stream.feed(1, guesses)
        stream.call("crop", -guesses)
        stream.fed -= guesses


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
        "left padding": lambda start: left_padding(start, third, n, L),
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


class Watch:
    """Looks at every update of a cache, to find the first that is wrong.

    right      per update of a forward: keys and values (8, L, size), and the layer. We get them from a forward whose
               cache keeps nothing and gives back what it gets
    tolerance  per update, for keys and for values: a few times what rounding does to them
    """

    def __init__(self, truth):
        self.truth, eps = truth, torch.finfo(truth.dtype).eps
        with truth.exactly():
            self.right = self.record()[1]
        logits, rounded = self.record()
        self.tolerance = [
            [2 * LARGEST * (a - b).abs().max().clamp(min=eps * a.abs().max()) for a, b in zip(exact[:2], near[:2])]
            for exact, near in zip(self.right, rounded)
        ]
        if (truth.error(logits, slice(8), slice(truth.length)) > truth.limit).any():
            raise Found(*self.first_wrong_module())

    def record(self, seen=None):
        """Feed all texts at once. Returns the logits, and the updates as in `right`. Appends each to `seen`, too."""
        ids, calls = self.truth.ids, []
        cache = self.truth.decoder.new("own", ids.size(1))
        if not hasattr(type(cache), "update"):
            raise NotRun("the cache has no update(key, value, ...) that we could watch")

        def keep_nothing(cache, *args, **kwargs):
            given = (*args, *kwargs.values())
            layer = next((x for x in given if type(x) is int), len(calls))
            calls.append((*flat(given), layer))
            if seen is not None:
                seen.append(layer)
            return keys_and_values(given)

        cache.update = types.MethodType(keep_nothing, cache)
        pos = torch.arange(ids.size(1)).expand_as(ids)
        output = self.truth.decoder.step(ids, cache, None, pos)
        if not calls:
            raise NotRun("no layer gives the cache keys and values")
        return output[0] if isinstance(output, tuple) else output, calls

    def first_wrong_module(self):
        """Return (cause, layer) if logits are wrong as soon as there is a cache, even an empty one that keeps nothing.

        Then its keys prove nothing. So we compare what the modules give, with such a cache and without.
        """
        seen = []
        leaves = [part for module in self.truth.modules for part in module.modules() if not [*part.children()]]
        hooks = [part.register_forward_hook(lambda part, args, output: seen.append(output)) for part in leaves]
        try:
            self.truth.decoder.full(self.truth.ids)
            right = iter(seen.copy())
            seen.clear()
            self.record(seen)
        finally:
            for hook in hooks:
                hook.remove()
        layer = None
        for output in seen:
            if isinstance(output, int):
                layer = output
            else:
                pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (output, next(right, None))))
                if not all(torch.equal(x, y) for x, y in pairs if isinstance(x, torch.Tensor)):
                    rotary = isinstance(output, tuple)  # cosines and sines
                    return (WRONG_KEY if rotary else WRONG_VALUE, 0) if layer is None else (ALL_RIGHT, layer)
        return ALL_RIGHT, layer

    def begin(self, cache):
        """Called before a step."""
        self.calls, update = [], type(cache).update

        def recorded(cache, *args, **kwargs):
            new = flat((*args, *kwargs.values()))
            held = update(cache, *args, **kwargs)
            self.calls.append((new, flat(held)))
            return held

        cache.update = types.MethodType(recorded, cache)  # a bound method, so that copy.deepcopy binds it to the copy

    def end(self, stream, positions, count, wrong):
        """Called after a step that fed `positions`, of which `count` are no guesses. Raises Found."""
        rows, pads, fed, T = stream.rows[:, None], stream.pads[:, None], stream.fed, positions.size(1)
        if len(self.calls) > len(self.right):
            raise Found(f"{WRONG_VALUE} (a step updates the cache {len(self.calls)} times)", self.right[0][2])
        for i, (new, held) in enumerate(self.calls):
            layer = self.right[i][2]
            if new[1].shape[:2] != positions.shape:
                raise Found(f"{WRONG_VALUE} ({new[1].size(1)} tokens where {T} were fed)", layer)

            # does the cache give back what it got, in this step and before?
            needed = min(fed, self.truth.window or fed)
            if len(held[1]) != len(rows) or held[1].size(1) < needed:
                size = f"{len(held[1])} rows of {held[1].size(1)} slots, where it needs {len(rows)} of {needed}"
                raise Found(f"the cache gave back {size}", layer)
            slots = torch.arange(max(0, fed - held[1].size(1)), fed)  # a window has dropped the others
            places = (slots - pads).expand(len(rows), -1)
            expected = [right[rows, places.clamp(min=0)] for right in self.right[i][:2]]
            for x, own in zip(expected, new):
                x[:, -min(T, len(slots)) :] = own[:, -len(slots) :]
            off = [
                ((x[:, : len(slots)] - y).abs().amax(-1) > limit) & (places >= 0)
                for x, y, limit in zip(held, expected, self.tolerance[i])
            ]
            first = (off[0] | off[1]).T.nonzero()
            if len(first):
                slot, row = first[0].tolist()
                name = "value" if off[1][row, slot] else "key"
                whose = self.whose(i, [x[row, slot] for x in held], [x[row, slot] for x in expected], stream.rows, row)
                place = f"row {row}, position {places[row, slot].item()}"
                raise Found(f"the cache gave back a {name} that is not that of {place}, {whose}", layer)

            # did the layer give it the right thing? We do not ask about guesses.
            real, pos = positions[:, :count] >= 0, positions[:, :count].clamp(min=0)
            key_off, value_off = (
                ((x[:, :count] - right[rows, pos]).abs().amax(-1) * real).max() / limit
                for x, right, limit in zip(new, self.right[i], self.tolerance[i])
            )
            if key_off > 1 and value_off <= 1 and (i == 0 or key_off > 30 * value_off):
                raise Found(WRONG_KEY, layer)
            if key_off > 1 or value_off > 1:  # the layer before got what is right, and gave what is wrong
                raise Found(*(ALL_RIGHT, self.right[i - 1][2]) if i else (WRONG_VALUE, layer))
        if len(self.calls) < len(self.right):
            raise Found(f"the cache got the keys of {len(self.calls)} layers only", self.right[len(self.calls)][2])
        if wrong:
            raise Found(ALL_RIGHT, self.right[-1][2])

    def whose(self, i, given, expected, texts, row):
        """Say whose (key, value) the cache gave back in place of the expected one."""
        off = [(x - y).abs().max() / y.abs().max() for x, y in zip(given, expected)]
        if max(off) < 0.1:
            return f"but that one rounded, off by {max(off):.1g} of its size"
        if not any(x.any() for x in given):
            return "but zeros, as in an empty slot"
        texts = texts.tolist()
        for parts in ((0, 1), (1,), (0,)):  # both of one token, or one of them
            for j in (i, *range(len(self.right))):
                for text in (texts[row], *texts, *range(8)):
                    same = torch.ones(self.truth.length, dtype=torch.bool)
                    for part in parts:
                        off = (self.right[j][part][text] - given[part]).abs().amax(-1)
                        same &= off <= self.tolerance[j][part]
                    if same.any():
                        whose = f"what was row {text}, " if text < 3 else "another text or a rejected guess, "
                        if text in texts:
                            whose = "" if text == texts[row] else f"row {texts.index(text)}, "
                        layer = "" if j == i else f"layer {self.right[j][2]}, "
                        return f"but of {layer}{whose}position {same.int().argmax().item()}"
        return "but of nothing that is right, for example a rejected guess"


def keys_and_values(given):
    return [x for x in given if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.is_floating_point()][:2]


def flat(given):
    """Return copies of the keys and values among `given`, (B, heads, t, head size) -> (B, t, heads * head size)."""
    return [x.transpose(1, -2).flatten(2).to(torch.float64, copy=True) for x in keys_and_values(given)]


def find_cause(truth, kind, way):
    """Feed once more and watch. Returns (cause, layer or None)."""
    try:
        truth.watch = truth.watch or Watch(truth)
        way(lambda **options: Stream(truth, kind, truth.watch, [], **options))
    except Found as found:
        return found.args
    except Exception as reason:  # a cache that is built in another way than we know
        return f"cause unknown, because {first_line(reason)}", None
    return ALL_RIGHT, None


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
    row: int | None = None  # the first wrong logit
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
        lines, groups = [self.title], {}
        if self.fault:
            lines += wrapped("NOT THE CACHE'S FAULT", f"{self.fault}, so no cache can give the same logits")
        for result in self.results:
            where = f"{result.cache} cache" + (f", {result.attention}" if result.attention else "")
            if result.status != "wrong":
                groups.setdefault((result.status, where, result.why), []).append(result.way)
                continue
            text = f"{result.way}, {where}: "
            if result.off is not None:
                text += (
                    f"logits off by {result.off:.2g} (allowed {result.allowed:.1g}), {result.argmaxes} other argmaxes, "
                )
                text += f"first at row {result.row}, position {result.position}"
                text += ": " if result.layer is None else f", layer {result.layer}: "
            lines += wrapped("WRONG", text + result.why)
        for (status, where, why), ways in sorted(groups.items(), key=lambda group: group[0][0] != "right"):
            lines += wrapped(status, f"{where}: {', '.join(ways)}" + (f": {why}" if why else ""))
        return "\n".join(lines)


def wrapped(status, text):
    return textwrap.wrap(text, 120, initial_indent=f"{status:7}  ", subsequent_indent=" " * 9, break_long_words=False)


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def plot(report, file):
    """Draw how far each way is off over position, beside what is allowed. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(yscale="log", xlabel="position", ylabel="error of the worst logit", title=report.title)
    for result in sorted(
        (result for result in report.results if result.drift), key=lambda result: result.status == "wrong"
    ):
        look = dict(label=f"{result.way}, {result.cache} cache") if result.status == "wrong" else dict(color="silver")
        axes.plot(*zip(*result.drift), ".", markersize=2, **look)
    axes.axhspan(0, max((result.allowed or 0 for result in report.results), default=0), color="green", alpha=0.15)
    if report:
        axes.legend(fontsize="small", markerscale=5)
    figure.savefig(file)


# -- the check ---------------------------------------------------------------------------------------------------------


def examine(truth, kind, attention, name, way):
    """Return the Result of one way."""
    result, errors = Result(name, kind, attention), []
    try:
        way(lambda **options: Stream(truth, kind, None, errors, **options))
    except (NotRun, NotImplementedError) as reason:
        result.status, result.why = "not run", first_line(reason)
        return result
    except Exception as error:
        result.status, result.why = "wrong", f"raises {type(error).__name__}: {first_line(error)}"
        return result
    error, limit, rounding, other, rows, positions = (torch.cat(column) for column in zip(*errors))
    worst = (error / limit).argmax()
    result.off, result.allowed, result.argmaxes = error[worst].item(), limit[worst].item(), int(other.sum())
    result.drift = list(zip(positions.tolist(), error.tolist()))
    if kind == "quantized" or (error[worst] <= limit[worst] and error.mean() <= MEAN * rounding.mean()):
        return result  # a quantized cache has other logits, but must not raise

    if name.startswith("left padding") and "mask" in inspect.signature(truth.decoder.full).parameters:
        alone = []
        Stream(truth, None, None, alone, pads=PADS).feed(truth.length)
        if (alone[0][0] > alone[0][1]).any():
            result.status, result.why = "not run", "not the cache's fault: padding changes logits without a cache, too"
            return result
    first = (error > limit).int().argmax() if error[worst] > limit[worst] else worst
    result.status, result.row, result.position = "wrong", rows[first].item(), positions[first].item()
    result.why, result.layer = find_cause(truth, kind, way)
    return result


def check_cache(model, length=None, dtype=torch.float32, device=None, caches=("own", "static"), modes=None, seed=0):
    """Return a Report, which is true if the cache of `model` is wrong.

    model   a model of transformers, a GPT of this kit, or an adapter. Its weights are others during the check
    length  tokens per text. None: 300, or three sliding windows, and at most the context or 1024
    dtype   of weights and cache; device: None leaves the model where it is
    caches  the kinds of cache to ask for: "own", "static" and "quantized", of which we see only whether it raises
    modes   only the ways whose name contains one of these words
    Raises TypeError for another object, and ValueError for a length or words that do not work.
    """
    decoder = adapter_of(model)
    context, window = getattr(decoder, "context", None), getattr(decoder, "window", None)
    length = length or min(max(300, 3 * (window or 0)), context or 1024, 1024)
    if not 24 <= length <= (context or length):
        raise ValueError(
            f"length={length}: must be at least 24" + (f" and at most the context, {context}" if context else "")
        )
    names = [name for name in ways_for(window, length) if any(word in name for word in modes or [""])]
    if not names:
        raise ValueError(f"modes={modes!r}: the ways are {', '.join(ways_for(window, length))}")

    holders = (decoder, *getattr(decoder, "__dict__", {}).values())
    modules = [holder for holder in holders if isinstance(holder, nn.Module)]
    training = {part: part.training for module in modules for part in module.modules()}
    home = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
    device, results, fault = torch.device(device or home), [], None
    if window and length < 2 * window:
        results.append(
            Result(f"past the window of {window}", "any", None, "not run", f"takes a length of {3 * window}")
        )
    try:
        for module in modules:
            module.eval().to(device)
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad(), torch.device(device), changed(modules, revealing(dtype, noise)):
            attentions = decoder.attentions() if hasattr(decoder, "attentions") else [(None, None)]
            for i, (attention, why_not) in enumerate(attentions):
                if why_not:
                    results.append(Result("every way", "any", attention, "not run", why_not))
                    continue
                truth = Truth(decoder, modules, length, seed, dtype)
                fault = fault or truth.fault
                for kind in caches if not truth.fault else ():
                    try:
                        decoder.new(kind, length)
                    except Exception as reason:
                        results.append(Result("every way", kind, attention, "not run", first_line(reason)))
                        continue
                    for name in names:
                        if i == 0 or name in SECOND:
                            show(f"{name}, {kind} cache")
                            way = ways_for(window, length)[name]
                            results.append(examine(truth, kind, attention, name, way))
    finally:
        show("")
        for part, mode in training.items():
            part.training = mode
        for module in modules:
            module.to(home)
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
    add("--caches", nargs="+", choices=("own", "static", "quantized"), default=("own", "static"))
    add("--length", type=int, help="tokens per text (default: 300, or three sliding windows, at most the context)")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="FILE", help="draw how far each way is off over position")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        model = load(args.model)
        dtype = getattr(torch, args.dtype)
        report = check_cache(model, args.length, dtype, args.device, args.caches, args.modes, args.seed)
        if args.plot:
            plot(report, args.plot)
    except Exception as error:
        if isinstance(error, ImportError) and error.name in ("transformers", "matplotlib"):
            parser.exit(2, f"check_cache: {error.name} is not installed: pip install {error.name}\n")
        parser.exit(2, f"check_cache: {args.model}: {type(error).__name__}: {first_line(error)}\n")
    if args.json:
        content = dict(exit_code=report.exit_code, title=report.title, fault=report.fault)
        content["results"] = [{**vars(result), "drift": None} for result in report.results]
        print(json.dumps(content))
    else:
        print(report)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
