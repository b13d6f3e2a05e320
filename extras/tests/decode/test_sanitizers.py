"""step.c and pool.h under the sanitizers of GCC and Clang, which watch each read and write of step_race.c."""

import platform
import subprocess
from functools import cache
from pathlib import Path

import pytest

from extra_helpers import NETWORKS, copy_of_step, needs_compiler
from extras.decode import c_build, c_pack
from extras.decode import c_step as compiling
from helpers import V
from model import GPT, GPTConfig

pytestmark = [needs_compiler, pytest.mark.slow]

RACES, MEMORY = "thread", "address,undefined"
RACING = dict(n_embd=40, n_head=4, n_kv_head=2, activation="swiglu", pos_emb="rope", qk_norm=True)
# faults that each must find: text of step.c or pool.h, what replaces it, and words of the report
PLANTED = {
    RACES: [
        ("in.data[i * X + c] = 0;", "in.data[i * X + c] = y.data[i * X + c] = 0;", "data race"),  # by all threads
        ("        meet(w, ATTENTION);\n        matmul(w, n, y,", "        matmul(w, n, y,", "data race"),
        ("memory_order_acquire", "memory_order_relaxed", "data race"),
    ],
    MEMORY: [
        ("+ 3 * (size_t)V;", "+ 2 * (size_t)V;", "heap-buffer-overflow"),
        ("h[i] = id + i;", "h[i] = id + i + 0x7fffffff;", "signed integer overflow"),
        ("    free(pool->memory);\n    free(pool);", "    free(pool);", "detected memory leaks"),
    ],
}


@cache
def command(kind):
    """The command of a compiler whose programs this sanitizer can watch here, or None."""
    command = [*c_build.find_compiler()[0][0], "-O1", "-g", f"-fsanitize={kind}", "-pthread"]
    made = subprocess.run([*command, "-x", "c", "-", "-o", "/dev/null"], input=b"int main(void) { return 0; }")
    return None if made.returncode else command


def report(kind, folder, network=RACING, layout=c_pack.panels, flags=()):
    """Compile step_race.c with the step.c in a folder, and run it. Returns the completed process."""
    if not command(kind):
        pytest.skip(f"needs a compiler with -fsanitize={kind}")
    model = GPT(GPTConfig(**dict(block_size=24, vocab_size=V, n_layer=2) | network))
    macros = [f"-D{k}={v}" for k, v in compiling.shape_macros(model, 0.5, layout).items()]
    harness = Path(__file__).with_name("step_race.c")
    subprocess.run([*command(kind), *flags, *macros, "-I", folder, harness, "-o", folder / "race", "-lm"], check=True)
    return subprocess.run([folder / "race"], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(["kind", "fault"], [(kind, fault) for kind in PLANTED for fault in PLANTED[kind]])
def test_a_sanitizer_finds_what_it_is_for(kind, fault, tmp_path):
    old, new, words = fault
    copy_of_step(tmp_path, [(old, new)])
    assert words in report(kind, tmp_path).stderr


NETS = [*((network, c_pack.panels, []) for network in NETWORKS), (NETWORKS[2], c_pack.int8_panels, [])]
if platform.machine() in ("x86_64", "AMD64"):  # shorter vectors, for sizes that fill none and for int8
    NETS += [(*net[:2], [flag]) for net in (NETS[0], NETS[-1]) for flag in ("-mno-avx512f", "-mno-avx")]


@pytest.mark.parametrize(["network", "layout", "flags"], NETS)
def test_every_read_and_write_is_in_bounds_and_defined(network, layout, flags, tmp_path):
    copy_of_step(tmp_path)
    done = report(MEMORY, tmp_path, network, layout, flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("layout", [c_pack.panels, c_pack.int8_panels])
def test_threads_never_write_what_others_read(layout, tmp_path):
    copy_of_step(tmp_path)
    done = report(RACES, tmp_path, RACING, layout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
