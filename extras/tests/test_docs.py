"""The pages say what is so: their commands run, and the links, files, flags and tests in them exist.

Blocks: `sh` and `python` run, in order, one shell per file. `python NAME.py` is a file to save, and `python sketch`
needs something of the reader's. `py` is an excerpt of model.py. `text` is shown. `console` is shown too, except a line
that begins with "$ ": a user's mistake, followed by the message on stderr.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from extra_helpers import flags_of, write_gpt2
from helpers import ROOT

PACKAGES = ("check_cache", "extras/web")
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name / "README.md" for name in ("lesson", *PACKAGES))]
PAGES += [ROOT / "check_cache" / name for name in ("ADAPTERS.md", "FOUND.md")]
FILES = [ROOT / "README.md", *PAGES]
SCRIPTS = "data/prepare.py train.py sample.py extras/bench/__main__.py extras/export.py extras/evaluate.py".split()
# what the scripts write
WRITTEN = ("data/train.bin", "data/val.bin", "data/meta.json", "data/dev", "extras/decode/__pycache__")


def name_of(file):
    return file.relative_to(ROOT).as_posix()


every_file = pytest.mark.parametrize("file", FILES, ids=name_of)


# -- reading Markdown --------------------------------------------------------------------------------------------------


def read(file):
    return file.read_text(encoding="utf-8")


def blocks(text, *languages):
    """Return the (language, content) of the fenced blocks in these languages, or of all."""
    found = re.findall(r"^```([^\n`]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(language, content) for language, content in found if language in languages or not languages]


def prose(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def inline_code(text):
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def anchors(text):
    """Return the anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


# -- what a file names is there ----------------------------------------------------------------------------------------


@every_file
def test_every_link_leads_to_a_file_or_a_heading(file):
    # in Markdown and in HTML
    targets = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"", prose(read(file)))
    for link in (markdown or html for markdown, html in targets):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (file.parent / name).resolve() if name else file
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(read(target)), link


@every_file
def test_the_files_and_tests_that_it_names_are_there(file):
    folders = "extras|check_cache|tests|assets|docs|data|page"
    tests = "".join(
        read(test) for name in ("tests", "extras", "check_cache") for test in (ROOT / name).rglob("test_*.py")
    )
    for code in inline_code(read(file)):
        if re.fullmatch(rf"({folders})/[\w./]*|\w+\.py|[A-Z]\w+\.md|requirements\.txt", code):
            assert any((folder / code).exists() for folder in (ROOT, file.parent)) or code in WRITTEN, code
        if re.fullmatch(r"test_\w+", code):
            assert f"def {code}(" in tests, code


@every_file
def test_the_flags_that_it_names_exist(file):
    # --help of train.py leaves out what only recipes set
    known = flags_of(*SCRIPTS, "check_cache/__main__.py") | {f"--{name}" for name in train.FLAGS}
    shell = "".join(content for _, content in blocks(read(file), "sh", "console"))
    for code in [*inline_code(read(file)), *(line for line in shell.splitlines() if ".py " in line)]:
        ours = code.partition(".py ")[2] or code  # what precedes a script is torchrun's
        if not re.match(r"(pip|npm|git|python -m|vllm|make)\b", ours):
            for flag in re.findall(r"^--[\w-]+|(?<=\s)--[\w-]+", ours):
                assert flag in known, code


@every_file
def test_its_excerpts_are_in_the_model(file):
    lines = {line.split("  # ")[0].strip() for line in read(ROOT / "model.py").splitlines()}
    for _, content in blocks(read(file), "py"):
        for line in content.splitlines():
            assert line.split("  # ")[0].strip() in lines, line


def test_each_script_of_elsewhere_is_on_a_page_and_pins_what_it_imports():
    read_head = runpy.run_path(str(ROOT / "docs" / "elsewhere" / "run.py"))["read_head"]
    heads = {file.name: read_head(file) for file in (ROOT / "docs" / "elsewhere").glob("*.py")}
    heads = {name: head for name, head in heads.items() if head}  # run.py and report.py have none
    assert len(heads) > 30
    pages = "".join(map(read, PAGES))
    for name, head in heads.items():
        assert f"](elsewhere/{name})" in pages and head["tool"]["uv"]["exclude-newer"], name
        assert all(re.fullmatch(r"[\w\[\]-]+==[\w.]+", package) for package in head["dependencies"]), name


def test_the_code_map_counts_lines():
    """A count may be old by a twentieth, because not every commit should have to change the README."""
    rows = re.findall(r"^ *([\w/]+(?:/|\.py)) +([\d,]+) ", read(ROOT / "README.md"), flags=re.MULTILINE)
    assert len(rows) >= 8
    for name, count in rows:
        path = ROOT / name
        files = [path] if path.is_file() else path.rglob("*")
        kinds = {".py", ".c", ".h", ".js", ".css", ".html", ".mjs"}
        installed = {"node_modules", ".packages", "build"}  # by npm and pip
        files = [file for file in files if file.suffix in kinds and not installed & {*file.parts}]
        lines = sum(len(read(file).splitlines()) for file in files)
        assert abs(int(count.replace(",", "")) - lines) <= lines / 20, (name, lines)


