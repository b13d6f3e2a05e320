"""Does a tokenizer give text back? It may drop characters, fold case or have no decoder."""

import json
import unicodedata
from collections import Counter

from extras.cli import note

SAMPLE = 2**19  # characters, encoded and decoded in about a second
MOST_UNKNOWN = 0.1  # share of unknown tokens


def check_round_trip(tokenizer, text, force):
    """Print a line if the ids of the text do not decode to it: how much is lost, where first, and why.

    force  accept even text with more than MOST_UNKNOWN of unknown tokens
    Raises ValueError for such text otherwise.
    """
    text = text[:SAMPLE]
    ids = list(tokenizer.encode_text(text))
    if not ids:
        raise ValueError("the tokenizer finds no tokens in the text")
    back = tokenizer.decode(ids)
    if back == text:
        return
    model = json.loads(tokenizer.tokenizer.to_str())["model"]
    unknown = model.get("unk_id", tokenizer.ids.get(model.get("unk_token")))  # Unigram has the id, the others the token
    share = ids.count(unknown) / len(ids)
    differing = (i for i, (ours, theirs) in enumerate(zip(text, back)) if ours != theirs)
    at = next(differing, min(len(text), len(back)))
    before, after = (whole[max(0, at - 20) : at + 20] for whole in (text, back))
    kept = sum((Counter(text) & Counter(back)).values()) / len(text)
    line = f"the tokenizer gives {kept:.0%} of the characters back: {before!r} becomes {after!r}"
    why = f"{share:.0%} of the tokens are {tokenizer.vocab[unknown]}" if share else reason(tokenizer, text, back)
    line += f" ({why})"
    if share > MOST_UNKNOWN and not force:
        raise ValueError(f"{line}: --force takes it")
    note(line)


def reason(tokenizer, text, back):
    if "".join(text.split()) == "".join(back.split()):
        return "it changes spaces"
    kept = plain(back)
    if plain(text) == kept:
        return "it folds case or accents"
    if tokenizer.tokenizer.decoder is None and set(back) - set(text):
        return "it has no decoder"
    lost = sorted(char for char in set(text) if char.isprintable() and plain(char) not in kept)
    return f"it drops {' '.join(lost[:10])}" if lost else "it drops characters"


def plain(text):
    """Return the letters of text without case, accents and spaces."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(char for char in letters if not unicodedata.combining(char) and not char.isspace())
