#!/bin/sh
# tinygrad 0.14.0 on a CPU: inside TinyJit, manual_seed is ignored or freezes the noise; outside, two draws can be one.
#
# TinyJit captures its function in the second call. From then on it goes on counting random numbers from where it was,
# and manual_seed changes nothing. Seeded between the first and the second call, it returns the same draw for ever.
# Without TinyJit, a draw is computed when it is read. If the second of two is read first, the first has its numbers.
#
# It matters to a sampler: seeded after a warm-up, it writes a different text each time, or one token in every step.
# Realize the noise outside the jitted function, at once, and pass it in.
#
# It needs clang, like tinygrad's CPU backend. Seen (Linux x86-64, Python 3.11), tokens after manual_seed(0):
#   without TinyJit                          292  927   19  845
#   TinyJit, seeded before the first call    292  927   19  845
#   TinyJit, seeded after call 1             292  292  292  292
#   TinyJit, seeded after call 2              19  845  533  938
#   TinyJit, seeded after call 3             845  533  938  808
#   noise realized outside, after call 3     292  927   19  845
#   two draws, read in order                 292  927
#   two draws, the second read first         927  927
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq tinygrad==0.14.0 numpy==2.4.6
DEV=CPU CACHELEVEL=0 venv/bin/python - <<'END'
import sys

from tinygrad import Tensor, TinyJit

probs = Tensor.full((1000,), 0.001).contiguous().realize()


def choose(p, uniform):
    return (p / -uniform.log()).argmax()


def sample(p):
    return choose(p, Tensor.rand(1000)).realize()


def tokens(draw, calls_before=0):
    for _ in range(calls_before):
        draw(probs)
    Tensor.manual_seed(0)
    return [draw(probs).item() for _ in range(4)]


def two_draws(second_first):
    Tensor.manual_seed(0)
    first, second = choose(probs, Tensor.rand(1000)), choose(probs, Tensor.rand(1000))
    if second_first:
        second.realize()
    return [first.item(), second.item()]


seen = {"without TinyJit": tokens(sample), "TinyJit, seeded before the first call": tokens(TinyJit(sample))}
for calls in (1, 2, 3):
    Tensor.manual_seed(0)
    seen[f"TinyJit, seeded after call {calls}"] = tokens(TinyJit(sample), calls)
jitted = TinyJit(lambda p, uniform: choose(p, uniform).realize())
seen["noise realized outside, after call 3"] = tokens(lambda p: jitted(p, Tensor.rand(1000).realize()), 3)
seen["two draws, read in order"] = two_draws(second_first=False)
seen["two draws, the second read first"] = two_draws(second_first=True)
for name, row in seen.items():
    print(f"{name:40}" + "".join(f"{token:5}" for token in row))
seeded = [292, 927, 19, 845]
expected = [seeded, seeded, 4 * [292], [19, 845, 533, 938], [845, 533, 938, 808], seeded, [292, 927], [927, 927]]
if list(seen.values()) != expected:
    sys.exit("changed: which tokens tinygrad draws after manual_seed(0)")
END
