"""The world of a call: a folder with a text, a run, its exports and nanoGPT's files. And damage in it."""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path

import torch

from helpers import ROOT
from model import GPT, GPTConfig

SHAPE = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --batch_size 2 --device cpu --data_dir data".split()
STEPS = 12
NANOGPT = "nanogpt.pt"
FILES = ["data/meta.json", "data/train.bin", "data/val.bin", "out/ckpt.pt", "out/last.pt", "out/log.csv"]
FILES += ["out/hf/config.json", "out/hf/model.safetensors", "out/hf/tokenizer.json", "out/hf/SHA256SUMS"]
FILES += ["out/hf/tokenizer_config.json", "out/onnx/model.onnx", NANOGPT, "meta.pkl"]
# files that a call makes
MADE = ["samples.txt", ".lock", ".last.pt.tmp", ".ckpt.pt.tmp", ".log.csv.tmp", ".previous", "loss.png", ".onnx.lock"]
MADE = [f"out/{name}" for name in (*MADE, ".hf.lock", "onnx/.model.onnx.tmp")] + ["data/.lock", "data/.train.bin.tmp"]


class World:
    """A folder with a text, a run, its exports, and nanoGPT's files. Calls are made in copies of it."""

    def __init__(self, forks, folder):
        self.forks, self.folder, self.known = forks, Path(folder) / "world", {}
        self.folder.mkdir()
        shutil.copy(ROOT / "data" / "sample.txt", self.folder / "text.txt")
        text = (self.folder / "text.txt").read_text(encoding="utf-8")
        (self.folder / "text").write_text(text[:3000][::-1], encoding="utf-8")
        self.make("data/prepare.py", "--input", "text.txt", "--data_dir", "data")
        self.make("train.py", *SHAPE, "--max_iters", STEPS, "--log_interval", 3)
        make_lively(self.folder / "out" / "ckpt.pt")
        for name in ("onnx", "hf"):
            self.make("export.py", "--format", name)
        ckpt = torch.load(self.folder / "out" / "ckpt.pt", weights_only=True)
        write_nanogpt_files(self.folder, ckpt["chars"])

    def make(self, script, *args):
        code, out, err = self.forks.run(script, args, self.folder)
        assert code == 0, (script, args, out, err)

    @contextlib.contextmanager
    def copy(self):
        """A copy, always at the same place, because some files name their folder. A second one takes the place over."""
        folder, aside = self.folder.with_name("call"), self.folder.with_name("aside")
        nested = folder.exists()
        if nested:
            folder.rename(aside)
        try:
            yield Path(shutil.copytree(self.folder, folder, symlinks=True))
        finally:
            shutil.rmtree(folder)
            if nested:
                aside.rename(folder)

    def result(self, script, args):
        """Return (exit code, stdout, files afterwards) of a call in an undamaged world."""
        key = (script, *args)
        if key not in self.known:
            with self.copy() as folder:
                code, out, _ = self.forks.run(script, args, folder)
                self.known[key] = code, out, files_of(folder)
        return self.known[key]


def make_lively(file):
    """Give a checkpoint weights so large that each key and value changes the text. A few steps leave them small."""
    content, noise = torch.load(file, weights_only=True), torch.Generator().manual_seed(0)
    for name, weight in content["model"].items():
        if weight.dim() == 2:
            weight.copy_(torch.randn(weight.shape, generator=noise) * (0.4 if ".h." in name else 1))
    torch.save(content, file)


def write_nanogpt_files(folder, chars):
    """Write a checkpoint and a meta.pkl as nanoGPT does."""
    torch.manual_seed(1)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=len(chars), bias=True)
    args = {name: getattr(config, name) for name in "n_layer n_head n_embd block_size vocab_size bias dropout".split()}
    torch.save({"model": GPT(config).state_dict(), "model_args": args}, folder / NANOGPT)
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def files_of(folder):
    """Return {name: bytes} of the regular files, without locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock" and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# -- damage ------------------------------------------------------------------------------------------------------------

OBSTACLES = ["a folder", "a pipe", "a loop", "a device"]
FAULTS = ["a bit", "a byte", "cut", "longer", "zeros", "swapped", "empty", "gone", "another file", "a value", "a value"]
FAULTS += OBSTACLES


def damage(path, kind, place):
    """Damage a file, if it is there. An obstacle needs no file.

    kind   one of FAULTS
    place  a number that decides where and how
    """
    if path.is_symlink() or (not path.is_file() and (path.exists() or kind not in OBSTACLES)):  # damaged, or gone
        return
    if kind in ("gone", *OBSTACLES):
        path.unlink(missing_ok=True)
        replace_by(path, kind)
        return
    raw, rng = bytearray(path.read_bytes()), random.Random(place)
    at = place % max(1, len(raw))
    if kind == "a value":
        new = other_value(path, bytes(raw), rng)
    elif kind == "another file":
        new = rng.choice(siblings(path)).read_bytes()
    else:
        new = EDITS[kind](raw, at, rng)
    path.write_bytes(new)


EDITS = {
    "a bit": lambda raw, at, rng: raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :] if raw else raw,
    "a byte": lambda raw, at, rng: raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
    "cut": lambda raw, at, rng: raw[:at],
    "longer": lambda raw, at, rng: raw + rng.randbytes(rng.randrange(1, 100)),
    "zeros": lambda raw, at, rng: raw[:at] + bytes(len(raw[at : at + 64])) + raw[at + 64 :],
    "swapped": lambda raw, at, rng: raw[:at] + raw[at + 8 : at + 16] + raw[at : at + 8] + raw[at + 16 :],
    "empty": lambda raw, at, rng: b"",
}


def siblings(path):
    """Return the other files beside a file, or the file itself if there is none."""
    return sorted(each for each in path.parent.iterdir() if each.is_file() and each != path) or [path]


def replace_by(path, kind):
    """Put something that is no file in the place of a file."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a loop":
        path.symlink_to(path.name)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        assert kind == "gone", kind


VALUES = [None, True, -1, 0, 1, 2, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e30, float("nan"), float("inf"), "", "x", "é"]
VALUES += ["\ud800", [], {}, [1], {"a": 1}, "9" * 5000, "a\nb\x1b[2J"]
TENSORS = [torch.zeros(()), torch.zeros(1), torch.zeros(0), torch.full((3, 2), torch.nan), torch.tensor([2**40])]
TENSORS += [torch.zeros(1, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bool), torch.eye(2).to_sparse()]


def other_value(path, raw, rng):
    """Return the content of a JSON file or checkpoint with one value replaced, or a key removed or added."""
    if path.suffix == ".json":
        try:
            content = json.loads(raw)
        except ValueError:
            return raw
        edit(content, VALUES, rng)
        return json.dumps(content).encode()
    if path.suffix == ".pt" and zipfile.is_zipfile(io.BytesIO(raw)):
        try:
            content = torch.load(io.BytesIO(raw), weights_only=True)
        except Exception:  # damaged before
            return raw
        edit(content, VALUES + TENSORS, rng)
        torch.save(content, out := io.BytesIO())
        return out.getvalue()
    return raw


def edit(content, values, rng):
    """Change one entry of a nested dict or list in place."""
    while True:
        keys = list(content) if isinstance(content, dict) else range(len(content))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(content[key], (dict, list)) and content[key] and rng.random() < 0.85:
            content = content[key]
            continue
        if isinstance(content, dict) and rng.random() < 0.2:
            del content[key]
        else:
            content[key] = rng.choice(values)
        return
