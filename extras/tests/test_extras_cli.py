"""extras/cli.py: argument types, errors in one line, and what a closed pipe does to a command."""

import argparse
import itertools
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.cli import Parser, need, number, path
from helpers import ROOT, unix

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
    "flags, words",
    [
        (["--file", ""], "argument --file: the path is empty"),  # an unset variable of the shell
        (["--n", "x"], "argument --n: invalid int value: 'x'"),
        (["--n", "9"], "argument --n: 9 is not in [0, 5]"),
        (["--fil", "a"], "unrecognized arguments: --fil a"),
    ],
)
def test_a_mistake_in_a_flag_is_one_line(flags, words, capsys):
    parser = Parser("What it does.")
    parser.add_argument("--file", type=path)
    parser.add_argument("--n", type=number(int, "[0, 5]"))
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(flags)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", f"{parser.prog}: {words} (--help lists the flags)\n")


def test_a_package_that_is_missing_is_named_with_the_command():
    assert need("--plot", "argparse", "itertools") is argparse
    with pytest.raises(ValueError, match=r"--plot needs nowhere \(No module named 'nowhere'\): pip install nowhere$"):
        need("--plot", "nowhere")


# -- commands as processes ---------------------------------------------------------------------------------------------

SCRIPT = """
from extras.cli import note, one_line_errors, run_main

def main():
{body}

run_main(main)
"""


@pytest.fixture
def script(tmp_path):
    """A function: start a script "tool.py" whose main() has the given lines."""

    def script(*lines, env=None, **kwargs):
        body = "\n".join(f"    {line}" for line in lines)
        (tmp_path / "tool.py").write_text(SCRIPT.format(body=body), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **(env or {})}
        kwargs = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE) | kwargs
        return subprocess.Popen([sys.executable, tmp_path / "tool.py"], env=env, cwd=tmp_path, **kwargs)

    return script


def finish(process):
    """Wait for the process. Returns (exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=60)
    return process.returncode, *((text or b"").decode("utf-8").replace(os.linesep, "\n") for text in (out, err))


def assert_fails(process, line):
    assert finish(process) == (1, "", f"tool.py: {line}\n")


def test_output_is_utf8_whatever_the_terminal_asks_for(script):
    process = script("print('β → 字é')", "note('a remark')", env={"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"})
    assert finish(process) == (0, "β → 字é\n", "tool.py: a remark\n")


def test_a_users_mistake_is_one_line(script):
    assert_fails(script("with one_line_errors():", "    raise ValueError('n: 3 is odd')"), "n: 3 is odd")
    assert_fails(script("raise FileNotFoundError('no such run')"), "no such run")
    assert_fails(script("open('nowhere')"), "nowhere: No such file or directory")


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError"])
def test_a_bug_keeps_its_traceback(error, script):
    code, _, err = finish(script(f"raise {error}('here')"))
    assert code == 1 and err.startswith("Traceback") and f"{error}: here" in err


@unix
@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "on the way"])
def test_a_reader_that_has_gone_is_no_error(lines, script):
    """As in `python -m extras.bench | head -1`, where short output fails only when it is flushed at the end."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        process = script(f"for i in range({lines}):", "    print(i)", stdout=pipe)
        assert finish(process) == (-signal.SIGPIPE, "", "")
