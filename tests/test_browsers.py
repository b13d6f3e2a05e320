"""The exported page in Firefox and in WebKit: the text, the counts and the answers are PyTorch's. test_web.py asks more
of Chromium."""

import re
import subprocess
import sys

import pytest
import torch

from browsers import PROGRAMS, child, launch, missing
from helpers import ROOT, lively, ok, run
from kvgpt.checkpoint import save_checkpoint
from kvgpt.decoding.decode import Decoder
from kvgpt.decoding.ngrams import count_ngrams
from kvgpt.decoding.verify import verify
from model import GPTConfig, Sampling, causal_mask

pytestmark = pytest.mark.slow

CHARS = "\n !,.:ACDEGHIKNORabcdefghijklmnopqrstuvwxyzé\U0001d54f"  # the last is two units of a JavaScript string
CONTEXT = 64
CONFIG = GPTConfig(
    block_size=CONTEXT, vocab_size=len(CHARS), n_layer=2, n_head=4, n_kv_head=2, n_embd=32, bias=False,
    activation="swiglu", pos_emb="rope", qk_norm=True,
)  # fmt: skip
PROMPT = "O Romeo, "  # this and the sampling are what the form says when the page opens
T = len(PROMPT)
SAMPLING = dict(temperature=0.8, seed=1337)
MISTAKES = ["fed twice", "all too far"]
WITH_MISTAKE = CONTEXT - T - 5  # new characters of a text with a mistake; the largest mistake is of five positions

# A script in front of the page's own, because WebKitWebDriver does not tell what is in the console.
LISTENER = """
window.complaints = [];
const failed = ({ src, href }) => `${src ?? href} did not load`;
addEventListener("error", ({ target, message }) => complaints.push(message ?? failed(target)), true);
addEventListener("unhandledrejection", ({ reason }) => complaints.push(String(reason)));
document.addEventListener("securitypolicyviolation", ({ blockedURI }) => complaints.push(`blocked: ${blockedURI}`));
for (const level of ["error", "warn"]) console[level] = (...words) => complaints.push(words.join(" "));
"""
READ = """
const text = (selector) => document.querySelector(selector).textContent;
return {
  text: text("#text"), rows: [text("#rows-off"), text("#rows-on")], again: text("#again"), status: text("#status"),
  message: text("#message"), complaints,
};
"""
NEXT = """
const rows = [...document.querySelectorAll("#next tbody tr")];
return rows.map(({ cells }) => [cells[0].textContent, cells[2].textContent]);
"""
GUESSED = """
const right = [...document.querySelectorAll("#guessed .right")];
const { textDecorationLine: line, textDecorationThickness: thickness } = getComputedStyle(right[0]);
return {
  verdict: document.querySelector("#guess-verdict").textContent, right: right.map((each) => each.textContent).join(""),
  line, thickness,
};
"""
MISTAKE = """
const output = document.querySelector(`.mistake:has([value="${arguments[0]}"]) output`);
const [box, verdict] = [output.querySelector("mark"), output.querySelector("span")];
const text = output.textContent.slice(0, -verdict.textContent.length);
return { text, box: box && box.textContent, verdict: verdict.textContent };
"""


@pytest.fixture(scope="module")
def model():
    return lively(CONFIG, seed=3)


@pytest.fixture(scope="module")
def ngrams(model):
    """Those of texts by the model itself, so that some guesses are right."""
    prompts = torch.arange(len(CHARS))[:, None]
    return count_ngrams(model.generate(prompts, CONTEXT - 1, temperature=0.8, seed=0).flatten(), len(CHARS), 1000)


@pytest.fixture(scope="module")
def site(model, ngrams, tmp_path_factory):
    """The address of the exported page, which listens for complaints."""
    if not (ROOT / "web" / "node_modules" / "onnxruntime-web").is_dir():
        pytest.skip("no web/node_modules: run npm ci in web")
    out = tmp_path_factory.mktemp("out")
    content = dict(model=model.state_dict(), model_args=vars(CONFIG).copy(), chars=CHARS, ngrams=ngrams)
    save_checkpoint(out / "ckpt.pt", content)
    ok(run("export.py", "--format", "web", "--out_dir", out))
    page = out / "web" / "index.html"
    html = page.read_text(encoding="utf-8")
    page.write_text(html.replace("<script ", '<script src="listener.js"></script><script ', 1), encoding="utf-8")
    (out / "web" / "listener.js").write_text(LISTENER, encoding="utf-8")
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", out / "web"]
    with child(command, stdout=subprocess.PIPE, text=True) as server:
        port = re.search(r"port (\d+)", server.stdout.readline())[1]
        yield f"http://127.0.0.1:{port}/"


def unless_missing(browser):
    """A parameter that is skipped without the browser, before anything is exported."""
    names = missing(browser)
    reason = f"{browser} cannot be driven: no {' and no '.join(names)}"
    return pytest.param(browser, marks=pytest.mark.skipif(bool(names), reason=reason))


