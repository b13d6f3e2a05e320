"""Where a wrong logit comes from: the first thing that attention reads but should not.

We ask in the order in which a decoder computes. Are the keys, values and queries of the new tokens correct? Are the
keys and values kept from earlier tokens correct? Are the weights correct, that is, does each token see what it should?
"""

import torch
from torch.nn.functional import cosine_similarity

from check_cache.adapters import ROWS
from check_cache.attention import repeat_heads, shaped


def find_cause(stream, reads, T, rows, positions, drafts):
    """Return the cause of wrong logits, from the reads of a step of T tokens, the last of which are drafts."""
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
    return "attention reads and sees what it should in all layers, as far as we can see: the mistake comes after it"


def compare_layer(stream, read, expected, fed, rows, positions, drafts):
    """Return the cause if the attention of one layer is wrong, or None."""
    reference, T = stream.reference, positions.size(1)
    count = T - drafts
    rows, positions = rows[:, :count], positions[:, :count]
    row, real = rows[:, 0], positions >= 0

    # how should the new tokens weigh each position, and which position is in which slot?
    by_position = expected.weights[rows, :, positions.clamp(min=0)].transpose(1, 2)  # (B, heads, count, length)
    places = place(stream, read, expected, by_position, row, fed, T)
    heads, slots = expected.weights.size(1), read.weights.size(-1)
    if T == 1 and read.weights.numel() == len(rows) * heads * slots:  # transformers puts the heads of a group there
        read.weights = read.weights.reshape(len(rows), heads, 1, slots)
    if read.weights.size(2) != T:
        return f"a step feeds {read.weights.size(2)} tokens to attention, not {T}"

    known = (places >= 0) & (places < fed - stream.pads - drafts)  # drafts come from another sequence
    weights = at_places(by_position, 3, places) * known[:, None, None]

    absent = (by_position.sum(3) - weights.sum(3) > reference.coarse).any(1) & real  # (B, count)
    if absent.any():
        t, i = absent.T.nonzero()[0].tolist()
        missing = by_position[i, :, t].amax(0).index_fill(0, places[i][known[i]], 0).argmax()
        whose = f"row {row[i]}, position {positions[i, t]}"
        return f"the token of {whose} needs position {missing}, which is in no slot"

    used = known & (weights * real[:, None, :, None] > 0).any(2).any(1)  # (B, slots)
    new = places >= fed - T - stream.pads
    contents = compare_contents(reference, read, expected, row, places, used)
    wrong_query = compare_queries(reference, read.query, expected.query, rows, positions)
    if stream.pads.any() and "key" in contents:
        # Rotary positions may count the padding, because that moves no weight. Then no key of a row is as expected.
        (key, *_), (value, *_) = contents["key"], contents.get("value", [used & False])
        counts = (stream.pads > 0) & (key | ~used).all(1, keepdim=True) & ~value.any(1, keepdim=True)
        contents["key"] = key & ~counts, *contents["key"][1:]
        wrong_query = wrong_query if wrong_query is None else wrong_query & ~counts
    if cause := explain_contents(reference, expected, contents, rows, positions, places, new, wrong_query):
        return cause
    if wrong_query is not None and wrong_query.any():
        t, i = wrong_query.T.nonzero()[0].tolist()
        whose = f"row {rows[i, t]}, position {positions[i, t]}"
        reason = "its position, norm or scale, or an input that is slightly wrong"
        return f"mostly the query of {whose} is wrong: {reason}"
    return compare_weights(stream, read.weights[:, :, :count], weights, row, positions, places)


def compare_contents(reference, read, expected, row, places, used):
    """Return {"key" or "value": (which slots are wrong (B, slots), what they hold, what they should hold)}, if seen."""
    contents = {}
    for name in ("key", "value"):
        got, wanted = getattr(read, name), getattr(expected, name)
        if got is not None and wanted is not None:
            got, wanted = same_heads(got, at_places(wanted[row], 2, places))
            contents[name] = reference.differ(got, wanted).any(1) & used, got, wanted
    return contents


