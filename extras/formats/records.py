"""Text in records, JSON or JSON Lines, for data/prepare.py, and one line for files that hold no text of their own."""

import json
from pathlib import Path

from extras.cli import first_line

TEXT_FIELDS = ("text", "content", "story")
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
TO_JSON_LINES = "the library datasets writes it as JSON Lines: Dataset.from_{}({!r}).to_json({!r})"
# what a file is, and what to do with it
OTHERS = {
    ".parquet": ("a Parquet file", "parquet"),
    ".csv": ("a table", "csv"),
    ".tsv": ("a table", "csv"),
    ".pdf": ("a PDF", "pdftotext writes its text"),
}
IDS = "save token ids as np.uint16 in train.bin and val.bin of a folder, and pass that to train.py --data_dir"


def read_records(name, field, separator):
    """Return the text of a file of records, each followed by the separator. Raises OSError, or ValueError in one line.

    field  the name of the field with the text. None: the only string in each record, or one of TEXT_FIELDS
    """
    path = Path(name)
    suffix = path.suffix.lower()
    if suffix not in (".json", ".jsonl", ".ndjson"):
        kind, how = OTHERS.get(suffix, ("a file of numbers", IDS))
        if how in ("parquet", "csv"):
            how = TO_JSON_LINES.format(how, name, f"{path.stem}.jsonl")
        raise ValueError(f"{name} is {kind}: {how}")
    try:
        content = path.read_text(encoding="utf-8-sig")
        if suffix == ".json":
            records = json.loads(content)
        else:
            records = [json.loads(line) for line in content.split("\n") if line.strip()]
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{name} is not {suffix[1:].upper()} ({first_line(error)})") from None
    if not isinstance(records, list):
        raise ValueError(f"{name} is a JSON {type(records).__name__}, not a list of records")
    if all(isinstance(record, str) for record in records):
        records = [{"text": record} for record in records]
    fields = [set(record) if isinstance(record, dict) else set() for record in records]
    field = field or text_field(records, fields)
    for number, record in enumerate(records):
        if field not in fields[number] or not isinstance(record[field], str):
            found = set().union(*fields)
            chat = found & {"messages", "conversations"}
            hint = "write each chat as one text" if chat else "name the one with the text: --field NAME"
            names = ", ".join(sorted(found)) or "missing"
            raise ValueError(f"record {number} of {name} has no text; the fields are {names}: {hint}")
    text = "".join(record[field] + separator for record in records)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def end_of_text(tokenizer):
    """Return what ends a document: the end token of a model's tokenizer, given as for prepare.py, or a blank line."""
    if tokenizer in (None, "bpe"):
        return "\n\n"
    from extras.formats.tokenizer import open_tokenizer  # here, because characters need no torch

    ids = getattr(open_tokenizer(tokenizer), "ids", {})
    return next((token for token in END_TOKENS if token in ids), "\n\n")


def text_field(records, fields):
    """Return the field that is the only string of every record, or one of TEXT_FIELDS; None: there is no such field."""
    common = set.intersection(*fields) if fields else set()
    strings = [name for name in common if all(isinstance(record[name], str) for record in records)]
    known = [name for name in TEXT_FIELDS if name in strings]
    return strings[0] if len(strings) == 1 else known[0] if len(known) == 1 else None
