"""Try everything on one CUDA device and write a report: out/gpu/report.md and out/gpu/report.json.

    make gpu                          with the python3 that has PyTorch for CUDA, pytest, hypothesis and transformers

Runs tests/test_gpu.py, bench.py beside transformers, and the gpu preset with both recipes. Each part has a share of
--minutes and is stopped at its end. The report is written after every part, so an interrupted one is still of use.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
DEVICE = os.environ.get("TEST_DEVICE", "cuda")
OUT = ROOT / "out" / ("gpu" if DEVICE == "cuda" else f"report_{DEVICE}")
VARIANTS = "uncached eager compile draft compile+draft hf hf_static".split()
BOX = ROOT / "assets" / "shakespeare.pt"
SHAPES = "4/4/128/256 6/6/384/256 12/12/768/1024".split()


def parts():
    """Return {name: (share of the time, command)}."""
    bench = ["bench.py", "--device", DEVICE, "--repeats", "3", "--csv", OUT / "bench.csv"]
    random_weights = [*bench, "--shapes", *SHAPES, "--variants", "eager", "compile", "hf"]
    train = ["train.py", "--device", DEVICE, "--preset", "gpu", "--eval_interval", "250"]
    return {
        "tests": (
            0.32,
            ["-m", "pytest", "-q", "tests/test_gpu.py", "-m", "not slow", f"--junitxml={OUT / 'tests.xml'}"],
        ),
        "trained model": (0.08, [*bench, "--ckpt", BOX, "--variants", *VARIANTS, "--json", OUT / "trained model.json"]),
        "random weights": (0.14, [*random_weights, "--json", OUT / "random weights.json"]),
        "64 rows": (0.08, [*random_weights, "--batch", "64", "--json", OUT / "64 rows.json"]),
        "modern": (0.14, [*train, "--recipe", "modern", "--out_dir", OUT / "modern"]),
        "nanogpt": (0.24, [*train, "--recipe", "nanogpt", "--out_dir", OUT / "nanogpt"]),
    }


def run(command, seconds, log):
    """Run `python COMMAND` for at most `seconds`. Returns its exit code, or None if it was stopped."""
    command = [sys.executable, *map(str, command)]
    with open(log, "wb") as f, subprocess.Popen(command, cwd=ROOT, stdout=f, stderr=f, start_new_session=True) as p:
        try:
            return p.wait(seconds)
        except BaseException as error:  # Ctrl-C, too
            os.killpg(p.pid, signal.SIGKILL)  # and the scripts that a test has started
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def log_file(part):
    return OUT / f"{part}.log"


def machine():
    """Return {name: value} of what the figures depend on."""
    found = dict(device=DEVICE, torch=torch.__version__, python=platform.python_version(), system=platform.platform())
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= dict(device=gpu.name, memory_gib=round(gpu.total_memory / 2**30), cuda=torch.version.cuda)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, encoding="utf-8")
    return found | dict(commit=commit.stdout.strip() or "unknown")


def test_outcomes():
    """Return (counts, failures) of the tests, from pytest's own report."""
    if not (OUT / "tests.xml").exists():
        return {}, []
    cases = list(ElementTree.parse(OUT / "tests.xml").iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    counts = dict(passed=len(cases) - len(failed) - len(skipped), failed=len(failed), skipped=len(skipped))
    return counts, [case.get("name") for case in failed]


def collect(done):
    """Return the report as a dict. done: {part: dict(exit_code, seconds)}."""
    counts, failures = test_outcomes()
    report = dict(machine=machine(), parts=done, tests=counts, failures=failures, ends={}, bench={}, training={})
    for name, part in done.items():
        if part["exit_code"] != 0:
            text = log_file(name).read_text(encoding="utf-8", errors="replace")
            report["ends"][name] = "\n".join(text.splitlines()[-30:])
    for name in ("trained model", "random weights", "64 rows"):
        file = OUT / f"{name}.json"
        report["bench"][name] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    for recipe in ("modern", "nanogpt"):
        if (OUT / recipe / "log.csv").exists():
            with open(OUT / recipe / "log.csv", encoding="utf-8", newline="") as f:
                report["training"][recipe] = [row for row in csv.DictReader(f) if row["val_loss"]]
    return report


def table(header, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows))


def markdown(report):
    """Return the report as markdown."""
    lines = ["# The kit on a GPU", table(("", ""), report["machine"].items())]
    parts = [
        (
            name,
            {0: "done", None: "stopped, because its time was over"}.get(part["exit_code"], "failed"),
            part["seconds"],
        )
        for name, part in report["parts"].items()
    ]
    lines += [
        "## Parts",
        table(("part", "outcome", "seconds"), parts),
        "## Tests",
        table(("outcome", "tests"), report["tests"].items()),
    ]
    lines += [f"- failed: `{name}`" for name in report["failures"]]
    lines += [f"### The end of {name}\n\n```\n{end}\n```" for name, end in report["ends"].items()]
    for name, rows in report["bench"].items():
        cells = [
            (row["shape"], row["batch"], row["variant"], f"{row['tokens_per_s']:,.0f}", f"{row['ttft_ms'] or 0:.2f}")
            for row in rows
        ]
        lines += [f"## bench.py: {name}", table(("shape", "rows", "variant", "tokens/s", "TTFT ms"), cells)]
    for recipe, rows in report["training"].items():
        best = min(rows, key=lambda row: float(row["val_loss"]), default=None)
        cells = [(row["step"], row["seconds"], f"{float(row['val_loss']):.4f}", row["tokens_per_s"]) for row in rows]
        lines += [
            f"## train.py --preset gpu --recipe {recipe}",
            table(("step", "seconds", "val loss", "tokens/s"), cells),
        ]
        lines += [f"Best val loss: {float(best['val_loss']):.4f} at step {best['step']}."] if best else []
    return "\n\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.5, help="of all parts together (default: 8.5)")
    args = parser.parse_args()
    if DEVICE == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device here: run this where it does")
    shutil.rmtree(OUT, ignore_errors=True)  # figures of an earlier report must not pass for new ones
    OUT.mkdir(parents=True)
    if not (ROOT / "data" / "train.bin").exists():
        subprocess.run([sys.executable, ROOT / "data" / "prepare.py"], check=True)

    done = {}
    for name, (share, command) in parts().items():
        began = time.perf_counter()
        print(f"{name}: at most {share * args.minutes * 60:.0f} s ..", flush=True)
        code = run(command, share * args.minutes * 60, log_file(name))
        done[name] = dict(exit_code=code, seconds=round(time.perf_counter() - began, 1))
        report = collect(done)
        (OUT / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (OUT / "report.md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    sys.exit(any(part["exit_code"] != 0 for part in done.values()))


if __name__ == "__main__":
    main()
