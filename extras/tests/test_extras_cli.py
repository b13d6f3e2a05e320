"""extras/cli.py: argument types, errors in one line, and what a closed pipe does to a command."""

import argparse
import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from extras.cli import Parser, need
from helpers import ROOT, assert_help, assert_one_line, here, ok, run, unix
from model import PRETRAINED

# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--file", ""], "--file is empty"),
        (["--n", "x"], "argument --n: invalid int value: 'x'"),
    ],
)
def test_a_mistake_in_a_flag_is_one_line(flags, words, capsys):
    parser = Parser("What it does.")
    parser.add_argument("--file")
    parser.add_argument("--n", type=int)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(flags)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", f"{parser.prog}: {words} (--help lists the flags)\n")


def test_a_package_that_is_missing_is_named_with_the_command():
    assert need("--plot", "argparse", "itertools") is argparse
    with pytest.raises(ValueError, match=r"--plot needs nowhere \(No module named 'nowhere'\): pip install nowhere$"):
        need("--plot", "nowhere")


COMMANDS = ("bench", "evaluate", "export", "plot")


def test_a_command_may_be_run_as_a_file(tmp_path):
    assert_help(*(ROOT / "extras" / (name if name == "bench" else f"{name}.py") for name in COMMANDS), cwd=tmp_path)


MODULES = (*(f"extras.{name}" for name in COMMANDS), "lesson.check")


@pytest.mark.parametrize("name", MODULES)
def test_without_the_environment_one_line_says_so(name):
    """-S leaves out site-packages."""
    assert_one_line(run("-S", "-m", name), "No module named", "README.md", code=1)


@unix
def test_ctrl_c_during_the_imports_is_quiet(tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(99)", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-m", "extras.evaluate"], cwd=ROOT, env=env, **pipes) as process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == b"" and process.returncode == 130


# -- commands as processes --------------------------------------------------------------------------------------------

SCRIPT = """
from extras.cli import one_line_errors, run_main

def main():
{body}

run_main(main)
"""


