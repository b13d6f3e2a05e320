"""data/prepare.py: what it writes, when it does nothing, and every way in which a text can be bad or out of reach.

The network is a server on 127.0.0.1. Nothing leaves the machine.
"""

import gzip
import http.server
import json
import shutil
import subprocess
import threading
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
def call(monkeypatch, capsys):
    """call(*args, **constants): data/prepare.py in this process, with other values for constants."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("kvgpt.cli.handle_signals", lambda handler: None)  # pytest keeps its own

    def call(*args, **constants):
        monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, args)])
        for name, value in constants.items():
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
    """serve(answer) -> (url, list of the paths asked for): a server that always gives this answer."""
    servers = []

    def start(answer):
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                answer(self)

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
    [BODY, b"\xef\xbb\xbf" + BODY],
    ids=["line ends and control characters", "byte order mark"],
)
def test_a_text_is_written_as_it_is(raw, call, text, old, tmp_path):
    text.write_bytes(raw)
    for folder in (old, tmp_path / "new" / "folder"):
        assert ok(call("--input", text, "--data_dir", folder)).stderr == ""
        assert_holds(folder, raw, text)


def test_hold_out_divides_the_training_text_and_never_reads_the_val_text(call, text, tmp_path):
    """But it keeps the ids, so a character that only the val text has stays in the vocabulary."""
    text.write_bytes(BODY * 9 + BODY.upper())
    ok(call("--input", text, "--data_dir", tmp_path))
    ok(call("--hold_out", "--data_dir", tmp_path))
    data, dev = (load_dataset(folder, block_size=8) for folder in (tmp_path, tmp_path / "dev"))
    assert dev.chars == data.chars and len(dev.train) == int(0.9 * len(data.train))
    assert [*dev.train, *dev.val] == [*data.train]


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, raw, words",
    [
        ("--input in.txt", "caf\xe9 au lait\n".encode("latin-1"), ["in.txt is not UTF-8 (byte 3"]),
        ("--input in.txt", b"", ["in.txt is empty"]),
        ("--input in.txt", "".join(map(chr, range(0xE000, 0x1E001))).encode(), ["65,537 distinct characters"]),
        ("--input none.txt", BODY, ["No such file", "none.txt"]),
        ("--hold_out --data_dir none", BODY, ["none", "run python data/prepare.py first"]),
        ("--url nonsense", BODY, ["nonsense"]),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(flags, raw, words, call, text, old, tmp_path, monkeypatch):
    text.write_bytes(raw)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_refused(call("--data_dir", "old", *flags.split()), tmp_path, before, *words)


def test_a_full_disk_leaves_the_older_files(text, old):
    text.write_bytes(BODY[:100])
    before = tree(old)
    limit = full_disk(200)  # of the three files only meta.json, the last one, is longer
    result = run("data/prepare.py", "--input", text, "--data_dir", old, preexec_fn=limit)
    assert_refused(result, old, before, "File too large", old)


def test_one_process_at_a_time_writes_to_a_folder(call, text, old):
    before = tree(old)
    with lock_folder(old):
        result = call("--input", text, "--data_dir", old)
        assert_refused(result, old, before, old, "another process")


# -- downloads ---------------------------------------------------------------------------------------------------------


def test_a_url_is_asked_for_again_only_if_it_must_be(call, serve, old):
    """If it is another one, if a file is damaged, or with --force."""
    url, asked = serve(answer(BODY))

    def assert_asked(num_times, *flags):
        ok(call("--data_dir", old, "--url", *flags))
        assert_holds(old, BODY, flags[0])
        assert len(asked) == num_times

    assert_asked(1, url)
    assert_asked(1, url)
    assert_asked(2, url, "--force")
    assert_asked(3, url + "2")
    for name in ("train.bin", "val.bin", "meta.json"):
        raw = (old / name).read_bytes()
        (old / name).write_bytes(raw[:50] + bytes([raw[50] ^ 1]) + raw[51:])
        assert_asked(len(asked) + 1, url + "2")


@pytest.mark.parametrize(
    "reply, word",
    [
        (answer(status=404), "404"),
        (answer(b"<p>Please sign in.</p>", Content_Type="text/html; charset=utf-8"), "HTML"),
        (answer("März".encode("latin-1")), "UTF-8"),
        (answer(BODY[:-500], len(BODY)), "IncompleteRead"),
        (lambda handler: None, "closed connection"),
    ],
    ids=["404", "HTML", "Latin-1", "truncated", "no answer"],
)
def test_what_is_not_the_text_is_refused_in_one_line(reply, word, call, serve, old):
    url, _ = serve(reply)
    before = tree(old)
    assert_refused(call("--url", url, "--data_dir", old), old, before, url, word)


def test_the_stand_in_is_used_until_the_corpus_can_be_had(call, serve, tmp_path):
    """And the corpus, once there, is kept."""
    url, asked = serve(answer(gzip.compress(BODY), Content_Encoding="gzip"))
    corpus = {"CORPUS_URL": url, "CORPUS_SHA256": sha256(BODY).hexdigest()}
    result = ok(call("--data_dir", tmp_path, CORPUS_URL=CLOSED))
    assert "WARNING: COULD NOT DOWNLOAD TINY SHAKESPEARE" in result.stderr
    assert_holds(tmp_path, SAMPLE.read_bytes(), prepare.STAND_IN)
    assert call("--data_dir", tmp_path, **corpus).stderr == ""
    assert_holds(tmp_path, BODY, url)
    before = tree(tmp_path)
    assert "nothing to do" in call("--data_dir", tmp_path, **corpus).stdout and len(asked) == 1
    result = call("--data_dir", tmp_path, "--force", **corpus | {"CORPUS_URL": CLOSED})
    assert_refused(result, tmp_path, before, "nothing was changed")


def test_what_is_not_the_corpus_is_not_taken_for_it(call, serve, tmp_path):
    """The figures of the README would be those of another text."""
    url, _ = serve(answer(BODY[:-1] + b"!"))
    result = ok(call("--data_dir", tmp_path, CORPUS_URL=url, CORPUS_SHA256=sha256(BODY).hexdigest()))
    assert "are not tiny Shakespeare" in result.stderr
    assert_holds(tmp_path, SAMPLE.read_bytes(), prepare.STAND_IN)
