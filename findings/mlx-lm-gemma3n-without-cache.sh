#!/bin/sh
# mlx-lm 0.32.2 (mlx 0.32.4 on a CPU): gemma3n without a cache is a different model than with an empty one.
#
# Its last layers use the keys and values of earlier layers. They read them from the cache, and without a cache they
# compute their own. Upstream: issue 1674, open.
#
# It matters because finetuning and perplexity run without a cache, and generation with one.
#
# Seen (Linux x86-64, Python 3.11):
#   logits off by 1.90, their standard deviation is 1.03
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "mlx[cpu]==0.32.4" mlx-lm==0.32.2
venv/bin/python - > out <<'END'
import mlx.core as mx
from mlx_lm.models import gemma3n
from mlx_lm.models.cache import make_prompt_cache

text = dict(model_type="gemma3n", hidden_size=128, num_hidden_layers=4, intermediate_size=128, num_attention_heads=4)
text |= dict(head_dim=32, rms_norm_eps=1e-5, vocab_size=100, num_key_value_heads=2, num_kv_shared_layers=2)
text |= dict(vocab_size_per_layer_input=100, sliding_window=8, max_position_embeddings=1000, rope_local_base_freq=1.0)
text |= dict(rope_theta=1000.0, final_logit_softcapping=30.0, hidden_size_per_layer_input=16, laurel_rank=8)
text |= dict(layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.5] * 4)
text |= dict(altup_num_inputs=4, altup_coef_clip=1.0, altup_correct_scale=True, altup_active_idx=0)
mx.random.seed(0)
model = gemma3n.Model(gemma3n.ModelArgs(model_type="gemma3n", text_config=text))
ids = mx.random.randint(0, 100, (1, 8))
without, with_empty = model(ids), model(ids, cache=make_prompt_cache(model))
off = mx.max(mx.abs(without - with_empty)).item()
print(f"logits off by {off:.2f}, their standard deviation is {mx.std(without).item():.2f}")
END
cat out
if ! { grep -q "logits off by" out && ! grep -q "off by 0.00" out; }; then
    echo "changed: mlx-lm-gemma3n-without-cache" >&2
    exit 1
fi
