"""Tokens that are words or parts of words: read or train a tokenizer.json. The library tokenizers runs it."""

import itertools
import json
import re
from contextlib import suppress

from tqdm import tqdm

from extras.cli import first_line, need
from extras.formats.unsupported import refuse_pointer
from model import CharTokenizer

# The library's time and memory grow with the square of the length of a word, so we cut long text into pieces. We cut
# where a token ends anyway: before a single space; in text without any, at a line; or else, in DNA, anywhere.
PIECE = 2**12  # characters, at least
FAR = 2**16  # characters in which to look for a better place
CUTS = [re.compile(pattern) for pattern in (r"(?<=\S)(?= \S)", r"(?<=\S\n)(?=\S)", r"(?<=\S)(?=\S)")]
OLD_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # of transformers, and of OpenAI
GPT2_SPECIAL = ("<|endoftext|>", "<s>", "</s>", "<pad>", "<unk>", "<mask>")  # of GPT-2 and of RoBERTa
SENTENCEPIECE = (
    "a SentencePiece model: rename it to tokenizer.model, and AutoTokenizer.from_pretrained(FOLDER)"
    ".save_pretrained(FOLDER) of transformers, with sentencepiece, writes a tokenizer.json"
)


def library():
    """Return the library tokenizers, which characters do not need. Raises ValueError if it is missing."""
    return need("this tokenizer", "tokenizers")


class BPETokenizer:
    """The tokenizer of a tokenizer.json, with the attributes and methods of CharTokenizer in model.py.

    Raises ValueError if the content is not a tokenizer.json.
    """

    unit = "tokens"
    stop_pattern = staticmethod(re.escape)

    def __init__(self, content):
        from_str = library().Tokenizer.from_str
        try:
            self.tokenizer = from_str(content)
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            if hasattr(self.tokenizer.model, "dropout"):
                self.tokenizer.model.dropout = None  # with it, the ids of a text would be random
            self.ids = self.tokenizer.get_vocab(with_added_tokens=True)
            by_id = {i: token for token, i in self.ids.items()}
            if max(by_id, default=0) >= 2**20:  # no vocabulary is that large, and the list below would be
                raise ValueError(f"its largest id is {max(by_id)}")
        except Exception as error:  # tokenizers raises plain Exception
            hint = "pass a tokenizer.json of the library tokenizers"
            raise ValueError(f"the tokenizer cannot be read: {hint} ({first_line(error)[:200]})") from None
        # Llama 2 spells rare characters in byte tokens. A run of them is decoded together, and a single wrong byte
        # makes the whole run unreadable
        self.byte_ids = {i for token, i in self.ids.items() if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)}
        self.vocab = [by_id.get(i, f"<{i}>") for i in range(max(by_id, default=-1) + 1)]
        self.byte_ids |= set(range(len(self.vocab) + 128)) - by_id.keys()  # ids without a token decode to nothing

    @property
    def default_prompt(self):
        """A newline or, for a tokenizer that drops white space, the first token whose text it can encode."""
        for text in itertools.chain("\n", map(self.decode, ([i] for i in range(len(self.vocab))))):
            with suppress(ValueError):
                if text and self.encode(text):
                    return text
        raise ValueError("the tokenizer finds no tokens in any text")

    def encode(self, text):
        """Return the ids of a prompt as a list, after special tokens such as Llama's <s>.

        Raises ValueError if there are none.
        """
        plain = encode_with(self.tokenizer, text)
        ids = encode_with(self.tokenizer, text, add_special_tokens=True)
        begin = next((i for i in range(len(ids)) if ids[i : i + len(plain)] == plain), 0)
        ids = ids[: max(1, begin + len(plain))]  # without those at the end, such as T5's </s>: the prompt goes on
        if not ids:
            raise ValueError(f"the tokenizer finds no tokens in {text[:40]!r}")
        return ids

    def encode_text(self, text):
        """Yield the ids of long text, without special tokens. They decode to it. Raises ValueError.

        Some tokenizers put a space in front of whatever they encode, and not all of them remove it when they decode. We
        allow it before the first piece only, and only if it is removed.
        """
        tokenizer = self.tokenizer
        plain = library().Tokenizer.from_str(without_prefix(self.tokenizer.to_str()))
        for piece in pieces_of(text, "encode"):
            ids = encode_with(tokenizer, piece)
            if tokenizer is not plain and self.decode(ids) != piece:
                ids = encode_with(plain, piece)
            yield from ids
            tokenizer = plain

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def stream(self):
        """Return a function from the next ids to (text, pending): pending is what later ids may still change.

        A character can be spread over several tokens, and the text of a token depends on earlier ones. So we decode
        new tokens together with ids[begin:end], and skip the text of those.
        """
        ids = []
        begin = end = skip = 0

        def decode_next(new):
            nonlocal begin, end, skip
            ids.extend(new)
            window = self.decode(ids[begin:])
            text = window[skip:]
            # the next token may complete the last character, or change all that a run of bytes stands for
            if window.endswith("\ufffd") or ids[-1] in self.byte_ids:
                return "", text
            begin, end = end, len(ids)
            skip = len(self.decode(ids[begin:]))
            return text, ""

        return decode_next

    def gives_ids_of(self, content, ids):
        """Return whether a tokenizer.json has the same ids for the same tokens, and gives them to the text of `ids`.

        transformers rewrites the tokenizer.json when it saves a model, so we compare what it does: it may have a
        different structure, and a few more tokens at the end.
        """
        theirs = BPETokenizer(content)
        common = self.ids.keys() & theirs.ids.keys()
        if len(common) < min(len(self.ids), len(theirs.ids)) or any(self.ids[t] != theirs.ids[t] for t in common):
            return False
        text = self.decode(ids[: 2**16].tolist())
        return list(self.encode_text(text)) == list(theirs.encode_text(text))

    def state_dict(self):
        return {"tokenizer": self.tokenizer.to_str()}


