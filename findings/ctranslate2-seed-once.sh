#!/bin/sh
# ctranslate2 4.8.5, transformers 5.24.0: set_random_seed works once.
#
# The seed is read when a worker draws its first random number. After that, set_random_seed has no effect on it: the
# same call after the same seed gives a different text, and goes on from where the generator was.
#
# It matters if you compare sampled texts, with a cache and without or between batches, in one process: only the first
# one has the seed you set. Make a new Generator, which starts new workers, for each comparison.
#
# Seen (Linux x86-64, Python 3.11), 12 tokens sampled by a random GPT-2:
#   seed 1                   19 18 1 19 5 5 5 15 18 18 5 13
#   seed 1 again             5 5 11 15 11 5 18 17 17 17 4 15
#   seed 1, new Generator    19 18 1 19 5 5 5 15 18 18 5 13
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq torch==2.13.0 transformers==5.24.0 ctranslate2==4.8.5 setuptools
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import sys

import ctranslate2
import torch
import transformers
from ctranslate2.converters.transformers import GPT2Loader

torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=20, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3, bos_token_id=0, eos_token_id=0
)
spec = GPT2Loader().get_model_spec(transformers.GPT2LMHeadModel(config).eval())
spec.register_vocabulary([f"t{i}" for i in range(20)])
spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t0"
spec.validate()
spec.optimize()
spec.save(".")


def new_generator():
    return ctranslate2.Generator(".", compute_type="float32", intra_threads=1)


def sample(generator):
    ctranslate2.set_random_seed(1)
    settings = {"max_length": 12, "sampling_topk": 0, "include_prompt_in_result": False}
    return generator.generate_batch([["t3", "t7", "t1"]], **settings)[0].sequences_ids[0]


generator = new_generator()
seen = {
    "seed 1": sample(generator),
    "seed 1 again": sample(generator),
    "seed 1, new Generator": sample(new_generator()),
}
for name, ids in seen.items():
    print(f"{name:24}", *ids)
first, again, new = seen.values()
if first == again or first != new:
    sys.exit("changed: set_random_seed of ctranslate2 works more than once")
END
