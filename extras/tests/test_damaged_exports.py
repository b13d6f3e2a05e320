"""Exports and meta.pkl that are damaged, hostile or of another kind: one line that names the file, and no code runs.

tests/test_checkpoint.py does the same to ckpt.pt.
"""

import json
import math
import pickle
import shutil

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from extra_helpers import STABLELM, TOKENIZER, bpe, write_gpt2
from extras.formats.checkpoint import load_model
from extras.formats.hf_write import write_folder
from extras.formats.onnx import OnnxGPT, write_onnx
from helpers import CHARS, Bomb, bytes_of, load, save_model, tiny

pytestmark = pytest.mark.slow  # they share exports, which take seconds


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with ckpt.pt, nano.pt and meta.pkl of nanoGPT, model.onnx and folder hf, of one model, and a GPT-2."""
    folder = tmp_path_factory.mktemp("whole")
    model = tiny(**STABLELM)
    save_model(folder, model)
    nano = load(folder / "ckpt.pt")
    torch.save({name: nano[name] for name in ("model", "model_args")}, folder / "nano.pt")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(CHARS))}))
    write_onnx(model, TOKENIZER, folder / "model.onnx")
    (folder / "hf").mkdir()
    write_folder(model, TOKENIZER, folder / "hf")
    write_gpt2(folder / "gpt2")
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
    """Other settings in a JSON file."""

    def damage(files):
        content = json.loads((files / name).read_text(encoding="utf-8"))
        change(content)
        (files / name).write_text(json.dumps(content), encoding="utf-8")

    return damage


def gpt2(**settings):
    return json_of("gpt2/config.json", lambda old: old.update(settings))


def without(name):
    return lambda files: (files / name).unlink()


def bad_header(files):
    """The headers at the end of a zip file say where in it is what."""
    content = (files / "ckpt.pt").read_bytes()
    (files / "ckpt.pt").write_bytes(content.replace(b"PK\x01\x02", b"PK\x01\x03", 1))


def hostile_weights(files):
    without("gpt2/model.safetensors")(files)
    (files / "gpt2" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(files / "harm"), protocol=2))


def tensor(name, value):
    """Another tensor in the folder hf."""

    def damage(files):
        content = load_file(files / "hf" / "model.safetensors")
        save_file(content | {name: value}, files / "hf" / "model.safetensors")

    return damage


def graph_of(change):
    """Another model.onnx."""

    def damage(files):
        proto = onnx.load(files / "model.onnx")
        change(proto)
        onnx.save(proto, files / "model.onnx")

    return damage


def metadata(**entries):
    """Other model_args in model.onnx."""

    def change(proto):
        (args,) = [each for each in proto.metadata_props if each.key == "model_args"]
        args.value = json.dumps(json.loads(args.value) | entries)

    return graph_of(change)


def zeros(proto):
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(onnx.numpy_helper.from_array(0 * onnx.numpy_helper.to_array(tensor), tensor.name))


def in_two_shards(change):
    """The weights of the folder hf in two shards. `change` gets the shards, {file: {name: tensor}}, and the index."""

    def damage(files):
        tensors = load_file(files / "hf" / "model.safetensors")
        (files / "hf" / "model.safetensors").unlink()
        names = sorted(tensors)
        shards = {
            f"model-0000{i + 1}-of-00002.safetensors": {name: tensors[name].clone() for name in names[i::2]}
            for i in range(2)
        }
        index = {name: file for file, shard in shards.items() for name in shard}
        change(shards, index)
        for file, shard in shards.items():
            save_file(shard, files / "hf" / file)
        content = json.dumps({"metadata": {}, "weight_map": index})
        (files / "hf" / "model.safetensors.index.json").write_text(content, encoding="utf-8")

    return damage


def one_in_both(shards, index):
    name, file = next(iter(index.items()))
    for shard in shards.values():
        shard[name] = shards[file][name] + 1


def strange_special_tokens(files):
    torch.save(load(files / "ckpt.pt") | {"special_tokens": [1]}, files / "ckpt.pt")


def moved(shards, index):
    first, second = shards
    index |= dict.fromkeys(shards[first], second)


DAMAGES = [
    # what is read, the damage, a word of the message
    ("ckpt.pt", bad_header, "is damaged, or not a checkpoint of a GPT"),
    ("ckpt.pt", strange_special_tokens, r"special_tokens=\[1\]: must be dict"),
    ("meta.pkl", bytes_of("meta.pkl", pickle.dumps({"itos": {1: "a"}})), "not a nanoGPT meta"),
    ("meta.pkl", bytes_of("meta.pkl", lambda harm: pickle.dumps({"itos": Bomb(harm)})), "plain values"),
    ("model.onnx", bytes_of("model.onnx", b"no graph"), "cannot be read"),
    ("model.onnx", graph_of(lambda proto: proto.ClearField("metadata_props")), "not written by export.py"),
    ("model.onnx", metadata(n_layer=10**9), "n_layer is 1000000000"),
    ("model.onnx", metadata(n_embd=64), "cannot be run|sizes that its metadata"),
    ("model.onnx", metadata(n_head=2, n_kv_head=2), "cannot be run|sizes that its metadata"),
    ("model.onnx", metadata(block_size=2**12), "cannot be run"),
    ("model.onnx", metadata(n_layer=1), "cannot be run: .*past_key_values.1.key"),
    ("model.onnx", graph_of(zeros), "every token gets the logit 0.0"),
    ("hf", without("hf/config.json"), "config.json"),
    ("hf", json_of("hf/config.json", lambda old: old.update(model_type="llama")), "llama"),
    ("hf", json_of("hf/config.json", lambda old: old["rope_parameters"].update(rope_theta=5e5)), "theta"),
    ("hf", json_of("hf/config.json", lambda old: old.pop("hidden_size")), "does not fit its config"),
    ("hf", json_of("hf/config.json", lambda old: old.update(num_hidden_layers=2.5)), "'float' object"),
    ("hf", json_of("hf/config.json", lambda old: old.update(max_position_embeddings=2**40)), "block_size="),
    ("hf", json_of("hf/config.json", lambda old: old.pop("tie_word_embeddings")), "lacks lm_head.weight"),
    ("hf", json_of("hf/config.json", lambda old: old["rope_parameters"].update(type="linear")), "type is 'linear'"),
    ("hf", json_of("hf/config.json", lambda old: old.update(rope_theta=5e5)), "theta"),
    ("hf", json_of("hf/config.json", lambda old: old.update(partial_rotary_factor=0.25)), "partial_rotary_factor"),
    ("hf", bytes_of("hf/model.safetensors", b"<html>"), "model.safetensors is damaged .* download it again"),
    ("hf", json_of("hf/tokenizer.json", lambda old: old["model"]["vocab"].update(the=99)), "do not belong together"),
    ("hf", tensor("extra", torch.ones(2)), "extra, which"),
    ("hf", tensor("model.norm.weight", torch.ones(32, dtype=torch.int8)), r"norm.weight does not .* in torch.int8"),
    ("hf", in_two_shards(one_in_both), "index.json and the shards that it names disagree about"),
    ("hf", in_two_shards(moved), "index.json and the shards that it names disagree about"),
    ("hf", in_two_shards(lambda shards, index: index.popitem()), "index.json and the shards that it names disagree"),
    ("hf", in_two_shards(lambda shards, index: index.update(more=next(iter(shards)))), "disagree about more"),
    ("hf", in_two_shards(lambda shards, index: shards.popitem()), "00002-of-00002.safetensors"),
    ("hf", tensor("model.norm.weight", torch.full((32,), math.nan)), "NaN"),
    ("gpt2", gpt2(scale_attn_by_inverse_layer_idx=True), "inverse_layer_idx is True.*only transformers can run it"),
    ("gpt2", gpt2(activation_function="relu"), "relu.*only transformers"),
    ("gpt2", gpt2(n_layer=3), r"'transformer\.h\.2"),
    ("gpt2", gpt2(hidden_size=64), "n_embd is 32, but its hidden_size, the same, is 64"),
    ("gpt2", bytes_of("gpt2/tokenizer.json", bpe(600).encode()), "512 tokens.*600 tokens.*do not belong together"),
    ("gpt2", without("gpt2/tokenizer.json"), "there is no tokenizer at .*tokenizer.json"),
    ("gpt2", bytes_of("gpt2/tokenizer.json", b"\xff\xfe"), "not a tokenizer.json"),
    ("gpt2", without("gpt2/model.safetensors"), "model.safetensors"),
    ("gpt2", hostile_weights, "pytorch_model.bin is damaged, or contains more than tensors"),
    ("gpt2", bytes_of("gpt2/model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
]


@pytest.mark.parametrize(["name", "damage", "word"], DAMAGES)
def test_damage_is_a_one_line_value_error_that_names_the_file_and_runs_no_code(name, damage, word, files):
    read(files, name)
    damage(files)
    with pytest.raises(ValueError, match=word) as error:
        read(files, name)
    assert "\n" not in str(error.value) and str(files) in str(error.value)
    assert not (files / "harm").exists()


def test_a_shard_of_an_older_model_is_not_read(files):
    """As transformers, which reads what the index names."""
    whole = load_file(files / "hf" / "model.safetensors")
    in_two_shards(lambda shards, index: None)(files)
    save_file({name: 1 + p for name, p in whole.items()}, files / "hf" / "model-00001-of-00003.safetensors")
    ours, _ = load_model(files / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(files / "hf").eval()
    ids = torch.arange(16)[None] % len(CHARS)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, atol=1e-4, rtol=0)
