"""The exported page in a real browser, served by `python -m http.server`. web.mjs does what a reader does, and reports
what it saw. The tests here compare the report with PyTorch.
"""

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
from kvgpt.decoding.ngrams import count_ngrams, ngram_table
from kvgpt.decoding.sampling import Sampling, gumbel_noise, sample_token
from kvgpt.decoding.verify import verify
from kvgpt.export.onnx import GPTWithPast
from model import GPTConfig

pytestmark = pytest.mark.slow

WIDE = "\U0001d54f"  # one character, two units of a JavaScript string
CHARS = "\n !,.:?ABCDEFGHabcdefghijklmnopqrstuvwxyzé" + WIDE
MARKUP = "\n <>&\"'/=bi"
CONTEXT = 64
CONFIG = GPTConfig(
    block_size=CONTEXT, vocab_size=len(CHARS), n_layer=2, n_head=4, n_kv_head=2, n_embd=32, bias=False,
    activation="swiglu", pos_emb="rope", qk_norm=True,
)  # fmt: skip
DEFAULT = dict(prompt="A cab, ", temperature=1.0, top_k=None, seed=1337, max_new_tokens=None)
JOBS = [
    DEFAULT,
    DEFAULT | dict(temperature=0),
    DEFAULT | dict(prompt=f"é{WIDE}\n", temperature=0.7, top_k=5, seed=2**64 - 1),
    DEFAULT | dict(prompt=f"é{WIDE}\n", temperature=1.3, top_k=9, seed=2**63 + 2**31 + 5),
    DEFAULT | dict(temperature=2.5, top_k=1000, seed=0, max_new_tokens=12),
    DEFAULT | dict(top_k=1, max_new_tokens=1),
    DEFAULT | dict(prompt="a" * (CONTEXT - 1)),
    DEFAULT | dict(prompt=""),
    DEFAULT | dict(max_new_tokens=1000),
    DEFAULT | dict(temperature=0.9, seed=2**32),
]
MISTYPED = {  # what is typed: the field that is to blame, and what the message says
    "an unknown character": (dict(prompt="a#b€#"), "prompt", ['"#", "€"', json.dumps(CHARS, ensure_ascii=False)]),
    "quotes that have no counterpart": (dict(prompt="“a”"), "prompt", ['"“", "”"']),
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
    "network.js": ["module of the page did not load"],
    "views/draw.js": ["module of the page did not load"],
    "model.json": ["model.json did not load", "404"],
    "model.onnx.gz": ["model.onnx.gz did not load", "404"],
    "ngrams.bin.gz": ["ngrams.bin.gz did not load", "404"],
    "ort/ort.wasm.min.mjs": ["ort.wasm.min.mjs"],
    "ort/ort-wasm-simd-threaded.mjs": ["The model did not load"],
    "ort/ort-wasm-simd-threaded.wasm.gz": ["ort-wasm-simd-threaded.wasm.gz did not load", "404"],
}
DAMAGED = {"model.json": ["model.json did not load"], "model.onnx.gz": ["model.onnx.gz did not load"]}
KEYS = dict(prompt="Bad egg", seed="42", max_new_tokens="9")
CACHE = dict(  # what is asked of the cache of a run of 30 characters
    request=DEFAULT | dict(prompt="A cab, dad? ", max_new_tokens=18, seed=3),
    column=7,
    written=CHARS.index("k"),
    position=9,
    changed=CHARS.index("z"),
    mistakes=["too far", "standing still", "fed twice", "another prompt", "all too far", "fed twice in place"],
)
TYPED = DEFAULT | dict(prompt="a…b\u00a0c", temperature="0,8", max_new_tokens=5)
PHONE = dict(width=320, height=640)
LOOKS = {
    "light": dict(colorScheme="light", viewport=PHONE),
    "dark": dict(colorScheme="dark", viewport=PHONE),
    "forced": dict(forcedColors="active", viewport=PHONE),
    "large text": dict(viewport=dict(width=640, height=900), fontSize="200%"),
    "wide": dict(viewport=dict(width=1280, height=800)),
}


@pytest.fixture(scope="module")
def model():
    return lively(CONFIG, seed=3)


@pytest.fixture(scope="module")
def ngrams():
    ids = torch.randint(len(CHARS), (4000,), generator=torch.Generator().manual_seed(0)) // 4
    return count_ngrams(ids.numpy(), len(CHARS), 2000)


