"""kvgpt/engines/onnx.py: ONNX Runtime picks the tokens of PyTorch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import CHARS, SIZE, STABLELM, ok, run, tiny, unix
from kvgpt.engines.onnx import OnnxGPT
from kvgpt.export.onnx import write_onnx

CONTEXT = SIZE["block_size"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(model, its ONNX file)"""
    model, file = tiny(**STABLELM, qk_norm=True, n_kv_head=2), tmp_path_factory.mktemp("onnx") / "model.onnx"
    write_onnx(model, CHARS, file)
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
    new = list(engine.stream(idx, steps, kv_cache=data.draw(st.booleans()), **sampling))
    assert all(block.shape == (B, 1) for block in new)
    assert torch.equal(torch.cat((idx, *new), dim=1), model.generate(idx, steps, **sampling))


@given(data=st.data())
def test_streams_of_one_engine_do_not_mix(exported, data):
    model, file = exported
    engine, streams, texts = OnnxGPT(file), [], []
    for seed in range(2):
        B, T = data.draw(st.integers(1, 2)), data.draw(st.integers(1, CONTEXT - 1))
        idx, settings = some_ids(B, T, seed), dict(seed=seed, overflow="slide")
        streams.append(engine.stream(idx, CONTEXT, **settings))
        texts.append((model.generate(idx, CONTEXT, **settings)[:, T:], []))
    for turn in data.draw(st.permutations([0, 1, None] * CONTEXT)):
        if turn is None:
            engine(some_ids(1, 3, 5))
        else:
            texts[turn][1].append(next(streams[turn]))
    for expected, blocks in texts:
        assert torch.equal(torch.cat(blocks, dim=1), expected)


@unix
@pytest.mark.parametrize("exported", [True], indirect=True)
def test_onnx_runtime_tells_nobody_and_leaves_nothing_at_home(exported, tmp_path):
    """ONNX Runtime reports to its makers, keeps a number for the machine in ~/.cache, and warns where it cannot."""
    code = "import sys; from kvgpt.engines.onnx import OnnxGPT; OnnxGPT(sys.argv[1])"
    result = ok(run("-c", code, exported[1], env={"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}))
    assert result.stderr == "" and not list(tmp_path.iterdir())
