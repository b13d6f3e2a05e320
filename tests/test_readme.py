"""The README says what is so: its commands run, its flags are those of the scripts, what it names is there.

python tests/test_readme.py     writes the flags into it
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- flags -->\n", "<!-- /flags -->\n"
SCRIPTS = ("data/prepare.py", "train.py", "sample.py", "bench.py", "export.py")
# what makes minutes seconds; KIT_FULL=1 in the environment runs every command as it stands
SHORTER = {
    "TRAIN": "--max_iters 60",
    "BENCH": "--repeats 1 --variants uncached eager onnx hf",
    "SAMPLE": "--max_new_tokens 40",
}
PREAMBLE = """
python() {
    case "$1" in
        train.py) command python "$@" $TRAIN ;;
        bench.py) command python "$@" $BENCH ;;
        sample.py) command python "$@" $SAMPLE ;;
        *) command python "$@" ;;
    esac
}
torchrun() { command torchrun "$@" $TRAIN; }
set -e
"""


def flags():
    """Every script's --help, folded."""
    text = ""
    for script in SCRIPTS:
        command = [sys.executable, script, "--help"]
        env = os.environ | {"COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
        said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", check=True).stdout
        options = said[said.index("\noptions:") :].strip("\n")
        text += f"<details><summary><code>{script}</code></summary>\n\n```text\n{options}\n```\n\n</details>\n\n"
    return text


def blocks(text):
    """[(language, content)] of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_flags_are_those_of_the_scripts():
    text = README.read_text(encoding="utf-8")
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert written.strip() == flags().strip(), "python tests/test_readme.py writes them again"


def test_what_it_names_is_there():
    """Local links and pictures, tests, and the scripts in its commands."""
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / target).is_file(), target
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 5
    for name in named:
        assert f"def {name}(" in tests, name
    languages = {language for language, _ in blocks(text)}
    assert languages == {"sh", "python", "text", "console"}
    for language, content in blocks(text):
        if language == "python":
            ast.parse(content)


@pytest.mark.slow
def test_every_command_runs_in_a_fresh_copy(tmp_path):
    """One shell for all of them, from the first to the last, as somebody reads."""
    folder = tmp_path / "kit"
    skip = shutil.ignore_patterns(".venv", ".git", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    shutil.copytree(ROOT, folder, ignore=skip)
    (folder / "out").mkdir()
    script = PREAMBLE
    for language, content in blocks(README.read_text(encoding="utf-8")):
        if language == "sh":
            script += content
        elif language == "python":
            script += f"command python - <<'END'\n{content}END\n"
    environment = Path(sys.executable).parent
    if (ROOT / "web" / "node_modules").is_dir() and (ROOT / ".venv" / "installed").exists():
        (folder / ".venv").symlink_to(ROOT / ".venv", target_is_directory=True)
    else:
        script = script.replace("make web\n", "")
    env = os.environ | {"PATH": f"{environment}{os.pathsep}{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8"}
    env |= {name: "" if "KIT_FULL" in os.environ else value for name, value in SHORTER.items()}
    result = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "torch.Size([1, 9, 32])\ntorch.Size([1, 10, 32])" in result.stdout  # as the README says beside it
    assert "verify: DIFFERENT" not in result.stderr and result.stderr.count("samples match") == 3


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(text[: text.index(BEGIN) + len(BEGIN)] + flags() + text[text.index(END) :], encoding="utf-8")
