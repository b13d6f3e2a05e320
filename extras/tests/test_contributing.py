"""CONTRIBUTING.md: its worked change is complete."""

import re
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT, ok

CHECK = """
import torch
from extras.decoding.decoder import Decoder
from model import GPT, GPTConfig

for more in (dict(bias=True), dict(pos_emb="rope", activation="swiglu", qk_norm=True, bias=False)):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=50, n_layer=2, n_head=4, n_embd=32, norm="rms", **more)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=0.3)
    assert isinstance(model.transformer["ln_f"], torch.nn.RMSNorm)
    idx = torch.tensor([[1, 2, 3]])
    expected = model.generate(idx, 61, seed=1, kv_cache=False)
    assert torch.equal(Decoder(model, compile=True).generate(idx, 61, seed=1), expected)
"""


def apply(diff, folder):
    """Make the change of a diff whose hunks have no line numbers: each old text has to occur once in its file."""
    for name, hunks in re.findall(r"^--- (.*)\n((?:(?!--- ).*\n)*)", diff, flags=re.MULTILINE):
        file = folder / name
        text = file.read_text(encoding="utf-8")
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines()
            old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -")
            new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +")
            assert text.count(old) == 1, f"{name} has changed: update or replace the diff in CONTRIBUTING.md, at\n{old}"
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_the_worked_change_trains_and_gives_the_same_text_in_c(tmp_path):
    skip = shutil.ignore_patterns(".*", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    folder = shutil.copytree(ROOT, tmp_path / "kit", ignore=skip)
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
    apply(diff, folder)

    def python(*args):
        done = subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, encoding="utf-8")
        return ok(done)

    python("-c", CHECK)
    python("data/prepare.py", "--input", "data/sample.txt")
    python("train.py", "--norm", "rms", "--max_iters", "5", "--device", "cpu")
    verified = python("sample.py", "--device", "cpu", "--max_new_tokens", "40", "--compile", "--verify")
    assert "verify: OK" in verified.stderr and "decoding without --compile" not in verified.stderr
