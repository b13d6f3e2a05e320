"""Files that are damaged, hostile or of another kind: one line that names the file, and no code runs."""

import json
import math
import pickle
import shutil

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import CHARS, STABLELM, Bomb, assert_one_line, load, sample, save_model, saved, tiny
from kvgpt.checkpoint import load_checkpoint, load_model
from kvgpt.engines.hf import HuggingFaceGPT
from kvgpt.engines.onnx import OnnxGPT
from kvgpt.export.hf import read_folder, write_folder
from kvgpt.export.onnx import write_onnx
from kvgpt.files import read_tree, write_tree

ITOS = pickle.dumps({"itos": dict(enumerate(CHARS))})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with ckpt.pt, nanoGPT's nano.pt and meta.pkl, and the folders onnx and hf, all of one model."""
    folder, model = tmp_path_factory.mktemp("whole"), tiny(**STABLELM)
    save_model(folder, model)
    nano = load(folder / "ckpt.pt")
    torch.save({name: nano[name] for name in ("model", "model_args")}, folder / "nano.pt")
    (folder / "meta.pkl").write_bytes(ITOS)
    for name in ("made onnx", "made hf"):
        (folder / name).mkdir()
    write_onnx(model, CHARS, folder / "made onnx" / "model.onnx")
    write_folder(model, CHARS, folder / "made hf")
    for name in ("onnx", "hf"):
        write_tree(folder / name, read_tree(folder / f"made {name}"))
    return folder


