#!/bin/sh
# torch 2.13.0: every module made from one exported program writes into the same cache.
#
# torch.export keeps a cache that lives in a buffer. But program.module() does not copy buffers: two modules made from
# one program, and the model it was exported from, share them. A file written later contains what was cached by then.
#
# It matters if you make one module per conversation, or export a model and keep using it: each reads the other's keys
# and values. Take copy.deepcopy(program.module()), and save before the first step.
#
# Seen (Linux x86-64, Python 3.11), tokens in the cache after each step:
#   first module 1, first module 2, second module 3
#   the model that was exported 3
#   a file saved now starts with 3
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6
venv/bin/python -W ignore - <<'END'
import sys

import torch


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(8, 2))
        self.register_buffer("length", torch.tensor([0]))

    def forward(self, key):
        self.keys.index_copy_(0, self.length, key)
        self.length.add_(1)
        return self.length.clone()


key = torch.ones(1, 2)
model = Cache()
program = torch.export.export(model, (key,))
first, second = program.module(), program.module()
steps = [first(key).item(), first(key).item(), second(key).item()]
torch.export.save(program, "cache.pt2")
saved = torch.export.load("cache.pt2").module().length.item()
print("first module {}, first module {}, second module {}".format(*steps))
print(f"the model that was exported {model.length.item()}")
print(f"a file saved now starts with {saved}")
if (steps, model.length.item(), saved) != ([1, 2, 3], 3, 3):
    sys.exit("changed: modules of one exported program no longer share their buffers")
END
