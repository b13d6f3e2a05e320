"""Run scripts of this folder, each in a new environment: python docs/elsewhere/run.py [NAME ...], or all of them.

The head of a script (PEP 723) pins what it imports, and exclude-newer fixes the rest by date. [tool.elsewhere] is ours:
"no-deps" are packages to install without their dependencies, and for each of "versions" the script runs again.

All of it was seen on Linux x86-64 with Python 3.11, on the CPU. Where a package has no wheel for your system or Python,
its script cannot run.

Exits with 0 if everything is as described, with 1 if something has changed, else with 2 if something could not run.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HEAD = re.compile(r"^# /// script\n(.*?)^# ///$", re.MULTILINE | re.DOTALL)
RESULTS = {0: "as described", 1: "CHANGED", 2: "could not run here"}
SECONDS = 1800  # for the script, without its installation


def read_head(script):
    """Return the metadata of a script as a dict, or None if it has none."""
    head = HEAD.search(script.read_text(encoding="utf-8"))
    return head and tomllib.loads("".join(line[2:] or "\n" for line in head[1].splitlines(keepends=True)))


def run(script, head):
    """Install what a script needs in a temporary environment, run it, and return its exit code."""
    own = head["tool"].get("elsewhere", {})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "Scripts/python.exe" if sys.platform == "win32" else "bin/python")

        def pip(*arguments):
            return subprocess.run([python, "-m", "pip", "install", "-qq", *arguments]).returncode == 0

        def start():
            try:
                code = subprocess.run([python, script], timeout=SECONDS).returncode
            except subprocess.TimeoutExpired:
                code = 2
            return code if code in RESULTS else 2  # a signal, for example

        dated = "--uploaded-prior-to", head["tool"]["uv"]["exclude-newer"]
        if not pip("--upgrade", "pip>=26") or not pip(*dated, *head["dependencies"]):
            return 2
        if "no-deps" in own and not pip(*dated, "--no-deps", *own["no-deps"]):
            return 2
        codes = [start()]
        for version in own.get("versions", []):
            codes.append(start() if pip(*dated, "--no-deps", version) else 2)
        return 1 if 1 in codes else max(codes)


def main(names):
    scripts = [FOLDER / f"{name.removesuffix('.py')}.py" for name in names] or sorted(FOLDER.glob("*.py"))
    if missing := [script.stem for script in scripts if not script.exists()]:
        print(f"run.py: there is no script {missing[0]} in {FOLDER}", file=sys.stderr)
        return 2
    results = {}
    for script in scripts:
        if head := read_head(script):
            print(f"\n{script.stem}", flush=True)
            results[script.stem] = run(script, head)
    print()
    for name, code in results.items():
        print(f"{name:36} {RESULTS[code]}")
    return 1 if 1 in results.values() else max(results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
