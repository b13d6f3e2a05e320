"""CONTRIBUTING.md: its worked change is complete. And make, with a Python that is too old or missing."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT, SMALL, load, ok, run, unix

CHECK = """
import torch
from extras.decode.cuda_graph import GraphedGPT
from extras.decode.engine import Decoder
from model import GPT, GPTConfig, Sampling

for more in (dict(bias=True), dict(pos_emb="rope", activation="swiglu", qk_norm=True, bias=False)):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=50, n_layer=2, n_head=4, n_embd=32, norm="rms", **more)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=0.3)
    assert isinstance(model.transformer["ln_f"], torch.nn.RMSNorm)
    idx = torch.tensor([[1, 2, 3]])
    expected = model.generate(idx, 61, seed=1, kv_cache=False)
    assert torch.equal(Decoder(model, compile=True).generate(idx, 61, seed=1), expected)
    assert torch.equal(torch.cat([idx, *GraphedGPT(model, 1, 64, Sampling(seed=1)).stream(idx, 61)], dim=1), expected)
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


def kit_with(number, folder):
    """A copy of the project with a diff of CONTRIBUTING.md, and a function that runs Python in it."""
    skip = shutil.ignore_patterns(".*", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    kit = shutil.copytree(ROOT, folder / "kit", ignore=skip)
    diffs = re.findall(r"^```diff\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(diffs) == 2
    apply(diffs[number], kit)
    return lambda *args: ok(run(*args, cwd=kit))


@pytest.mark.slow
def test_rmsnorm_trains_and_gives_the_same_text_in_c_and_in_a_cuda_graph(tmp_path):
    python = kit_with(0, tmp_path)
    python("-c", CHECK)
    python("data/prepare.py", "--input", "data/sample.txt")
    python("train.py", "--norm", "rms", "--max_iters", "5", "--device", "cpu")
    verified = python("sample.py", "--device", "cpu", "--max_new_tokens", "40", "--compile", "--verify")
    assert "verify: OK" in verified.stderr and "decoding without --compile" not in verified.stderr


@pytest.mark.slow
def test_the_loss_of_your_own_trains_and_resumes(data_dir, tmp_path):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python loss\n(.*?)^```", page, re.M | re.S)
    for name in ("model.py", "train.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    flags = [*SMALL, "--data_dir", data_dir, "--loss", "mine", "--max_iters", 2]
    ok(run("train.py", *flags, cwd=tmp_path))
    assert load(tmp_path / "out" / "ckpt.pt")["label_smoothing"] == 0.1
    ok(run("train.py", "--init_from", "resume", "--loss", "mine", "--max_iters", 4, cwd=tmp_path))


def sample_and_verify(python, *flags):
    """Run sample.py in the copy. The text is the same without the cache."""
    command = ["sample.py", "--ckpt", "assets/shakespeare.pt", "--device", "cpu", "--prompt", "O Romeo, "]
    verified = python(*command, "--max_new_tokens", "40", "--verify", *flags)
    assert "verify: OK" in verified.stderr
    return verified


@pytest.mark.slow
def test_min_p_drops_unlikely_tokens_and_compile_does_without_step_c(tmp_path):
    python = kit_with(1, tmp_path)
    greedy = sample_and_verify(python, "--temperature", "0").stdout
    texts = [sample_and_verify(python, "--min_p", p).stdout for p in ("1", "0.5", "0.0001")]
    assert texts[0] == greedy and len({*texts}) == 3
    assert sample_and_verify(python, "--min_p", "0.5", "--draft", "ngram").stdout == texts[1]
    compiled = sample_and_verify(python, "--min_p", "0.5", "--compile")
    assert compiled.stdout == texts[1]
    assert "sample_token in model.py has changed" in compiled.stderr and "without --compile" in compiled.stderr


# -- make --------------------------------------------------------------------------------------------------------------

OLD = """#!/bin/sh
shift
exec {python} -c "import sys; sys.version_info = (3, 10, 12); exec(sys.argv[1])" "$@"
"""


@unix
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target", ["demo", "gpu", "elsewhere", "newest"])
def test_make_says_in_one_line_that_python_is_missing_or_too_old(target, tmp_path):
    for name in ("Makefile", "requirements.txt", "pyproject.toml", "tests/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    old = tmp_path / "python3.10"
    old.write_text(OLD.format(python=shlex.quote(sys.executable)), encoding="utf-8")
    old.chmod(0o755)
    for python, words in (("./python3.10", "is Python 3.10: make PYTHON="), ("./none", "there is no ./none")):
        alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # make test calls us
        how = dict(cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=60)
        result = subprocess.run(["make", target, f"PYTHON={python}"], **how)
        ours, makes_own = result.stderr.strip().splitlines()
        assert result.returncode and words in ours and "3.11 or newer" in ours and "Error" in makes_own
        assert not (tmp_path / ".venv").exists() and not result.stdout
