"""Hold out the last tenth of the training text, in data/dev, for the choice of hyperparameters.

    python data/hold_out.py
    python train.py --data_dir data/dev --seed 1

A setting that was chosen by its loss on val.bin makes that loss look better than it is. data/dev has the first nine
tenths of train.bin for training and the last tenth for evaluation. The characters of val.bin are in neither.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # kvgpt is beside this script's folder

if __name__ == "__main__":
    from kvgpt.guard import guard_process

    guard_process()  # before the imports, which take seconds

from kvgpt.cli import Parser, fail, one_line_errors, path, run_main
from kvgpt.training.data import load_dataset, write_prepared

HERE = Path(__file__).resolve().parent


def main():
    parser = Parser(__doc__)
    parser.add_argument("--data_dir", type=path, default=str(HERE), metavar="DIR", help="default: beside this script")
    data_dir = Path(parser.parse_args().data_dir)
    dev = data_dir / "dev"
    if dev.resolve() == data_dir.resolve():
        fail(f"{dev} is {data_dir} itself, whose text would be lost: remove the link")
    with one_line_errors():
        data = load_dataset(data_dir, block_size=1)
    n = int(0.9 * len(data.train))
    if len(data.train) - n < 2:
        fail(f"the training text in {data_dir} has {len(data.train)} characters, and a tenth needs two: 20 would do")
    text = "".join(data.chars[i] for i in data.train)
    try:
        write_prepared(
            dev, data.chars, data.train[:n], data.train[n:], f"the training text in {data_dir}", text.encode()
        )
    except OSError as error:
        fail(f"cannot write {error.filename or dev}: {error.strerror}")
    print(f"train {n:,}, val {len(data.train) - n:,} characters: {dev}")


if __name__ == "__main__":
    run_main(main)
