#!/bin/sh
# torch 2.13.0: a learning rate in a tensor is shared by parameter groups and optimizers, and some schedulers then
# change it once for each of them.
#
# torch recommends a tensor for compiled optimizers. The optimizer keeps that tensor, not a copy, in all of its groups,
# and schedulers write into it. Most compute all new rates before they write the first one, so two groups in one
# optimizer are safe, except that ReduceLROnPlateau takes them in turn: a factor of 0.5 becomes 0.25. Two optimizers
# with the same tensor disturb each other under every scheduler that starts from the present rate: here, what is left of
# it is squared. LambdaLR starts from a copy of the first one.
#
# It matters because a GPT often has a group with weight decay and one without, or Muon beside AdamW, and a rate that
# falls too fast looks like a model that learns slowly. Give each group of each optimizer its own lr.clone().
#
# Seen (Linux x86-64, Python 3.11), the learning rate after 4 steps, starting from 1; "a number" is right:
#                        a number   two groups   two optimizers
#   LambdaLR               0.06250      0.06250          0.06250
#   ExponentialLR          0.06250      0.06250          0.00391
#   CosineAnnealingLR      0.50000      0.50000          0.25000
#   LinearLR               0.55000      0.55000          0.30250
#   ReduceLROnPlateau      0.12500      0.01562          0.01562
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6
venv/bin/python -W ignore - <<'END'
import sys

import torch
from torch.optim import lr_scheduler

STEPS = 4
schedulers = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


def rate_after(make, lr, optimizers):
    """The learning rate of the last group after a few steps, with one optimizer of two groups or with two."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": decay} for decay in (0.1, 0.0)]
    parts = [groups] if optimizers == 1 else [[group] for group in groups]
    made = [torch.optim.AdamW(part, lr=lr) for part in parts]
    schedules = [make(optimizer) for optimizer in made]
    for _ in range(STEPS):
        for group in groups:
            group["params"][0].grad = torch.ones(2)
        for optimizer in made:
            optimizer.step()
        for schedule in schedules:
            schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
    return float(made[-1].param_groups[-1]["lr"])


print(f"{'':18}{'a number':>12}{'two groups':>13}{'two optimizers':>17}")
changed = []
for name, make in schedulers.items():
    number, groups, optimizers = (
        rate_after(make, 1.0, 2),
        rate_after(make, torch.tensor(1.0), 1),
        rate_after(make, torch.tensor(1.0), 2),
    )
    print(f"{name:18}{number:12.5f}{groups:13.5f}{optimizers:17.5f}")
    right = [abs(rate - number) < 1e-5 for rate in (groups, optimizers)]
    if right != [name != "ReduceLROnPlateau", name == "LambdaLR"]:
        changed.append(name)
if changed:
    sys.exit(f"changed: {changed}")
END