@pytest.fixture(scope="module")
def seen(model, ngrams, tmp_path_factory):
    """The report of web.mjs on the exported page, and on copies of it with something wrong."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not browser:
        pytest.skip("no Chromium: install it, or name one with CHROMIUM=/path/to/chromium")
    if not shutil.which("node"):
        pytest.skip("no node: install Node.js 20 or newer")
    if not (ROOT / "web" / "node_modules" / "playwright-core").is_dir():
        pytest.skip("no web/node_modules: run npm ci in web")

    out = tmp_path_factory.mktemp("out")
    save_model(out, model, CHARS, ngrams)
    ok(run("export.py", "--format", "web", "--out_dir", out))
    (out / "markup").mkdir()
    save_model(out / "markup", lively(GPTConfig(**vars(CONFIG) | dict(vocab_size=len(MARKUP)))), MARKUP)
    ok(run("export.py", "--format", "web", "--out_dir", out / "markup"))
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
                markup=f"{site}/markup/web/",
                jobs=[as_typed(job) for job in JOBS],
                mistakes=[as_typed(values) for values, *_ in MISTYPED.values()],
                cache=CACHE | dict(request=as_typed(CACHE["request"])),
                typed=as_typed(TYPED),
                keys=KEYS,
                looks=LOOKS,
                broken={name: f"{site}/{folder}/" for name, folder in broken.items()},
                picture=str(out / "chart.png"),
            )
            plan["broken"]["file"] = (out / "web" / "index.html").as_uri()
            node = ["node", ROOT / "tests" / "web.mjs", json.dumps(plan)]
            result = subprocess.run(node, capture_output=True, encoding="utf-8", timeout=400)
        finally:
            server.terminate()
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout) | {"site": site, "picture": imread(out / "chart.png")}


def as_typed(values):
    """Numbers as text: JSON's would lose the digits of a seed in JavaScript."""
    return {name: str(value) if type(value) in (int, float) else value for name, value in values.items()}


def ids_of(text):
    return [CHARS.index(char) for char in text]


def assert_text(model, text, prompt, steps, **sampling):
    """`text` is the prompt and what PyTorch continues it with, without a cache."""
    prompt, ours = torch.tensor(ids_of(prompt or "\n")), ids_of(text)
    assert ours[: len(prompt)] == prompt.tolist()
    same, lines = verify(model, [prompt], [ours], steps, False, Sampling(**sampling), range(2**16))
    assert same, (text, lines)


# -- the text and the work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("i", range(len(JOBS)))
def test_the_text_is_the_one_of_pytorch(seen, model, i):
    job = dict(JOBS[i])
    prompt, steps = (job.pop(name) for name in ("prompt", "max_new_tokens"))
    what = seen["jobs"][i]
    assert what["message"] == "" and what["text"].endswith(what["newest"])
    assert_text(model, what["text"], prompt, steps or CONTEXT, **job)
    new = len(what["text"]) - len(prompt or "\n")
    count = "1 new character" if new == 1 else f"all {new} characters"
    assert f"With and without the cache the text is the same, {count}." in what["status"]


def test_the_texts_of_these_tests_differ(seen):
    """Else the last one would be evidence of little: seed, temperature and top-k all have a say."""
    texts = [seen["jobs"][i]["text"] for i in (0, 1, 2, 3, 9)]
    assert len(set(texts)) == len(texts)
    assert all(len(set(text)) > 8 for text in texts)


@pytest.mark.parametrize("i", range(len(JOBS)))
def test_every_row_is_counted(seen, i):
    """Without the cache each step computes the whole text, with it the new characters."""
    T, end = len(JOBS[i]["prompt"] or "\n"), len(seen["jobs"][i]["text"])
    assert seen["jobs"][i]["rows"] == [sum(range(T, end)), end - 1]


def test_an_empty_prompt_and_a_length_past_the_context_are_said(seen):
    assert 'starts after "\\n"' in seen["jobs"][7]["status"]
    assert f"1000 characters would pass the end of the context of {CONTEXT}" in seen["jobs"][8]["status"]


def test_the_chart_has_both_curves_of_one_run(seen):
    """Points, each the mean of 16 steps that are no prefill."""
    new = CONTEXT - len(DEFAULT["prompt"])
    assert seen["before"]["points"] == [0, 0]
    assert seen["jobs"][0]["points"] == [new - 16, new - 16]
    assert seen["jobs"][4]["points"] == [1, 1]  # 12 steps
    for setting in ("off", "on"):
        words = rf"KV cache {setting}: from [\d.]+ to [\d.]+, positions {CONTEXT - new} to {CONTEXT - 1}\."
        assert re.search(words, seen["jobs"][9]["chart"])
    for colour in rgb(seen["looks"]["wide"]["lines"].values()):
        distance = (seen["picture"][..., :3] - torch.tensor(colour).numpy() / 255).__abs__().max(-1)
        assert (distance < 0.02).sum() > 100  # pixels of a line some hundreds long


