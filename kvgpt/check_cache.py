"""Is my KV cache right? One call that says so, for any decoder, and names the first wrong key.

    from kvgpt.check_cache import check_cache

    report = check_cache(model)  # a model of transformers, a GPT of this kit, or an adapter
    assert not report, report  # in a pytest

    python -m kvgpt.check_cache FOLDER              a folder that transformers wrote
    python -m kvgpt.check_cache module:function     a function of yours that returns the model or the adapter

A cache is right if it changes no logit. So we compute the logits of a few random texts once without a cache, then feed
the same texts through the cache in many ways, and compare every logit. Each way deviates from the plainest in one thing.

The file needs only torch, so you can copy it. An adapter for a decoder of your own is an object with

    vocab_size                    the number of token ids
    full(ids)                     the logits (B, T, V) of ids (B, T), without a cache
    new(kind, length)             an empty cache with room for `length` tokens. kind is "own" or "static"; for a kind that
                                  you do not have, raise NotImplementedError with a reason
    step(ids, cache, mask, pos)   the logits (B, T, V) of the next T tokens of each row, which also go into the cache. If
                                  this makes a new cache, return (logits, cache). pos (B, T) are the positions of the
                                  tokens in their texts. mask is None, or (B, t) over all t tokens so far: 0 is padding

Keep your nn.Module as an attribute of the adapter. Then we can run it in float64 too, to see what rounding does. If your
cache has methods with the names and arguments that transformers uses (crop, reorder_cache, batch_repeat_interleave,
batch_select_indices, reset), we try them. If it has update(key, value, ...), which returns all keys and values so far,
each (B, heads, t, head size), we watch it to find the cause of a wrong logit.
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

# What went wrong first, from what a layer gives to its cache and gets back from it.
WRONG_VALUE = "the new value is wrong: wrong input or absolute position"
WRONG_KEY = "only the new key is wrong: position ids"
ALL_RIGHT = "all keys and values are right, so mask or heads"


class NotRun(Exception):
    """A way that this model or cache does not offer, with the reason."""


class Found(Exception):
    """The cause of a wrong logit."""


# -- models ------------------------------------------------------------------------------------------------------------


class Transformers:
    """The adapter of a causal language model of transformers."""

    def __init__(self, model):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size = model.get_output_embeddings().weight.size(0)
        self.context = getattr(self.config, "max_position_embeddings", None)
        windows = (
            getattr(self.config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")
        )
        self.window = next((window for window in windows if window), None)
        pad = getattr(self.config, "pad_token_id", None)
        self.pad = pad if isinstance(pad, int) and 0 <= pad < self.vocab_size else 0
        self.static = False
        self.takes = inspect.signature(model.forward).parameters
        names = [name for name in ("past_key_values", "cache_params") if name in self.takes]
        self.cache_name = names[0] if names else None

    def full(self, ids, mask=None, pos=None):
        return self.model(input_ids=ids, use_cache=False, **self.placed(mask, pos)).logits

    def new(self, kind, length):
        import transformers

        if self.cache_name is None:
            raise NotImplementedError("its forward takes no past_key_values")
        self.static = kind == "static"
        if kind == "static":
            if not getattr(self.model, "_can_compile_fullgraph", True):
                raise NotImplementedError(
                    "transformers says that this model takes no static cache (_can_compile_fullgraph)"
                )
            return transformers.StaticCache(config=self.model.config, max_cache_len=length)
        if kind == "quantized":
            try:
                return transformers.QuantizedCache("fp8", config=self.model.config)
            except (ValueError, ImportError) as error:
                raise NotImplementedError(str(error)) from None
        return transformers.DynamicCache(config=self.model.config)

    def attentions(self):
        """Switch between the implementations of attention, and yield the name of each."""
        own = self.config._attn_implementation
        for name in (own, "eager" if own != "eager" else "sdpa"):
            try:
                self.model.set_attn_implementation(name)
            except (ValueError, ImportError):
                continue
            yield name
        self.model.set_attn_implementation(own)

    def step(self, ids, cache, mask, pos):
        if mask is not None and self.static and hasattr(self.model, "create_masks_for_generate"):
            embeds = self.model.get_input_embeddings()(ids)
            mask = self.model.create_masks_for_generate(self.config, embeds, mask, cache)
        caching = {self.cache_name: cache, "use_cache": True}
        output = self.model(input_ids=ids, **caching, **self.placed(mask, pos))
        return output.logits, getattr(output, self.cache_name)

    def placed(self, mask, pos):
        """Return the arguments for mask and positions. Without a mask the model has to find the positions by itself."""
        given = {} if mask is None else {"attention_mask": mask, "position_ids": pos}
        return {name: value for name, value in given.items() if name in self.takes}


class Kit:
    """The adapter of this kit's GPT, whose one cache is an attribute of several modules."""

    def __init__(self, model):
        self.model, self.vocab_size, self.context = model, model.config.vocab_size, model.config.block_size

    def full(self, ids):
        return self.model(ids)[0]

    def new(self, kind, length):
        if kind != "own":
            raise NotImplementedError("the cache of this GPT is static already")
        cache = type(self.model.cache)(self.model.config.n_layer, self.model.config.block_size)
        cache.reset = cache.clear
        cache.crop = keep_everything  # the next pos says how much of the cache is still valid
        return cache

    def step(self, ids, cache, mask, pos):
        if mask is not None and not mask.all():
            raise NotImplementedError("this GPT takes no mask, because it pads on the right")
        users = [module for module in self.model.modules() if hasattr(module, "cache")]
        kept = [module.cache for module in users]
        try:
            for module in users:
                module.cache = cache
            return self.model(ids, pos=pos)[0]
        finally:
            for module, its_own in zip(users, kept):
                module.cache = its_own


