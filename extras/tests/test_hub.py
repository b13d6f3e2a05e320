"""What export.py writes, in the libraries that docs/interop.md names: the text is that of our own model.

vLLM has been run by hand, see there.
"""

import json
import shutil
import subprocess

import pytest
import torch

from extra_helpers import GPT2, STABLELM
from extras.formats.checkpoint import load_model
from helpers import CHARS, ROOT, SIZE, ok, run, save_model, tiny

pytestmark = pytest.mark.slow

HUB = ROOT / "extras" / "tests" / "hub"
PRETRAINED = ROOT / "assets" / "shakespeare.pt"
CONTEXT = SIZE["block_size"]
PROMPTS = ["\nab\n\n", "a", "b 😀!é"]

needs_transformers_js = pytest.mark.skipif(
    not (shutil.which("node") and (HUB / "node_modules" / "@huggingface").is_dir()),
    reason="needs Node.js and make extras/tests/hub/node_modules",
)
needs_optimum = pytest.mark.skipif(
    not (HUB / ".packages" / "optimum").is_dir(), reason="needs make extras/tests/hub/.packages"
)
needs_runtimes = pytest.mark.skipif(
    not (HUB / "runtimes" / ".packages" / "openvino").is_dir(), reason="needs make extras/tests/hub/runtimes/.packages"
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


# -- the pretrained model, and one of GPT-2's layout -------------------------------------------------------------------


@pytest.fixture(scope="module", params=["GPT-2", "pretrained"])
def published(request, tmp_path_factory):
    """(model, tokenizer, prompts, the folder with hf and onnx)"""
    out = tmp_path_factory.mktemp("published")
    file = PRETRAINED
    if request.param == "GPT-2":
        file = out / "ckpt.pt"
        save_model(out, tiny(**GPT2, bias=True, activation="gelu_tanh"))
    for flags in (["--format", "hf", "--onnx"], ["--format", "onnx"]):
        ok(run("-m", "extras.export", *flags, "--ckpt", file, "--out_dir", out, timeout=600))
    model, tokenizer = load_model(file)
    return model, tokenizer, PROMPTS if request.param == "GPT-2" else ["O Romeo, ", "\nab\n\n", "a"], out


def ids_of(published, num_new=None):
    """Return the prompts as ids, and the ids with which our model continues each: num_new, or up to the context."""
    model, tokenizer, prompts, _ = published
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    lengths = [num_new or model.config.block_size - len(prompt) for prompt in ids]
    pairs = zip(ids, lengths, strict=True)
    return ids, [model.generate(torch.tensor([p]), n, temperature=0)[0, len(p) :].tolist() for p, n in pairs]


def run_runtime(name, folder, ids, context):
    env = {"PYTHONPATH": str(HUB / "runtimes" / ".packages"), "HF_HUB_OFFLINE": "1"}
    return run(HUB / "runtimes.py", name, folder, json.dumps(ids), context, env=env, timeout=600)


@needs_runtimes
def test_openvino_generates_the_greedy_text(published):
    ids, expected = ids_of(published)
    result = run_runtime("openvino", published[3] / "onnx", ids, published[0].config.block_size)
    assert json.loads(ok(result).stdout) == expected


@needs_runtimes
def test_onnxruntime_genai_generates_the_greedy_text(published):
    """Alone and in a batch, up to the token of genai_config.json at which it stops, which it does not return."""
    model, _, _, out = published
    ids, expected = ids_of(published)
    settings = json.loads((out / "onnx" / "genai_config.json").read_text(encoding="utf-8"))["model"]
    seen = json.loads(ok(run_runtime("genai", out / "onnx", ids, model.config.block_size)).stdout)
    (eos,) = settings["eos_token_id"]
    alone = [new[: new.index(eos)] if eos in new else new for new in expected]
    assert seen[: len(ids)] == alone and max(map(len, alone)) > 5
    longest = max(map(len, ids))
    for new, ours in zip(seen[len(ids) :], expected, strict=True):
        new = new[: new.index(eos)] if eos in new else new
        assert new == ours[: len(new)] and len(new) >= min(5, model.config.block_size - longest)


@needs_runtimes
def test_ctranslate2_generates_the_greedy_text(published):
    model, _, _, out = published
    ids, expected = ids_of(published)
    result = run_runtime("ctranslate2", out / "hf", ids, model.config.block_size)
    if model.config.pos_emb == "rope":  # it has no converter for the class
        assert "No conversion is registered for the model configuration StableLmConfig" in result.stderr
    else:
        assert json.loads(ok(result).stdout) == expected
