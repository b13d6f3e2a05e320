"""extras/holdout.py: the training text divides again, and the val text is not in it."""

import pytest

from helpers import assert_one_line, here, ok, tree
from prepare_fixtures import BODY
from train import load_dataset


def hold_out(*args):
    return here(*args, script="extras/holdout.py")


@pytest.mark.parametrize("more", [[], ["--tokenizer", "bpe", "--vocab_size", 260]], ids=["characters", "bpe"])
def test_it_divides_the_training_text(more, call, text, tmp_path):
    """But it keeps the ids, so a character that only the val text has stays in the vocabulary."""
    text.write_bytes(BODY * 9 + BODY.upper())
    ok(call("--input", text, "--data_dir", tmp_path, *more))
    whole = load_dataset(tmp_path, 9)
    before = tree(tmp_path)
    counts = f"train {int(0.9 * len(whole.train)):,}, val {len(whole.train) - int(0.9 * len(whole.train)):,} "
    assert ok(hold_out(tmp_path)).stdout == f"{counts}{whole.tokenizer.unit}: {tmp_path / 'dev'}\n"
    dev = load_dataset(tmp_path / "dev", 9)
    assert dev.tokenizer.state_dict() == whole.tokenizer.state_dict()
    assert len(dev.train) == int(0.9 * len(whole.train)) and [*dev.train, *dev.val] == [*whole.train]
    assert dev.val_bytes == (len(whole.tokenizer.decode(dev.val.tolist()).encode()) if more else None)
    assert tree(tmp_path).items() >= before.items()


def damage(file, change):
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


@pytest.mark.parametrize(
    "damage, words",
    [
        (
            lambda folder: (folder / "train.bin").unlink(),
            ["no data at", "train.bin", "run python data/prepare.py first"],
        ),
        (
            lambda folder: (folder / "meta.json").unlink(),
            ["no data at", "meta.json", "run python data/prepare.py first"],
        ),
        (damage("train.bin", lambda raw: raw[:-2]), ["train", "has changed since data/prepare.py wrote it"]),
        (damage("meta.json", lambda raw: raw[:-2]), ["meta.json", "is damaged"]),
        (damage("meta.json", lambda raw: raw.replace(b"b", b"\xc3\xa9", 1)), ["has changed since"]),
        (damage("meta.json", lambda raw: b"\x80\x04"), ["meta.json", "is damaged"]),
        (damage("meta.json", lambda raw: b"{}"), ["meta.json", "is damaged"]),
        (damage("meta.json", lambda raw: b"[]"), ["meta.json", "is damaged"]),
    ],
)
def test_damage_is_one_line_and_nothing_is_written(damage, words, old):
    damage(old)
    before = tree(old)
    assert_one_line(hold_out(old), str(old), *words, code=1)
    assert tree(old) == before
