"""A batch of sequences on its way through one cache."""

from contextlib import suppress

import torch

from check_cache.adapters import TWIN
from check_cache.attention import Interruption, Watch
from check_cache.cause import Step, find_cause
from check_cache.huggingface import refusals
from check_cache.report import Verdict, first_line, refuses


class Stream:
    """A batch of the sequences `rows` on its way through one cache. Its errors go into `found`.

    Rows begin with `pads` tokens of padding, if there are any, and a mask hides them. `ragged` rows end with them in
    the prefill, have none afterwards, and no mask.
    """

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

    def feed(self, count, drafts=0):
        """Feed the next `count` tokens of each row and compare their logits. Drafts come from another sequence."""
        for begin in range(0, count + drafts, self.chunk):
            T = min(self.chunk, count + drafts - begin)
            self.step(T, min(T, max(0, begin + T - count)))
        return self

    def feed_all(self, *sizes):
        """Feed steps of these sizes, until the sequences end."""
        for size in sizes:
            if size := min(size, self.reference.length - self.fed):
                self.feed(size)
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
        except (ValueError, AssertionError) as error:
            if refuses(error) and most < T and (self.kind, True) in decoder.accepted:
                raise NotImplementedError(f"the step refuses {T} tokens (see chunk=): {first_line(error)}") from None
            raise
        decoder.accepted[self.kind, self.fed > 0] = max(most, T)
        self.fed, self.calls = self.fed + T, watch.calls
        missing = T - logits.size(1)  # some decoders only return the logits of the last token
        if missing and self.ragged:
            raise NotImplementedError("the step returns logits of the last slot, which may be padding")
        positions = positions.where(torch.arange(T) < T - drafts, -1)
        seen, compared = (rows[:, missing:], pos[:, missing:]), positions[:, missing:] >= 0
        error = reference.error(logits, *seen).where(compared, 0)
        self.found.append((error[compared], reference.rounding[seen][compared]))
        if (wrong := error > reference.limit).any():
            t, i = wrong.T.nonzero()[0].tolist()
            row, position = (part[i, t].item() for part in seen)
            pads = self.pads[:, 0] * (not self.ragged)
            each = enumerate(zip(self.rows.tolist(), positions, pads.tolist()))
            steps = [Step(i, len(ids), *one, self.fed, watch.reads, watch.hidden) for i, one in each]
            try:
                cause = find_cause(reference, steps)
            except Exception as problem:  # a kind of attention that we do not know
                cause = f"cause unknown: {first_line(problem)}"
            rule = f"logits off by {error.max():.2g} (allowed {reference.limit:.1g}), first at row {row}, position "
            rule += f"{position}, in a step of {len(ids)} rows and {T} tokens"
            raise Verdict("wrong", cause, rule, error.max().item(), position, (len(ids), T))

    def fail(self, at):
        """Feed a token, but stop the step at call number `at` of torch."""
        ids, _, pos, mask = self.next(1)
        if not self.decoder.torch:
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
        try:
            cache = self.decoder.operation(self.cache, name)(*args)
        except refusals(self.cache) as error:  # such as a full window that cannot be cropped
            raise NotImplementedError(first_line(error)) from None
        self.cache = self.cache if cache is None else cache
        self.rows = self.rows if rows is None else torch.as_tensor(rows)
        return self
