"""Try everything on one CUDA device and write a report: out/gpu/report.md.

    make gpu                    with the python3 that has PyTorch for CUDA, pytest, hypothesis and transformers

Runs test_gpu.py, extras.bench with transformers, and the gpu preset with both recipes. Each part has a share of
--minutes and is stopped at its end. The report is written after every part, so an interrupted one is still of use.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("TEST_DEVICE", "cuda")
OUT = ROOT / "out" / "gpu"
LINES = 40  # of each part's output, the report shows the last ones

BENCH = ["-m", "extras.bench", "--device", DEVICE]
SMALL = ["--shapes", "4/4/128/256", "6/6/384/256", "--repeats", "3"]
LARGE = ["--shapes", "12/12/768/1024", "--repeats", "1"]
PEERS = ["--variants", "eager", "compile", "hf"]
TRAIN = ["train.py", "--device", DEVICE, "--preset", "gpu", "--eval_interval", "250"]
PARTS = {  # name: (share of the time, command)
    "tests": (0.4, ["-m", "pytest", "-q", "-o", "timeout=900", "extras/tests/test_gpu.py"]),
    "trained model": (0.06, [*BENCH, *PEERS, "uncached", "draft", "--ckpt", ROOT / "assets" / "shakespeare.pt"]),
    "random weights": (0.12, [*BENCH, *SMALL, *PEERS, "uncached"]),
    "12 layers": (0.12, [*BENCH, *LARGE, *PEERS]),
    "64 rows": (0.1, [*BENCH, *SMALL, *PEERS, "--batch", "64"]),
    "modern": (0.12, [*TRAIN, "--recipe", "modern", "--out_dir", OUT / "modern"]),
    "nanogpt": (0.08, [*TRAIN, "--recipe", "nanogpt", "--out_dir", OUT / "nanogpt"]),
}


def machine():
    """Return one line of what the figures depend on."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, encoding="utf-8").stdout.strip()
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}, commit {commit or 'unknown'}"


def run(command, seconds, log):
    """Run `python COMMAND` for at most `seconds`. Returns how it ended."""
    with open(log, "w", encoding="utf-8") as f:
        try:
            command = [sys.executable, *map(str, command)]
            code = subprocess.run(command, cwd=ROOT, stdout=f, stderr=f, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return "stopped, because its time was over"
    return f"failed with exit code {code}" if code else "done"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12, help="of all parts together (default: 12)")
    args = parser.parse_args()
    if DEVICE == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device here: run this where it does")
    shutil.rmtree(OUT, ignore_errors=True)  # old figures must not pass for new ones
    OUT.mkdir(parents=True)
    if not (ROOT / "data" / "train.bin").exists():
        subprocess.run([sys.executable, ROOT / "data" / "prepare.py"], check=True)

    report = f"# kvGPT on a GPU\n\n{machine()}\n"
    outcomes = []
    for name, (share, command) in PARTS.items():
        print(f"{name}: at most {share * args.minutes * 60:.0f} s ..", flush=True)
        began = time.perf_counter()
        log = OUT / f"{name}.log"
        outcomes.append(run(command, share * args.minutes * 60, log))
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
        report += (
            f"\n## {name}: {outcomes[-1]} ({time.perf_counter() - began:.0f} s)\n\n```\n" + "\n".join(end) + "\n```\n"
        )
        (OUT / "report.md").write_text(report, encoding="utf-8")
    print(report)
    sys.exit(any(outcome != "done" for outcome in outcomes))


if __name__ == "__main__":
    main()