@pytest.fixture
def files(whole, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(whole, tmp_path / "files")


def read(folder, name):
    """Read the file or folder `name` as the scripts do."""
    if name == "meta.pkl":
        return load_model(folder / "nano.pt", folder / "meta.pkl")
    if name == "onnx":
        return OnnxGPT(folder / "onnx" / "model.onnx")
    if name == "hf":
        return read_folder(folder / "hf").build_model()
    ckpt = load_checkpoint(folder / name)
    ckpt.checked_ngrams()
    return ckpt.build_language_model()


def replaced(name, content):
    """The damage of other content: bytes, or a function of a path that code in the content would write to."""

    def damage(folder):
        (folder / name).write_bytes(content(folder / "harm") if callable(content) else content)

    return damage


def ckpt(**changes):
    """The damage of other entries in ckpt.pt."""

    def damage(folder):
        content = load(folder / "ckpt.pt")
        torch.save(content | {name: f(content[name]) for name, f in changes.items()}, folder / "ckpt.pt")

    return damage


def args(**changes):
    return ckpt(model_args=lambda args: args | changes)


def settings_of(name, change):
    """The damage of other settings in a JSON file of the folder hf, and no checksums."""

    def damage(folder):
        (folder / "hf" / "SHA256SUMS").unlink()
        content = json.loads((folder / "hf" / name).read_text(encoding="utf-8"))
        change(content)
        (folder / "hf" / name).write_text(json.dumps(content), encoding="utf-8")

    return damage


def config(**changes):
    return settings_of("config.json", lambda content: content.update(changes))


def tensors(change):
    """The damage of other tensors in the folder hf, and no checksums."""

    def damage(folder):
        (folder / "hf" / "SHA256SUMS").unlink()
        content = load_file(folder / "hf" / "model.safetensors")
        change(content)
        save_file(content, folder / "hf" / "model.safetensors")

    return damage


def metadata(change):
    """The damage of other metadata in the graph, and no checksums."""

    def damage(folder):
        (folder / "onnx" / "SHA256SUMS").unlink()
        proto = onnx.load(folder / "onnx" / "model.onnx")
        entries = change({entry.key: entry.value for entry in proto.metadata_props})
        del proto.metadata_props[:]
        for key, value in entries.items():
            proto.metadata_props.add(key=key, value=value)
        onnx.save(proto, folder / "onnx" / "model.onnx")

    return damage


def fill(number):
    return lambda weights: {**weights, "lm_head.weight": torch.full_like(weights["lm_head.weight"], number)}


DAMAGES = [
    # what is read, the damage, a word of the message
    ("ckpt.pt", replaced("ckpt.pt", b""), "damaged"),
    ("ckpt.pt", replaced("ckpt.pt", b"not a checkpoint at all"), "damaged"),
    ("ckpt.pt", replaced("ckpt.pt", b"PK\x03\x04" + bytes(100)), "damaged"),
    ("ckpt.pt", replaced("ckpt.pt", ITOS), "not loaded"),
    ("ckpt.pt", replaced("ckpt.pt", saved([1, 2])), "no checkpoint"),
    ("ckpt.pt", replaced("ckpt.pt", saved({"model": {}})), "model_args"),
    ("ckpt.pt", replaced("ckpt.pt", saved({"model": 3, "model_args": {}})), "no checkpoint"),
    ("ckpt.pt", replaced("ckpt.pt", lambda harm: saved({"model": Bomb(harm), "model_args": {}})), "not loaded"),
    ("ckpt.pt", replaced("ckpt.pt", lambda harm: pickle.dumps(Bomb(harm), protocol=2)), "not loaded"),
    ("ckpt.pt", args(n_layer=0), "n_layer=0"),
    ("ckpt.pt", args(n_layer=3), "Missing key"),
    ("ckpt.pt", args(n_leyer=2), "n_leyer"),
    ("ckpt.pt", args(n_embd=40), "size mismatch"),
    ("ckpt.pt", args(vocab_size=2**24 - 1, n_embd=2**23), "do not fit"),  # more memory than any machine has
    ("ckpt.pt", args(activation=torch.zeros(3)), "activation"),
    ("ckpt.pt", ckpt(model=lambda weights: {**weights, "lm_head.weight": 3}), "lm_head"),
    ("ckpt.pt", ckpt(model=fill(math.nan)), "NaN"),
    ("ckpt.pt", ckpt(model=fill(math.inf)), "NaN"),
    ("ckpt.pt", ckpt(chars=lambda chars: chars[:-1]), "characters"),
    ("ckpt.pt", ckpt(chars=lambda chars: chars[1] + chars[1:]), "characters"),
    ("ckpt.pt", ckpt(chars=lambda chars: list(chars)), "characters"),
    ("ckpt.pt", ckpt(ngrams=lambda _: {"codes": torch.ones(3)}), "n-grams"),
    ("meta.pkl", replaced("meta.pkl", b""), "meta"),
    ("meta.pkl", replaced("meta.pkl", b"\x80"), "meta"),
    ("meta.pkl", replaced("meta.pkl", lambda harm: pickle.dumps({"itos": Bomb(harm)})), "plain values"),
    ("meta.pkl", replaced("meta.pkl", pickle.dumps({"itos": {1: "a"}})), "meta"),
    ("meta.pkl", replaced("meta.pkl", pickle.dumps({"itos": {0: "a"}})), "characters"),
    ("onnx", replaced("onnx/model.onnx", b"no"), "has changed"),
    ("onnx", metadata(lambda entries: {}), "not written by export.py"),
    ("onnx", metadata(lambda entries: entries | {"chars": CHARS[:-1]}), "characters"),
    ("onnx", metadata(lambda entries: entries | {"model_args": "[]"}), "cannot be read"),
    ("onnx", metadata(lambda entries: entries | {"model_args": '{"n_layer": 0}'}), "n_layer=0"),
    ("hf", lambda folder: (folder / "hf" / "config.json").unlink(), "config.json"),
    ("hf", lambda folder: (folder / "hf" / "model.safetensors").unlink(), "model.safetensors"),
    ("hf", config(model_type="llama"), "llama"),
    ("hf", config(use_parallel_residual=True), "parallel"),
    ("hf", settings_of("config.json", lambda content: content["rope_parameters"].update(rope_theta=5e5)), "theta"),
    ("hf", settings_of("config.json", lambda content: content["rope_parameters"].update(rope_type="yarn")), "yarn"),
    ("hf", settings_of("config.json", lambda content: content.pop("hidden_size")), "hidden_size"),
    ("hf", config(num_hidden_layers=3), "layers.2"),
    ("hf", config(num_hidden_layers=1), "layers.1"),
    ("hf", config(qk_layernorm=True), "layernorm"),
    ("hf", config(hidden_size=48), "fit"),
    ("hf", settings_of("tokenizer.json", lambda content: content["model"]["vocab"].update(the=99)), "single char"),
    ("hf", settings_of("tokenizer.json", lambda content: content["model"]["vocab"].popitem()), "characters"),
    ("hf", tensors(lambda content: content.update(extra=torch.ones(2))), "extra, which"),
    ("hf", tensors(lambda content: content["model.norm.weight"].fill_(math.nan)), "NaN"),
]


@pytest.mark.parametrize(["name", "damage", "word"], DAMAGES)
def test_damage_is_a_one_line_value_error_that_names_the_file_and_runs_no_code(name, damage, word, files):
    read(files, name)
    damage(files)
    with pytest.raises(ValueError, match=word) as error:
        read(files, name)
    assert "\n" not in str(error.value)
    assert str(files) in str(error.value)
    assert not (files / "harm").exists()


def test_the_command_line_says_it_in_one_line(trained, files):
    replaced("ckpt.pt", lambda harm: saved({"model": Bomb(harm), "model_args": {}}))(files)
    assert_one_line(sample(trained, "--ckpt", files / "ckpt.pt"), files / "ckpt.pt", "not loaded")
    assert_one_line(sample(trained, "--ckpt", files), files, "folder")
    assert not (files / "harm").exists()


@pytest.mark.parametrize("name", ["hf/config.json", "hf/model.safetensors", "hf/tokenizer.json", "onnx/model.onnx"])
def test_a_flipped_bit_in_an_export_is_refused(name, files):
    raw = bytearray((files / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (files / name).write_bytes(raw)
    folder, _, file = name.partition("/")
    readers = [lambda: read(files, folder)] + [lambda: HuggingFaceGPT(files / "hf")] * (folder == "hf")
    for reader in readers:
        with pytest.raises(ValueError, match=f"{file} has changed") as error:
            reader()
        assert str(files / folder) in str(error.value) and "\n" not in str(error.value)


def test_files_without_checksums_pass(files):
    """Those of transformers, and a graph that was copied elsewhere or that an earlier version has written."""
    for name in ("onnx", "hf"):
        (files / name / "SHA256SUMS").unlink()
        read(files, name)
