#!/bin/sh
# torch 2.13.0: on a CPU, x.to(torch.int8) beyond the range wraps in eager mode and saturates in compiled code.
#
# 200 becomes -56 in eager mode. Under torch.compile it becomes 127 in a tensor of 16 numbers, but -56 in a tensor of
# one: only vectorized code saturates, and even that turns infinity and everything from 2**31 on into -128. uint8 is the
# same in all three. C leaves such a conversion undefined, so no result is wrong, but they differ.
#
# It matters for an int8 cache with a fixed scale: a key beyond the range changes its sign in eager mode and keeps it
# when compiled, so the text differs. Clamp to the range before you convert.
#
# Seen (Linux x86-64 with AVX-512, Python 3.11, gcc 12):
#                                   200   -200  1e+06  3e+09    inf    nan
#   int8    eager                   -56     56     64      0      0      0
#   int8    compiled, 1 number      -56     56     64      0      0      0
#   int8    compiled, 16 numbers    127   -128    127   -128   -128   -128
#   uint8   in all three            200     56     64      0      0      0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 setuptools
export TORCHINDUCTOR_CACHE_DIR="$dir/inductor"
venv/bin/python -W ignore - <<'END'
import sys

import torch

VALUES = (200, -200, 1e6, 3e9, torch.inf, torch.nan)
MODES = {"eager": (False, 16), "compiled, 1 number": (True, 1), "compiled, 16 numbers": (True, 16)}


def cast(x, dtype):
    return x.to(dtype)


def convert(dtype, compiled, size):
    """Return what each value becomes in a tensor of that many copies of it."""
    torch.compiler.reset()
    function = torch.compile(cast, dynamic=False) if compiled else cast
    results = [function(torch.full((size,), float(value)), dtype) for value in VALUES]
    assert all((result == result[0]).all() for result in results)
    return [result[0].item() for result in results]


print(28 * " " + "".join(f"{value:>7g}" for value in VALUES))
seen = {}
for dtype in (torch.int8, torch.uint8):
    for mode, (compiled, size) in MODES.items():
        seen[dtype, mode] = convert(dtype, compiled, size)
        print(f"{str(dtype)[6:]:8}{mode:20}" + "".join(f"{number:7}" for number in seen[dtype, mode]))
wraps = [-56, 56, 64, 0, 0, 0]
saturates = [127, -128, 127, -128, -128, -128]
if list(seen.values()) != [wraps, wraps, saturates] + 3 * [[200] + wraps[1:]]:
    sys.exit("changed: what numbers beyond the range of int8 and uint8 become")
END
