"""Files damaged at random are refused in one line, or read: fuzz.py, with fixed seeds."""

import json
import subprocess
import sys

import pytest

from helpers import ROOT, linux

pytestmark = [linux, pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = 25  # of each kind


@pytest.mark.parametrize("kind", ["checkpoint", "resume", "data", "folder", "tokenizer", "onnx"])
def test_damage_is_one_line_or_does_no_harm(kind):
    script = ROOT / "extras" / "tests" / "fuzz.py"
    done = subprocess.run([sys.executable, script, kind, "0", str(RUNS)], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    lines = [f"fuzz.py {kind} {f['seed']} {f['seed'] + 1}: {f['damage']}: {f['problem']}" for f in found]
    assert not lines, "\n".join(lines)


FAULTS = {  # what a script does, and what we say about it
    "raise KeyError(7)": "KeyError: 7",
    "import ctypes; ctypes.string_at(0)": "SIGSEGV",
    "while True: pass": "SIGXCPU",
    "bytearray(2**33)": "MemoryError",
    "import sys; sys.exit('two\\nlines')": "2 lines",
    "print('something else')": "another text",
    "print('text')": None,
    "import sys; sys.exit('one line')": None,
}


@pytest.mark.parametrize("code", FAULTS)
def test_the_fuzzer_sees_what_it_is_for(code, tmp_path, monkeypatch):
    import fuzz

    monkeypatch.setattr(fuzz, "SECONDS", 1)
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    found = fuzz.problem(fuzz.run(str(tmp_path / "script.py"), tmp_path), "text\n")
    assert (found is None) == (FAULTS[code] is None) and (found is None or FAULTS[code] in found), found
