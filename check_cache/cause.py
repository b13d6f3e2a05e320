"""Where a wrong logit comes from: the first thing that attention reads but should not.

We ask in the order in which a decoder computes. Are the keys and values kept from earlier tokens correct? Are the keys,
values and queries of the new tokens correct? Are the weights correct, that is, does each token see what it should?

Without a cache, each token has a slot of its own. With a cache, any slot may hold any token. Slots in front of the text
come first in both.
"""

import torch
from torch.nn.functional import cosine_similarity

from check_cache.attention import shaped


def find_cause(reference, step):
    """Return the cause of wrong logits in a step."""
    expected, why = reference.reads, step.hidden or reference.hidden
    if not expected:
        none = "it has none, or a kernel hides it: show_attention() makes it visible"
        return f"cause unknown: without a cache, we see no attention over all tokens ({why or none})"
    forwards = split(step, reference)
    if not forwards:
        seen = f"a step calls attention {len(step.reads)} times, but {reference.calls} times without a cache"
        return f"cause unknown: {seen}" + (f" ({why})" if why else "")
    for part in forwards:
        for layer, (call, front, wanted) in enumerate(expected):
            read = shaped(part.reads[call], *part.rows.shape, front)
            if cause := compare_layer(reference, part, read, wanted):
                return f"layer {layer}: {cause}"
    return "attention reads and sees what it should in all layers, as far as we can see: the mistake comes after it"


def split(step, reference):
    """Return a Step for each forward of a step, which may feed rows or chunks one after the other, or []."""
    calls, (B, T), (call, front, wanted) = reference.calls, step.rows.shape, reference.reads[0]
    if len(step.reads) == calls:
        return [step]
    parts, row, begin = [], 0, 0
    for i in range(0, len(step.reads) - calls + 1, calls):
        weights = shaped(step.reads[i + call], 1, T, front).weights  # (1, B * heads, T, slots)
        rows, end = row + weights.size(1) // wanted.weights.size(1), begin + weights.size(2)
        if row >= B or rows == row or end > T:
            return []
        parts.append(step.part(slice(row, rows), begin, end))
        parts[-1].reads = step.reads[i : i + calls]
        row, begin = (rows, 0) if end == T else (row, end)
    return parts if row == B and len(parts) * calls == len(step.reads) else []


