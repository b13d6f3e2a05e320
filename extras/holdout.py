"""Split the training text again: the first nine tenths of train.bin are for training, the rest is the val split.

    python -m extras.holdout         splits the text in data, into data/dev

A setting chosen for its loss on val.bin looks better than it is. So choose settings with --data_dir data/dev, and
val.bin stays unseen.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from data.prepare import write
from extras.checkpoint import tokenizer_from_state
from extras.cli import Parser, one_line_errors, run_main


def read_training_ids(data_dir):
    """Return (tokenizer, ids) of the training part in data_dir, a folder that data/prepare.py wrote.

    Raises ValueError if a file is missing or has changed.
    """
    try:
        meta = json.loads((data_dir / "meta.json").read_bytes())
        content = (data_dir / "train.bin").read_bytes()
        if hashlib.sha256(content).hexdigest() != meta["sha256"]["train"]:
            raise ValueError(f"{data_dir / 'train.bin'} has changed since data/prepare.py wrote it")
        tokenizer = tokenizer_from_state(meta)
    except FileNotFoundError as error:
        raise ValueError(f"no data: {error.filename} is missing; run python data/prepare.py first") from None
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{data_dir / 'meta.json'} is damaged: run python data/prepare.py again") from None
    return tokenizer, np.frombuffer(content, "<u2" if len(tokenizer.vocab) <= 2**16 else "<u4")


def main():
    parser = Parser(__doc__)
    dir_help = "a folder that data/prepare.py wrote (default: data)"
    parser.add_argument("data_dir", type=Path, nargs="?", default=Path("data"), help=dir_help)
    data_dir = parser.parse_args().data_dir
    with one_line_errors():
        tokenizer, ids = read_training_ids(data_dir)
    split, vocabulary, more = int(0.9 * len(ids)), tokenizer.state_dict(), {}
    if "tokenizer" in vocabulary:
        more["val_bytes"] = len(tokenizer.decode(ids[split:].tolist()).encode())
    source, dev = f"the training text in {data_dir}", data_dir / "dev"
    num_ids = write(dev, vocabulary, len(tokenizer.vocab), [ids[:split]], [ids[split:]], source, **more)
    print(f"train {num_ids['train']:,}, val {num_ids['val']:,} {tokenizer.unit}: {dev}")


if __name__ == "__main__":
    run_main(main)
