"""Split the training text again: the first nine tenths of train.bin are for training, the rest is the val split.

    python -m extras.holdout         splits the text in data, into data/dev

A setting chosen for its loss on val.bin looks better than it is. So choose settings with --data_dir data/dev, and
val.bin stays unseen.
"""

from pathlib import Path

from data.prepare import write
from extras.cli import Parser, one_line_errors, run_main
from train import load_dataset


def main():
    parser = Parser(__doc__)
    dir_help = "a folder that data/prepare.py wrote (default: data)"
    parser.add_argument("data_dir", type=Path, nargs="?", default=Path("data"), help=dir_help)
    data_dir = parser.parse_args().data_dir
    with one_line_errors():
        data = load_dataset(data_dir, min_train=2)
    tokenizer, ids = data.tokenizer, data.train
    split, vocabulary, more = int(0.9 * len(ids)), tokenizer.state_dict(), {}
    if "tokenizer" in vocabulary:
        more["val_bytes"] = len(tokenizer.decode(ids[split:].tolist()).encode())
    source, dev = f"the training text in {data_dir}", data_dir / "dev"
    num_ids = write(dev, vocabulary, len(tokenizer.vocab), [ids[:split]], [ids[split:]], source, **more)
    print(f"train {num_ids['train']:,}, val {num_ids['val']:,} {tokenizer.unit}: {dev}")


if __name__ == "__main__":
    run_main(main)
