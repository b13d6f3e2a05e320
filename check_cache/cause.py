"""Where a wrong logit comes from: the first thing that attention reads but should not.

We ask in the order in which a decoder computes: are the keys and values of earlier tokens correct, then the keys,
values and queries of the new ones, then the weights? With a cache, any slot may hold any token.
"""

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import cosine_similarity

from check_cache.attention import read_of


@dataclass
class Step:
    """What a step fed to one row of a batch, and what attention read."""

    index: int  # of this row in the batch
    rows: int  # in the batch
    row: int  # which sequence
    positions: torch.Tensor  # (T,), below 0 for padding and for drafts, which come from another sequence
    pads: int  # slots of padding in front of the row
    fed: int  # slots per row after the step
    reads: list  # as in Watch


def find_cause(reference, steps):
    expected, step = reference.reads, steps[0]
    if not expected:
        hidden = "it has none, or it is compiled, or a kernel hides it: see show_attention() in ADAPTERS.md"
        return f"cause unknown: without a cache, we see no attention over all tokens ({hidden})"
    forwards = [split(step, reference) for step in steps]
    if not all(forwards):
        return f"cause unknown: a step calls attention {len(step.reads)} times, but {reference.calls} without a cache"
    for parts in zip(*forwards):
        for layer, (call, front, wanted) in enumerate(expected):
            reads = [read_of(part.reads[call], part.index, part.rows, len(part.positions), front) for part in parts]
            causes = filter(None, [compare_layer(reference, *pair, wanted) for pair in zip(parts, reads)])
            if first := min(causes, key=lambda cause: cause[0], default=None):
                return f"layer {layer}: {first[1]}"
    return "attention reads and sees what it should in all layers, as far as we can see: the mistake comes after it"


def split(step, reference):
    """Return a Step for each forward that fed this row, or []. A step may feed rows or chunks one after the other."""
    calls, T, (call, front, expected) = reference.calls, len(step.positions), reference.reads[0]
    if len(step.reads) == calls:
        return [step]
    parts, row, begin = [], 0, 0
    for i in range(0, len(step.reads) - calls + 1, calls):
        weights = read_of(step.reads[i + call], 0, 1, T, front).weights  # (rows * heads, tokens, slots)
        count, end = len(weights) // len(expected[0].weights), begin + weights.size(1)
        if count == 0 or row + count > step.rows or end > T:
            return []
        if row <= step.index < row + count:
            fed, positions = step.fed - T + end, step.positions[begin:end]
            reads = step.reads[i : i + calls]
            parts.append(replace(step, index=step.index - row, rows=count, positions=positions, fed=fed, reads=reads))
        row, begin = (row + count, 0) if end == T else (row, end)
    return parts if row == step.rows and len(step.reads) % calls == 0 else []


def compare_layer(reference, step, read, expected):
    """Return the cause if the attention of one layer is wrong: ((order of our questions, where), in words). Or None."""
    row, T, real, mine = step.row, len(step.positions), step.positions >= 0, expected[step.row]
    if read.weights.size(1) > T == 1 and read.weights[..., 0].numel() == len(mine.weights):  # heads that share a key
        read = read._replace(weights=read.weights.flatten(0, 1)[:, None], query=read.query.flatten(0, 1)[:, None])
    if read.weights.size(1) != T:
        return (0, 0), f"a step feeds {read.weights.size(1)} tokens to attention, not {T}"
    if not real.any():
        return None

    # how should the new tokens weigh each position, and which position is in which slot?
    positions, places = step.positions[real], place(step, read, mine)
    known, held = (places >= 0) & (places <= positions.max()), places.clamp(0, reference.length - 1)
    by_position = mine.weights[:, positions]  # (heads, tokens, length)
    weights = by_position[..., held] * known  # (heads, tokens, slots)

    absent = (by_position.sum(2) - weights.sum(2) > reference.coarse).any(0)
    if absent.any():
        t = absent.nonzero()[0].item()
        missing = by_position[:, t].amax(0).index_fill(0, places[known], 0).argmax().item()
        return (1, t), f"the token of row {row}, position {positions[t]} needs position {missing}, which is in no slot"

    if read.value is not None and mine.value is not None:  # then we see keys and queries, too
        used = known & (weights > 0).any(1).any(0)
        pairs, wrong = {}, {}
        for name in ("key", "value"):
            pairs[name] = same_heads(getattr(read, name), getattr(mine, name)[:, held])  # (heads, slots, size)
            wrong[name] = reference.differ(*pairs[name]).any(0) & used
        wrong_query = reference.differ(read.query[:, real], mine.query[:, positions]).any(0)
        # Rotary positions may count the padding, because that moves no weight. Then no key is as expected.
        if step.pads and (wrong["key"] | ~used).all() and not wrong["value"].any():
            wrong["key"], wrong_query = wrong["value"], wrong_query & False

        if (off := wrong["key"] | wrong["value"]).any():
            # the first wrong slot. Kept slots come before new ones, because they have been in use for longer
            kept = off & (places < positions[0])
            slot = (kept if kept.any() else off).nonzero()[0].item()
            here = {name: (x[:, slot], y[:, slot]) for name, (x, y) in pairs.items() if wrong[name][slot]}
            asked = None if kept.any() else wrong_query[positions == places[slot]].any()
            text = explain_slot(reference, expected, row, places[slot].item(), slot, here, asked)
            return (2 if kept.any() else 3, slot), text
        if wrong_query.any():
            reason = "its position, norm or scale, the order of its heads, or an input that is slightly wrong"
            position = positions[wrong_query][0].item()
            return (4, position), f"mostly the query of row {row}, position {position} is wrong: {reason}"
    return compare_weights(reference, step, positions, places, *same_heads(read.weights[:, real], weights))


