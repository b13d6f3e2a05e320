"""The ways to feed a cache. Each differs from plain decoding in one thing."""

import copy
from functools import partial

import torch

from check_cache.adapters import Transformers
from check_cache.cause import find_cause, listen
from check_cache.report import first_line

PADS = (0, 5, 11)  # padding tokens of each row
IN_GENERATE = "what generate() feeds, if all other ways are right: prepare_inputs_for_generation"


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
