"""The ways to feed a cache. Each differs from plain decoding in one thing."""

import copy
from functools import partial

import torch

from check_cache.adapters import Transformers, on_cache
from check_cache.attention import Watch
from check_cache.cause import Cause, find_cause
from check_cache.report import first_line

PADS = (0, 5, 11)  # padding tokens of each row
IN_GENERATE = "what generate() feeds, if all other ways are right: prepare_inputs_for_generation"


class Stream:
    """A batch of sequences on its way through one cache. Its errors go into a Result."""

    def __init__(self, truth, result, rows=(0, 1, 2), pads=(0,), masked=False):
        self.truth, self.result, self.decoder, self.fed = truth, result, truth.decoder, 0
        self.rows, self.pads, self.masked = torch.tensor([*rows]), torch.tensor(pads)[:, None], masked or any(pads)
        if result.cache and self.masked and not self.decoder.takes_mask:
            raise NotImplementedError("the step takes no mask")
        self.cache = self.decoder.new(len(self.rows), truth.room, result.cache) if result.cache else None

    def next(self, T):
        """Return the row, the position (B, T), below 0 for padding, and the mask of the next T tokens."""
        end, B = self.fed + T, len(self.rows)
        positions = (torch.arange(self.fed, end) - self.pads).expand(B, T)
        mask = (torch.arange(end) >= self.pads).expand(B, end).long() if self.masked else None
        return self.rows[:, None].expand(B, T), positions, mask

    def feed(self, count, guesses=0):
        """Feed the next `count` tokens of each row and compare their logits. Guesses come from another sequence."""
        decoder, result, T = self.decoder, self.result, count + guesses
        rows, positions, mask = self.next(T)
        pos = positions.clamp(min=0)
        ids = self.truth.ids[rows + 3 * (torch.arange(T) >= count), pos].where(positions >= 0, self.truth.pad)
        if not result.cache:
            self.compare(decoder.full(ids, mask, pos), rows, positions)
            return self
        with Watch() as watch:
            output = decoder.step(ids, self.cache, mask, pos)
        logits, cache = output if isinstance(output, tuple) else (output, None)
        self.cache = self.cache if cache is None else cache
        if self.cache is None:
            raise NotImplementedError("neither new nor step returns a cache")
        if isinstance(logits, torch.Tensor) and logits.dim() == 2:  # (B, V) of the last token
            logits = logits[:, None]
        given = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        if not isinstance(given, tuple) or given not in [(len(rows), t, decoder.vocab_size) for t in (1, T)]:
            raise TypeError(f"step returns {given} instead of logits of shape {(len(rows), T, decoder.vocab_size)}")
        self.fed += T
        missing = T - logits.size(1)  # some decoders only return the logits of the last token
        suspect, sure = self.compare(logits[:, : count - missing], rows[:, missing:count], positions[:, missing:count])
        if (suspect or (self.truth.inspects and self.fed % 8 < T)) and not result.why:
            try:
                cause = find_cause(self, watch.reads, T, rows, positions, guesses)
            except Exception as error:  # a kind of attention that we do not know
                cause = Cause(None, f"cause unknown: {first_line(error)}")
            if sure or cause.certain(self.truth):
                result.why, result.layer = cause.text, cause.layer
        return self

    def compare(self, logits, rows, positions):
        """Note the errors of logits by position and then by row.

        Returns (whether an error is larger than typical rounding, whether one is larger than any rounding).
        """
        places = (positions >= 0).T.nonzero(as_tuple=True)[::-1]
        logits, rows, positions = logits[places], rows[places], positions[places]
        error = self.truth.error(logits, rows, positions)
        self.result.errors.append((rows, positions, error, logits.argmax(-1) != self.truth.argmax[rows, positions]))
        return (error > self.truth.suspicious).any(), (error > self.truth.limit).any()

    def feed_until(self, end, size=1):
        while self.fed < min(end, self.truth.length):
            self.feed(min(size, end - self.fed))
        return self

    def crop(self, count):
        """Take back the newest `count` tokens."""
        self.fed -= count
        return self.use(self.decoder.crop(self.cache, self.fed, count))

    def reorder(self, rows):
        return self.use(self.decoder.reorder(self.cache, torch.tensor(rows)), self.rows[[*rows]])

    def use(self, cache, rows=None):
        """Continue with what an operation returned, a cache or None, and with these rows."""
        self.cache = self.cache if cache is None else cache
        self.rows = self.rows if rows is None else torch.as_tensor(rows)
        return self


