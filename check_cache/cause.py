"""Where a wrong logit comes from: the first thing that attention reads and should not.

We ask the questions in the order in which a decoder computes. Is what comes in right, the key, the value and the query
of the new tokens? Is what was kept right, the keys and values of earlier tokens? Is what is seen right, the weights?
"""

from typing import NamedTuple

import torch
from torch.nn.functional import cosine_similarity

from check_cache.attention import repeat_heads, shaped


class Cause(NamedTuple):
    """The first thing that is wrong.

    what   "arrival", "kept", "changed", "hidden" (by the mask), "weight", "after", or None if we cannot say
    layer  counts the calls of attention
    """

    what: str | None
    text: str
    layer: int | None = None

    @property
    def certain(self):
        """Whether rounding cannot have done it, not even by making a router choose another expert before."""
        return self.what in ("kept", "hidden") or (self.what == "changed" and self.layer == 0)


def find_cause(stream, reads, T, rows, positions, guesses):
    """Return the Cause of wrong logits, from the reads of a step of T tokens, of which the last are guesses.

    rows, positions  (B, T) of the new tokens. A position below 0 is padding
    """
    truth, calls = stream.truth, stream.truth.calls
    if not truth.reads:
        unseen = "reads no sequence as a whole" if calls else "calls no scaled_dot_product_attention and no softmax"
        return Cause(None, f"cause unknown: without a cache, attention {unseen}, so we cannot compare what it reads")
    if len(reads) == T * calls and T > 1:  # the step feeds one token after the other
        for t in range(T - guesses):
            one = slice(t, t + 1)
            part = reads[t * calls :][:calls]
            cause = compare_layers(stream, part, stream.fed - T + t + 1, rows[:, one], positions[:, one], 0)
            if cause.what != "after":
                break
        return cause
    if len(reads) != calls:
        return Cause("arrival", f"a step calls attention {len(reads)} times, without a cache {calls} times")
    return compare_layers(stream, reads, stream.fed, rows, positions, guesses)


def compare_layers(stream, reads, fed, rows, positions, guesses):
    """Return the Cause of wrong logits, when `fed` tokens per row are in the cache."""
    before = None
    for layer, (call, right) in enumerate(stream.truth.reads):
        cause = compare_layer(stream, shaped(reads[call], len(rows)), right, fed, rows, positions, guesses)
        if cause and cause.what == "arrival" and before is not None:
            text = f"attention of layer {before} reads and sees what it should, so the mistake is between: {cause.text}"
            cause = cause._replace(text=text)
        if cause:
            return cause._replace(layer=layer)
        before = layer
    return Cause("after", "attention reads and sees what it should in all layers, so the mistake follows it")


