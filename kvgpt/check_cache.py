"""Is my KV cache right? One call that says so, for any decoder, and names the first wrong key.

    from kvgpt.check_cache import check_cache

    report = check_cache(model)  # a model of transformers, a GPT of this kit, or an adapter
    assert not report, report  # in a pytest

    python -m kvgpt.check_cache FOLDER             a folder that transformers wrote
    python -m kvgpt.check_cache module:function    a function of yours that returns a model or an adapter

A right cache changes no logit. So we compute the logits of a few random texts without a cache, feed the same texts
through the cache in many ways, and compare. Each way differs from plain decoding in one thing. At the first wrong logit
we look at what each layer gave to its cache and got back, to find where it begins.

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

# How far off a right cache may be, in units of what rounding alone does to logits: the largest error, and the mean. The
# right caches of 44 families reached 1.5 and 1.05 in three dtypes. Most bugs are a thousand times as far off.
LARGEST, MEAN = 3, 1.25

# the causes
WRONG_VALUE = "the new value is wrong: wrong input or absolute position"
WRONG_KEY = "only the new key is wrong: position ids"
ALL_RIGHT = "all keys and values are right, so mask or heads"
WRONG_AT_ONCE = "wrong with an empty cache, too: input, positions, mask or heads of the cached path"
IN_GENERATE = "what generate() feeds, if all other ways are right: prepare_inputs_for_generation"


# -- the right logits, and how far rounding moves them -----------------------------------------------------------------


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


# -- feeding a cache ---------------------------------------------------------------------------------------------------

PADS = (0, 5, 11)  # padding tokens of each row


class Stream:
    """A batch of texts on its way through one cache. What comes of it goes into a Result."""

    def __init__(self, truth, result, rows=(0, 1, 2), pads=(0,), masked=False):
        self.truth, self.result, self.fed = truth, result, 0
        self.rows, self.pads, self.masked = torch.tensor([*rows]), torch.tensor(pads)[:, None], masked or any(pads)
        room = truth.length + 8  # some slots of a static cache stay empty
        self.cache = truth.decoder.new(result.cache, room) if result.cache else None

    def next(self, T):
        """Return the row, the position (B, T), below 0 for padding, and the mask of the next T tokens."""
        end, B = self.fed + T, len(self.rows)
        positions = (torch.arange(self.fed, end) - self.pads).expand(B, T)
        mask = (torch.arange(end) >= self.pads).expand(B, end).long() if self.masked else None
        return self.rows[:, None].expand(B, T), positions, mask

    def feed(self, count, guesses=0):
        """Feed the next `count` tokens of each row, and compare their logits. Guesses are tokens of another text."""
        decoder, result, T = self.truth.decoder, self.result, count + guesses
        rows, positions, mask = self.next(T)
        pos = positions.clamp(min=0)
        ids = self.truth.ids[rows + 3 * (torch.arange(T) >= count), pos].where(positions >= 0, self.truth.pad)
        calls = listen(self.cache, [])
        output = decoder.step(ids, self.cache, mask, pos) if result.cache else decoder.full(ids, mask, pos)
        logits, self.cache = output if isinstance(output, tuple) else (output, self.cache)
        if result.cache and self.cache is None:
            raise NotImplementedError("neither new nor step returns a cache")
        self.fed += T
        wrong = self.compare(logits[:, :count], rows[:, :count], positions[:, :count])
        if wrong and result.cache and not result.why:
            try:
                result.why, result.layer = find_cause(self, calls, T, rows[:, :count], positions[:, :count])
            except Exception as error:  # a cache that is built in another way than we know
                result.why = f"cause unknown, because {first_line(error)}"
        return self

    def compare(self, logits, rows, positions):
        """Note the errors of logits by position and then by row, and return whether one is too large."""
        places = (positions >= 0).T.nonzero(as_tuple=True)[::-1]
        logits, rows, positions = logits[places], rows[places], positions[places]
        error = self.truth.error(logits, rows, positions)
        self.result.errors.append((rows, positions, error, logits.argmax(-1) != self.truth.argmax[rows, positions]))
        return (error > self.truth.limit).any()

    def feed_until(self, end, size=1):
        while self.fed < min(end, self.truth.length):
            self.feed(min(size, end - self.fed))
        return self

    def call(self, name, *args, rows=None):
        """Call a method of the cache, after which the batch has other rows."""
        if not hasattr(self.cache, name):
            raise NotImplementedError(f"the cache has no {name}")
        try:
            new = getattr(self.cache, name)(*args)
        except AttributeError as error:  # a cache of transformers asks each of its layers
            raise NotImplementedError(first_line(error)) from None
        self.cache = self.cache if new is None else new
        self.rows = self.rows if rows is None else torch.tensor(rows)
        return self


# -- the ways ----------------------------------------------------------------------------------------------------------


def ways_for(window, L):
    """Return {name: way} for texts of L tokens. A way takes `start`, which makes a Stream."""
    half, third, n = L // 2, L // 3, min(24, L // 4)  # n single tokens are enough to see a mistake
    sizes = (3, window - 1, window + 2) if window and 4 < window < L else (3,)
    best = torch.tensor([2, 0, 0])  # the rows of the best beams
    twice = (0, 3, 1, 4, 2, 5)

    def decode(start, P=third, end=third + n, **options):
        start(**options).feed(P).feed_until(end)

    def doubling(start):
        stream = start()
        while stream.fed < L:
            stream.feed(min(stream.fed or 1, L - stream.fed))

    def generate(start, pads=(0,)):
        stream = start(masked=True, pads=pads)
        decoder = stream.truth.decoder
        if stream.result.cache != "own" or not isinstance(decoder, Transformers):
            raise NotImplementedError("we know generate() of transformers alone, with its own cache")
        rows, positions, mask = stream.next(third + n)
        ids = stream.truth.ids[rows, positions.clamp(min=0)].where(positions >= 0, stream.truth.pad)
        if stream.compare(decoder.generate(ids, mask, n + 1), rows[:, -n - 1 :], positions[:, -n - 1 :]):
            stream.result.why = IN_GENERATE

    def prefix_twice(start):
        first = start().feed(half)
        second = copy.copy(first)
        second.rows = first.rows + 3
        try:
            second.cache = copy.deepcopy(first.cache)
        except TypeError as error:
            raise NotImplementedError(f"copy.deepcopy of the cache: {first_line(error)}") from None
        for _ in range(n):
            first.feed(1)
            second.feed(1)

    def two_at_once(start):
        first, second = start(), start(rows=(5, 6, 7))
        for count in (third, *[1] * n):
            first.feed(count)
            second.feed(count)

    def rollback(start, P=half, everything=False):
        """Speculative decoding: feed a token and some guesses, then take the guesses back."""
        stream = start().feed(P)
        if getattr(stream.cache, "is_croppable", True) is False:
            raise NotImplementedError("the cache says that it cannot be cropped (is_croppable)")
        if hasattr(stream.cache, "activate_past_recording"):  # in transformers a window has to know before
            stream.call("activate_past_recording")
        steps = [(1, guesses) for guesses in (4, 1, 3, 2) * (n // 4)]
        if everything:
            stream.call("crop", -P)
            stream.fed, steps = 0, [(P, 4), *steps]
        for count, guesses in steps:
            stream.feed(count, guesses).call("crop", -guesses)
            stream.fed -= guesses

    def reset(start):
        stream = start(rows=(5, 6, 7)).feed_until(L, third).call("reset", rows=(0, 1, 2))
        stream.fed = 0
        stream.feed(third).feed_until(third + n)

    def rearrange(start, method, argument, rows):
        start().feed(half).call(method, argument, rows=rows).feed_until(half + n)

    return {
        "decode": partial(decode, end=L),
        "decode from 1 token": partial(decode, P=1, end=third),
        "decode from 2 tokens": partial(decode, P=2, end=third),
        **{f"chunks of {size}": lambda start, size=size: start().feed_until(L, size) for size in sizes},
        "chunks that double": doubling,
        "mask of ones": partial(decode, masked=True),
        "mask of ones in chunks": lambda start: start(masked=True).feed_until(L, 7),
        "left padding": partial(decode, end=third + 2 * n, pads=PADS),
        "left padding in chunks": lambda start: start(pads=PADS).feed_until(L, 3),
        "generate": generate,
        "generate with left padding": partial(generate, pads=PADS),
        "prefix used twice": prefix_twice,
        "two texts at once": two_at_once,
        "speculative rollback": rollback,
        "rollback of everything": partial(rollback, P=min(half, (window or L) - 1), everything=True),
        "reorder": partial(rearrange, method="reorder_cache", argument=best, rows=(2, 0, 0)),
        "repeat": partial(rearrange, method="batch_repeat_interleave", argument=2, rows=twice),
        "select": partial(rearrange, method="batch_select_indices", argument=best[:2], rows=(2, 0)),
        "second text after reset": reset,
        "eight rows": partial(decode, rows=range(8)),
        "one row": partial(decode, rows=(1,)),
    }


# what a second implementation of attention may compute in another way
SECOND = ("decode", "chunks of 3", "mask of ones in chunks", "left padding", "left padding in chunks")


# -- the cause ---------------------------------------------------------------------------------------------------------


def keys_and_values(given):
    given = given if isinstance(given, (tuple, list)) else ()
    return [x for x in given if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.is_floating_point()][:2]


def flat(given):
    """Return copies of keys and values, (B, heads, t, head size) -> (B, t, heads * head size)."""
    return [x.transpose(1, -2).flatten(2).to(torch.float64, copy=True) for x in given]


def listen(cache, calls, keeps=True):
    """From now on note each update of a cache in `calls`: (layer, what it got, what it gave back).

    keeps  False: the cache keeps nothing, and gives back what it gets
    """
    update = getattr(type(cache), "update", None)

    def noted(cache, *args, **kwargs):
        given = (*args, *kwargs.values())
        held = update(cache, *args, **kwargs) if keeps else keys_and_values(given)
        layer = next((x for x in given if type(x) is int), len(calls))
        calls.append((layer, keys_and_values(given), keys_and_values(held)))
        return held

    if update and hasattr(cache, "__dict__"):
        cache.update = types.MethodType(noted, cache)
    return calls


def find_cause(stream, calls, T, rows, positions):
    """Return (what is the first thing that is wrong in the updates of a step of T tokens, in which layer).

    rows and positions (B, count) are those of the tokens that are no guesses.
    """
    if not calls:
        return "cause unknown, because the cache has no method update that we could watch", None
    updates, differ, fed = stream.truth.updates, stream.truth.differ, stream.fed
    if not updates:
        return WRONG_AT_ONCE, None
    got = calls[0][1][0].size(-2)
    if (len(calls), got) != (len(updates), T):
        return f"a step has {len(calls)} updates of the cache for {got} tokens, not {len(updates)} for {T}", None
    for i, ((_, new, held), (layer, *right)) in enumerate(zip(calls, updates)):
        new, held = flat(new), flat(held)

        # does the cache give back what it got, in this step and before?
        needed, (B, slots) = min(fed, stream.truth.window or fed), held[1].shape[:2]
        if B != len(rows) or slots < needed:
            size = f"{B} rows of {slots} slots, where it needs {len(rows)} of {needed}"
            return f"the cache gave back {size}", layer
        places = (torch.arange(fed)[-slots:] - stream.pads).expand(B, -1)  # a window has dropped the others
        expected = [x[rows[:, :1], places.clamp(min=0)] for x in right]
        for x, own in zip(expected, new):
            x[:, -own.size(1) :] = own[:, -x.size(1) :]
        off = [differ(x[:, : places.size(1)], y) & (places >= 0) for x, y in zip(held, expected)]
        wrong = (off[0] | off[1]).T.nonzero()
        if len(wrong):
            slot, row = wrong[0].tolist()
            parts = [part for part in (0, 1) if off[part][row, slot]]
            given = {part: (held[part][row, slot], expected[part][row, slot]) for part in parts}
            text = rows[row, 0].item()
            name, place = "value" if 1 in parts else "key", f"row {text}, position {places[row, slot].item()}"
            owner = find_owner(stream.truth, layer, given, text)
            return f"the cache gave back a {name} that is not that of {place}, {owner}", layer

        # did the layer give it the right thing?
        real, pos = positions >= 0, positions.clamp(min=0)
        key_wrong, value_wrong = (differ(x[:, : pos.size(1)], y[rows, pos])[real].any() for x, y in zip(new, right))
        if value_wrong and i > 0:  # the layer before got what is right, and gave what is wrong
            return ALL_RIGHT, updates[i - 1][0]
        if value_wrong or key_wrong:
            return WRONG_VALUE if value_wrong else WRONG_KEY, layer
    return ALL_RIGHT, layer


def find_owner(truth, own, given, text):
    """Say whose key or value layer `own` got back. given: {0 for a key, 1 for a value: (it, the right one)}."""
    off = max((x - y).abs().max() / y.abs().max() for x, y in given.values())
    if off < 0.1:
        return f"but that one rounded, off by {off:.1g} of its size"
    if not any(x.any() for x, _ in given.values()):
        return "but zeros, as in an empty slot"
    for layer, *right in sorted(truth.updates, key=lambda update: update[0] != own):
        same = ~torch.stack([truth.differ(x, right[part]) for part, (x, _) in given.items()]).any(0)
        if same.any():
            owner = text if same[text].any() else same.any(1).int().argmax().item()
            row = f"row {owner}" if owner in (0, 1, 2, text) else "another text or a rejected guess"
            where = "" if layer == own else f"layer {layer}, "
            return f"but of {where}{row}, position {same[owner].int().argmax().item()}"
    return "but of nothing that is right, for example a rejected guess"


# -- the report --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What came of one way."""

    way: str
    cache: str | None
    attention: str | None
    status: str = "right"  # or "wrong", or "not run"
    why: str | None = None  # the cause, or the reason
    off: float | None = None  # how far the worst logit is off
    allowed: float | None = None  # how far rounding might move it
    argmaxes: int | None = None  # how many argmaxes are others
    row: int | None = None  # the text of the first wrong logit
    position: int | None = None
    layer: int | None = None
    errors: list = field(default_factory=list, repr=False)  # rows, positions, errors, whether the argmax is another

    def __str__(self):
        where = f"{self.way}, {self.place}: "
        if self.off is None:
            return where + self.why
        layer = "" if self.layer is None else f", layer {self.layer}"
        return (
            f"{where}logits off by {self.off:.2g} (allowed {self.allowed:.1g}), {self.argmaxes} other argmaxes, first "
            f"at row {self.row}, position {self.position}{layer}: {self.why}"
        )

    @property
    def place(self):
        return f"{self.cache} cache" + (f", {self.attention}" if self.attention else "")


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
        lines = [f"NOT THE CACHE'S FAULT  {self.fault}, so no cache can give the same logits"] if self.fault else []
        lines += [f"WRONG    {result}" for result in self.results if result.status == "wrong"]
        for status in ("right", "not run"):
            groups = {}
            for result in self.results:
                if result.status == status:
                    groups.setdefault((result.place, result.why), []).append(result.way)
            for (place, why), ways in groups.items():
                lines.append(f"{status:7}  {place}: {', '.join(ways)}" + (f": {why}" if why else ""))
        wrap = partial(textwrap.fill, width=120, subsequent_indent=" " * 9, break_long_words=False)
        return "\n".join([self.title, *map(wrap, lines)])


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:150]


