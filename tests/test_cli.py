"""What the command lines share: argument types, which checkpoint is read, and what signals and pipes do to a script."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ONE_THREAD, ROOT, SMALL, assert_one_line, here, needs_extras, ok, run, save_model, tiny, unix
from model import PRETRAINED

# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, holds, said",
    [
        ([], ["out/ckpt.pt", "out/last.pt"], "out/ckpt.pt, step 7"),
        ([], ["out/last.pt"], "out/last.pt, step 7"),
        (["--out_dir", "run"], ["run/last.pt"], "run/last.pt, step 7"),
        (["--ckpt", "run"], ["run/ckpt.pt", "run/last.pt"], "run/ckpt.pt, step 7"),
        (["--ckpt", "run/last.pt"], ["run/last.pt"], "run/last.pt, step 7"),
        ([], ["run/ckpt.pt"], f"{PRETRAINED}, step 7000"),
    ],
)
def test_a_line_says_which_model_it_is(flags, holds, said, tmp_path, monkeypatch):
    """Between Ctrl-C and the first evaluation a run has last.pt only."""
    monkeypatch.chdir(tmp_path)
    for name in holds:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_model((tmp_path / name).parent, tiny(), name=Path(name).name)
    result = ok(here(*flags, "--prompt", "a", "--max_new_tokens", 2, "--device", "cpu", script="sample.py"))
    assert f"sample.py: using {said}" in result.stderr.splitlines()


# -- sample.py as a process --------------------------------------------------------------------------------------------


@pytest.fixture
def endless(tmp_path):
    """sample.py as a process that writes a million characters."""
    save_model(tmp_path, tiny())
    flags = ["--out_dir", tmp_path, "--device", "cpu", "--overflow", "slide", "--max_new_tokens", "1000000"]
    pipe = dict(cwd=ROOT, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "sample.py", *flags], **pipe) as child:
        yield child


@needs_extras
@unix
@pytest.mark.parametrize("reads", [0, 1], ids=["at once", "on the way"])
def test_a_reader_that_has_gone_ends_sample_py_quietly(reads, endless):
    """As in `sample.py | head -1`."""
    assert len(endless.stdout.read(reads)) == reads
    endless.stdout.close()
    assert len(endless.stderr.read().splitlines()) <= 1  # which model it is
    assert endless.wait(60) == -signal.SIGPIPE


@needs_extras
@unix
def test_ctrl_c_ends_sample_py_quietly(endless):
    endless.stdout.read(99)
    endless.send_signal(signal.SIGINT)
    _, said = endless.communicate(timeout=60)
    assert endless.returncode == 130 and said == b""


@pytest.mark.parametrize("script", ["sample.py", "train.py", "data/prepare.py"])
def test_without_the_environment_there_is_one_line(script):
    """Python that ignores the packages of its environment, as in a terminal where it is not activated."""
    result = subprocess.run([sys.executable, "-S", script], cwd=ROOT, capture_output=True, encoding="utf-8")
    assert_one_line(result, "No module named", "activate the environment, or install it as README.md says", code=1)


@needs_extras
def test_output_is_utf8_whatever_the_terminal_asks_for(tmp_path):
    r"""And lines end in \n everywhere."""
    save_model(tmp_path, tiny())
    flags = ["--out_dir", tmp_path, "--device", "cpu", "--prompt", "é😀\n", "--max_new_tokens", "1"]
    env = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    said = run("sample.py", *flags, env=env)  # run() reads UTF-8
    assert said.returncode == 0 and said.stdout.startswith("é😀\n"), said


@pytest.mark.slow
@unix
def test_streams_may_be_closed(tmp_path):
    """As a daemon has them. What would go there goes nowhere: no report in the text, and no file gets its number."""
    data, out = tmp_path / "data", tmp_path / "out"
    prepare = ["data/prepare.py", "--input", "data/sample.txt", "--data_dir", data]
    train = ["train.py", *SMALL, "--max_iters", 2, "--data_dir", data, "--out_dir", out]
    sample = ["sample.py", "--out_dir", out, "--device", "cpu", "--prompt", "ROM", "--max_new_tokens", 5]
    shell = 'exec "$0" "$@" '

    def closed(streams, words):
        command = ["sh", "-c", shell + streams, sys.executable, *map(str, words)]
        return ok(subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8"))

    closed("<&- >&- 2>&-", prepare)
    closed("<&- >&- 2>&-", train)
    assert (out / "ckpt.pt").exists()
    text = closed("2>&-", sample).stdout
    assert text == run(*sample).stdout and text.startswith("ROM") and len(text) == 8
    assert closed(">&-", sample).stdout == ""


NOTEBOOK = """
import io, runpy, sys
sys.path.insert(1, "data")
sys.stdout, sys.argv, out = io.StringIO(), {words}, sys.stdout
runpy.run_path(sys.argv[0], run_name="__main__")
out.write(sys.stdout.getvalue())
"""


@pytest.mark.slow
def test_the_scripts_run_in_a_notebook(tmp_path):
    """%run gives them a stdout that cannot change its encoding."""
    folder = ["--data_dir", str(tmp_path / "data")]
    for words, said in (
        (["data/prepare.py", "--input", "data/sample.txt", *folder], "characters, a vocabulary of 65"),
        (["train.py", *SMALL, "--max_iters", "1", *folder, "--out_dir", str(tmp_path)], "A sample:"),
        (["sample.py", "--out_dir", str(tmp_path), "--device", "cpu", "--prompt", "ROM"], "ROM"),
    ):
        result = ok(run("-c", NOTEBOOK.format(words=words)))
        assert said in result.stdout


INTERRUPT = """
import contextlib, os, pathlib, runpy, signal, sys, threading, time


def interrupt(folder):
    while not (folder / "last.pt").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


words, folder = {words}, pathlib.Path({folder!r})
threading.Thread(target=interrupt, args=(folder,), daemon=True).start()
errors = []
for flags in ([*words, "--save_interval", "5"], ["--init_from", "resume", "--max_iters", "1"]):
    sys.argv = ["train.py", "--out_dir", str(folder), *flags]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as error:
        errors.append(error)  # as a notebook does, and with it all variables
print([error.code for error in errors])
"""


@pytest.mark.slow
@unix
def test_a_run_that_was_interrupted_in_a_notebook_can_be_resumed_there(data_dir, tmp_path):
    words = [*SMALL, "--data_dir", str(data_dir), "--max_iters", "1000000"]
    result = ok(run("-c", INTERRUPT.format(words=words, folder=str(tmp_path))))
    assert result.stdout.endswith("[130]\n") and "finished at step" in result.stdout