def compare_layer(reference, step, read, expected):
    """Return the cause if the attention of one layer is wrong, or None."""
    rows, positions = step.rows, step.positions
    heads, T, real = expected.weights.size(1), rows.size(1), positions >= 0
    if read.weights.size(2) > T == 1 and read.weights[0, ..., 0].numel() == heads:  # heads that share a key, there
        weights, query = (x.reshape(len(x), heads, 1, -1) for x in (read.weights, read.query))
        read = read._replace(weights=weights, query=query)
    if read.weights.size(2) != T:
        return f"a step feeds {read.weights.size(2)} tokens to attention, not {T}"

    # how should the new tokens weigh each position, and which position is in which slot?
    if not real.any():
        return None
    row, at = rows[:, 0], positions.clamp(min=0)
    by_position = expected.weights[rows, :, at].transpose(1, 2)  # (B, heads, T, length)
    places = place(reference, step, read, expected)
    known = (places >= 0) & (places <= positions.amax(1, keepdim=True))
    weights = at_places(by_position, 3, places) * known[:, None, None]

    absent = (by_position.sum(3) - weights.sum(3) > reference.coarse).any(1) & real  # (B, T)
    if absent.any():
        t, i = absent.T.nonzero()[0].tolist()
        missing = by_position[i, :, t].amax(0).index_fill(0, places[i][known[i]], 0).argmax().item()
        return f"the token of {whose(row[i], positions[i, t])} needs position {missing}, which is in no slot"

    if read.value is not None and expected.value is not None:  # then we see keys and queries, too
        used = known & (weights * real[:, None, :, None] > 0).any(2).any(1)  # (B, slots)
        pairs, wrong = {}, {}
        for name in ("key", "value"):
            pairs[name] = same_heads(getattr(read, name), at_places(getattr(expected, name)[row], 2, places))
            wrong[name] = reference.differ(*pairs[name]).any(1) & used
        wrong_query = reference.differ(read.query, expected.query[rows, :, at].transpose(1, 2)).any(1) & real
        # Rotary positions may count the padding, because that moves no weight. Then no key of a row is as expected.
        counts = (step.pads > 0) & (wrong["key"] | ~used).all(1, keepdim=True) & ~wrong["value"].any(1, keepdim=True)
        wrong["key"], wrong_query = wrong["key"] & ~counts, wrong_query & ~counts

        if (off := wrong["key"] | wrong["value"]).any():
            # the first wrong slot. Kept slots come before new ones, because they have been in use for longer
            kept = off & (places < positions[:, :1])
            slot, i = (kept if kept.any() else off).T.nonzero()[0].tolist()
            here = {name: (x[i, :, slot], y[i, :, slot]) for name, (x, y) in pairs.items() if wrong[name][i, slot]}
            asked = None if kept.any() else wrong_query[i, positions[i] == places[i, slot]].any()
            return explain_slot(reference, expected, row[i].item(), places[i, slot].item(), slot, here, asked)
        if wrong_query.any():
            t, i = wrong_query.T.nonzero()[0].tolist()
            reason = "its position, norm or scale, the order of its heads, or an input that is slightly wrong"
            return f"mostly the query of {whose(row[i], positions[i, t])} is wrong: {reason}"
    return compare_weights(reference, step, read.weights, weights, places)


def explain_slot(reference, expected, row, position, slot, here, asked):
    """Return the cause if a slot holds a wrong key or value.

    here   {"key" or "value", if wrong: (what is in the slot, what should be)}, both (heads, size)
    asked  whether the query of its token is wrong, too, or None if the token is not new
    """
    what, reason, holds = f"{' and '.join(here)} of {whose(row, position)}", None, None
    if asked is not None and expected is reference.reads[0][-1]:
        reason = explain_arrival(reference, row, position, here)
    if asked and not reason:
        inputs = "wrong input: the token, an entry of inputs=, or what else comes before attention"
        reason = inputs if "value" in here else "position ids, because its query is wrong too"
    if not reason:
        holds = find_content(reference, expected, row, position, here)
    if holds or asked is None:
        other = "something else, such as what a later step, a rejected draft token or another layer wrote"
        return f"slot {slot} should hold the {what}, but holds {holds or other}"
    changed = "changed on the way into the cache or written to a different slot, because its query is correct"
    return f"the new {what} {'are' if len(here) > 1 else 'is'} wrong on arrival: {reason or changed}"


def explain_arrival(reference, row, position, here):
    """Return why the first layer gets a wrong key or value: a state, or a wrong position. Or None."""
    with reference.exactly():  # the same token at every position
        (*_, repeated), *_ = reference.watch(row, reference.ids[row, position].expand_as(reference.ids))
    for name, (_, right) in here.items():
        alone = getattr(repeated, name)[:, :, position]
        if reference.differ(*same_heads(alone, right[None])).any():
            return "a state that earlier tokens leave before attention (recurrent, convolution, shift)"
    same = find_tokens(reference, repeated, here)[0].nonzero()
    return f"its position is {same[0].item()}" if len(same) else None


