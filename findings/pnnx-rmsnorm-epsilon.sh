#!/bin/sh
# pnnx 20261020 and ncnn 1.0.20261020: RMSNorm without an explicit eps is converted with an epsilon of 0.
#
# torch's RMSNorm has eps=None, which means the machine epsilon, 1.2e-07 in float32. pnnx writes 0.0, without a warning.
# A row of zeros becomes NaN instead of zeros, and a tiny row as large as any other. An explicit eps is converted.
#
# It matters for padding: nn.Embedding(padding_idx=0) gives zeros, so the first norm gives NaN, and a NaN in the cache
# reaches every later token, because a masked slot has a weight of 0, but 0 * NaN is NaN. Write the eps down.
#
# Seen (Linux x86-64, Python 3.11), the first number of each row:
#                             a usual row   1e-4 of it   zeros
#   torch, both               -1.23         -0.32        0.00
#   converted, eps=None       -1.23         -1.23        nan
#   converted, eps=1.2e-07    -1.23         -0.32        0.00
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 pnnx==20261020 ncnn==1.0.20261020 numpy==2.4.6
PATH="$dir/venv/bin:$PATH" venv/bin/python -W ignore - <<'END' 2> log > out || { tail -n 1 log; exit 1; }
import sys

import ncnn
import numpy as np
import pnnx
import torch

torch.manual_seed(0)
x = torch.randn(1, 3, 16)
x[0, 1] = x[0, 0] * 1e-4
x[0, 2] = 0


def rows(norm, name):
    """Return the first number of each row, in torch and converted."""
    with torch.no_grad():
        expected = norm(x)[0].numpy()
    pnnx.export(norm.eval(), f"{name}.pt", (x,), fp16=False)
    net = ncnn.Net()
    net.load_param(f"{name}.ncnn.param")
    net.load_model(f"{name}.ncnn.bin")
    extractor = net.create_extractor()
    extractor.input("in0", ncnn.Mat(x[0].numpy()).clone())
    y = np.array(extractor.extract("out0")[1]).copy()
    return expected[:, 0], y[:, 0]


default, converted = rows(torch.nn.RMSNorm(16), "default")
explicit, converted_explicit = rows(torch.nn.RMSNorm(16, eps=torch.finfo(torch.float32).eps), "explicit")
assert np.array_equal(default, explicit)
print(f"{'':26}a usual row   1e-4 of it   zeros")
for name, (usual, small, zeros) in {
    "torch, both": default,
    "converted, eps=None": converted,
    "converted, eps=1.2e-07": converted_explicit,
}.items():
    print(f"{name:26}{usual:<14.2f}{small:<13.2f}{zeros:.2f}")
if not np.isnan(converted[2]) or abs(converted[1] - converted[0]) > 1e-3:
    sys.exit("changed: the epsilon that pnnx writes for eps=None")
if not np.allclose(converted_explicit, explicit, atol=1e-5):
    sys.exit("changed: an explicit eps")
END
grep -A 3 "a usual row" out
