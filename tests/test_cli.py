"""kvgpt/cli.py: argument types, errors as one line, and the exit codes of run_main, in processes of their own."""

import argparse
import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import ROOT, SMALL, assert_one_line, here, linux, ranked, unix
from kvgpt.cli import Parser, boolean, number, one_line_errors, path, pick_device

# -- argument types ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_no_interval_holds_nan_or_its_open_end(text):
    for interval in ("[0, inf)", "(0, 1e30]", "[0, 1)"):
        with pytest.raises(argparse.ArgumentTypeError):
            number(float, interval)(text)


@given(text=st.text(max_size=6))
@example(text="True")
@example(text="FALSE")
@example(text="0")
@example(text="1")
@example(text="")
def test_a_boolean_is_true_or_false_in_two_spellings(text):
    expected = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if expected is None:
        with pytest.raises(argparse.ArgumentTypeError, match="neither True nor False"):
            boolean(text)
    else:
        assert boolean(text) is expected


def test_a_path_is_any_text_but_the_empty_one():
    """--out_dir "$UNSET" would write into the working directory."""
    assert path("a b/ä") == "a b/ä"
    with pytest.raises(argparse.ArgumentTypeError, match="empty"):
        path("")


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--size x", ["--size", "invalid int value: 'x'"]),
        ("--size 9", ["--size", "9 is not in [0, 9)"]),
        ("--siz 3", ["--siz 3"]),  # an abbreviation would mean another flag after the next release
        ("--flag=perhaps", ["--flag", "'perhaps'"]),
        ("stray", ["stray"]),
        ("--size=--", ["--size", "'--'"]),  # Python 3.11 makes an empty list of it
    ],
)
def test_a_parser_says_what_is_wrong_in_one_line(argv, words, capsys):
    parser = Parser("line one\n\n    line two", prog="kit.py")
    parser.add_argument("--size", type=number(int, "[0, 9)"))
    parser.add_argument("--flag", type=boolean)
    assert "line one\n\n    line two" in parser.format_help()  # line breaks stay
    with pytest.raises(SystemExit) as error:
        parser.parse_args(argv.split())
    out, err = capsys.readouterr()
    assert error.value.code == 2 and out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("kit.py: ") and err.endswith("(--help lists the flags)\n")
    assert all(word in err for word in words)


# -- the device --------------------------------------------------------------------------------------------------------


def test_auto_is_a_gpu_if_there_is_one():
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["nonsense", "", "cuda:99", "meta"])
def test_a_device_that_cannot_be_used_is_named(name):
    with pytest.raises(ValueError, match=f"^--device {name} cannot be used here: .") as error:
        pick_device(name)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["nonsense", "", "cuda:99", "meta", "mkldnn", "cuda" if not torch.cuda.is_available() else "cuda:98"]
)
def test_a_device_that_is_not_there_is_one_line(name, data_dir, tmp_path):
    result = here(*SMALL, "--data_dir", data_dir, "--out_dir", tmp_path / "out", f"--device={name}")
    assert_one_line(result, "--device", name)
    assert not (tmp_path / "out").exists()


# -- a script in a process of its own ----------------------------------------------------------------------------------

SCRIPT = """
from kvgpt.guard import guard_process
guard_process()
import os, sys, time
from pathlib import Path
import kvgpt.cli
from kvgpt.cli import fail, note, one_line_errors

def main():
{body}

kvgpt.cli.run_main(main{options})
"""


@pytest.fixture
def script(tmp_path):
    """A function: start a script "tool.py" whose main() has the given lines."""

    def script(*lines, options="", env=None, **kwargs):
        body = "\n".join(f"    {line}" for line in lines)
        (tmp_path / "tool.py").write_text(SCRIPT.format(body=body, options=options), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **(env or {})}
        kwargs = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE) | kwargs
        return subprocess.Popen([sys.executable, tmp_path / "tool.py"], env=env, cwd=tmp_path, **kwargs)

    return script


def finish(process):
    """Wait for the process. Returns it as subprocess.run does, with text.

    stdout keeps its line ends, because a test compares them. stderr has those of the platform, which become newlines.
    """
    out, err = process.communicate(timeout=60)
    out, err = (out or b"").decode("utf-8"), err.decode("utf-8").replace(os.linesep, "\n")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_script_that_ends_well_has_exit_code_0(script):
    result = finish(script("print('done')", "note('a remark')"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "tool.py: a remark\n")


@pytest.mark.parametrize("error", ["ValueError('n: 3 is odd')", "FileNotFoundError('n: 3 is odd')"])
def test_a_users_mistake_is_one_line_and_exit_code_1(error, script):
    result = finish(script("with one_line_errors():", f"    raise {error}"))
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "tool.py: n: 3 is odd\n")


@pytest.mark.parametrize("error", ["ValueError", "KeyError", "RuntimeError", "AssertionError"])
def test_a_bug_keeps_its_traceback(error, script):
    result = finish(script("with one_line_errors():", "    pass", f"raise {error}('here')"))
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback") and f"{error}: " in result.stderr


