"""Exports and meta.pkl that are damaged, hostile or of another kind: one line that names the file, and no code runs.

tests/test_damaged.py does the same to ckpt.pt.
"""

import json
import math
import pickle
import shutil

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from extra_helpers import STABLELM, TOKENIZER
from extras.formats.checkpoint import load_model
from extras.formats.hf_write import write_folder
from extras.formats.onnx import OnnxGPT, write_onnx
from helpers import CHARS, Bomb, bytes_of, load, save_model, tiny

pytestmark = pytest.mark.slow  # they share exports, which take seconds


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with ckpt.pt, nanoGPT's nano.pt and meta.pkl, model.onnx and the folder hf, all of one model."""
    folder = tmp_path_factory.mktemp("whole")
    model = tiny(**STABLELM)
    save_model(folder, model)
    nano = load(folder / "ckpt.pt")
    torch.save({name: nano[name] for name in ("model", "model_args")}, folder / "nano.pt")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(CHARS))}))
    write_onnx(model, TOKENIZER, folder / "model.onnx")
    (folder / "hf").mkdir()
    write_folder(model, TOKENIZER, folder / "hf")
    return folder


@pytest.fixture
def files(whole, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(whole, tmp_path / "files")


def read(files, name):
    """Read a file or folder as the scripts do."""
    if name == "meta.pkl":
        load_model(files / "nano.pt", files / "meta.pkl")
    elif name == "model.onnx":
        OnnxGPT(files / name)
    else:
        load_model(files / name)


# -- ways to damage a file: functions of the folder above --------------------------------------------------------------


def json_of(name, change):
    """Other settings in a JSON file of the folder hf."""

    def damage(files):
        content = json.loads((files / "hf" / name).read_text(encoding="utf-8"))
        change(content)
        (files / "hf" / name).write_text(json.dumps(content), encoding="utf-8")

    return damage


def tensor(name, value):
    """Another tensor in the folder hf."""

    def damage(files):
        content = load_file(files / "hf" / "model.safetensors")
        save_file(content | {name: value}, files / "hf" / "model.safetensors")

    return damage


def without_metadata(files):
    proto = onnx.load(files / "model.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, files / "model.onnx")


DAMAGES = [
    # what is read, the damage, a word of the message
    ("meta.pkl", bytes_of("meta.pkl", pickle.dumps({"itos": {1: "a"}})), "not a nanoGPT meta"),
    ("meta.pkl", bytes_of("meta.pkl", lambda harm: pickle.dumps({"itos": Bomb(harm)})), "plain values"),
    ("model.onnx", bytes_of("model.onnx", b"no graph"), "cannot be read"),
    ("model.onnx", without_metadata, "not written by export.py"),
    ("hf", lambda files: (files / "hf" / "config.json").unlink(), "config.json"),
    ("hf", json_of("config.json", lambda old: old.update(model_type="llama")), "llama"),
    ("hf", json_of("config.json", lambda old: old["rope_parameters"].update(rope_theta=5e5)), "theta"),
    ("hf", json_of("config.json", lambda old: old.pop("hidden_size")), "hidden_size"),
    ("hf", json_of("tokenizer.json", lambda old: old["model"]["vocab"].update(the=99)), "do not belong together"),
    ("hf", tensor("extra", torch.ones(2)), "extra, which"),
    ("hf", tensor("model.norm.weight", torch.full((32,), math.nan)), "NaN"),
]


@pytest.mark.parametrize(["name", "damage", "word"], DAMAGES)
def test_damage_is_a_one_line_value_error_that_names_the_file_and_runs_no_code(name, damage, word, files):
    read(files, name)
    damage(files)
    with pytest.raises(ValueError, match=word) as error:
        read(files, name)
    assert "\n" not in str(error.value) and str(files) in str(error.value)
    assert not (files / "harm").exists()
