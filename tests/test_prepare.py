"""data/prepare.py: what it writes, when it does nothing, and every way in which text can be bad or out of reach.

The network is a server on 127.0.0.1. Nothing leaves the machine.
"""

import gzip
import http.server
import io
import json
import shutil
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import prepare
from extras.bpe import train_bpe
from helpers import SAMPLE, assert_one_line, bpe, contents, linux, ok, run, tree
from train import load_dataset

CLOSED = "http://127.0.0.1:9"
BODY = "Whan that Aprille, with his shoures soote,\r\nThe droghte of März\rhath\0 perced to the 😀\n\n ".encode() * 20


@pytest.fixture
def call(monkeypatch, capsys):
    """call(*args, **constants): data/prepare.py in this process, with other values for constants."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its own

    def call(*args, **constants):
        monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, args)])
        for name, value in constants.items():
            monkeypatch.setattr(prepare, name, value)
        try:
            code = prepare.run_main(prepare.main) or 0
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
    """A file with BODY in it."""
    (tmp_path / "in.txt").write_bytes(BODY)
    return tmp_path / "in.txt"


class Handler(http.server.BaseHTTPRequestHandler):
    """Always gives the server's `answer`: a status, headers and a body."""

    def do_GET(self):
        self.server.asked.append(self.path)
        status, headers, body = self.server.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """A server whose `answer` is BODY. Its `url`, and in `asked` the paths that it was asked for."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.url, server.asked, server.answer = f"http://127.0.0.1:{server.server_port}/text", [], (200, {}, BODY)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def assert_refused(result, folder, before, *words):
    """One line that has the words, nothing on stdout, and not a byte changed in the folder."""
    assert_one_line(result, *words)
    assert result.stdout == "" and tree(folder) == before


def assert_holds(folder, raw, source):
    """The folder holds the text `raw` (bytes), from `source`: three files as specified, and no other file."""
    files = contents(folder)
    assert set(files) == {"train.bin", "val.bin", "meta.json"}
    meta, text = json.loads(files["meta.json"]), io.StringIO(raw.decode("utf-8-sig"), newline=None).read()
    ids = np.frombuffer(files["train.bin"] + files["val.bin"], "<u2")
    assert meta["chars"] == "".join(sorted(set(text))) and "".join(meta["chars"][i] for i in ids) == text
    assert len(files["train.bin"]) == len(text) * 9 // 10 * 2 and meta["source"] == str(source)
    hashes = {"text": raw, "chars": meta["chars"].encode(), "train": files["train.bin"], "val": files["val.bin"]}
    assert meta["sha256"] == {name: sha256(content).hexdigest() for name, content in hashes.items()}


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["as it is", "byte order mark"])
def test_a_text_is_written_as_it_is(mark, call, text, old, tmp_path):
    text.write_bytes(mark + BODY)
    for folder in (old, tmp_path / "new" / "folder"):
        assert ok(call("--input", text, "--data_dir", folder)).stderr == ""
        assert_holds(folder, mark + BODY, text)


@pytest.mark.parametrize("more", [[], ["--tokenizer", "bpe", "--vocab_size", 260]], ids=["characters", "bpe"])
def test_the_size_of_a_piece_makes_no_difference(more, call, text, tmp_path):
    """A piece may end within a character or a line end. Several files are one text."""
    (tmp_path / "b.txt").write_bytes(BODY[:99])
    expected = None
    for size in (1, 7, prepare.PIECE):
        ok(call("--input", text, tmp_path / "b.txt", "--data_dir", tmp_path / "data", *more, PIECE=size))
        expected = expected or contents(tmp_path / "data")
        assert contents(tmp_path / "data") == expected
    if not more:
        assert_holds(tmp_path / "data", BODY + BODY[:99], f"{text}, {tmp_path / 'b.txt'}")


def test_hold_out_divides_the_training_text_and_never_reads_the_val_text(call, text, tmp_path):
    """But it keeps the ids, so a character that only the val text has stays in the vocabulary."""
    text.write_bytes(BODY * 9 + BODY.upper())
    ok(call("--input", text, "--data_dir", tmp_path))
    ok(call("--hold_out", "--data_dir", tmp_path))
    data, dev = (load_dataset(folder, block_size=8) for folder in (tmp_path, tmp_path / "dev"))
    assert dev.tokenizer.state_dict() == data.tokenizer.state_dict() and len(dev.train) == int(0.9 * len(data.train))
    assert [*dev.train, *dev.val] == [*data.train]


def test_the_ids_of_a_large_vocabulary_take_four_bytes(call, text, tmp_path):
    characters = "".join(map(chr, range(0xE000, 0x1E001)))  # 65,537
    for n, dtype in ((65536, "<u2"), (65537, "<u4")):
        text.write_text(characters[:n], encoding="utf-8")
        ok(call("--input", text, "--data_dir", tmp_path))
        data = load_dataset(tmp_path, block_size=1)
        assert [*data.train, *data.val] == [*range(n)] and (tmp_path / "val.bin").stat().st_size % len(data.val) == 0
        assert data.train.dtype == np.dtype(dtype)


# -- tokens that are not characters ------------------------------------------------------------------------------------


def assert_tokens(folder, raw, tokenizer):
    """The folder holds the tokens that a tokenizers.Tokenizer makes of the two parts of the text."""
    meta, data, text = (
        json.loads((folder / "meta.json").read_bytes()),
        load_dataset(folder, 1),
        io.StringIO(raw.decode(), newline=None).read(),
    )
    parts = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]
    assert [data.train.tolist(), data.val.tolist()] == [tokenizer.encode(part).ids for part in parts]
    assert data.val_bytes == len(parts[1].encode()) and meta["tokenizer"] == tokenizer.to_str()
    assert meta["sha256"]["tokenizer"] == sha256(meta["tokenizer"].encode()).hexdigest()


def test_a_bpe_is_learned_from_the_part_for_training(call, tmp_path):
    """The val text stays unseen, and a run on characters is compared on the same val text."""
    ok(call("--input", SAMPLE, "--tokenizer", "bpe", "--vocab_size", 400, "--data_dir", tmp_path))
    raw = SAMPLE.read_bytes()
    text = raw.decode()
    assert_tokens(tmp_path, raw, Tokenizer.from_str(train_bpe([text[: int(0.9 * len(text))]], 400)))


def test_a_folder_or_a_file_brings_its_tokenizer(call, text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe(), encoding="utf-8")
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        ok(call("--input", text, "--tokenizer", name, "--data_dir", tmp_path / "data"))
        assert_tokens(tmp_path / "data", BODY, Tokenizer.from_str(bpe()))


def test_the_same_text_is_prepared_again_for_other_tokens(call, server, tmp_path):
    flags = ["--url", server.url, "--data_dir", tmp_path]
    learned = [["--tokenizer", "bpe", "--vocab_size", size] for size in (260, 261)]
    for num_times, more in enumerate(([], *learned, []), start=1):
        for _ in range(2):
            ok(call(*flags, *more))
            assert len(server.asked) == num_times
    server.answer = 404, {}, b""
    before = tree(tmp_path)
    assert_refused(call(*flags, "--tokenizer", "bpe"), tmp_path, before, "404", "nothing was changed")


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, raw, words",
    [
        ("--input in.txt", "caf\xe9 au lait\n".encode("latin-1"), ["in.txt is not UTF-8 (byte 3"]),
        ("--input in.txt", b"", ["in.txt is empty"]),
        ("--input none.txt", BODY, ["none.txt: No such file"]),
        ("in.txt", BODY, ["unrecognized arguments: in.txt; to prepare your own text, type --input FILE"]),
        ("--hold_out --data_dir none", BODY, ["none", "run python data/prepare.py first"]),
        ("--input in.txt --tokenizer bpe --vocab_size 9999", BODY, ["--vocab_size 9999 is too large", "at most"]),
        ("--input in.txt --tokenizer bpe --vocab_size 255", BODY, ["--vocab_size", "255"]),
        ("--input in.txt --vocab_size 300", BODY, ["--vocab_size needs --tokenizer bpe"]),
        ("--input in.txt --tokenizer none", BODY, ["there is no tokenizer at none"]),
        ("--input in.txt --tokenizer old", BODY, ["there is no tokenizer at old", "tokenizer.json"]),
        ("--input in.txt --tokenizer none.pkl", BODY, ["prepare.py: there is no none.pkl"]),
        ("--input in.txt --tokenizer gpt2", BODY, ["no tokenizer at gpt2", "hf download openai-community/gpt2"]),
        ("--input in.txt --tokenizer in.txt", BODY, ["tokenizer cannot be read"]),
        ("--hold_out --tokenizer bpe", BODY, ["leave out --tokenizer"]),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(flags, raw, words, call, text, old, tmp_path, monkeypatch):
    text.write_bytes(raw)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_refused(call("--data_dir", "old", *flags.split()), tmp_path, before, *words)


@linux
def test_a_pipe_is_one_line(tmp_path):
    """We read the text twice."""
    result = run("data/prepare.py", "--input", "/dev/stdin", "--data_dir", tmp_path / "mine", input="text")
    assert_one_line(result, "/dev/stdin is a pipe", "write it to a file first", code=1)


def test_a_broken_requests_stops_only_a_download(call, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "requests", None)  # importing it raises an ImportError
    ok(call("--input", text, "--data_dir", tmp_path / "mine"))
    assert_one_line(call("--url", CLOSED, "--data_dir", tmp_path / "mine"), f"cannot download {CLOSED}", "requests")


# -- downloads ---------------------------------------------------------------------------------------------------------


def test_a_url_is_asked_for_again_only_if_it_must_be(call, server, old):
    """If the URL differs, if a file is damaged, or with --force."""

    def assert_asked(num_times, *flags):
        ok(call("--data_dir", old, "--url", *flags))
        assert_holds(old, BODY, flags[0])
        assert len(server.asked) == num_times

    assert_asked(1, server.url)
    assert_asked(1, server.url)
    assert_asked(2, server.url, "--force")
    assert_asked(3, server.url + "2")
    for num_times, name in enumerate(("train.bin", "val.bin", "meta.json"), start=4):
        raw = (old / name).read_bytes()
        (old / name).write_bytes(raw[:50] + bytes([raw[50] ^ 1]) + raw[51:])
        assert_asked(num_times, server.url + "2")


@pytest.mark.parametrize(
    "status, headers, word",
    [
        (404, {}, "404"),
        (200, {"Content-Type": "text/html; charset=utf-8"}, "HTML"),
        (200, {"Content-Length": len(BODY) + 500}, "IncompleteRead"),
    ],
)
def test_what_is_not_the_text_is_refused_in_one_line(status, headers, word, call, server, old):
    server.answer = status, headers, BODY
    before = tree(old)
    assert_refused(call("--url", server.url, "--data_dir", old), old, before, server.url, word)


def test_the_stand_in_is_used_until_the_corpus_can_be_had(call, server, tmp_path):
    """And the corpus, once there, is kept."""
    server.answer = 200, {"Content-Encoding": "gzip"}, gzip.compress(BODY)
    corpus = {"CORPUS_URL": server.url, "CORPUS_SHA256": sha256(BODY).hexdigest()}
    result = ok(call("--data_dir", tmp_path, CORPUS_URL=CLOSED))
    assert "WARNING: COULD NOT DOWNLOAD TINY SHAKESPEARE" in result.stderr
    assert_holds(tmp_path, SAMPLE.read_bytes(), prepare.STAND_IN)
    assert call("--data_dir", tmp_path, **corpus).stderr == ""
    assert_holds(tmp_path, BODY, server.url)
    before = tree(tmp_path)
    assert "nothing to do" in call("--data_dir", tmp_path, **corpus).stdout and len(server.asked) == 1
    result = call("--data_dir", tmp_path, "--force", **corpus | {"CORPUS_URL": CLOSED})
    assert_refused(result, tmp_path, before, "nothing was changed")


def test_what_is_not_the_corpus_is_not_taken_for_it(call, server, tmp_path):
    """Otherwise the figures in the README would be for the wrong text."""
    server.answer = 200, {}, BODY[:-1] + b"!"
    result = ok(call("--data_dir", tmp_path, CORPUS_URL=server.url, CORPUS_SHA256=sha256(BODY).hexdigest()))
    assert "is not tiny Shakespeare" in result.stderr
    assert_holds(tmp_path, SAMPLE.read_bytes(), prepare.STAND_IN)