@pytest.mark.parametrize("lines", [["fail('a\\n\\x1b[2Jb')"], ["kvgpt.cli.Parser('').error('a\\n\\x1b[2Jb')"]])
def test_a_message_is_one_line_whatever_it_quotes(lines, script):
    """A path, a flag or a name in a file may hold a newline, or codes that move the cursor of the terminal."""
    result = finish(script(*lines))
    assert_one_line(result, r"tool.py: a\n\x1b[2Jb")


def test_only_the_mistakes_of_a_user_are_one_line():
    with pytest.raises(TypeError), one_line_errors():
        raise TypeError


def test_a_failure_has_the_exit_code_it_asks_for_and_one_process_speaks(script):
    """torchrun starts several processes, which all fail alike."""
    result = finish(script("fail('no', code=3)"))
    assert (result.returncode, result.stderr) == (3, "tool.py: no\n")
    result = finish(script("fail('no', code=3)", env=ranked(RANK=1)))
    assert (result.returncode, result.stderr) == (3, "")
    result = finish(script("fail('no', code=3)", env={"RANK": "1"}))  # a left-over, not torchrun's
    assert (result.returncode, result.stderr) == (3, "tool.py: no\n")


@linux
@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "on the way"])
def test_a_full_disk_behind_stdout_is_one_line(lines, script):
    """Short output fails only when the interpreter flushes it at the end, which prints a traceback of its own."""
    with open("/dev/full", "wb") as full:
        result = finish(script(f"for i in range({lines}):", "    print(i)", stdout=full))
    assert_one_line(result, "tool.py: cannot write its output: No space left on device", code=1)


@unix
def test_a_file_that_cannot_be_written_is_named_with_what_is_safe(script, tmp_path):
    (tmp_path / "file").write_text("here first")
    place, options = f"{str(tmp_path / 'file' / 'new')!r}", ", disk_hint='older files are whole'"
    result = finish(script(f"open({place}, 'w')", options=options))
    assert_one_line(result, f"cannot write {tmp_path / 'file' / 'new'}: Not a directory; older files are whole", code=1)
    result = finish(script(f"open({place}, 'w')"))
    assert_one_line(result, "Not a directory\n", code=1)


@unix
@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "on the way"])
def test_a_reader_that_has_gone_ends_a_script_without_a_word(lines, script):
    """As in `python sample.py | head -1`."""
    read, write = os.pipe()
    os.close(read)
    process = script(f"for i in range({lines}):", "    print(i)", stdout=write)
    os.close(write)
    result = finish(process)
    assert (result.returncode, result.stderr) == (1, "")


@unix
def test_a_reader_that_has_gone_is_one_line_where_there_is_something_to_say(script):
    """A run of train.py ends there, and its user must hear that the checkpoints are whole."""
    read, write = os.pipe()
    os.close(read)
    process = script("print(1)", options=", disk_hint='older files are whole'", stdout=write)
    os.close(write)
    assert_one_line(finish(process), "cannot write its output: Broken pipe; older files are whole", code=1)


WAITS = "with TemporaryDirectory(dir='.'): print('ready', flush=True); time.sleep(60)"


@unix
@pytest.mark.parametrize(["name", "code"], [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_is_an_exit_code_without_a_word_or_a_temporary_folder(name, code, script, tmp_path):
    process = script("from tempfile import TemporaryDirectory", WAITS)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(getattr(signal, name))
    result = finish(process)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["tool.py"]


@unix
def test_nohup_keeps_a_script_alive(script):
    """A handler of ours in the place of the one that ignores a lost terminal."""
    lines = ["import signal", "os.kill(os.getpid(), signal.SIGHUP)", "print('alive')"]
    result = finish(script(*lines, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)))
    assert (result.returncode, result.stdout, result.stderr) == (0, "alive\n", "")


@unix
def test_torchrun_ends_a_process_that_waits_for_others_inside_a_library(script):
    """30 seconds of waiting, because no handler of Python runs while a library waits."""
    lines = ["import signal, sys", "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"]
    assert finish(script(*lines, env=ranked())).stdout == "True\n"


@pytest.mark.parametrize(
    "lines",
    [["bytearray(10**18)"], ["import torch", "torch.empty(10**17)"]],
    ids=["MemoryError", "torch"],
)
def test_no_memory_is_one_line_with_what_would_fit(lines, script):
    result = finish(script(*lines, options=", memory_hint='a smaller batch would fit'"))
    assert_one_line(result, "tool.py: out of memory: a smaller batch would fit", code=1)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_output_is_utf8_whatever_the_terminal_asks_for(encoding, script):
    r"""A character that no encoding has, half a surrogate pair, is shown as its escape. Lines end in \n everywhere."""
    result = finish(script(r"print('β → 字 \ud800')", "print('é')", env={"PYTHONIOENCODING": encoding}))
    assert (result.returncode, result.stdout, result.stderr) == (0, "β → 字 \\ud800\né\n", "")


@unix
def test_a_script_without_a_stdout_still_runs(script, tmp_path):
    """As under a service manager that has closed it: Python's sys.stdout is None then."""
    result = finish(script("assert sys.stdout is None", "Path('made').touch()", preexec_fn=lambda: os.close(1)))
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "made").exists()
