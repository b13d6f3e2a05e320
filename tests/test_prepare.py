"""data/prepare.py: what it writes, when it does nothing, and every way in which a text can be bad or out of reach.

The network is a server on 127.0.0.1. Nothing leaves the machine.
"""

import gzip
import http.server
import json
import os
import shutil
import subprocess
import threading
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepare
from helpers import ROOT, assert_one_line, contents, full_disk, ok, run, tree
from kvgpt.cli import run_main
from kvgpt.files import lock_folder
from kvgpt.training.data import load_dataset

SAMPLE = ROOT / "data" / "sample.txt"
CLOSED = "http://127.0.0.1:9"
TEXT = "Whan that Aprille, with his shoures soote,\r\nThe droghte of März\rhath\0 perced to the 😀\n\n " * 20
BODY = TEXT.encode()


@pytest.fixture
def call(monkeypatch, capsys, restored_signals):
    """call(*args, **constants): data/prepare.py in this process, without waits and with other values for constants."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def call(*args, **constants):
        monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, args)])
        for name, value in {"WAITS": (0, 0), **constants}.items():
            monkeypatch.setattr(prepare, name, value)
        try:
            code = run_main(prepare.main) or 0
        except SystemExit as error:
            code = error.code
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return call


@pytest.fixture
def old(data_dir, tmp_path):
    """A folder that holds data/sample.txt, prepared with --input."""
    return Path(shutil.copytree(data_dir, tmp_path / "old"))


@pytest.fixture
def text(tmp_path):
    """A file with TEXT in it."""
    (tmp_path / "in.txt").write_bytes(BODY)
    return tmp_path / "in.txt"


@pytest.fixture
def serve():
    """serve(*answers) -> (url, list of the paths asked for): a server that gives the answers in turn, then the last."""
    servers = []

    def start(*answers):
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                answers[min(len(asked), len(answers)) - 1](self)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/text", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(body=b"", length=None, status=200, **headers):
    """An answer for `serve`, which may promise more bytes than it sends."""

    def send(handler):
        handler.send_response(status)
        for name, value in {"Content_Length": length or len(body), **headers}.items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(body)

    return send


def assert_refused(result, folder, before, *words):
    """One line that has the words, nothing on stdout, and not a byte changed in the folder."""
    assert_one_line(result, *words)
    assert result.stdout == "" and tree(folder) == before


def assert_holds(folder, raw, source):
    """The folder holds the text `raw` (bytes), from `source`: three files as specified, and no other file."""
    files = contents(folder)
    assert set(files) == {"train.bin", "val.bin", "meta.json"}
    meta, text = json.loads(files["meta.json"]), raw.decode("utf-8-sig")
    ids = np.frombuffer(files["train.bin"] + files["val.bin"], "<u2")
    assert meta["chars"] == "".join(sorted(set(text))) and "".join(meta["chars"][i] for i in ids) == text
    assert len(files["train.bin"]) == len(text) * 9 // 10 * 2 and meta["source"] == str(source)
    hashes = {"text": raw, "chars": meta["chars"].encode(), "train": files["train.bin"], "val": files["val.bin"]}
    assert meta["sha256"] == {name: sha256(content).hexdigest() for name, content in hashes.items()}


# -- what is written ---------------------------------------------------------------------------------------------------


@given(st.text())
def test_encode_round_trips(text):
    chars, train, val = prepare.encode(text)
    assert list(chars) == sorted(set(text)) and train.dtype == val.dtype == np.dtype("<u2")
    assert "".join(chars[i] for i in [*train, *val]) == text and len(train) == len(text) * 9 // 10


@pytest.mark.parametrize(
    "raw",
    [BODY, b"\xef\xbb\xbf" + BODY, "".join(map(chr, range(0xE000, 0x1E000))).encode()],
    ids=["line ends and control characters", "byte order mark", "65,536 characters"],
)
def test_a_text_is_written_as_it_is(raw, call, text, old, tmp_path):
    text.write_bytes(raw)
    for folder in (old, tmp_path / "new" / "folder"):
        assert ok(call("--input", text, "--data_dir", folder)).stderr == ""
        assert_holds(folder, raw, text)


def test_a_second_run_works_only_if_it_must(call, text, tmp_path):
    """The path of the same file may be written in another way, and a changed file may keep its size and time."""
    flags = ["--input", text, "--data_dir", tmp_path / "data"]
    os.utime(text, (0, 0))
    assert "nothing to do" not in ok(call(*flags)).stdout
    flags[1] = os.path.relpath(text)
    assert "nothing to do" in ok(call(*flags)).stdout
    assert "nothing to do" not in ok(call(*flags, "--force")).stdout
    assert_holds(tmp_path / "data", BODY, text)
    text.write_bytes(BODY.swapcase())
    os.utime(text, (0, 0))
    ok(call(*flags))
    assert_holds(tmp_path / "data", BODY.swapcase(), text)


def test_hold_out_divides_the_training_text_and_never_reads_the_val_text(call, text, tmp_path):
    """But it keeps the ids, so a character that only the val text has stays in the vocabulary."""
    text.write_bytes(BODY * 9 + BODY.upper())
    ok(call("--input", text, "--data_dir", tmp_path))
    ok(call("--hold_out", "--data_dir", tmp_path))
    data, dev = (load_dataset(folder, block_size=8) for folder in (tmp_path, tmp_path / "dev"))
    assert dev.chars == data.chars and len(dev.train) == int(0.9 * len(data.train))
    assert [*dev.train, *dev.val] == [*data.train]


@pytest.mark.parametrize(
    "name, damage",
    [
        ("train.bin", lambda raw: raw[:500] + bytes([raw[500] ^ 1]) + raw[501:]),
        ("val.bin", None),
        ("meta.json", lambda raw: raw[: len(raw) // 2]),
        ("meta.json", lambda raw: raw.replace(b"xyz", b"xzy")),
        ("meta.json", lambda raw: raw.replace(b'"source"', b'"sauce"')),
    ],
    ids=["train flipped", "val missing", "meta cut", "characters swapped", "no source"],
)
def test_damage_is_noticed_and_redone(name, damage, call, old):
    before = contents(old)
    if damage:
        (old / name).write_bytes(damage(before[name]))
    else:
        (old / name).unlink()
    assert contents(old) != before
    ok(call("--input", SAMPLE, "--data_dir", old))
    assert contents(old) == before


# -- mistakes ----------------------------------------------------------------------------------------------------------

BAD = {
    "latin.txt": "caf\xe9 au lait\n".encode("latin-1"),
    "utf16.txt": "Every word\n".encode("utf-16"),
    "empty.txt": b"",
    "mark.txt": "\ufeff".encode(),
    "many.txt": "".join(map(chr, range(0xE000, 0x1E001))).encode(),
}


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--input latin.txt", ["latin.txt is not UTF-8 (byte 3"]),
        ("--input utf16.txt", ["utf16.txt is not UTF-8"]),
        ("--input empty.txt", ["empty.txt is empty"]),
        ("--input mark.txt", ["mark.txt is empty"]),
        ("--input many.txt", ["65,537 distinct characters"]),
        ("--input none.txt", ["none.txt: No such file"]),
        ("--input=", ["--input", "empty"]),
        ("--input in.txt --url http://127.0.0.1:9/", ["--url", "--input"]),
        ("--input in.txt --data_dir in.txt/below", ["in.txt"]),
        ("--input old/train.bin", ["old/train.bin", "another --data_dir"]),
        ("--hold_out --data_dir none", ["none", "run python data/prepare.py first"]),
        ("--url nonsense", ["nonsense"]),
        ("--url=", ["''"]),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(flags, words, call, text, old, tmp_path, monkeypatch):
    for name, raw in BAD.items():
        (tmp_path / name).write_bytes(raw)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_refused(call("--data_dir", "old", *flags.split()), tmp_path, before, *words)


@pytest.mark.parametrize("raw, limit", [(BODY, 1000), (BODY[:100], 200)], ids=["at the first file", "at the last file"])
def test_a_full_disk_leaves_the_older_files(raw, limit, text, old):
    text.write_bytes(raw)
    before = tree(old)
    result = run("data/prepare.py", "--input", text, "--data_dir", old, preexec_fn=full_disk(limit))
    assert_refused(result, old, before, "cannot write", old)


def test_one_process_at_a_time_writes_to_a_folder(call, text, old):
    before = tree(old)
    with lock_folder(old):
        result = call("--input", text, "--data_dir", old)
        assert_refused(result, old, before, old, "another process")


# -- downloads ---------------------------------------------------------------------------------------------------------


def test_a_url_is_asked_for_until_it_answers_and_again_only_if_it_must_be(call, serve, old):
    """If it is another one, or with --force."""
    url, asked = serve(answer(status=503), answer(BODY[:-500], len(BODY)), answer(BODY))
    for args, num_asked in (([url], 3), ([url], 3), ([url + "2"], 4), ([url + "2", "--force"], 5)):
        ok(call("--data_dir", old, "--url", *args))
        assert_holds(old, BODY, args[0])
        assert len(asked) == num_asked


@pytest.mark.parametrize(
    "reply, word, tries",
    [
        (answer(status=404), "404", 1),
        (answer(b"<p>Please sign in.</p>", Content_Type="text/html; charset=utf-8"), "HTML", 1),
        (answer("März".encode("latin-1")), "UTF-8", 1),
        (answer(status=500), "500", 3),
        (answer(BODY[:-500], len(BODY)), "", 3),
        (lambda handler: None, "", 3),
        (lambda handler: time.sleep(2), "timed out", 3),
    ],
    ids=["404", "HTML", "Latin-1", "500", "truncated", "no answer", "silent"],
)
def test_what_is_not_the_text_is_refused_after_as_many_tries_as_can_help(reply, word, tries, call, serve, old):
    url, asked = serve(reply)
    before = tree(old)
    result = call("--url", url, "--data_dir", old, TIMEOUT=(0.5, 0.5))
    *notes, last = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (1, "") and "Traceback" not in result.stderr
    assert url in last and word in last and len(asked) == tries and len(notes) == tries - 1
    assert tree(old) == before


def assert_stand_in(result, folder):
    """Exit code 0, a loud line, and data/sample.txt in the folder, under a name of its own."""
    assert result.returncode == 0 and "WARNING: COULD NOT DOWNLOAD TINY SHAKESPEARE" in result.stderr, result.stderr
    assert_holds(folder, SAMPLE.read_bytes(), prepare.STAND_IN)


def test_the_stand_in_is_used_until_the_corpus_can_be_had(call, serve, tmp_path):
    """And the corpus, once there, is kept."""
    url, asked = serve(answer(gzip.compress(BODY), Content_Encoding="gzip"))
    corpus = {"CORPUS_URL": url, "CORPUS_SHA256": sha256(BODY).hexdigest()}
    assert_stand_in(call("--data_dir", tmp_path, CORPUS_URL=CLOSED), tmp_path)
    assert call("--data_dir", tmp_path, **corpus).stderr == ""
    assert_holds(tmp_path, BODY, url)
    before = tree(tmp_path)
    assert "nothing to do" in call("--data_dir", tmp_path, **corpus).stdout and len(asked) == 1
    result = call("--data_dir", tmp_path, "--force", **corpus | {"CORPUS_URL": CLOSED})
    assert result.returncode == 1 and "nothing was changed" in result.stderr
    assert tree(tmp_path) == before


@pytest.mark.parametrize("reply", [answer(BODY[:-1] + b"!"), answer(BODY[:-1]), answer(status=404)])
def test_what_is_not_the_corpus_is_not_taken_for_it(reply, call, serve, tmp_path):
    """The figures of the README would be those of another text."""
    url, asked = serve(reply)
    result = call("--data_dir", tmp_path, CORPUS_URL=url, CORPUS_SHA256=sha256(BODY).hexdigest())
    assert_stand_in(result, tmp_path)
    assert len(asked) == 1
