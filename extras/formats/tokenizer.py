"""The tokenizer of a checkpoint: characters, those of a tokenizer.json, or ids if it has no vocabulary."""

import itertools
from functools import partial
from pathlib import Path

from extras.formats.bpe import read_tokenizer, tokenizer_from_json, train_bpe
from extras.formats.nanogpt import read_meta
from extras.formats.round_trip import check_round_trip
from model import CharTokenizer, GPTConfig, find_checkpoint, load_checkpoint


class IdTokenizer:
    """Writes tokens as their ids, for a model without a vocabulary: its tokens may be moves, notes or strokes.

    It has the attributes and methods of CharTokenizer in model.py.
    """

    unit = "ids"
    default_prompt = "0"

    def __init__(self, vocab_size):
        self.vocab = range(vocab_size)

    def encode(self, text):
        """Return the ids in text such as "5 17 3" as a list. Raises ValueError."""
        words = text.split()
        wrong = next((word for word in words if not word.isdecimal() or int(word) not in self.vocab), None)
        if wrong or not words:
            hint = "the model has no vocabulary (--meta takes nanoGPT's meta.pkl or a tokenizer), so text is ids"
            ids = f"from 0 to {len(self.vocab) - 1}, such as '5 17 3'"
            raise ValueError(f"{wrong or text!r} is not an id: {hint} {ids}")
        return [int(word) for word in words]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def stream(self):
        spaces = itertools.chain([""], itertools.repeat(" "))  # before each id but the first
        return lambda ids: ("".join(next(spaces) + str(i) for i in ids), "")

    def stop_pattern(self, stop):
        """Return a regular expression for whole ids: a stop of 1 is not in 12."""
        return rf" {' '.join(map(str, self.encode(stop)))}\b"

    def state_dict(self):
        return {}  # the number of tokens is in model_args


def build_tokenizer(checkpoint):
    """Return the tokenizer of a checkpoint. Raises ValueError if there is none, or if it does not fit the weights."""
    path = checkpoint["path"]
    if not checkpoint.keys() & {"chars", "tokenizer"}:
        raise ValueError(f"{path} has no vocabulary: pass nanoGPT's meta.pkl, or a tokenizer, as --meta")
    try:
        tokenizer = tokenizer_from_state(checkpoint)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    check_vocab_size(tokenizer, GPTConfig(**checkpoint["model_args"]).vocab_size, path)
    return tokenizer


def tokenizer_from_state(state):
    """Return the tokenizer for a dict with "tokenizer", "chars" or "vocab_size". Raises ValueError or KeyError."""
    for name, kind in (("tokenizer", str), ("chars", str), ("vocab_size", int)):
        if name in state and type(state[name]) is not kind:
            raise ValueError(f"its {name} is {state[name]!r:.40}")
    if not 0 < state.get("vocab_size", 1) <= 2**31:
        raise ValueError(f"its vocab_size is {state['vocab_size']}")
    if "tokenizer" in state:
        return tokenizer_from_json(state["tokenizer"])
    return CharTokenizer(state["chars"]) if "chars" in state else IdTokenizer(state["vocab_size"])


def gives_ids_of(tokenizer, checkpoint, ids):
    """Return whether `ids`, text in the tokens of a tokenizer, mean the same to the model of a checkpoint.

    Ids without a vocabulary only have to be below the vocabulary size. Raises ValueError.
    """
    if tokenizer.unit == "ids" and not {"chars", "tokenizer"} & checkpoint.keys():
        return len(tokenizer.vocab) <= GPTConfig(**checkpoint["model_args"]).vocab_size
    theirs = build_tokenizer(checkpoint).state_dict()
    if tokenizer.state_dict() == theirs:
        return True
    return tokenizer.unit == "tokens" and "tokenizer" in theirs and tokenizer.gives_ids_of(theirs["tokenizer"], ids)


def check_vocab_size(tokenizer, vocab_size, path):
    """Raise ValueError unless the weights from `path`, with vocab_size tokens, fit this tokenizer.

    Some models pad the vocabulary of their weights to a multiple of 128.
    """
    size = len(tokenizer.vocab)
    padding = 0 if tokenizer.unit == "characters" else 127
    if not 0 <= vocab_size - size <= padding:
        both = f"the weights of {vocab_size:,} tokens and a vocabulary of {size:,} {tokenizer.unit}"
        raise ValueError(f"{path} has {both}: they do not belong together")


def read_vocabulary(path):
    """Return {"chars": ...} from nanoGPT's meta.pkl, or {"tokenizer": ...} from a tokenizer. Raises ValueError."""
    if path.suffix == ".pkl":
        return {"chars": read_meta(path)}
    content = read_tokenizer(path)
    try:
        return tokenizer_from_json(content).state_dict()  # as prepare.py writes it
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def make_tokenizer(name, vocab_size, training_text, chars, force):
    """Return (vocabulary, size, encode) for prepare.py --tokenizer. Raises ValueError, also if a character is missing.

    name           "bpe"; or a tokenizer.json, a checkpoint, a folder with either, or nanoGPT's meta.pkl
    training_text  the text from which a BPE of vocab_size tokens learns
    chars          the characters of the text
    force          take a tokenizer even if many of its tokens are unknown
    vocabulary     as meta.json holds it, with `size` tokens
    encode         a function from text to an iterator of ids
    """
    tokenizer = tokenizer_from_json(train_bpe(training_text, vocab_size)) if name == "bpe" else open_tokenizer(name)
    if tokenizer.unit == "characters":
        tokenizer.encode(chars)
        return tokenizer.state_dict(), len(tokenizer.vocab), partial(map, tokenizer.ids.get)
    check_round_trip(tokenizer, training_text, force)
    return tokenizer.state_dict(), len(tokenizer.vocab), tokenizer.encode_text


def open_tokenizer(name):
    """Return the tokenizer of a tokenizer.json, a checkpoint, a folder with either, or nanoGPT's meta.pkl.

    Raises ValueError.
    """
    path = Path(name)
    file = find_checkpoint(path)
    if file.suffix in (".pt", ".pth", ".ckpt") and file.is_file():
        return build_tokenizer(load_checkpoint(file))
    return tokenizer_from_state(read_vocabulary(path))
