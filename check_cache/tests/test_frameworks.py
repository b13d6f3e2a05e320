"""Decoders of other frameworks, with the examples of ADAPTERS.md."""

import os
import re
import sys
from pathlib import Path

import pytest

from check_cache import check_cache
from reports import reports, shows

PACKAGES = Path(__file__).parent / "frameworks" / ".packages"
PAGE = Path(__file__).parent.parent / "ADAPTERS.md"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of their packages, whose classes pytest-xdist cannot import to show them
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
    page = PAGE.read_text(encoding="utf-8")
    code = re.search(rf"^```python {library}\n(.*?)^```", page, re.MULTILINE | re.DOTALL).group(1)
    reports = []

    def check(**adapter):
        reports.append(check_cache(**adapter, length=24, scenarios=RUN))

    exec(code, dict(names, check_cache=check))
    return reports[0]


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


def keras_hub(name="GPT2"):
    """A small model of keras-hub."""
    import keras
    from keras_hub import models

    keras.utils.set_random_seed(0)
    sizes = dict(vocabulary_size=64, num_layers=2, num_heads=4, hidden_dim=64, intermediate_dim=128)
    backbone = getattr(models, f"{name}Backbone")(**sizes, max_sequence_length=64, dropout=0)
    return dict(keras=keras, model=getattr(models, f"{name}CausalLM")(backbone=backbone, preprocessor=None))


@pytest.mark.parametrize("library", ["mlx-lm", "flax", "keras"])
def test_the_example_of_the_readme(library):
    names = {"mlx-lm": mlx_lm, "flax": flax_linen, "keras": keras_hub}[library]()
    report = example(library, names)
    assert report.exit_code == 0, report
    ran = {result.scenario for result in report.results if result.status == "correct"}
    assert {*RUN} <= ran, report


def test_a_query_of_keras_hub_without_a_position():
    report = example("keras", keras_hub("GPTNeoX"))
    assert report.exit_code == 1, report


def test_bfloat16_of_mlx_has_to_be_cast():
    import mlx.core as mx

    weights = {"a.weight": mx.zeros((2, 2), dtype=mx.bfloat16)}
    with pytest.raises(TypeError, match="BFloat16"):
        check_cache(full=print, new=print, step=print, weights=weights)


@pytest.mark.parametrize(("code", "said"), reports(Path(__file__).parent / "frameworks" / "reports"))
def test_a_report_shows_what_it_says(code, said, capsys):
    assert shows(code, said, capsys)
