"""Checksums of files that have no place for one inside."""

import hashlib
import re
from pathlib import Path

SUMS = "SHA256SUMS"  # the format is that of sha256sum, which checks a folder by `sha256sum -c SHA256SUMS`


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def checksums(files):
    """Return the content of SUMS for {name inside the folder: bytes}."""
    return "".join(f"{sha256(content)}  {name}\n" for name, content in sorted(files.items())).encode()


def check_folder(folder):
    """Raise ValueError if a file in `folder` has changed since SUMS was written there. Other folders pass."""
    sums = Path(folder, SUMS)
    if sums.is_file():
        for recorded, name in re.findall(r"^([0-9a-f]{64})  (\S+)$", sums.read_text("utf-8", "replace"), re.MULTILINE):
            file = Path(folder, name)
            if ".." not in file.parts and file.is_file():
                with open(file, "rb") as f:
                    if hashlib.file_digest(f, "sha256").hexdigest() != recorded:
                        raise ValueError(f"{name} has changed since export.py wrote it: export again, or remove {SUMS}")
