#!/bin/sh
# datasets 5.2.0, torchdata 0.11.0 (with torch 2.13.0): a resume in the middle of an epoch also changes later epochs.
#
# Both promise to continue at the next sample, and do. But the state that datasets loads into an IterableDataset stays
# there: every later epoch starts at the same sample again, and with a state taken at the end of an epoch, all are
# empty. Inside torchdata's StatefulDataLoader, this goes away with workers only.
#
# A StatefulDataLoader with its own generator and no workers continues the epoch exactly, and shuffles the next one in a
# different order than an uninterrupted run. Without a generator, or with workers, it is exact, as are grain 0.2.18 and
# litdata 0.2.76. A shuffle buffer of datasets loses samples, as documented, but also repeats some.
#
# It matters because a test that resumes once and finishes the epoch passes. In datasets, call set_epoch before every
# epoch, even without shuffling: a loaded state applies only to its own epoch. In torchdata, leave out the generator.
#
# Seen (Linux x86-64, Python 3.11), 24 samples, stopped after 9 and resumed, compared with the run that went on:
#                                    rest of the epoch     the next epoch
#   torchdata, shuffled              exact                 exact
#   torchdata, with a generator      exact                 different order
#   torchdata, that and 2 workers    exact                 exact
#   datasets                         exact                 9 never, 0 twice
#   datasets, set_epoch              exact                 exact
#   datasets, stopped after 24       exact                 24 never, 0 twice
#   datasets, shuffle buffer of 8    6 never, 2 twice      exact
#   grain, shuffled                  exact                 exact
#   litdata, shuffled                exact                 exact
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 torchdata==0.11.0 datasets==5.2.0 grain==0.2.18 litdata==0.2.76 numpy==2.4.6 \
    setuptools
cat > run.py <<'END'
import logging
import sys
from collections import Counter

import datasets
import grain
import litdata
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

N = 24


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, i):
        return i


def with_torchdata(seed=None, workers=0):
    torch.manual_seed(0)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return StatefulDataLoader(Samples(), 1, shuffle=True, num_workers=workers, generator=generator)


def with_datasets(buffer=None):
    dataset = datasets.Dataset.from_dict({"i": list(range(N))}).to_iterable_dataset()
    return dataset.shuffle(seed=1, buffer_size=buffer) if buffer else dataset


class with_grain:
    """Two epochs of grain, whose state belongs to the iterator, as a loader."""

    def __init__(self):
        self.iterator = iter(grain.MapDataset.range(N).seed(0).shuffle().repeat(2).to_iter_dataset())

    def __iter__(self):
        for i in self.iterator:
            yield i
            if self.iterator.get_state()["next_index"] % N == 0:
                break

    def state_dict(self):
        return self.iterator.get_state()

    def load_state_dict(self, state):
        self.iterator.set_state(state)


def with_litdata():
    dataset = litdata.StreamingDataset("samples", shuffle=True, seed=0)
    return litdata.StreamingDataLoader(dataset, batch_size=1, shuffle=True)


def index(sample):
    return int(sample["i"] if isinstance(sample, dict) else sample)


def epoch(loader, number, set_epoch, stop=None):
    """Return the samples of an epoch, or the first of them and the state after them."""
    if set_epoch:
        loader.set_epoch(number)
    samples = []
    for sample in loader:
        samples.append(index(sample))
        if len(samples) == stop:
            return samples, loader.state_dict()
    return samples


def verdict(seen, whole):
    if seen == whole:
        return "exact"
    never, twice = (sum((Counter(a) - Counter(b)).values()) for a, b in ((whole, seen), (seen, whole)))
    return f"{never} never, {twice} twice" if never or twice else "different order"


def resumed(make, stop=9, set_epoch=False):
    loader = make()
    whole = [epoch(loader, number, set_epoch) for number in range(2)]
    first, state = epoch(make(), 0, set_epoch, stop)
    loader = make()
    loader.load_state_dict(state)
    rest, following = (epoch(loader, number, set_epoch) for number in range(2))
    return [verdict(first + rest, whole[0]), verdict(following, whole[1])]


if __name__ == "__main__":
    logging.getLogger("datasets").setLevel(logging.ERROR)
    if sys.argv[1:] == ["--samples"]:
        litdata.optimize(fn=int, inputs=list(range(N)), output_dir="samples", num_workers=1, chunk_size=6)
        sys.exit()
    runs = {
        "torchdata, shuffled": resumed(with_torchdata),
        "torchdata, with a generator": resumed(lambda: with_torchdata(1)),
        "torchdata, that and 2 workers": resumed(lambda: with_torchdata(1, 2)),
        "datasets": resumed(with_datasets),
        "datasets, set_epoch": resumed(with_datasets, set_epoch=True),
        "datasets, stopped after 24": resumed(with_datasets, N),
        "datasets, shuffle buffer of 8": resumed(lambda: with_datasets(8), set_epoch=True),
        "grain, shuffled": resumed(with_grain),
        "litdata, shuffled": resumed(with_litdata),
    }
    print(f"{'':33}rest of the epoch     the next epoch")
    for name, (rest, following) in runs.items():
        print(f"{name:33}{rest:22}{following}")
    EXACT = ["exact", "exact"]
    expected = [EXACT, ["exact", "different order"], EXACT, ["exact", "9 never, 0 twice"], EXACT]
    expected += [["exact", "24 never, 0 twice"], ["6 never, 2 twice", "exact"], EXACT, EXACT]
    if list(runs.values()) != expected:
        sys.exit("changed: what a resumed data loader yields")
END
export HF_HUB_OFFLINE=1 LITDATA_DISABLE_VERSION_CHECK=1
venv/bin/python -W ignore run.py --samples > samples.log 2>&1 # litdata reads a folder that it wrote
venv/bin/python -W ignore run.py