def tokenizer_from_json(content):
    """Return the tokenizer of a tokenizer.json: a CharTokenizer if its tokens are single characters, as in to_json.

    Raises ValueError if the content is not a tokenizer.json.
    """
    found = BPETokenizer(content)
    words = type(found.tokenizer.model).__name__ == "WordLevel"
    if words and set(map(len, found.ids)) == {1} and len(found.ids) == len(found.vocab):
        return CharTokenizer("".join(found.vocab))
    return found


def to_json(tokenizer):
    """Return a tokenizer as a tokenizer.json. In that of a CharTokenizer an unknown character is an error."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.tokenizer.to_str(pretty=True)
    hf = library()
    characters = hf.Tokenizer(hf.models.WordLevel(tokenizer.ids))  # no unk_token
    characters.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated")  # "." would skip newlines
    characters.decoder = hf.decoders.Fuse()
    return characters.to_str(pretty=True)


def encode_with(tokenizer, text, add_special_tokens=False):
    """Return the library's ids for the text. Raises ValueError."""
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    except Exception as error:
        why = "not UTF-8" if isinstance(error, TypeError) else first_line(error)  # a str of broken bytes
        if "[UNK]" in why or "unk_id" in why:  # WordLevel, Unigram: whatever its unknown token would be called
            why = "some of it is not in the vocabulary, which has no unknown token either"
        raise ValueError(f"the tokenizer refuses {text[:40]!r}: {why}") from None


def without_prefix(content):
    """Return a tokenizer.json that puts no space in front of the text, as those of Llama, RoBERTa and T5 do."""
    never = {"add_prefix_space": False, "prepend_scheme": "never", "prepend": ""}
    settings = json.loads(content)
    for name, members in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        whole = settings[name] or {}
        for each in whole.get(members, [whole]):  # a Sequence has several
            each.update({key: value for key, value in never.items() if key in each})
            if each.get("pattern") == {"Regex": "\\A▁"}:  # as transformers converts Llama's SentencePiece model
                each["content"] = "▁"
    return json.dumps(settings)


