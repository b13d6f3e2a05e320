"""The exported page in a real browser, served by `python -m http.server`: the texts are PyTorch's, and mistakes are met
with a sentence. What was done and seen is in web.mjs; what should have been seen is decided here."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from matplotlib.image import imread

from helpers import ROOT, lively, ok, run, save_model
from kvgpt.decoding.sampling import Sampling
from kvgpt.decoding.verify import verify
from model import GPTConfig

pytestmark = pytest.mark.slow

WIDE = "\U0001d54f"  # one character, two units of a JavaScript string
CHARS = "\n !,.:?ABCDEFGHabcdefghijklmnopqrstuvwxyzé" + WIDE
CONTEXT = 64
CONFIG = GPTConfig(
    block_size=CONTEXT, vocab_size=len(CHARS), n_layer=2, n_head=4, n_kv_head=2, n_embd=32, bias=False,
    activation="swiglu", pos_emb="rope", qk_norm=True,
)  # fmt: skip
DEFAULT = dict(prompt="A cab, ", temperature=1.0, top_k=None, seed=1337, max_new_tokens=None, kv_cache=True)
JOBS = [
    DEFAULT,
    DEFAULT | dict(kv_cache=False),
    DEFAULT | dict(temperature=0),
    DEFAULT | dict(temperature=0, kv_cache=False),
    DEFAULT | dict(prompt=f"é{WIDE}\n", temperature=0.7, top_k=5, seed=2**64 - 1),
    DEFAULT | dict(prompt=f"é{WIDE}\n", temperature=1.3, top_k=9, seed=2**63 + 2**31 + 5, kv_cache=False),
    DEFAULT | dict(temperature=2.5, top_k=1000, seed=0, max_new_tokens=12),
    DEFAULT | dict(top_k=1, max_new_tokens=1),
    DEFAULT | dict(prompt="a" * (CONTEXT - 1), kv_cache=False),
    DEFAULT | dict(prompt=""),
    DEFAULT | dict(max_new_tokens=1000),
    DEFAULT | dict(temperature=0.9, seed=2**32, press="compare"),
]
MISTAKES = {  # what is typed: the field that is to blame, and what the message says
    "an unknown character": (dict(prompt="a#b€#"), "prompt", ['"#", "€"', json.dumps(CHARS, ensure_ascii=False)]),
    "a full context": (dict(prompt="a" * CONTEXT), "prompt", [f"{CONTEXT} characters", f"at most {CONTEXT - 1}"]),
    "a negative temperature": (dict(temperature="-1"), "temperature", ["Temperature", "“-1”"]),
    "no temperature": (dict(temperature=""), "temperature", ["Temperature", "“”"]),
    "a huge temperature": (dict(temperature="1e30"), "temperature", ["“1e30”"]),
    "a word": (dict(temperature="warm"), "temperature", ["“warm”"]),
    "top-k of none": (dict(top_k="0"), "top_k", ["Top-k", "“0”"]),
    "half a character": (dict(max_new_tokens="1.5"), "max_new_tokens", ["New characters", "“1.5”"]),
    "a seed too large": (dict(seed=str(2**64)), "seed", ["Seed", f"“{2**64}”", "2⁶⁴"]),
    "a negative seed": (dict(seed="-7"), "seed", ["“-7”"]),
}
BROKEN = {  # what is missing, or whose bytes are lost: what the message says
    "model.json": ["model.json did not load", "404"],
    "model.onnx": ["model.onnx did not load", "404"],
    "ort/ort.wasm.min.mjs": ["ort.wasm.min.mjs"],
    "ort/ort-wasm-simd-threaded.mjs": ["The model did not load"],
    "ort/ort-wasm-simd-threaded.wasm": ["The model did not load", "wasm"],
}
DAMAGED = {"model.json": ["model.json did not load"], "model.onnx": ["The model did not load"]}
KEYS = dict(prompt="Bad egg", seed="42", max_new_tokens="9")


@pytest.fixture(scope="module")
def model():
    return lively(CONFIG, seed=3)


@pytest.fixture(scope="module")
def seen(model, tmp_path_factory):
    """The report of web.mjs on the exported page, and on copies of it with something wrong."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not browser:
        pytest.skip("no Chromium: install it, or name one with CHROMIUM=/path/to/chromium")
    if not shutil.which("node"):
        pytest.skip("no node: install Node.js 20 or newer")
    if not (ROOT / "web" / "node_modules" / "playwright-core").is_dir():
        pytest.skip("no web/node_modules: run npm ci in web")

    out = tmp_path_factory.mktemp("out")
    save_model(out, model, CHARS)
    ok(run("export.py", "--format", "web", "--out_dir", out))
    broken = {}
    for i, file in enumerate([*BROKEN, *DAMAGED]):
        copy = shutil.copytree(out / "web", out / f"broken{i}", copy_function=os.link)
        (copy / file).unlink()
        if i >= len(BROKEN):
            (copy / file).write_bytes((out / "web" / file).read_bytes()[:99])
        broken[f"{'no' if i < len(BROKEN) else 'damaged'} {file}"] = copy.name

    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", out]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            port = re.search(r"port (\d+)", server.stdout.readline())[1]
            site = f"http://127.0.0.1:{port}"
            plan = dict(
                chromium=browser,
                site=f"{site}/web/",
                jobs=[as_typed(job) for job in JOBS],
                mistakes=[as_typed(values) for values, *_ in MISTAKES.values()],
                keys=KEYS,
                broken={name: f"{site}/{folder}/" for name, folder in broken.items()},
                picture=str(out / "chart.png"),
            )
            plan["broken"]["file"] = (out / "web" / "index.html").as_uri()
            node = ["node", ROOT / "tests" / "web.mjs", json.dumps(plan)]
            result = subprocess.run(node, capture_output=True, encoding="utf-8", timeout=300)
        finally:
            server.terminate()
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout) | {"site": site, "picture": imread(out / "chart.png")}


