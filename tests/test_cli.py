"""What the scripts share: argument types, errors in one line, and what signals and closed pipes do to a script."""

import argparse
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import ROOT, linux, unix
from sample import PRETRAINED, number, pick_checkpoint

# -- arguments ---------------------------------------------------------------------------------------------------------


@given(value=st.integers(-3, 12), low=st.integers(0, 4), high=st.integers(5, 9))
def test_a_number_is_inside_its_interval(value, low, high):
    for kind, left, right in itertools.product((int, float), "[(", "])"):
        inside = low < value < high or (value, left) == (low, "[") or (value, right) == (high, "]")
        parse = number(kind, f"{left}{low}, {high}{right}")
        if inside:
            assert parse(str(value)) == value and type(parse(str(value))) is kind
        else:
            with pytest.raises(argparse.ArgumentTypeError, match=f"{value} is not in"):
                parse(str(value))


@pytest.mark.parametrize(
    "flags, holds, expected",
    [
        (["run/gone.pt", None], ["run/ckpt.pt"], "run/gone.pt"),  # load_checkpoint says that it is not there
        (["run", "other"], ["run/ckpt.pt", "run/last.pt", "other/ckpt.pt"], "run/ckpt.pt"),
        ([None, "run"], ["out/ckpt.pt"], "run/ckpt.pt"),
        ([None, None], ["out/ckpt.pt"], "out/ckpt.pt"),
        ([None, None], ["out/last.pt"], "out/last.pt"),  # a run that has not been evaluated yet
        ([None, None], ["out/demo"], str(PRETRAINED)),
    ],
)
def test_a_checkpoint_is_a_file_or_the_one_in_a_folder(flags, holds, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in holds:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert pick_checkpoint(*flags) == Path(expected)


# -- scripts as processes ----------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
from {file} import note, one_line_errors, run_main

def main():
{body}

run_main(main{hint})
"""


@pytest.fixture
def script(tmp_path):
    """A function: start a script "tool.py" whose main() has the given lines, with the helpers of a file of the kit."""

    def script(*lines, file="prepare", env=None, **kwargs):  # prepare.py starts sooner than the rest
        body = "\n".join(f"    {line}" for line in lines)
        hint = "" if file == "prepare" else ", memory_hint='a smaller batch would fit'"
        (tmp_path / "tool.py").write_text(SCRIPT.format(body=body, file=file, hint=hint), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'data'}", "PYTHONUNBUFFERED": "", **(env or {})}
        kwargs = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE) | kwargs
        return subprocess.Popen([sys.executable, tmp_path / "tool.py"], env=env, cwd=tmp_path, **kwargs)

    return script


def finish(process):
    """Wait for the process. Returns (exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=60)
    return process.returncode, (out or b"").decode("utf-8"), err.decode("utf-8").replace(os.linesep, "\n")


def assert_fails(process, line):
    assert finish(process) == (1, "", f"tool.py: {line}\n")


@unix
def test_a_closed_stdout_is_no_error(script, tmp_path):
    """As with `>&-` in a shell. No file that the script opens may take its place."""
    lines = ("file = open('log', 'w')", "print('text')", "os.write(1, b'from a library')", "file.close()")
    assert finish(script(*lines, stdout=None, preexec_fn=lambda: os.close(1)))[::2] == (0, "")
    assert (tmp_path / "log").read_bytes() == b""


@unix
def test_a_closed_stderr_is_no_error(script):
    """As with `2>&-`. What the script says there must not end up in its output."""
    lines = ("print('text')", "note('a remark')", "print(sys.stderr.isatty())")
    assert finish(script(*lines, preexec_fn=lambda: os.close(2))) == (0, "text\nFalse\n", "")


def test_output_is_utf8_whatever_the_terminal_asks_for(script):
    r"""A character that no encoding has, half a surrogate pair, is shown as its escape. Lines end in \n everywhere."""
    process = script(r"print('β → 字 \ud800\né')", "note('a remark')", env={"PYTHONIOENCODING": "cp1252"})
    assert finish(process) == (0, "β → 字 \\ud800\né\n", "tool.py: a remark\n")


def test_a_users_mistake_is_one_line(script):
    assert_fails(script("with one_line_errors():", "    raise ValueError('n: 3 is odd')"), "n: 3 is odd")
    assert_fails(script("raise FileNotFoundError('no such run')"), "no such run")
    assert_fails(script("open('nowhere')"), "nowhere: No such file or directory")


@pytest.mark.parametrize(
    "lines", [pytest.param(["bytearray(10**18)"], marks=pytest.mark.slow), ["import torch", "torch.empty(10**17)"]]
)
def test_no_memory_is_one_line_with_what_would_fit(lines, script):
    assert_fails(script(*lines, file="train"), "out of memory: a smaller batch would fit")


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError"])
def test_a_bug_keeps_its_traceback(error, script):
    code, _, err = finish(script(f"raise {error}('here')"))
    assert code == 1 and err.startswith("Traceback") and f"{error}: here" in err


@linux
@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "on the way"])
def test_a_reader_that_has_gone_is_no_error(lines, script):
    """As in `sample.py | head -1`, where short output fails only when it is flushed at the end."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        assert finish(script(f"for i in range({lines}):", "    print(i)", stdout=pipe)) == (1, "", "")


@unix
@pytest.mark.parametrize(["name", "code"], [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_is_an_exit_code_without_a_word_or_a_temporary_folder(name, code, script, tmp_path):
    waits = "with TemporaryDirectory(dir='.'): print('ready', flush=True); time.sleep(60)"
    process = script("from tempfile import TemporaryDirectory", waits)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(getattr(signal, name))
    assert finish(process) == (code, "", "")
    assert [file.name for file in tmp_path.iterdir()] == ["tool.py"]


@unix
def test_under_torchrun_sigterm_ends_a_process_that_waits_inside_a_library(script):
    """There no handler of Python runs, so the process keeps the handler of the operating system."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    assert finish(script("os.kill(os.getpid(), signal.SIGTERM)", file="train", env=env)) == (-signal.SIGTERM, "", "")


@unix
@pytest.mark.parametrize(
    "first, survives", [("SIGINT", False), pytest.param("SIGTERM", True, marks=pytest.mark.slow)]
)  # `timeout` sends SIGTERM twice
def test_a_run_polls_the_first_signal_and_a_second_ctrl_c_ends_it_at_once(first, survives, script):
    kill = f"os.kill(os.getpid(), signal.{first}); print(stop.received, flush=True)"
    lines = ["from train import StopSignals", "stop = StopSignals()", "print(stop.received)", kill, kill]
    number = int(getattr(signal, first))
    expected = (0, f"0\n{number}\n{number}\n", "") if survives else (-number, f"0\n{number}\n", "")
    assert finish(script(*lines)) == expected
