"""prepare.py --hold_out: the training text, to be split again."""

import hashlib
import json

import numpy as np

from extras.checkpoint import tokenizer_from_state


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
