"""Where a wrong logit comes from: the first thing that attention reads but should not.

We ask in the order in which a decoder computes. Are the keys, values and queries of the new tokens correct? Are the
keys and values kept from earlier tokens correct? Are the weights correct, that is, does each token see what it should?

Without a cache, attention reads one column per slot in front of the text, if there are any, and one per token. So token
p is in column front + p. With a cache, any slot may hold any column.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cosine_similarity

from check_cache.adapters import ROWS
from check_cache.attention import Read, repeat_heads, shaped


@dataclass
class Slot:
    """A slot that should hold the key and value of a column of a row, and does not."""

    reference: object
    own: Read  # of this layer, without a cache
    row: int
    column: int
    index: int
    new: bool  # whether its token is new
    columns: torch.Tensor  # (slots,), what should be in each slot of the row, or -1 if we do not know
    bad: torch.Tensor  # (slots,), whether it is not there
    heads: torch.Tensor  # (heads,), which heads are wrong in this slot
    pairs: dict  # "key" or "value", if wrong: what is in all slots and what should be, both (wrong heads, slots, size)

    @property
    def front(self):
        return self.own.weights.size(-1) - self.reference.length

    @property
    def position(self):
        return self.column - self.front

    @property
    def here(self):
        """What is in this slot, and what should be, (wrong heads, size)."""
        return [(got[:, self.index], wanted[:, self.index]) for got, wanted in self.pairs.values()]


def whose(row, position):
    return f"row {row}, position {position}" if position >= 0 else f"row {row}, in front of the text"


def find_cause(stream, reads, T, rows, positions, drafts):
    """Return the cause of wrong logits, from the reads of a step of T tokens, the last of which are drafts, or None."""
    expected, calls = stream.reference.reads, stream.reference.calls
    if not expected:
        unseen = "reads no sequence as a whole" if calls else "calls no softmax (flex_attention hides it)"
        return f"cause unknown: without a cache, attention {unseen}, so we cannot compare what it reads"
    # some decoders split the T tokens, often into single tokens
    sizes = {1: [T], T: [1] * T}.get(len(reads) / calls)
    sizes = sizes or [shaped(read, len(rows)).weights.size(2) for read in reads[expected[0][0] :: calls]]
    if len(reads) % calls or sum(sizes) != T:
        return f"a step calls attention {len(reads)} times, but {calls} times without a cache"
    end = 0
    while end < T - drafts:
        part, size = reads[:calls], sizes.pop(0)
        reads, new, end = reads[calls:], slice(end, end + size), end + size
        fed, later = stream.fed - T + end, max(0, end - T + drafts)
        for layer, (call, wanted) in enumerate(expected):
            read = shaped(part[call], len(rows))
            if cause := compare_layer(stream, read, wanted, fed, rows[:, new], positions[:, new], later):
                return f"layer {layer}: {cause}"


def compare_layer(stream, read, expected, fed, rows, positions, drafts):
    """Return the cause if the attention of one layer is wrong, or None."""
    reference, T = stream.reference, positions.size(1)
    front, count = expected.weights.size(-1) - reference.length, T - drafts
    first, fed = fed == T, front + fed
    rows, positions = rows[:, :count], positions[:, :count]
    row, real = rows[:, 0], positions >= 0

    # how should the new tokens weigh each column, and which column is in which slot?
    by_column = expected.weights[rows, :, positions.clamp(min=0)].transpose(1, 2)  # (B, heads, count, columns)
    places = place(stream, read, expected, by_column, row, fed, T)
    heads, slots = expected.weights.size(1), read.weights.size(-1)
    if T == 1 and read.weights.numel() == len(rows) * heads * slots:  # transformers puts the heads of a group there
        read.weights = read.weights.reshape(len(rows), heads, 1, slots)
    if first and 0 < read.weights.size(2) - T <= front:  # what is in front of the text may have queries, too
        query = None if read.query is None else read.query[:, :, -T:]
        read = Read(read.weights[:, :, -T:], query, read.key, read.value)
    if read.weights.size(2) != T:
        return f"a step feeds {read.weights.size(2)} tokens to attention, not {T}"

    known = (places >= 0) & (places < fed - stream.pads - drafts)  # drafts come from another sequence
    weights = at_places(by_column, 3, places) * known[:, None, None]

    absent = (by_column.sum(3) - weights.sum(3) > reference.coarse).any(1) & real  # (B, count)
    if absent.any():
        t, i = absent.T.nonzero()[0].tolist()
        missing = by_column[i, :, t].amax(0).index_fill(0, places[i][known[i]], 0).argmax().item()
        what = f"position {missing - front}" if missing >= front else "what is in front of the text"
        return f"the token of {whose(row[i], positions[i, t])} needs {what}, which is in no slot"

    used = known & (weights * real[:, None, :, None] > 0).any(2).any(1)  # (B, slots)
    bad, got, wanted = {}, {}, {}  # of keys and values, if we see them
    for name in ("key", "value"):
        if getattr(read, name) is not None and getattr(expected, name) is not None:
            full = at_places(getattr(expected, name)[row], 2, places)
            got[name], wanted[name] = same_heads(getattr(read, name), full)
            bad[name] = reference.differ(got[name], wanted[name]).any(1) & used
    wrong_query = compare_queries(reference, read.query, expected.query, rows, positions)
    if stream.pads.any() and "key" in bad:
        # Rotary positions may count the padding, because that moves no weight. Then no key of a row is as expected.
        value = bad.get("value", used & False)
        counts = (stream.pads > 0) & (bad["key"] | ~used).all(1, keepdim=True) & ~value.any(1, keepdim=True)
        bad["key"] = bad["key"] & ~counts
        wrong_query = wrong_query if wrong_query is None else wrong_query & ~counts

    off = sum(off.int() for off in bad.values())  # whether none of key and value is wrong, one, or both
    if bad and off.any():
        # the first wrong slot. Kept slots come before new ones, because they have been in use for longer
        kept = off * (places < fed - T - stream.pads)
        index, i = (kept if kept.any() else off).T.nonzero()[0].tolist()
        names = [name for name in bad if bad[name][i, index]]
        heads = sum(reference.differ(got[name][i, :, index], wanted[name][i, :, index]).int() for name in names) > 0
        pairs = {name: (got[name][i, heads], wanted[name][i, heads]) for name in names}
        place_of, columns = (row[i].item(), places[i, index].item(), index), places[i].where(known[i], -1)
        slot = Slot(reference, expected, *place_of, not kept.any(), columns, off[i] > 0, heads, pairs)
        asked = None if wrong_query is None else wrong_query[i, positions[i] == slot.position].any().item()
        return explain_slot(slot, asked, only="value" in bad and names == ["key"])
    if wrong_query is not None and wrong_query.any():
        t, i = wrong_query.T.nonzero()[0].tolist()
        held, right = read.query[i, :, t], expected.query[rows[i, t], :, positions[i, t]]
        reason = "its position, norm or scale, or an input that is slightly wrong"
        reason = "its heads are in another order" if shuffled(reference, held, right) else reason
        return f"mostly the query of {whose(rows[i, t], positions[i, t])} is wrong: {reason}"
    return compare_weights(stream, read.weights[:, :, :count], weights, row, positions, places - front)


def explain_slot(slot, asked, only):
    """Return the cause if a slot holds a wrong key or value.

    asked: whether the query of its token is wrong, too, or None if we cannot see it; only: its value is correct
    """
    what, be, of = " and ".join(slot.pairs), "are" if len(slot.pairs) > 1 else "is", whose(slot.row, slot.position)
    should, first = (
        f"slot {slot.index} should hold the {what} of {of}, but holds",
        slot.own is slot.reference.reads[0][1],
    )
    if owner := find_owner(slot):
        return f"{should} {owner}"
    reason = explain_place(slot) if slot.new and first else None
    close = None if reason else distance_if_close(slot)
    if close and slot.new and "rounded to" not in close:
        reason = "from a wrong input" if asked else "rounded or scaled"
        return f"the new {what} of {of} {be} slightly off on arrival: {reason}"
    if not slot.new or close:
        return f"{should} {close or 'something that no token produced: changed later, or a rejected draft token'}"
    if asked and "value" in slot.pairs and first:
        reason = reason or "wrong input: an embedding, an entry of inputs=, or a position that the text does not have"
    elif asked and "value" in slot.pairs:
        reason = "wrong input: a projection, an MLP, or a state of earlier tokens (recurrent, convolution, shift)"
    elif asked:
        reason = reason or "position ids, because its query is wrong too"
    elif asked is None:
        reason = reason or "wrong input or absolute position, or changed by the cache"
    reason = reason or "changed on the way into the cache, because its query is correct"
    return f"{'only the new key' if only else f'the new {what}'} of {of} {be} wrong on arrival: {reason}"


def explain_place(slot):
    """Return which other token, at which position, has the new key and value of layer 0, or what else decides them."""
    reference, ids, position = slot.reference, slot.reference.ids, slot.position
    if position < 0:
        return None
    others = torch.where(torch.arange(reference.length) < position, (ids + 1) % reference.decoder.vocab_size, ids)
    with reference.exactly():
        (_, mixed), *_ = reference.watch(others)
    if any(
        reference.differ(getattr(mixed, x), getattr(slot.own, x))[slot.row, :, slot.column].any() for x in slot.pairs
    ):
        return "a state that earlier tokens leave before attention (recurrent, convolution, shift)"
    if next(reference.decoder.inputs.buffers(), None) is None:  # so token and position decide
        # Which token, at which position, has such a key? Try the neighbors, each repeated over a whole sequence.
        tried = (position + torch.arange(ROWS) - ROWS // 2).clamp(0, reference.length - 1)
        with reference.exactly():
            (_, repeated), *_ = reference.watch(ids[slot.row, tried][:, None].expand_as(ids))
        same = places_of(slot, repeated)
        if same[tried == position].any():
            return f"its position is {same[tried == position].nonzero()[0, 1]}"
        if same[:, position].any():
            return f"its token is that of position {tried[same[:, position]][0]}"


def find_owner(slot):
    """Return in words what is in a slot instead of what belongs there, or None if we do not recognize it."""
    reference, i, position = slot.reference, slot.index, slot.position
    if slot.bad.sum() > 1:  # a whole row of the batch in another's place?
        for row in range(3):
            theirs = [heads_of(slot, slot.own, name)[row][:, slot.columns.clamp(min=0)] for name in slot.pairs]
            off = [reference.differ(got, x).any(0) for (got, _), x in zip(slot.pairs.values(), theirs)]
            if not (torch.stack(off).any(0) & slot.bad).any():
                return f"that of {whose(row, position)}"
    # Which slots hold what belongs here? Not those that should: values of layer 0 are the same for the same token.
    holds, should = (
        torch.stack([~reference.differ(pair[which], pair[1][:, [i]]).any(0) for pair in slot.pairs.values()]).all(0)
        for which in (0, 1)
    )
    if (elsewhere := holds & ~(should & (slot.columns >= 0))).any():
        return f"something else: what belongs there is in slot {elsewhere.nonzero()[0].item()}"
    if not any(got.any() for got, _ in slot.here):
        return "zeros, as in an empty slot"
    if all(shuffled(reference, got, wanted) for got, wanted in slot.here):
        return "its heads in another order"

    # the key or value of another token, row or layer?
    shapes = [getattr(slot.own, name).shape for name in slot.pairs]
    for layer, (_, read) in sorted(enumerate(reference.reads), key=lambda pair: pair[1][1] is not slot.own):
        if [getattr(getattr(read, name), "shape", None) for name in slot.pairs] != shapes:
            continue
        same = places_of(slot, read)
        if slot.new and read is slot.own:  # a key at a wrong position may be that of the same token elsewhere
            same &= reference.ids != reference.ids[slot.row, position]
        if same.any():
            # the same token may be in many places: name the nearest, preferably in the same row
            steps, another = (torch.arange(reference.length) - position).abs(), torch.arange(ROWS) != slot.row
            nearest = (steps + another[:, None] / 2).masked_fill(~same, torch.inf).argmin().item()
            row, there = divmod(nearest, reference.length)
            owner = f"row {row}" if row in (0, 1, 2, slot.row) else "another sequence or a rejected draft token"
            return f"that of {'' if read is slot.own else f'layer {layer}, '}{owner}, position {there}"


def heads_of(slot, read, name):
    """Return the keys or values (8, heads, columns, size) of a Read, of those heads that are wrong in a slot."""
    return repeat_heads(getattr(read, name), len(slot.heads))[:, slot.heads]


def places_of(slot, read):
    """Return which tokens (8, length) of a Read have the key and value that a slot holds."""
    differ = []
    for name, (held, right) in zip(slot.pairs, slot.here):
        tokens = heads_of(slot, read, name)[:, :, slot.front :]
        nearer = (tokens - held[:, None]).abs().amax(-1) < (right - held).abs().amax(-1)[:, None] / 2
        differ.append((slot.reference.differ(held[:, None], tokens) | ~nearer).any(1))
    return ~torch.stack(differ).any(0)


def shuffled(reference, held, right):
    """Whether each head of `held` (heads, size) is one of `right`, but not all in their places."""
    same = ~reference.differ(held[:, None], right)
    return same.any(1).all().item()


def distance_if_close(slot):
    """If a slot holds nearly what it should, as after rounding, return how far off it is in words. Otherwise None."""
    pairs = slot.here
    if any(cosine_similarity(got.flatten(), wanted.flatten(), dim=0) < 0.98 for got, wanted in pairs):
        return None
    off = max(((got - wanted).abs().max() / wanted.abs().max()).item() for got, wanted in pairs)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        coarser = torch.finfo(dtype).eps > slot.reference.eps
        if coarser and all((got.to(dtype).float() == got).all() for got, _ in pairs):
            return f"it rounded to {str(dtype)[6:]}, off by {off:.1g} of its size"
    return f"it rounded or scaled, off by {off:.1g} of its size"


def compare_queries(reference, got, wanted, rows, positions):
    """Return which queries of new tokens are wrong (B, count), or None if we cannot see them."""
    if got is None or wanted is None:
        return None
    got, wanted = got[:, :, : positions.size(1)], wanted[rows, :, positions.clamp(min=0)].transpose(1, 2)
    return reference.differ(got, wanted).any(1) & (positions >= 0) if got.shape == wanted.shape else None


def compare_weights(stream, got, wanted, row, positions, places):
    """Return the cause if queries at `positions` weigh the slots, which hold `places`, differently from `wanted`."""
    got, wanted = same_heads(got, wanted)
    wrong = ((got - wanted).abs() > stream.reference.coarse).any(1) & (positions >= 0)[..., None]  # (B, count, slots)
    if not wrong.any():
        return None
    got, wanted = got.amax(1), wanted.amax(1)
    seen, hidden = wrong & (wanted == 0), wrong & (got == 0)
    for bad, text in ((seen, "sees {}, but should not"), (hidden, "does not see {}, but should"), (wrong, None)):
        if bad.any():
            t, i, slot = bad.transpose(0, 1).nonzero()[0].tolist()
            position, where = places[i, slot].item(), f"slot {slot}"
            if position < 0:
                where += " (padding)" if stream.pads.any() else " (the cache was not empty at position 0)"
            elif position != slot:
                where += f" (position {position})"
            given, needed = got[i, t, slot].item(), wanted[i, t, slot].item()
            text = text or f"gives {{}} a weight of {given:.3g}, not {needed:.3g}: mask, bias, scale, heads or dropout"
            return f"the token of {whose(row[i], positions[i, t])} {text.format(where)}"


def place(stream, read, expected, weights, row, fed, T):
    """Return the column (B, slots) in each slot, in the layout that fits best. `weights` are by column."""
    slots, differ, front = (
        read.weights.size(-1),
        stream.reference.differ,
        expected.weights.size(-1) - stream.reference.length,
    )
    slot = torch.arange(slots)
    layouts = [slot] if slots >= fed else [fed - slots + slot, slot + (fed - 1 - slot) // slots * slots]  # a ring
    if slots > fed == front + T:
        layouts.append(slot + fed - slots)  # the cache was not empty
    seen = read.key is not None and expected.key is not None
    x, y, dim = (read.key, expected.key[row], 2) if seen else (read.weights[:, :, : weights.size(2)], weights, 3)

    def distance(places):
        got, wanted = same_heads(x, at_places(y, dim, places))
        return (got - wanted).abs().sum()

    pads = 0 if stream.ragged else stream.pads
    shifted = [layout.where((layout >= 0) & (layout < front), layout - pads) for layout in layouts]
    best = min((layout.expand(len(row), -1) for layout in shifted), key=distance)
    if not seen or stream.pads.any() or (slots >= fed and not stream.decoder.window):
        return best

    # A window may be kept in any order, with sinks before it, or a chunk after a ring: if each slot that is not empty
    # holds the key of a column, that is where the columns are.
    got, wanted = same_heads(x, y[:, :, :fed])
    fits = ~torch.stack([differ(got, wanted[:, :, [p]]).any(1) for p in range(fed)], 2)  # (B, slots, fed)
    if not (fits.any(2) | (got == 0).all(3).all(1)).all():
        return best
    as_best = fits.gather(2, best.clamp(0, fed - 1)[..., None])[..., 0] & (best >= 0) & (best < fed)
    return best.where(as_best, fits.int().argmax(2).where(fits.any(2), -1))


def at_places(x, dim, places):
    """Select the columns `places` (B, slots) from x (B, heads, ...) along `dim`, 2 or 3."""
    at = places.clamp(0, x.size(dim) - 1)
    return x.take_along_dim(at[:, None, :, None] if dim == 2 else at[:, None, None], dim)


def same_heads(x, y):
    """Return x and y with equally many heads."""
    heads = max(x.size(1), y.size(1))
    return repeat_heads(x, heads), repeat_heads(y, heads)
