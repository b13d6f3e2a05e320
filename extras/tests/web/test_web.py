"""The exported page in real browsers: Chromium in depth, and one run each in Firefox and WebKit.

visit.mjs uses the page in Chromium as a reader would and reports what it saw. Firefox and WebKit open a copy of the
page that drives itself and posts a report to the server. What the page computes is tested without a browser, by
test_numbers.py and the *.test.mjs.
"""

import os
import re
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from extra_helpers import attend
from extras.tests.web.conftest import CONFIG, DEFAULT, WIDE, assert_text, ids_of
from oracles import per_head_logits

pytestmark = pytest.mark.slow

CONTEXT = CONFIG.block_size
# the text of the second must not become markup
JOBS = [DEFAULT, DEFAULT | dict(prompt=f"é{WIDE}\n<b>&", temperature=1.3, top_k=20, seed=2**64 - 1)]
MARKED = 20  # the index of a character on the stage
MOMENT = "?at=30&layer=2&head=2&change=12&to=q&temperature=0.7#step-3"

DESKTOP = dict(width=1280, height=720)
READERS = {
    "desktop": dict(viewport=DESKTOP),
    "dark": dict(viewport=DESKTOP, colorScheme="dark"),
    "forced colours": dict(viewport=DESKTOP, forcedColors="active"),
    "projector": dict(viewport=DESKTOP, projector=True),
    "low laptop": dict(viewport=dict(width=1366, height=625)),
    "lower laptop": dict(viewport=dict(width=1280, height=590)),
    "old projector": dict(viewport=dict(width=1024, height=768)),
    "phone": dict(viewport=dict(width=390, height=844)),
    "small phone": dict(viewport=dict(width=320, height=640)),
    "large text": dict(viewport=DESKTOP, textSize=200),
    "large text, phone": dict(viewport=dict(width=390, height=844), textSize=200),
}
ABOVE_THE_FOLD = ["desktop", "projector", "low laptop", "lower laptop"]


@pytest.fixture(scope="module")
def server(serve):
    return serve()


@pytest.fixture(scope="module")
def seen(server, drive):
    """What visit.mjs reports about the page."""
    jobs = [{name: "" if value is None else str(value) for name, value in job.items()} for job in JOBS]
    plan = dict(site=f"{server.address}/", jobs=jobs, marked=MARKED, moment=MOMENT, readers=READERS)
    return drive("visit.mjs", plan)


@pytest.mark.parametrize("i", range(len(JOBS)))
def test_the_text_is_pytorchs_and_every_column_is_counted(seen, model, i):
    """A step without the cache computes a column for each character of the text. With the cache it computes one."""
    what, begin = seen["jobs"][i], len(JOBS[i]["prompt"])
    assert what["message"] == ""
    assert_text(model, what["text"], JOBS[i])
    new = len(what["text"]) - begin
    assert f"The text is the same with and without the cache: all {new} characters." in what["status"]
    assert what["rows"] == [sum(range(begin, begin + new)), begin + new - 1]


def test_the_first_picture_is_there_before_the_model_and_stays(seen):
    (before, places), (after, loaded) = seen["opening"]
    assert before == after and before[0].startswith(DEFAULT["prompt"]) and before[1].startswith("Without column")
    places, loaded = dict(places), dict(loaded)
    assert len(places) > 4 and {name: loaded[name] for name in places} == places  # no label moves


def percent(share):
    return f"{100 * share:.{1 if share < 0.0995 else 0}f}%"


def test_the_numbers_on_the_stage_are_pytorchs(seen, model):
    """For a character under the pointer, in the strip and in the text, and for the next one."""
    ids = ids_of(seen["unmarked"]["text"])
    probabilities = per_head_logits(model.state_dict(), vars(CONFIG), ids).softmax(1)
    for what in seen["marked"]:
        assert what["name"] == f"character {MARKED + 1}"
        own = percent(probabilities[MARKED - 1, ids[MARKED]].item())
        assert f"Character {MARKED + 1} is" in what["about"] and f"gave it a probability of {own}." in what["about"]
        assert sum(own in item for item in what["next"]) == 1

    model(torch.tensor([ids[:-1]]), pos=torch.arange(len(ids) - 1))
    attn = model.transformer.h[0].attn
    with torch.no_grad():
        x = model.transformer["h"][0].ln_1(model.transformer["wte"](torch.tensor([ids[:-1]])))
        rope = model.rope[:, torch.arange(len(ids) - 1)[None]][:, :, None]
        q = attn.project(x, rope)[0][:, 0, -1:]
        _, weights = attend(attn.heads[0], q, torch.tensor([[len(ids) - 2]]))
    share = percent(weights[0, 0, MARKED].item())
    assert all(f"gives it {share} of its attention" in what["about"] for what in seen["marked"])

    assert seen["unmarked"]["name"] == "next" and seen["unmarked"]["about"] == ""
    for share, item in zip(probabilities[-2].topk(4).values.tolist(), seen["unmarked"]["next"]):
        assert percent(share) in item


