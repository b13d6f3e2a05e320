"""README.md and docs/*.md say what is so: their commands run, and every link, file, flag, test and name exists.

python tests/test_docs.py     writes docs/flags.md

Blocks: `sh` and `python` run, in order, one shell per file. `py` is an excerpt of model.py. `text` is shown. `console`
is shown too, except a line that begins with "$ ": a user's mistake, followed by the message on stderr.
"""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent  # this file also runs as a script, which finds no helpers
FLAGS = ROOT / "docs" / "flags.md"
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = ("data/prepare.py", "data/hold_out.py", "train.py", "sample.py", "bench.py", "export.py")
LANGUAGES = {"sh", "python", "py", "text", "console"}
ELSEWHERE = {"start_pos", "forward_cached"}  # names in the code of others
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


# -- docs/flags.md -----------------------------------------------------------------------------------------------------


def flags():
    """Return the content of docs/flags.md: the options in every script's --help."""
    text = (
        "# Every flag\n\nThis file answers which flags each script has, and what their defaults are. "
        "`python tests/test_docs.py`\nwrites it from the `--help` of the scripts, and a test compares the two.\n"
    )
    for script in SCRIPTS:
        command = [sys.executable, script, "--help"]
        env = os.environ | {"COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
        said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", check=True).stdout
        options = said[said.index("\noptions:") :].strip("\n")
        text += f"\n## {script}\n\n```text\n{options}\n```\n"
    return text


def flags_of_scripts():
    """Return {script: set of its flags}, from docs/flags.md."""
    sections = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", read(FLAGS), flags=re.MULTILINE | re.DOTALL)
    return {script: set(re.findall(r"--[\w-]+", text)) for script, text in sections}


# -- reading Markdown --------------------------------------------------------------------------------------------------


def read(file):
    return file.read_text(encoding="utf-8")


def blocks(text):
    """Return [(language, content)] of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def prose(text):
    """Return the text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def inline_code(text):
    """Return every piece of code between single backticks, outside the fenced blocks."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def links(text):
    """Return the targets of links and images, in Markdown and in HTML, outside the fenced blocks."""
    targets = re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"", prose(text))
    return [markdown or html for markdown, html in targets]


def anchors(text):
    """Return the anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def named_tests(text):
    return re.findall(r"`(test_\w+)`", text)


def named_paths(text):
    """Return the inline code that looks like a path in this repository."""
    paths = r"(kvgpt|tests|web|assets|docs|data)/[\w./]*|\w+\.py|[A-Z]\w+\.md|requirements\.txt|colab\.ipynb"
    return [code for code in inline_code(text) if re.fullmatch(paths, code)]


def named_code(text):
    """Return the inline code that looks like a name in the code: an underscore or a capital inside, or Class.name."""
    words = [code.removesuffix("()") for code in inline_code(text) if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", code)]
    words = [word for word in words if re.search(r"\w_\w|[a-z][A-Z]|[A-Z]\w*[a-z]\w*\.", word)]
    others = {*named_tests(text), *named_paths(text), *ELSEWHERE}
    return [word for word in words if word not in others]


def pinned_names(text):
    """Return the classes and functions in **`bold code`**, and in the column "here" of the table of designs."""
    rows = [line.split("|") for line in text[text.find("| design |") :].splitlines() if line.startswith("| ")]
    names = re.findall(r"\*\*`([\w.]+)`\*\*", text)
    names += [code for row in rows if "| design |" in text for code in inline_code(row[3])]
    return [name for name in names if re.fullmatch(r"[A-Z]\w+(\.\w+)?|[a-z]+_\w+", name)]


def commands(text):
    """Return every command that runs a script, as a list of words."""
    shell = "".join(content for language, content in blocks(text) if language in ("sh", "console"))
    found = []
    for line in [*shell.splitlines(), *inline_code(text)]:
        words = shlex.split(line.removeprefix("$ "), posix=False) if ".py" in line else []
        if words and words[0] in ("python", "torchrun", *SCRIPTS) and any(word in SCRIPTS for word in words):
            found.append(words)
    return found


def mistakes(text):
    """Return [(command, message)] of the `$` lines in console blocks."""
    console = [content for language, content in blocks(text) if language == "console"]
    return [pair for content in console for pair in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", content, re.MULTILINE)]


# -- what a file names is there ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_flags_are_those_of_the_scripts():
    """A flag that is gone, new, or has another default."""
    assert read(FLAGS) == flags(), "python tests/test_docs.py writes the file again"


def test_the_files_hold_what_these_tests_look_for():
    """A change of style that makes a pattern above match nothing, so that its test passes without a look."""
    text = "\n".join(map(read, FILES))
    assert len(FILES) >= 8
    assert {language for language, _ in blocks(text)} == LANGUAGES
    assert tuple(flags_of_scripts()) == SCRIPTS and all(len(known) > 1 for known in flags_of_scripts().values())
    least = {links: 15, named_tests: 8, named_paths: 12, named_code: 20, pinned_names: 6, commands: 40, mistakes: 4}
    for find, number in least.items():
        assert len({str(found) for file in FILES for found in find(read(file))}) >= number, find.__name__
    assert text.count("--verify") >= 4 and text.count("# torch.Size(") >= 2


@every_file
def test_every_block_is_of_a_known_language(file):
    """A block that no test runs because it is of no language, or is never closed."""
    fences = re.findall(r"^```(.*)$", read(file), flags=re.MULTILINE)
    assert len(fences) % 2 == 0 and set(fences[1::2]) <= {""}
    assert set(fences[::2]) <= LANGUAGES


@every_file
def test_every_link_leads_somewhere(file):
    """A link to a file, folder or heading that has moved."""
    for link in links(read(file)):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (file.parent / name).resolve() if name else file
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(read(target)), link


@every_file
def test_the_tests_and_files_that_it_names_are_there(file):
    """A test that has another name, or a file that has moved."""
    tests = "".join(read(test) for test in (ROOT / "tests").rglob("test_*.py"))
    for name in named_tests(read(file)):
        assert (ROOT / "tests" / f"{name}.py").exists() or f"def {name}(" in tests, name
    written = ("data/train.bin", "data/val.bin", "data/meta.json", "data/dev")  # by prepare.py and hold_out.py
    for path in named_paths(read(file)):
        assert (ROOT / path).exists() or path in written, path


def test_the_tree_of_files_is_complete():
    """A file that has moved, or a script or module that the README's list leaves out."""
    (listed,) = [content for _, content in blocks(read(ROOT / "README.md")) if content.startswith("model.py ")]
    folder, names = ROOT, set()
    for line in listed.splitlines():  # two blanks before a name put it into the folder above
        name = re.split(r"\s{2,}", line.strip())[0]
        path = (folder if line.startswith("  ") else ROOT) / name
        assert path.is_dir() if name.endswith("/") else path.is_file(), name
        folder = folder if line.startswith("  ") else path
        names.add(path.relative_to(ROOT).as_posix())
    code = {path.relative_to(ROOT).as_posix() for base in (ROOT, ROOT / "kvgpt") for path in base.glob("[a-z]*.py")}
    assert code <= names
    assert {f"kvgpt/{base.parent.name}" for base in (ROOT / "kvgpt").glob("*/__init__.py")} <= names


@every_file
def test_the_flags_that_it_names_exist(file):
    """A flag that has another name now, in a sentence or in a command."""
    known = flags_of_scripts()
    for words in commands(read(file)):
        (at,) = [i for i, word in enumerate(words) if word in SCRIPTS]
        for word in words[at:]:
            flag = word.split("=")[0]
            assert not word.startswith("--") or flag in known[words[at]] or flag == "--help", (word, words)
    for code in inline_code(read(file)):
        if re.match(r"(torchrun|pip|git|python -m|vllm|make)\b", code):
            continue  # other programs
        for flag in re.findall(r"^--[\w-]+|(?<=\s)--[\w-]+", code):
            assert any(flag in flags for flags in known.values()) or flag == "--help", code


@every_file
def test_the_names_in_its_code_exist(file):
    """A class, method, function or variable that has another name now."""
    for language, content in blocks(read(file)):
        for node in ast.walk(ast.parse(content)) if language == "python" else ():
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)

    scripts = [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py"), *(ROOT / "kvgpt").rglob("*.py")]
    python = "".join(map(read, scripts))
    for name in pinned_names(read(file)):
        for part in name.split("."):
            assert re.search(rf"\b(class|def) {part}\b", python), name
    others = [ROOT / "Makefile", ROOT / "colab.ipynb", ROOT / "tests" / "test_docs.py"]
    others += (ROOT / "web" / "page").rglob("*.*")
    sources = python + "".join(map(read, others))
    for name in named_code(read(file)):
        for part in name.split("."):
            assert re.search(rf"\b{part}\b", sources), name


@every_file
def test_its_excerpts_are_in_the_model(file):
    """A copy of code that has changed since."""
    lines = {line.split("  # ")[0].strip() for line in read(ROOT / "model.py").splitlines()}
    for language, content in blocks(read(file)):
        for line in content.splitlines() if language == "py" else ():
            assert line.split("  # ")[0].strip() in lines, line


# -- an environment with few packages, made without a network ----------------------------------------------------------


def closure(requirements):
    """Return the installed distributions that the requirements need, themselves included, as {name: Distribution}.

    Raises PackageNotFoundError for one that is not installed here.
    """
    found, todo = {}, [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found[name] = metadata.distribution(requirement.name)
        extras = requirement.extras or {""}
        for text in found[name].requires or ():
            needed = Requirement(text)
            if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(needed)
    return found


def install(site, requirements):
    """Link the requirements, and what they need, from this environment into the folder `site`."""
    for distribution in closure(requirements).values():
        for name in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name).resolve())


def pip(*args):
    """Do what `pip ARGS` does, by `install` into $KIT_SITE. The shell function `pip` below calls it."""
    assert args[0] == "install", args
    requirements, words = [], [word for word in args[1:] if word != "-U"]
    while words:
        word = words.pop(0)
        requirements += Path(words.pop(0)).read_text(encoding="utf-8").split() if word == "-r" else [word]
    install(Path(os.environ["KIT_SITE"]), requirements)


def make_environment(folder):
    """Make a virtual environment with requirements.txt only. Returns its folders of programs and of packages."""
    venv.create(folder, symlinks=True, with_pip=False)
    paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
    programs, site = Path(paths["scripts"]), Path(paths["purelib"])
    install(site, read(ROOT / "requirements.txt").split())
    return programs, site


# -- the commands run --------------------------------------------------------------------------------------------------

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
torchrun() { command python -m torch.distributed.run "$@" $TRAIN; }
pip() { PYTHONPATH="$KIT_TESTS" "$KIT_PYTHON" -c "import sys, test_docs; test_docs.pip(*sys.argv[1:])" "$@"; }
set -e
"""


def runnable(file):
    """Return whether the file has commands, or mistakes."""
    return bool(mistakes(read(file))) or any(language in ("sh", "python") for language, _ in blocks(read(file)))


def fresh_copy(folder):
    """Copy the repository without the files that git ignores. `make` there finds this environment, if make made it."""
    skip = shutil.ignore_patterns(".*", "out", "node_modules", "__pycache__", "*.bin", "meta.json")
    shutil.copytree(ROOT, folder, ignore=skip)
    if (ROOT / ".venv" / "installed").exists() and (ROOT / "web" / "node_modules").is_dir():
        (folder / ".venv").mkdir()
        for name in ("bin", "lib", "pyvenv.cfg"):
            (folder / ".venv" / name).symlink_to(ROOT / ".venv" / name)
        (folder / ".venv" / "installed").touch()  # newer than pyproject.toml, so that make installs nothing
        (folder / "web" / "node_modules").symlink_to(ROOT / "web" / "node_modules")
        return PREAMBLE
    return PREAMBLE + "make() { echo 'no make: no environment of make to link' >&2; }\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs bash and symbolic links")
@pytest.mark.parametrize("file", [file for file in FILES if runnable(file)], ids=lambda file: file.name)
def test_every_command_runs_in_a_fresh_copy(file, tmp_path):
    """A command that fails, that says something else than the text does, or that needs a package nobody installed.

    One shell runs the blocks of a file from the first to the last, as somebody reads.
    """
    # a fresh copy, and an environment of its own
    folder, text = tmp_path / "kit", read(file)
    script = fresh_copy(folder)
    programs, site = make_environment(tmp_path / "environment")
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8"}
    env |= {"KIT_PYTHON": sys.executable, "KIT_TESTS": str(ROOT / "tests"), "KIT_SITE": str(site)}
    env |= {name: "" if "KIT_FULL" in os.environ else value for name, value in SHORTER.items()}

    def bash(script):
        return subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, encoding="utf-8")

    # the commands
    for language, content in blocks(text):
        if language == "sh":
            script += content
        elif language == "python":
            script += f"command python - <<'END'\n{content}END\n"
    result = bash(script)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    for shape in re.findall(r"^print\(.*# (torch\.Size\(.*?\))", text, flags=re.MULTILINE):
        assert f"{shape}\n" in result.stdout
    verifications = re.findall(r"^python sample\.py .*--verify", script, flags=re.MULTILINE)
    assert "verify: DIFFERENT" not in result.stderr and result.stderr.count("samples match") >= len(verifications)

    # the mistakes, each with its message
    for command, message in mistakes(text):
        result = bash(command)
        assert result.returncode != 0 and (result.stdout, result.stderr) == ("", message), command


if __name__ == "__main__":
    FLAGS.write_text(flags(), encoding="utf-8")
