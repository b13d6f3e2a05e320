"""Checkpoints that are damaged, hostile or of another kind: one line that names the file, and no code runs."""

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import Bomb, bytes_of, load, save_model, saved, tiny
from model import load_model

# -- ways to damage a checkpoint: functions of its folder --------------------------------------------------------------


def entry(name, change):
    """Another entry in ckpt.pt."""

    def damage(files):
        content = load(files / "ckpt.pt")
        torch.save(content | {name: change(content.get(name))}, files / "ckpt.pt")

    return damage


def cut(file):
    """As a download that broke off."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = [
    # the damage, a word of the message
    (
        bytes_of("ckpt.pt", b"not a checkpoint at all"),
        "cannot be loaded: it is damaged, or not a checkpoint$",
    ),
    (lambda files: cut(files / "ckpt.pt"), "ckpt.pt cannot be loaded: it is damaged"),
    (bytes_of("ckpt.pt", saved({"model": {}})), "has no weights with model_args of a GPT"),
    (bytes_of("ckpt.pt", lambda harm: saved({"model": Bomb(harm), "model_args": {}})), "could run code"),
    (bytes_of("ckpt.pt", lambda harm: pickle.dumps(Bomb(harm), protocol=2)), "could run code"),
    (
        bytes_of("ckpt.pt", saved({"transformer.wte.weight": torch.zeros(2, 3)})),
        "has no weights with model_args of a GPT",
    ),
    (bytes_of("ckpt.pt", saved({"state_dict": {}, "epoch": 3})), "has no weights with model_args of a GPT"),
    (bytes_of("ckpt.pt", saved([1, 2])), "has no weights with|cannot be loaded"),
    (entry("model_args", lambda old: old | {"dropout": np.float64(0.0)}), r"contains numpy\._core.* could run code"),
    (entry("model", lambda old: old | {"path": Path("x")}), r"contains pathlib\.PosixPath, which could run code"),
    (entry("model_args", lambda old: old | {"n_layer": 10**9}), "in a network of 2 layers, not .* in 1000000000$"),
    (entry("model_args", lambda old: old | {"bias": True}), r"keys missing, 0 unknown: \['\S+', '\S+'\]$"),
    (entry("model_args", lambda old: old | {"bias": 1}), "bias=1: must be bool$"),
    (entry("model_args", lambda old: old | {"n_head": 2.0}), "n_head=2.0: must be int$"),
    (entry("model", lambda old: {f"{name}s": p for name, p in old.items()}), "wte is"),
    (entry("model_args", lambda old: old | {"n_embd": 16}), "wte is"),
    (entry("model_args", lambda old: old | {"mlp_ratio": 2}), "size mismatch for"),
    (entry("model", lambda old: old | {"lm_head.weight": old["lm_head.weight"] + 1}), "wte and lm_head differ"),
    (entry("model", lambda old: None), "model is 'None'"),
    (entry("model", lambda old: dict(enumerate(old.values()))), "the weight 0 is not"),
    (entry("model", lambda old: old | {"lm_head.weight": [1.0]}), "the weight lm_head.weight is not"),
    (entry("model", lambda old: old | {"lm_head.weight": old["lm_head.weight"].to_sparse()}), "is not a tensor with"),
    (entry("model", lambda old: old | {"lm_head.weight": old["lm_head.weight"].to("meta")}), "is not a tensor with"),
    (entry("chars", lambda old: dict(enumerate(old))), "chars is"),
    (entry("model", lambda old: old | {"transformer.ln_f.weight": old["transformer.ln_f.weight"] * math.nan}), "NaN"),
    (entry("chars", lambda old: old[:-1]), "characters"),
    (entry("chars", lambda old: old[1] + old[1:]), "characters"),
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
