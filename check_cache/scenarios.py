"""How tokens reach a cache: a Stream feeds them, and each scenario differs from plain decoding in one thing."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from check_cache.adapters import ROWS, TWIN
from check_cache.attention import Interruption, Watch
from check_cache.cause import Step, find_cause
from check_cache.huggingface import prepare_rollback, refusals
from check_cache.report import Verdict, describe, first_line, refuses

LEAST = 24  # tokens per row
PADS = (0, 3, 5)  # padding tokens of each row, fewer than a third of LEAST


class Sizes:
    """How many tokens scenarios feed. `window` is of sliding attention."""

    def __init__(self, length, window=None):
        self.length, self.window, self.third = length, window, length // 3
        self.fork = self.third | 1  # odd, so that it is within a page of a paged cache
        self.page = 1 << self.fork.bit_length()  # where pages begin, of up to that many tokens
        self.short = min(self.third, 16)  # where the length does not matter
        self.ones = [1] * min(8, length // 4)  # enough single tokens to see a mistake
        largest = int(((8 * length + 1) ** 0.5 - 1) / 2)  # chunks of 1, 2, ... up to it fit into the length
        draw = torch.Generator().manual_seed(0)
        self.mixed = (torch.randperm(largest, generator=draw, device="cpu") + 1).tolist()
        self.around = [window - 1, window + 2] * length if window else []
        self.doubling = [len(self.ones) * 2**i for i in range(length.bit_length())]
        # the prefill of `decode` nearly fills the window, if there is one
        self.prefill = max(2, window - len(self.ones)) if window and window < length else self.third


class Stream:
    """The sequences `rows` on their way through one cache. `ragged` rows end with their padding, in the prefill."""

    def __init__(self, reference, kind, found, rows=(0, 1, 2), pads=None, ragged=False, spare=8):
        self.reference, self.found, self.decoder, self.fed = reference, found, reference.decoder, 0
        self.rows, self.ragged, self.kind, self.masked = torch.tensor([*rows]), ragged, kind, pads and not ragged
        self.chunk = self.decoder.chunk or reference.length  # the most tokens of a step
        if any(pads or ()) and self.chunk == 1:
            raise NotImplementedError("a step of one token has no room for padding")
        self.padding = torch.tensor(pads or (0, 0, 0)).clamp(max=self.chunk - 1)  # of each row and its twin
        slots = reference.length + spare  # a static cache has empty slots, or none in the end
        self.cache = self.decoder.call("new", len(self.rows), min(slots, self.decoder.context or slots), kind=kind)

    @property
    def pads(self):
        return self.padding[self.rows % TWIN, None]

    def next(self, T, drafts=0):
        """Return the ids, rows, positions (B, T), below 0 for padding, and the mask of the next T tokens."""
        reference, end, B = self.reference, self.fed + T, len(self.rows)
        positions = (torch.arange(self.fed, end) - self.pads).expand(B, T)
        if self.ragged and self.fed == 0:
            positions = torch.arange(T).where(torch.arange(T) < T - self.pads, -1)
        rows = self.rows[:, None].expand(B, T)
        chosen = reference.ids[rows + TWIN * (torch.arange(T) >= T - drafts), positions.clamp(min=0)]
        mask = (torch.arange(end) >= self.pads).expand(B, end).long() if self.masked else None
        return chosen.where(positions >= 0, self.decoder.pad), rows, positions, mask

    def feed(self, *sizes, drafts=0):
        """Feed steps of these sizes, until the sequences end, and compare logits. Drafts come from another sequence."""
        for size in sizes:
            count = min(size, self.reference.length - self.fed)
            for begin in range(0, count + drafts, self.chunk):
                T = min(self.chunk, count + drafts - begin)
                self.step(T, min(T, max(0, begin + T - count)))
        return self

    def step(self, T, drafts):
        """Feed T tokens at once, the last of which are drafts. End the scenario if a logit of the others is off."""
        reference, decoder = self.reference, self.decoder
        ids, rows, positions, mask = self.next(T, drafts)
        pos, lengths = positions.clamp(min=0), (positions >= 0).sum(1) if self.ragged else None
        most = decoder.accepted.get((self.kind, self.fed > 0), 0)
        try:
            with Watch() as watch:
                logits, self.cache = decoder.step(ids, self.cache, mask, pos, self.rows, lengths)
        except (NotImplementedError, Verdict):
            raise
        except Exception as error:
            if refuses(error) and most < T and (self.kind, True) in decoder.accepted:
                raise NotImplementedError(f"the step refuses {T} tokens (see chunk=): {first_line(error)}") from None
            hint = ". If your step takes one token at a time, pass chunk=1" if most == 1 < T else ""
            raise Verdict("wrong", describe(error) + hint, step=(len(ids), T)) from None
        decoder.accepted[self.kind, self.fed > 0] = max(most, T)
        self.fed, self.calls = self.fed + T, watch.calls
        missing = T - logits.size(1)  # some decoders only return the logits of the last token
        positions = positions.where(torch.arange(T) < T - drafts, -1)
        seen, compared = (rows[:, missing:], pos[:, missing:]), positions[:, missing:] >= 0
        error = reference.error(logits, *seen).where(compared, 0)
        self.found.append((error[compared], reference.rounding[seen][compared]))
        if (wrong := error > reference.limit).any():
            t, i = wrong.T.nonzero()[0].tolist()
            row, position = (part[i, t].item() for part in seen)
            pads = self.pads[:, 0] * (not self.ragged)
            each = enumerate(zip(self.rows.tolist(), positions, pads.tolist()))
            steps = [Step(i, len(ids), *one, self.fed, watch.reads) for i, one in each]
            try:
                cause = find_cause(reference, steps)
            except Exception as problem:  # a kind of attention that we do not know
                cause = f"cause unknown: {first_line(problem)}"
            rule = f"logits off by {error.max():.2g} (allowed {reference.limit:.1g}), first at row {row}, position "
            rule += f"{position}, in a step of {len(ids)} rows and {T} tokens"
            size = dict(off=error.max().item(), limit=reference.limit.item())
            raise Verdict("wrong", cause, rule=rule, position=position, step=(len(ids), T), **size)

    def fail(self, at):
        ids, _, pos, mask = self.next(1)
        with suppress(Interruption), Watch(stop=at if self.decoder.torch else None):
            self.decoder.step(ids, self.cache, mask, pos, self.rows, None)
            raise NotImplementedError("the step runs outside of torch, so we cannot interrupt it")

    def crop(self, count):
        self.fed -= count
        return self.change("crop", self.fed if "crop" in self.decoder.parts else -count)

    def change(self, name, *args, rows=None):
        """Crop, reorder, ... the cache. Go on with what that returns, a cache or None, and with the rows now in it."""
        # a search begins with one row, but some caches have a fixed number of rows
        fixed = (RuntimeError, IndexError) if rows is not None and len(self.rows) == 1 else ()
        try:
            cache = self.decoder.operation(self.cache, name)(*args)
        except (*refusals(self.cache), *fixed) as error:  # such as a full window that cannot be cropped
            raise NotImplementedError(first_line(error)) from None
        self.cache = self.cache if cache is None else cache
        self.rows = self.rows if rows is None else torch.as_tensor(rows)
        return self


@dataclass(frozen=True)
class Scenario:
    name: str
    run: Callable
    needs: tuple[str, ...]  # parts of the adapter, as "generate"


def scenario(name, needs=()):
    """Make a scenario of a function(start, sizes). start(rows, pads) returns a Stream. ADAPTERS.md has an example."""
    return lambda run: Scenario(name, run, tuple(needs))


def feeding(name, sizes_of, needs=(), **options):
    """Return the scenario that feeds steps of the sizes that sizes_of(sizes) returns."""
    return Scenario(name, lambda start, sizes: start(**options).feed(*sizes_of(sizes)), needs)


decode = feeding("decode", lambda sizes: [sizes.prefill, *[1] * sizes.length], spare=0)
decode_from_one = feeding("decode from 1 token", lambda sizes: [1] * sizes.prefill)  # both decode every position once
chunks_mixed = feeding("chunks of mixed sizes", lambda sizes: sizes.mixed)
chunks_doubling = feeding("chunks that double", lambda sizes: [len(sizes.ones), *sizes.doubling], spare=0)
chunks_around = feeding("chunks around the window", lambda sizes: sizes.around, ("window",))
mask_of_ones = feeding("mask of ones", lambda sizes: [sizes.third, *sizes.ones], pads=(0, 0, 0))
padding = feeding("left padding", lambda sizes: [sizes.third, *sizes.ones], pads=PADS)
padding_in_chunks = feeding("left padding in chunks", lambda sizes: [sizes.third, *sizes.mixed[:8]], pads=(2, 5, 7))
RAGGED = dict(pads=PADS, ragged=True)
ragged = feeding("rows of different lengths", lambda sizes: [sizes.third, *sizes.ones], **RAGGED)
ragged_in_chunks = feeding("rows of different lengths in chunks", lambda sizes: [sizes.third, 4, *sizes.ones], **RAGGED)


def generate_twice(start, sizes, **options):
    """Let the decoder's own loop or search choose tokens: again up to an end token, and after an exception."""
    first, second = start((5, 6, 7), **options), start(**options)
    decoder = first.decoder

    def call(use_cache, stream, eos=None):
        ids, *_, mask = stream.next(sizes.short)
        output = decoder.generate(ids.clone(), len(sizes.ones), use_cache, mask, eos, stream.rows)
        new = output[:, sizes.short :] if torch.equal(output[:, : sizes.short], ids) else output
        return [row[: row.index(eos) + 1] if eos in row else row for row in new.tolist()]

    def compare(which, chosen, expected):
        if chosen != expected:
            raise Verdict("wrong", f"the {which} call of generate() chooses different tokens than without the cache")
        first.found.append((torch.zeros(1), torch.zeros(1)))  # as if of equal logits

    def run():
        row = call(False, second)[0]
        end = row[len(row) // 2] if decoder.takes("generate", "eos") else None
        expected, ended = call(False, first), call(False, second, end)
        with Watch() as watch:
            compare("first", call(True, first), expected)
            compare("second", call(True, second, end), ended)
        with suppress(Interruption), Watch(stop=watch.calls // 4):
            call(True, second)
        compare("third", call(True, first), expected)

    try:
        with first.reference.exactly():  # so that rounding decides nothing
            run()
    except RuntimeError:  # its loop cannot run in float64, even if the model can
        run()


generate = scenario("generate", needs={"generate"})(generate_twice)
generate_with_padding = scenario("generate with left padding", needs={"generate"})(partial(generate_twice, pads=PADS))


@scenario("prefix used twice")
def prefix_twice(start, sizes):
    first = start().feed(sizes.fork)
    second = copy.copy(first)
    second.cache, second.rows = first.decoder.fork(first.cache), first.rows + TWIN
    for size in sizes.ones[::2]:
        first.feed(size)
        second.feed(size)


@scenario("two caches at once")
def two_at_once(start, sizes):
    first, second = start(), start(rows=(5, 6, 7))
    first.feed(sizes.short)
    second.feed(sizes.short)
    first.reference.full(slice(3), sizes.short)  # a call without a cache must not disturb them
    for size in sizes.ones[::2]:
        first.feed(size)
        second.feed(size)


@scenario("equal pages after different beginnings")
def equal_pages(start, sizes):
    """Engines share pages among prompts. In rows 0 and 1, the first page is equal to that of their twins, and the
    later ones to those of rows 6 and 7, which begin differently."""
    for rows in (3, 4), (6, 7), (0, 1), (3, 6, 0):  # in turn, and together
        stream = start(rows).feed(min(sizes.length - len(sizes.ones), 200))
    stream.feed(*sizes.ones[::2])


def feed_croppable(start, prompt):
    """Return a Stream after a prompt, with a cache that can be cropped."""
    stream = start()
    prepare_rollback(stream.cache)
    stream.feed(prompt)
    if not prepare_rollback(stream.cache):  # now that we have a cache that knows
        raise NotImplementedError("is_croppable is False")  # crop may not say so
    return stream


def roll_back(start, sizes, then=None):
    """Speculative decoding: feed a token and some drafts, take back those that differ, and go on."""
    stream = feed_croppable(start, sizes.page - 1)
    for accepted, rejected in (0, 4), (0, 1), (2, 1), (1, 3), (3, 0), (0, 2):
        if stream.fed + accepted + rejected + 2 > sizes.length:
            break
        stream.feed(1 + accepted, drafts=rejected)
        if rejected:
            stream.crop(rejected)
        if then:
            stream.change("reorder", torch.tensor(then), rows=stream.rows[[*then]])
        if rejected != 1:  # then the next draft follows at once
            stream.feed(1)


rollback = scenario("speculative rollback", needs={"crop"})(roll_back)
rollback_reorder = scenario("rollback, then reorder", needs=("crop", "reorder"))(partial(roll_back, then=(0, 0, 2)))


@scenario("rollback of several steps", needs={"crop"})
def rollback_far(start, sizes):
    """Take back several steps, as who edits an earlier turn does: the newest, half of the prompt, or all."""
    for kept in sizes.fork + 6, sizes.fork // 2, 0:
        stream = feed_croppable(start, 2)  # so early that a cache with a window records all that follows
        stream.feed(sizes.fork, 4).feed(0, drafts=4).feed(0, drafts=4)
        stream.crop(stream.fed - kept)
        stream.feed(4, *sizes.ones)


def rearranged(name, operation, argument, rows, before=(0, 1, 2), pads=None):
    def run(start, sizes):
        stream = start(before, pads).feed(sizes.fork)
        stream.change(operation, torch.tensor(argument) if isinstance(argument, tuple) else argument, rows=rows)
        stream.feed(*sizes.ones)

    return Scenario(name, run, (operation,))


# two beams continue row 0, as it is and as its twin, which differs from it from now on. A search begins with one row
reorder = rearranged("reorder", "reorder", (2, 0, 0), (2, 0, TWIN))
reorder_one = rearranged("reorder from one row", "reorder", (0, 0, 0), (0, TWIN, 0), before=(0,))
repeat = rearranged("repeat", "repeat", 2, (0, TWIN, 1, 1 + TWIN, 2, 2 + TWIN))
repeat_one = rearranged("repeat from one row", "repeat", 3, (0, TWIN, 0), before=(0,))
select = rearranged("select", "select", (2, 0), (2, 0))
select_one = rearranged("select from one row", "select", (0, 0, 0), (0, TWIN, 0), before=(0,))
padding_reorder = rearranged("left padding, then reorder", "reorder", (2, 0, 0), (2, 0, TWIN), pads=PADS)


@scenario("reuse after reset", needs={"reset"})
def reset(start, sizes):
    stream = start(rows=(5, 6, 7)).feed(2 * sizes.third, 1, 1)
    stream.change("reset", rows=(0, 1, 2)).fed = 0
    stream.feed(sizes.third, *sizes.ones)


@scenario("batches of 1 to 8 rows")
def batches(start, sizes):
    for B in range(1, ROWS + 1):
        start(rows=range(B)).feed(sizes.short, 1)


@scenario("going on after an exception")
def go_on(start, sizes):
    """After an exception, a step that has not begun leaves its cache alone, and any step leaves others alone."""
    stream = start().feed(sizes.short).feed(1)
    stream.fail(1)
    stream.feed(1).fail(stream.calls // 2)
    start(rows=(5, 6, 7)).feed(sizes.short, *sizes.ones)


SCENARIOS = [value for value in globals().values() if isinstance(value, Scenario)]
