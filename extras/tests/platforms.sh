#!/usr/bin/env bash
# Runs the C backend on systems that this one is not, by hand, on Debian for x86-64:
#     extras/tests/platforms.sh arm64      sample.py; needs mmdebstrap qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
#     extras/tests/platforms.sh windows    the step alone; needs wine wine64 gcc-mingw-w64-x86-64 and make's .venv
# Emulation shows the instructions of a chip, but not the order in which its cores see each other's writes.
set -euo pipefail
cd "$(dirname "$0")/../.."
there=out/platforms/$1
sample=(--ckpt assets/shakespeare.pt --prompt "O Romeo, " --seed 1956 --device cpu --max_new_tokens 100)
mkdir -p "$there"

case $1 in
arm64)
    # without dependencies, because pip would choose them for this machine, and later versions need CUDA on ARM
    [ -d "$there/packages" ] || python3 -m pip install -q --no-deps --only-binary=:all: --target "$there/packages" \
        --platform manylinux_2_28_aarch64 --python-version 3.11 torch==2.10.0 \
        numpy filelock typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec
    [ -d "$there/root" ] || mmdebstrap --variant=extract --architectures=arm64 --include=python3 bookworm "$there/root"
    CC=aarch64-linux-gnu-gcc PYTHONPATH=$there/packages \
        qemu-aarch64 -L "$there/root" "$there/root/usr/bin/python3" sample.py "${sample[@]}" --verify --compile
    ;;
windows)
    # step_race.c compares the tokens of one thread with those of several. Wine 8 lacks functions that torch calls
    macros=$(.venv/bin/python -c "
from extras.decode import compile as compiling
from model import GPT, GPTConfig
model = GPT(GPTConfig(24, 65, 2, 4, 40, n_kv_head=2, activation='swiglu', pos_emb='rope', qk_norm=True))
print(*(f'-D{k}={v}' for k, v in compiling.shape_macros(model, 0.5, compiling.panels).items()))")
    for chip in x86-64 haswell; do # without and with AVX
        x86_64-w64-mingw32-gcc -march=$chip -O3 -ffp-contract=fast -fno-math-errno -pthread -static $macros \
            -Iextras/decode extras/tests/decode/step_race.c -o "$there/step.exe" -lm
        differs=$(WINEDEBUG=-all wine "$there/step.exe" < /dev/null)
        echo "$chip: ${differs:-the same tokens}"
    done
    ;;
esac
