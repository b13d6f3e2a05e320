"""The exported page in real browsers: Chromium in depth, and one run each in Firefox and WebKit.

visit.mjs uses the page in Chromium as a reader would and reports what it saw. Firefox and WebKit open a copy of the
page that drives itself and posts a report to the server. All text and numbers must match PyTorch and tests/oracles.py.
"""

import json
import os
import queue
import re
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

from helpers import ROOT, attend, ok, random_model, run, save_model
from kvgpt.decoding.decoder import Decoder
from kvgpt.decoding.ngrams import count_ngrams
from model import CharTokenizer, GPTConfig, Sampling, gumbel_noise, sample_token
from oracles import per_head_logits
from sample import verify

pytestmark = pytest.mark.slow

WIDE = "\U0001d54f"  # one character, two units of a JavaScript string
CHARS = "\n !,.:?<>&/ABCDEFGHROabcdefghijklmnopqrstuvwxyzé" + WIDE
CONTEXT = 64
CONFIG = GPTConfig(
    block_size=CONTEXT, vocab_size=len(CHARS), n_layer=2, n_head=4, n_kv_head=2, n_embd=32, bias=False,
    activation="swiglu", pos_emb="rope", qk_norm=True,
)  # fmt: skip
DEFAULT = dict(prompt="O Romeo, ", temperature=0.8, top_k=None, seed=5, max_new_tokens=None)  # of the form
JOBS = [
    DEFAULT,
    DEFAULT | dict(temperature=0, max_new_tokens=1000),  # past the end of the context
    DEFAULT | dict(prompt=f"é{WIDE}\n", temperature=0.7, top_k=5, seed=2**64 - 1),
    DEFAULT | dict(prompt="<b>&", temperature=1.3, seed=2**63 + 2**31 + 5),  # must not become markup
    DEFAULT | dict(prompt="a" * (CONTEXT - 1)),
    DEFAULT | dict(prompt="", temperature=2.5, top_k=1000, seed=0, max_new_tokens=12),
]


def ids_of(text):
    return [CHARS.index(char) for char in text]


def typed(job):
    return {name: "" if value is None else str(value) for name, value in job.items()}


# the run that the worker is asked about
PROMPT = ids_of("A cab, dad? ")
OTHER = [(i + 1) % len(CHARS) for i in PROMPT]  # the prompt of the mistake "another prompt"
T, STEPS, SAMPLING = len(PROMPT), 18, dict(temperature=1.0, seed=3)
COLUMN, POSITION, CHANGED = 7, 9, CHARS.index("z")
MISTAKES = ["never moves", "overwritten", "another prompt", "fed twice", "mask", "one too far"]
MARKED = 20  # the index of a character on the stage

# browser windows of laptops, and a projector
FOLDS = [(1280, 720, ""), (1280, 590, ""), (1366, 625, ""), (1280, 720, "?projector=on")]
# address: (length of its text, the chosen layer, head or mistake)
MOMENTS = {
    "?at=30&layer=2&head=3#step-1": (30, ["1", "2"]),
    "?at=30&layer=1&head=2&take=4#step-1": (30, ["0", "1"]),
    "?layer=2&change=12&to=q#step-3": (34, ["1", "0"]),
    "?layer=2&mistake=mask#step-4": (CONTEXT, ["mask", "1", "0"]),
}

