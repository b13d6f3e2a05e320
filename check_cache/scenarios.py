"""The scenarios: how tokens reach a cache. Each differs from plain decoding in one thing."""

import copy
from functools import partial

import torch

from check_cache.adapters import ROWS
from check_cache.attention import Watch
from check_cache.cause import find_cause
from check_cache.reference import PADS
from check_cache.report import first_line


class Stream:
    """A batch of the sequences `rows` on its way through one cache. Its errors go into a Result.

    Rows begin with `pads` tokens of padding. `ragged` rows end with them in the prefill, and have none afterwards.
    """

    def __init__(self, reference, result, rows=(0, 1, 2), pads=(0,), masked=False, ragged=False):
        self.reference, self.result, self.decoder, self.fed = reference, result, reference.decoder, 0
        self.rows, self.pads, self.ragged = torch.tensor([*rows]), torch.tensor(pads)[:, None], ragged
        self.masked = (masked or any(pads)) and not ragged
        if self.masked and not self.decoder.takes_mask:
            raise NotImplementedError("the step takes no mask")
        if ragged and not self.decoder.takes_lengths:
            raise NotImplementedError("the step takes no lengths")
        self.cache = self.decoder.new(len(self.rows), reference.slots, result.cache)

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
        decoder, result, T = self.decoder, self.result, count + drafts
        ids, rows, positions, mask = self.next(T, drafts)
        pos = positions.clamp(min=0)
        with Watch() as watch:
            lengths = (positions >= 0).sum(1) if self.ragged else None
            output = decoder.step(ids, self.cache, mask, pos, self.rows, lengths)
        logits, cache = output if isinstance(output, tuple) else (output, None)
        self.cache = self.cache if cache is None else cache
        self.fed += T
        logits = logits[:, None] if logits.dim() == 2 else logits
        missing = T - logits.size(1)  # some decoders only return the logits of the last token
        if missing not in (0, T - 1) or logits.shape[::2] != (len(ids), decoder.vocab_size):
            needed = (*ids.shape, decoder.vocab_size)
            raise TypeError(f"step returns logits of shape {tuple(logits.shape)}, but we need {needed}")
        if missing and self.ragged:
            raise NotImplementedError("the step returns logits of the last slot, which may be padding")
        suspect = self.compare(logits[:, : count - missing], rows[:, missing:count], positions[:, missing:count])
        if suspect and not result.why:
            try:
                result.why = find_cause(self, watch.reads, T, rows, positions, drafts)
            except Exception as error:  # a kind of attention that we do not know
                result.why = f"cause unknown: {first_line(error)}"
        return self

    def compare(self, logits, rows, positions):
        """Note the errors of logits by position and then by row. Return whether one is larger than usual."""
        batch, tokens = (torch.full((len(rows) * rows.size(1),), size) for size in rows.shape)
        places = (positions >= 0).T.nonzero(as_tuple=True)[::-1]
        logits, rows, positions = logits[places], rows[places], positions[places]
        error = self.reference.error(logits, rows, positions)
        differs = logits.argmax(-1) != self.reference.argmax[rows, positions]
        self.result.errors.append((rows, positions, error, differs, batch[: len(rows)], tokens[: len(rows)]))
        return (error > self.reference.suspicious).any()

    def feed_all(self, *sizes):
        """Feed steps of these sizes, until the sequences end."""
        for size in sizes:
            if size := min(size, self.reference.length - self.fed):
                self.feed(size)
        return self

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
    """Return {name: scenario} for sequences of L tokens. A scenario is called with `start`, which makes a Stream."""
    half, third, n = L // 2 | 1, L // 3, min(8, L // 4)  # half: see Reference
    ones = [1] * n  # so many single tokens are enough to see a mistake
    largest = largest_chunk(L)
    mixed = (torch.randperm(largest, generator=torch.Generator().manual_seed(seed), device="cpu") + 1).tolist()
    around = (window - 1, window + 2) if window and largest - 2 < window < L else ()
    # decode up to the end, or from a window that is nearly full until a ring of its size starts again
    P, end = (max(1, window - n), 2 * window + n) if window and window < L else (max(third, L - 6 * n), L)

    def feed(start, *sizes, **options):
        start(**options).feed_all(*sizes)

    def batches(start):
        for B in range(1, ROWS + 1):
            feed(start, third, 1, rows=range(B))

    def generate(start, runs=((5, 6, 7), (0, 1, 2)), **options):
        """Let the decoder's own loop or search choose tokens, twice, so that the second run may meet leftovers."""
        streams = [start(rows, **options) for rows in runs]
        decoder, reference, result = streams[0].decoder, streams[0].reference, streams[0].result

        def run(use_cache):
            prompts = [(stream.next(third), stream.rows) for stream in streams]
            return [decoder.generate(ids, n, use_cache, mask, rows) for (ids, *_, mask), rows in prompts]

        try:
            with reference.exactly():  # so that rounding decides nothing
                with_cache, without = run(True), run(False)
        except RuntimeError:  # it cannot run in float64
            with_cache, without = run(True), run(False)
        for which, x, y in zip(("first", "second"), with_cache, without):
            if y.size(1) not in (n, third + n):
                raise TypeError(f"generate returns {y.size(1)} tokens per row, but we asked for {n} new ones")
            if not torch.equal(x, y) and result.status != "wrong":
                result.status = "wrong"
                result.why = f"the {which} call of generate() chooses different tokens with the cache than without"

    def prefix_twice(start):
        first = start().feed(half)
        second = copy.copy(first)
        second.cache, second.rows = first.decoder.fork(first.cache), first.rows + 3
        for size in ones[: n // 2]:
            first.feed(size)
            second.feed(size)

    def two_at_once(start):
        first, second = start(), start(rows=(5, 6, 7))
        for size in (third, *ones[: n // 2]):
            first.feed(size)
            second.feed(size)

    def rollback(start, P=half, everything=False, then=None):
        """Speculative decoding: feed a token and some drafts, then take these back."""
        stream = start().feed(P)
        if getattr(stream.cache, "is_croppable", True) is False:
            raise NotImplementedError("the cache cannot be cropped (is_croppable)")
        if hasattr(stream.cache, "activate_past_recording"):  # a window of transformers must be told in advance
            stream.cache.activate_past_recording()
        if everything:
            stream.crop(P).feed(P, 4).crop(4)
        for drafts in (4, 1, 3, 2) * (n // 4):
            stream.feed(1, drafts).crop(drafts)
            if then:
                stream.change("reorder", torch.tensor(then), rows=stream.rows[[*then]])

    def reset(start):
        stream = start(rows=(5, 6, 7)).feed_all(L - 2, 1, 1)
        stream.change("reset", rows=(0, 1, 2)).fed = 0
        stream.feed_all(third, *ones)

    def rearrange(start, name, argument, rows):
        start().feed(half).change(name, argument, rows=rows).feed_all(*ones)

    return {
        "decode": lambda start: feed(start, P, *[1] * (end - P)),
        "decode from 1 token": lambda start: feed(start, 1, *ones, *ones),
        **{f"chunks of {size}": lambda start, size=size: feed(start, *[size] * L) for size in around},
        "chunks of mixed sizes": lambda start: feed(start, *mixed),
        "chunks that double": lambda start: feed(start, n, *(n * 2**i for i in range(L.bit_length()))),
        "mask of ones": lambda start: feed(start, third, 5, *ones, masked=True),
        "left padding": lambda start: feed(start, third, *ones, pads=PADS),
        "left padding in chunks": lambda start: feed(start, third, *mixed[:n], pads=[pad + 2 for pad in PADS]),
        "rows of different lengths": lambda start: feed(start, third, *ones, 4, pads=PADS, ragged=True),
        "generate": generate,
        "generate with left padding": partial(generate, runs=((0, 1, 2),), pads=PADS),
        "prefix used twice": prefix_twice,
        "two caches at once": two_at_once,
        "speculative rollback": rollback,
        "rollback of everything": partial(rollback, P=min(half, (window or L) - 1), everything=True),
        "rollback, then reorder": partial(rollback, then=(0, 0, 2)),
        # two beams continue row 0, as it is and as row 3, which differs from it from now on
        "reorder": partial(rearrange, name="reorder", argument=torch.tensor((2, 0, 0)), rows=(2, 0, 3)),
        "repeat": partial(rearrange, name="repeat", argument=2, rows=(0, 3, 1, 4, 2, 5)),
        "select": partial(rearrange, name="select", argument=torch.tensor((2, 0)), rows=(2, 0)),
        "reuse after reset": reset,
        "batches of 1 to 8 rows": batches,
    }
