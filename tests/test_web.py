"""The exported page in real browsers: Chromium in depth, and one run each in Firefox and WebKit.

web.mjs uses the page in Chromium as a reader does and reports what it saw. Firefox and WebKit open a copy of the page
that uses itself, and posts its report to the server. The texts and numbers have to be those of PyTorch and of
tests/oracles.py.
"""

import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from helpers import ROOT, ok, random_model, run, save_model
from kvgpt.decoding.decode import Decoder
from kvgpt.decoding.ngrams import count_ngrams
from kvgpt.decoding.verify import verify
from kvgpt.vocabulary import character_vocabulary
from model import GPTConfig, Sampling, gumbel_noise, sample_token
from oracles import per_head_logits

pytestmark = pytest.mark.slow

WIDE = "\U0001d54f"  # one character, two units of a JavaScript string
CHARS = "\n !,.:?<>&/ABCDEFGHROabcdefghijklmnopqrstuvwxyzé" + WIDE
CONTEXT = 64
CONFIG = GPTConfig(
    block_size=CONTEXT, vocab_size=len(CHARS), n_layer=2, n_head=4, n_kv_head=2, n_embd=32, bias=False,
    activation="swiglu", pos_emb="rope", qk_norm=True,
)  # fmt: skip
DEFAULT = dict(prompt="O Romeo, ", temperature=0.8, top_k=None, seed=1337, max_new_tokens=None)  # as the form is
JOBS = [
    DEFAULT,
    DEFAULT | dict(temperature=0, max_new_tokens=1000),  # past the end of the context
    DEFAULT | dict(prompt=f"é{WIDE}\n", temperature=0.7, top_k=5, seed=2**64 - 1),
    DEFAULT | dict(prompt="<b>&", temperature=1.3, seed=2**63 + 2**31 + 5),  # no markup
    DEFAULT | dict(prompt="a" * (CONTEXT - 1)),
    DEFAULT | dict(prompt="", temperature=2.5, top_k=1000, seed=0, max_new_tokens=12),
]


def ids_of(text):
    return [CHARS.index(char) for char in text]


def typed(job):
    return {name: "" if value is None else str(value) for name, value in job.items()}


# the run that the worker is asked about
PROMPT, OTHER = ids_of("A cab, dad? "), ids_of("Faced a bag.")
T, STEPS, SAMPLING = len(PROMPT), 18, dict(temperature=1.0, seed=3)
COLUMN, WRITTEN, POSITION, CHANGED = 7, CHARS.index("k"), 9, CHARS.index("z")
MISTAKES = {  # name: (what is fed before the new tokens, position of the i-th token that is fed)
    "too far": (PROMPT, lambda i: i if i < T else i + 1),
    "standing still": (PROMPT, lambda i: min(i, T)),
    "fed twice": ([*PROMPT, PROMPT[-1]], lambda i: i),
    "fed twice in place": ([*PROMPT, PROMPT[-1]], lambda i: i if i < T else i - 1),
    "another prompt": ([*OTHER[:-1], PROMPT[-1]], lambda i: i),
    "all too far": (PROMPT, lambda i: i + 5),
}


# -- the page and the browsers -----------------------------------------------------------------------------------------


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder as `python -m http.server` does. A page may post a report."""

    def do_POST(self):
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, seed=3)


@pytest.fixture(scope="module")
def ngrams(model):
    """Those of texts by the model itself, so that some guesses are right."""
    texts = model.generate(torch.arange(len(CHARS))[:, None], CONTEXT - 1, temperature=0.8, seed=0)
    return count_ngrams(texts.flatten(), len(CHARS), 1000)


@pytest.fixture(scope="module")
def server(model, ngrams, tmp_path_factory):
    """Serves `folder`, in which web/ is the exported page."""
    if not (ROOT / "web" / "node_modules" / "onnxruntime-web").is_dir():
        pytest.skip("no web/node_modules: run npm ci in web")
    folder = tmp_path_factory.mktemp("out")
    save_model(folder, model, CHARS, ngrams)
    ok(run("export.py", "--format", "web", "--out_dir", folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        server.folder, server.reports = folder, queue.Queue()
        server.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def seen(server):
    """The report of web.mjs on the page, and on a copy of it with something wrong."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not (chromium and shutil.which("node") and (ROOT / "web" / "node_modules" / "playwright-core").is_dir()):
        pytest.skip("needs Chromium (or CHROMIUM=/path/to/it), Node.js and npm ci in web")
    web = server.folder / "web"
    file = shutil.copytree(web, server.folder / "cut") / "model.onnx.gz"
    file.write_bytes(file.read_bytes()[:99])
    questions = dict(prompt=PROMPT, other=OTHER, steps=STEPS, sampling=SAMPLING | dict(topK=None))
    questions |= dict(column=COLUMN, written=WRITTEN, position=POSITION, changed=CHANGED)
    questions |= dict(mistakes=[*MISTAKES])
    plan = dict(
        chromium=chromium,
        site=f"{server.address}/web/",
        jobs=[typed(job) for job in JOBS],
        mistyped="a#b€#",
        questions=questions,
        broken=dict(cut=f"{server.address}/cut/", file=(web / "index.html").as_uri()),
    )
    command = ["node", ROOT / "tests" / "web.mjs", json.dumps(plan)]
    return json.loads(ok(subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)).stdout)


