"""The scenarios: how tokens reach a cache. Each differs from plain decoding in one thing."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from check_cache.adapters import ROWS
from check_cache.attention import Interruption, Watch
from check_cache.cause import find_cause
from check_cache.reference import PADS
from check_cache.report import first_line


@dataclass(frozen=True)
class Scenario:
    """run(start) feeds a cache, where start() makes a Stream. It may return what is wrong besides logits."""

    name: str
    run: Callable
    needs: str | None  # an argument of `step`, or "generate"
    padding: bool  # whether it is not the cache's fault if padding is seen without a cache, too


@dataclass
class Found:
    """What the streams of a scenario have found so far."""

    errors: list = field(default_factory=list)  # rows, positions, errors, whether the argmax differs, step
    cause: str | None = None


def interrupt(function, at):
    """Call a function, and stop it at call number `at` of torch."""
    with suppress(Interruption), Watch(stop=at):
        function()


class Stream:
    """A batch of the sequences `rows` on its way through one cache. Its errors go into `found`.

    Rows begin with `pads` tokens of padding. `ragged` rows end with them in the prefill, and have none afterwards.
    """

    def __init__(self, reference, kind, found, rows=(0, 1, 2), pads=(0,), masked=False, ragged=False, spare=8):
        self.reference, self.found, self.decoder, self.fed = reference, found, reference.decoder, 0
        self.rows, self.pads, self.ragged = torch.tensor([*rows]), torch.tensor(pads)[:, None], ragged
        self.masked = (masked or any(pads)) and not ragged
        slots = reference.length + spare  # a static cache has empty slots, or none in the end
        self.cache = self.decoder.new(len(self.rows), min(slots, self.decoder.context or slots), kind)

    def next(self, T, drafts=0):
        """Return the ids, rows, positions (B, T), below 0 for padding, and the mask of the next T tokens."""
        reference, end, B = self.reference, self.fed + T, len(self.rows)
        positions = (torch.arange(self.fed, end) - self.pads).expand(B, T)
        if self.ragged and self.fed == 0:
            positions = torch.arange(T).where(torch.arange(T) < T - self.pads, -1)
        rows = self.rows[:, None].expand(B, T)
        chosen = reference.ids[rows + 3 * (torch.arange(T) >= T - drafts), positions.clamp(min=0)]
        mask = (torch.arange(end) >= self.pads).expand(B, end).long() if self.masked else None
        return chosen.where(positions >= 0, self.decoder.pad), rows, positions, mask

    def feed(self, count, drafts=0):
        """Feed the next `count` tokens of each row and compare their logits. Drafts come from another sequence."""
        T = count + drafts
        ids, rows, positions, mask = self.next(T, drafts)
        pos, lengths = positions.clamp(min=0), (positions >= 0).sum(1) if self.ragged else None
        with Watch() as watch:
            logits, self.cache = self.decoder.step(ids, self.cache, mask, pos, self.rows, lengths)
        self.fed, self.calls = self.fed + T, watch.calls
        missing = T - logits.size(1)  # some decoders only return the logits of the last token
        if missing and self.ragged:
            raise NotImplementedError("the step returns logits of the last slot, which may be padding")
        wrong = self.compare(logits[:, : count - missing], rows[:, missing:count], positions[:, missing:count])
        if wrong and not self.found.cause:
            try:
                self.found.cause = find_cause(self, watch.reads, T, rows, positions, drafts)
            except Exception as error:  # a kind of attention that we do not know
                self.found.cause = f"cause unknown: {first_line(error)}"
        return self

    def compare(self, logits, rows, positions):
        """Note the errors of logits by position and then by row. Return whether one or most of them look wrong."""
        batch, tokens = (torch.full((len(rows) * rows.size(1),), size) for size in rows.shape)
        places = (positions >= 0).T.nonzero(as_tuple=True)[::-1]
        logits, rows, positions = logits[places], rows[places], positions[places]
        error = self.reference.error(logits, rows, positions)
        differs = logits.argmax(-1) != self.reference.argmax[rows, positions]
        self.found.errors.append((rows, positions, error, differs, batch[: len(rows)], tokens[: len(rows)]))
        return len(error) and (error.max() > self.reference.limit or error.median() > self.reference.suspicious)

    def feed_all(self, *sizes):
        """Feed steps of these sizes, until the sequences end."""
        for size in sizes:
            if size := min(size, self.reference.length - self.fed):
                self.feed(size)
        return self

    def fail(self, at):
        """Feed a token, but stop the step at call number `at` of torch."""
        ids, _, pos, mask = self.next(1)
        interrupt(lambda: self.decoder.step(ids, self.cache, mask, pos, self.rows, None), at)

    def crop(self, count):
        """Take back the newest `count` tokens."""
        self.fed -= count
        return self.change("crop", self.fed if "crop" in self.decoder.parts else -count)

    def change(self, name, *args, rows=None):
        """Crop, reorder, ... the cache, and continue with what that returns, a cache or None, and with these rows."""
        cache = self.decoder.change(self.cache, name, *args)
        self.cache = self.cache if cache is None else cache
        self.rows = self.rows if rows is None else torch.as_tensor(rows)
        return self


def largest_chunk(L):
    """Return the largest n for which chunks of 1, 2, ... n tokens fit into L tokens."""
    return int(((8 * L + 1) ** 0.5 - 1) / 2)


def scenarios_for(window, L, seed):
    """Return the scenarios for sequences of L tokens."""
    third, n = L // 3, min(8, L // 4)
    fork, short = third | 1, min(third, 2 * n)  # fork: see Reference; short: where the length does not matter
    page = 1 << fork.bit_length()  # where pages begin, of up to so many tokens
    ones = [1] * n  # so many single tokens are enough to see a mistake
    largest = largest_chunk(L)
    mixed = (torch.randperm(largest, generator=torch.Generator().manual_seed(seed), device="cpu") + 1).tolist()
    doubling = [n * 2**i for i in range(L.bit_length())]
    around = (window - 1, window + 2) if window and largest - 2 < window < L else ()
    # Two scenarios decode every position once. The prefill of one nearly fills the window, if there is one.
    prefill = max(2, window - n) if window and window < L else third

    def feed(start, *sizes, **options):
        start(**options).feed_all(*sizes)

    def batches(start):
        for B in range(1, ROWS + 1):
            feed(start, short, 1, rows=range(B))

    def generate(start, **options):
        """Let the decoder's own loop or search choose tokens, several times, since a call may meet leftovers."""
        first, second = start((5, 6, 7), **options), start(**options)
        decoder = first.decoder

        def call(use_cache, stream, eos=None):
            """Return the tokens that each row gets, up to its end."""
            ids, *_, mask = stream.next(short)
            output = decoder.generate(ids.clone(), n, use_cache, mask, eos, stream.rows)
            new = output[:, short:] if torch.equal(output[:, :short], ids) else output
            return [row[: row.index(eos) + 1] if eos in row else row for row in new.tolist()]

        def compare():
            other, plain, end, early = call(False, first), call(False, second), None, ""
            if decoder.takes("generate", "eos"):
                end, early = plain[0][len(plain[0]) // 2], ". It may end rows early"
                plain = call(False, second, end)
            watch = Watch()
            for which, stream, eos, expected, note in (
                ("first", first, None, other, ""),
                ("second", second, end, plain, early),
                ("third", first, None, other, ". It comes after one that an exception stopped"),
            ):
                if which == "third":
                    interrupt(lambda: call(True, second), watch.calls // 4)
                with watch:
                    chosen = call(True, stream, eos)
                if chosen != expected:
                    return f"the {which} call of generate() chooses different tokens with the cache than without{note}"

        try:
            with first.reference.exactly():  # so that rounding decides nothing
                return compare()
        except RuntimeError:  # it cannot run in float64
            return compare()

    def prefix_twice(start):
        first = start().feed(fork)
        second = copy.copy(first)
        second.cache, second.rows = first.decoder.fork(first.cache), first.rows + 3
        for size in ones[: n // 2]:
            first.feed(size)
            second.feed(size)

    def two_at_once(start):
        first, second = start(), start(rows=(5, 6, 7))
        for size in (short, *ones[: n // 2]):
            first.feed(size)
            second.feed(size)
            first.reference.full(slice(3), short)  # a call without a cache must not disturb them

    def rollback(start, P=page - 1, everything=False, then=None):
        """Speculative decoding: feed a token and some drafts, take back those that differ, and go on."""
        stream = start().feed(P)
        if getattr(stream.cache, "is_croppable", True) is False:
            raise NotImplementedError("the cache cannot be cropped (is_croppable)")
        if hasattr(stream.cache, "activate_past_recording"):  # a window of transformers must be told in advance
            stream.cache.activate_past_recording()
        if everything:
            stream.crop(P).feed(P, 4).crop(4)
        for accepted, rejected in (0, 4), (0, 1), (2, 1), (1, 3), (3, 0), (0, 2):
            if stream.fed + accepted + rejected + 2 > L:
                break
            stream.feed(1 + accepted, rejected)
            if rejected:
                stream.crop(rejected)
            if then:
                stream.change("reorder", torch.tensor(then), rows=stream.rows[[*then]])
            if rejected != 1:  # then the next draft follows at once
                stream.feed(1)

    def reset(start):
        stream = start(rows=(5, 6, 7)).feed_all(2 * third, 1, 1)
        stream.change("reset", rows=(0, 1, 2)).fed = 0
        stream.feed_all(third, *ones)

    def rearrange(start, name, argument, rows, before=(0, 1, 2), pads=(0,)):
        stream = start(before, pads).feed(fork)
        try:
            stream.change(name, argument, rows=rows)
        except (RuntimeError, IndexError) as error:
            if len(before) > 1:
                raise
            raise NotImplementedError(first_line(error)) from None  # some caches have a fixed number of rows
        stream.pads = stream.pads[argument] if any(pads) else stream.pads
        stream.feed_all(*ones)

    def go_on(start):
        """After an exception, a step that has not begun leaves its cache alone, and any step leaves others alone."""
        stream = start().feed(short).feed(1)
        calls = stream.calls
        stream.fail(1)
        stream.feed(1).fail(calls // 2)
        feed(start, short, *ones, rows=(5, 6, 7))

    scenarios = []

    def add(name, function, *arguments, needs=None, **options):
        padding = any(options.get("pads", ())) and needs != "lengths"
        run = lambda start: function(start, *arguments, **options)  # noqa: E731
        scenarios.append(Scenario(name, run, needs, padding))

    add("decode", feed, prefill, *[1] * L, spare=0)
    add("decode from 1 token", feed, *[1] * prefill)
    for size in around:
        add(f"chunks of {size}", feed, *[size] * L)
    add("chunks of mixed sizes", feed, *mixed)
    add("chunks that double", feed, n, *doubling, spare=0)
    add("mask of ones", feed, third, 5, *ones, L, masked=True, needs="mask")
    add("left padding", feed, third, *ones, pads=PADS, needs="mask")
    add("left padding in chunks", feed, third, *mixed[:n], pads=[pad + 2 for pad in PADS], needs="mask")
    add("rows of different lengths", feed, third, *ones, 4, pads=PADS, ragged=True, needs="lengths")
    add("generate", generate, needs="generate")
    add("generate with left padding", generate, pads=PADS, needs="generate")
    add("prefix used twice", prefix_twice)
    add("two caches at once", two_at_once)
    add("speculative rollback", rollback)
    add("rollback of everything", rollback, min(page - 1, (window or L) - 1), everything=True)
    add("rollback, then reorder", rollback, then=(0, 0, 2))
    # two beams continue row 0, as it is and as row 3, which differs from it from now on
    beams, zeros = torch.tensor((2, 0, 0)), torch.tensor((0, 0, 0))
    for name, argument, rows, grow in (
        ("reorder", beams, (2, 0, 3), zeros),
        ("repeat", 2, (0, 3, 1, 4, 2, 5), 3),
        ("select", beams[:2], (2, 0), zeros),
    ):
        add(name, rearrange, name, argument, rows)
        add(f"{name} from one row", rearrange, name, grow, (0, 3, 0), (0,))  # as when a beam search begins
    add("left padding, then reorder", rearrange, "reorder", beams, (2, 0, 3), pads=PADS, needs="mask")
    add("reuse after reset", reset)
    add("batches of 1 to 8 rows", batches)
    add("going on after an exception", go_on)
    return scenarios
