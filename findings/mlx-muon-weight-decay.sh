#!/bin/sh
# mlx 0.32.4: Muon orthogonalizes its weight decay together with the gradient.
#
# mlx.optimizers.Muon adds weight_decay * w (0.01 by default) to the gradient before it makes the update orthogonal, as
# its documentation's "L2 penalty" may say. torch, optax and Keras shrink the weights separately, by lr * weight_decay.
# An orthogonal update has the same size whatever goes in, so in mlx the decay takes what the gradient leaves: with a
# gradient 1,000 times smaller, it decides half of the direction, and with none, the weights shrink at full speed,
# all singular values by the same amount.
#
# It matters because gradients get small in a late phase, or when a loss is scaled or averaged, which Muon should not
# notice. A run moved from torch with the same weight_decay trains differently. In mlx, set weight_decay=0 and multiply
# the weights by 1 - lr * weight_decay yourself.
#
# Seen (Linux x86-64, Python 3.11), cosine of the first update with what Muon makes of the gradient alone; 64 x 64,
# normal weights of std 0.1, learning rate 0.01, weight decay 0.01; last column: how far the update goes, RMS / lr:
#   gradient of std        1   0.01  0.001  0.0001    0    RMS at 0
#   torch               1.00   1.00   1.00    1.00    -      0.0010
#   mlx                 1.00   0.97   0.49    0.07    -        0.11
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 'mlx[cpu]==0.32.4' numpy==2.4.6
venv/bin/python -W ignore - <<'END'
import sys

import mlx.core as mx
import mlx.optimizers
import numpy as np
import torch

LR, DECAY = 0.01, 0.01
rng = np.random.default_rng(0)
weights = 0.1 * rng.standard_normal((64, 64), dtype=np.float32)
noise = rng.standard_normal((64, 64), dtype=np.float32)


def with_torch(gradient, decay):
    w = torch.nn.Parameter(torch.tensor(weights))
    w.grad = torch.tensor(gradient)
    torch.optim.Muon([w], lr=LR, weight_decay=decay).step()
    return (w.detach().numpy() - weights) / LR


def with_mlx(gradient, decay):
    muon = mlx.optimizers.Muon(LR, weight_decay=decay)
    return (np.array(muon.apply_gradients({"w": mx.array(gradient)}, {"w": mx.array(weights)})["w"]) - weights) / LR


def cosine(a, b):
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


seen = {}
print("gradient of std        1   0.01  0.001  0.0001    0    RMS at 0")
for update in (with_torch, with_mlx):
    alone = update(noise, 0)
    cosines = [cosine(update(std * noise, DECAY), alone) for std in (1, 0.01, 0.001, 0.0001)]
    idle = update(0 * noise, DECAY)
    rms = float(np.sqrt((idle**2).mean()))
    print("{:17}{:7.2f}{:7.2f}{:7.2f}{:8.2f}    -{:12.2g}".format(update.__name__[5:], *cosines, rms))
    seen[update] = [round(c, 1) for c in cosines] + [rms > 0.05]
if seen[with_torch] != [1, 1, 1, 1, False] or seen[with_mlx] != [1, 1, 0.5, 0.1, True]:
    sys.exit("changed: how Muon applies weight decay")
END