def explain_contents(reference, expected, contents, rows, positions, places, new, wrong_query):
    """Return the cause if a slot holds a wrong key or value, or None. new (B, slots): whether its token is new."""
    bad = sum(bad.int() for bad, _, _ in contents.values())
    if not contents or not bad.any():
        return None

    # the first wrong slot. Kept slots come before new ones, because they have been in use for longer
    kept = (bad.bool() & ~new).any()
    slot, i = (bad * ~new if kept else bad).T.nonzero()[0].tolist()
    wrong = {name: (got[i], wanted[i, :, slot]) for name, (off, got, wanted) in contents.items() if off[i, slot]}
    what, be = " and ".join(wrong), "are" if len(wrong) > 1 else "is"
    row, position = rows[i, 0].item(), places[i, slot].item()
    whose = f"row {row}, position {position}"
    asked = None if kept or wrong_query is None else wrong_query[i, positions[i] == position].any().item()
    should = f"slot {slot} should hold the {what} of {whose}, but holds"
    if close := distance_if_close(reference, wrong, slot):
        if kept or "rounded to" in close:
            return f"{should} {close}"
        reason = "from a wrong input" if asked else "rounded or scaled"
        return f"the new {what} of {whose} {be} slightly off on arrival: {reason}"
    heads = sum(reference.differ(got[:, slot], wanted).int() for got, wanted in wrong.values()) > 0
    if owner := find_owner(reference, expected, wrong, heads, slot, row, position, not kept):
        return f"{should} {owner}"
    if kept:
        return f"{should} something that no token produced: changed later, or a rejected draft token"
    which = "only the new key" if what == "key" and "value" in contents else f"the new {what}"
    reason = explain_arrival(reference, expected, wrong, heads, slot, row, position, asked)
    return f"{which} of {whose} {be} wrong on arrival: {reason}"