# -- texts -------------------------------------------------------------------------------------------------------------


def assert_text(model, text, job):
    """`text` is the prompt and what PyTorch continues it with, without a cache."""
    sampling = dict(job)
    prompt, steps = sampling.pop("prompt") or "\n", sampling.pop("max_new_tokens") or CONTEXT
    assert text.startswith(prompt)
    ids = torch.tensor(ids_of(prompt))
    same, lines = verify(model, [ids], [ids_of(text)], steps, False, Sampling(**sampling), character_vocabulary(CHARS))
    assert same, (text, lines)


@pytest.mark.parametrize("i", range(len(JOBS)))
def test_the_text_is_the_one_of_pytorch_and_every_row_is_counted(seen, model, i):
    """A step without the cache computes a row for each character of the text. With the cache it computes one."""
    what, begin = seen["jobs"][i], len(JOBS[i]["prompt"] or "\n")
    assert what["message"] == ""
    assert_text(model, what["text"], JOBS[i])
    new = len(what["text"]) - begin
    count = "1 new character" if new == 1 else f"all {new} characters"
    assert f"With and without the cache the text is the same, {count}." in what["status"]
    assert what["rows"] == [sum(range(begin, begin + new)), begin + new - 1]


# -- what the worker computes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(model):
    """The ids of the run that the worker is asked about, from PyTorch."""
    return model.generate(torch.tensor([PROMPT]), STEPS, **SAMPLING)[0].tolist()


def logits_of(model, *args, **kwargs):
    return per_head_logits(model.state_dict(), vars(CONFIG), *args, **kwargs)


def causal(n):
    return torch.ones(n, n).tril() == 1


def assert_probabilities(got, logits):
    torch.testing.assert_close(torch.tensor(got), logits.softmax(0).float())


def test_the_cache_holds_what_a_forward_without_it_computes(seen, model, text):
    answers = seen["answers"]
    assert answers["on"] == text[T:]
    assert 0 < answers["difference"] < 1e-4
    assert_probabilities(answers["probabilities"], logits_of(model, text)[-1])


def test_without_a_column_the_next_character_is_that_of_a_masked_forward(seen, model, text):
    answers, n = seen["answers"], len(text)
    allowed = causal(n)
    allowed[-1, COLUMN] = False
    hidden = logits_of(model, text, allowed=allowed)[-1]
    assert_probabilities(answers["hidden"], hidden)
    moved = (hidden.softmax(0) - logits_of(model, text)[-1].softmax(0)).abs().sum() / 2
    assert moved > 0.01 and answers["influences"][COLUMN] == pytest.approx(moved.item(), abs=1e-5)
    assert len(answers["influences"]) == n - 1


def test_a_column_of_another_character_is_read_by_the_next_step_alone(seen, model, text):
    """The other character stands at the end here: it sees what is left of its column, and the newest token sees it."""
    n = len(text)
    tokens, positions = [*text[:-1], WRITTEN, text[-1]], [*range(n - 1), COLUMN, n - 1]
    allowed = causal(n + 1)
    allowed[n - 1, COLUMN : n - 1] = False
    allowed[n, COLUMN] = False
    assert_probabilities(seen["answers"]["written"], logits_of(model, tokens, positions, allowed)[-1])


def test_a_changed_character_changes_columns_to_the_right_only(seen):
    """In the first layer its own column alone, because keys and values there depend on one character."""
    first, second = seen["answers"]["changed"]
    assert [i for i, difference in enumerate(first) if difference] == [POSITION]
    assert [i for i, difference in enumerate(second) if difference] == list(range(POSITION, len(second)))


def test_guesses_give_the_same_text_in_as_many_forwards_as_the_decoder(seen, model, ngrams, text):
    guess = seen["answers"]["guess"]
    assert guess["ids"] == text
    decoder = Decoder(model, "ngram", ngrams)
    decoder.generate([torch.tensor(PROMPT)], STEPS, **SAMPLING)
    right, wrong = (sum(len(each[name]) for each in guess["rounds"]) for name in ("right", "wrong"))
    assert (len(guess["rounds"]), right, right + wrong) == (decoder.forwards, decoder.accepted, decoder.offered)
    assert right and wrong


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_gives_the_text_that_the_mistake_computes(seen, model, text, name):
    """Rotary positions that are all shifted by the same distance are no mistake."""
    wrong = seen["answers"]["mistakes"][name]
    fed, position = MISTAKES[name]
    tokens = [*fed, *wrong[T:-1]]
    logits = logits_of(model, tokens, [position(i) for i in range(len(tokens))])[-STEPS:]
    noise = gumbel_noise(SAMPLING["seed"], torch.tensor([0]), torch.arange(STEPS), len(CHARS))[0]
    assert wrong == text[:T] + sample_token(logits, noise, SAMPLING["temperature"]).tolist()
    assert (wrong == text) == (name == "all too far")


