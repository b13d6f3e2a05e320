"""Stop texts: a continuation ends before the stop text that is complete first."""


def cut_at_stop(ids, first, names, stops):
    """Return `ids` up to the stop text that is complete first in ids[first:], or all of them.

    ids    a list of token ids: a prompt of `first` tokens and its continuation
    names  names[i] is the character of token i
    stops  a list of strings
    Only the continuation counts, so a prompt may contain a stop text. The one that is complete first wins, so that a
    text ends at the same place whether its characters arrive singly or in blocks. Of those complete at the same
    character, the longest wins.
    """
    if not stops:
        return ids
    text = "".join(names[i] for i in ids[first:])
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return ids[: first + min(found, default=(0, len(text)))[1]]


def num_undecided(text, stops):
    """Return how many characters at the end of `text` may be the beginning of a stop text.

    These characters wait until the next ones decide. A stop text that has another one before its last character is
    never the first to be complete, so nothing waits for it.
    """
    first = [stop for stop in stops if not any(other in stop[:-1] for other in stops)]
    lengths = [k for stop in first for k in range(1, len(stop)) if text.endswith(stop[:k])]
    return max(lengths, default=0)