@pytest.fixture(scope="module", params=map(unless_missing, PROGRAMS))
def seen(request, site):
    """What there was to see in a browser."""
    with launch(request.param) as browser:
        browser.open(site)
        browser.wait("return document.body.dataset.state !== 'loading'")
        assert browser.run("return document.body.dataset.state") == "ready", browser.run(READ)
        browser.click("#run")
        browser.wait("return ['done', 'failed'].includes(document.body.dataset.state)")
        assert browser.run("return document.body.dataset.state") == "done", browser.run(READ)
        browser.wait("return document.querySelector('#again').textContent")
        seen = browser.run(READ)
        browser.click("#take-out")
        browser.wait("return document.querySelector('#next .after')")
        seen["next"] = browser.run(NEXT)
        browser.click("#guess")
        browser.wait("return document.querySelector('#guess-verdict').textContent")
        seen["guessed"] = browser.run(GUESSED)
        for name in MISTAKES:
            browser.click(f'[value="{name}"]')
            browser.wait(f"return document.querySelector('.mistake:has([value=\"{name}\"]) output').textContent")
            seen[name] = browser.run(MISTAKE, name)
        return seen | {"complaints": browser.run("return complaints")}


def ids_of(text):
    return [CHARS.index(char) for char in text]


def continuation(model, prompt, steps):
    """Return PyTorch's new characters."""
    ids = model.generate(torch.tensor([ids_of(prompt)]), steps, kv_cache=False, **SAMPLING)[0, len(prompt) :]
    return "".join(CHARS[i] for i in ids)


def test_the_text_is_the_one_of_pytorch(seen, model):
    assert seen["message"] == "" and seen["text"].startswith(PROMPT)
    prompt = torch.tensor(ids_of(PROMPT))
    same, lines = verify(model, [prompt], [ids_of(seen["text"])], CONTEXT - T, False, Sampling(**SAMPLING), CHARS)
    assert same, lines
    assert f"the text is the same, all {CONTEXT - T} characters" in seen["status"]


def test_the_rows_are_counted(seen):
    """Without the cache a step computes all rows before the new one. With the cache each row is computed once."""
    assert seen["rows"] == [f"{sum(range(T, CONTEXT)):,}", f"{CONTEXT - 1:,}"]


def test_the_cache_holds_what_a_forward_without_it_computes(seen):
    assert 0 <= float(re.search(r"at most ([\d.]+e[+-]\d+)\.", seen["again"])[1]) < 1e-4


@torch.no_grad()
def test_the_next_character_without_the_newest_column(seen, model):
    ids = torch.tensor([ids_of(seen["text"])])
    before = model(ids)[0][0, -1].softmax(-1)
    newest = torch.tensor([[CONTEXT - 1]])
    model(ids[:, :-1], pos=torch.arange(CONTEXT - 1))
    mask = causal_mask(newest, CONTEXT)
    mask[..., CONTEXT - 2] = False
    after = model.lm_head(model.hidden_states(ids[:, -1:], newest, CONTEXT, mask))[0, -1].softmax(-1)

    assert (before - after).abs().max() > 0.01  # else the column would matter too little
    names = {" ": "space", "\n": "newline"}
    largest = torch.maximum(before, after).argsort(descending=True)[: len(seen["next"])].tolist()
    assert [name for name, _ in seen["next"]] == [names.get(CHARS[i], CHARS[i]) for i in largest]
    for i, (_, change) in zip(largest, seen["next"]):
        shown = re.fullmatch(r"([\d.]+) % → ([\d.]+) %", change).groups()
        for share, percent in zip((before[i], after[i]), shown):
            digits = 1 if "." in percent else 0
            assert abs(100 * share.item() - float(percent)) <= 0.51 * 10**-digits


def test_guesses_leave_the_text_and_are_as_good_as_those_of_the_decoder(seen, model, ngrams):
    decoder = Decoder(model, "ngram", ngrams)
    decoder.generate([torch.tensor(ids_of(PROMPT))], CONTEXT - T, **SAMPLING)
    forwards = f"{decoder.forwards} forwards instead of {CONTEXT - T}"
    guesses = f"{decoder.accepted} of {decoder.offered} guesses right"
    assert seen["guessed"]["verdict"] == f"{forwards}; {guesses}. The text is the same."
    assert len(seen["guessed"]["right"]) == decoder.accepted > 5
    assert seen["guessed"]["line"] == "underline" and seen["guessed"]["thickness"] == "2px"


def test_a_token_that_is_fed_twice_gives_the_text_of_another_prompt(seen, model):
    """A prompt whose last character is written twice. The noise is that of the new characters, so it is the same."""
    right = seen["text"][T:]
    wrong = continuation(model, PROMPT + PROMPT[-1], WITH_MISTAKE)
    first = next(i for i, (a, b) in enumerate(zip(wrong, right)) if a != b)
    begin = max(0, first - 20)
    shown = [char.replace("\n", "↵") for char in wrong]
    assert seen["fed twice"]["text"] == "…" * (begin > 0) + "".join(shown[begin : begin + 40])
    assert seen["fed twice"]["box"] == shown[first]
    assert seen["fed twice"]["verdict"].startswith(f"differs from new character {first + 1} on: ")


def test_rotary_positions_may_all_be_shifted(seen):
    assert seen["all too far"]["text"] == seen["text"][T : T + 40].replace("\n", "↵")
    assert seen["all too far"]["verdict"].startswith(f"the same, all {WITH_MISTAKE}. Rotary positions")


def test_nobody_complains(seen):
    assert seen["complaints"] == []
