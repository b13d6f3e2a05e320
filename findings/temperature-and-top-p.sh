#!/bin/sh
# mlx-lm 0.32.2 against transformers 5.24.0: the same temperature and top_p keep different tokens.
#
# transformers divides the logits by the temperature and then filters. mlx-lm filters first and applies the temperature
# to what is left. At temperature 2 and top_p 0.9, one keeps 625 of 1,000 tokens and the other 263. With min_p 0.05, it
# is 445 and 48. At temperature 1 they agree.
#
# It matters when you move sampling settings from one library to the other, or compare their texts: the settings of a
# model card were tuned for one of the two orders.
#
# Seen (Linux x86-64, Python 3.11):
#   temperature 1.0, top_p 0.9:  transformers keeps 263, mlx-lm draws 263
#   temperature 2.0, top_p 0.9:  transformers keeps 625, mlx-lm draws 263
#   temperature 2.0, min_p 0.05: transformers keeps 445, mlx-lm draws 48
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2 transformers==5.24.0
venv/bin/python - <<'END'
import sys

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.sample_utils import make_sampler
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

logits = 2 * np.random.default_rng(0).normal(size=(1, 1_000)).astype(np.float32)
logprobs = mx.repeat(mx.array(logits) - mx.logsumexp(mx.array(logits)), 2_000, axis=0)


def transformers_keeps(temperature, warper):
    scores = TemperatureLogitsWarper(temperature)(None, torch.tensor(logits))
    return int((warper(None, scores) > -torch.inf).sum())


def mlx_draws(**settings):
    """Count different tokens in 100,000 draws."""
    mx.random.seed(0)
    sampler = make_sampler(**settings)
    return len({token for _ in range(50) for token in sampler(logprobs).tolist()})


seen = []
for temperature, name, value, warper in (
    (1.0, "top_p", 0.9, TopPLogitsWarper(0.9)),
    (2.0, "top_p", 0.9, TopPLogitsWarper(0.9)),
    (2.0, "min_p", 0.05, MinPLogitsWarper(0.05)),
):
    seen.append((transformers_keeps(temperature, warper), mlx_draws(temp=temperature, **{name: value})))
    print(f"temperature {temperature}, {name} {value}: transformers keeps {seen[-1][0]}, mlx-lm draws {seen[-1][1]}")
if not (seen[0][0] == seen[0][1] and seen[1][0] > 2 * seen[1][1] and seen[2][0] > 4 * seen[2][1]):
    sys.exit("changed: transformers and mlx-lm apply temperature and filters in the same order")
END
