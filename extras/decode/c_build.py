"""Compiles step.c for one shape of model, and keeps the program next to Python's own compiled files.

The program depends on the shape and not on the weights, so the next model of the same shape starts at once.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from extras.decode.c_library import CompileError, open_library

SOURCE = Path(__file__).with_name("step.c")
# A DLL linked with -static needs none of MinGW's.
SUFFIX, LINK = (".dll", "-static") if os.name == "nt" else (".so", "-fPIC")
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-pthread", LINK]
# GCC assumes that Windows aligns the stack for AVX, which crashes (GCC bug 54412). Its assembler can repair that.
UNALIGNED = "-Wa,-muse-unaligned-vector-move"


def load_library(macros):
    """Return step.c, compiled with these macros. Raises CompileError.

    The file name contains two hashes. We find the program by the hash of everything that shapes it. The hash of its
    content shows that it is whole, because a damaged program could do anything.
    """
    commands, target = find_compiler()
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]
    sources = [file.read_bytes() for file in sorted(SOURCE.parent.glob("*.[ch]"))]  # step.c and what it includes
    folder = SOURCE.parent / "__pycache__"
    key = sha256(repr((commands, target, flags, sources)).encode())
    for file in folder.glob(f"step-{key}-*{SUFFIX}"):
        with suppress(OSError):
            if file.stem.endswith(sha256(file.read_bytes())):
                return open_library(file)

    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # Windows keeps what is loaded
            made = Path(temporary) / f"step{SUFFIX}"
            compile_source(commands, flags, made)
            program = made.read_bytes()
            library = open_library(made)
    # programs may not run from that folder, the compiler hangs, or it made a different library
    except (OSError, subprocess.TimeoutExpired, AttributeError) as error:
        raise CompileError(f"the C backend cannot be compiled or loaded ({error})") from None
    with suppress(OSError):  # if the folder cannot be written, we compile again next time
        folder.mkdir(exist_ok=True)
        unfinished = folder / f"step-{key}.{os.getpid()}"
        unfinished.write_bytes(program)
        # rename it once it is whole, because another process may read it
        os.replace(unfinished, folder / f"step-{key}-{sha256(program)}{SUFFIX}")
    print(f"--compile: compiled the C backend in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return library


def compile_source(commands, flags, made):
    """Compile step.c with the first command that works, into the file `made`. Raises CompileError."""
    for command in commands:
        done = subprocess.run([*command, *flags, str(SOURCE), "-o", str(made), "-lm"], capture_output=True, timeout=120)
        if done.returncode == 0:
            return
    lines = (done.stderr or done.stdout).decode("utf-8", "replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    why = next((line for line in said if "error" in line.lower()), (said or [f"exit code {done.returncode}"])[0])
    raise CompileError(f"{' '.join(commands[-1])} cannot compile the C backend ({why[:200]})")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@lru_cache
def find_compiler():
    """Return the commands of a C compiler, for this chip and for any, and the macros that identify chip and version.

    A compiler may accept the chip while its assembler does not, so load_library tries both commands. If $CC is set, we
    try no other compiler. Raises CompileError.
    """
    cc = os.environ.get("CC")
    names = [cc.split()] if cc else [["cc"], ["gcc"], ["clang"], [sys.executable, "-m", "ziglang", "cc"]]
    for name in names:
        for chip in (["-march=native"], ["-mcpu=native"], []):  # Clang on ARM knows the second, GCC on RISC-V neither
            command = [*name, *chip]
            try:
                target = subprocess.run([*command, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, timeout=30)
            except (OSError, subprocess.TimeoutExpired):
                break
            if target.returncode == 0:
                if b"__MINGW32__" in target.stdout and b"__clang__" not in target.stdout:
                    command.append(UNALIGNED)
                return [command, name], target.stdout
    raise CompileError("no C compiler works here: install gcc or clang, or name one in $CC")
