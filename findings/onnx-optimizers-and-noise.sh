#!/bin/sh
# torch 2.13.0 with onnxscript 0.7.2, onnxsim 0.8.1, onnxslim 0.1.98: ONNX optimizers merge random draws or freeze them.
#
# A random operator is not a function of its inputs: two with equal inputs draw twice, and one whose inputs are constant
# still draws in every run. The optimizers disagree. torch.onnx.export merges two calls of torch.bernoulli or dropout on
# one tensor by default. onnxsim merges all pairs below. onnxslim merges them, or, if only a shape goes in, draws once
# and stores the result in the file, so that every run has the same noise.
#
# It matters to an exported sampler: two tokens drawn from one distribution are always equal, or a "random" text is the
# same in every process, with the seed ignored. Export with optimize=False, make the noise an input of the graph, and
# compare two draws after each optimizer, not just one.
#
# Seen (Linux x86-64, Python 3.11, onnxruntime 1.32.0), two draws from one distribution in one graph, run twice:
#                      optimize=False  optimize=True   then onnxsim    then onnxslim
#   torch.bernoulli    independent     same twice      same twice      same twice
#   dropout            independent     same twice      same twice      same twice
#   exponential_       independent     independent     same twice      same each run
#   torch.rand         independent     independent     same twice      same each run
#   torch.rand_like    independent     independent     same twice      same twice
#   torch.randint      independent     independent     same twice      same each run
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnx-ir==1.1.0 onnxscript==0.7.2 onnxruntime==1.32.0 \
    onnxsim==0.8.1 onnxslim==0.1.98
ORT_DISABLE_TELEMETRY=1 venv/bin/python -W ignore - <<'END'
import logging
import sys

import numpy as np
import onnx
import onnxruntime
import onnxsim
import onnxslim
import torch
from torch.nn.functional import dropout

logging.disable(logging.ERROR)
onnxruntime.set_default_logger_severity(4)
probs = torch.full((32, 100), 0.01)  # 32 rows, so that two draws are never equal by chance
draws = {
    "torch.bernoulli": lambda p: torch.bernoulli(50 * p),
    "dropout": lambda p: dropout(p, 0.5, training=True),
    "exponential_": lambda p: (p / torch.empty_like(p).exponential_()).argmax(-1),
    "torch.rand": lambda p: (p.log() - torch.rand(32, 100).log().neg().log()).argmax(-1),
    "torch.rand_like": lambda p: (p.log() - torch.rand_like(p).log().neg().log()).argmax(-1),
    "torch.randint": lambda p: torch.randint(0, 1000, (32,)),
}


class Twice(torch.nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, p):
        return self.draw(p), self.draw(p)


def behavior(model):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {i.name: probs.numpy() for i in session.get_inputs()}
    runs = [session.run(None, feed) for _ in range(2)]
    if np.array_equal(runs[0][0], runs[1][0]):
        return "same each run"
    return "same twice" if np.array_equal(*runs[0]) else "independent"


def export(draw, optimize=True):
    return torch.onnx.export(Twice(draw), (probs,), dynamo=True, optimize=optimize, verbose=False).model_proto


seen = {}
print(19 * " " + "optimize=False  optimize=True   then onnxsim    then onnxslim")
for name, draw in draws.items():
    models = [export(draw, False), export(draw), onnxsim.simplify(export(draw))[0], onnxslim.slim(export(draw))]
    for model in models:
        onnx.checker.check_model(model)
    seen[name] = [behavior(model) for model in models]
    print(f"{name:19}" + "".join(f"{what:16}" for what in seen[name]).rstrip())
free, twice, frozen = "independent", "same twice", "same each run"
expected = {
    "torch.bernoulli": [free, twice, twice, twice],
    "dropout": [free, twice, twice, twice],
    "exponential_": [free, free, twice, frozen],
    "torch.rand": [free, free, twice, frozen],
    "torch.rand_like": [free, free, twice, twice],
    "torch.randint": [free, free, twice, frozen],
}
if seen != expected:
    sys.exit(f"changed: which optimizers keep random draws apart, for {[n for n in draws if seen[n] != expected[n]]}")
END
