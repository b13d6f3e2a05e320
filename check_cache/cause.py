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
    front: int
    row: int
    column: int
    index: int
    new: bool  # whether its token is new
    got: dict[str, torch.Tensor]  # "key" or "value", if wrong: what is in all slots of the row (heads, slots, size)
    wanted: dict[str, torch.Tensor]  # what should be there, the same shape
    columns: torch.Tensor  # (slots,), what should be there
    known: torch.Tensor  # (slots,), whether we know that
    bad: torch.Tensor  # (slots,), whether it is not there

    def __post_init__(self):
        pairs = zip(self.got.values(), self.wanted.values())
        off = [self.reference.differ(got[:, self.index], wanted[:, self.index]) for got, wanted in pairs]
        self.heads = torch.stack(off).any(0)

    @property
    def pairs(self):
        """What is in all slots, and what should be there, of those heads that are wrong."""
        return [(got[self.heads], self.wanted[name][self.heads]) for name, got in self.got.items()]

    @property
    def whose(self):
        return whose(self.row, self.column - self.front)


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
        read = Read(
            read.weights[:, :, -T:], read.query[:, :, -T:] if read.query is not None else None, read.key, read.value
        )
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

    if bad and (count_bad := sum(off.int() for off in bad.values())).any():
        # the first wrong slot. Kept slots come before new ones, because they have been in use for longer
        kept = count_bad * (places < fed - T - stream.pads)
        index, i = (kept if kept.any() else count_bad).T.nonzero()[0].tolist()
        wrong = [name for name in bad if bad[name][i, index]]
        got, wanted = ({name: tensors[name][i] for name in wrong} for tensors in (got, wanted))
        column = places[i, index].item()
        slot = Slot(
            reference,
            expected,
            front,
            row[i].item(),
            column,
            index,
            not kept.any(),
            got,
            wanted,
            places[i],
            known[i],
            count_bad[i] > 0,
        )
        asked = None if wrong_query is None else wrong_query[i, positions[i] == column - front].any().item()
        return explain_slot(slot, asked, only="value" in bad and wrong == ["key"])
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
    what, be = " and ".join(slot.got), "are" if len(slot.got) > 1 else "is"
    should = f"slot {slot.index} should hold the {what} of {slot.whose}, but holds"
    if owner := find_owner(slot):
        return f"{should} {owner}"
    place = explain_place(slot) if slot.new and slot.own is slot.reference.reads[0][1] else None
    close = None if place else distance_if_close(slot)
    if close and (not slot.new or "rounded to" in close):
        return f"{should} {close}"
    if close:
        reason = "from a wrong input" if asked else "rounded or scaled"
        return f"the new {what} of {slot.whose} {be} slightly off on arrival: {reason}"
    if not slot.new:
        return f"{should} something that no token produced: changed later, or a rejected draft token"
    reason = place
    if not place and asked:
        between = "a projection, an MLP, or a state of earlier tokens (recurrent, convolution, shift)"
        if slot.own is slot.reference.reads[0][1]:
            between = "an embedding, an entry of inputs=, or a position that the text does not have"
        reason = (
            f"wrong input, such as {between}" if "value" in slot.got else "position ids, because its query is wrong too"
        )
    elif not place and asked is None:
        reason = "wrong input or absolute position, or changed by the cache"
    elif not place:
        reason = "changed on the way into the cache, because its query is correct"
    return f"{'only the new key' if only else f'the new {what}'} of {slot.whose} {be} wrong on arrival: {reason}"


