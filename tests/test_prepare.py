"""data/prepare.py: what it writes and train.py reads, and every way in which text can be bad or out of reach.

The network is a server on 127.0.0.1. Nothing leaves the machine.
"""

import errno
import gzip
import io
import json
import os
import sys
from hashlib import sha256

import numpy as np
import pytest

from helpers import SAMPLE, contents, here, linux, ok, run, tree, unix, write_ids
from model import CharTokenizer
from prepare_fixtures import BODY, assert_nothing_changed
from train import load_dataset


def assert_holds(folder, raw, source):
    """The folder holds the text `raw` (bytes), from `source`: three files as specified, and no other file."""
    files = contents(folder)
    assert set(files) == {"train.bin", "val.bin", "meta.json"}
    meta, text = json.loads(files["meta.json"]), io.StringIO(raw.decode("utf-8-sig"), newline=None).read()
    ids = np.frombuffer(files["train.bin"] + files["val.bin"], "<u2")
    assert meta["chars"] == "".join(sorted(set(text))) and "".join(meta["chars"][i] for i in ids) == text
    assert len(files["train.bin"]) == len(text) * 9 // 10 * 2 and meta["source"] == str(source)
    hashes = {"train": files["train.bin"], "val": files["val.bin"], "vocabulary": meta["chars"].encode()}
    assert meta["sha256"] == {name: sha256(content).hexdigest() for name, content in hashes.items()}


CLOSED = "http://127.0.0.1:9"
STAND_IN = "sample.txt (offline stand-in)"  # what meta.json calls it


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["as it is", "byte order mark"])
def test_a_text_is_written_as_it_is(mark, call, text, old, tmp_path):
    text.write_bytes(mark + BODY)
    for folder in (old, tmp_path / "new" / "folder"):
        assert ok(call("--input", text, "--data_dir", folder)).stderr == ""
        assert_holds(folder, mark + BODY, text)


def test_several_files_are_one_text(call, text, tmp_path):
    """A carriage return at the end of one and a newline at the beginning of the next are two line ends."""
    text.write_bytes(BODY + b"\r")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf\n" + BODY[:99])
    ok(call("--input", text, tmp_path / "b.txt", "--data_dir", tmp_path / "data"))
    assert_holds(tmp_path / "data", BODY + b"\n\n" + BODY[:99], f"{text}, {tmp_path / 'b.txt'}")


def test_the_ids_of_a_large_vocabulary_take_four_bytes(call, text, tmp_path):
    characters = "".join(map(chr, range(0xE000, 0x1E001)))  # 65,537
    for n, dtype in ((65536, "<u2"), (65537, "<u4")):
        text.write_text(characters[:n], encoding="utf-8")
        ok(call("--input", text, "--data_dir", tmp_path))
        _, train, val, _ = load_dataset(tmp_path, 2)
        assert [*train, *val] == [*range(n)] and (tmp_path / "val.bin").stat().st_size % len(val) == 0
        assert train.dtype == np.dtype(dtype)


# a limit on the size of a file stands for a full disk: the system call fails in the middle of a file
LIMITED = """
import resource, runpy, signal, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
runpy.run_path("data/prepare.py", run_name="__main__")
"""


@unix
@pytest.mark.parametrize("too_long", ["train", "val"])
def test_an_error_in_the_middle_leaves_the_old_files(too_long, text, old):
    """New ids next to an old vocabulary would be different text."""
    before = tree(old)
    files = ["--input", SAMPLE, "--val", text] if too_long == "train" else ["--input", text, "--val", SAMPLE]
    assert_nothing_changed(run("-c", LIMITED, *files, "--data_dir", old), old, before, "File too large")
    ok(run("-c", LIMITED, "--input", text, "--val", text, "--data_dir", old))


def test_ctrl_c_in_the_middle_leaves_the_old_files_too(call, text, old, monkeypatch):
    def interrupted(path, content):
        path.write_text("half")
        raise KeyboardInterrupt

    before = tree(old)
    monkeypatch.setattr("pathlib.Path.write_bytes", interrupted)
    result = call("--input", text, "--data_dir", old)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "") and tree(old) == before


def test_the_val_split_can_be_a_file_of_its_own(call, text, tmp_path):
    (tmp_path / "val.txt").write_text("März 1\n", encoding="utf-8")
    flags = ["--val", tmp_path / "val.txt", "--data_dir", tmp_path / "data"]
    assert "vocabulary" in ok(call("--input", text, *flags)).stdout
    before = tree(tmp_path)
    result = call("--data_dir", tmp_path / "data")  # a plain command must not replace it
    assert_nothing_changed(result, tmp_path, before, "holds your own text", "val.txt (val)", "--force")
    tokenizer, train, val, _ = load_dataset(tmp_path / "data", 2)
    assert tokenizer.decode(val.tolist()) == "März 1\n"
    assert tokenizer.decode(train.tolist()) == BODY.decode().replace("\r\n", "\n").replace("\r", "\n")


