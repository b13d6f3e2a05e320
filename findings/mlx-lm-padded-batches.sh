#!/bin/sh
# mlx-lm 0.32.2 (mlx 0.32.4 on a CPU): in BatchGenerator, recurrent models read the padding of shorter prompts.
#
# Mamba and RecurrentGemma carry a state from token to token. Behind padding the state of a short prompt is no longer
# empty when its first token comes. With a prompt of the same length beside it, nothing changes.
#
# It matters on any server that batches: the text of a prompt depends on who else is in the batch.
#
# Seen (Linux x86-64, Python 3.11):
#   mlx_lm.models.mamba, in a batch with a prompt of 5 tokens: 0 of 20 tokens differ
#   mlx_lm.models.mamba, in a batch with a prompt of 24 tokens: 20 of 20 tokens differ
#   mlx_lm.models.recurrent_gemma, in a batch with a prompt of 5 tokens: 0 of 20 tokens differ
#   mlx_lm.models.recurrent_gemma, in a batch with a prompt of 24 tokens: 20 of 20 tokens differ
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "mlx[cpu]==0.32.4" mlx-lm==0.32.2
venv/bin/python - > out <<'END'
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import mamba, recurrent_gemma

griffin = dict(attention_bias=False, num_attention_heads=4, num_key_value_heads=1, attention_window_size=64)
griffin |= dict(conv1d_width=4, logits_soft_cap=30.0, rms_norm_eps=1e-6, rope_theta=10000)
griffin |= dict(block_types=["recurrent", "recurrent", "attention"])
models = {
    mamba: dict(use_bias=False, use_conv_bias=True, conv_kernel=4, state_size=16, time_step_rank=8),
    recurrent_gemma: griffin,
}


def generate(model, prompts):
    """Return 20 greedy tokens after each prompt."""
    batch = BatchGenerator(model, max_tokens=20)
    tokens = {uid: [] for uid in batch.insert(prompts)}
    while any(len(found) < 20 for found in tokens.values()):
        for response in batch.next_generated():
            tokens[response.uid].append(response.token)
    return [*tokens.values()]


for module, sizes in models.items():
    mx.random.seed(0)
    sizes |= dict(vocab_size=64, hidden_size=64, num_hidden_layers=3, intermediate_size=128)
    args = module.ModelArgs(model_type="", **sizes)
    model = module.Model(args)
    model.update(tree_map(lambda x: x if x.ndim < 2 else 0.3 * mx.random.normal(x.shape), model.parameters()))
    short, same, longer = (mx.random.randint(1, 64, (length,)).tolist() for length in (5, 5, 24))
    alone = generate(model, [short])[0]
    for other in (same, longer):
        beside = generate(model, [other, short])[1]
        differ = sum(a != b for a, b in zip(alone, beside))
        print(f"{module.__name__}, in a batch with a prompt of {len(other)} tokens: {differ} of 20 tokens differ")
END
cat out
if ! { test "$(grep -c "of 5 tokens: 0 of 20" out)" = 2 && ! grep -q "of 24 tokens: 0 of 20" out; }; then
    echo "changed: mlx-lm-padded-batches" >&2
    exit 1
fi
