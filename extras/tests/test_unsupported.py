"""What people pass as a checkpoint although it is none: one line says what it is and what to do."""

import gzip
import zipfile

import pytest
import torch
from safetensors.torch import save

from extra_helpers import write_gpt2
from extras.formats.checkpoint import load_checkpoint, load_model
from helpers import assert_one_line, here, save_model, tiny

LORA = save({"base_model.model.transformer.h.0.attn.c_attn.lora_A.weight": torch.zeros(8, 32)})
GGUF = b"GGUF\x03\x00\x00\x00" + bytes(99)
FILES = {
    "adapter/adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter/adapter_model.safetensors": LORA,
    "merged/adapter_config.json": b'{"peft_type": "LORA"}',  # and the base model's config.json
    "merged/adapter_model.safetensors": LORA,
    "lora.safetensors": LORA,
    "loras/checkpoint-10/adapter_config.json": b"{}",
    "text/names.txt": b"Ada\nBo\n",
    "text/train.bin": bytes(99),
    "text/meta.json": b"{}",
    "m.gguf": GGUF,
    "gguf/m.Q8_0.gguf": GGUF,
    "page.pt": b"<!DOCTYPE html><html>Sign in</html>",
    "lfs.pt": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n",
    "empty.pt": b"",
    "model.onnx": b"\x08\x0a",
    "model.h5": b"\x89HDF\r\n\x1a\n",
    "ckpt.pt.gz": gzip.compress(b"123"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of files and folders from elsewhere."""
    files = tmp_path_factory.mktemp("files")
    write_gpt2(files / "hf")
    config, weights = ((files / "hf" / name).read_bytes() for name in ("config.json", "model.safetensors"))
    base = {f"{name}/config.json": config for name in ("merged", "cache/snapshots/abc", "trainer/checkpoint-500")}
    for name, content in (FILES | base | {"weights/model.safetensors": weights}).items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_bytes(content)
    torch.save({"transformer.wte.weight": torch.zeros(2, 3)}, files / "hf" / "pytorch_model.bin")
    (files / "none").mkdir()
    (files / "run").mkdir()
    save_model(files / "run", tiny())
    with zipfile.ZipFile(files / "run.zip", "w") as file:
        file.write(files / "run" / "ckpt.pt", "out/ckpt.pt")
    return files


FOREIGN = [
    ("adapter", "is a LoRA adapter, which is not a model by itself: merge it into its base model"),
    ("merged", "is a LoRA adapter"),
    ("adapter/adapter_model.safetensors", "is a LoRA adapter"),
    ("adapter/adapter_config.json", "is a LoRA adapter"),
    ("lora.safetensors", "is a LoRA adapter"),
    ("loras", "is a LoRA adapter"),
    ("text/names.txt", "is text, not a model: python data/prepare.py --input {}/text/names.txt prepares it"),
    ("text", "is training data, not a model: pass --data_dir {}/text to train.py"),
    ("text/train.bin", "is training data, not a model: pass --data_dir {}/text to train.py"),
    ("text/meta.json", "is training data, not a model: pass --data_dir {}/text to train.py"),
    ("hf/model.safetensors", "is one file of a Hugging Face folder: pass the folder, {}/hf"),
    ("hf/config.json", "pass the folder, {}/hf"),
    ("hf/tokenizer.json", "pass the folder, {}/hf"),
    ("hf/pytorch_model.bin", "pass the folder, {}/hf"),
    ("weights", "is a Hugging Face folder without its config.json: download all of its files"),
    ("weights/model.safetensors", "pass the folder, with its config.json and tokenizer.json"),
    ("cache", "pass one of them, such as {}/cache/snapshots/abc"),
    ("trainer", "pass one of them, such as {}/trainer/checkpoint-500"),
    ("m.gguf", "is a GGUF file, for llama.cpp: pass the Hugging Face folder that it was made from"),
    ("gguf", "is a folder with m.Q8_0.gguf, a GGUF file"),
    ("page.pt", "is a web page and not the file itself: download it again"),
    ("lfs.pt", "is a Git LFS pointer and not the file itself: run git lfs pull"),
    ("empty.pt", "is empty: copy or download it again"),
    ("model.h5", "is a file of Keras or TensorFlow"),
    ("ckpt.pt.gz", "is a compressed file: unpack it first"),
    ("run.zip", "is a zip archive: unpack it first"),
]


@pytest.mark.parametrize("name, words", FOREIGN)
def test_it_is_one_line_from_sample_py_and_from_python(name, words, files):
    words = words.format(files)
    assert_one_line(here("--ckpt", files / name, script="sample.py"), words, code=1)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        load_model(files / name)
    assert words in str(error.value)


def test_the_folder_of_a_run_and_of_a_model_are_read(files):
    assert load_checkpoint(files / "run")["path"] == files / "run" / "ckpt.pt"
    with pytest.raises(ValueError, match=r"is an ONNX file, which only sample.py --engine onnx runs$"):
        load_checkpoint(files / "model.onnx")
    (files / "run" / "adapter_config.json").touch()
    assert load_checkpoint(files / "run" / "ckpt.pt")["chars"]
    assert load_checkpoint(files / "hf")["tokenizer"]
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none"):
        load_checkpoint(files / "none" / "ckpt.pt")