def test_the_shapes_are_those_of_the_graph(seen):
    T, kv = CONTEXT - 1, "2, {}, 8)"  # the last step feeds position 62 of a text of 63
    shapes = {row[1]: row[2:] for row in seen["jobs"][0]["shapes"]}
    assert shapes["input_ids"] == ["(1, 1)", f"(1, {T})"]
    assert shapes["attention_mask"] == [f"(1, {T})", f"(1, {T})"]
    assert shapes["past_key_values.0.key"] == [f"(1, {kv.format(T - 1)}", f"(1, {kv.format(0)}"]
    assert shapes["logits"] == [f"(1, 1, {len(CHARS)})", f"(1, {T}, {len(CHARS)})"]
    assert shapes["present.0.value"] == [f"(1, {kv.format(T)}", "-"]


def test_steps_stop_and_go_on_and_a_second_click_changes_nothing(seen, model):
    T = len(DEFAULT["prompt"])
    assert [len(what["text"]) - T for what in seen["steps"]] == [1, 2, 3]
    assert seen["steps"][2]["rows"] == [T + T + 1 + T + 2, T + 2]
    whole = seen["jobs"][0]
    stopped = seen["stopped"]["text"]
    assert T + 5 < len(stopped) < CONTEXT and whole["text"].startswith(stopped)
    assert "Stopped." in seen["stopped"]["status"] and "so far" in seen["stopped"]["status"]
    for name in ("goneOn", "twice", "held"):
        assert [seen[name][key] for key in ("text", "rows", "status")] == [whole[k] for k in ("text", "rows", "status")]


# -- the cache ---------------------------------------------------------------------------------------------------------


def feed(model, ids, past=None, positions=None, hidden=None):
    """One forward of GPTWithPast: the logits after the last token, and the pairs (key, value)."""
    if past is None:
        past = [(torch.zeros(1, 2, 0, 8),) * 2] * CONFIG.n_layer
    begin = past[0][0].size(2)
    mask = torch.ones(1, begin + len(ids), dtype=torch.int64)
    if hidden is not None:
        mask[0, hidden] = 0
    positions = range(begin, begin + len(ids)) if positions is None else positions
    with torch.no_grad():
        logits, present = GPTWithPast(model)(torch.tensor([ids]), mask, torch.tensor([[*positions]]), past)
    return logits[0, -1], present


@pytest.fixture(scope="module")
def text(seen, model):
    """The ids of the run that CACHE asks about, from PyTorch."""
    request = dict(CACHE["request"])
    prompt, steps = torch.tensor([ids_of(request.pop("prompt"))]), request.pop("max_new_tokens")
    return model.generate(prompt, steps, **request)[0].tolist()


def test_the_kept_columns_are_as_many_and_as_large_as_said_and_right(seen):
    formula = " \xd7 ".join(["2", "2 layers", "2 heads", "8 numbers", f"{CONTEXT - 1} columns", "4 bytes"])
    assert f"{formula} = {2 * 2 * 2 * 8 * (CONTEXT - 1) * 4:,} bytes" in seen["jobs"][0]["bytes"]
    difference = re.search(r"differ by at most ([\d.e-]+)\.$", seen["cache"]["again"])[1]
    assert 0 < float(difference) < 1e-4


def assert_bars(bars, before, after):
    """The bars are the largest probabilities before and after a change."""
    names = {" ": "space", "\n": "newline"}
    rank = torch.maximum(before, after).argsort(descending=True)[:6].tolist()
    assert [name for name, *_ in bars] == [names.get(CHARS[i], CHARS[i]) for i in rank]
    for (_, *sizes), i in zip(bars, rank):
        assert sizes == pytest.approx([before[i].item(), after[i].item()], abs=1e-4)


