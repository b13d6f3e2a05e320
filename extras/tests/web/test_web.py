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
from extras.decode.explain import watch
from extras.tests.web.conftest import CONFIG, DEFAULT, WIDE, assert_text, ids_of
from helpers import ROOT
from oracles import per_head_logits

pytestmark = pytest.mark.slow

CONTEXT = CONFIG.block_size
TIMES = "\N{MULTIPLICATION SIGN}"
# its text must not become markup
JOB = DEFAULT | dict(prompt=f"é{WIDE}\n<b>&", temperature=1.3, top_k=20, seed=2**64 - 1)
MARKED = 20  # the index of a character on the stage
MOMENT = "?at=30&layer=2&change=12&to=q&temperature=0.7#step-4"

# the opening: 25 steps, of which each computes all positions so far, or only the newest
OPENING, NEW = len(DEFAULT["prompt"]), 25
ALL, ONCE = sum(range(OPENING, OPENING + NEW)), OPENING + NEW - 1

DESKTOP = dict(width=1280, height=720)
READERS = {
    "desktop": dict(viewport=DESKTOP),
    "dark": dict(viewport=DESKTOP, colorScheme="dark"),
    "forced colours": dict(viewport=DESKTOP, forcedColors="active"),
    "large": dict(viewport=dict(width=1440, height=900)),
    "low laptop": dict(viewport=dict(width=1366, height=625)),
    "lower laptop": dict(viewport=dict(width=1280, height=590)),
    "old projector": dict(viewport=dict(width=1024, height=768)),
    "full HD": dict(viewport=dict(width=1920, height=950)),
    "tablet": dict(viewport=dict(width=768, height=1024)),
    "larger tablet": dict(viewport=dict(width=834, height=1112)),
    "tall": dict(viewport=dict(width=1200, height=2400)),
    "phone": dict(viewport=dict(width=390, height=844)),
    "small phone": dict(viewport=dict(width=320, height=640)),
    "large text": dict(viewport=DESKTOP, textSize=200),
    "large text, phone": dict(viewport=dict(width=390, height=844), textSize=200),
}
MAY_SCROLL = ["phone", "small phone", "large text", "large text, phone"]


@pytest.fixture(scope="module")
def server(serve):
    return serve()


@pytest.fixture(scope="module")
def seen(server, drive):
    """What visit.mjs reports about the page."""
    forms = {
        name: {field: "" if value is None else str(value) for field, value in job.items()}
        for name, job in (("default", DEFAULT), ("job", JOB))
    }
    plan = dict(site=f"{server.address}/", marked=MARKED, moment=MOMENT, readers=READERS, all=ALL)
    return drive("visit.mjs", plan | forms)


@pytest.mark.parametrize("name, job", [("race", DEFAULT), ("again", JOB)])
def test_a_race_gives_pytorchs_text_twice_and_every_position_is_counted(seen, model, name, job):
    """A step without the cache computes a position for each character of the text. With the cache it computes one."""
    what, begin = seen[name], len(job["prompt"])
    assert what["message"] == ""
    assert what["texts"][0] == what["texts"][1]
    assert_text(model, what["texts"][1], job)
    new = len(what["texts"][1]) - begin
    assert f"The text is the same with and without the cache: all {new} characters." in what["status"]
    assert what["computed"] == [sum(range(begin, begin + new)), begin + new - 1]


