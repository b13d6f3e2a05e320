"""Text to token ids and back. A token is a character, or with a tokenizer.json a word or a part of one."""

import re

from tqdm import tqdm

from kvgpt.cli import first_line

PADDING = 127  # rows without a token that weights may have, because some round their number up to a multiple of 128
PIECE = 2**16  # characters that the tokenizer gets at once: its time and memory grow faster than the text
# A piece ends after a line that is neither empty nor followed by white space. GPT-2's tokens end there too.
PIECE_END = re.compile(r"(?<=\S\n)(?=\S)")


class CharTokenizer:
    """Token i is the i-th character. Raises ValueError if a character comes twice.

    vocab           the characters in the order of their ids
    unit            what messages call tokens
    default_prompt  the text that stands for an empty prompt
    """

    unit = "characters"

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

    def check_weights(self, vocab_size, path):
        """Raise ValueError unless weights with vocab_size tokens, read from `path`, can belong to this tokenizer."""
        check_vocab_size(self, vocab_size, path, padding=0)


class BPETokenizer:
    """A tokenizer.json, run by the library of Hugging Face. The attributes and methods are those of CharTokenizer."""

    unit = "tokens"
    default_prompt = "\n"

    def __init__(self, tokenizer):
        by_id = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
        self.vocab = [by_id.get(i, f"<{i}>") for i in range(max(by_id, default=-1) + 1)]
        self.tokenizer = tokenizer

    def encode(self, text):
        """Return the ids of a text as a list. Raises ValueError for a text that has none."""
        pieces, ids = pieces_of(text), []
        try:
            for piece in tqdm(pieces, desc="tokenize", unit="piece", disable=None, delay=2):
                ids += self.tokenizer.encode(piece).ids
        except Exception as error:
            why = "not UTF-8" if isinstance(error, TypeError) else first_line(error)  # a str of broken bytes
            raise ValueError(f"the tokenizer refuses {text[:40]!r}: {why}") from None
        if not ids:
            raise ValueError(f"the tokenizer makes no token of {text[:40]!r}")
        return ids

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def show(self, id):
        return self.vocab[id] if id < len(self.vocab) else f"<{id}>"  # weights may have more rows than there are tokens

    def state_dict(self):
        return {"tokenizer": self.tokenizer.to_str()}

    def to_json(self):
        return self.tokenizer.to_str(pretty=True)

    def check_weights(self, vocab_size, path):
        check_vocab_size(self, vocab_size, path, PADDING)


def check_vocab_size(tokenizer, vocab_size, path, padding):
    if not 0 <= vocab_size - len(tokenizer.vocab) <= padding:
        raise ValueError(
            f"{path} has the weights of {vocab_size:,} tokens and a vocabulary of {len(tokenizer.vocab):,} "
            f"{tokenizer.unit}: they do not belong together"
        )


def tokenizer_from_state(state):
    """Return the tokenizer whose state_dict a file holds. Raises ValueError."""
    return tokenizer_from_json(state["tokenizer"]) if "tokenizer" in state else CharTokenizer(state["chars"])


# -- tokenizer.json ----------------------------------------------------------------------------------------------------


def library():
    """Return the library of Hugging Face. Raises ValueError: most people who train on characters do not have it."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError("tokens that are not characters need tokenizers: pip install tokenizers") from None
    return tokenizers


def tokenizer_from_json(content):
    """Return the tokenizer of a tokenizer.json: a CharTokenizer if its tokens are single characters.

    Raises ValueError if the content is no tokenizer.json.
    """
    Tokenizer = library().Tokenizer
    try:
        tokenizer = Tokenizer.from_str(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        bpe, kind = BPETokenizer(tokenizer), type(tokenizer.model).__name__
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"the tokenizer cannot be read: {first_line(error)[:200]}") from None
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if kind == "WordLevel" and set(map(len, ids)) == {1} and len(ids) == len(bpe.vocab):
        return CharTokenizer("".join(bpe.vocab))
    return bpe


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
    hf = library()
    tokenizer = byte_level(hf.models.BPE())
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
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
    hf = library()
    try:
        tokenizer = byte_level(hf.models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:
        raise ValueError(f"{vocab} and {merges.name} cannot be read: {first_line(error)[:200]}") from None
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer.to_str()


def byte_level(model):
    """Return GPT-2's tokenizer around a BPE: a text is cut into words, and words are bytes, so it knows any text."""
    hf = library()
    tokenizer = hf.Tokenizer(model)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    return tokenizer
