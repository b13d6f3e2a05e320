"""Where a wrong logit comes from: what each layer gave to its cache, and what it got back."""

import types

import torch

# the causes
WRONG_VALUE = "the new value is wrong: wrong input or absolute position"
WRONG_KEY = "only the new key is wrong: position ids"
ALL_RIGHT = "all keys and values are right, so mask or heads"
WRONG_AT_ONCE = "wrong with an empty cache, too: input, positions, mask or heads of the cached path"


def keys_and_values(given):
    given = given if isinstance(given, (tuple, list)) else ()
    return [x for x in given if isinstance(x, torch.Tensor) and x.dim() >= 3 and x.is_floating_point()][:2]


def flat(given):
    """Return copies of keys and values, (B, heads, t, head size) -> (B, t, heads * head size)."""
    return [x.transpose(1, -2).flatten(2).to(torch.float64, copy=True) for x in given]


def listen(cache, calls, keeps=True):
    """From now on note each update of a cache in `calls`: (layer, what it got, what it gave back).

    keeps  False: the cache keeps nothing, and gives back what it gets
    """
    update = getattr(type(cache), "update", None)

    def noted(cache, *args, **kwargs):
        given = (*args, *kwargs.values())
        held = update(cache, *args, **kwargs) if keeps else keys_and_values(given)
        layer = next((x for x in given if type(x) is int), len(calls))
        calls.append((layer, keys_and_values(given), keys_and_values(held)))
        return held

    if update and hasattr(cache, "__dict__"):
        cache.update = types.MethodType(noted, cache)
    return calls


def find_cause(stream, calls, T, rows, positions):
    """Return (what is the first thing that is wrong in the updates of a step of T tokens, in which layer).

    rows and positions (B, count) are those of the tokens that are no guesses.
    """
    if not calls:
        return "cause unknown, because the cache has no method update that we could watch", None
    updates, differ, fed = stream.truth.updates, stream.truth.differ, stream.fed
    if not updates:
        return WRONG_AT_ONCE, None
    got = calls[0][1][0].size(-2)
    if (len(calls), got) != (len(updates), T):
        return f"a step has {len(calls)} updates of the cache for {got} tokens, not {len(updates)} for {T}", None
    for i, ((_, new, held), (layer, *right)) in enumerate(zip(calls, updates)):
        new, held = flat(new), flat(held)

        # does the cache give back what it got, in this step and before?
        needed, (B, slots) = min(fed, stream.truth.window or fed), held[1].shape[:2]
        if B != len(rows) or slots < needed:
            size = f"{B} rows of {slots} slots, where it needs {len(rows)} of {needed}"
            return f"the cache gave back {size}", layer
        places = (torch.arange(fed)[-slots:] - stream.pads).expand(B, -1)  # a window has dropped the others
        expected = [x[rows[:, :1], places.clamp(min=0)] for x in right]
        for x, own in zip(expected, new):
            x[:, -own.size(1) :] = own[:, -x.size(1) :]
        off = [differ(x[:, : places.size(1)], y) & (places >= 0) for x, y in zip(held, expected)]
        wrong = (off[0] | off[1]).T.nonzero()
        if len(wrong):
            slot, row = wrong[0].tolist()
            parts = [part for part in (0, 1) if off[part][row, slot]]
            given = {part: (held[part][row, slot], expected[part][row, slot]) for part in parts}
            text = rows[row, 0].item()
            name, place = "value" if 1 in parts else "key", f"row {text}, position {places[row, slot].item()}"
            owner = find_owner(stream.truth, layer, given, text)
            return f"the cache gave back a {name} that is not that of {place}, {owner}", layer

        # did the layer give it the right thing?
        real, pos = positions >= 0, positions.clamp(min=0)
        key_wrong, value_wrong = (differ(x[:, : pos.size(1)], y[rows, pos])[real].any() for x, y in zip(new, right))
        if value_wrong and i > 0:  # the layer before got what is right, and gave what is wrong
            return ALL_RIGHT, updates[i - 1][0]
        if value_wrong or key_wrong:
            return WRONG_VALUE if value_wrong else WRONG_KEY, layer
    return ALL_RIGHT, layer


def find_owner(truth, own, given, text):
    """Say whose key or value layer `own` got back. given: {0 for a key, 1 for a value: (it, the right one)}."""
    off = max((x - y).abs().max() / y.abs().max() for x, y in given.values())
    if off < 0.1:
        return f"but that one rounded, off by {off:.1g} of its size"
    if not any(x.any() for x, _ in given.values()):
        return "but zeros, as in an empty slot"
    for layer, *right in sorted(truth.updates, key=lambda update: update[0] != own):
        same = ~torch.stack([truth.differ(x, right[part]) for part, (x, _) in given.items()]).any(0)
        if same.any():
            owner = text if same[text].any() else same.any(1).int().argmax().item()
            row = f"row {owner}" if owner in (0, 1, 2, text) else "another text or a rejected guess"
            where = "" if layer == own else f"layer {layer}, "
            return f"but of {where}{row}, position {same[owner].int().argmax().item()}"
    return "but of nothing that is right, for example a rejected guess"