def test_a_column_taken_out_and_a_column_written(seen, model, text):
    _, cache = feed(model, text[:-1])
    before = feed(model, text[-1:], cache)[0].softmax(0)
    without = feed(model, text[-1:], cache, hidden=CACHE["column"])[0].softmax(0)
    assert (without - before).abs().sum() > 0.02
    assert_bars(seen["cache"]["takenOut"], before, without)

    column, other = CACHE["column"], text.copy()
    other[column] = CACHE["written"]
    changed = [tuple(x.clone() for x in pair) for pair in cache]
    for pair, others in zip(changed, feed(model, other[:-1])[1]):
        for x, y in zip(pair, others):
            x[:, :, column] = y[:, :, column]
    assert_bars(seen["cache"]["written"], before, feed(model, text[-1:], changed)[0].softmax(0))

    moved = [
        (feed(model, text[-1:], cache, hidden=i)[0].softmax(0) - before).abs().sum().item() / 2
        for i in range(len(text) - 1)
    ]
    most = max(moved)
    digits = 1 if most < 0.1 else 0
    expected = f"Column {moved.index(most)} matters most: without it {100 * most:.{digits}f} % of the probability moves"
    assert seen["cache"]["influences"] == expected


def test_a_changed_character_changes_columns_to_the_right_only(seen, text):
    """In the first layer its own column alone, because keys and values there depend on one character."""
    right = len(text) - CACHE["position"]
    assert seen["cache"]["changed"] == ["1 changed", f"{right} changed"]
    assert "exactly 0" in seen["cache"]["verdict"]
    middle = len(CACHE["request"]["prompt"]) // 2  # the position before the reader chooses one
    assert seen["cache"]["unasked"] == f"All {middle} columns to the left: the difference is exactly 0."


def test_guesses_give_the_same_text_in_as_many_forwards_as_pytorch_counts(seen, model, ngrams, text):
    """The n-gram table and the noise of the kit, a round at a time, on the text that is known."""
    request = CACHE["request"]
    T, table = len(request["prompt"]), ngram_table(ngrams, len(CHARS), torch.device("cpu"))
    rounds = guessed = right = 0
    end = T
    while end < len(text):
        row = 0
        for token in text[max(0, end - 8) : end]:
            row = table[1][row, token].item()
        guesses = []
        for i in range(min(3, len(text) - end - 1)):
            noise = gumbel_noise(request["seed"], torch.tensor([0]), torch.tensor([end - T + i]), len(CHARS))[0, 0]
            guesses.append(sample_token(table[0][row], noise, request["temperature"]).item())
            row = table[1][row, guesses[-1]].item()
        kept = 0
        while kept < len(guesses) and guesses[kept] == text[end + kept]:
            kept += 1
        rounds, guessed, right, end = rounds + 1, guessed + len(guesses), right + kept, end + kept + 1
    assert right > 0
    counts = f"{rounds} forwards instead of {len(text) - T}; {right} of {guessed} guesses right. The text is the same."
    assert seen["cache"]["guesses"] == counts
    assert ids_of(seen["cache"]["guessed"]) == text


@pytest.mark.parametrize("name", CACHE["mistakes"])
def test_each_mistake_gives_the_text_that_it_gives_in_pytorch(seen, model, text, name):
    request = CACHE["request"]
    T, prompt = len(request["prompt"]), text[: len(request["prompt"])]
    others = [CHARS.index(char) for char in "KING RICHARD III: " if char in CHARS]
    other = [others[i % len(others)] for i in range(T)]
    # the positions of new tokens; then the caches that the prompt leaves
    position = {
        "too far": lambda i: i + 1,
        "standing still": lambda i: T,
        "fed twice": lambda i: i + 1,
        "all too far": lambda i: i + 5,
    }.get(name, lambda i: i)
    if name == "another prompt":
        logits, cache = feed(model, prompt[-1:], feed(model, other[:-1])[1])
    elif name == "all too far":
        logits, cache = feed(model, prompt, positions=range(5, T + 5))
    else:
        logits, cache = feed(model, prompt)
    if name.startswith("fed twice"):
        logits, cache = feed(model, prompt[-1:], cache, [T if name == "fed twice" else T - 1])
    wrong = list(prompt)
    for step in range(len(text) - T):
        noise = gumbel_noise(request["seed"], torch.tensor([0]), torch.tensor([step]), len(CHARS))[0, 0]
        wrong.append(sample_token(logits, noise, request["temperature"]).item())
        logits, cache = feed(model, wrong[-1:], cache, [position(len(wrong) - 1)])

    first = next((i for i in range(len(text)) if wrong[i] != text[i]), None)
    said = seen["cache"]["mistakes"][name]
    assert said.startswith("".join(CHARS[i] for i in wrong[T:]).replace("\n", "↵"))
    if first is None:
        assert f"the same, all {len(text) - T}. Rotary positions" in said
    else:
        assert f"differs from new character {first - T + 1} on" in said
    assert (first is None) == (name == "all too far")