def keep_everything(count):
    pass


def adapter_of(model):
    if all(hasattr(model, name) for name in ("full", "new", "step", "vocab_size")):
        return model
    if hasattr(model, "get_output_embeddings") and hasattr(model, "config"):
        if model.get_output_embeddings() is None:
            raise TypeError(f"{type(model).__name__} has no language model head: load it with AutoModelForCausalLM")
        return Transformers(model)
    if hasattr(model, "clear_kv_cache") or hasattr(getattr(model, "config", None), "block_size"):
        return Kit(model)
    raise TypeError(
        f"{type(model).__name__} is no model of transformers, no GPT of this kit, and has no full, new, step"
    )


@contextmanager
def prepared(decoder, dtype, device, seed):
    """Lend the decoder's modules for the check: in eval mode, in `dtype` on `device`, with weights that hide no bug."""
    holders = [decoder, *getattr(decoder, "__dict__", {}).values()]
    modules = [holder for holder in holders if isinstance(holder, nn.Module)]
    kept = weights_of(modules)
    modes = [(module, module.training) for root in modules for module in root.modules()]
    home = next((tensor.device for tensor in kept), torch.device("cpu"))
    noise = torch.Generator().manual_seed(seed)
    try:
        for module in modules:
            module.eval().to(device or home)
        with torch.no_grad():
            for tensor in kept:
                if tensor.is_floating_point():
                    data = revealing(tensor.data, noise) if isinstance(tensor, nn.Parameter) else tensor.data
                    tensor.data = data.to(dtype)
            yield modules, device or home
    finally:
        for tensor, data in kept.items():
            tensor.data = data
        for module in modules:
            module.to(home)
        for module, training in modes:
            module.training = training


def weights_of(modules):
    """Return {tensor: its data} of all parameters and buffers."""
    return {tensor: tensor.data for module in modules for tensor in (*module.parameters(), *module.buffers())}


def revealing(data, noise):
    """Return weights in which no bug can hide.

    A norm whose weights are all 1 may be applied twice, and a bias of 0 may be forgotten, so we jitter what has one
    dimension. The matrices of a new model are so small that attention looks at all positions alike, so we scale them up
    to what keeps the size of their input.
    """
    if data.dim() < 2:
        return data + 0.1 * torch.randn(data.shape, generator=noise).to(data)
    return data * max(1.0, float(data.size(-1) ** -0.5 / data.float().std().clamp(min=1e-6)))


@contextmanager
def in_float64(modules):
    kept = weights_of(modules)
    try:
        for tensor, data in kept.items():
            tensor.data = data.double() if data.is_floating_point() else data
        yield
    finally:
        for tensor, data in kept.items():
            tensor.data = data


# -- the right logits, and how far rounding moves them -----------------------------------------------------------------


