"""Models that model.py alone cannot read: with a tokenizer, in a Hugging Face folder, or with nanoGPT's meta.pkl."""

from pathlib import Path

from model import CharTokenizer, build, char_tokenizer, load


def load_checkpoint(path, meta=None):
    """Return the checkpoint at `path` as load in model.py does. It may be a Hugging Face folder, too.

    meta  for a nanoGPT checkpoint: its meta.pkl, or the tokenizer if it was trained on GPT-2's tokens
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """
    path = Path(path)
    if path.is_dir():
        if meta:
            raise ValueError(f"{path} has its own tokenizer: leave out --meta")
        from extras.interop.huggingface import read_folder

        return read_folder(path)
    if not meta:
        return load(path)
    vocabulary, checkpoint = read_vocabulary(Path(meta)), load(path)
    if any(name in checkpoint for name in ("chars", "tokenizer")):
        raise ValueError(f"{path} has its own vocabulary: leave out --meta")
    return checkpoint | vocabulary


def read_vocabulary(path):
    """Return {"chars": ...} from nanoGPT's meta.pkl, or {"tokenizer": ...} from a tokenizer. Raises ValueError."""
    if path.suffix == ".pkl":
        from extras.nanogpt import read_meta

        return {"chars": read_meta(path)}
    from extras.bpe import read_tokenizer, tokenizer_from_json

    return tokenizer_from_json(read_tokenizer(path)).state_dict()  # as prepare.py writes it


def tokenizer_from_state(state):
    """Return the tokenizer for a dict with "tokenizer" or "chars". Raises ValueError, or KeyError if it has neither."""
    if "tokenizer" not in state:
        return CharTokenizer(state["chars"])
    from extras.bpe import tokenizer_from_json

    return tokenizer_from_json(state["tokenizer"])


def build_tokenizer(checkpoint):
    """Return the tokenizer of a checkpoint. Raises ValueError if there is none, or if it does not fit the weights."""
    if "tokenizer" not in checkpoint:
        return char_tokenizer(checkpoint)
    try:
        tokenizer = tokenizer_from_state(checkpoint)
    except ValueError as error:
        raise ValueError(f"{checkpoint['path']}: {error}") from None
    check_vocab_size(tokenizer, checkpoint["model_args"]["vocab_size"], checkpoint["path"])
    return tokenizer


def make_tokenizer(name, vocab_size, training_text):
    """Return the tokenizer for prepare.py --tokenizer. Raises ValueError.

    name           "bpe"; or a tokenizer.json, a checkpoint, a folder with either, or nanoGPT's meta.pkl
    training_text  the text in pieces, from which a BPE of vocab_size tokens learns
    """
    from extras.bpe import tokenizer_from_json, train_bpe

    if name == "bpe":
        return tokenizer_from_json(train_bpe(training_text, vocab_size))
    path = Path(name)
    for file in (path, path / "ckpt.pt", path / "last.pt"):
        if file.suffix in (".pt", ".pth", ".ckpt") and file.is_file():
            return build_tokenizer(load(file))
    return tokenizer_from_state(read_vocabulary(path))


def check_vocab_size(tokenizer, vocab_size, path):
    """Raise ValueError unless the weights from `path`, with vocab_size tokens, fit this tokenizer.

    Some models pad the vocabulary of their weights to a multiple of 128.
    """
    padding = 0 if tokenizer.unit == "characters" else 127
    if not 0 <= vocab_size - len(tokenizer.vocab) <= padding:
        raise ValueError(
            f"{path} has the weights of {vocab_size:,} tokens and a vocabulary of {len(tokenizer.vocab):,} "
            f"{tokenizer.unit}: they do not belong together"
        )


def load_model(path, meta=None):
    """Return (model, tokenizer): the GPT on the CPU in eval mode, and its tokenizer.

    The arguments and errors are those of load_checkpoint.
    """
    checkpoint = load_checkpoint(path, meta)
    tokenizer = build_tokenizer(checkpoint)
    return build(checkpoint).eval(), tokenizer