# -- the page ----------------------------------------------------------------------------------------------------------


def test_steps_stop_and_go_on(seen):
    begin, whole = len(DEFAULT["prompt"]), seen["jobs"][0]
    assert [len(what["text"]) - begin for what in seen["steps"]] == [1, 2, 3]
    assert seen["steps"][2]["rows"] == [begin + begin + 1 + begin + 2, begin + 2]
    stopped = seen["stopped"]
    assert begin + 5 < len(stopped["text"]) < CONTEXT and whole["text"].startswith(stopped["text"])
    assert "Stopped." in stopped["status"]
    for key in ("text", "rows", "status"):
        assert seen["goneOn"][key] == whole[key]


def test_a_mistake_in_the_form_is_named_and_nothing_is_generated(seen):
    what = seen["mistyped"]
    assert '"#", "€"' in what["message"] and what["focus"] == "prompt"
    assert what["text"] == seen["jobs"][-1]["text"]


def test_the_tools_below_the_text_answer(seen):
    assert "exactly 0" in seen["verdicts"]["change"]
    assert "The text is the same." in seen["verdicts"]["guess"]
    assert "differs from new character" in seen["verdicts"]["mistake"]


def test_the_address_holds_the_run_and_the_page_fits_a_phone(seen):
    assert seen["linked"]["text"] == seen["jobs"][3]["text"]
    assert seen["width"] == 320


def test_nothing_is_asked_of_anybody_else_and_nobody_complains(seen, server):
    strangers = [url for url in seen["requests"] if not url.startswith((f"{server.address}/", "file://", "data:"))]
    assert strangers == [] and len(seen["requests"]) > 10
    assert seen["complaints"] == []


@pytest.mark.parametrize("name, words", {"cut": "model.onnx.gz", "file": "http://localhost:8000"}.items())
def test_what_does_not_load_is_named_with_the_way_out(seen, name, words):
    what = seen["broken"][name]
    assert words in what["message"] and "python -m http.server" in what["message"]
    assert what["disabled"] and what["text"] == ""


# -- Firefox and WebKit ------------------------------------------------------------------------------------------------

ITSELF = """
const text = (id) => document.getElementById(id).textContent;
const phase = (...names) =>
  new Promise((resolve) => {
    const look = () => (names.includes(document.body?.dataset.state) ? resolve() : setTimeout(look, 20));
    look();
  });
phase("ready", "failed")
  .then(() => document.getElementById("run").click())
  .then(() => phase("done", "failed"))
  .then(() => {
    const report = { agent: navigator.userAgent, text: text("text"), message: text("message") };
    return fetch("/report", { method: "POST", body: JSON.stringify(report) });
  });
"""
# in no folder of PATH
MINIBROWSER = next(map(str, Path("/usr/lib").glob("*/webkit2gtk-4*/MiniBrowser")), "MiniBrowser")


@contextmanager
def process(*command, env=None, **kwargs):
    command = [shutil.which(command[0]) or pytest.skip(f"no {command[0]}"), *map(str, command[1:])]
    env, quiet = os.environ | (env or {}), dict(stdout=subprocess.DEVNULL) | kwargs
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, **quiet) as started:
        try:
            yield started
        finally:
            started.terminate()


@contextmanager
def firefox(url, home):
    with process("firefox-esr", "--headless", "--no-remote", "--profile", home, url, env={"HOME": str(home)}):
        yield


@contextmanager
def webkit(url, home):
    screen = ("Xvfb", "-displayfd", "1", "-screen", "0", "1280x1000x24", "-nolisten", "tcp")  # WebKit needs one
    with ExitStack() as stack:
        display = stack.enter_context(process(*screen, stdout=subprocess.PIPE, text=True)).stdout.readline().strip()
        env = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "DISPLAY": f":{display}", "GDK_BACKEND": "x11"}
        stack.enter_context(process(MINIBROWSER, url, env=env))
        yield


@pytest.mark.parametrize("browser, name", [(firefox, "Firefox/"), (webkit, "Version/")])
def test_other_browsers_generate_the_text_too(browser, name, server, model):
    page = server.folder / "web"
    html = (page / "index.html").read_text(encoding="utf-8")
    (page / "itself.html").write_text(html.replace("<script ", '<script src="itself.js"></script><script ', 1))
    (page / "itself.js").write_text(ITSELF, encoding="utf-8")
    home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with home as folder, browser(f"{server.address}/web/itself.html", Path(folder)):
        report = server.reports.get(timeout=120)
    assert name in report["agent"] and report["message"] == ""
    assert_text(model, report["text"], DEFAULT)