# -- the form and the address ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MISTYPED)
def test_a_mistake_is_named_and_nothing_is_generated(seen, name):
    _, field, words = MISTYPED[name]
    what = seen["mistakes"][list(MISTYPED).index(name)]
    assert all(word in what["message"] for word in words), what["message"]
    assert what["invalid"] == [field] and what["focus"] == field and what["described"] == "message"
    assert what["text"] == seen["jobs"][-1]["text"]


def test_what_phones_type_is_read_and_said(seen, model):
    assert seen["typed"]["message"] == ""
    for word in ("… as ...", "as a space", "0,8 as 0.8"):
        assert word in seen["typed"]["status"]
    assert_text(model, seen["typed"]["text"], "a...b c", 5, temperature=0.8, seed=1337)


def test_the_address_holds_the_run(seen):
    reloaded = seen["typed"]["reloaded"]
    assert reloaded["values"]["prompt"] == TYPED["prompt"] and reloaded["values"]["max_new_tokens"] == "5"
    assert reloaded["text"] == seen["typed"]["text"] and reloaded["address"] == seen["typed"]["address"]


def test_characters_never_become_markup(seen):
    assert seen["markup"]["added"] == 0 and seen["markup"]["message"] == ""
    assert seen["markup"]["text"].startswith("<b><i>&") and len(seen["markup"]["text"]) == CONTEXT


# -- everybody ---------------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(seen, model):
    tabs, what = seen["keyboard"]["tabs"], seen["keyboard"]["run"]
    order = "A A A prompt SUMMARY temperature top_k seed max_new_tokens run step speed".split()
    fields = [tab["field"] for tab in tabs]
    assert fields[:10] == order[:10] and "step" in fields[10:] and "speed" in fields[10:]
    assert all(tab["label"] and tab["ring"] == "solid" for tab in tabs if tab["field"] in order), tabs
    assert what["message"] == ""
    assert_text(model, what["text"], KEYS["prompt"], int(KEYS["max_new_tokens"]), seed=int(KEYS["seed"]))


def test_the_accessibility_tree_names_what_can_be_seen_and_used(seen):
    tree = seen["keyboard"]["tree"]
    T, new = len(KEYS["prompt"]), int(KEYS["max_new_tokens"])
    rows = [sum(range(T, T + new)), T + new - 1]
    wanted = [
        'textbox "Prompt"', 'textbox "Seed"', 'button "Run both"', 'button "Step"', 'slider "Speed"',
        'region "Generated text"', 'heading "The work"', f'img "{rows[0]} rows computed per layer without',
        f'img "{rows[1]} rows computed per layer with', 'img "Milliseconds per token against position',
        'combobox "Layer"', 'combobox "Head"', f'img "The keys of layer 1, head 1: {rows[1]} of {CONTEXT} columns',
        'slider "Column"', 'button "Take it out"', 'combobox "the character"', 'slider "Position"',
        'combobox "becomes"',
        'table', 'button "Guess ahead"', 'radio "New positions one too far"', 'group "Mistakes"',
    ]  # fmt: skip
    assert [words for words in wanted if words not in tree] == [], tree


def rgb(colours):
    return [[int(n) for n in re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour).groups()] for colour in colours]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (n / 255 for n in colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("scheme", LOOKS)
def test_it_fits_a_phone_and_is_readable(seen, scheme):
    """Nothing to scroll sideways at 320 pixels, Step in reach, and WCAG's contrast of 4.5 for every colour of text."""
    look = seen["looks"][scheme]
    assert look["width"] == LOOKS[scheme]["viewport"]["width"] and look["inReach"] and look["clipped"] == []
    assert look["folded"] == (0 if scheme == "wide" else 4)
    (background,) = map(luminance, rgb([look["background"]]))
    assert (background < 0.05) == (scheme == "dark")
    for ink in map(luminance, rgb([*look["inks"].values(), *look["lines"].values()])):
        assert (max(ink, background) + 0.05) / (min(ink, background) + 0.05) >= 4.5, look
    assert len(set(look["dashes"])) == 2  # told apart without colours


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


def test_loading_says_how_much_has_arrived(seen):
    amounts = [re.fullmatch(r"Loading the model: ([\d.]+) of ([\d.]+) MB\.", said or "") for said in seen["loading"]]
    received = [[float(x) for x in match.groups()] for match in amounts if match]
    assert received and received == sorted(received, key=lambda pair: pair[0])
    assert received[-1][0] == received[-1][1] > 3  # MB: the runtime is most of it


def test_a_browser_without_javascript_is_told(seen):
    assert "needs JavaScript" in seen["withoutJavaScript"]
