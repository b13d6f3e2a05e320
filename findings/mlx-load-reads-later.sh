#!/bin/sh
# mlx 0.32.4: a model loaded from a file that is then saved again has the new weights, or garbage.
#
# `mx.load` and `load_weights` read the file when a weight is first used. If the file has been overwritten by then, the
# weights come from the new one: the same model gets the new values, and one whose file has another layout gets whatever
# bytes are at the old offsets. The safetensors package with numpy, and mlx with npz files, keep what was loaded. There
# is no error unless the new file is too short.
#
# It matters if a sampling script or a comparison loads a checkpoint while training writes it: the "old" model is the
# new one, and the loss of both is equal. Call `mx.eval(model.parameters())` after loading, or save under a new name and
# rename.
#
# Seen (Linux x86-64, Python 3.11), a weight of zeros, loaded, then overwritten by one of ones:
#   safetensors, numpy         0
#   mlx, npz                   0
#   mlx, npy                   1
#   mlx, safetensors           1
#   mlx, more tensors in it    neither
#   mlx, mx.eval before        0
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "mlx[cpu]==0.32.4" numpy==2.4.6 safetensors==0.8.0
venv/bin/python - <<'END'
import sys

import mlx.core as mx
import numpy as np
from mlx import nn
from safetensors.numpy import load_file, save_file


class Model(nn.Module):
    def __init__(self, value):
        self.w = mx.full(1000, value)


def with_numpy():
    save_file({"w": np.zeros(1000)}, "numpy.safetensors")
    w = load_file("numpy.safetensors")["w"]
    save_file({"w": np.ones(1000)}, "numpy.safetensors")
    return np.asarray(w)


def with_npz():
    mx.savez("w.npz", w=mx.zeros(1000))
    w = mx.load("w.npz")["w"]
    mx.savez("w.npz", w=mx.ones(1000))
    return np.asarray(w)


def with_npy():
    mx.save("w.npy", mx.zeros(1000))
    w = mx.load("w.npy")
    mx.save("w.npy", mx.ones(1000))
    return np.asarray(w)


def with_mlx(evaluate=False, more=False):
    Model(0.0).save_weights("mlx.safetensors")
    model = Model(5.0)
    model.load_weights("mlx.safetensors")
    if evaluate:
        mx.eval(model.parameters())
    names = ["w"] + [f"block.{i}" for i in range(9 if more else 0)]
    mx.save_safetensors("mlx.safetensors", {name: mx.ones(1000) for name in names})
    return np.asarray(model.w)  # read it now


seen = {
    "safetensors, numpy": with_numpy(),
    "mlx, npz": with_npz(),
    "mlx, npy": with_npy(),
    "mlx, safetensors": with_mlx(),
    "mlx, more tensors in it": with_mlx(more=True),
    "mlx, mx.eval before": with_mlx(evaluate=True),
}
seen = {name: sorted(set(w.tolist())) for name, w in seen.items()}
seen = {name: str(int(values[0])) if values in ([0], [1]) else "neither" for name, values in seen.items()}
print("\n".join(f"{name:26} {value}" for name, value in seen.items()))
expected = dict(zip(seen, ["0", "0", "1", "1", "neither", "0"]))
if changed := [name for name in seen if seen[name] != expected[name]]:
    sys.exit(f"changed: {changed}")
END