def explain_arrival(reference, own, wrong, heads, slot, row, position, wrong_query):
    """Say why a new key or value is wrong. own to position: as in find_owner."""
    alone = next(reference.decoder.inputs.buffers(), None) is None
    if own is reference.reads[0][1] and alone:  # nothing before it mixes tokens, so token and position decide
        # Which token, at which position, has such a key? Try the neighbors, each repeated over a whole sequence.
        tried = (position + torch.arange(ROWS) - ROWS // 2).clamp(0, reference.length - 1)
        with reference.exactly():
            (_, repeated), *_ = reference.watch(reference.ids[row, tried][:, None].expand_as(reference.ids))
        same = places_of(reference, repeated, wrong, heads, slot)
        if same[tried == position].any():
            return f"its position is {same[tried == position].nonzero()[0, 1]}"
        if same[:, position].any():
            return f"its token is that of position {tried[same[:, position]][0]}"
    if wrong_query:
        return "wrong input" if "value" in wrong else "position ids, because its query is wrong too"
    if wrong_query is None:
        return "wrong input or absolute position, or changed by the cache"
    return "changed on the way into the cache, because its query is correct"


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
            return f"the token of row {row[i]}, position {positions[i, t]} {text.format(where)}"


def place(stream, read, expected, weights, row, fed, T):
    """Return the position (B, slots) in each slot, in the layout that fits best. `weights` are by position."""
    slots, differ = read.weights.size(-1), stream.reference.differ
    slot = torch.arange(slots)
    layouts = [slot] if slots >= fed else [fed - slots + slot, slot + (fed - 1 - slot) // slots * slots]  # a ring
    if slots > fed == T:
        layouts.append(slot + fed - slots)  # the cache was not empty
    seen = read.key is not None and expected.key is not None
    x, y, dim = (read.key, expected.key[row], 2) if seen else (read.weights[:, :, : weights.size(2)], weights, 3)

    def distance(places):
        got, wanted = same_heads(x, at_places(y, dim, places))
        return (got - wanted).abs().sum()

    pads = 0 if stream.ragged else stream.pads
    best = min(((layout - pads).expand(len(row), -1) for layout in layouts), key=distance)
    if not seen or stream.pads.any() or (slots >= fed and not stream.decoder.window):
        return best

    # A window may be kept in any order, with sinks before it, or a chunk after a ring: if each slot that is not empty
    # holds the key of a position, that is where the positions are.
    got, wanted = same_heads(x, y[:, :, :fed])
    fits = ~torch.stack([differ(got, wanted[:, :, [p]]).any(1) for p in range(fed)], 2)  # (B, slots, fed)
    if not (fits.any(2) | (got == 0).all(3).all(1)).all():
        return best
    as_best = fits.gather(2, best.clamp(0, fed - 1)[..., None])[..., 0] & (best >= 0) & (best < fed)
    return best.where(as_best, fits.int().argmax(2).where(fits.any(2), -1))


def at_places(x, dim, places):
    """Select the positions `places` (B, slots) from x (B, heads, ...) along `dim`, 2 or 3."""
    at = places.clamp(0, x.size(dim) - 1)
    return x.take_along_dim(at[:, None, :, None] if dim == 2 else at[:, None, None], dim)


def same_heads(x, y):
    """Return x and y with equally many heads."""
    heads = max(x.size(1), y.size(1))
    return repeat_heads(x, heads), repeat_heads(y, heads)


def distance_if_close(reference, wrong, slot):
    """If a slot holds nearly what it should, as after rounding, return how far off it is in words. Otherwise None."""
    pairs = [(got[:, slot], wanted) for got, wanted in wrong.values()]
    if any(cosine_similarity(got, wanted, dim=-1).min() < 0.98 for got, wanted in pairs):
        return None
    off = max(((got - wanted).abs().max() / wanted.abs().max()).item() for got, wanted in pairs)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
        if torch.finfo(dtype).eps > reference.eps and all((got.to(dtype).float() == got).all() for got, _ in pairs):
            return f"it rounded to {str(dtype)[6:]}, off by {off:.1g} of its size"
    return f"it rounded or scaled, off by {off:.1g} of its size"


def find_owner(reference, own, wrong, heads, slot, row, position, new):
    """Return in words what is in a slot instead of what belongs there, or None if we do not recognize it.

    own    the Read of this layer without a cache
    wrong  {"key" or "value": (what is in all slots, (heads, slots, size); what belongs in this one, (heads, size))}
    new    whether the token is new. Then a key at a wrong position may be that of the same token elsewhere
    """
    where = [~reference.differ(got[heads], wanted[heads, None]).any(0) for got, wanted in wrong.values()]
    if len(elsewhere := torch.stack(where).all(0).nonzero()):
        return f"something else: what belongs there is in slot {elsewhere[0].item()}"
    if not any(got[heads, slot].any() for got, _ in wrong.values()):
        return "zeros, as in an empty slot"
    if all(~reference.differ(got[heads, slot][:, None], wanted).all(1).any() for got, wanted in wrong.values()):
        return "its heads in another order"

    # the key or value of another token, row or layer?
    for layer, (_, read) in sorted(enumerate(reference.reads), key=lambda pair: pair[1][1] is not own):
        if any(getattr(read, name) is None or getattr(read, name).shape != getattr(own, name).shape for name in wrong):
            continue
        same = places_of(reference, read, wrong, heads, slot)
        if new and read is own:
            same &= reference.ids != reference.ids[row, position]
        if same.any():
            # the same token may be in many places: name the nearest, preferably in the same row
            steps, another = (torch.arange(reference.length) - position).abs(), torch.arange(ROWS) != row
            nearest = (steps + another[:, None] / 2).masked_fill(~same, torch.inf).argmin().item()
            text, there = divmod(nearest, reference.length)
            whose = f"row {text}" if text in (0, 1, 2, row) else "another sequence or a rejected draft token"
            return f"that of {'' if read is own else f'layer {layer}, '}{whose}, position {there}"


def places_of(reference, read, wrong, heads, slot):
    """Return where a Read (8, length) has the key and value that a slot holds. wrong, heads: as in find_owner."""
    differ = [
        reference.differ(got[heads, slot][:, None], repeat_heads(getattr(read, name), len(heads))[:, heads]).any(1)
        for name, (got, _) in wrong.items()
    ]
    return ~torch.stack(differ).any(0)
