"""The loss of a model on a text: in nats per token, as perplexity, and in bits per byte.

    python -m extras.evaluate                                        the model in out, on the text of the val split
    python -m extras.evaluate --text data/sample.txt                 on a text file
    python -m extras.evaluate --text data/sample.txt --stride 64     a window starts every 64 tokens
    python -m extras.evaluate --text data/sample.txt --ckpt gpt2     a Hugging Face folder, or any other model

Losses per token cannot be compared across tokenizers, bits per byte can.
"""

import hashlib
import json
import math
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # for python extras/evaluate.py

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from extras.cli import Parser, fail, one_line_errors, run_main
from extras.formats.checkpoint import load_model
from extras.formats.nanogpt import read_data
from extras.formats.tokenizer import tokenizer_from_state
from extras.formats.unsupported import refuse_pointer
from model import find_checkpoint, pick_device

DATA = Path(__file__).resolve().parent.parent / "data"


def read_text(file):
    """Return the text of a file. Raises ValueError if it is not UTF-8, and OSError."""
    refuse_pointer(file)
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 (byte {error.start}): convert it first") from None


def val_text(data_dir):
    """Return the text of the val split that data/prepare.py or nanoGPT wrote. Raises ValueError."""
    folder = Path(data_dir)
    try:
        if (folder / "meta.json").exists() or not (folder / "val.bin").exists():
            meta = json.loads((folder / "meta.json").read_bytes())
        else:
            meta = read_data(folder)
        tokenizer = tokenizer_from_state(meta)
        content = (folder / "val.bin").read_bytes()
        vocabulary = meta.get("chars") or meta.get("tokenizer") or meta["vocab_size"]
        for name, hashed in (("val", content), ("vocabulary", str(vocabulary).encode())):
            digest = hashlib.sha256(hashed).hexdigest()
            if meta["sha256"].get(name, digest) != digest:  # older folders have no hash of the vocabulary
                raise ValueError(f"{name} has changed")
        return tokenizer.decode(np.frombuffer(content, "<u2" if len(tokenizer.vocab) <= 2**16 else "<u4").tolist())
    except (AttributeError, OSError, KeyError, TypeError, ValueError, IndexError) as error:
        hint = f"run python data/prepare.py --data_dir {folder}, or pass a different --data_dir"
        raise ValueError(f"the data in {folder} cannot be read ({error}): {hint}") from None


@torch.no_grad()
def mean_loss(model, ids, stride):
    """Return the mean cross-entropy in nats over every token of `ids` but the first.

    ids     (N,) int64, N >= 2
    stride  tokens from window to window, at most the context. A window predicts the tokens that none before it has
            reached, so all windows but the first predict `stride` tokens or, at the end, fewer
    """
    block_size = model.config.block_size
    total = 0.0
    reached = 1  # the first token has nothing before it
    for begin in tqdm(range(0, max(1, len(ids) - 1 - (block_size - stride)), stride), delay=1, disable=None):
        window = ids[begin : begin + block_size + 1]
        num_new = begin + len(window) - reached
        logits, _ = model(window[None, :-1])  # (1, T, V)
        total += F.cross_entropy(logits[0, -num_new:].float(), window[-num_new:], reduction="sum").item()
        reached += num_new
    return total / (len(ids) - 1)


def parse_args():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--text", metavar="FILE", help="UTF-8 text (default: the val split in --data_dir)")
    add("--data_dir", default=DATA, help="folder that data/prepare.py wrote (default: data)")
    add("--stride", type=int, help="tokens from window to window (default: the model's context)")
    add("--ckpt", help="a checkpoint, a run or a Hugging Face folder (default: as in sample.py)")
    add("--meta", metavar="FILE", help="for a nanoGPT checkpoint: its meta.pkl, or its tokenizer")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto (the default): as in sample.py")
    return parser.parse_args()


def main():
    args = parse_args()
    with one_line_errors():
        text = read_text(args.text) if args.text else val_text(args.data_dir)
        ckpt = find_checkpoint(args.ckpt)
        model, tokenizer = load_model(ckpt, args.meta)
        ids = torch.tensor(list(tokenizer.encode_text(text) if tokenizer.unit == "tokens" else tokenizer.encode(text)))
        model.to(pick_device(args.device))
    what = args.text or f"the val split in {args.data_dir}"
    unit = tokenizer.unit
    block_size = model.config.block_size
    stride = block_size if args.stride is None else args.stride
    if len(ids) < 2:
        fail(f"{what} has {len(ids)} {unit}, but a loss needs two")
    if not 1 <= stride <= block_size:
        fail(f"--stride {stride} is not from 1 to {block_size}, the context")
    loss = mean_loss(model, ids.to(model.lm_head.weight.device), stride)
    perplexity = torch.tensor(loss).exp()  # math.exp raises an error where it is infinite
    bits_per_byte = loss / math.log(2) * len(ids) / len(text.encode())
    print(
        f"loss {loss:.4f} (perplexity {perplexity:.3f}, {bits_per_byte:.4f} bits per byte): "
        f"{ckpt}, {len(ids) - 1:,} {unit} of {what}\n"
        f"each is predicted from {block_size + 1 - stride} to {block_size} {unit} before it, fewer near the beginning"
    )


if __name__ == "__main__":
    run_main(main)
