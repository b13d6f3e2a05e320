"""The folder of export.py --format hf, read by transformers.js and by Optimum: the text is that of our own model.

transformers itself is in extras/tests/interop/test_hf.py. vLLM has been run by hand, see docs/interop.md.
"""

import json
import shutil
import subprocess

import pytest
import torch

from extra_helpers import GPT2, STABLELM
from helpers import CHARS, ROOT, SIZE, ok, run, save_model, tiny

pytestmark = pytest.mark.slow

HUB = ROOT / "extras" / "tests" / "hub"
CONTEXT = SIZE["block_size"]
PROMPTS = ["\nab\n\n", "a", "b 😀!é"]

needs_transformers_js = pytest.mark.skipif(
    not (shutil.which("node") and (HUB / "node_modules" / "@huggingface").is_dir()),
    reason="needs Node.js and make tests/hub/node_modules",
)
needs_optimum = pytest.mark.skipif(
    not (HUB / ".packages" / "optimum").is_dir(), reason="needs make extras/tests/hub/.packages"
)


@pytest.fixture(scope="module", params=[GPT2, dict(STABLELM, qk_norm=True, n_kv_head=2)], ids=["GPT-2", "StableLM"])
def exported(request, tmp_path_factory):
    """(model, its folder as export.py wrote it)"""
    out = tmp_path_factory.mktemp("out")
    model = tiny(**request.param)
    save_model(out, model)
    ok(run("-m", "extras.export", "--format", "hf", "--onnx", "--ckpt", out / "ckpt.pt", "--out_dir", out))
    return model, out / "hf"


def greedy(model, prompt, num_new):
    ids = torch.tensor([[CHARS.index(char) for char in prompt]])
    return "".join(CHARS[i] for i in model.generate(ids, num_new, kv_cache=False, temperature=0)[0].tolist())


def texts_of(model):
    """Return the texts of the prompts alone, and those of one batch: its longest text fills the context."""
    longest = max(map(len, PROMPTS))
    alone = [greedy(model, prompt, CONTEXT - len(prompt)) for prompt in PROMPTS]
    return alone, [greedy(model, prompt, CONTEXT - longest) for prompt in PROMPTS]


@needs_transformers_js
def test_transformers_js_generates_the_greedy_text(exported):
    """Names, masks and the tokenizer mean the same in JavaScript, and a browser finds every file."""
    model, folder = exported
    plan = json.dumps(dict(folder=str(folder), prompts=PROMPTS, context=CONTEXT))
    node = ["node", HUB / "generate.mjs", plan]
    seen = json.loads(ok(subprocess.run(node, capture_output=True, encoding="utf-8", timeout=120)).stdout)
    assert (seen["texts"], seen["batch"]) == texts_of(model)
    assert "onnx/model.onnx" in seen["browser"] and all((folder / name).is_file() for name in seen["browser"])


@needs_optimum
def test_optimum_and_transformers_4_generate_the_greedy_text(exported):
    model, folder = exported
    env = {"PYTHONPATH": str(HUB / ".packages")}
    seen = json.loads(ok(run(HUB / "generate.py", folder, *PROMPTS, env=env)).stdout)
    assert seen["version"].startswith("4.")
    for name in ("optimum", "transformers"):
        assert (seen[name], seen[f"{name}, batch"]) == texts_of(model), name