def test_a_folder_that_cannot_be_written_is_one_line(call, text, old, monkeypatch):
    """The tests may run as root, who can write everywhere, so the system call fails here."""

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(old))

    before = tree(old.parent)
    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    result = call("--input", text, "--data_dir", old)
    assert_nothing_changed(result, old.parent, before, f"Permission denied: '{old}'")


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, raw, words",
    [
        ("--input in.txt", "caf\xe9 au lait\n".encode("latin-1"), ["in.txt is not UTF-8 (invalid continuation byte)"]),
        ("--input in.txt", "Whan that".encode("utf-16le"), ["in.txt looks like UTF-16"]),
        ("--input in.txt", "\u4e2d\u6587".encode("utf-16"), ["in.txt looks like UTF-16"]),
        ("--input in.txt", b"", ["in.txt has 0 characters"]),
        ("--input in.txt", b"x", ["in.txt has 0 characters for training and 1 for validation"]),
        ("--input none.txt", BODY, ["No such file or directory: 'none.txt'"]),
        ("--input old", BODY, ["Is a directory: 'old'"]),
        ("--input in.txt --field text", BODY, ["--field text is for JSON, and --input has none"]),
        ("--input in.txt --val none.txt", BODY, ["No such file or directory: 'none.txt'"]),
        ("--input in.txt --data_dir in.txt", BODY, ["File exists", "in.txt"]),
        ("--input=", BODY, ["--input, --tokenizer, --data_dir or --val is empty"]),
        ("in.txt", BODY, ["unrecognized arguments: in.txt (", "for your own text, type --input FILE"]),
        ("--datadir x", BODY, ["unrecognized arguments: --datadir x ("]),
        ("--input in.txt --vocab_size 300", BODY, ["--vocab_size needs --tokenizer bpe"]),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(flags, raw, words, call, text, old, tmp_path, monkeypatch):
    text.write_bytes(raw)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_nothing_changed(call("--data_dir", "old", *flags.split()), tmp_path, before, *words)


@linux
def test_a_file_name_may_be_any_bytes(call, text, tmp_path):
    """A line about it must not fail after the files are written."""
    text = text.rename(tmp_path / os.fsdecode(b"caf\xe9.txt"))
    result = ok(call("--input", text, "--data_dir", tmp_path / "data"))
    assert "caf\\udce9.txt" in result.stdout
    assert_holds(tmp_path / "data", BODY, text)


@linux
def test_a_pipe_may_be_the_text(tmp_path):
    ok(run("data/prepare.py", "--input", "/dev/stdin", "--data_dir", tmp_path, input="a text, and its end"))
    assert_holds(tmp_path, b"a text, and its end", "/dev/stdin")


def test_a_broken_requests_stops_only_a_download(call, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "requests", None)  # importing it raises an ImportError
    ok(call("--input", text, "--data_dir", tmp_path / "mine"))
    result = ok(call("--data_dir", tmp_path / "new", CORPUS_URL=CLOSED))
    assert f"WARNING: cannot download {CLOSED}" in result.stderr and "requests" in result.stderr


# -- downloads ---------------------------------------------------------------------------------------------------------


def test_the_corpus_is_asked_for_again_only_if_it_must_be(call, server, old):
    """If a file is damaged, or with --force, which replacing other text needs."""
    corpus = dict(CORPUS_URL=server.url, CORPUS_SHA256=sha256(BODY).hexdigest())

    def assert_asked(num_times, *flags):
        ok(call("--data_dir", old, *flags, **corpus))
        assert_holds(old, BODY, server.url)
        assert len(server.asked) == num_times

    assert_asked(1, "--force")
    assert_asked(1)
    assert_asked(2, "--force")
    for num_times, name in enumerate(("train.bin", "val.bin"), start=3):
        raw = (old / name).read_bytes()
        (old / name).write_bytes(raw[:50] + raw[51:])
        assert_asked(num_times)


def test_your_own_text_is_replaced_only_by_text_that_you_name(call, server, text, old):
    corpus, before = dict(CORPUS_URL=server.url, CORPUS_SHA256=sha256(BODY).hexdigest()), tree(old)
    result = call("--data_dir", old, **corpus)
    assert_nothing_changed(result, old, before, "holds your own text", SAMPLE, "--force", "--data_dir")
    assert not server.asked
    ok(call("--data_dir", old, "--input", text))
    assert_holds(old, BODY, text)
    ok(call("--data_dir", old, "--force", **corpus))
    assert_holds(old, BODY, server.url)


@pytest.mark.parametrize(
    "status, headers, word",
    [
        (404, {}, "404"),
        (200, {"Content-Length": len(BODY) + 500}, "IncompleteRead"),
    ],
)
def test_what_is_not_the_text_is_refused_in_one_line(status, headers, word, call, server, old):
    server.answer = status, headers, BODY
    before = tree(old)
    result = call("--data_dir", old, "--force", CORPUS_URL=server.url)
    assert_nothing_changed(result, old, before, server.url, word, "nothing was changed")


@pytest.mark.parametrize("meta", [None, "", "[]", "[1]", '{"chars": "a'])
def test_data_without_a_meta_json_that_can_be_read_may_be_your_own(meta, call, old):
    """nanoGPT's prepare.py writes none for ids that are no text, and the split for training may be elsewhere."""
    (old / "meta.json").unlink()
    if meta is None:
        (old / "train.bin").unlink()
    else:
        (old / "meta.json").write_text(meta, encoding="utf-8")
    before = tree(old)
    origin = ", from another program" if meta is None else ""
    assert_nothing_changed(call("--data_dir", old), old, before, f"holds your own text{origin}", "--force")


def test_the_stand_in_is_used_until_the_corpus_can_be_had(call, server, tmp_path):
    """And the corpus, once there, is kept."""
    server.answer = 200, {"Content-Encoding": "gzip"}, gzip.compress(BODY)
    corpus = {"CORPUS_URL": server.url, "CORPUS_SHA256": sha256(BODY).hexdigest()}
    result = ok(call("--data_dir", tmp_path, CORPUS_URL=CLOSED))
    assert f"WARNING: cannot download {CLOSED}" in result.stderr
    assert_holds(tmp_path, SAMPLE.read_bytes(), STAND_IN)
    assert call("--data_dir", tmp_path, **corpus).stderr == ""
    assert_holds(tmp_path, BODY, server.url)
    assert "nothing to do" in call("--data_dir", tmp_path, **corpus).stdout and len(server.asked) == 1
    before = tree(tmp_path)
    result = call("--data_dir", tmp_path, "--force", **corpus | {"CORPUS_URL": CLOSED})
    assert_nothing_changed(result, tmp_path, before, "nothing was changed")


def test_what_is_not_the_corpus_is_not_taken_for_it(call, server, tmp_path):
    """Otherwise the figures in the README would be for the wrong text."""
    server.answer = 200, {}, BODY[:-1] + b"!"
    result = ok(call("--data_dir", tmp_path, CORPUS_URL=server.url, CORPUS_SHA256=sha256(BODY).hexdigest()))
    assert "is not tiny Shakespeare" in result.stderr
    assert_holds(tmp_path, SAMPLE.read_bytes(), STAND_IN)


def test_without_a_network_and_without_the_stand_in_there_is_one_line(call, old, tmp_path):
    """sample.txt is not there if only the Python files were copied."""
    before = tree(tmp_path)
    result = call("--data_dir", old, "--force", CORPUS_URL=CLOSED, STAND_IN=tmp_path / "sample.txt")
    assert_nothing_changed(result, tmp_path, before, f"cannot download {CLOSED}", "nothing was changed")


# -- read again by train.py --------------------------------------------------------------------------------------------


def test_a_vocabulary_that_has_changed_is_noticed(tmp_path):
    """Two swapped characters train as well as before, and the sample has the wrong letters."""
    ok(here("--input", SAMPLE, "--data_dir", tmp_path, script="data/prepare.py"))
    meta = tmp_path / "meta.json"
    content = json.loads(meta.read_text(encoding="utf-8"))
    content["chars"] = content["chars"].translate(str.maketrans("ex", "xe"))
    meta.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="vocabulary has changed"):
        load_dataset(tmp_path)
    del content["sha256"]["vocabulary"]  # an older folder
    meta.write_text(json.dumps(content), encoding="utf-8")
    assert load_dataset(tmp_path)[0].vocab == content["chars"]