def test_the_first_picture_fills_by_itself_before_the_model_has_arrived(seen):
    """Its counts are those of the opening text, and when the model arrives it does not begin again."""
    whole, counts, after = seen["motion"]
    assert whole == after == [str(ALL), str(ONCE)]
    assert counts == sorted(counts) and len(set(counts)) > 10 and counts[0] < ALL / 2
    numbers, texts = seen["idea"]
    assert numbers == whole  # at once for a reader who wants no motion
    assert texts[0] == texts[1] and len(texts[0]) == OPENING + NEW and texts[0].startswith(DEFAULT["prompt"])
    marks = " ".join(seen["marks"])
    assert "prefill" in marks and "decode" in marks and f"{round(ALL / ONCE)}{TIMES}" in marks


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

    with watch(model) as seen_by_model:
        model(torch.tensor([ids[:-1]]), pos=torch.arange(len(ids) - 1))
    _, weights = attend(model.kv_cache.heads[0][0], seen_by_model["q"][:, 0, -1:], torch.tensor([len(ids) - 2]))
    share = percent(weights[0, 0, MARKED].item())
    assert all(f"gives it {share} of its attention" in what["about"] for what in seen["marked"])

    assert "before temperature and top-k" in seen["unmarked"]["caption"]
    assert seen["unmarked"]["name"] == "next" and seen["unmarked"]["about"] == ""
    for share, item in zip(probabilities[-2].topk(3).values.tolist(), seen["unmarked"]["next"]):
        assert percent(share) in item


def test_the_race_waits_for_a_guess_and_its_result_stays(seen):
    assert seen["waits"] == [0, 0]
    race = seen["race"]
    assert seen["began"] == "H1"
    assert race["state"] == "done"
    said, (fixed_off, off, fixed_on, on), width = seen["bars"]
    new = CONTEXT - OPENING
    fewer = race["computed"][0] / race["computed"][1]
    said = " ".join(said)
    assert f"{round(fewer)}{TIMES} fewer positions" in said and f"Why not {round(fewer)} times" in said
    focus, guessed = seen["guessed"]
    assert "You said" not in said
    assert guessed.index(f"You said 16{TIMES}") < guessed.index("as fast") < guessed.index(f"You said 8{TIMES}")
    assert focus == "next-step"  # not lost with the button that disappears
    assert f"{round(race['computed'][0] / new)} positions" in said and "1 position\n" in said
    assert abs(fixed_off - fixed_on) < 1 and max(fixed_off + off, fixed_on + on) == pytest.approx(width, abs=1)
    again, is_visible = seen["returned"]
    assert again["computed"] == race["computed"] and again["texts"] == race["texts"] and is_visible
    assert seen["drawn"] == pytest.approx(race["computed"])


def test_the_code_is_that_of_the_lesson_and_what_is_new_in_it_is_blue(seen):
    before, after = (
        {line.strip() for line in (ROOT / "lesson" / file).read_text(encoding="utf-8").splitlines()}
        for file in ("1_recompute.py", "2_cache.py")
    )
    assert len(seen["code"]) == 10
    for line, is_blue in seen["code"]:
        assert line.strip() in after and is_blue == (line.strip() not in before), line


def test_the_steps_of_the_lesson_answer(seen):
    count, numbers = seen["columns"]
    assert count == 8  # three keys and three values, the query and the mix
    assert "hidden" in numbers  # the score of the hidden character, which is one of the three
    assert seen["taken"].startswith("Without character 3, “R”") and "of the probability moves to" in seen["taken"]

    # what comes after a changed character changes, and nothing else does
    fed = ONCE
    (verdict, stay, change), (second, *counts) = seen["change"]
    assert "difference: exactly 0" in verdict and "“q”" in verdict
    assert int(stay) == fed // 2 and int(stay) + int(change) == fed
    assert counts == ["4", str(fed - 4)] and "which was “m”" in second
    assert seen["rows"] == sum(range(5, fed + 1))
    first, row = seen["first"]
    assert f"{fed - 1} keys and values stay" in first and "1 changes" in first and row == 5

    verdicts, bugs = zip(*seen["mistakes"])
    assert len(set(bugs)) == 6 and all("# correct: " in bug for bug in bugs)
    assert all("A logit is off by up to" in verdict for verdict in verdicts)
    right = "".join(char or "" for char in seen["right"])
    assert right == "correct:" + seen["race"]["texts"][1][OPENING:].replace("\n", "⏎")

    *sizes, sharing, tokens, refused, complete = seen["scale"]
    assert sizes == ["128 KiB", "1 GiB", "512 KiB"] and tokens == "16,384 tokens"
    assert refused.startswith("Key/value heads") and "above 0" in refused and not complete
    assert "64 query heads" in sharing and "8 times as large" in sharing
    assert seen["back6"]["heading"].startswith("What does a broken")


