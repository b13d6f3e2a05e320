"""A sequence as text: its characters as they arrive, and the stop string that ends it."""

from model import context_start


class Sequence:
    """A prompt and its continuation, as tokens and as text.

    ids    the tokens, without those that reach into a stop string
    ended  whether a stop string has ended the sequence

    The text ends before the first stop string to be completed. It makes no difference whether tokens arrive one by one
    or in blocks. If two stop strings are completed by the same character, the longer one wins. A prompt may contain a
    stop string, because only the continuation counts.
    """

    def __init__(self, ids, tokenizer, stops=()):
        self.ids, self.decode, self.stops, self.ended = list(ids), tokenizer.decode, stops, False
        # known is the text of ids[:end]. The text of a token depends on earlier tokens, which may hold the first bytes
        # of its character. So we decode new tokens together with ids[begin:end], and skip the text of those.
        self.known, self.end = self.decode(self.ids), len(self.ids)
        self.begin = max(0, self.end - 4)
        self.skip = len(self.decode(self.ids[self.begin :]))
        self.prompt_length = len(self.known)

    @property
    def text(self):
        """The text so far."""
        if self.ended or self.end == len(self.ids):
            return self.known
        window = self.decode(self.ids[self.begin :])
        text = self.known + window[self.skip :]
        if not window.endswith("\ufffd"):  # otherwise the last character may be incomplete
            self.begin, self.end = self.end, len(self.ids)
            self.known, self.skip = text, len(self.decode(self.ids[self.begin :]))
        return text

    def add(self, tokens):
        """Append tokens, up to a stop string. Returns self."""
        self.ids += tokens
        text = self.text if self.stops else ""
        places = [(stop, text.find(stop, self.prompt_length)) for stop in self.stops]
        found = [(at + len(stop), at) for stop, at in places if at >= 0]
        if found:
            self.ended, self.known = True, text[: min(found)[1]]
            while len(self.decode(self.ids)) > len(self.known):
                self.ids.pop()
        return self

    def final(self, begin):
        """Return text[begin:] without characters at the end that the next tokens may still change or cut off."""
        text = self.text[begin:]
        if self.ended:
            return text
        # an incomplete character decodes to one replacement character, or to one per byte, at most three
        text = text[: len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))]
        return text[: len(text) - num_undecided(text, self.stops)]


def num_undecided(text, stops):
    """Return how many characters at the end of `text` may be the beginning of a stop string.

    They have to wait for the next characters. A stop string that contains another one before its last character is
    never completed first, so nothing waits for it.
    """
    first = [stop for stop in stops if not any(other in stop[:-1] for other in stops)]
    lengths = [k for stop in first for k in range(1, len(stop)) if text.endswith(stop[:k])]
    return max(lengths, default=0)


def text_context_start(block_size, prompt_length, end):
    """Return where the context of token `end` starts in a text that started with prompt_length tokens."""
    start = 0
    for i in range(prompt_length, end + 1):
        start = context_start(start, i, block_size)
    return start