# -- the commands run --------------------------------------------------------------------------------------------------

# Runs of minutes become runs of seconds, on text that comes with the code. pip, make and hf need not fetch anything:
# a small GPT-2 with random weights stands in for OpenAI's.
SHELL = r"""
python() {
    case "$*" in
        data/prepare.py|data/prepare.py\ --tokenizer*) command python "$@" --input data/sample.txt ;;
        train.py*) command python "$@" --max_iters 6 ;;
        "-m extras.bench"*) command python "$@" --repeats 1 --variants uncached eager ;;
        "-m extras.evaluate"*) head -c 3000 data/sample.txt > short; command python "${@/data\/sample.txt/short}" ;;
        sample.py*) command python "$@" --max_new_tokens 40 ;;
        *) command python "$@" ;;
    esac
}
check-cache() { command python -m check_cache "$@"; }
torchrun() { command python -m torch.distributed.run "$@" --max_iters 6; }
pip() { :; }
make() { :; }
hf() { :; }
set -e
"""


def script_of(text):
    """Return the commands of a file as one shell script."""
    script = ""
    for language, content in blocks(text):
        if language == "sh":
            script += content
        elif language == "python":
            script += f"python - <<'END'\n{content}END\n"
        elif saved := re.fullmatch(r"python (\w+\.py)", language):
            script += f"cat > {saved[1]} <<'END'\n{content}END\n"
    return script


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs bash")
@pytest.mark.parametrize("file", [file for file in FILES if script_of(read(file))], ids=name_of)
def test_every_command_runs_in_a_fresh_copy(file, tmp_path):
    """The blocks of a file, from first to last, as a reader would. Then its mistakes, each with its message."""
    skip = shutil.ignore_patterns(".*", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    folder = shutil.copytree(ROOT, tmp_path / "kit", ignore=skip)
    if "\nhf download" in read(file):
        write_gpt2(folder / "gpt2", vocab_size=512)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": programs, "PYTHONIOENCODING": "utf-8"}

    def bash(script):
        command = ["bash", "-c", SHELL + script]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8")

    text = read(file)
    result = bash(script_of(text))
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    for shape in re.findall(r"^print\(.*# (torch\.Size\(.*?\))", text, flags=re.MULTILINE):
        assert f"{shape}\n" in result.stdout
    verifications = re.findall(r"^python sample\.py .*--verify", script_of(text), flags=re.MULTILINE)
    found = re.findall("verify: OK.* without the cache", result.stderr)  # some compare with the cache, too
    assert len(found) == len(verifications)
    for _, content in blocks(text, "console"):
        for command, message in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", content, flags=re.MULTILINE):
            result = bash(command.replace("python ", "command python "))
            assert result.returncode != 0 and (result.stdout, result.stderr) == ("", message), command


@pytest.mark.slow
def test_the_first_command_and_the_edit_that_breaks_the_cache_print_what_the_readme_shows(tmp_path):
    readme = read(ROOT / "README.md")
    (command,) = re.findall(r"^python sample\.py .*--verify$", script_of(readme), flags=re.MULTILINE)
    (_, right), (_, wrong) = [block for block in blocks(readme, "text") if "sample.py: verify:" in block[1]]
    folder = shutil.copytree(ROOT, tmp_path / "extras", ignore=shutil.ignore_patterns(".*", "out", "node_modules"))

    def compare(shown, exit_code):
        """The text begins as shown, and the first line about --verify is the one shown."""
        words = [sys.executable, *shlex.split(command)[1:]]
        result = subprocess.run(words, cwd=folder, capture_output=True, encoding="utf-8")
        text, verdict = shown.split("...\n")
        assert result.returncode == exit_code, result.stderr
        assert result.stdout.startswith(text)
        assert next(line for line in verdict.splitlines() if "verify:" in line) in result.stderr.splitlines()

    compare(right, 0)
    edit = r"in `\w+\.(\w+)`, find the line that begins with `(.*?)`, and add `(.*?)` at its end"
    name, start, addition = re.search(edit, readme.replace("\n", " ")).groups()
    before, function, after = read(folder / "model.py").partition(f"def {name}(")
    edited = re.sub(rf"^( *{re.escape(start)}.*)$", lambda line: line[0] + addition, after, count=1, flags=re.MULTILINE)
    (folder / "model.py").write_text(before + function + edited, encoding="utf-8")
    compare(wrong, 1)


@pytest.mark.slow
def test_requirements_txt_is_enough_for_the_three_commands():
    """They import without what is installed for exports, pictures and tests."""
    extras = "onnx onnxruntime onnxscript transformers tokenizers safetensors matplotlib hypothesis".split()
    script = f"import sys; sys.modules.update(dict.fromkeys({extras})); sys.path.append('data')"
    subprocess.run([sys.executable, "-c", f"{script}; import prepare, train, sample"], cwd=ROOT, check=True)
