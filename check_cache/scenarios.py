"""The scenarios: how tokens reach a cache. Each differs from plain decoding in one thing."""

import copy
from contextlib import suppress

import torch

from check_cache.adapters import ROWS
from check_cache.attention import Interruption, Watch
from check_cache.cause import find_cause
from check_cache.reference import PADS
from check_cache.report import Wrong, first_line


class Stream:
    """A batch of the sequences `rows` on its way through one cache. Its errors go into `found`.

    Rows begin with `pads` tokens of padding. `ragged` rows end with them in the prefill, and have none afterwards.
    """

    def __init__(self, reference, kind, found, rows=(0, 1, 2), pads=(0,), masked=False, ragged=False, spare=8):
        self.reference, self.found, self.decoder, self.fed = reference, found, reference.decoder, 0
        self.rows, self.pads, self.ragged = torch.tensor([*rows]), torch.tensor(pads)[:, None], ragged
        self.masked = (masked or any(pads)) and not ragged
        slots = reference.length + spare  # a static cache has empty slots, or none in the end
        self.cache = self.decoder.call("new", len(self.rows), min(slots, self.decoder.context or slots), kind=kind)

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
        reference, T = self.reference, count + drafts
        ids, rows, positions, mask = self.next(T, drafts)
        pos, lengths = positions.clamp(min=0), (positions >= 0).sum(1) if self.ragged else None
        with Watch() as watch:
            logits, self.cache = self.decoder.step(ids, self.cache, mask, pos, self.rows, lengths)
        self.fed, self.calls = self.fed + T, watch.calls
        missing = T - logits.size(1)  # some decoders only return the logits of the last token
        if missing and self.ragged:
            raise NotImplementedError("the step returns logits of the last slot, which may be padding")
        seen, real = (rows[:, missing:count], pos[:, missing:count]), positions[:, missing:count] >= 0
        error = reference.error(logits[:, : count - missing], *seen).where(real, 0)
        self.found.append((error[real], reference.rounding[seen][real]))
        if (wrong := error > reference.limit).any():
            try:
                cause = find_cause(self, watch.reads, T, rows, positions, drafts)
            except Exception as problem:  # a kind of attention that we do not know
                cause = f"cause unknown: {first_line(problem)}"
            t, i = wrong.T.nonzero()[0].tolist()
            row, position = (part[i, t].item() for part in seen)
            rule = f"logits off by {error.max():.2g} (allowed {reference.limit:.1g}), first at row {row}, position "
            rule += f"{position}, in a step of {len(ids)} rows and {T} tokens"
            raise Wrong(cause, rule, error.max().item(), position, (len(ids), T))
        return self

    def feed_all(self, *sizes):
        """Feed steps of these sizes, until the sequences end."""
        for size in sizes:
            if size := min(size, self.reference.length - self.fed):
                self.feed(size)
        return self

    def fail(self, at):
        """Feed a token, but stop the step at call number `at` of torch."""
        ids, _, pos, mask = self.next(1)
        if self.decoder.numpy:
            raise NotImplementedError("we can only interrupt PyTorch")
        with suppress(Interruption), Watch(stop=at):
            self.decoder.step(ids, self.cache, mask, pos, self.rows, None)
            raise NotImplementedError("the step calls no function of torch, so we cannot interrupt it")

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


def scenarios_for(window, L, seed):
    """Return the scenarios for sequences of L tokens: {name: (needs, run)}.

    needs       an argument of `step`, or "generate", or None
    run(start)  feeds a cache, where start() makes a Stream, and raises Wrong if a logit or a token is wrong
    """
    third, n = L // 3, min(8, L // 4)
    fork, short = third | 1, min(third, 2 * n)  # fork: see Reference; short: where the length does not matter
    page = 1 << fork.bit_length()  # where pages begin, of up to so many tokens
    ones = [1] * n  # so many single tokens are enough to see a mistake
    largest = int(((8 * L + 1) ** 0.5 - 1) / 2)  # chunks of 1, 2, ... up to it fit into L tokens
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
        """Let the decoder's own loop or search choose tokens: again up to an end token, and after an exception."""
        first, second = start((5, 6, 7), **options), start(**options)
        decoder = first.decoder

        def call(use_cache, stream, eos=None):
            """Return the tokens that each row gets, up to its end."""
            ids, *_, mask = stream.next(short)
            output = decoder.generate(ids.clone(), n, use_cache, mask, eos, stream.rows)
            new = output[:, short:] if torch.equal(output[:, :short], ids) else output
            return [row[: row.index(eos) + 1] if eos in row else row for row in new.tolist()]

        def compare():
            row, watch = call(False, second)[0], Watch()
            end = row[len(row) // 2] if decoder.takes("generate", "eos") else None
            cases = {"first": (first, None), "second": (second, end), "third": (first, None)}
            expected = {which: call(False, *case) for which, case in cases.items()}
            for which, case in cases.items():
                if which == "third":
                    with suppress(Interruption), Watch(stop=watch.calls // 4):
                        call(True, second)
                with watch:
                    chosen = call(True, *case)
                if chosen != expected[which]:
                    raise Wrong(f"the {which} call of generate() chooses different tokens with the cache than without")

        try:
            with first.reference.exactly():  # so that rounding decides nothing
                compare()
        except RuntimeError:  # it cannot run in float64
            compare()

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
        stream.fail(1)
        stream.feed(1).fail(stream.calls // 2)
        feed(start, short, *ones, rows=(5, 6, 7))

    scenarios = {}

    def add(name, function, *arguments, needs=None, **options):
        scenarios[name] = needs, lambda start: function(start, *arguments, **options)

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