class Truth:
    """Texts, their logits without a cache, and what rounding does to these.

    Texts 0 to 2 are those that most ways feed. Texts 3 to 5 begin like them and go another way after the prefix. Two more
    make up a batch of eight. Some tokens are the padding id, because a cache must not take these for padding.
    """

    def __init__(self, decoder, modules, length, seed, dtype, device):
        draw = torch.Generator().manual_seed(seed)
        self.length, self.prefix, self.pad, self.dtype = length, length // 2, getattr(decoder, "pad", 0), dtype
        ids = torch.randint(decoder.vocab_size, (8, length), generator=draw)
        ids[torch.rand(ids.shape, generator=draw) < 0.05] = self.pad
        ids[3:6, : self.prefix] = ids[:3, : self.prefix]
        self.ids = ids.to(device)

        # logits without a cache, in float64 if we can
        self.blame = None
        size = sum(p.numel() for module in modules for p in module.parameters())
        self.exact = bool(modules) and size < 1e9
        if self.exact:
            with in_float64(modules):
                self.logits = decoder.full(self.ids).double()
                self.blame = self.find_dependence(decoder, 1e-4)
        else:
            self.logits = decoder.full(self.ids).double()
            self.blame = self.find_dependence(decoder, 300 * torch.finfo(dtype).eps)
        if self.blame or not self.logits.isfinite().all():
            self.blame = self.blame or "logits without a cache are not finite"
            return

        # the same in `dtype` and in other shapes: the largest error of each position is what rounding may do
        plain = decoder.full(self.ids)
        self.argmax = plain.argmax(-1)
        scale = self.logits.std()
        self.rounding = torch.maximum(self.error(plain, slice(None), slice(None)), scale * torch.finfo(dtype).eps)
        for rows, end in (
            (slice(0, 3), length),
            *((slice(i, i + 1), length) for i in range(3)),
            (slice(0, 3), 3 * length // 4),
        ):
            some = self.error(decoder.full(self.ids[rows, :end]), rows, slice(0, end))
            self.rounding[rows, :end] = torch.maximum(self.rounding[rows, :end], some)

    def error(self, logits, rows, positions):
        """Return the largest error of the logits at each position. NaN counts as infinite."""
        error = (logits.double() - self.logits[rows, positions]).abs().amax(-1)
        return torch.where(error.isnan(), torch.inf, error)

    def padding_is_wrong_without_cache(self, decoder, limit):
        """Return whether left padding alone changes logits, in a forward without a cache."""
        if "mask" not in inspect.signature(decoder.full).parameters:
            return False
        pads = torch.tensor([[0], [5], [11]], device=self.ids.device)
        positions = torch.arange(self.length, device=self.ids.device) - pads
        real, pos, rows = positions >= 0, positions.clamp(min=0), torch.arange(3, device=self.ids.device)[:, None]
        logits = decoder.full(self.ids[rows, pos].where(real, self.pad), real.long(), pos)
        return bool((self.error(logits, rows, pos)[real] > limit).any())

    def find_dependence(self, decoder, tolerance):
        """Return a sentence if logits without a cache depend on what no cache can know: later tokens, or other rows."""
        end, tolerance = self.length // 2, tolerance * self.logits.std()
        other = self.ids.clone()
        other[:, end:] = other[:, end:].roll(1, 0)
        for what, logits in (
            ("when later tokens change", decoder.full(other)[:, :end]),
            ("when later tokens are left out", decoder.full(self.ids[:, :end])),
            ("when other rows are left out", decoder.full(self.ids[:1])),
        ):
            off = self.error(logits, slice(0, len(logits)), slice(0, logits.size(1)))
            if not off.max() <= tolerance:
                where = (off > tolerance).any(0).nonzero()[0].item()
                return f"logits without a cache change by {off.max():.2g} {what}, from position {where} on"


# -- feeding a cache ---------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a way needs, and the errors of its logits, in the order in which they came."""

    decoder: object
    truth: Truth
    kind: str
    watch: object = None  # a Watch records the cache
    errors: list = field(default_factory=list)  # (error, allowed, other argmax, row, position), tensors

    def stream(self, rows=(0, 1, 2), pads=None, masked=False):
        return Stream(self, torch.tensor(rows), pads, masked)


class Stream:
    """A batch of texts on its way through one cache.

    rows  the text that each row of the batch takes its tokens from
    pads  how many padding tokens each row begins with, or None
    """

    def __init__(self, run, rows, pads=None, masked=False):
        device = run.truth.ids.device
        self.run, self.fed, self.rows = run, 0, rows.to(device)
        self.masked = masked or pads is not None
        self.pads = torch.zeros_like(self.rows) if pads is None else torch.tensor(pads, device=device)
        self.room = run.truth.length + 8  # some slots stay empty, as in most static caches
        try:
            self.cache = run.decoder.new(run.kind, self.room)
        except NotImplementedError as reason:
            raise NotRun(str(reason)) from None

    def feed(self, count, compare=True):
        """Feed the next `count` tokens of each row, and compare their logits with those without a cache."""
        truth, start = self.run.truth, self.fed
        slots = torch.arange(start, start + count, device=self.rows.device)
        positions = slots - self.pads[:, None]  # (B, count), negative for padding
        pos = positions.clamp(min=0)
        ids = truth.ids[self.rows[:, None], pos].where(positions >= 0, truth.pad)
        mask = None
        if self.masked:
            mask = (torch.arange(start + count, device=self.rows.device) >= self.pads[:, None]).long()
        if self.run.watch:
            self.run.watch.begin(self, positions)
        try:
            output = self.run.decoder.step(ids, self.cache, mask, pos)
        except NotImplementedError as reason:
            raise NotRun(str(reason)) from None
        logits, self.cache = output if isinstance(output, tuple) else (output, self.cache)
        self.fed += count
        if compare:
            rows = self.rows[:, None].expand_as(pos)
            error = truth.error(logits, rows, pos)
            other = logits.argmax(-1) != truth.argmax[rows, pos]
            real = positions >= 0
            order = real.T.nonzero(as_tuple=True)[::-1]  # by position, then by row
            self.run.errors.append([x[order] for x in (error, truth.rounding[rows, pos], other, rows, pos)])
        if self.run.watch:
            wrong = compare and bool((error > self.run.watch.allowed)[real].any())
            self.run.watch.end(self, positions, wrong)

    def decode(self, end):
        while self.fed < end:
            self.feed(1)

    def chunks(self, size, end):
        while self.fed < end:
            self.feed(min(size, end - self.fed))

    def copy(self):
        other = copy.copy(self)
        try:
            other.cache = copy.deepcopy(self.cache)
        except (RuntimeError, TypeError) as error:
            raise NotRun(f"copy.deepcopy of the cache: {first_line(error)}") from None
        return other

    def call(self, name, *args):
        """Call a method of the cache."""
        method = getattr(self.cache, name, None)
        if method is None:
            raise NotRun(f"the cache has no {name}")
        try:
            new = method(*args)
        except (AttributeError, NotImplementedError) as error:
            raise NotRun(first_line(error)) from None
        self.cache = self.cache if new is None else new


def first_line(error):
    return (str(error).strip().splitlines() or [""])[0][:160] or type(error).__name__


# -- the ways ----------------------------------------------------------------------------------------------------------
# Each feeds texts in its own way. P is where the second texts leave the first.


def decode(run, start=None, end=None, **options):
    """A prefill, then token after token."""
    stream = run.stream(**options)
    stream.feed(start or run.truth.length // 3)
    stream.decode(end or run.truth.length)


def chunks(run, size, **options):
    run.stream(**options).chunks(size, run.truth.length)


def left_padding(run, size=None):
    """Rows of different lengths, aligned at their ends. Also in chunks, the first of which are all padding in a row."""
    stream = run.stream(pads=(0, 5, 11))
    if size is None:
        stream.feed(run.truth.length // 3)
        stream.decode(min(run.truth.length, run.truth.length // 3 + 2 * span(run)))
    stream.chunks(size or 7, run.truth.length)


def prefix_twice(run):
    """Two texts with a common prefix, which is computed once. Then both go on in turn."""
    P, first = run.truth.prefix, run.stream()
    first.feed(P)
    second = first.copy()
    second.rows = first.rows + 3
    for _ in range(span(run)):
        first.feed(1)
        second.feed(1)


def two_at_once(run):
    """Two caches of one model, in turn: they must not share anything."""
    streams = [run.stream(), run.stream((5, 6, 7))]
    for stream in streams:
        stream.feed(run.truth.length // 3)
    for _ in range(span(run)):
        for stream in streams:
            stream.feed(1)


def rollback(run, everything=False):
    """Speculative decoding: feed guesses, take them back, feed what is right."""
    P, stream = run.truth.prefix, run.stream()
    own, other = stream.rows, stream.rows + 3
    stream.feed(P)
    if hasattr(stream.cache, "activate_past_recording"):  # a sliding window of transformers has to know before
        stream.call("activate_past_recording")
    if everything:
        stream.call("crop", -P)
        stream.fed = 0
        stream.chunks(P // 3, P)
    while stream.fed < min(P + span(run), run.truth.length - 4):
        for guesses in (4, 1, 2):
            stream.rows = other
            stream.feed(guesses, compare=False)
            stream.call("crop", -guesses)
            stream.fed -= guesses
            stream.rows = own
            stream.feed(1)


def reorder(run):
    """Beam search: row 0 goes on from what was row 2, and row 2 dies."""
    stream = run.stream()
    stream.feed(run.truth.prefix)
    for beams in ([2, 0, 0], [1, 2, 0]):
        beams = torch.tensor(beams, device=stream.rows.device)
        stream.call("reorder_cache", beams)
        stream.rows = stream.rows[beams]
        stream.decode(stream.fed + span(run) // 2)


def repeat(run):
    """Two continuations of each prefix."""
    stream = run.stream()
    stream.feed(run.truth.prefix)
    stream.call("batch_repeat_interleave", 2)
    stream.rows = torch.stack((stream.rows, stream.rows + 3), 1).flatten()
    stream.pads = stream.pads.repeat_interleave(2)
    stream.decode(stream.fed + span(run))


def select(run):
    """Rows leave the batch."""
    stream = run.stream()
    stream.feed(run.truth.prefix)
    rows = torch.tensor([2, 0], device=stream.rows.device)
    stream.call("batch_select_indices", rows)
    stream.rows, stream.pads = stream.rows[rows], stream.pads[rows]
    stream.decode(stream.fed + span(run))


def reset(run):
    """A second text in the cache of a first."""
    stream = run.stream((5, 6, 7))
    stream.chunks(run.truth.length // 2, run.truth.length)
    stream.call("reset")
    stream.fed, stream.rows = 0, stream.rows - 5
    stream.feed(run.truth.length // 3)
    stream.decode(stream.fed + span(run))


def span(run):
    """Return how many single tokens a way feeds if it need not feed all."""
    return min(24, run.truth.length // 4)


def ways_for(decoder, length):
    """Return {name: way}."""
    window = getattr(decoder, "window", None)
    sizes = (3, window - 1, window + 2) if window and 4 < window < length else (3, 50)
    ways = {
        "decode": decode,
        "decode from 1 token": lambda run: decode(run, 1, length // 3),
        "decode from 2 tokens": lambda run: decode(run, 2, length // 3),
        **{f"chunks of {size}": lambda run, size=size: chunks(run, size) for size in sizes},
        "mask of ones": lambda run: decode(run, end=length // 3 + span(run), masked=True),
        "mask of ones in chunks": lambda run: chunks(run, 7, masked=True),
        "left padding": left_padding,
        "left padding in chunks": lambda run: left_padding(run, 3),
        "prefix used twice": prefix_twice,
        "two texts at once": two_at_once,
        "rollback": rollback,
        "rollback of everything": lambda run: rollback(run, everything=True),
        "reorder": reorder,
        "repeat": repeat,
        "select": select,
        "a second text after reset": reset,
        "eight rows": lambda run: decode(run, end=length // 3 + span(run), rows=range(8)),
        "one row": lambda run: decode(run, end=length // 3 + span(run), rows=(1,)),
    }
    return ways


# -- the cause ---------------------------------------------------------------------------------------------------------


class Watch:
    """Looks at every update of a cache, to find the first one that is wrong.

    We know the right keys and values: those of a single forward whose cache keeps nothing and gives back what it gets.
    """

    def __init__(self, decoder, truth):
        self.truth, self.window = truth, getattr(decoder, "window", None)
        self.allowed = ALLOWED * truth.rounding.max()
        self.right = self.record_right(decoder, slice(None))
        self.tolerance = [[] for _ in self.right]
        for row in range(3):  # how far rounding moves keys and values
            for call, alone, limits in zip(self.right, self.record_right(decoder, slice(row, row + 1)), self.tolerance):
                limits.append([(whole[row] - part[0]).abs().max().item() for whole, part in zip(call[:2], alone[:2])])
        eps = 4 * torch.finfo(truth.dtype).eps
        self.tolerance = [
            [8 * max(column) + eps * whole.abs().max().item() for column, whole in zip(zip(*limits), call[:2])]
            for call, limits in zip(self.right, self.tolerance)
        ]

    def record_right(self, decoder, rows):
        """Return a (key, value, layer) per update, key and value (B, L, size)."""
        ids = self.truth.ids[rows]
        cache, calls = decoder.new("own", ids.size(1)), []
        if not hasattr(type(cache), "update"):
            raise NotRun("the cache has no update(key, value, ...) that we could watch")

        def keep_nothing(cache, *args, **kwargs):
            key, value = keys_and_values((*args, *kwargs.values()))
            layer = next((x for x in (*args, *kwargs.values()) if type(x) is int), len(calls))
            calls.append((flat(key), flat(value), layer))
            return key, value

        cache.update = types.MethodType(keep_nothing, cache)
        pos = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
        decoder.step(ids, cache, None, pos)
        return calls

    def begin(self, stream, positions):
        """Called before a step."""
        self.calls, cache = [], stream.cache
        original = type(cache).update

        def recorded(cache, *args, **kwargs):
            new = [x.clone() for x in keys_and_values((*args, *kwargs.values()))]
            result = original(cache, *args, **kwargs)
            self.calls.append([flat(x).clone() for x in (*new, *keys_and_values(result))])
            return result

        cache.update = types.MethodType(recorded, cache)

    def end(self, stream, positions, wrong):
        """Called after a step. Raises Found at the first deviation."""
        rows, pads = stream.rows, stream.pads[:, None]
        slots = torch.arange(stream.fed, device=rows.device)
        for i, (key, value, keys, values) in enumerate(self.calls[: len(self.right)]):
            right_key, right_value, layer = self.right[i]
            if value.shape[:2] != positions.shape:
                raise Found(f"{WRONG_VALUE} ({value.size(1)} new tokens where {positions.size(1)} were fed)", layer)
            if self.deviates(i, 1, value, rows, positions) is not None:
                if i > 0:  # the layer before is the first that got the right input and gave a wrong output
                    raise Found(ALL_RIGHT, self.right[i - 1][2])
                raise Found(WRONG_VALUE, layer)
            if self.deviates(i, 0, key, rows, positions) is not None:
                raise Found(WRONG_KEY, layer)
            held = slots[max(0, stream.fed - values.size(1)) :]  # a static cache has room for more, a window holds less
            needed = min(stream.fed, self.window or stream.fed)
            if len(values) != len(rows) or len(held) < needed:
                raise Found(
                    f"the cache gave back {len(values)} rows of {len(held)} slots, not {len(rows)} of {needed}", layer
                )
            for name, which, given in (("value", 1, values), ("key", 0, keys)):
                at = self.deviates(i, which, given[:, : len(held)], rows, held - pads)
                if at is not None:
                    row, slot = at
                    position = (held - pads)[row, slot].item()
                    whose = self.whose(i, which, given[row, slot], stream, row, position)
                    raise Found(
                        f"the cache gave back a {name} that is not that of row {row}, position {position}, {whose}",
                        layer,
                    )
        if len(self.calls) < len(self.right):
            raise Found(
                f"only {len(self.calls)} of {len(self.right)} layers gave the cache their keys",
                self.right[len(self.calls)][2],
            )
        if wrong:
            raise Found(ALL_RIGHT, self.right[-1][2])

    def deviates(self, i, which, given, rows, positions):
        """Return (row, index) of the first vector that is not the right one, or None."""
        right = self.right[i][which][rows[:, None], positions.clamp(min=0)]
        off = (given - right).abs().amax(-1)
        wrong = ~(off <= self.tolerance[i][which]) & (positions >= 0)
        found = wrong.T.nonzero()
        return tuple(found[0].tolist()[::-1]) if len(found) else None

    def whose(self, i, which, given, stream, row, position):
        """Say what the cache gave back in place of what it should have."""
        if not given.any():
            return "but zeros, as in an empty slot"
        right = self.right[i][which]
        off = (right - given).abs().amax(-1)  # (8, L)
        order = [*stream.rows.tolist(), *range(8)]
        for text in order:
            index = off[text].argmin().item()
            if off[text, index] <= self.tolerance[i][which]:
                if text == stream.rows[row]:
                    return f"but of position {index}"
                if text in stream.rows:
                    return f"but of row {stream.rows.tolist().index(text)}, position {index}"
                return f"but of another text or a rejected guess, position {index}"
        for j, call in enumerate(self.right):
            if j != i and call[which].size(-1) == given.size(-1):
                off = (call[which][stream.rows] - given).abs().amax(-1)
                if off.min() <= self.tolerance[j][which]:
                    at = divmod(off.argmin().item(), off.size(1))
                    return f"but of layer {call[2]}, row {at[0]}, position {at[1]}"
        expected = right[stream.rows[row], position]
        rounding = ((given - expected).abs().max() / expected.abs().max()).item()
        if rounding < 0.2:
            return f"but that one rounded, off by {rounding:.1g} of its size"
        return "but of nothing that was fed"


def keys_and_values(args):
    found = [x for x in args if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.is_floating_point()]
    return found[:2]


def flat(x):
    """(B, heads, t, head size) -> (B, t, heads * head size)"""
    return x if x.dim() == 3 else x.transpose(1, 2).flatten(2)


def find_cause(decoder, truth, kind, way):
    """Feed once more and watch the cache. Returns (cause, layer), each None if we cannot know."""
    try:
        way(Run(decoder, truth, kind, Watch(decoder, truth)))
    except Found as found:
        return found.args
    except NotRun as reason:
        return f"unknown, because {reason}", None
    return ALL_RIGHT, None


# -- the report --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What came of one way."""

    way: str
    cache: str
    attention: str | None
    status: str  # "right", "wrong" or "not run"
    reason: str | None = None  # why it was not run
    off: float | None = None  # the largest difference of a logit
    allowed: float | None = None
    argmaxes: int | None = None  # how many argmaxes are others
    row: int | None = None  # the first wrong logit
    position: int | None = None
    layer: int | None = None  # the first wrong layer
    cause: str | None = None
    drift: list = field(default_factory=list, repr=False)  # the largest difference at each position; None: not fed

    @property
    def where(self):
        return f"{self.cache} cache" + (f", {self.attention}" if self.attention else "")


@dataclass
class Report:
    """True if a way is wrong. str() is for people, results for programs."""

    title: str
    results: list
    blame: str | None = None

    def __bool__(self):
        return any(result.status == "wrong" for result in self.results)

    @property
    def exit_code(self):
        """0: right, 1: wrong, 2: nothing could be run."""
        return 1 if self else 0 if any(result.status == "right" for result in self.results) else 2

    def __str__(self):
        lines = [self.title]
        if self.blame:
            lines.append(
                f"NOT THE CACHE'S FAULT  {self.blame}. So no cache can give the same logits, and we compared none."
            )
        groups = {}
        for result in self.results:
            if result.status == "wrong":
                lines += wrapped("WRONG", f"{result.way}, {result.where}: {said(result)}")
            else:
                groups.setdefault((result.status, result.where, result.reason), []).append(result.way)
        for (status, where, reason), ways in sorted(groups.items(), key=lambda group: group[0][0] == "not run"):
            lines += wrapped(status, f"{where}: {', '.join(ways)}" + (f": {reason}" if reason else ""))
        return "\n".join(lines)


def said(result):
    if result.off is None:
        return result.cause
    where = f"first at row {result.row}, position {result.position}"
    layer = "" if result.layer is None else f", layer {result.layer}"
    counts = f"logits off by {result.off:.2g} (allowed {result.allowed:.1g}), {result.argmaxes} other argmaxes"
    return f"{counts}, {where}{layer}: {result.cause}"


def wrapped(status, text):
    return textwrap.wrap(text, 120, initial_indent=f"{status:9}", subsequent_indent=" " * 9, break_long_words=False)


# -- the check ---------------------------------------------------------------------------------------------------------

# A right cache never went beyond 1.3 times the largest and 1.02 times the mean error that rounding made without a cache,
# for thirty families of models in three dtypes. So these leave room, and a bug is far above.
ALLOWED = 4
ALLOWED_MEAN = 1.25


def examine(decoder, truth, kind, attention, name, way):
    """Return the Result of one way."""
    result = Result(name, kind, attention, "right")
    run = Run(decoder, truth, kind)
    try:
        way(run)
    except NotRun as reason:
        result.status, result.reason = "not run", str(reason)
        return result
    except Exception as error:
        result.status, result.cause = "wrong", f"raises {type(error).__name__}: {first_line(error)}"
        return result
    error, rounding, other, rows, positions = (torch.cat(column) for column in zip(*run.errors))
    limit = ALLOWED * truth.rounding.max()
    result.off, result.allowed = error.max().item(), limit.item()
    result.drift = (
        torch.zeros(truth.length, device=error.device, dtype=error.dtype)
        .scatter_reduce(0, positions, error, "amax")
        .tolist()
    )
    if kind == "quantized" or (error.max() <= limit and error.mean() <= ALLOWED_MEAN * rounding.mean()):
        return result
    result.status = "wrong"
    result.argmaxes = int(other.sum())
    beyond = (error > limit).nonzero()
    first = beyond[0, 0] if len(beyond) else error.argmax()
    result.row, result.position = rows[first].item(), positions[first].item()
    if "padding" in name and truth.padding_is_wrong_without_cache(decoder, limit):
        result.status, result.reason = (
            "not run",
            "left padding changes logits without a cache too: not the cache's fault",
        )
        return result
    result.cause, result.layer = find_cause(decoder, truth, kind, way)
    return result


def check_cache(model, length=None, dtype=torch.float32, device=None, caches=("own", "static"), modes=None, seed=0):
    """Return a Report, which is true if the cache of `model` is wrong.

    model   a model of transformers, a GPT of this kit, or an adapter: see the top of this file. We lend its weights: they
            change during the check and are afterwards what they were
    length  tokens per text. Default: 300, or three sliding windows if these are longer, and at most the context or 1024
    dtype   of the weights and the cache during the check; device: None leaves the model where it is
    caches  which kinds of cache to ask for: "own", "static". Of a "quantized" one we see only whether it raises
    modes   check only the ways whose name contains one of these words
    Raises TypeError for an object that is none of the three, and ValueError for a length or a word that does not work.
    """
    decoder = adapter_of(model)
    context, window = getattr(decoder, "context", None), getattr(decoder, "window", None)
    if length is None:
        length = min(max(300, 3 * (window or 0)), context or 1024, 1024)
    if length < 24 or (context and length > context):
        raise ValueError(
            f"length={length}: must be at least 24" + (f", and at most the context, {context}" if context else "")
        )
    ways = ways_for(decoder, length)
    if modes is not None:
        chosen = {name: way for name, way in ways.items() if any(mode in name for mode in modes)}
        if not chosen:
            raise ValueError(f"modes={modes!r}: none of the ways is named like that: {', '.join(ways)}")
        ways = chosen

    results, blame = [], None
    with prepared(decoder, dtype, device, seed) as (modules, device):
        title = f"{type(model).__name__}: {length} tokens, {str(dtype).removeprefix('torch.')} on {device}"
        attentions = decoder.attentions() if hasattr(decoder, "attentions") else [None]
        for i, attention in enumerate(attentions):
            truth = Truth(decoder, modules, length, seed, dtype, device)
            if truth.blame:
                blame = truth.blame
                continue
            for kind in caches:
                for name, way in ways.items():
                    if i == 0 or name in SECOND:
                        progress(f"{kind} cache, {name}")
                        results.append(examine(decoder, truth, kind, attention, name, way))
    progress("")
    if window and length < 2 * window:
        reason = f"the sliding window has {window} positions, so it takes a length of {3 * window} to leave it"
        results.append(Result("past the window", "every", None, "not run", reason))
    report = Report(title, results, blame)
    if report.exit_code == 2:
        warnings.warn(f"check_cache could check nothing: {report}", stacklevel=2)
    return report


# what a second implementation of attention may compute in another way
SECOND = {"decode", "chunks of 3", "mask of ones in chunks", "left padding", "left padding in chunks"}


def progress(what):
    """Show on a terminal what runs."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def plot(report, file):
    """Draw how far each way is off over position. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for result in report.results:
        if result.drift:
            wrong = result.status == "wrong"
            points = [(p, off) for p, off in enumerate(result.drift) if off > 0]
            label = f"{result.way}, {result.where}" if wrong else None
            axes.plot(*zip(*points), color=None if wrong else "gray", alpha=1 if wrong else 0.3, lw=1, label=label)
            axes.axhspan(0, result.allowed, color="green", alpha=0.01)
    axes.set(yscale="log", xlabel="position", ylabel="largest difference of a logit", title=report.title)
    if report:
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)


# -- the command line --------------------------------------------------------------------------------------------------


def load(name):
    """Return the model in a folder of transformers, or what the function of a module returns."""
    module, _, function = name.partition(":")
    if function.isidentifier():
        return getattr(importlib.import_module(module), function)()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(name, local_files_only=True, trust_remote_code=False)


def main():
    parser = argparse.ArgumentParser(prog="check_cache", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model", help="a folder of transformers, or module:function, a function that returns a model or an adapter")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", help="for example cuda (default: where the model is)")
    add(
        "--modes",
        nargs="+",
        metavar="WORD",
        help="only the ways whose name contains a word, for example chunks padding",
    )
    add("--caches", nargs="+", choices=("own", "static", "quantized"), default=("own", "static"))
    add("--length", type=int, help="tokens per text (default: 300, or three sliding windows, at most the context)")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print JSON")
    add("--plot", metavar="FILE", help="draw how far each way is off over position")
    args = parser.parse_args()
    try:
        model = load(args.model)
        report = check_cache(
            model, args.length, getattr(torch, args.dtype), args.device, args.caches, args.modes, args.seed
        )
    except Exception as error:
        progress("")
        print(f"check_cache: cannot check {args.model}: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    if args.plot:
        plot(report, args.plot)
    if args.json:
        content = {"exit_code": report.exit_code, "title": report.title, "blame": report.blame}
        content["results"] = [vars(result) for result in report.results]
        print(json.dumps(content, indent=1))
    else:
        print(report)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
