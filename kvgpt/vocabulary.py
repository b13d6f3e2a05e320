"""Text to token ids and back. A token is a character, or with a tokenizer of transformers a piece of a word."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class Vocabulary:
    """How a model reads and writes text.

    names   what to call each token id in messages
    encode  text -> list of ids. Raises ValueError, with one line, for a text that has none
    decode  list of ids -> text
    start   the text that stands for an empty prompt
    """

    names: Sequence[str]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    start: str = "\n"


def check_characters(chars, path, vocab_size):
    """Raise ValueError unless `chars`, read from `path`, has a character of its own for each token."""
    if not len(chars) == len(set(chars)) == vocab_size:
        raise ValueError(f"{path} is damaged: {len(set(chars))} different characters for a vocab_size of {vocab_size}")


def character_vocabulary(chars):
    """Return the Vocabulary in which token i is chars[i]."""
    ids = {char: i for i, char in enumerate(chars)}

    def encode(text):
        unknown = sorted(set(text) - set(ids))
        if unknown:
            raise ValueError(f"the model never saw {', '.join(map(repr, unknown[:20]))}; it knows {chars[:200]!r}")
        return [ids[char] for char in text]

    def decode(tokens):
        return "".join(chars[i] for i in tokens)

    return Vocabulary(chars, encode, decode, start="\n" if "\n" in ids else chars[0])


def tokenizer_vocabulary(tokenizer, vocab_size):
    """Return the Vocabulary of a tokenizer of transformers. Its model may have more ids than the tokenizer has."""
    names = [tokenizer.convert_ids_to_tokens(i) if i < len(tokenizer) else None for i in range(vocab_size)]

    def encode(text):
        try:
            ids = tokenizer(text).input_ids
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(f"the tokenizer refuses {text[:40]!r}: {error}") from None
        if not ids:
            raise ValueError(f"the tokenizer makes no token of {text[:40]!r}: give another --prompt")
        return ids

    def decode(tokens):
        return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    return Vocabulary([name or f"<{i}>" for i, name in enumerate(names)], encode, decode)