def pieces_of(text, task):
    """Yield the text in pieces of about PIECE characters. A progress bar for the `task` appears if that takes long."""
    begin = 0
    with tqdm(total=len(text), desc=task, unit="char", unit_scale=True, delay=1, disable=None) as bar:
        while begin < len(text):
            end = cut(text, begin)
            yield text[begin:end]
            bar.update(end - begin)
            begin = end


def cut(text, begin):
    """Return where the piece that starts at `begin` ends."""
    if len(text) - begin <= PIECE:
        return len(text)
    far = begin + PIECE + FAR
    for pattern in CUTS if len(text) > far else CUTS[:1]:
        if match := pattern.search(text, begin + PIECE, far):
            return match.start()
    return min(far, len(text))


def train_bpe(text, vocab_size):
    """Return the tokenizer.json of a byte-level BPE like GPT-2's, with vocab_size tokens: 256 bytes and merged pairs.

    The most frequent pair is merged first. Raises ValueError if vocab_size is below 256 or too few pairs occur twice.
    """
    if vocab_size < 256:
        raise ValueError(f"--vocab_size {vocab_size} is below 256, the number of bytes")
    hf = library()
    tokenizer = byte_level(hf.models.BPE())
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    most = 256 + 4 * len(text)  # the library reserves memory for all that it is asked for
    trainer = hf.trainers.BpeTrainer(
        vocab_size=min(vocab_size, most), min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(pieces_of(text, "learn"), trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise ValueError(f"--vocab_size {vocab_size} is too large for this text: at most {size}")
    return tokenizer.to_str()


def read_tokenizer(path):
    """Return the tokenizer.json at `path`, a file or a folder. A folder may have GPT-2's older files instead.

    Raises ValueError if there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    for names in OLD_FILES:
        pair = [file.with_name(name) for name in names]
        found = [old.exists() for old in pair]
        if (all(found) and file in pair) or (any(found) and path.is_dir() and not file.exists()):
            return read_gpt2_tokenizer(*pair)
    try:
        refuse_pointer(file)
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        found = sorted([*path.glob("*tokenizer.*"), *path.glob("*.model*"), *path.glob("*vocab*")])
        hint = f": pass the file, such as {found[0]}" if found else ""
        if path.name.startswith("gpt2"):
            hint = f": hf download openai-community/{path.name} --local-dir {path} downloads it"
        raise ValueError(f"there is no tokenizer at {file}{hint}") from None
    except UnicodeDecodeError:
        what = SENTENCEPIECE if file.read_bytes().startswith(b"\n") else "not a tokenizer.json"
        raise ValueError(f"{file} is {what}") from None


def read_gpt2_tokenizer(vocab, merges):
    """Return GPT-2's vocab.json and merges.txt as a tokenizer.json."""
    hf = library()
    refuse_pointer(vocab)
    refuse_pointer(merges)
    added = vocab.with_name("added_tokens.json")
    try:
        tokenizer = byte_level(hf.models.BPE.from_file(str(vocab), str(merges)))
        ids = json.loads(added.read_text(encoding="utf-8")) if added.exists() else {}
        tokenizer.add_special_tokens(sorted(ids, key=ids.get))
        if any(tokenizer.token_to_id(token) != i for token, i in ids.items()):
            raise ValueError(f"the ids in {added.name} do not follow those in {vocab.name}")
    except Exception as error:
        raise ValueError(f"{vocab} and {merges.name} cannot be read: {first_line(error)[:200]}") from None
    tokenizer.add_special_tokens([token for token in GPT2_SPECIAL if tokenizer.token_to_id(token) is not None])
    return tokenizer.to_str()


def byte_level(model):
    """Return GPT-2's tokenizer around a BPE. It splits text into words of bytes, so it can encode any text."""
    hf = library()
    tokenizer = hf.Tokenizer(model)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    return tokenizer
