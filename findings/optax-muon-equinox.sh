#!/bin/sh
# optax 0.2.8 with equinox 0.13.8: Muon's step is half as long for one half of an MLP, and twice as long for the other.
#
# Muon multiplies its step by sqrt(outputs / inputs) if a layer has more outputs than inputs. A matrix does not say
# which axis is which: optax takes (inputs, outputs), as in flax and Keras. Equinox, like torch and mlx, stores
# (outputs, inputs). So for the usual MLP, four times as wide as the model, the first layer loses its factor of 2, and
# the second gets one. Square matrices hide it.
#
# It matters because the ratio between the two halves is off by 4, and the loss still goes down. Pass
# muon_weight_dimension_numbers with reduction_axis=1, output_axis=0.
#
# Seen (Linux x86-64, Python 3.11), largest singular value of the first step at a learning rate of 1:
#                                  64 to 256   256 to 64
#   torch                               2.27        1.14
#   optax and flax                      2.27        1.13
#   optax and equinox                   1.13        2.27
#   ... with dimension numbers          2.27        1.13
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 jax==0.10.2 optax==0.2.8 equinox==0.13.8 flax==0.12.8 numpy==2.4.6
venv/bin/python -W ignore - <<'END'
import sys

import equinox
import jax
import numpy as np
import optax
import torch
from flax import nnx

LAYERS = ((64, 256), (256, 64))
rng = np.random.default_rng(0)
gradients = {sizes: rng.standard_normal(sizes, dtype=np.float32) for sizes in LAYERS}


def with_torch(inputs, outputs):
    weight = torch.nn.Linear(inputs, outputs).weight
    before = weight.detach().clone()
    weight.grad = torch.tensor(gradients[inputs, outputs].T)
    torch.optim.Muon([weight], lr=1.0, weight_decay=0).step()
    return (weight.detach() - before).numpy()


def with_optax(weight, gradient, **options):
    muon = optax.contrib.muon(1.0, **options)
    return muon.update(gradient, muon.init(weight), weight)[0]


def with_flax(inputs, outputs):
    kernel = nnx.Linear(inputs, outputs, rngs=nnx.Rngs(0)).kernel[...]
    return with_optax(kernel, jax.numpy.array(gradients[inputs, outputs]))


def with_equinox(inputs, outputs, **options):
    weight = equinox.nn.Linear(inputs, outputs, key=jax.random.key(0)).weight
    return with_optax(weight, jax.numpy.array(gradients[inputs, outputs].T), **options)


def with_numbers(inputs, outputs):
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return with_equinox(inputs, outputs, muon_weight_dimension_numbers=numbers)


rows = {
    "torch": with_torch,
    "optax and flax": with_flax,
    "optax and equinox": with_equinox,
    "... with dimension numbers": with_numbers,
}
seen = []
print(f"{'':30}" + "".join(f"{f'{inputs} to {outputs}':>12}" for inputs, outputs in LAYERS))
for name, step in rows.items():
    values = [np.linalg.svd(step(*sizes), compute_uv=False).max() for sizes in LAYERS]
    print(f"{name:30}" + "".join(f"{value:12.2f}" for value in values))
    seen.append(round(float(values[0] / values[1]), 1))
if seen != [2, 2, 0.5, 2]:
    sys.exit("changed: which axis optax's Muon takes for the outputs of an equinox layer")
END
