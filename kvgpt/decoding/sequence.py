"""A sequence of the batch as text: its characters as they arrive, and the stop text that ends it."""

from model import context_start


class Sequence:
    """A prompt and its continuation, as tokens and as text.

    ids    the tokens. Those that reach into a stop text are left out
    ended  whether a stop text has ended the sequence

    The text ends before the stop text that is complete first, at the same place whether its tokens arrive singly or in
    blocks. Only the continuation counts, so a prompt may contain a stop text. Of two that are complete at the same
    character, the longer wins.
    """

    def __init__(self, ids, tokenizer, stops=()):
        self.ids, self.decode, self.stops, self.ended = list(ids), tokenizer.decode, stops, False
        # known is the text of ids[:end]. The text of a token depends on those before it: they may be the first bytes of
        # its character, for example. So we decode the next tokens together with ids[begin:end], and skip their text.
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
        if not window.endswith("\ufffd"):  # else the last character may lack bytes, and the next tokens change it
            self.begin, self.end = self.end, len(self.ids)
            self.known, self.skip = text, len(self.decode(self.ids[self.begin :]))
        return text

    def add(self, tokens):
        """Append tokens, up to a stop text. Returns itself."""
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
        """Return text[begin:] without the characters at its end that the next tokens may change or cut off."""
        text = self.text[begin:]
        if self.ended:
            return text
        # A character that lacks bytes has decoded to one replacement character, or to one per byte, of which it has at
        # most three.
        text = text[: len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))]
        return text[: len(text) - num_undecided(text, self.stops)]


def num_undecided(text, stops):
    """Return how many characters at the end of `text` may be the beginning of a stop text.

    These characters wait until the next ones decide. A stop text that has another one before its last character is
    never the first to be complete, so nothing waits for it.
    """
    first = [stop for stop in stops if not any(other in stop[:-1] for other in stops)]
    lengths = [k for stop in first for k in range(1, len(stop)) if text.endswith(stop[:k])]
    return max(lengths, default=0)


def text_context_start(block_size, prompt_length, end):
    """Return where the context of token `end` starts in a text that has grown from prompt_length tokens."""
    start = 0
    for i in range(prompt_length, end + 1):
        start = context_start(start, i, block_size)
    return start
