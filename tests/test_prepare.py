"""data/prepare.py: the layout of what it writes, when it redoes it, and every way in which a text can be bad or absent.

The command line runs in processes of its own, the network is a real HTTP server on 127.0.0.1; nothing leaves the
machine. Where the three tries are not the point, `tweaked` runs the script with one, to save their waits.
"""

import gzip
import http.server
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

import prepare
from helpers import ROOT, assert_one_line, linux, ok, run, unix
from kvgpt.files import lock_folder
from kvgpt.training.data import load_dataset, write_prepared

SAMPLE = ROOT / "data" / "sample.txt"
CLOSED = "http://127.0.0.1:9"
BODY = "Whan that Aprille, with his shoures soote,\nThe droghte of März hath perced to the roote\n".encode() * 20
HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Only 127.0.0.1 can be reached: all else goes through a proxy at a closed port."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, CLOSED)
        monkeypatch.setenv(name.upper(), CLOSED)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def old(data_dir, tmp_path):
    """A folder that holds data/sample.txt, prepared with --input."""
    return Path(shutil.copytree(data_dir, tmp_path / "old"))


@pytest.fixture
def serve():
    """serve(*answers) -> (url, the times of its requests): a server that gives the answers in turn, then the last."""
    servers = []

    def start(*answers):
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(time.monotonic())
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


def answer(body=b"", status=200, stall=0, **headers):
    """An answer for `serve`; a header of None is left out, `stall` seconds pass before the connection closes."""

    def send(handler):
        handler.send_response(status)
        for name, value in {"Content_Length": len(body), **headers}.items():
            if value is not None:
                handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(body)
        handler.wfile.flush()
        time.sleep(stall)

    return send


TRUNCATED = answer(BODY[:-500], Content_Length=len(BODY))


def tweaked(*args, env=None, **constants):
    """Run data/prepare.py with some of its constants changed, and one try unless told otherwise."""
    code = (
        "import sys; sys.path.insert(0, 'data'); import prepare; sys.argv[0] = 'prepare.py'\n"
        f"vars(prepare).update({ {'TRIES': 1, **constants}!r})\nprepare.main()"
    )
    return run("-c", code, *args, env=env)


def prepared(*args, **kwargs):
    return ok(run("data/prepare.py", *args, **kwargs))


def corpus(url, body=BODY):
    """Constants that make `body`, at `url`, the corpus."""
    return {"CORPUS_URL": url, "CORPUS_BYTES": len(body), "CORPUS_SHA256": sha256(body).hexdigest()}