def test_the_steps_of_the_lesson_answer(seen):
    assert seen["taken"].startswith("Without column 3, “R”") and "of the probability moves to" in seen["taken"]

    # step 2 begins in the middle of the text
    begin, new, prepared = len(DEFAULT["prompt"]), 25, seen["prepared"]
    fed = begin + new - 1
    assert (prepared["state"], prepared["step"], len(prepared["text"])) == ("paused", "2", fed + 1)
    assert prepared["ends"] == [f"{fed} computed", f"1 computed, {fed - 1} kept"]
    assert prepared["rows"] == [sum(range(begin, begin + new)), fed]

    second, in_second, first, in_first = seen["change"]
    position = int(second.partition("Character ")[2].split()[0]) - 1
    assert "exactly 0" in second and "You were right" in second and "we may keep it" in second
    assert in_second == [f"{position} stay, {fed - position} change"] * 2
    assert "only its own column changes" in first and in_first == [f"{fed - 1} stay, 1 change"] * 2

    verdicts, bugs = zip(*seen["mistakes"])
    assert len(set(bugs)) == 6 and all("# correct: " in bug for bug in bugs)
    assert all("A logit is off by up to" in verdict for verdict in verdicts)
    right = "".join(char or "" for char in seen["right"])
    assert right == "correct:" + seen["jobs"][0]["text"][begin:].replace("\n", "⏎")

    *sizes, sharing, complete = seen["scale"]
    assert sizes == ["128 KiB", "1 GiB", "512 KiB"] and not complete
    assert "64 query heads" in sharing and "8 times as large" in sharing
    assert seen["returned"]["step"] == "4" and not seen["reloaded"]


def test_steps_pause_go_back_and_race(seen):
    whole, one, paused, back = (seen[name]["text"] for name in ("race", "one", "paused", "back"))
    assert len(one) == len(seen["prepared"]["text"]) + 1 and len(one) < len(paused) < CONTEXT
    assert whole == seen["jobs"][0]["text"] and whole.startswith(paused) and back == paused[:-1]
    assert seen["paused"]["state"] == "paused" and seen["paused"]["focus"] == "run"
    assert seen["race"]["rows"] == seen["jobs"][0]["rows"]
    *clocks, why = seen["race"]["said"]
    assert len(clocks) == 2 and all(re.fullmatch(r"\d+\.\d s", clock) for clock in clocks)
    assert why.startswith("You said 40") and "fixed cost" in why
    assert len(seen["race"]["nexts"]) > 3 and all(seen["race"]["nexts"][1:])  # nothing leads away from a race


def test_a_mistake_in_the_form_is_named_and_nothing_is_generated(seen):
    what = seen["mistyped"]
    assert '"#", "€"' in what["message"] and what["focus"] == "prompt"
    assert what["text"] == seen["jobs"][-1]["text"]  # the previous run stays
    assert "Temperature is “abc”" in seen["refused"]["message"]
    assert seen["mended"]["message"] == "" and seen["mended"]["text"].startswith(DEFAULT["prompt"])


def test_the_address_holds_the_moment(seen):
    verdict, address = seen["moment"]
    assert verdict.startswith("Character 12 was")
    assert set(address.strip("?").split("&")) == set(MOMENT.split("#")[0].strip("?").split("&")) - {"layer=2"}


def test_a_keyboard_is_enough(seen, model):
    keyboard = seen["keyboard"]
    assert_text(model, keyboard["run"]["text"], DEFAULT | dict(prompt="Abe, "))
    assert keyboard["marked"]["about"].startswith("Character 3 is “e”.")
    assert keyboard["end"]["about"].startswith(f"Character {CONTEXT - 1} is")
    assert keyboard["taken"].startswith(f"Without column {CONTEXT - 4},")


@pytest.mark.parametrize("name", READERS)
def test_the_page_fits_and_is_visible_for_every_reader(seen, name):
    what = seen["readers"][name]
    assert what["width"] == READERS[name]["viewport"]["width"]
    if name in ABOVE_THE_FOLD:
        assert what["bottom"] <= READERS[name]["viewport"]["height"]
    assert all(len({*pair}) == 2 for pair in what["colours"])
    # the newest character is lit in both rows, the one before it only without the cache
    (off, on), (off_before, kept) = what["newest"], what["before"]
    assert off == off_before and len({off, on, kept}) == 3 and what["ring"] == on


def test_a_projector_shows_sixteen_columns_and_large_labels(seen):
    assert seen["readers"]["projector"]["columns"] == 16 and min(seen["readers"]["projector"]["labels"]) >= 18


def test_the_keys_are_on_the_first_screen_of_a_phone(seen):
    assert seen["readers"]["phone"]["keys"] < 700


def test_no_other_server_is_asked_and_the_console_is_empty(seen, server):
    strangers = [url for url in seen["requests"] if not url.startswith((f"{server.address}/", "data:"))]
    assert strangers == [] and len(seen["requests"]) > 10
    assert seen["complaints"] == []


# -- Firefox and WebKit ------------------------------------------------------------------------------------------------

ITSELF = """
const $ = (id) => document.getElementById(id);
const until = (holds) =>
  new Promise((resolve) => {
    const look = () => (holds() ? resolve() : setTimeout(look, 20));
    look();
  });
const phase = () => document.body?.dataset.state ?? "loading";
const failed = () => phase() === "failed";
until(() => !["loading", "preparing"].includes(phase()))
  .then(() => {
    $("speed").value = 100;
    $("speed").dispatchEvent(new Event("input"));
    if (!failed()) $("run").click();
    return until(() => failed() || (phase() === "done" && $("text").children.length === CONTEXT));
  })
  .then(() => {
    const report = { agent: navigator.userAgent, text: $("text").textContent, message: $("message").textContent };
    return fetch("/report", { method: "POST", body: JSON.stringify(report) });
  });
""".replace("CONTEXT", str(CONTEXT))
# not in PATH
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
def test_other_browsers_generate_the_text_too(browser, name, server, page, model):
    html = (page / "index.html").read_text(encoding="utf-8")
    (page / "itself.html").write_text(html.replace("<script ", '<script src="itself.js"></script><script ', 1))
    (page / "itself.js").write_text(ITSELF, encoding="utf-8")
    home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with home as folder, browser(f"{server.address}/itself.html", Path(folder)):
        report = server.reports.get(timeout=120)
    assert name in report["agent"] and report["message"] == ""
    assert_text(model, report["text"], DEFAULT)