def compare_layer(stream, read, right, fed, rows, positions, guesses):
    """Return the Cause of what is wrong in the attention of one layer, or None."""
    truth, T = stream.truth, positions.size(1)
    count = T - guesses
    rows, positions = rows[:, :count], positions[:, :count]
    row, real = rows[:, 0], positions >= 0
    heads, slots, needed = right.weights.size(1), read.weights.size(-1), min(fed, truth.window or fed)
    if slots < needed:
        return Cause("kept", f"attention reads {slots} slots and needs {needed}")
    if T == 1 and read.weights.numel() == len(rows) * heads * slots:  # some lay the heads of a group side by side
        read.weights = read.weights.reshape(len(rows), heads, 1, slots)
    if read.weights.size(2) != T:
        return Cause("arrival", f"a step feeds {read.weights.size(2)} tokens to attention, not {T}")

    # which position is in a slot, and what should be read there
    weights = right.weights[rows, :, positions.clamp(min=0)].transpose(1, 2)  # (B, heads, count, length)
    places = place(read, right, weights, row, fed, stream.pads)
    known = (places >= 0) & (places < fed - stream.pads - (T - count))  # guesses are not of this text
    at = places.clamp(0, truth.length - 1)
    wanted = weights
    weights = wanted.gather(3, at[:, None, None].expand(*wanted.shape[:3], slots)) * known[:, None, None]
    absent = (wanted.sum(3) - weights.sum(3) > truth.coarse).any(1) & real  # (B, count)
    if absent.any():
        t, i = absent.T.nonzero()[0].tolist()
        missing = wanted[i, :, t].amax(0).index_fill(0, places[i][known[i]], 0).argmax()
        return Cause(
            "kept",
            f"the token of row {row[i]}, position {positions[i, t]} needs position {missing}, which is in no slot",
        )
    used = known & (weights * real[:, None, :, None] > 0).any(2).any(1)

    # the keys and values that the new tokens need
    off = {}
    for name in ("key", "value"):
        got, wanted = getattr(read, name), getattr(right, name)
        if got is not None and wanted is not None:
            got, wanted = same_heads(got, wanted[row])
            wanted = wanted.gather(2, at[:, None, :, None].expand(-1, wanted.size(1), -1, wanted.size(3)))
            off[name] = truth.differ(got, wanted).any(1) & used, got, wanted
    new = places >= (fed - T - stream.pads)
    bad = sum(bad for bad, _, _ in off.values()) > 0 if off else torch.zeros(0)
    if bad.any():
        was_kept = (bad & ~new).any()
        slot, i = (bad & ~new if was_kept else bad).T.nonzero()[0].tolist()
        wrong = {name: (got[i], wanted[i, :, slot]) for name, (b, got, wanted) in off.items() if b[i, slot]}
        what = " and ".join(wrong)
        whose = f"row {row[i]}, position {places[i, slot]}"
        owner = find_owner(truth, right, wrong, slot, row[i].item(), places[i, slot].item(), not was_kept)
        be = "are" if len(wrong) > 1 else "is"
        if owner and owner.startswith("it rounded or") and not was_kept:
            text = f"the new {what} of {whose} {be} slightly off on arrival: rounded, scaled, or of a wrong input"
            return Cause("arrival", text)
        if owner or was_kept:
            unknown = "what no token gave: it was changed later, or is a rejected guess"
            text = f"slot {slot} should hold the {what} of {whose}, but holds {owner or unknown}"
            return Cause("kept" if owner and "off by" not in owner else "changed", text)
        what, be = (
            ("the new " + what, "are" if len(wrong) > 1 else "is") if "value" in wrong else ("only the new key", "is")
        )
        reason = "wrong input or absolute position" if "value" in wrong else "position ids, or the norm of keys"
        if fed == T:
            reason += ", or what the cache does to it before it is read"
        return Cause("arrival", f"{what} of {whose} {be} wrong on arrival: {reason}")

    # the queries, and how they weigh what they see
    if read.query is not None and right.query is not None:
        got, wanted = read.query[:, :, :count], right.query[rows, :, positions.clamp(min=0)].transpose(1, 2)
        if got.shape == wanted.shape and (bad := truth.differ(got, wanted).any(1) & real).any():
            t, i = bad.T.nonzero()[0].tolist()
            return Cause(
                "in", f"the query of row {row[i]}, position {positions[i, t]} is wrong: position ids, or its norm"
            )
    return compare_weights(truth, read.weights[:, :, :count], weights, row, positions, places)


def compare_weights(truth, got, right, row, positions, places):
    """Return the Cause if queries at `positions` weigh slots, which have `places`, in another way than `right`."""
    got, right = same_heads(got, right)
    wrong = ((got - right).abs() > truth.coarse).any(1) & (positions >= 0)[..., None]  # (B, count, slots)
    if not wrong.any():
        return None
    got, right = got.amax(1), right.amax(1)
    seen, hidden = wrong & (right == 0), wrong & (got == 0)
    for bad, text in ((seen, "sees {}, and should not"), (hidden, "does not see {}, and should"), (wrong, None)):
        if bad.any():
            t, i, slot = bad.transpose(0, 1).nonzero()[0].tolist()
            where = f"slot {slot}" + ("" if places[i, slot] == slot else f" (position {places[i, slot]})")
            given, wanted = got[i, t, slot].item(), right[i, t, slot].item()
            text = text or f"gives {{}} a weight of {given:.3g}, not {wanted:.3g}: mask, bias, scale, heads or dropout"
            what = "weight" if bad is wrong else "hidden"
            return Cause(what, f"the token of row {row[i]}, position {positions[i, t]} {text.format(where)}")


