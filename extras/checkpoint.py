"""Models that model.py alone cannot read: with a tokenizer, in a Hugging Face folder, or with nanoGPT's meta.pkl."""

from pathlib import Path

import model
from extras.interop.hf_read import read_folder
from extras.tokenizer import build_tokenizer, read_vocabulary


def load_model(path, meta=None):
    """Return (model, tokenizer): the GPT on the CPU in eval mode, and its tokenizer.

    The arguments and errors are those of load_checkpoint.
    """
    checkpoint = load_checkpoint(path, meta)
    tokenizer = build_tokenizer(checkpoint)
    return model.build_model(checkpoint).eval(), tokenizer


def load_checkpoint(path, meta=None):
    """Return the checkpoint at `path` as load_checkpoint in model.py does. It may be a Hugging Face folder, too.

    meta  for a nanoGPT checkpoint: its meta.pkl, or the tokenizer if it was trained on GPT-2's tokens
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """
    path = Path(path)
    if path.is_dir():
        if meta:
            raise ValueError(f"{path} has its own tokenizer: leave out --meta")
        return read_folder(path)
    if not meta:
        return model.load_checkpoint(path)
    vocabulary = read_vocabulary(Path(meta))
    checkpoint = model.load_checkpoint(path)
    if any(name in checkpoint for name in ("chars", "tokenizer")):
        raise ValueError(f"{path} has its own vocabulary: leave out --meta")
    return checkpoint | vocabulary
