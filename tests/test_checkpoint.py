"""Our checkpoints and nanoGPT's: equal to the bit after a round trip, or one line that names the file. No code runs."""

import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import model
from helpers import Bomb, bytes_of, load, random_model, same, save_model, saved, tiny
from model import GPTConfig, build_model, load_checkpoint, load_model, save_checkpoint

ARGS = dict(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=5, bias=False, dropout=0.0)
CONTENT = {
    "model": random_model(GPTConfig(**ARGS)).state_dict(),
    "model_args": ARGS,
    "chars": "abcé\n",
    "ngrams": {"codes": torch.tensor([3, 17], dtype=torch.int32), "counts": torch.tensor([2, 9], dtype=torch.int32)},
    "best_val_loss": 1.25,
    "iter_num": 7,
    "optimizer": {"state": {0: {"exp_avg": torch.arange(3.0), "step": torch.tensor(7.0)}}},
    "config": {"learning_rate": 1e-3, "device": "cpu"},
}
WHOLE = saved(CONTENT)


def test_what_is_loaded_is_equal_to_the_bit_to_what_was_saved(tmp_path):
    path = tmp_path / "ckpt.pt"
    save_checkpoint(path, CONTENT)
    assert same(load_checkpoint(path), CONTENT | {"path": path})
    assert same(build_model(load_checkpoint(path)).state_dict(), CONTENT["model"])
    model, tokenizer = load_model(path)
    assert same(model.state_dict(), CONTENT["model"])
    assert tokenizer.state_dict() == {"chars": CONTENT["chars"]} and not model.training
    assert vars(model.config) == vars(GPTConfig(**ARGS))


def test_model_py_loads_the_folder_of_a_run_and_says_who_loads_a_model_with_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no checkpoint at {re.escape(str(tmp_path))}"):
        model.load_model(tmp_path)
    for file in ("last.pt", "ckpt.pt"):  # a run has no ckpt.pt before its first evaluation
        save_checkpoint(tmp_path / file, CONTENT | {"chars": "abcde" if file == "ckpt.pt" else "edcba"})
        assert model.load_checkpoint(tmp_path)["path"] == tmp_path / file
    save_checkpoint(tmp_path / "ckpt.pt", {"model": CONTENT["model"], "model_args": ARGS, "tokenizer": "{}"})
    with pytest.raises(ValueError, match=r"no characters: .*extras/formats/checkpoint\.py"):
        model.load_model(tmp_path / "ckpt.pt")


@settings(max_examples=100)
@given(place=st.integers(0, len(WHOLE) - 1), change=st.integers(1, 255) | st.just("cut"))
@example(place=len(WHOLE) - 1, change="cut")
def test_a_damaged_checkpoint_loads_as_it_was_or_not_at_all(tmp_path_factory, place, change):
    """torch.load alone would take a changed weight, count or setting as it comes."""
    path, damaged = tmp_path_factory.mktemp("damaged") / "ckpt.pt", bytearray(WHOLE)
    if change == "cut":
        del damaged[place:]
    else:
        damaged[place] ^= change
    path.write_bytes(damaged)
    try:
        got = load_checkpoint(path)
    except ValueError as error:
        assert "\n" not in str(error) and "ckpt.pt" in str(error)
    else:
        assert same(got, CONTENT | {"path": path})


# -- ways to damage a checkpoint: functions of its folder --------------------------------------------------------------


def entry(name, change):
    """Another entry in ckpt.pt."""

    def damage(files):
        content = load(files / "ckpt.pt")
        torch.save(content | {name: change(content.get(name))}, files / "ckpt.pt")

    return damage


def args(**settings):
    return entry("model_args", lambda old: old | settings)


def cut(file):
    """As a download that broke off."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = [
    # the damage, a word of the message
    (
        bytes_of("ckpt.pt", b"no checkpoint"),
        "ckpt.pt is damaged, or not a checkpoint of a GPT: Weights only load failed$",
    ),
    (lambda files: cut(files / "ckpt.pt"), "ckpt.pt is damaged"),
    (bytes_of("ckpt.pt", b""), "is damaged, or not a checkpoint of a GPT: EOFError"),
    (bytes_of("ckpt.pt", saved({"model": {}})), "does not have the model and model_args"),
    (bytes_of("ckpt.pt", lambda harm: saved({"model": Bomb(harm), "model_args": {}})), "could run code"),
    (bytes_of("ckpt.pt", lambda harm: pickle.dumps(Bomb(harm), protocol=2)), "could run code"),
    (bytes_of("ckpt.pt", saved({"state_dict": {}, "epoch": 3})), "does not have the model and model_args"),
    (bytes_of("ckpt.pt", saved([1, 2])), "does not have the model and model_args"),
    (args(dropout=np.float64(0.0)), r"contains numpy\._core.* could run code"),
    (entry("model", lambda old: old | {"path": Path("x")}), r"contains pathlib\.PosixPath, which could run code"),
    (args(n_layer=10**9), "n_layer is 1000000000, but it has 16 weights$"),
    (args(bias=True), r"Error.* for GPT: Missing key\(s\) in state_dict: .*bias\""),
    (args(n_head=2.5), "n_head=2.5: must be a divisor of n_embd=32$"),
    (args(n_layer="4"), "not supported between"),
    (entry("model", lambda old: {f"{name}s": p for name, p in old.items()}), "Missing key"),
    (args(n_embd=16), r"size mismatch for transformer\.wte\.weight: .*12, 32.*12, 16"),
    (args(mlp_ratio=2), "size mismatch for .*c_fc.weight"),
    (entry("model", lambda old: old | {"lm_head.weight": old["lm_head.weight"] + 1}), "wte and lm_head differ"),
    (entry("model", lambda old: None), "'NoneType'"),
    (entry("model", lambda old: dict(enumerate(old.values()))), "'int'"),
    (entry("model", lambda old: old | {"lm_head.weight": [1.0]}), "is damaged"),
    (entry("model", lambda old: old | {"lm_head.weight": old["lm_head.weight"].to_sparse()}), "is damaged"),
    (entry("model", lambda old: old | {"lm_head.weight": old["lm_head.weight"].to("meta")}), "is damaged"),
    (
        entry("model", lambda old: {name: p.to(torch.int8) for name, p in old.items()}),
        "wte.weight must be floating",
    ),
    (entry("model", lambda old: {name: p * math.nan for name, p in old.items()}), "without infinity or NaN$"),
    (entry("model_args", lambda old: dict(enumerate(old))), "keywords must be strings"),
    (bytes_of("ckpt.pt", saved({"model": CONTENT["model"], "model_args": ARGS})), "--meta"),
    (
        entry("model", lambda old: old | {"transformer.ln_f.weight": old["transformer.ln_f.weight"] * math.nan}),
        "NaN",
    ),
    (entry("chars", lambda old: old[:-1]), "characters"),
]


@pytest.mark.parametrize(["damage", "word"], DAMAGES)
def test_damage_is_a_one_line_value_error_that_names_the_file_and_runs_no_code(damage, word, tmp_path):
    save_model(tmp_path, tiny())
    load_model(tmp_path / "ckpt.pt")
    damage(tmp_path)
    with pytest.raises(ValueError, match=word) as error:
        load_model(tmp_path / "ckpt.pt")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert not (tmp_path / "harm").exists()
