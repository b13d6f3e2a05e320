"""Text to token ids and back. A token is a character, or with a tokenizer.json a word or a part of one."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from kvgpt.cli import first_line

PADDING = 127  # rows without a token that weights may have, because some round their number up to a multiple of 128
PIECE = 2**16  # characters that the tokenizer gets at once: its time and memory grow faster than the text
# A piece ends after a line that is neither empty nor followed by white space. GPT-2's tokens end there too.
PIECE_END = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass
class Vocabulary:
    """How a model reads and writes text.

    stored          what files keep of it: {"chars": the characters by id} or {"tokenizer": a tokenizer.json}
    names           what messages call each token
    encode          text -> list of ids. Raises ValueError, with one line, for a text that has none
    decode          list of ids -> text
    start           the text that stands for an empty prompt
    unit            what tokens are called: "characters" or "tokens"
    padding         how many more tokens the weights may have than the vocabulary
    tokenizer_json  a function that returns a tokenizer.json with the same tokens
    """

    stored: dict[str, str]
    names: Sequence[str]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    start: str
    unit: str
    padding: int
    tokenizer_json: Callable[[], str]

    def name(self, token):
        return self.names[token] if token < len(self.names) else f"<{token}>"

    def check(self, vocab_size, path):
        """Raise ValueError unless weights with vocab_size tokens, read from `path`, can belong to this vocabulary."""
        if not 0 <= vocab_size - len(self.names) <= self.padding:
            raise ValueError(
                f"{path} has the weights of {vocab_size:,} tokens and a vocabulary of {len(self.names):,} {self.unit}: "
                "they do not belong together"
            )


def read_vocabulary(stored):
    """Return the Vocabulary of which a file has kept `stored`. Raises ValueError."""
    if "tokenizer" in stored:
        return tokenizer_vocabulary(stored["tokenizer"])
    return character_vocabulary(stored["chars"])


# -- characters --------------------------------------------------------------------------------------------------------


def character_vocabulary(chars):
    """Return the Vocabulary in which token i is chars[i]. Raises ValueError if a character comes twice."""
    ids = {char: i for i, char in enumerate(chars)}
    if not chars or len(ids) < len(chars):
        raise ValueError(f"a list of {len(chars)} characters with {len(ids)} different characters is damaged")

    def encode(text):
        unknown = sorted(set(text) - set(ids))
        if unknown:
            raise ValueError(f"the model never saw {', '.join(map(repr, unknown[:20]))}; it knows {chars[:200]!r}")
        return [ids[char] for char in text]

    return Vocabulary(
        stored={"chars": chars},
        names=chars,
        encode=encode,
        decode=lambda tokens: "".join([chars[i] for i in tokens]),
        start="\n" if "\n" in ids else chars[0],
        unit="characters",
        padding=0,
        tokenizer_json=lambda: character_tokenizer(ids),
    )


def character_tokenizer(ids):
    """Return the tokenizer.json in which every character is a token. An unknown one is an error."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(ids))  # no unk_token
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # "." would leave out newlines
    tokenizer.decoder = decoders.Fuse()
    return tokenizer.to_str(pretty=True)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def tokenizers():
    """Return the library of Hugging Face. Raises ValueError, because few people have it who train on characters."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError("tokens that are not characters need tokenizers: pip install tokenizers") from None
    return tokenizers


def tokenizer_vocabulary(content):
    """Return the Vocabulary of a tokenizer.json. If its tokens are our characters, then it is theirs.

    Raises ValueError if it is none.
    """
    Tokenizer = tokenizers().Tokenizer
    try:
        tokenizer = Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocab, kind = tokenizer.get_vocab(with_added_tokens=True), type(tokenizer.model).__name__
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"the tokenizer cannot be read: {first_line(error)[:200]}") from None
    by_id = {i: name for name, i in vocab.items()}
    names = [by_id.get(i, f"<{i}>") for i in range(max(by_id, default=-1) + 1)]
    if kind == "WordLevel" and set(map(len, vocab)) == {1} and len(vocab) == len(names):
        return character_vocabulary("".join(names))

    def encode(text):
        pieces, ids = pieces_of(text), []
        try:
            for piece in tqdm(pieces, desc="tokenize", unit="piece", disable=None, delay=2):
                ids += tokenizer.encode(piece).ids
        except Exception as error:
            why = "not UTF-8" if isinstance(error, TypeError) else first_line(error)  # a str of broken bytes
            raise ValueError(f"the tokenizer refuses {text[:40]!r}: {why}") from None
        if not ids:
            raise ValueError(f"the tokenizer makes no token of {text[:40]!r}")
        return ids

    return Vocabulary(
        stored={"tokenizer": tokenizer.to_str()},
        names=names,
        encode=encode,
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
        start="\n",
        unit="tokens",
        padding=PADDING,
        tokenizer_json=lambda: tokenizer.to_str(pretty=True),
    )


def pieces_of(text):
    """Return the text in pieces of PIECE characters and the rest of a line. An empty text is one piece."""
    pieces, begin = [], 0
    while end := PIECE_END.search(text, begin + PIECE):
        pieces.append(text[begin : end.start()])
        begin = end.start()
    return [*pieces, text[begin:]]


def train_bpe(text, vocab_size):
    """Return the tokenizer.json of a byte-level BPE, GPT-2's kind, of vocab_size tokens: 256 bytes, and merged pairs.

    The text decides the merges, the commonest pair first. Raises ValueError if not enough pairs come twice.
    """
    library = tokenizers()
    tokenizer = byte_level(library.models.BPE())
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(pieces_of(text), trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise ValueError(f"--vocab_size {vocab_size} is more than the text can fill: at most {size}")
    return tokenizer.to_str()


def read_tokenizer(path):
    """Return the tokenizer.json at `path`: the file, or that of a folder, which may have GPT-2's older files instead.

    Raises ValueError if there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    vocab, merges = (file.with_name(name) for name in ("vocab.json", "merges.txt"))
    if not file.exists() and vocab.exists() and merges.exists():
        return read_gpt2_tokenizer(vocab, merges)
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} has no tokenizer: there is no {file}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not a tokenizer.json") from None


def read_gpt2_tokenizer(vocab, merges):
    """Return the tokenizer.json of GPT-2's own two files."""
    library = tokenizers()
    try:
        tokenizer = byte_level(library.models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:
        raise ValueError(f"{vocab} and {merges.name} cannot be read: {first_line(error)[:200]}") from None
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()


def byte_level(model):
    """Return GPT-2's tokenizer around a BPE: a text is cut into words, and words are bytes, so it knows any text."""
    library = tokenizers()
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer
