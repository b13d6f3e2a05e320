"""Text to token ids and back. Here a token is a character, and in kvgpt/bpe.py a word or a part of a word."""


class CharTokenizer:
    """Token i is the i-th character. Raises ValueError if a character occurs twice.

    vocab           the characters in the order of their ids
    unit            what messages call tokens
    default_prompt  used instead of an empty prompt
    padding         how many rows more than tokens the weights may have
    """

    unit = "characters"
    padding = 0

    def __init__(self, chars):
        self.vocab = chars
        self.ids = {char: i for i, char in enumerate(chars)}
        if not chars or len(self.ids) < len(chars):
            raise ValueError(f"the vocabulary is damaged: of {len(chars)} characters only {len(self.ids)} are distinct")
        self.default_prompt = "\n" if "\n" in self.ids else chars[0]

    def encode(self, text):
        """Return the ids of a text as a list. Raises ValueError for characters outside the vocabulary."""
        unknown = sorted(set(text) - set(self.ids))
        if unknown:
            raise ValueError(f"the model never saw {', '.join(map(repr, unknown[:20]))}; it knows {self.vocab[:200]!r}")
        return [self.ids[char] for char in text]

    def decode(self, ids):
        return "".join([self.vocab[i] for i in ids])

    def show(self, id):
        """Return a token as shown in messages."""
        return self.vocab[id]

    def state_dict(self):
        """Return what checkpoints save, for tokenizer_from_state."""
        return {"chars": self.vocab}

    def to_json(self):
        """Return a tokenizer.json with the same tokens, in which an unknown character is an error."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel(self.ids))  # no unk_token
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # "." would skip newlines
        tokenizer.decoder = decoders.Fuse()
        return tokenizer.to_str(pretty=True)


def check_vocab_size(tokenizer, vocab_size, path):
    """Raise ValueError unless the weights from `path`, with vocab_size tokens, fit this tokenizer."""
    if not 0 <= vocab_size - len(tokenizer.vocab) <= tokenizer.padding:
        raise ValueError(
            f"{path} has the weights of {vocab_size:,} tokens and a vocabulary of {len(tokenizer.vocab):,} "
            f"{tokenizer.unit}: they do not belong together"
        )


def tokenizer_from_state(state):
    """Return the tokenizer for a state_dict. Raises ValueError."""
    return tokenizer_from_json(state["tokenizer"]) if "tokenizer" in state else CharTokenizer(state["chars"])


def tokenizer_from_json(content):
    """Return the tokenizer of a tokenizer.json: a CharTokenizer if its tokens are single characters.

    Raises ValueError if the content is not a tokenizer.json.
    """
    from kvgpt.bpe import BPETokenizer

    tokenizer = BPETokenizer(content)
    return CharTokenizer("".join(tokenizer.vocab)) if tokenizer.has_characters_only else tokenizer
