"""Text to token ids and back. A token is a character; kvgpt/bpe.py has tokens that are words or parts of words."""


class CharTokenizer:
    """Token i is the i-th character. Raises ValueError if a character comes twice.

    vocab           the characters in the order of their ids
    unit            what messages call tokens
    default_prompt  the text that stands for an empty prompt
    padding         rows without a token that weights may have
    """

    unit = "characters"
    padding = 0

    def __init__(self, chars):
        self.vocab = chars
        self.ids = {char: i for i, char in enumerate(chars)}
        if not chars or len(self.ids) < len(chars):
            raise ValueError(f"a list of {len(chars)} characters with {len(self.ids)} different characters is damaged")
        self.default_prompt = "\n" if "\n" in self.ids else chars[0]

    def encode(self, text):
        """Return the ids of a text as a list. Raises ValueError for a character that the vocabulary lacks."""
        unknown = sorted(set(text) - set(self.ids))
        if unknown:
            raise ValueError(f"the model never saw {', '.join(map(repr, unknown[:20]))}; it knows {self.vocab[:200]!r}")
        return [self.ids[char] for char in text]

    def decode(self, ids):
        return "".join([self.vocab[i] for i in ids])

    def show(self, id):
        """Return a token as messages show it."""
        return self.vocab[id]

    def state_dict(self):
        """Return what files keep of the tokenizer: tokenizer_from_state makes it again."""
        return {"chars": self.vocab}

    def to_json(self):
        """Return a tokenizer.json with the same tokens, in which an unknown character is an error."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        tokenizer = Tokenizer(models.WordLevel(self.ids))  # no unk_token
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # "." would skip newlines
        tokenizer.decoder = decoders.Fuse()
        return tokenizer.to_str(pretty=True)


def check_vocab_size(tokenizer, vocab_size, path):
    """Raise ValueError unless weights with vocab_size tokens, read from `path`, can belong to this tokenizer."""
    if not 0 <= vocab_size - len(tokenizer.vocab) <= tokenizer.padding:
        raise ValueError(
            f"{path} has the weights of {vocab_size:,} tokens and a vocabulary of {len(tokenizer.vocab):,} "
            f"{tokenizer.unit}: they do not belong together"
        )


def tokenizer_from_state(state):
    """Return the tokenizer whose state_dict a file holds. Raises ValueError."""
    return tokenizer_from_json(state["tokenizer"]) if "tokenizer" in state else CharTokenizer(state["chars"])


def tokenizer_from_json(content):
    """Return the tokenizer of a tokenizer.json: a CharTokenizer if its tokens are single characters.

    Raises ValueError if the content is no tokenizer.json.
    """
    from kvgpt.bpe import BPETokenizer

    tokenizer = BPETokenizer(content)
    return CharTokenizer("".join(tokenizer.vocab)) if tokenizer.has_characters_only else tokenizer