READERS = {
    "still": {},
    "phone": dict(viewport=dict(width=390, height=844)),
    "small phone": dict(viewport=dict(width=320, height=640)),
    "large text": dict(textSize=200),
    "large text, phone": dict(textSize=200, viewport=dict(width=390, height=844)),
    "projector": dict(viewport=dict(width=1024, height=768)),
    "dark": dict(colorScheme="dark"),
    "forced colours": dict(forcedColors="active"),
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
    """N-grams of the model's own output, so that some guesses are right."""
    texts = model.generate(torch.arange(len(CHARS))[:, None], CONTEXT - 1, temperature=0.8, seed=0)
    return count_ngrams(texts.flatten(), len(CHARS), 1000)


@pytest.fixture(scope="module")
def server(model, ngrams, tmp_path_factory):
    """Serves `folder`, with the exported page in web/."""
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
    """What visit.mjs reports about the page."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not (chromium and shutil.which("node") and (ROOT / "web" / "node_modules" / "playwright-core").is_dir()):
        pytest.skip("needs Chromium (or CHROMIUM=/path/to/it), Node.js and npm ci in web")
    questions = dict(prompt=PROMPT, steps=STEPS, sampling=SAMPLING | dict(topK=None))
    questions |= dict(column=COLUMN, position=POSITION, changed=CHANGED, mistakes=MISTAKES)
    plan = dict(
        chromium=chromium,
        site=f"{server.address}/web/",
        jobs=[typed(job) for job in JOBS],
        mistyped="a#b€#",
        questions=questions,
        marked=MARKED,
        folds=FOLDS,
        moments=list(MOMENTS),
        readers=READERS,
    )
    command = ["node", Path(__file__).with_name("visit.mjs"), json.dumps(plan)]
    return json.loads(ok(subprocess.run(command, capture_output=True, encoding="utf-8", timeout=480)).stdout)


# -- the text ----------------------------------------------------------------------------------------------------------


def assert_text(model, text, job):
    """`text` is the prompt and PyTorch's continuation, without a cache."""
    sampling = dict(job)
    prompt, steps = sampling.pop("prompt") or "\n", sampling.pop("max_new_tokens") or CONTEXT
    assert text.startswith(prompt)
    ids = torch.tensor(ids_of(prompt))
    same, lines = verify(model, [ids], [ids_of(text)], steps, False, Sampling(**sampling), CharTokenizer(CHARS))
    assert same, (text, lines)


@pytest.mark.parametrize("i", range(len(JOBS)))
def test_the_text_is_pytorchs_and_every_row_is_counted(seen, model, i):
    """A step without the cache computes a row for each character of the text. With the cache it computes one."""
    what, begin = seen["jobs"][i], len(JOBS[i]["prompt"] or "\n")
    assert what["message"] == ""
    assert_text(model, what["text"], JOBS[i])
    new = len(what["text"]) - begin
    count = "1 character" if new == 1 else f"all {new} characters"
    assert f"The text is the same with and without the cache: {count}." in what["status"]
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
    torch.testing.assert_close(torch.tensor(got), logits.softmax(-1).float())


def test_the_probabilities_of_every_step_are_those_of_pytorch(seen, model, text):
    answers = seen["answers"]
    assert answers["on"] == text[T:]
    assert_probabilities(answers["probabilities"], logits_of(model, text)[T - 1 : -1])


def test_the_stage_draws_the_columns_and_the_attention_of_every_head(seen, model, text):
    """Keys and values are those in each Head's cache. Weights and mix are those of the newest query."""
    inputs = {}
    layers = [block.attn for block in model.transformer.h]
    hooks = [attn.register_forward_pre_hook(lambda attn, args: inputs.update({attn: args})) for attn in layers]
    fed = torch.tensor([text[:-1]])
    model(fed, pos=torch.arange(fed.size(1)))
    for hook in hooks:
        hook.remove()
    for attn, kept, attention in zip(layers, seen["answers"]["kept"], seen["answers"]["attention"], strict=True):
        x, rope, pos, *_ = inputs[attn]
        q = attn.project(x, rope)[0][:, :, -1:]
        for head, keys, values in zip(attn.heads, *kept, strict=True):
            torch.testing.assert_close(torch.tensor(keys), head.key_cache.flatten(), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(torch.tensor(values), head.value_cache.flatten(), atol=1e-4, rtol=1e-4)
        assert len(attention) == CONFIG.n_head
        for i, (weights, mix) in enumerate(attention):
            head = attn.heads[i * CONFIG.n_kv_head // CONFIG.n_head]
            out, expected = attend(head, q[:, i], pos[:, -1:])
            torch.testing.assert_close(torch.tensor(weights), expected.flatten(), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(torch.tensor(mix), out.flatten(), atol=1e-5, rtol=1e-4)


def without(model, text, column):
    """The logits after text[:-1] if the newest token may not see a column."""
    allowed = causal(len(text) - 1)
    allowed[-1, column] = False
    return logits_of(model, text[:-1], allowed=allowed)[-1]


def drawn_last(logits):
    """The token that the last step draws from different logits, with the same random numbers."""
    noise = gumbel_noise(SAMPLING["seed"], torch.tensor([0]), torch.arange(STEPS), len(CHARS))[0]
    return sample_token(logits[None], noise[-1:], Sampling(**SAMPLING)).item()


def test_without_a_column_the_prediction_is_that_of_a_masked_forward(seen, model, text):
    answer = seen["answers"]["taken"]
    assert answer["masked"] == COLUMN
    logits = without(model, text, COLUMN)
    assert_probabilities(answer["probabilities"], logits)
    assert answer["next"] == drawn_last(logits)


def test_the_column_that_is_taken_out_first_moves_the_prediction_most(seen, model, text):
    whole = logits_of(model, text)[-2].softmax(0)
    moved = [(without(model, text, i).softmax(0) - whole).abs().sum().item() / 2 for i in range(len(text) - 2)]
    answer = seen["answers"]["most"]
    assert answer["moved"] == pytest.approx(max(moved), abs=1e-5) and max(moved) > 0.01
    assert moved[answer["masked"]] == pytest.approx(max(moved), abs=1e-5)


def test_a_changed_character_changes_columns_to_the_right_only(seen, model, text):
    """In the first layer only its own column, because keys and values there depend on a single character."""
    answer = seen["answers"]["change"]
    changed = [*text[:POSITION], CHANGED, *text[POSITION + 1 : -1]]
    logits = logits_of(model, changed)[-1]
    assert_probabilities(answer["probabilities"], logits)
    assert answer["next"] == drawn_last(logits)
    first, second = answer["differences"][:2], answer["differences"][2:]
    for slot in first:
        assert [i for i, difference in enumerate(slot) if difference] == [POSITION]
    for slot in second:
        assert [i for i, difference in enumerate(slot) if difference] == list(range(POSITION, len(slot)))


def test_the_first_picture_is_pytorchs(server, seen, model):
    """The exporter computes it with ONNX Runtime and rounds it. The page draws the same when the model has arrived."""
    opening = json.loads((server.folder / "web" / "model.json").read_text(encoding="utf-8"))["opening"]
    ids, given = opening["ids"], opening["given"]
    prompt = torch.tensor([ids_of(DEFAULT["prompt"])])
    assert ids == model.generate(prompt, len(ids) - given, temperature=0.8, seed=5)[0].tolist()
    model(torch.tensor([ids[:-1]]), pos=torch.arange(len(ids) - 1))
    head = model.transformer.h[opening["layer"]].attn.heads[opening["head"] * CONFIG.n_kv_head // CONFIG.n_head]
    for name, cache in (("keys", head.key_cache), ("values", head.value_cache)):
        torch.testing.assert_close(torch.tensor(opening[name]), cache.flatten(), atol=1e-3, rtol=0)

    def assert_rounded(got, logits):
        torch.testing.assert_close(torch.tensor(got), logits.softmax(-1).float(), atol=2e-5, rtol=0)

    assert_rounded(opening["probabilities"], logits_of(model, ids)[given - 1 : -1])
    for column, taken in enumerate(opening["taken"]):
        assert_rounded(taken["probabilities"], without(model, ids, column))
    before, after = seen["opening"]
    assert before == after and before[0] == "".join(CHARS[id] for id in ids)


def test_guesses_give_the_same_text_in_as_many_forwards_as_the_decoder(seen, model, ngrams, text):
    guess = seen["answers"]["guess"]
    assert guess["ids"] == text
    decoder = Decoder(model, "ngram", ngrams)
    generation = decoder.stream(PROMPT, STEPS, **SAMPLING)
    list(generation)
    right, wrong = (sum(len(each[name]) for each in guess["rounds"]) for name in ("right", "wrong"))
    counted = (generation.forwards, generation.accepted, generation.offered)
    assert (len(guess["rounds"]), right, right + wrong) == counted
    assert right and wrong


def mistaken_logits(model, name, new):
    """The logits of every step of a mistake, by one forward without a cache. new: the tokens that are fed."""
    n = T + len(new)
    tokens, positions, allowed = [*PROMPT, *new], list(range(n)), causal(n)
    if name == "never moves":
        positions[T:] = [T] * len(new)
    elif name == "one too far":
        positions[T:] = range(T + 1, n + 1)
    elif name == "overwritten":
        allowed[T:, T:] = torch.eye(n - T) == 1
    elif name == "mask":
        for i in range(T, n):
            allowed[i, i - 1] = False
    elif name == "fed twice":
        tokens, positions, allowed = [*PROMPT, PROMPT[-1], *new], None, None
    elif name == "another prompt":
        first = logits_of(model, PROMPT)[-1:]
        return torch.cat((first, logits_of(model, [*OTHER, *new])[T:]))
    return logits_of(model, tokens, positions, allowed)[-1 - len(new) :]


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_gives_the_text_and_the_logits_that_the_mistake_computes(seen, model, text, name):
    wrong = seen["answers"]["mistakes"][name]
    logits = mistaken_logits(model, name, wrong["ids"][T:-1])
    noise = gumbel_noise(SAMPLING["seed"], torch.tensor([0]), torch.arange(STEPS), len(CHARS))[0]
    assert wrong["ids"] == text[:T] + sample_token(logits, noise, Sampling(**SAMPLING)).tolist()

    # compared with the right ones until the first wrong token
    right = logits_of(model, text)[T - 1 : -1]
    first = next((i for i, (a, b) in enumerate(zip(wrong["ids"], text)) if a != b), -1)
    compared = STEPS if first < 0 else first - T + 1
    off = (logits - right)[:compared].abs().amax(1)
    step = off.argmax().item() if first < 0 else first - T
    assert (wrong["first"], wrong["at"], wrong["should"]) == (first, T + step, text[T + step])
    assert wrong["largest"] == pytest.approx(off.max().item(), abs=1e-4)
    assert_probabilities(wrong["before"], right[step])
    assert_probabilities(wrong["after"], logits[step])


def test_a_mistake_shows_in_the_keys_and_values_by_its_cause(seen):
    """In the first layer, as you would see it when looking for the bug: which slots are wrong, in keys or in values."""

    def wrong(name):
        keys, values = seen["answers"]["mistakes"][name]["differences"][:2]
        return [[i for i, x in enumerate(each) if x > 1e-3] for each in (keys, values)]

    at = {name: answer["at"] for name, answer in seen["answers"]["mistakes"].items()}
    slots = {name: answer["slots"] for name, answer in seen["answers"]["mistakes"].items()}
    ids = {name: answer["ids"][: at[name]] for name, answer in seen["answers"]["mistakes"].items()}
    assert slots["mask"] == ids["mask"] and slots["fed twice"] == [*PROMPT, PROMPT[-1], *ids["fed twice"][T:]]
    assert slots["another prompt"] == [*OTHER, *ids["another prompt"][T:]]
    assert slots["overwritten"] == [*PROMPT, *ids["overwritten"][T:][-1:]]
    # only keys, because rotary positions do not touch values; "never moves" starts at the second new character
    assert wrong("one too far") == [list(range(T, at["one too far"])), []]
    assert wrong("never moves") == [list(range(T + 1, at["never moves"])), []]
    assert wrong("mask") == [[], []]
    keys, values = wrong("another prompt")
    assert keys == values == list(range(T))
    assert seen["answers"]["mistakes"]["overwritten"]["columns"] == min(at["overwritten"], T + 1)


def test_in_a_race_the_text_with_less_computing_time_steps(seen):
    side_by_side, racing, arrived = seen["answers"]["turns"]
    assert side_by_side == ["off"] and racing == ["on"] and arrived == ["off"]


# -- the page ----------------------------------------------------------------------------------------------------------


def percent(share):
    return f"{100 * share:.{1 if share < 0.0995 else 0}f}%"


def test_the_numbers_on_the_stage_are_pytorchs(seen, model):
    """For a character under the pointer, in the strip and in the text, and for the next one."""
    stage = seen["stage"]
    ids = ids_of(stage["unmarked"]["text"])
    probabilities = logits_of(model, ids).softmax(1)
    for what in stage["marked"]:
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
    assert all(f"gives it {share} of its attention" in what["about"] for what in stage["marked"])

    next_ones = stage["unmarked"]
    assert next_ones["name"] == "next" and next_ones["about"] == ""
    likeliest = probabilities[-2].topk(4)
    for share, item in zip(likeliest.values.tolist(), next_ones["next"]):
        assert percent(share) in item


def test_the_steps_of_the_lesson_answer(seen, model):
    stage = seen["stage"]
    assert "the prediction changes by" in stage["taken"][0] and "→" in stage["taken"][1]["next"][0]
    assert stage["clicked"].startswith("Without column 3, “R”") and "percentage points" in stage["clicked"]

    # entering a step prepares it: paused in the middle of the text, whatever was there before
    begin, new = len(DEFAULT["prompt"]), 17
    fed = begin + new - 1
    assert stage["unmarked"]["text"].startswith(stage["prepared"]["text"])
    for what in (stage["prepared"], stage["again"]):
        assert what["state"] == "paused" and len(what["text"]) == fed + 1
        assert what["ends"] == [f"{fed} computed", f"1 computed, {fed - 1} kept"]
        assert what["rows"] == [sum(range(begin, begin + new)), fed]
    assert len(stage["back"]["text"]) == fed - 1 and stage["back"]["rows"][1] == fed - 2

    second, in_second, first, in_first = stage["change"]
    position = int(first.partition("Character ")[2].split()[0]) - 1
    assert "only its own column changes" in first and in_first["ends"] == [f"{fed - 1} stay, 1 change"] * 2
    assert "exactly 0" in second and "You were right" in second
    assert in_second["ends"] == [f"{position} stay, {fed - position} change"] * 2
    text, changed = stage["unchanged"]["text"], stage["changeLast"]["text"]
    assert [b for a, b in zip(text[:-1], changed[:-1], strict=True) if a != b] == ["q"]
    assert stage["changeAbout"].split(". ")[1].startswith("You put it there")

    assert any("The first wrong character is number" in verdict for verdict, _ in stage["mistakes"].values())
    assert all("A logit is off by up to" in verdict for verdict, _ in stage["mistakes"].values())
    assert len({bug for _, bug in stage["mistakes"].values()}) == len(MISTAKES)
    assert all("# right: " in bug for _, bug in stage["mistakes"].values())
    right = "".join(char or "" for char in stage["right"])
    assert right == stage["unmarked"]["text"][begin:].replace("\n", "⏎")
    assert "The text is the same." in stage["guess"]
    *sizes, sharing, complete = stage["scale"]
    assert sizes == ["128 KiB", "1 GiB", "512 KiB"] and not complete
    assert "64 query heads" in sharing and "8 times as large" in sharing


def test_a_run_that_goes_back_computes_the_same_again(seen, text):
    whole, some = seen["answers"]["again"]
    assert [id for id, _ in whole] == [id for id, _ in some] == text[T:]
    assert [rows for _, rows in whole] == [T] + [1] * (STEPS - 1)


def test_nothing_moves_and_all_of_the_stage_is_above_the_fold(seen):
    first, *others = seen["stage"]["boxes"]
    assert all(boxes == first for boxes in others)
    heights = [height for _, height, _ in FOLDS for _ in range(4)]
    assert all(bottom <= height for bottom, height in zip(seen["folds"], heights, strict=True)), seen["folds"]


def test_no_label_moves_when_the_model_has_loaded(seen):
    loading, loaded = (dict(places) for places in seen["labels"])
    assert len(loading) > 4 and {name: loaded[name] for name in loading} == loading


def test_a_projector_shows_sixteen_columns_and_large_labels(seen):
    columns, *sizes = seen["projector"]
    assert columns == 16 and min(sizes) >= 18


def test_in_a_race_the_slower_text_stays_visible(seen):
    """The strip stays where the slower text is, so its lights are on while it computes. Nothing leads away from it."""
    lit = seen["lit"]
    assert lit and all(off and on and not next_step for off, on, next_step in lit)
    *clocks, why = seen["race"]["said"]
    assert len(clocks) == 2 and all(re.fullmatch(r"\d+\.\d s", clock) for clock in clocks)
    assert why.startswith("You guessed 40") and "fixed cost" in why


def test_a_new_prompt_takes_one_step_so_there_is_something_to_ask(seen):
    assert seen["past"]["edited"] == [False, False, False]
    assert seen["past"]["stepped"] == [False, False, False]


def test_a_mistake_in_the_form_does_not_break_the_lesson(seen, model):
    past = seen["past"]
    assert "Temperature is “abc”" in past["mistyped"]["message"] and past["mistyped"]["disabled"]
    assert past["mended"]["message"] == "" and past["mended"]["text"].startswith(DEFAULT["prompt"])
    assert '"#"' in past["unknown"]["message"] and past["unknown"]["text"] == past["mended"]["text"]
    assert past["reloaded"]["text"].startswith("A cab, ")


def test_the_third_step_answers_by_itself_and_the_text_follows_the_window(seen):
    assert "exactly 0" in seen["past"]["straight"] and "we may keep it" in seen["past"]["straight"]
    assert seen["past"]["scrolled"]


def test_back_returns_to_the_moment(seen):
    before, after, verdict = seen["past"]["back"]
    assert before == after and after[0] == "3" and verdict.startswith("Character ")


def test_a_click_on_an_early_character_pauses_the_run(seen):
    assert seen["turned"]["state"] == "paused" and seen["turned"]["about"].startswith("Character 1 is “D”.")


@pytest.mark.parametrize("i", range(len(MOMENTS)))
def test_the_address_holds_the_moment(seen, i):
    address, length, look = seen["moments"][i]
    wanted = list(MOMENTS)[i]
    assert (length, look) == MOMENTS[wanted]
    # the defaults of a step are not in the address
    assert set(address.split("#")[0].strip("?").split("&")) <= set(wanted.split("#")[0].strip("?").split("&"))
    for name in ("at=", "take=", "change=", "to=", "mistake="):
        assert (name in address) == (name in wanted)


def test_steps_pause_and_continue(seen):
    begin, whole = len(DEFAULT["prompt"]), seen["jobs"][0]
    assert [len(what["text"]) - begin for what in seen["steps"]] == [2, 3, 4]  # one by itself
    assert seen["steps"][2]["rows"] == [sum(range(begin, begin + 4)), begin + 3]
    paused = seen["paused"]
    assert begin + 5 < len(paused["text"]) < CONTEXT and whole["text"].startswith(paused["text"])
    assert paused["state"] == "paused" and paused["focus"] == "run"
    for key in ("text", "rows", "status"):
        assert seen["goneOn"][key] == seen["race"][key] == seen["afterRace"][key] == whole[key]


def test_another_prompt_leaves_nothing_of_the_previous_run(seen, model):
    edited = seen["edited"]
    assert_text(model, edited["text"], DEFAULT | dict(prompt="Dead Caesar", max_new_tokens=1))
    assert edited["rows"] == [len("Dead Caesar")] * 2
    assert_text(model, seen["afterEdit"]["text"], DEFAULT | dict(prompt="Dead Caesar"))


def test_a_mistake_in_the_form_is_named_and_nothing_is_generated(seen):
    what = seen["mistyped"]
    assert '"#", "€"' in what["message"] and what["focus"] == "prompt"
    assert what["text"] == seen["jobs"][-1]["text"]  # the previous run stays
    assert seen["mended"]["message"] == "" and seen["mended"]["text"] == seen["jobs"][0]["text"]


def test_a_keyboard_is_enough(seen, model):
    keyboard = seen["keyboard"]
    assert_text(model, keyboard["run"]["text"], DEFAULT | dict(prompt="Abe, "))
    assert keyboard["marked"]["about"].startswith("Character 3 is “e”.")
    assert keyboard["end"]["about"].startswith(f"Character {CONTEXT - 1} is")
    assert keyboard["taken"].startswith(f"Without column {CONTEXT - 4},")


def test_the_address_holds_the_run(seen):
    assert seen["linked"]["text"] == seen["jobs"][3]["text"]


@pytest.mark.parametrize("name", READERS)
def test_the_page_fits_and_is_visible_for_every_reader(seen, name):
    what = seen["readers"][name]
    assert what["width"] == READERS[name].get("viewport", dict(width=1280))["width"]
    assert len({*what["colours"]}) == 2 and len({*what["page"]}) == 2
    # the newest character is lit in both rows, the one before it only without the cache
    (off, on), (off_before, kept) = what["newest"], what["before"]
    assert off == off_before and len({off, on, kept}) == 3 and what["ring"] == on


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
