"""Text as it arrives when tokens are not characters."""

from sample import GeneratedText


class IdText(GeneratedText):
    """A GeneratedText of an IdTokenizer: ids with a space between them. A stop string is whole ids, too."""

    def __init__(self, ids, tokenizer, stops=()):
        super().__init__(ids, tokenizer, [f" {' '.join(stop.split())}" for stop in stops])
        self.text = self.text.removeprefix(" ")
        self.prompt_length = len(self.text)


class PartialText(GeneratedText):
    """A GeneratedText of a BPETokenizer, where a character can be spread over several tokens.

    `settled` leaves out what the next tokens may still change: the bytes of a character that is not complete.
    """

    def __init__(self, ids, tokenizer, stops=()):
        super().__init__((), tokenizer, stops)
        self.ids = list(ids)
        # `whole` is the text of ids[:end], which no later token changes. The text of a token depends on earlier ones,
        # which may hold the first bytes of its character. So we decode new tokens together with ids[begin:end], and
        # skip the text of those.
        self.whole = ""
        self.begin = self.end = self.skip = 0
        self._decode()
        self.prompt_length = len(self.text)

    def add(self, token):
        self.ids.append(token)
        self._decode()
        places = [(stop, self.text.find(stop, self.prompt_length)) for stop in self.stops]
        completed = [(at + len(stop), at) for stop, at in places if at >= 0]
        if completed:
            self.ended = True
            self.text = self.text[: min(completed)[1]]

    def _decode(self):
        """Bring `text` up to date with `ids`."""
        if self.end == len(self.ids):
            return
        window = self.tokenizer.decode(self.ids[self.begin :])
        self.text = self.whole + window[self.skip :]
        # the next token may complete the last character, or change all that a run of bytes stands for
        if not window.endswith("\ufffd") and self.ids[-1] not in self.tokenizer.byte_ids:
            self.whole = self.text
            self.begin, self.end = self.end, len(self.ids)
            self.skip = len(self.tokenizer.decode(self.ids[self.begin :]))

    def settled(self):
        if self.ended:
            return self.text
        text = self.whole if self.ids and self.ids[-1] in self.tokenizer.byte_ids else self.text
        # an incomplete character decodes to one replacement character, or to one per byte, at most three
        text = text[: len(text) - min(3, len(text) - len(text.rstrip("\ufffd")))]
        waiting = max(map(len, self.stops), default=1) - 1
        return text[: max(self.prompt_length, len(text) - waiting)]
