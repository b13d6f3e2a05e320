"""tests/fuzz.py finds nothing here, and finds each of three defects that are planted into a copy of the project."""

import shutil

import pytest

from helpers import ROOT, linux, run

pytestmark = [linux, pytest.mark.slow]

# {defect: (file, code that is added to it, what fuzz.py says)}. The code wraps what the file defines, so that it goes
# on working when the file changes. It needs a change only if the name that it wraps is gone.
DEFECTS = {
    "a wrong cache slot": (
        "model.py",
        "def wrong_slot(self, *args, right=KVCache.update):\n"
        "    is_position = [isinstance(arg, torch.Tensor) and not arg.is_floating_point() for arg in args]\n"
        "    return right(self, *(arg.clamp(max=6) if each else arg for arg, each in zip(args, is_position)))\n"
        "KVCache.update = wrong_slot\n",
        "without the cache",
    ),
    "a file that is lost in a kill": (
        "kvgpt/files.py",
        "def lossy(source, target, right=os.replace):\n"
        "    os.path.exists(target) and os.unlink(target)\n"
        "    right(source, target)\n"
        "os.replace = lossy\n",
        "kill_at=",
    ),
    "a traceback": (
        "model.py",
        "def no_batch(self, *args, right=KVCache.update):\n"
        "    if any(isinstance(arg, torch.Tensor) and len(arg) > 1 for arg in args):\n"
        "        raise KeyError('rows')\n"
        "    return right(self, *args)\n"
        "KVCache.update = no_batch\n",
        "KeyError",
    ),
}


def fuzz(folder, calls):
    return run(folder / "tests" / "fuzz.py", "--seed", 0, "--calls", calls, "--minutes", 4, timeout=500)


def test_nothing_is_found():
    result = fuzz(ROOT, 150)
    assert result.returncode == 0 and "nothing found" in result.stdout, result.stderr


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect, tmp_path):
    for name in ("kvgpt", "data", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("hub", "*.bin", "__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, tmp_path)
    file, code, words = DEFECTS[defect]
    with open(tmp_path / file, "a", encoding="utf-8") as f:
        f.write(f"\n\n{code}")
    result = fuzz(tmp_path, 1000)
    assert result.returncode == 1 and "FOUND: " in result.stderr and words in result.stderr, result.stderr