def ways_for(window, L):
    """Return {name: way} for sequences of L tokens. A way is called with `start`, which makes a Stream."""
    half, third, n = L // 2, L // 3, min(24, L // 4)  # n single tokens are enough to see a mistake
    sizes = (3, window - 1, window + 2) if window and 4 < window < L else (3,)
    beams = (2, 0, 0)  # the rows that the best beams continue

    def decode(start, P=third, end=third + n, **options):
        start(**options).feed(P).feed_until(end)

    def chunks(start, size, end=L, **options):
        start(**options).feed_until(end, size)

    def doubling(start):
        stream = start()
        while stream.fed < L:
            stream.feed(min(stream.fed or 1, L - stream.fed))

    def generate(start, pads=(0,)):
        """Let the decoder's own loop or search choose tokens. In transformers, we force generate() to choose ours."""
        padded = any(pads)
        stream = start(masked=padded, pads=pads)
        truth, decoder = stream.truth, stream.decoder
        if isinstance(decoder, Transformers) and stream.result.cache == "own":
            rows, positions, mask = stream.next(third + n)
            ids = truth.ids[rows, positions.clamp(min=0)].where(positions >= 0, truth.pad)
            logits = decoder.generated_logits(ids, torch.ones_like(ids) if mask is None else mask, n + 1)
            _, wrong = stream.compare(logits, rows[:, -n - 1 :], positions[:, -n - 1 :])
            stream.result.why = IN_GENERATE if wrong else None
            return
        if padded:
            raise NotImplementedError("only for transformers models, with their own cache")
        prompts = truth.ids[:3, :third]
        try:
            with truth.exactly():  # so that rounding decides nothing
                with_cache, without = (decoder.generate(prompts, n, use_cache) for use_cache in (True, False))
        except RuntimeError:  # it cannot run in float64
            with_cache, without = (decoder.generate(prompts, n, use_cache) for use_cache in (True, False))
        if without.size(1) not in (n, third + n):
            raise TypeError(f"generate returns {without.size(1)} tokens per row, but we asked for {n} new ones")
        if not torch.equal(with_cache, without):
            differ = (with_cache != without).nonzero() if with_cache.shape == without.shape else []
            where = f", first in row {differ[0][0]} at {differ[0][1]}" if len(differ) else ""
            stream.result.status = "wrong"
            stream.result.why = f"generate() chooses different tokens with the cache than without{where}"

    def prefix_twice(start):
        first = start().feed(half)
        second = copy.copy(first)
        second.rows, second.cache = first.rows + 3, first.decoder.fork(first.cache)
        for _ in range(n):
            first.feed(1)
            second.feed(1)

    def two_at_once(start):
        first, second = start(), start(rows=(5, 6, 7))
        for count in (third, *[1] * n):
            first.feed(count)
            second.feed(count)

    def rollback(start, P=half, everything=False, then=None):
        """Speculative decoding: feed a token and some guesses, then take the guesses back."""
        stream = start().feed(P)
        if getattr(stream.cache, "is_croppable", True) is False:
            raise NotImplementedError("the cache cannot be cropped (is_croppable)")
        if hasattr(stream.cache, "activate_past_recording"):  # a window of transformers must be told in advance
            stream.cache.activate_past_recording()
        if everything:
            stream.crop(P).feed(P, 4).crop(4)
        for guesses in (4, 1, 3, 2) * (n // 4):
            stream.feed(1, guesses).crop(guesses)
            if then:
                stream.reorder(then)

    def reset(start):
        stream = start(rows=(5, 6, 7)).feed_until(L, third)
        stream.use(stream.decoder.reset(stream.cache), rows=(0, 1, 2)).fed = 0
        stream.feed(third).feed_until(third + n)

    def reorder(start):
        start().feed(half).reorder(beams).feed_until(half + n)

    def rearrange(start, method, argument, rows):
        stream = start().feed(half)
        stream.use(on_cache(stream.cache, method, argument), rows).feed_until(half + n)

    return {
        "decode": partial(decode, end=L),
        "decode from 1 token": partial(decode, P=1, end=third),
        "decode from 2 tokens": partial(decode, P=2, end=third),
        **{f"chunks of {size}": partial(chunks, size=size) for size in sizes},
        "chunks that double": doubling,
        "mask of ones": partial(decode, masked=True),
        "mask of ones in chunks": partial(chunks, size=7, masked=True),
        "left padding": partial(decode, end=third + 2 * n, pads=PADS),
        "left padding in chunks": partial(chunks, size=3, pads=PADS),
        "left padding in all rows": partial(decode, pads=[pad + 2 for pad in PADS]),
        "generate": generate,
        "generate with left padding": partial(generate, pads=PADS),
        "prefix used twice": prefix_twice,
        "two caches at once": two_at_once,
        "speculative rollback": rollback,
        "rollback of everything": partial(rollback, P=min(half, (window or L) - 1), everything=True),
        "rollback, then reorder": partial(rollback, then=beams[::-1]),
        "reorder": reorder,
        "repeat": partial(rearrange, method="batch_repeat_interleave", argument=2, rows=(0, 3, 1, 4, 2, 5)),
        "select": partial(rearrange, method="batch_select_indices", argument=torch.tensor(beams[:2]), rows=(2, 0)),
        "reuse after reset": reset,
        "eight rows": partial(decode, rows=range(8)),
        "one row": partial(decode, rows=(1,)),
    }


# what a second implementation of attention may compute differently
SECOND = ("decode", "chunks of 3", "mask of ones in chunks", "left padding", "left padding in chunks")
