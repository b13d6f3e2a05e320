"""Text in records, JSON or JSON Lines, for data/prepare.py. Other kinds of files are refused with a hint."""

import json
import re
from itertools import pairwise
from pathlib import Path

from extras.cli import first_line, note
from extras.formats.unsupported import refuse_pointer

TEXT_FIELDS = {"text", "content", "story"}
CHAT_FIELDS = {"messages", "conversations", "role"}
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
TO_JSON_LINES = "the library datasets writes it as JSON Lines: Dataset.from_{}({{!r}}{}).to_json({{!r}})"
# what a file is, and what to do with it
OTHERS = {
    ".parquet": "a Parquet file: " + TO_JSON_LINES.format("parquet", ""),
    ".csv": "a table: " + TO_JSON_LINES.format("csv", ""),
    ".tsv": "a table: " + TO_JSON_LINES.format("csv", r", sep='\t'"),
    ".pdf": "a PDF: pdftotext writes its text",
    **dict.fromkeys((".gz", ".xz", ".zip", ".zst"), "a compressed file: unpack it first"),
}
SPACES = re.compile(r"\s*")
SURROGATE = re.compile("[\ud800-\udfff]")
NUMBERS = "a file of numbers: save token ids as np.uint16 in train.bin and val.bin of a folder, for train.py --data_dir"


def read_records(name, field, separator):
    """Return the text of a file of records, each followed by the separator. Raises OSError, or ValueError in one line.

    field  the name of the field with the text. None: the only one of TEXT_FIELDS, or else of all that have text
    """
    path = Path(name)
    suffix = path.suffix.lower()
    refuse_pointer(path)
    if suffix not in (".json", ".jsonl", ".ndjson"):
        what = OTHERS.get(suffix, NUMBERS).format(name, f"{path.stem}.jsonl")
        raise ValueError(f"{name} is {what}")
    try:
        records = read_json(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error.reason}): convert it first") from None
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{name} is not JSON ({first_line(error)})") from None
    if len(records) == 1 and isinstance(records[0], list):
        records = records[0]
    records = [record if isinstance(record, dict) else {"text": record} for record in records]
    if not any(records):
        raise ValueError(f"{name} has no records")
    field = field or text_field(name, records)
    for number, record in enumerate(records, start=1):
        value = record.get(field)
        half = isinstance(value, str) and SURROGATE.search(value)
        if half or not isinstance(value, str):
            what = f"{json.dumps(half[0])}, half of a character," if half else json.dumps(value)[:40]
            found = f"{what} in {field}; its fields are {', '.join(record) or 'missing'}"
            hint = "fix it, leave it out, or name a different --field"
            raise ValueError(f"record {number} of {name} has {found}: {hint}")
    text = "".join(record[field] + separator for record in records if record[field])
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(content):
    """Return the values in JSON Lines as a list. The content may be one value of JSON, too. Raises ValueError."""
    values = []
    end = SPACES.match(content).end()
    while end < len(content):
        value, end = json.JSONDecoder().raw_decode(content, end)
        end = SPACES.match(content, end).end()
        values.append(value)
    return values


def text_field(name, records):
    """Return the one of TEXT_FIELDS that records have, or else the only one without numbers. Raises ValueError."""
    found = set().union(*records)
    maybe = {key for record in records for key, value in record.items() if isinstance(value, (str, list, dict))}
    field, *more = sorted(found & TEXT_FIELDS or maybe) or [None]
    if field and not more and field not in CHAT_FIELDS and "role" not in found:
        return field
    hint = "write each chat as one text" if found & CHAT_FIELDS else "name the one with the text: --field NAME"
    raise ValueError(f"the fields are {', '.join(sorted(found)[:20])} in {name}: {hint}")


def end_of_text(tokenizer):
    """Return what ends a document: the end token of a model's tokenizer, given as for prepare.py, or a blank line."""
    if tokenizer in (None, "bpe"):
        return "\n\n"
    from extras.formats.tokenizer import open_tokenizer  # here, because characters need no torch

    found = open_tokenizer(tokenizer)
    ids = getattr(found, "ids", {})
    # a vocabulary may have such a word although the tokenizer splits it
    return next((token for token in END_TOKENS if token in ids and ids[token] in found.encode_text(token)), "\n\n")


def warn_if_sorted(text):
    """Print a line if the lines of a text are sorted, up or down: from A to Z, by their last word, or by length."""
    lines = [line.casefold() for line in text.splitlines() if line.strip()]
    for key in (str, len, lambda line: line.split()[-1]):
        rising = [key(a) < key(b) for a, b in pairwise(lines) if key(a) != key(b)]
        if len(lines) >= 20 and len(rising) >= 5 and not 0.05 < sum(rising) / len(rising) < 0.95:
            note("the lines are sorted, so val is unlike train: shuffle them, or use --val")
            return