def plot(report, file):
    """Draw how far each way is off over position, beside what is allowed. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(yscale="log", xlabel="position", ylabel="error of the worst logit", title=report.title)
    for result in report.results:
        look = dict(label=f"{result.way}, {result.place}") if result.status == "wrong" else dict(color="silver")
        for _, positions, error, _ in result.errors:
            axes.plot(positions.cpu(), error.cpu(), ".", markersize=2, **look)
            look |= dict(label=None, color=axes.lines[-1].get_color())
    allowed = max((result.allowed or 0 for result in report.results), default=0)
    axes.axhspan(0, allowed, color="green", alpha=0.15, label="allowed")
    axes.legend(fontsize="small", markerscale=5)
    figure.savefig(file)


# -- the check ---------------------------------------------------------------------------------------------------------


def examine(truth, result, way):
    """Run a way, and set its result."""
    try:
        way(partial(Stream, truth, result))
    except NotImplementedError as reason:
        result.status, result.why = "not run", first_line(reason)
        return
    except Exception as error:
        result.status, result.why = "wrong", f"raises {type(error).__name__}: {first_line(error)}"
        return

    rows, positions, error, other = (torch.cat(column) for column in zip(*result.errors))
    result.off, result.allowed, result.argmaxes = error.max().item(), truth.limit.item(), int(other.sum())
    coarse = error.mean() > MEAN * truth.rounding[rows, positions].mean()
    if result.cache == "quantized" or not (coarse or result.off > result.allowed):
        return  # a quantized cache has other logits, but must not raise
    if "left padding" in result.way and padding_matters(truth):
        result.status, result.why = "not run", "not the cache's fault: padding changes logits without a cache, too"
        return
    first = (error > min(result.allowed, 0.99 * result.off)).int().argmax()
    result.status, result.row, result.position = "wrong", rows[first].item(), positions[first].item()
    result.why = result.why or "no logit is far off, but all of them are less precise than without a cache"


def padding_matters(truth):
    """Whether left padding changes logits even without a cache. We can only ask a model of transformers."""
    result = Result("left padding", None, None)
    if isinstance(truth.decoder, Transformers):
        Stream(truth, result, pads=PADS).feed(truth.length)
    return any((error > truth.limit).any() for _, _, error, _ in result.errors)


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
    modules = [part for part in (decoder, *vars(decoder).values()) if isinstance(part, nn.Module)]
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
                    if sys.stderr.isatty():
                        print(f"\r\033[K{name}, {kind} cache", end="", file=sys.stderr, flush=True)
                    results.append(Result(name, kind, attention))
                    examine(truth, results[-1], way)
            chosen = {name: way for name, way in chosen.items() if name in SECOND}
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    for part, mode in training.items():
        part.training = mode
    title = f"{type(model).__name__}: texts of {length} tokens, up to 8 rows, {str(dtype)[6:]} on {device}"
    report = Report(title, results, fault)
    if report.exit_code == 2:
        warnings.warn(f"nothing could be checked: {report}", stacklevel=2)
    return report


# -- adapters ----------------------------------------------------------------------------------------------------------


class Transformers:
    """The adapter of a causal language model of transformers. It does what generate() does."""

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
        own, experts = (getattr(self.config, f"_{part}_implementation", None) for part in ("attn", "experts"))
        if experts:
            self.model.set_experts_implementation("eager")  # the fast kernels have no float64
        for name in (own, "eager" if own != "eager" else "sdpa"):
            try:
                self.model.set_attn_implementation(name)
                yield name, None
            except (ValueError, ImportError) as error:
                yield name, first_line(error)
        self.model.set_attn_implementation(own)
        if experts:
            self.model.set_experts_implementation(experts)

    def full(self, ids, mask=None, pos=None):
        return self.model(input_ids=ids, use_cache=False, **self.placed(mask, pos)).logits

    def new(self, kind, length):
        import transformers

        if kind == "own":  # None lets the model make one
            has_default = self.model._supports_default_dynamic_cache()
            return transformers.DynamicCache(config=self.config) if has_default else None
        if kind == "static" and self.model._can_compile_fullgraph:
            return transformers.StaticCache(config=self.config, max_cache_len=length)
        if kind == "quantized":
            return transformers.QuantizedCache("fp8", config=self.config)
        raise NotImplementedError("transformers offers none for this model (_can_compile_fullgraph)")

    def step(self, ids, cache, mask, pos):
        make_mask = getattr(self.model, "create_masks_for_generate", None)
        if make_mask and mask is not None and getattr(cache, "is_compileable", False):
            mask = make_mask(self.config, self.model.get_input_embeddings()(ids), mask, cache)
        output = self.model(input_ids=ids, use_cache=True, **{self.cache_name: cache}, **self.placed(mask, pos))
        return output.logits, getattr(output, self.cache_name, None)

    def placed(self, mask, pos):
        """Return the arguments for mask and positions. Without a mask the model has to find the positions itself."""
        given = {"attention_mask": mask, "position_ids": pos} if mask is not None else {}
        return {name: value for name, value in given.items() if name in self.takes}

    def generate(self, ids, mask, count):
        """Return the logits (B, count, V) of generate(), which we make choose the last `count - 1` tokens of `ids`."""
        import transformers

        def force(seen, scores):
            place = min(seen.size(1), ids.size(1) - 1)  # the last choice has no logits that we look at
            return nn.functional.one_hot(ids[:, place], self.vocab_size).to(scores)

        end = ids.size(1) - count + 1
        no_token = self.vocab_size  # None would end a text at the token that the model itself ends at
        settings = transformers.GenerationConfig(
            max_new_tokens=count,
            eos_token_id=no_token,
            pad_token_id=self.pad,
            output_logits=True,
            return_dict_in_generate=True,
        )
        said = self.model.generate(
            ids[:, :end],
            attention_mask=mask[:, :end],
            generation_config=settings,
            logits_processor=transformers.LogitsProcessorList([force]),
        )
        return torch.stack(said.logits, 1)


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
        results = [{key: x for key, x in vars(result).items() if key != "errors"} for result in report.results]
        print(json.dumps({**vars(report), "exit_code": report.exit_code, "results": results}))
    else:
        print(report)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
