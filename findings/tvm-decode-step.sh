#!/bin/sh
# apache-tvm 0.27.0.post1 with torch 2.13.0: in an imported decode step, noise is zero and positions stay integers.
#
# from_exported_program accepts each module below without a warning, and changes what it computes. exponential_ becomes
# zeros, so the common sampler argmax(probs / noise) always returns token 0. randn is drawn once, during the import. An
# integer tensor times, plus or divided by a Python float stays an integer. And writes to a cache in a buffer are
# dropped, so every step is the first.
#
# It matters because a small GPT has all of them: noise, positions or ALiBi distances times a constant, and a cache.
# Make noise an input, the cache an input and an output, and write position.float(). The other random functions (rand,
# multinomial, randint) raise an error.
#
# Seen (Linux x86-64, Python 3.11), three calls each, with probabilities 0.1, 0.2 and 0.7 and position 3:
#                              torch               TVM
#   share of token 0           0.1 0.1 0.1         1.0 1.0 1.0
#   randn, different draws     3                   1
#   position * 0.5             1.5 1.5 1.5         0 0 0
#   position / 4               0.75 0.75 0.75      0 0 0
#   position.float() / 4       0.75 0.75 0.75      0.75 0.75 0.75
#   tokens in the cache        1 2 3               1 1 1
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 apache-tvm==0.27.0.post1 numpy==2.4.6
venv/bin/python -W ignore - <<'END'
import copy
import sys

import torch
import tvm
from tvm.relax.frontend.torch import from_exported_program


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k", torch.zeros(8))
        self.register_buffer("n", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.k.copy_(torch.where(torch.arange(8) == self.n, x, self.k))
        self.n.add_(1)
        return self.k.sum()


def three_calls(module, x):
    """Three results of the module in torch, and three after the import into TVM."""
    imported = from_exported_program(torch.export.export(copy.deepcopy(module), (x,)))
    main = tvm.relax.VirtualMachine(tvm.compile(imported, target="llvm"), tvm.cpu())["main"]
    arg = tvm.runtime.tensor(x.numpy())
    return [module(x) for _ in range(3)], [torch.tensor(main(arg)[0].numpy()) for _ in range(3)]


def sample(p):
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


probs, position = torch.tensor([0.1, 0.2, 0.7]).repeat(100_000, 1), torch.tensor(3)
numbers = {
    "position * 0.5": lambda i: i * 0.5,
    "position / 4": lambda i: i / 4,
    "position.float() / 4": lambda i: i.float() / 4,
}
seen = {
    "share of token 0": [
        " ".join(f"{(draw == 0).double().mean():.1f}" for draw in calls) for calls in three_calls(Module(sample), probs)
    ],
    "randn, different draws": [
        str(len({draw.sum().item() for draw in calls}))
        for calls in three_calls(Module(lambda p: p + torch.randn_like(p)), probs[:8])
    ],
}
for name, function in numbers.items():
    seen[name] = [" ".join(f"{i.item():g}" for i in calls) for calls in three_calls(Module(function), position)]
seen["tokens in the cache"] = [
    " ".join(f"{n.item():g}" for n in calls) for calls in three_calls(Cache(), torch.ones(1))
]
print(f"{'':27}{'torch':20}TVM")
for name, pair in seen.items():
    print(f"{name:27}{pair[0]:20}{pair[1]}")
expected = {
    "share of token 0": ["0.1 0.1 0.1", "1.0 1.0 1.0"],
    "randn, different draws": ["3", "1"],
    "position * 0.5": ["1.5 1.5 1.5", "0 0 0"],
    "position / 4": ["0.75 0.75 0.75", "0 0 0"],
    "position.float() / 4": ["0.75 0.75 0.75", "0.75 0.75 0.75"],
    "tokens in the cache": ["1 2 3", "1 1 1"],
}
if seen != expected:
    sys.exit(f"changed: {[name for name in seen if seen[name] != expected[name]]} after the import into TVM")
END
