"""The README says what is so: its commands run, its flags are those of the scripts, what it names is there.

python tests/test_readme.py     writes the flags into it
"""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent  # this file also runs as a script, which finds no helpers
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


def split_flags(text):
    """Return (the README up to the flags, the flags, the rest)."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin], text[begin:end], text[end:]


def blocks(text):
    """[(language, content)] of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def inline_code(text):
    """Every piece of code between single backticks, outside the fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


@pytest.fixture(scope="module")
def readme():
    return README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_flags_are_those_of_the_scripts(readme):
    """A flag that is gone, new, or has another default."""
    _, written, _ = split_flags(readme)
    assert written.strip() == flags().strip(), "python tests/test_readme.py writes them again"


def test_what_it_names_is_there(readme):
    """A link to a file or folder that has moved, or a test that has another name."""
    for target in re.findall(r"\]\(([^)#]+)", readme):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", readme))
    assert len(named) > 5
    for name in named:
        assert f"def {name}(" in tests, name
    languages = {language for language, _ in blocks(readme)}
    assert languages == {"sh", "python", "text", "console"}


def test_the_files_that_it_names_are_there(readme):
    """A file that has moved, in the list of files, in a sentence, or in a command."""
    # the list of files: two blanks before a name put it into the folder above
    (listed,) = [content for language, content in blocks(readme) if content.startswith("model.py ")]
    folder, names = ROOT, set()
    for line in listed.splitlines():
        name = re.split(r"\s{2,}", line.strip())[0]
        path = (folder if line.startswith("  ") else ROOT) / name
        assert path.is_dir() if name.endswith("/") else path.is_file(), name
        folder = folder if line.startswith("  ") else path
        names.add(path.relative_to(ROOT).as_posix())
    code = {file.relative_to(ROOT).as_posix() for base in (ROOT, ROOT / "kvgpt") for file in base.glob("[a-z]*.py")}
    assert code <= names, "every script and every module of kvgpt is listed"
    assert {f"kvgpt/{base.parent.name}" for base in (ROOT / "kvgpt").glob("*/__init__.py")} <= names

    # sentences
    paths = [code for code in inline_code(readme) if re.match(r"(kvgpt|tests|web|assets)\b[\w./]*$|\w+\.py$", code)]
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


def commands(readme):
    """Every command that runs a script, as a list of words."""
    shell = [content for language, content in blocks(readme) if language in ("sh", "console")]
    for line in [*"".join(shell).splitlines(), *inline_code(readme)]:
        words = shlex.split(line.removeprefix("$ "), posix=False) if ".py" in line else []
        if words and words[0] in ("python", "torchrun", *SCRIPTS):
            yield words


def test_the_flags_that_it_names_exist(readme):
    """A flag that has another name now, in a sentence or in a command."""
    before, written, after = split_flags(readme)
    of_script = {
        script: set(re.findall(r"--[\w-]+", text.split("</details>")[0]))
        for script, text in re.findall(r"<code>(.*?)</code>(.*?)</details>", written, flags=re.DOTALL)
    }
    assert tuple(of_script) == SCRIPTS
    found = list(commands(before + after))
    assert len(found) > 25
    for words in found:
        (at,) = [i for i, word in enumerate(words) if word.endswith(".py")]
        assert (ROOT / words[at]).is_file(), words
        for word in words[at:]:
            assert not word.startswith("--") or word in of_script[words[at]], (word, words)
    for code in inline_code(before + after):
        for flag in re.findall(r"^--[\w-]+|(?<=\s)--[\w-]+", code):
            assert any(flag in known for known in of_script.values()), code


def test_the_names_in_its_code_exist(readme):
    """A class, method or function that has another name now."""
    for language, content in blocks(readme):
        if language == "python":
            for node in ast.walk(ast.parse(content)):
                if isinstance(node, ast.ImportFrom):
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)

    # **`names`** of "How the cache works", and the column "here" of the table of designs
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "model.py", *(ROOT / "kvgpt").rglob("*.py")))
    rows = [line.split("|") for line in readme[readme.index("| design |") :].splitlines() if line.startswith("| ")]
    names = re.findall(r"\*\*`([\w.]+)`\*\*", readme) + [code for row in rows for code in inline_code(row[3])]
    names = [name for name in names if re.fullmatch(r"[A-Z]\w+(\.\w+)?|[a-z]+_\w+", name)]
    assert len(names) > 8
    for name in names:
        for part in name.split("."):
            assert re.search(rf"\b(class|def) {part}\b", sources), name


@pytest.mark.slow
def test_every_command_runs_in_a_fresh_copy(readme, tmp_path):
    """A command that fails, or one that says something else than the README does.

    One shell runs all of them, from the first to the last, as somebody reads.
    """
    # a copy without what git ignores
    folder = tmp_path / "kit"
    skip = shutil.ignore_patterns(".*", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    shutil.copytree(ROOT, folder, ignore=skip)
    (folder / "out").mkdir()

    # the commands
    script = PREAMBLE
    for language, content in blocks(readme):
        if language == "sh":
            script += content
        elif language == "python":
            script += f"command python - <<'END'\n{content}END\n"
    environment = Path(sys.executable).parent
    if (ROOT / "web" / "node_modules").is_dir() and (ROOT / ".venv" / "installed").exists():
        (folder / ".venv").mkdir()
        for name in ("bin", "lib", "pyvenv.cfg"):
            (folder / ".venv" / name).symlink_to(ROOT / ".venv" / name)
        (folder / ".venv" / "installed").touch()  # newer than pyproject.toml, so that make web installs nothing
    else:
        script = script.replace("make web\n", "")
    env = os.environ | {"PATH": f"{environment}{os.pathsep}{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8"}
    env |= {name: "" if "KIT_FULL" in os.environ else value for name, value in SHORTER.items()}
    result = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "torch.Size([1, 9, 32])\ntorch.Size([1, 10, 32])" in result.stdout  # as the README says beside it
    assert "verify: DIFFERENT" not in result.stderr and result.stderr.count("samples match") == 3

    # the mistakes, each with its message
    mistakes = [m for _, content in blocks(readme) for m in re.findall(r"^\$ (.*)\n(.*)\n", content, re.MULTILINE)]
    assert len(mistakes) > 3
    for command, message in mistakes:
        result = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, encoding="utf-8")
        assert result.returncode != 0 and (result.stdout, result.stderr) == ("", f"{message}\n"), command


if __name__ == "__main__":
    before, _, after = split_flags(README.read_text(encoding="utf-8"))
    README.write_text(before + flags() + after, encoding="utf-8")
