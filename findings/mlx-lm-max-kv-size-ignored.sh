#!/bin/sh
# mlx-lm 0.32.2: make_prompt_cache(model, max_kv_size=16) is unbounded for Llama, and other models with a make_cache.
#
# Only the docstring says that such a model decides for itself. A Llama keeps all keys, a Qwen2 keeps 16. Upstream:
# issue 118, closed; pull request 126, open.
#
# It matters if you bound the cache to bound memory: it grows all the same. Look at the type of the cache you got.
#
# Seen (Linux x86-64, Python 3.11):
#   llama: KVCache, 40 tokens kept with max_kv_size=16
#   qwen2: RotatingKVCache, 16 tokens kept with max_kv_size=16
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "mlx[cpu]==0.32.4" mlx-lm==0.32.2
venv/bin/python - > out <<'END'
import mlx.core as mx
from mlx_lm.models import llama, qwen2
from mlx_lm.models.cache import make_prompt_cache

sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
for module, name in ((llama, "llama"), (qwen2, "qwen2")):
    model = module.Model(module.ModelArgs(model_type=name, rms_norm_eps=1e-5, vocab_size=64, **sizes))
    cache = make_prompt_cache(model, max_kv_size=16)
    for token in range(40):
        model(mx.array([[token]]), cache=cache)
    keys = cache[0].keys_and_values()[0]
    print(f"{name}: {type(cache[0]).__name__}, {keys.shape[2]} tokens kept with max_kv_size=16")
END
cat out
if ! { grep -q "llama: KVCache, 40 tokens" out && grep -q "qwen2: RotatingKVCache, 16 tokens" out; }; then
    echo "changed: mlx-lm-max-kv-size-ignored" >&2
    exit 1
fi