def explain_slot(reference, expected, row, position, slot, here, asked):
    """Return the cause if a slot holds a wrong key or value.

    here   {"key" or "value", if wrong: (what is in the slot, what should be)}, both (heads, size)
    asked  whether the query of its token is wrong, too, or None if the token is not new
    """
    what, reason = f"{' and '.join(here)} of row {row}, position {position}", None
    if asked is not None and expected is reference.reads[0][-1]:
        reason = explain_arrival(reference, row, position, here)
    if asked and not reason:
        inputs = "wrong input: the token, an entry of inputs=, or what else comes before attention"
        reason = inputs if "value" in here else "position ids, because its query is wrong too"
    holds = None if reason else find_content(reference, expected, row, position, here)
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
        alone = getattr(repeated, name)[:, position]
        if reference.differ(*same_heads(alone, right)).any():
            return "a state that earlier tokens leave before attention (recurrent, convolution, shift)"
    same = find_tokens(reference, [repeated], here)[0].nonzero()
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


def find_tokens(reference, reads, here):
    """Return which tokens (rows, length) of these rows have the key and value that a slot holds."""
    same = []
    for name, (got, right) in here.items():
        tokens, _ = same_heads(torch.stack([getattr(read, name) for read in reads], 1), got)  # (heads, rows, ...)
        allowed = min(reference.coarse * tokens.abs().max(), (right - got).abs().max() / 2)
        same.append((tokens - got[:, None, None]).abs().amax((0, 3)) < allowed)
    return torch.stack(same).all(0)


def compare_weights(reference, step, positions, places, got, wanted):
    """Return the cause if the tokens at `positions` weigh the slots, which hold `places`, differently from `wanted`."""
    wrong = ((got - wanted).abs() > reference.coarse).any(0)  # (tokens, slots)
    got, wanted = got.amax(0), wanted.amax(0)
    for stage, bad, text in (
        (5, wrong & (wanted == 0), "sees {}, but should not"),
        (6, wrong & (got == 0), "does not see {}, but should"),
        (7, wrong, "gives {} a weight of {:.3g}, not {:.3g}: mask, bias, scale, heads or dropout"),
    ):
        if bad.any():
            t, slot = bad.nonzero()[0].tolist()
            position, where = places[slot].item(), f"slot {slot}"
            if position < 0:
                where += " (padding)" if step.pads else " (the cache was not empty at position 0: see reset)"
            elif position != slot:
                where += f" (position {position})"
            text = text.format(where, got[t, slot].item(), wanted[t, slot].item())
            return (stage, t), f"the token of row {step.row}, position {positions[t]} {text}"


def place(step, read, mine):
    """Return which position is in each slot. Once some are forgotten, only their keys show it."""
    slots, fed = read.weights.size(-1), step.fed
    in_order = torch.arange(slots) - step.pads
    newest_last = in_order + fed - slots
    if slots == fed or read.key is None or mine.key is None or step.pads:
        return in_order if slots >= fed else newest_last
    got, wanted = same_heads(read.key, mine.key)
    if slots > fed:  # some are empty, or a first step sees what was in the cache before it
        layouts = [in_order, newest_last] if fed == len(step.positions) else [in_order]
        return min(layouts, key=lambda places: (got - wanted[:, places.clamp(0, wanted.size(1) - 1)]).abs().sum())
    distance = torch.cdist(*(x.transpose(0, 1).flatten(1) for x in (got, wanted[:, :fed])))  # (slots, fed)
    far = (torch.arange(fed) - newest_last[:, None]).abs() / fed  # decides between equal keys
    return (distance + far * distance.mean() / 100).argmin(1)


def same_heads(x, y):
    """Return x and y (heads, ...) with equally many heads. One head of keys may serve several of queries."""
    heads = max(len(x), len(y))
    return [part.repeat_interleave(heads // len(part), 0) for part in (x, y)]