def place(read, right, weights, row, fed, pads):
    """Return the position (B, slots) in each slot, in the layout in which most is right: keys, or else weights."""
    B, slots = len(row), read.weights.size(-1)
    slot = torch.arange(slots)
    layouts = [slot] if slots >= fed else [fed - slots + slot, slot + (fed - 1 - slot) // slots * slots]  # a ring
    choices = [(layout - pads).expand(B, -1) for layout in layouts]

    def distance(places):
        at = places.clamp(0, right.weights.size(-1) - 1)
        if read.key is None or right.key is None:
            got, wanted = same_heads(read.weights[:, :, : weights.size(2)], weights)
            return (got - wanted.gather(3, at[:, None, None].expand(*wanted.shape[:3], slots))).abs().sum()
        got, wanted = same_heads(read.key, right.key[row])
        return (got - wanted.gather(2, at[:, None, :, None].expand_as(got))).abs().sum()

    return min(choices, key=distance)


def same_heads(x, y):
    """Return both with the heads of the one that has more."""
    heads = max(x.size(1), y.size(1))
    return repeat_heads(x, heads), repeat_heads(y, heads)


def find_owner(truth, own, wrong, slot, row, position, new):
    """Say what is in a slot instead of what belongs there, or return None if it is nothing that we know.

    own    the Read of this layer without a cache
    wrong  {"key" or "value": (what is in all slots, (heads, slots, size); what belongs in this one, (heads, size))}
    new    whether the token has just come in. Then a key at a wrong position may be that of the same token elsewhere
    """
    pairs = [(got[:, slot], right) for got, right in wrong.values()]
    where = [~truth.differ(got, right[:, None]).any(0) for got, right in wrong.values()]
    if len(elsewhere := torch.stack(where).all(0).nonzero()):
        return f"something else, while slot {elsewhere[0].item()} holds it"
    if not any(got.any() for got, _ in pairs):
        return "zeros, as in an empty slot"
    if all(cosine_similarity(got, right, dim=-1).min() > 0.98 for got, right in pairs):
        off = max(((got - right).abs().max() / right.abs().max()).item() for got, right in pairs)
        for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
            if torch.finfo(dtype).eps > truth.eps and all((got.to(dtype).float() == got).all() for got, _ in pairs):
                return f"it rounded to {str(dtype)[6:]}, off by {off:.1g} of its size"
        return f"it rounded or scaled, off by {off:.1g} of its size"
    if all(~truth.differ(got[:, None], right[None]).all(1).any() for got, right in pairs):
        return "its heads in another order"
    if len(pairs) == 2 and not any(truth.differ(got, right).any() for (got, _), (_, right) in zip(pairs, pairs[::-1])):
        return "the value for a key and the key for a value"

    # the key or value of another token, row or layer?
    for layer, (_, read) in sorted(enumerate(truth.reads), key=lambda pair: pair[1][1] is not own):
        kept = [getattr(read, name) for name in wrong]  # each (8, heads, length, size)
        if any(x is None or x.size(-1) != got.size(-1) or len(got) % x.size(1) for x, (got, _) in zip(kept, pairs)):
            continue
        differ = [truth.differ(got[:, None], repeat_heads(x, len(got))).any(1) for x, (got, _) in zip(kept, pairs)]
        same = ~torch.stack(differ).any(0)  # (8, length)
        if new and read is own:
            same &= truth.ids != truth.ids[row, position]
        if same.any():
            text = row if same[row].any() else same.any(1).int().argmax().item()
            whose = f"row {text}" if text in (0, 1, 2, row) else "another text or a rejected guess"
            layer = "" if read is own else f"layer {layer}, "
            return f"that of {layer}{whose}, position {same[text].int().argmax().item()}"
    return None
