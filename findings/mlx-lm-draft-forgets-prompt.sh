#!/bin/sh
# mlx-lm 0.32.2: with a draft model, penalties do not see the prompt, so greedy text changes.
#
# Speculative decoding leaves greedy text as it is. In mlx-lm it does, until there is a logits processor: without a
# draft model, it gets the tokens of the prompt and the new ones, with a draft model only the last token of the prompt
# and the new ones. So a repetition penalty no longer discourages what the prompt says, even if the draft model is the
# model itself.
#
# It matters because one turns on speculation for speed, and not to change the text. Test it with every option that
# you use, not just with the plain greedy text.
#
# Seen (Linux x86-64, Python 3.11), a prompt of 8 tokens, 40 greedy tokens with and without the model as its own draft:
#   plain                 equal
#   logit_bias            equal
#   repetition_penalty    differ
#   the first call of a processor gets 8 tokens without a draft, 1 with it
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "mlx[cpu]==0.32.4" mlx-lm==0.32.2
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import sys

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_logits_processors

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2}
sizes |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 50, "head_dim": 16, "tie_word_embeddings": True}
mx.random.seed(0)
model = llama.Model(llama.ModelArgs(model_type="llama", **sizes))
model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.4 if p.ndim > 1 else p, model.parameters()))
prompt = mx.array([3, 7, 9, 11, 2, 4, 30, 41])


def texts(make_processors):
    settings = {"max_tokens": 40}
    plain = generate_step(prompt, model, logits_processors=make_processors(), **settings)
    draft = speculative_generate_step(prompt, model, model, logits_processors=make_processors(), **settings)
    return [int(step[0]) for step in plain], [int(step[0]) for step in draft]


def equal(**settings):
    plain, draft = texts(lambda: make_logits_processors(**settings))
    return "equal" if plain == draft else "differ"


lengths = []


def recording():
    sizes = []
    lengths.append(sizes)
    return [lambda tokens, logits: sizes.append(tokens.size) or logits]


texts(recording)
seen = {
    "plain": equal(),
    "logit_bias": equal(logit_bias={5: 3.0}),
    "repetition_penalty": equal(repetition_penalty=1.3),
    "tokens, no draft": lengths[0][0],
    "tokens, draft": lengths[1][0],
}
print("\n".join(f"{name:22} {result}" for name, result in seen.items()))
expected = dict(zip(seen, ["equal", "equal", "differ", 8, 1]))
if changed := [name for name in seen if seen[name] != expected[name]]:
    sys.exit(f"changed: {changed}")
END