def as_typed(values):
    """Numbers as text: JSON's would lose the digits of a seed in JavaScript."""
    return {name: str(value) if type(value) in (int, float) else value for name, value in values.items()}


def assert_text(model, text, prompt, steps, kv_cache, **sampling):
    """`text` is the prompt and what PyTorch, decoding the other way, continues it with."""
    prompt = torch.tensor([CHARS.index(char) for char in prompt or "\n"])
    ours = [CHARS.index(char) for char in text]
    assert ours[: len(prompt)] == prompt.tolist()
    same, lines = verify(model, [prompt], [ours], steps, not kv_cache, Sampling(**sampling), range(2**16))
    assert same, (text, lines)


@pytest.mark.parametrize("i", range(len(JOBS)))
def test_the_text_is_the_one_of_pytorch(seen, model, i):
    job = {name: value for name, value in JOBS[i].items() if name != "press"}
    prompt, steps, kv_cache = (job.pop(name) for name in ("prompt", "max_new_tokens", "kv_cache"))
    assert seen["jobs"][i]["message"] == ""
    assert_text(model, seen["jobs"][i]["text"], prompt, steps or CONTEXT, kv_cache, **job)


def test_the_texts_of_these_tests_differ(seen):
    """Else the last one would be evidence of little: seed, temperature and top-k all have a say."""
    texts = [seen["jobs"][i]["text"] for i in (0, 2, 4, 5, 11)]
    assert len(set(texts)) == len(texts)
    assert all(len(set(text)) > 8 for text in texts)


def test_equal_texts_are_said_to_be_equal(seen):
    for i in (1, 3, 11):
        assert f"the same, all {CONTEXT - len(DEFAULT['prompt'])} characters" in seen["jobs"][i]["status"]
    assert "same" not in seen["jobs"][0]["status"]


def test_an_empty_prompt_and_a_length_past_the_context_are_said(seen):
    assert 'starting from "\\n"' in seen["jobs"][9]["status"]
    assert f"1000 new characters reach past the context of {CONTEXT}" in seen["jobs"][10]["status"]


def test_the_chart_keeps_both_curves(seen):
    """Points, each the mean of 16 steps that are no prefill, of the newest run with each setting."""
    new = CONTEXT - len(DEFAULT["prompt"])
    assert seen["before"]["points"] == [0, 0]
    assert seen["jobs"][0]["points"] == [0, new - 16]
    assert seen["jobs"][1]["points"] == [new - 16, new - 16]
    assert seen["jobs"][6]["points"] == [CONTEXT - 3 - 16, 1]  # 12 steps
    assert seen["jobs"][11]["points"] == [new - 16, new - 16]
    for setting in ("off", "on"):
        words = rf"KV cache {setting}: from [\d.]+ to [\d.]+, positions {CONTEXT - new} to {CONTEXT - 1}\."
        assert re.search(words, seen["jobs"][11]["chart"])
    for colour in rgb(seen["looks"]["light"]["lines"].values()):
        distance = (seen["picture"][..., :3] - torch.tensor(colour).numpy() / 255).__abs__().max(-1)
        assert (distance < 0.02).sum() > 100  # pixels of a line some hundreds long