def snapshot(folder):
    """Every file below the folder but locks: its bytes and the time of its last change."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def contents(folder):
    return {str(name): content for name, (content, _) in snapshot(folder).items()}


def assert_holds(folder, raw, source):
    """The folder holds the text `raw` (bytes), from `source`: three files as specified, and no other file."""
    files = contents(folder)
    assert set(files) == {"train.bin", "val.bin", "meta.json"}
    meta, text = json.loads(files["meta.json"]), raw.decode("utf-8")
    train, val = (np.frombuffer(files[f"{split}.bin"], "<u2") for split in ("train", "val"))
    assert "".join(meta["chars"]) == "".join(sorted(set(text)))
    assert "".join(meta["chars"][i] for i in np.concatenate([train, val])) == text
    assert len(train) == len(text) * 9 // 10
    assert source in (meta["source"], None)
    hashes = {"text": raw, "chars": meta["chars"].encode(), "train": files["train.bin"], "val": files["val.bin"]}
    assert meta["sha256"] == {name: sha256(content).hexdigest() for name, content in hashes.items()}


# What is written


@given(st.text())
def test_encode_round_trips(text):
    """A lost, shifted or doubled character; a split that is not 90/10; ids that are not those of the sorted characters;
    characters outside the BMP cut in two."""
    chars, train, val = prepare.encode(text)
    assert list(chars) == sorted(set(text))
    assert train.dtype == val.dtype == np.dtype("<u2")
    assert len(train) == len(text) * 9 // 10
    assert "".join(chars[i] for i in [*train, *val]) == text
    assert json.loads(json.dumps(chars)) == chars


def test_input_of_a_real_text(tmp_path):
    """Wrong layout, metadata or hashes for a text as the kit is for; a stray file; noise on stderr."""
    result = prepared("--input", SAMPLE, "--data_dir", tmp_path / "new" / "folder")
    assert_holds(tmp_path / "new" / "folder", SAMPLE.read_bytes(), os.path.abspath(SAMPLE))
    assert result.stderr == "" and result.stdout


def test_the_files_are_little_endian_and_take_65536_characters(tmp_path):
    """Ids in the machine's own or in big-endian order, as int16, or one short of the largest that fits."""
    text = "".join(chr(c) for c in range(0x10000 + 0x800) if not 0xD800 <= c < 0xE000)
    (tmp_path / "in.txt").write_bytes(text.encode())
    prepared("--input", tmp_path / "in.txt", "--data_dir", tmp_path / "out")
    written = b"".join((tmp_path / "out" / f"{split}.bin").read_bytes() for split in ("train", "val"))
    assert written == b"".join(bytes([i % 256, i // 256]) for i in range(65536))


@unix
def test_a_held_out_part_never_replaces_the_text(old):
    before = contents(old)
    (old / "dev").symlink_to(".")
    assert_one_line(run("data/hold_out.py", "--data_dir", old), old / "dev", "remove the link")
    (old / "dev").unlink()
    assert contents(old) == before


def test_hold_out_divides_the_training_text_and_never_reads_the_val_text(old):
    """A run on data/dev evaluates on characters that it does not train on, and the val text is in neither split."""
    ok(run("data/hold_out.py", "--data_dir", old))
    whole, train, val = ((old / name).read_bytes() for name in ("train.bin", "dev/train.bin", "dev/val.bin"))
    assert train + val == whole and len(train) == int(0.9 * (len(whole) // 2)) * 2
    meta, dev = (json.loads((folder / "meta.json").read_text(encoding="utf-8")) for folder in (old, old / "dev"))
    assert dev["chars"] == meta["chars"]
    data = load_dataset(old / "dev", block_size=8)
    assert (data.train.tobytes(), data.val.tobytes()) == (train, val)
    assert prepare.prepared_text(old / "dev")[0] == f"the training text in {old}"
    assert_one_line(run("data/hold_out.py", "--data_dir", old / "nowhere"), "data/prepare.py")


def test_line_ends_and_control_characters_are_kept(tmp_path):
    """Text mode, which turns CRLF and CR into LF, or a strip() of the ends."""
    raw = " \r\none\rtwo\r\n\0\x85\u2028\U0001f600 three\ufefffour\n\n ".encode() * 3
    (tmp_path / "in.txt").write_bytes(raw)
    prepared("--input", tmp_path / "in.txt", "--data_dir", tmp_path / "out")
    assert_holds(tmp_path / "out", raw, None)


def test_without_data_dir_the_files_go_beside_the_script(tmp_path):
    """Files written to the current folder, where train.py does not look."""
    shutil.copytree(ROOT / "kvgpt", tmp_path / "kit" / "kvgpt", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kit" / "data").mkdir()
    shutil.copy(ROOT / "data" / "prepare.py", tmp_path / "kit" / "data")
    (tmp_path / "in.txt").write_bytes(BODY)
    ok(run(tmp_path / "kit" / "data" / "prepare.py", "--input", tmp_path / "in.txt", cwd=tmp_path))
    assert set(contents(tmp_path / "kit" / "data")) == {"prepare.py", "train.bin", "val.bin", "meta.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"kit", "in.txt"}


@linux
def test_a_file_name_that_is_not_utf8(tmp_path):
    """A traceback from printing the name of a file from a Latin-1 system."""
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_bytes(BODY)
    prepared("--input", path, "--data_dir", tmp_path / "out")
    assert_holds(tmp_path / "out", BODY, None)


# A second run


@pytest.mark.parametrize("path", [SAMPLE, SAMPLE.relative_to(ROOT)], ids=["same", "relative"])
def test_a_second_run_does_nothing_but_say_so(path, old):
    """Work done again, or the same file taken for another because its path is written differently."""
    before = snapshot(old)
    result = prepared("--input", path, "--data_dir", old)
    assert snapshot(old) == before
    assert "nothing to do" in result.stdout and result.stderr == ""


def test_force_redoes(old):
    """--force ignored."""
    for path in old.iterdir():
        os.utime(path, (0, 0))
    before = contents(old)
    prepared("--input", SAMPLE, "--data_dir", old, "--force")
    assert contents(old) == before
    assert all(mtime for _, mtime in snapshot(old).values())


def test_a_changed_text_is_noticed(tmp_path):
    """The name of the input compared, not what is in it (the change keeps its size and its time)."""
    path, out = tmp_path / "in.txt", tmp_path / "out"
    for raw in (BODY, BODY.swapcase()):
        path.write_bytes(raw)
        os.utime(path, (0, 0))
        prepared("--input", path, "--data_dir", out)
        assert_holds(out, raw, os.path.abspath(path))


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_an_input_that_would_be_overwritten_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(BODY)
    result = run("data/prepare.py", "--input", tmp_path / name, "--data_dir", tmp_path)
    assert_one_line(result, tmp_path / name, "--data_dir")
    assert contents(tmp_path) == {name: BODY}


def test_a_text_with_null_characters_is_prepared_once(tmp_path):
    """An array of NumPy's strings drops them."""
    path, out = tmp_path / "in.txt", tmp_path / "out"
    path.write_bytes(b"a\0b\0\0" * 20)
    prepared("--input", path, "--data_dir", out)
    assert "nothing to do" in prepared("--input", path, "--data_dir", out).stdout


def test_another_input_with_the_old_one_there(old, tmp_path):
    """Whole files of another source taken for those asked for."""
    (tmp_path / "in.txt").write_bytes(BODY)
    prepared("--input", tmp_path / "in.txt", "--data_dir", old)
    assert_holds(old, BODY, os.path.abspath(tmp_path / "in.txt"))


def edit_meta(**changes):
    """Change keys of meta.json; None removes one."""

    def edit(raw):
        meta = {**json.loads(raw), **changes}
        return json.dumps({key: value for key, value in meta.items() if value is not None}).encode()

    return edit


@pytest.mark.parametrize(
    "name, damage",
    [
        pytest.param("train.bin", lambda raw: raw[:500] + bytes([raw[500] ^ 1]) + raw[501:], id="train flipped"),
        pytest.param("train.bin", None, id="train missing"),
        pytest.param("val.bin", lambda raw: raw[:-2], id="val cut"),
        pytest.param("val.bin", lambda raw: raw + b"\0\0", id="val longer"),
        pytest.param("val.bin", None, id="val missing"),
        pytest.param("meta.json", None, id="meta missing"),
        pytest.param("meta.json", lambda raw: b"", id="meta empty"),
        pytest.param("meta.json", lambda raw: raw[: len(raw) // 2], id="meta cut"),
        pytest.param("meta.json", lambda raw: b"\xff" + raw, id="meta not UTF-8"),
        pytest.param("meta.json", lambda raw: b"[]", id="meta a list"),
        pytest.param("meta.json", lambda raw: b"null", id="meta null"),
        pytest.param("meta.json", lambda raw: b"[" * 100_000, id="meta nested too deep"),
        pytest.param("meta.json", edit_meta(sha256=None), id="meta without hashes"),
        pytest.param("meta.json", edit_meta(sha256="train val text"), id="meta with a text for hashes"),
        pytest.param("meta.json", edit_meta(source=None), id="meta without source"),
        pytest.param("meta.json", edit_meta(chars=None), id="meta without chars"),
        pytest.param("meta.json", lambda raw: raw.replace(b"xyz", b"xzy"), id="meta with chars swapped"),
        pytest.param("meta.json", lambda raw: raw.replace(b"xyz", b"xy~"), id="meta with another char"),
        pytest.param("meta.json", lambda raw: raw.replace(b"xyz", b"xy"), id="meta with chars cut"),
    ],
)
def test_damage_is_noticed_and_redone(name, damage, old):
    """A damaged or missing file taken for whole, or a traceback from reading it."""
    before = contents(old)
    if damage:
        (old / name).write_bytes(damage(before[name]))
        assert contents(old) != before
    else:
        (old / name).unlink()
    prepared("--input", SAMPLE, "--data_dir", old)
    assert contents(old) == before


# Bad input


@pytest.mark.parametrize(
    "raw, word",
    [
        pytest.param(b"caf\xe9 au lait\n" * 50, "UTF-8", id="Latin-1"),
        pytest.param("Every word\n".encode("utf-16"), "UTF-8", id="UTF-16"),
        pytest.param("the end is cut: é".encode()[:-1], "UTF-8", id="cut in a character"),
        pytest.param(b"a surrogate \xed\xa0\x80 in UTF-8", "UTF-8", id="surrogate"),
        pytest.param(b"", "empty", id="empty"),
        pytest.param("\ufeff".encode(), "empty", id="only a byte order mark"),
        pytest.param("".join(map(chr, range(0xE000, 0x1E001))).encode(), "65,536", id="65,537 characters"),
    ],
)
def test_a_bad_text(raw, word, old, tmp_path):
    """A traceback, ids that wrap round at 65,536, or the old files lost to a text that cannot be used."""
    (tmp_path / "bad.txt").write_bytes(raw)
    before = snapshot(old)
    result = run("data/prepare.py", "--input", tmp_path / "bad.txt", "--data_dir", old)
    assert_one_line(result, word, "bad.txt" if word != "65,536" else "")
    assert result.stdout == "" and snapshot(old) == before


@unix
@pytest.mark.parametrize("name", ["missing.txt", "", "folder", "folder/below", "file/below", "loop", "long" * 99])
def test_an_input_that_cannot_be_read(name, old, tmp_path):
    """A traceback for a path that is not that of a readable file, one that goes round in symbolic links among them."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = snapshot(old)
    result = run("data/prepare.py", "--input", tmp_path / name if name else "", "--data_dir", old)
    assert_one_line(result, "--input", name)
    assert result.stdout == "" and snapshot(old) == before


@pytest.mark.parametrize(
    "args, word",
    [
        (["--inptu", "a.txt"], "--inptu"),
        (["--inp", "a.txt"], "--inp"),
        (["a.txt"], "a.txt"),
        (["--input"], "--input"),
        (["--input", "a.txt", "--url", CLOSED], "--url"),
    ],
    ids=lambda value: None,
)
def test_flags_that_do_not_exist(args, word, old):
    """A mistyped flag ignored, guessed at, or answered with a page of usage."""
    before = snapshot(old)
    assert_one_line(run("data/prepare.py", *args, "--data_dir", old), word, code=2)
    assert snapshot(old) == before


@pytest.mark.parametrize(
    "place",
    [
        "file",
        pytest.param("file/below", marks=unix),
        *(pytest.param(place, marks=linux) for place in ("/dev/full", "/dev/full/below", "/proc/below")),
    ],
)
def test_a_data_dir_that_cannot_be_written(place, tmp_path):
    """A traceback when the folder cannot be made (places that fail for root, too)."""
    (tmp_path / "file").write_bytes(b"precious")
    folder = tmp_path / place
    assert_one_line(run("data/prepare.py", "--input", SAMPLE, "--data_dir", folder), folder)
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_a_folder_where_a_file_should_go(name, old, tmp_path):
    """A rename that fails after others were done: new files beside old ones, though the message says otherwise."""
    (tmp_path / "in.txt").write_bytes(BODY)
    (old / name).unlink()
    (old / name).mkdir()
    (old / name / "precious").touch()
    before = snapshot(old)
    assert_one_line(run("data/prepare.py", "--input", tmp_path / "in.txt", "--data_dir", old), old)
    assert snapshot(old) == before


@pytest.mark.parametrize("raw, limit", [(BODY, 1000), (BODY[:100], 200)], ids=["at the first file", "at the last file"])
@pytest.mark.parametrize("fresh", [False, True], ids=["old files", "new folder"])
def test_a_disk_that_fills_up(raw, limit, fresh, old, tmp_path):
    """Old files cut short or of two texts mixed, or a temporary file left, when the disk is full."""
    resource = pytest.importorskip("resource")
    (tmp_path / "in.txt").write_bytes(raw)
    folder = tmp_path / "fresh" if fresh else old
    before = snapshot(folder)
    result = run(
        *("data/prepare.py", "--input", tmp_path / "in.txt", "--data_dir", folder),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert_one_line(result, folder)
    assert result.stdout == "" and snapshot(folder) == before


# Two at once


def write_in_turns(folder, number, barrier, outcomes, rounds):
    """Write a text of this process's own into the folder, every time that all processes have come to the barrier."""
    text = f"{number}\n" * 20_000
    for _ in range(rounds):
        barrier.wait()
        try:
            write_prepared(folder, *prepare.encode(text), f"text {number}", text.encode())
            outcomes.put(number)
        except BlockingIOError:
            outcomes.put(None)
        barrier.wait()
        barrier.wait()  # while the test reads the folder


@unix
def test_two_that_write_at_once_leave_the_files_of_one(tmp_path):
    """The files of two texts mixed, which nothing can read, by two processes of which one says that all went well."""
    context, rounds = multiprocessing.get_context("fork"), 30
    barrier, outcomes = context.Barrier(3), context.Queue()
    writers = [
        context.Process(target=write_in_turns, args=(tmp_path, number, barrier, outcomes, rounds), daemon=True)
        for number in (1, 2)
    ]
    for writer in writers:
        writer.start()
    try:
        for _ in range(rounds):
            barrier.wait(60)
            barrier.wait(60)
            wrote = {outcomes.get(timeout=60) for _ in writers} - {None}
            source, _ = prepare.prepared_text(tmp_path) or ("text 0", "")
            assert wrote and int(source.removeprefix("text ")) in wrote
            assert set(contents(tmp_path)) == {"train.bin", "val.bin", "meta.json"}
            barrier.wait(60)
    finally:
        for writer in writers:
            writer.kill()


@unix
@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin"])
def test_a_pipe_among_the_older_files_does_not_block(name, old, tmp_path):
    (tmp_path / "in.txt").write_bytes(BODY)
    (old / name).unlink()
    os.mkfifo(old / name)
    prepared("--input", tmp_path / "in.txt", "--data_dir", old)
    assert_holds(old, BODY, os.path.abspath(tmp_path / "in.txt"))


def test_a_folder_that_another_process_writes_to_is_one_line(old, tmp_path):
    """And what a killed process has left in the folder does not stop the next one."""
    (tmp_path / "in.txt").write_bytes(BODY)
    before = snapshot(old)
    with lock_folder(old):
        refused = run("data/prepare.py", "--input", tmp_path / "in.txt", "--data_dir", old)
        assert_one_line(refused, old, "another process")
        assert snapshot(old) == before
    (old / ".train.bin.tmp").write_bytes(b"half a te")
    prepared("--input", tmp_path / "in.txt", "--data_dir", old)
    assert_holds(old, BODY, os.path.abspath(tmp_path / "in.txt"))


# --url


def test_url_is_downloaded_once(serve, old):
    """A text asked for again though its files are there and whole; the log of a pipe full of bars."""
    url, asked = serve(answer(BODY))
    assert prepared("--url", url, "--data_dir", old).stderr == ""
    assert_holds(old, BODY, url)
    before = snapshot(old)
    assert "nothing to do" in prepared("--url", url, "--data_dir", old).stdout
    assert snapshot(old) == before and len(asked) == 1


def test_url_downloads_again_when_another_is_asked_for_a_file_is_damaged_or_forced(serve, old):
    """Another address, a damaged file or --force answered from what is there."""
    texts = [BODY, BODY.swapcase(), BODY, BODY.swapcase()]
    url, asked = serve(*map(answer, texts))
    for raw, args in zip(texts, ([url], [url + "2"], [url + "2"], [url + "2", "--force"])):
        prepared("--data_dir", old, "--url", *args)
        assert_holds(old, raw, args[0])
        if len(asked) == 2:
            (old / "train.bin").write_bytes(b"damaged")
    assert len(asked) == 4


@unix
def test_the_bar_shows_on_a_terminal(serve, tmp_path):
    """No bar where a person waits."""
    url, _ = serve(answer(BODY))
    spawn = "import pty, sys; sys.exit(pty.spawn(['sh', '-c', 'stty rows 24 cols 80; exec \"$@\"', *sys.argv]) >> 8)"
    command = [sys.executable, "data/prepare.py", "--url", url, "--data_dir", tmp_path]
    result = run("-c", spawn, *command, stdin=subprocess.DEVNULL)
    assert result.returncode == 0 and "100%" in result.stdout, result


def test_a_404_is_asked_for_once(serve, old):
    """Three tries and 3 s for what will not come; old files lost; the stand-in in place of what was asked for."""
    url, asked = serve(answer(b"not here", 404))
    before = snapshot(old)
    result = run("data/prepare.py", "--url", url, "--data_dir", old)
    assert_one_line(result, url, "404", code=1)
    assert result.stdout == "" and snapshot(old) == before and len(asked) == 1


def test_a_500_is_asked_for_three_times_with_backoff(serve, old):
    """No further try, or no waiting before it, for a server that is down for a moment; old files lost."""
    url, asked = serve(answer(b"oh no", 500))
    before = snapshot(old)
    result = run("data/prepare.py", "--url", url, "--data_dir", old)
    assert result.returncode == 1 and "Traceback" not in result.stderr and result.stdout == ""
    *tries, last = result.stderr.splitlines()
    assert last.startswith("prepare.py: ") and url in last and "500" in last
    assert len(tries) == 2 and all(line.startswith("try ") for line in tries)
    assert snapshot(old) == before
    assert len(asked) == 3 and asked[1] - asked[0] >= 1 and asked[2] - asked[1] >= 2


def test_a_server_that_fails_twice_and_then_answers(serve, tmp_path):
    """A failure that another try mends, in the status or midway, taken for final; bytes of two tries put together."""
    body = BODY * 60  # more than is read at a time
    url, asked = serve(answer(b"busy", 503), answer(body[:-500], Content_Length=len(body)), answer(body))
    prepared("--url", url, "--data_dir", tmp_path)
    assert_holds(tmp_path, body, url)
    assert len(asked) == 3


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(TRUNCATED, id="truncated"),
        pytest.param(answer(b"", Content_Length=len(BODY)), id="nothing after the headers"),
        pytest.param(answer(b"64\r\nonly\r\n", Content_Length=None, Transfer_Encoding="chunked"), id="chunk cut"),
        pytest.param(
            answer(gzip.compress(BODY)[:-20], Content_Length=len(gzip.compress(BODY)), Content_Encoding="gzip"),
            id="gzip cut",
        ),
        pytest.param(answer(BODY, Content_Encoding="gzip"), id="not the gzip it says"),
        pytest.param(answer(BODY, Content_Length="many"), id="Content-Length not a number"),
        pytest.param(answer(HTML), id="HTML"),
        pytest.param(answer(b"busy", 500), id="500"),
        pytest.param(answer(BODY, 301, Location=f"{CLOSED}/elsewhere"), id="redirected to a closed port"),
        pytest.param(answer(b"", 302, Location="/text"), id="redirected for ever"),
        pytest.param(answer(b""), id="empty"),
        pytest.param(answer(BODY.decode().encode("latin-1")), id="Latin-1"),
        pytest.param(lambda handler: None, id="no answer"),
        pytest.param(lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n"), id="not HTTP"),
    ],
)
def test_an_answer_that_is_not_the_text(reply, serve, old):
    """Part of a text, or something else, taken for it; a traceback; old files lost."""
    url, asked = serve(reply)
    before = snapshot(old)
    result = tweaked("--url", url, "--data_dir", old)
    assert_one_line(result, url, code=1)
    assert result.stdout == "" and snapshot(old) == before and asked


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(HTML, id="doctype"),
        pytest.param(b"\r\n\n " + HTML[HTML.index(b"<html") :].swapcase(), id="upper case after blanks"),
        pytest.param(b"\xef\xbb\xbf" + HTML, id="byte order mark"),
        pytest.param(b"<!-- error page -->\n" + HTML, id="comment"),
        pytest.param(b'<?xml version="1.0" encoding="UTF-8"?>\n' + HTML, id="XHTML"),
    ],
)
def test_an_html_page_is_no_text(page, serve, monkeypatch):
    """A sign-in or error page with status 200 made into training data."""
    monkeypatch.setattr(prepare, "TRIES", 1)
    url, asked = serve(answer(page, Content_Type="text/html; charset=utf-8"))
    with pytest.raises(ValueError, match="HTML"):
        prepare.download(url, False)
    assert len(asked) == 1


@pytest.mark.parametrize("encoding", [None, "gzip", "chunked", "until closed", "redirect"])
def test_the_ways_a_text_can_arrive_whole(encoding, serve, monkeypatch):
    """The length on the wire compared with that of the text; a text refused because its length was not announced; a
    '<' at its start taken for HTML."""
    monkeypatch.setattr(prepare, "TRIES", 1)
    body = b"<Enter the Ghost>\n" + BODY
    chunks = b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (9, body[:9], len(body) - 9, body[9:])
    replies = {
        "gzip": [answer(gzip.compress(body), Content_Encoding="gzip")],
        "chunked": [answer(chunks, Content_Length=None, Transfer_Encoding="chunked")],
        "until closed": [answer(body, Content_Length=None)],
        "redirect": [answer(b"", 302, Location="/moved"), answer(body)],
    }
    url, _ = serve(*replies.get(encoding, [answer(body)]))
    assert prepare.download(url, False) == body


@pytest.mark.parametrize("reply", [lambda handler: time.sleep(5), answer(b"a few", stall=5, Content_Length=99)])
def test_a_server_that_falls_silent(reply, serve, monkeypatch):
    """A download that hangs for ever, before the first byte or midway (its time-outs are made 100 times shorter)."""
    get = requests.get
    monkeypatch.setattr(requests, "get", lambda *a, timeout, **k: get(*a, timeout=tuple(t / 100 for t in timeout), **k))
    monkeypatch.setattr(prepare, "TRIES", 1)
    url, asked = serve(reply)
    with pytest.raises(requests.RequestException) as error:
        prepare.download(url, False)
    assert "timed out" in prepare.reason(error.value) and time.monotonic() - asked[0] < 4


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1/a", "http://", "http://[bad", "http://127.0.0.1:99999/"])
def test_an_address_that_is_none(url, old):
    """Three tries, or a traceback, for what is no address."""
    before = snapshot(old)
    result = run("data/prepare.py", "--url", url, "--data_dir", old)
    assert_one_line(result, url, code=1)
    assert result.stdout == "" and snapshot(old) == before


@pytest.mark.parametrize("url", ["", f"{CLOSED}/text", "http://no-such-host.invalid/text"])
def test_url_that_cannot_be_reached(url, old):
    """The stand-in in place of the text asked for, also for --url "$UNSET"; old files lost."""
    before = snapshot(old)
    result = tweaked("--url", url, "--data_dir", old)
    assert_one_line(result, url, code=1)
    assert result.stdout == "" and snapshot(old) == before


# The corpus and its stand-in


def test_the_corpus_is_taken_from_its_address(serve, old):
    """The known size or hash wrong; --input of the stand-in, which `old` holds, counted as the corpus; a second
    download; the corpus not taken again after another text or with --force."""
    body = SAMPLE.read_bytes() * 2
    url, asked = serve(answer(gzip.compress(body), Content_Encoding="gzip"))
    constants = corpus(url, body)
    assert tweaked("--data_dir", old, **constants).stderr == ""
    assert_holds(old, body, url)
    before = snapshot(old)
    assert "nothing to do" in tweaked("--data_dir", old, **constants).stdout
    assert snapshot(old) == before and len(asked) == 1
    assert tweaked("--data_dir", old, "--force", **constants).returncode == 0
    assert snapshot(old) != before and contents(old) == {str(p): raw for p, (raw, _) in before.items()}
    assert len(asked) == 2
    prepared("--input", SAMPLE, "--data_dir", old)
    assert tweaked("--data_dir", old, **constants).returncode == 0
    assert_holds(old, body, url)


def assert_stand_in(result, folder):
    """Exit code 0, one loud line, and data/sample.txt in the folder, not under the corpus' name."""
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    loud = [line for line in result.stderr.splitlines() if "sample.txt" in line]
    assert len(loud) == 1 and "WARNING" in loud[0] and "TINY SHAKESPEARE" in loud[0], result.stderr
    assert all(line in loud or line.startswith("try ") for line in result.stderr.splitlines()), result.stderr
    assert_holds(folder, SAMPLE.read_bytes(), None)
    assert json.loads((folder / "meta.json").read_bytes())["source"] != prepare.CORPUS_URL


def test_offline_the_stand_in_is_used_until_the_corpus_can_be_had(serve, tmp_path):
    """A first run that fails without network, or that is silent about the stand-in; a stand-in rewritten by each run,
    or that counts as the corpus once there is network."""
    assert_stand_in(run("data/prepare.py", "--data_dir", tmp_path), tmp_path)
    before = snapshot(tmp_path)
    assert_stand_in(tweaked("--data_dir", tmp_path), tmp_path)
    assert snapshot(tmp_path) == before
    url, asked = serve(answer(BODY))
    assert tweaked("--data_dir", tmp_path, **corpus(url)).stderr == ""
    assert_holds(tmp_path, BODY, url)
    before = snapshot(tmp_path)
    assert "nothing to do" in tweaked("--data_dir", tmp_path, **corpus(url)).stdout
    assert snapshot(tmp_path) == before and len(asked) == 1


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(answer(BODY[:-1] + b"!"), id="another text of the same size"),
        pytest.param(answer(BODY[:-1]), id="shorter"),
        pytest.param(answer(BODY * 2), id="longer"),
        pytest.param(TRUNCATED, id="truncated"),
        pytest.param(answer(HTML), id="HTML"),
        pytest.param(answer(b"not here", 404), id="404"),
    ],
)
def test_what_is_not_the_corpus_is_not_taken_for_it(reply, serve, tmp_path):
    """Size or hash not compared: the figures of the README would be those of another text."""
    url, asked = serve(reply)
    result = tweaked("--data_dir", tmp_path, **corpus(url))
    assert_stand_in(result, tmp_path)
    assert json.loads((tmp_path / "meta.json").read_bytes())["source"] != url and len(asked) == 1


def test_a_missing_bundle_of_certificates_is_no_network(tmp_path):
    """A traceback from a REQUESTS_CA_BUNDLE that is no longer there: no RequestException, but nothing comes."""
    result = tweaked("--data_dir", tmp_path / "out", env={"REQUESTS_CA_BUNDLE": str(tmp_path / "gone.pem")})
    assert_stand_in(result, tmp_path / "out")