@pytest.fixture
def tool(tmp_path):
    """tool(*lines) runs a script "tool.py" whose main() has these lines."""

    def tool(*lines):
        body = "\n".join(f"    {line}" for line in lines)
        (tmp_path / "tool.py").write_text(SCRIPT.format(body=body), encoding="utf-8")
        return run(tmp_path / "tool.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})

    return tool


def test_a_bug_keeps_its_traceback(tool):
    result = tool("raise ValueError('here')")
    assert result.returncode == 1 and result.stderr.startswith("Traceback") and "ValueError: here" in result.stderr


@pytest.mark.parametrize(
    "command, words",
    [
        (["plot"], "copy log.csv into a folder that you can write to, and pass that folder"),
        (["export", "--format", "onnx", "--ckpt", ROOT / "assets" / "shakespeare.pt"], "as --out_dir, and the model"),
    ],
    ids=["plot", "export"],
)
def test_a_folder_that_cannot_be_written_is_one_line_with_a_way_out(command, words, tmp_path, monkeypatch):
    """As on Kaggle. The tests may run as root, who can write everywhere, so the system call fails here."""
    (tmp_path / "log.csv").write_text("step,train_loss,val_loss\n1,2.0,2.0\n", encoding="utf-8")

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr("model.write_atomically", refuse)
    monkeypatch.setattr("extras.cli.lock_folder", refuse)
    name, *flags = command
    flags += ["--out_dir", tmp_path] if flags else [tmp_path]
    result = here(*flags, script=f"extras/{name}.py")
    assert_one_line(result, f"cannot write to {tmp_path} (Read-only file system): ", words, code=1)


# -- hints for what people type who come from nanoGPT, or guess --------------------------------------------------------

HINTS = [
    ("sample.py {file}", "type --ckpt {file}"),
    ("sample.py --init_from=gpt2-xl", "type --ckpt for a model from elsewhere"),
    ("sample.py --ckpt gpt2-xl", "hf download openai-community/gpt2-xl"),
    ("sample.py --init_from resume", "nothing for your last run"),
    ("sample.py --temp 0.5", "did you mean --temperature?"),
    ("sample.py --num-sample 2", "did you mean --num_samples?"),
    ("sample.py --promt a", "did you mean --prompt?"),
    ("sample.py hello", 'type --prompt "TEXT"'),
    (f"sample.py {'long' * 99}", 'type --prompt "TEXT"'),
    ("sample.py {file} --nonsense 1", "type --ckpt {file}"),
    ("sample.py {spaces} --nonsense 1", "type --ckpt {spaces}"),
    ("train.py {spaces} more", "type --init_from {spaces}"),
    ("sample.py --start=a\\nb", "in a shell, $'\\n' is a newline"),
    ("sample.py --data_dir data", "the checkpoint has the vocabulary"),
    ("sample.py --ckpt {other}", "pass the file, such as {other}/mine.pt"),
    ("sample.py --ckpt https://example.com/ckpt.pt", "is a web address: download the file or folder first"),
    ("sample.py --prompt -Hello", "one that starts with - needs an =, as in --prompt=-a"),
    ("sample.py {text}", "type --prompt FILE:{text}"),
    ("train.py --init_from=gpt2-xl", "hf download openai-community/gpt2-xl --local-dir gpt2-xl"),
    ("train.py {file}", "type --init_from {file}"),
    ("train.py {only}", "type --init_from {only}"),
    ("train.py data/shakespeare_char", "type --data_dir data/shakespeare_char"),
    ("train.py {text}", "run python data/prepare.py --input {text} first"),
    ("train.py --lr 1e-3", "type --learning_rate"),
    ("train.py --vocab_size 300", "that is a flag of data/prepare.py"),
    ("train.py --resume", "type --init_from resume"),
    ("train.py --dataset=shakespeare_char", "type --data_dir FOLDER"),
    ("train.py --input a.txt", "run python data/prepare.py --input FILE first"),
    ("train.py --ckpt {file}", "type --init_from FILE"),
    ("train.py extra", "docs/interop.md lists what nanoGPT's flags are called here"),
    ("train.py --wandb_log", "docs/interop.md lists what nanoGPT's flags are called here"),
    ("train.py --max-iter 9", "did you mean --max_iters?"),
    ("train.py --init_from resume --out_dir {only}", "--init_from {only} starts a new run from its weights"),
    ("data/prepare.py {file}", "type --input FILE"),
]


@pytest.mark.parametrize("command, hint", HINTS, ids=[command for command, _ in HINTS])
def test_a_near_miss_is_one_line_with_the_way_out(command, hint, tmp_path):
    only, other = tmp_path / "only", tmp_path / "other"
    spaces = tmp_path / "a  b c"
    shutil.copy(PRETRAINED, spaces)
    only.mkdir()
    other.mkdir()
    shutil.copy(PRETRAINED, only / "ckpt.pt")
    shutil.copy(PRETRAINED, other / "mine.pt")
    places = dict(spaces=spaces, file=PRETRAINED, only=only, other=other, text=ROOT / "data" / "sample.txt")
    script, *words = (word.format(**places) for word in command.split())
    places |= {name: shlex.quote(str(places[name])) for name in ("spaces", "file", "text")}  # in the hint
    assert_one_line(here(*words, script=script), hint.format(**places))


# -- signals of train.py -----------------------------------------------------------------------------------------------

SIGNALS = """
import os, signal
from extras.cli import catch_signals

received = catch_signals()
print(received, flush=True)
for _ in range(2):
    os.kill(os.getpid(), signal.{name})
    print(received == [signal.{name}] * len(received), len(received), flush=True)
"""


@unix
@pytest.mark.parametrize(
    "name, survives", [("SIGINT", False), pytest.param("SIGTERM", True, marks=pytest.mark.slow)]
)  # `timeout` sends SIGTERM twice
def test_a_run_polls_the_first_signal_and_a_second_ctrl_c_ends_it_at_once(name, survives):
    result = run("-c", SIGNALS.format(name=name))
    said, code = ["[]", "True 1", "True 2"], -getattr(signal, name)
    expected = (0, said) if survives else (code, said[:2])
    assert (result.returncode, result.stdout.splitlines()) == expected
    assert result.stderr.endswith("KeyboardInterrupt\n" if not survives else "")


IGNORED = """
import os, signal
from extras.cli import catch_signals

signal.signal(signal.SIGINT, signal.SIG_IGN)
received = catch_signals()
os.kill(os.getpid(), signal.SIGINT)
print(received)
"""


@unix
def test_a_run_that_a_shell_script_starts_in_the_background_goes_on_ignoring_ctrl_c():
    assert ok(run("-c", IGNORED)).stdout == "[]\n"
