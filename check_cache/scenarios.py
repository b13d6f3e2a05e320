"""The scenarios: how tokens reach a cache. Each differs from plain decoding in one thing."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from check_cache.adapters import ROWS
from check_cache.attention import Interruption, Watch
from check_cache.cause import find_cause
from check_cache.reference import PADS
from check_cache.report import first_line

PADDING = frozenset({"padding"})  # not the cache's fault if padding is seen without a cache, too
OWN_LOOP = frozenset({"own loop"})  # makes its own cache, so one kind is enough


@dataclass(frozen=True)
class Scenario:
    """run(start) feeds a cache, where start() makes a Stream. It may return what is wrong besides logits."""

    name: str
    run: Callable
    needs: str | None = None  # an argument of `step`, or "generate"
    tags: frozenset[str] = frozenset()


@dataclass
class Found:
    """What the streams of a scenario have found so far."""

    errors: list = field(default_factory=list)  # rows, positions, errors, whether the argmax differs, step
    cause: str | None = None
    certain: bool = False  # whether the cause explains a logit that is wrong, not just suspicious
    hint: str = ""  # what else may be the cause


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
        worst = self.compare(logits[:, : count - missing], rows[:, missing:count], positions[:, missing:count])
        found, wrong = self.found, worst > self.reference.limit
        # what rounding may have written gives way to what a wrong logit shows
        if worst > self.reference.suspicious and not found.certain and (wrong or not found.cause):
            try:
                cause = find_cause(self, watch.reads, T, rows, positions, drafts)
            except Exception as error:  # a kind of attention that we do not know
                cause = f"cause unknown: {first_line(error)}"
            if cause:
                found.cause, found.certain = cause, bool(wrong)
        return self

    def compare(self, logits, rows, positions):
        """Note the errors of logits by position and then by row, and return the largest."""
        batch, tokens = (torch.full((len(rows) * rows.size(1),), size) for size in rows.shape)
        places = (positions >= 0).T.nonzero(as_tuple=True)[::-1]
        logits, rows, positions = logits[places], rows[places], positions[places]
        error = self.reference.error(logits, rows, positions)
        differs = logits.argmax(-1) != self.reference.argmax[rows, positions]
        self.found.errors.append((rows, positions, error, differs, batch[: len(rows)], tokens[: len(rows)]))
        return error.amax() if len(error) else 0

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
        try:
            cache = self.decoder.change(self.cache, name, *args)
        except ValueError as error:  # how a cache refuses, such as a full window that cannot be cropped
            raise NotImplementedError(first_line(error)) from None
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
        streams = {rows: start(rows, **options) for rows in ((5, 6, 7), (0, 1, 2))}
        decoder, reference = streams[0, 1, 2].decoder, streams[0, 1, 2].reference

        def call(use_cache, rows, eos=None):
            """Return the tokens that each row gets, up to its end."""
            ids, *_, mask = streams[rows].next(short)
            output = decoder.generate(ids.clone(), n, use_cache, mask, eos, torch.tensor(rows))
            new = output[:, short:] if torch.equal(output[:, :short], ids) else output
            return [row[: row.index(eos) + 1] if eos in row else row for row in new.tolist()]

        def compare():
            other, plain = (call(False, rows) for rows in streams)
            end = plain[0][len(plain[0]) // 2]
            calls = [((5, 6, 7), other, None, ""), ((0, 1, 2), plain, None, "")]
            if decoder.takes("generate", "eos"):
                calls.append(((0, 1, 2), call(False, (0, 1, 2), end), end, ". It may end rows early"))
            calls.append(((5, 6, 7), other, None, ". It comes after one that an exception stopped"))
            watch = Watch()
            for which, (rows, expected, eos, note) in zip(("first", "second", "third", "fourth"), calls):
                if "exception" in note:
                    interrupt(lambda: call(True, (0, 1, 2)), watch.calls // len(calls) // 2)
                with watch:
                    chosen = call(True, rows, eos)
                if chosen != expected:
                    return f"the {which} call of generate() chooses different tokens with the cache than without{note}"

        try:
            with reference.exactly():  # so that rounding decides nothing
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
        if isinstance(stream.cache, nn.Module) and "reset" not in stream.decoder.parts:
            stream.found.hint = ". If something resets the module before it reads another text, pass it as reset="
        stream.feed_all(third, *ones)

    def rearrange(start, name, argument, rows, before=(0, 1, 2), **options):
        stream = start(rows=before, **options).feed(fork)
        try:
            stream.change(name, argument, rows=rows)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, NotImplementedError) or len(before) > 1:
                raise
            raise NotImplementedError(f"one row cannot become three: {first_line(error)}") from None
        stream.pads = stream.pads[argument] if options else stream.pads
        stream.feed_all(*ones)

    def go_on(start):
        """After an exception, a step that has not begun leaves its cache alone, and any step leaves others alone."""
        stream = start().feed(short).feed(1)
        calls = stream.calls
        stream.fail(1)
        stream.feed(1).fail(calls // 2)
        feed(start, short, *ones, rows=(5, 6, 7))

    # two beams continue row 0, as it is and as row 3, which differs from it from now on
    reorder = dict(name="reorder", argument=torch.tensor((2, 0, 0)), rows=(2, 0, 3))
    grown = dict(rows=(0, 3, 0), before=(0,))  # as when a beam search begins
    zeros = torch.tensor((0, 0, 0))
    return [
        Scenario("decode", lambda start: feed(start, prefill, *[1] * L, spare=0)),
        Scenario("decode from 1 token", lambda start: feed(start, *[1] * prefill)),
        *(
            Scenario(f"chunks of {size}", partial(lambda size, start: feed(start, *[size] * L), size))
            for size in around
        ),
        Scenario("chunks of mixed sizes", lambda start: feed(start, *mixed)),
        Scenario("chunks that double", lambda start: feed(start, n, *doubling, spare=0)),
        Scenario("mask of ones", lambda start: feed(start, third, 5, *ones, L, masked=True), "mask"),
        Scenario("left padding", lambda start: feed(start, third, *ones, pads=PADS), "mask", PADDING),
        Scenario(
            "left padding in chunks",
            lambda start: feed(start, third, *mixed[:n], pads=[pad + 2 for pad in PADS]),
            "mask",
            PADDING,
        ),
        Scenario(
            "rows of different lengths",
            lambda start: feed(start, third, *ones, 4, pads=PADS, ragged=True),
            "lengths",
        ),
        Scenario("generate", generate, "generate", OWN_LOOP),
        Scenario("generate with left padding", partial(generate, pads=PADS), "generate", OWN_LOOP | PADDING),
        Scenario("prefix used twice", prefix_twice),
        Scenario("two caches at once", two_at_once),
        Scenario("speculative rollback", rollback),
        Scenario("rollback of everything", partial(rollback, P=min(page - 1, (window or L) - 1), everything=True)),
        Scenario("rollback, then reorder", partial(rollback, then=(0, 0, 2))),
        Scenario("reorder", partial(rearrange, **reorder)),
        Scenario("left padding, then reorder", partial(rearrange, **reorder, pads=PADS), "mask", PADDING),
        Scenario("repeat", partial(rearrange, name="repeat", argument=2, rows=(0, 3, 1, 4, 2, 5))),
        Scenario("select", partial(rearrange, name="select", argument=torch.tensor((2, 0)), rows=(2, 0))),
        Scenario("reorder from one row", partial(rearrange, name="reorder", argument=zeros, **grown)),
        Scenario("repeat from one row", partial(rearrange, name="repeat", argument=3, **grown)),
        Scenario("select from one row", partial(rearrange, name="select", argument=zeros, **grown)),
        Scenario("reuse after reset", reset),
        Scenario("batches of 1 to 8 rows", batches),
        Scenario("going on after an exception", go_on),
    ]
