"""kvgpt/engines/onnx.py: ONNX Runtime picks the tokens of PyTorch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import CHARS, SIZE, STABLELM, TOKENIZER, ok, run, tiny, unix
from kvgpt.engines.onnx import OnnxGPT
from kvgpt.export.onnx import write_onnx
from model import Sampling, stream_tokens

CONTEXT = SIZE["block_size"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(model, its ONNX file)"""
    model, file = tiny(**STABLELM, qk_norm=True, n_kv_head=2), tmp_path_factory.mktemp("onnx") / "model.onnx"
    write_onnx(model, TOKENIZER, file)
    return model, file


def some_ids(B, T, seed):
    return torch.randint(len(CHARS), (B, T), generator=torch.Generator().manual_seed(seed))


@given(data=st.data())
def test_the_engine_picks_the_tokens_of_pytorch(exported, data):
    """For the same seed, with the cache, without it, and past the context."""
    model, file = exported
    engine = OnnxGPT(file)
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, CONTEXT))
    idx = some_ids(B, T, data.draw(st.integers(0, 99)))
    sampling = dict(
        seed=data.draw(st.integers(0, 2**64 - 1)),
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=data.draw(st.sampled_from([None, 1, 5])),
        top_p=data.draw(st.sampled_from([None, 0.9])),
        overflow=data.draw(st.sampled_from(["stop", "slide"])),
        samples=[7 + row for row in range(B)],
    )
    steps = data.draw(st.integers(0, 2 * CONTEXT))
    new = list(stream_tokens(engine, idx, steps, Sampling(**sampling), data.draw(st.booleans())))
    assert all(block.shape == (B, 1) for block in new)
    assert torch.equal(torch.cat((idx, *new), dim=1), model.generate(idx, steps, **sampling))


@pytest.mark.slow
@unix
@pytest.mark.parametrize("exported", [True], indirect=True)
def test_onnx_runtime_tells_nobody_and_leaves_nothing_at_home(exported, tmp_path):
    """By itself it reports to its makers, keeps a number for the machine in ~/.cache, and warns where it cannot."""
    code = "import sys; from kvgpt.engines.onnx import OnnxGPT; OnnxGPT(sys.argv[1])"
    result = ok(run("-c", code, exported[1], env={"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}))
    assert result.stderr == "" and not list(tmp_path.iterdir())
