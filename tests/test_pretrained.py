"""The pretrained model that comes with the code."""

import math
from contextlib import nullcontext

import pytest

from helpers import ROOT
from model import PRETRAINED, build_model, load_checkpoint
from train import evaluate, load_dataset


def test_it_is_small_and_has_no_state_of_its_training():
    assert PRETRAINED.stat().st_size <= 4e6
    checkpoint = load_checkpoint(PRETRAINED)
    model = build_model(checkpoint).eval()
    weights = sum(p.nbytes for p in model.parameters())
    ngrams = checkpoint["ngrams"]
    assert ngrams["order"] == 4 and 0 < ngrams["codes"].nbytes + ngrams["counts"].nbytes <= weights / 8
    assert not {"optimizer", "scaler"} & checkpoint.keys()
    assert str(ROOT).encode() not in PRETRAINED.read_bytes()


@pytest.mark.slow
def test_its_val_loss_is_the_one_in_the_file():
    checkpoint = load_checkpoint(PRETRAINED)
    try:
        _, _, val, meta = load_dataset(ROOT / "data", checkpoint["model_args"]["block_size"])
    except ValueError:
        pytest.skip("needs the corpus: python data/prepare.py")
    if not checkpoint["data_sha256"].items() <= meta["sha256"].items():
        pytest.skip("data/ does not hold tiny Shakespeare")
    loss = evaluate(build_model(checkpoint), val, math.inf, nullcontext())
    assert loss == pytest.approx(checkpoint["best_val_loss"], abs=1e-4) and loss < 1.45
