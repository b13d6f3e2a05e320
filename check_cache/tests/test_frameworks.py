"""Decoders of other frameworks, with the examples of README.md."""

import os
import re
import sys
from pathlib import Path

import pytest

from check_cache import check_cache

PACKAGES = Path(__file__).parent / "frameworks" / ".packages"
README = Path(__file__).parent.parent / "README.md"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs frameworks/.packages: see frameworks/requirements.txt"),
]
RUN = ["decode", "prefix used twice", "two caches at once"]  # JAX compiles each size, so all scenarios take a minute


@pytest.fixture(scope="module", autouse=True)
def packages():
    """Let these tests import the libraries, and no other tests."""
    os.environ["KERAS_BACKEND"] = "jax"
    sys.path.append(str(PACKAGES))
    yield
    sys.path.remove(str(PACKAGES))


def example(library, names):
    """Return the report of the example for a library, in which these names stand for what the reader has."""
    page = README.read_text(encoding="utf-8")
    code = re.search(rf"^```python {library}\n(.*?)^```", page, re.MULTILINE | re.DOTALL).group(1)
    names = dict(names, check_cache=lambda **adapter: names.update(report=check_cache(**adapter, length=24, scenarios=RUN)))
    exec(code, names)
    return names["report"]


def mlx_lm():
    """A small llama of mlx-lm, with what the example imports."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from mlx_lm.models.cache import make_prompt_cache

    mx.random.seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4)
    args = llama.ModelArgs(model_type="llama", num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=64, **sizes)
    return dict(mx=mx, tree_flatten=tree_flatten, make_prompt_cache=make_prompt_cache, model=llama.Model(args))


def flax_linen():
    """A decoder of Flax's own attention: `model` is without a cache, `decoder` with one."""
    import jax
    import jax.numpy as jnp
    from flax import linen
    from flax.traverse_util import flatten_dict, unflatten_dict

    class Decoder(linen.Module):
        decode: bool

        @linen.compact
        def __call__(self, ids, pos):
            x = linen.Embed(64, 32)(ids) + linen.Embed(64, 32)(pos)
            mask = None if self.decode else linen.make_causal_mask(ids)
            for _ in range(2):
                x = linen.LayerNorm()(x + linen.MultiHeadAttention(num_heads=4, decode=self.decode)(x, mask=mask))
            return linen.Dense(64)(x)

    model, decoder = Decoder(decode=False), Decoder(decode=True)
    ids = jnp.zeros((1, 4), int)
    params = model.init(jax.random.key(0), ids, jnp.arange(4)[None])["params"]
    found = dict(jax=jax, jnp=jnp, flatten_dict=flatten_dict, unflatten_dict=unflatten_dict)
    return dict(found, model=model, decoder=decoder, params=params)


def keras_hub():
    """A small GPT-2 of keras-hub."""
    import keras
    from keras_hub.models import GPT2Backbone, GPT2CausalLM

    keras.utils.set_random_seed(0)
    sizes = dict(vocabulary_size=64, num_layers=2, num_heads=4, hidden_dim=64, intermediate_dim=128)
    model = GPT2CausalLM(backbone=GPT2Backbone(**sizes, max_sequence_length=64, dropout=0), preprocessor=None)
    return dict(keras=keras, model=model)


@pytest.mark.parametrize("library", ["mlx-lm", "flax", "keras"])
def test_the_example_of_the_readme(library):
    names = {"mlx-lm": mlx_lm, "flax": flax_linen, "keras": keras_hub}[library]()
    report = example(library, names)
    assert report.exit_code == 0, report
    ran = {result.scenario for result in report.results if result.status == "correct"}
    assert {*RUN} <= ran, report
