"""kvgpt/guard.py: streams that are closed or full, and Ctrl-C at any moment, in real processes."""

import os
import signal
import subprocess
import sys

import pytest

from helpers import PROMPT, ROOT, SMALL, assert_one_line, linux, load, log, run, texts_of, unix

pytestmark = unix

# -- streams -----------------------------------------------------------------------------------------------------------

STREAMS = ["2>&-", pytest.param("2>/dev/full", marks=linux)]


def shell(streams, *args):
    """Run `python ARGS` with the redirections `streams` of a shell, such as "2>&-", which closes stderr."""
    command = ["sh", "-c", f'exec "$0" "$@" {streams}', sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120)


@pytest.mark.parametrize("streams", STREAMS)
def test_a_text_is_whole_and_alone_without_a_stderr(streams, trained):
    """The report in the text, which print(file=None) writes to stdout, or no text at all."""
    result = shell(streams, "sample.py", "--out_dir", trained, "--device", "cpu", "--prompt", PROMPT)
    assert (result.returncode, result.stdout) == (0, texts_of(trained, PROMPT, 100)[0])


@pytest.mark.slow
@pytest.mark.parametrize("streams", [*STREAMS, ">&-", "<&- >&- 2>&-"])
def test_a_run_saves_without_its_streams(streams, data_dir, tmp_path):
    flags = [*SMALL, "--max_iters", 4, "--eval_interval", 2, "--data_dir", data_dir, "--out_dir", tmp_path]
    result = shell(streams, "train.py", *flags)
    assert (result.returncode, result.stderr) == (0, "")
    assert load(tmp_path / "last.pt")["iter_num"] == 4 and (tmp_path / "ckpt.pt").exists()
    assert [row["step"] for row in log(tmp_path)] == ["2", "4"]
    assert ("best val loss" in result.stdout) == (">&-" not in streams.split())


def test_a_text_without_a_stdout_is_one_line(trained):
    assert_one_line(shell(">&-", "sample.py", "--out_dir", trained), "no stdout", code=1)


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path):
    """A C library writes to stderr by its number. A file that was opened later had the number, and got the message."""
    code = "from kvgpt.guard import guard_process; guard_process(); import os, sys; f = open(sys.argv[1], 'wb'); "
    result = shell("2>&-", "-c", code + "os.write(2, b'a message')", tmp_path / "file")
    assert result.returncode == 0 and (tmp_path / "file").read_bytes() == b""


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------

SCRIPTS = ["train.py", "sample.py", "export.py", "bench.py", "data/prepare.py", "data/hold_out.py", "assets/draw.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_during_the_imports_is_exit_code_130_without_a_word(script, tmp_path):
    for name in ("torch", "numpy"):
        (tmp_path / f"{name}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, script], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"") and process.returncode == 130


INTERRUPT = """
import os, runpy, signal
import model

def hidden_states(*args, **kwargs):
    os.kill(os.getpid(), int(os.environ["NUMBER"]))

model.GPT.hidden_states = hidden_states
runpy.run_path("export.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_the_onnx_exporter_is_an_exit_code_without_a_word(number, trained, tmp_path):
    """The exporter turns it into an error of its own, with the traces of all its passes."""
    (tmp_path / "ckpt.pt").write_bytes((trained / "ckpt.pt").read_bytes())
    (tmp_path / "tmp").mkdir()
    env = {"NUMBER": str(int(number)), "TMPDIR": str(tmp_path / "tmp")}
    result = run("-c", INTERRUPT, "--format", "onnx", "--out_dir", tmp_path, env=env)
    assert (result.returncode, result.stdout, result.stderr) == (128 + number, "", "")
    assert not (tmp_path / "onnx").exists() and not list((tmp_path / "tmp").glob("tmp*"))  # torch leaves a folder