def explain_place(slot):
    """Return which other token, at which position, has the new key and value of layer 0, or what else decides them."""
    reference, position = slot.reference, slot.column - slot.front
    if position < 0:
        return None
    ids, shifted = reference.ids, (reference.ids + 1) % reference.decoder.vocab_size
    with reference.exactly():
        (_, other), *_ = reference.watch(torch.where(torch.arange(reference.length) < position, shifted, ids))
    for name in slot.got:
        if reference.differ(getattr(other, name), getattr(slot.own, name))[slot.row, :, slot.column].any():
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
    reference, i = slot.reference, slot.index
    if slot.bad.sum() > 1:  # a whole row of the batch in another's place?
        for row in range(3):
            theirs = [getattr(slot.own, name)[[row]] for name in slot.got]
            theirs = [at_places(x, 2, slot.columns[None])[0] for x in theirs]
            theirs = [repeat_heads(x[None], len(slot.heads))[0][slot.heads] for x in theirs]
            off = [reference.differ(got, x).any(0) for (got, _), x in zip(slot.pairs, theirs)]
            if not (torch.stack(off).any(0) & slot.bad).any():
                return f"that of {whose(row, slot.column - slot.front)}"
    # Which slots hold what belongs here? Not those that should: values of layer 0 are the same for the same token.
    holds = [~reference.differ(got, wanted[:, [i]]).any(0) for got, wanted in slot.pairs]
    should = [~reference.differ(wanted, wanted[:, [i]]).any(0) for _, wanted in slot.pairs]
    elsewhere = torch.stack(holds).all(0) & ~(torch.stack(should).all(0) & slot.known)
    if elsewhere.any():
        return f"something else: what belongs there is in slot {elsewhere.nonzero()[0].item()}"
    if not any(got[:, i].any() for got, _ in slot.pairs):
        return "zeros, as in an empty slot"
    if all(shuffled(reference, got[:, i], slot.wanted[name][:, i]) for name, (got, _) in zip(slot.got, slot.pairs)):
        return "its heads in another order"

    # the key or value of another token, row or layer?
    layers = sorted(enumerate(reference.reads), key=lambda pair: pair[1][1] is not slot.own)
    for layer, (_, read) in layers:
        if any(
            getattr(read, name) is None or getattr(read, name).shape != getattr(slot.own, name).shape
            for name in slot.got
        ):
            continue
        same = places_of(slot, read)
        if slot.new and read is slot.own:  # a key at a wrong position may be that of the same token elsewhere
            same &= reference.ids != reference.ids[slot.row, slot.column - slot.front]
        if same.any():
            # the same token may be in many places: name the nearest, preferably in the same row
            steps, another = (
                (torch.arange(reference.length) - slot.column + slot.front).abs(),
                torch.arange(ROWS) != slot.row,
            )
            nearest = (steps + another[:, None] / 2).masked_fill(~same, torch.inf).argmin().item()
            row, position = divmod(nearest, reference.length)
            owner = f"row {row}" if row in (0, 1, 2, slot.row) else "another sequence or a rejected draft token"
            return f"that of {'' if read is slot.own else f'layer {layer}, '}{owner}, position {position}"


def places_of(slot, read):
    """Return which tokens (8, length) of a Read have the key and value that a slot holds."""
    differ = []
    for name, (got, wanted) in zip(slot.got, slot.pairs):
        tokens = getattr(read, name)[:, :, slot.front :]
        tokens = repeat_heads(tokens, len(slot.heads))[:, slot.heads]
        held, right = got[:, slot.index], wanted[:, slot.index]
        nearer = (tokens - held[:, None]).abs().amax(-1) < (right - held).abs().amax(-1)[:, None] / 2
        differ.append((slot.reference.differ(held[:, None], tokens) | ~nearer).any(1))
    return ~torch.stack(differ).any(0)


def shuffled(reference, held, right):
    """Whether each head of `held` (heads, size) is one of `right`, but not all in their places."""
    same = ~reference.differ(held[:, None], right)
    return same.any(1).all().item()


def distance_if_close(slot):
    """If a slot holds nearly what it should, as after rounding, return how far off it is in words. Otherwise None."""
    pairs = [(got[:, slot.index], wanted[:, slot.index]) for got, wanted in slot.pairs]
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
