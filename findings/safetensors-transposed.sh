#!/bin/sh
# safetensors 0.8.0: the save_file of its numpy and mlx modules saves a transposed array with its numbers out of order.
#
# It writes the bytes of the array in memory order and the shape of the view. Loading gives the right shape with the
# numbers in the wrong places. The docstring asks for contiguous arrays, and safetensors.torch refuses any other with a
# ValueError, but safetensors.numpy and safetensors.mlx say nothing. mlx's own mx.save_safetensors is correct.
#
# It matters because GPT-2 keeps its weights transposed, so a conversion is full of .T, and the shapes of square
# matrices fit even where nobody transposed. Save np.ascontiguousarray(w.T).
#
# Seen (Linux x86-64, Python 3.11), after saving and loading w.T for w = [[0, 1, 2], [3, 4, 5]]:
#   in memory          [[0, 3], [1, 4], [2, 5]]
#   safetensors.numpy  [[0, 1], [2, 3], [4, 5]]
#   safetensors.mlx    [[0, 1], [2, 3], [4, 5]]
#   safetensors.torch  ValueError
#   mlx's own          [[0, 3], [1, 4], [2, 5]]
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq safetensors==0.8.0 torch==2.13.0 numpy==2.4.6 "mlx[cpu]==0.32.4"
venv/bin/python - <<'END'
import sys

import mlx.core as mx
import numpy as np
import safetensors.mlx
import safetensors.numpy
import safetensors.torch
import torch

w = np.arange(6, dtype=np.float32).reshape(2, 3)
seen = {"in memory": w.T.astype(int).tolist()}
for name, save in {
    "safetensors.numpy": lambda path: safetensors.numpy.save_file({"w": w.T}, path),
    "safetensors.mlx": lambda path: safetensors.mlx.save_file({"w": mx.array(w).T}, path),
    "safetensors.torch": lambda path: safetensors.torch.save_file({"w": torch.tensor(w).T}, path),
    "mlx's own": lambda path: mx.save_safetensors(path, {"w": mx.array(w).T}),
}.items():
    try:
        save("w.safetensors")
        seen[name] = safetensors.numpy.load_file("w.safetensors")["w"].astype(int).tolist()
    except ValueError as error:
        seen[name] = type(error).__name__
for name, result in seen.items():
    print(f"{name:18} {result}")
correct, wrong = [[0, 3], [1, 4], [2, 5]], [[0, 1], [2, 3], [4, 5]]
if list(seen.values()) != [correct, wrong, wrong, "ValueError", correct]:
    sys.exit("changed: how safetensors saves a transposed array")
END