def find_content(reference, expected, row, position, here):
    """Return in words what is in a slot instead of what belongs there, or None if we do not recognize it."""
    same = find_tokens(reference, expected, here)
    if same.any():
        steps = (torch.arange(reference.length) - position).abs().expand_as(same)  # a token may be in many places
        owner, there = divmod(steps.masked_fill(~same, reference.length).argmin().item(), reference.length)
        owner = f"row {owner}" if owner in (0, 1, 2, row) else "another sequence or a rejected draft token"
        return f"that of {owner}, position {there}"
    if not any(got.any() for got, _ in here.values()):
        return "zeros, as in an empty slot"
    # each head is one of those that should be there
    if all((~reference.differ(got[:, None], right)).any(1).all() for got, right in here.values()):
        return "its heads in another order"
    if all(cosine_similarity(got.flatten(), right.flatten(), dim=0) > 0.98 for got, right in here.values()):
        return "it rounded or scaled"


def find_tokens(reference, read, here):
    """Return which tokens (8, length) of a Read have the key and value that a slot holds."""
    same = []
    for name, (got, right) in here.items():
        tokens, _ = same_heads(getattr(read, name), got[None])  # (8, heads, length, size)
        allowed = min(reference.coarse * tokens.abs().max(), (right - got).abs().max() / 2)
        same.append((tokens - got[:, None]).abs().amax((1, 3)) < allowed)
    return torch.stack(same).all(0)


def compare_weights(reference, step, got, wanted, places):
    """Return the cause if the tokens of a step weigh the slots, which hold `places`, differently from `wanted`."""
    got, wanted = same_heads(got, wanted)
    wrong = ((got - wanted).abs() > reference.coarse).any(1) & (step.positions >= 0)[..., None]  # (B, T, slots)
    got, wanted = got.amax(1), wanted.amax(1)
    for bad, text in (
        (wrong & (wanted == 0), "sees {}, but should not"),
        (wrong & (got == 0), "does not see {}, but should"),
        (wrong, "gives {} a weight of {:.3g}, not {:.3g}: mask, bias, scale, heads or dropout"),
    ):
        if bad.any():
            t, i, slot = bad.transpose(0, 1).nonzero()[0].tolist()
            position, where = places[i, slot].item(), f"slot {slot}"
            if position < 0:
                where += " (padding)" if step.pads.any() else " (the cache was not empty at position 0: see reset)"
            elif position != slot:
                where += f" (position {position})"
            text = text.format(where, got[i, t, slot].item(), wanted[i, t, slot].item())
            return f"the token of {whose(step.rows[i, t], step.positions[i, t])} {text}"


def place(reference, step, read, expected):
    """Return which position is in each slot (B, slots). Once some are forgotten, only their keys show it."""
    slots, fed, (B, T) = read.weights.size(-1), step.fed, step.rows.shape
    in_order = (torch.arange(slots) - step.pads).expand(B, -1)
    newest_last = in_order + fed - slots
    if slots == fed or read.key is None or expected.key is None or step.pads.any():
        return in_order if slots >= fed else newest_last
    got, wanted = same_heads(read.key, expected.key[step.rows[:, 0]])
    if slots > fed:  # some are empty, or a first step sees what was in the cache before it
        layouts = [in_order, newest_last] if fed == T else [in_order]
        return min(layouts, key=lambda places: (got - at_places(wanted, 2, places)).abs().sum())
    distance = torch.cdist(*(x.transpose(1, 2).flatten(2) for x in (got, wanted[:, :, :fed])))  # (B, slots, fed)
    far = (torch.arange(fed) - newest_last[..., None]).abs() / fed  # decides between equal keys
    return (distance + far * distance.mean() / 100).argmin(2)


def whose(row, position):
    return f"row {row}, position {position}"


def at_places(x, dim, places):
    """Select the positions `places` (B, slots) from x (B, heads, ...) along `dim`, 2 or 3."""
    at = places.clamp(0, x.size(dim) - 1)
    return x.take_along_dim(at[:, None, :, None] if dim == 2 else at[:, None, None], dim)


def same_heads(x, y):
    """Return x and y (B, heads, ...) with equally many heads. One head of keys may serve several of queries."""
    heads = max(x.size(1), y.size(1))
    return [part.repeat_interleave(heads // part.size(1), 1) for part in (x, y)]