def test_steps_pause_and_go_back(seen):
    one, paused, back = (seen[name]["text"] for name in ("one", "paused", "back"))
    assert len(seen["prepared"]["text"]) == OPENING + NEW
    assert len(one) == OPENING + NEW + 1 and len(one) < len(paused) < CONTEXT
    assert seen["race"]["texts"][1].startswith(paused) and back == paused[:-1]
    assert seen["paused"]["state"] == "paused" and seen["paused"]["focus"] == "run"


def test_a_mistake_in_the_form_is_named_and_nothing_is_generated(seen):
    what = seen["mistyped"]
    assert '"#", "€"' in what["message"] and what["focus"] == what["below"] == "prompt"
    assert what["texts"] == seen["again"]["texts"]  # the previous run stays, but not what was said about it
    assert what["status"] == ""
    assert "Temperature is “abc”" in seen["refused"]["message"] and seen["refused"]["below"] == "temperature"
    assert seen["mended"]["message"] == "" and seen["mended"]["text"].startswith(DEFAULT["prompt"])


def test_the_address_holds_the_moment(seen):
    verdict, address = seen["moment"]
    assert "“q”" in verdict
    assert set(address.strip("?").split("&")) == set(MOMENT.split("#")[0].strip("?").split("&")) - {"layer=2"}


def test_a_keyboard_is_enough(seen, model):
    keyboard = seen["keyboard"]
    assert_text(model, keyboard["run"]["text"], DEFAULT | dict(prompt="Abe, "))
    for number, (label, about) in zip((CONTEXT - 1, CONTEXT - 2, CONTEXT - 3, 1), keyboard["three"], strict=True):
        assert label.startswith(f"character {number}, ") and about.startswith(f"Character {number} is")
        score, share = re.search(r": score (.+), (.+) of the attention$", label).groups()
        assert f"scores {score}, so the newest gives it {share} of its attention" in about
    verdict, label = keyboard["hidden"]
    assert verdict.startswith("Without character 1,") and label.startswith("character 1, ")  # the focus stays

    assert keyboard["marked"]["about"].startswith("Character 3 is “e”.")
    assert keyboard["end"]["about"].startswith(f"Character {CONTEXT - 1} is")
    assert keyboard["taken"].startswith(f"Without character {CONTEXT - 4},")
    assert keyboard["next"]["heading"].startswith("What does a broken") and keyboard["next"]["focus"] == "H1"


@pytest.mark.parametrize("name", READERS)
def test_the_page_fits_and_is_visible_for_every_reader(seen, name):
    what = seen["readers"][name]
    assert what["width"] == READERS[name]["viewport"]["width"]
    if name not in MAY_SCROLL:
        assert what["bottom"] <= READERS[name]["viewport"]["height"]
    assert all(len({*pair}) == 2 for pair in what["colours"])
    assert len(set(what["squares"])) == 4  # computed again, computed once, kept, and the paper
    assert what["go"]


def test_the_staircase_is_on_the_first_screen_of_a_phone(seen):
    assert seen["readers"]["phone"]["first"] < 300


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
until(() => phase() !== "loading")
  .then(() => {
    location.hash = "step-2";
    return until(() => failed() || $("run").textContent === "Race");
  })
  .then(() => {
    $("run").click();
    return until(() => failed() || phase() === "done");
  })
  .then(() => new Promise(requestAnimationFrame))
  .then(() => {
    const [off, on] = [...document.querySelectorAll(".race .typed")].map((each) => each.textContent);
    const report = { agent: navigator.userAgent, off, on, message: $("message").textContent };
    return fetch("/report", { method: "POST", body: JSON.stringify(report) });
  });
"""
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
    assert report["on"] == report["off"]
    assert_text(model, report["on"], DEFAULT)