def test_with_the_cache_each_step_feeds_one_character_and_without_it_the_whole_text(seen):
    T = len(DEFAULT["prompt"])
    cached = [[T, 0], *([1, held] for held in range(T, CONTEXT - 1))]
    whole = [[length, 0] for length in range(T, CONTEXT)]
    assert seen["jobs"][0]["fed"] == cached
    assert seen["jobs"][1]["fed"] == whole
    assert seen["jobs"][11]["fed"] == whole + cached  # "Run both"


def test_the_cache_is_as_large_as_the_formula_says(seen):
    formula = " \xd7 ".join(["2", "2 layers", "2 heads", "8", f"{CONTEXT - 1} positions", "4 bytes"])
    assert f"{formula} = {2 * 2 * 2 * 8 * (CONTEXT - 1) * 4:,} bytes" in seen["jobs"][0]["cache"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_nothing_is_generated(seen, name):
    _, field, words = MISTAKES[name]
    what = seen["mistakes"][list(MISTAKES).index(name)]
    assert all(word in what["message"] for word in words), what["message"]
    assert what["invalid"] == [field] and what["focus"] == field
    assert what["text"] == seen["jobs"][-1]["text"]


def test_stop_stops(seen, model):
    text = seen["stopped"]["text"]
    new = len(text) - len(DEFAULT["prompt"])
    assert 1 <= new < CONTEXT - len(DEFAULT["prompt"])
    assert "Stopped." in seen["stopped"]["status"] and seen["stopped"]["message"] == ""
    assert_text(model, text, DEFAULT["prompt"], new, True, seed=1337)


def test_the_keyboard_is_enough(seen, model):
    order = "prompt temperature top_k seed max_new_tokens kv_cache compare generate".split()
    assert [tab["field"] for tab in seen["tabs"]] == order
    assert all(tab["label"] and tab["ring"] == "solid" for tab in seen["tabs"]), seen["tabs"]
    for what in seen["keyboard"]:
        assert what["message"] == "" and what["points"] == [1, 0]
        assert_text(model, what["text"], KEYS["prompt"], int(KEYS["max_new_tokens"]), False, seed=int(KEYS["seed"]))


def rgb(colours):
    return [[int(n) for n in re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour).groups()] for colour in colours]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (n / 255 for n in colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def test_it_fits_a_phone_and_is_readable_in_the_dark(seen):
    """Nothing to scroll sideways at 360 pixels, and WCAG's contrast of 4.5 for every colour of text."""
    for scheme, look in seen["looks"].items():
        assert look["width"] == 360
        (background,) = map(luminance, rgb([look["background"]]))
        assert (background < 0.05) == (scheme == "dark")
        for ink in map(luminance, rgb([*look["inks"].values(), *look["lines"].values()])):
            assert (max(ink, background) + 0.05) / (min(ink, background) + 0.05) >= 4.5, look


def test_nothing_is_asked_of_anybody_else_and_nobody_complains(seen):
    strangers = [url for url in seen["requests"] if not url.startswith((f"{seen['site']}/", "file://", "data:"))]
    assert strangers == [] and len(seen["requests"]) > 10
    assert seen["complaints"] == []


@pytest.mark.parametrize("name", [*(f"no {file}" for file in BROKEN), *(f"damaged {file}" for file in DAMAGED), "file"])
def test_what_does_not_load_is_named_with_the_way_out(seen, name):
    words = {f"no {file}": words for file, words in BROKEN.items()}
    words |= {f"damaged {file}": words for file, words in DAMAGED.items()} | {"file": ["http://localhost:8000"]}
    what = seen["broken"][name]
    for word in [*words[name], "python -m http.server"]:
        assert word in what["message"], what
    assert what["disabled"] == 2 and what["text"] == ""
    assert not [line for line in what["complaints"] if "ncaught" in line], what["complaints"]