@pytest.mark.parametrize(
    "val, line",
    [
        (np.array([3], "<u2").tobytes(), "the vocabulary has 3 tokens, but the largest id is 3"),
        (b"", "cannot mmap an empty file"),
        (b"\0\0\0", "not a multiple of the data-type size"),
    ],
)
def test_ids_that_another_program_wrote_are_checked(val, line, tmp_path):
    write_ids(tmp_path, CharTokenizer("abc"), "abc" * 20)
    (tmp_path / "val.bin").write_bytes(val)
    meta = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    meta["sha256"]["val"] = sha256(val).hexdigest()
    (tmp_path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(ValueError, match=line):
        load_dataset(tmp_path)


def test_a_text_just_long_enough_is_read_and_a_shorter_one_is_refused(tmp_path):
    tokenizer = CharTokenizer("abcdefghij")
    write_ids(tmp_path, tokenizer, "abcdefghij" * 2)  # 18 characters to train on, 2 to evaluate
    assert len(load_dataset(tmp_path, 18)[1]) == 18
    with pytest.raises(ValueError, match="18 characters for training and 2 for validation, but we need 19 and 2"):
        load_dataset(tmp_path, 19)
    write_ids(tmp_path, tokenizer, "abcdefghij")
    with pytest.raises(ValueError, match="9 characters for training and 1 for validation, but"):
        load_dataset(tmp_path, 5)


def test_preparing_characters_needs_no_torch_and_no_bpe():
    """Importing torch would take seconds."""
    foreign = "{'torch', 'tokenizers', 'model', 'extras'}"
    ok(run("-c", f"import sys; sys.path.insert(0, 'data'); import prepare; assert not {foreign} & set(sys.modules)"))
