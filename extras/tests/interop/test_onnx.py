"""extras/interop/onnx.py: the graph as onnx and ONNX Runtime see it, and run by our own loop."""

import copy
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extra_helpers import POST_LN, STABLELM, TOKENIZER
from extras.interop.compare import own_text
from extras.interop.onnx import OnnxGPT, compare_onnx, write_onnx
from helpers import CHARS, SIZE, ok, run, same, tiny, unix
from model import Sampling, generate

CONTEXT = SIZE["block_size"]
NETWORKS = {
    "post-LN": dict(POST_LN, activation="gelu_tanh"),
    "StableLM": dict(STABLELM, qk_norm=True, n_kv_head=2, mlp_ratio=3.3),
}
SLOW = partial(pytest.param, marks=pytest.mark.slow)  # an export takes seconds


@pytest.fixture(scope="module", params=[SLOW(name) for name in NETWORKS])
def exported(request, tmp_path_factory):
    """(model, its model.onnx, a session of that)"""
    model = tiny(**NETWORKS[request.param])
    file = tmp_path_factory.mktemp("onnx") / "model.onnx"
    names = [list(vars(module)) for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    write_onnx(model, TOKENIZER, file)
    assert [list(vars(module)) for module in model.modules()] == names and same(model.state_dict(), weights)
    return model, file, onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def feed(session, ids, past, mask=None, positions=None):
    """One call by names, as anybody would make it who has only the file. Returns (logits, past)."""
    begin = past[0].shape[2]
    B, T = ids.shape
    mask = np.ones((B, begin + T), np.int64) if mask is None else mask
    positions = np.tile(np.arange(begin, begin + T), (B, 1)) if positions is None else positions
    names = [f"past_key_values.{i}.{kind}" for i in range(len(past) // 2) for kind in ("key", "value")]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **dict(zip(names, past))}
    logits, *past = session.run(["logits", *(name.replace("past_key_values", "present") for name in names)], inputs)
    return torch.from_numpy(logits), past


def nothing(model, B):
    """A past of no positions."""
    config = model.config
    return [np.zeros((B, config.n_kv_head, 0, 8), np.float32) for _ in range(2 * config.n_layer)]


def test_the_graph_has_the_names_and_axes_that_others_expect(exported):
    """Optimum and transformers.js look for these, and need heads and head size as numbers."""
    model, file, _ = exported
    proto = onnx.load(file)
    onnx.checker.check_model(proto, full_check=True)
    assert [(entry.domain, entry.version) for entry in proto.opset_import if not entry.domain] == [("", 20)]
    assert not any(tensor.external_data for tensor in proto.graph.initializer)
    heads = model.config.n_kv_head
    whole = "past_sequence_length + sequence_length"
    axes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*proto.graph.input, *proto.graph.output)
    }
    each = [f"{i}.{kind}" for i in range(2) for kind in ("key", "value")]
    assert axes == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", whole],
        "position_ids": ["batch_size", "sequence_length"],
        **{f"past_key_values.{slot}": ["batch_size", heads, "past_sequence_length", 8] for slot in each},
        "logits": ["batch_size", "sequence_length", len(CHARS)],
        **{f"present.{slot}": ["batch_size", heads, whole, 8] for slot in each},
    }


@settings(max_examples=20)
@given(data=st.data())
def test_any_split_of_any_batch_gives_the_logits_of_one_forward(exported, data):
    """Positions, mask and cache are those of the call, not of the exported example."""
    model, _, session = exported
    B = data.draw(st.integers(1, 3))
    T = data.draw(st.integers(1, CONTEXT))
    cuts = sorted(data.draw(st.sets(st.integers(1, T - 1)))) if T > 1 else []
    ids = torch.randint(len(CHARS), (B, T), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    past = nothing(model, B)
    logits = []
    for begin, end in zip([0, *cuts], [*cuts, T]):
        some, past = feed(session, ids[:, begin:end].numpy(), past)
        logits.append(some)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(logits, 1), model(ids)[0], atol=1e-4, rtol=0)
    assert all(each.shape == (B, model.config.n_kv_head, T, 8) for each in past)


def test_padding_on_the_left_changes_nothing(exported):
    """A padded batch as transformers makes it: positions count from the first real token, the mask is 0 before."""
    model, _, session = exported
    ids = torch.arange(10)[None] % len(CHARS)
    padded = torch.cat((torch.full((1, 3), 5), ids[:, :7]), dim=1)
    batch = torch.cat((ids, padded)).numpy()
    mask = np.array([[1] * 10, [0] * 3 + [1] * 7])
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    logits, past = feed(session, batch, nothing(model, 2), mask, positions)
    with torch.no_grad():
        alone = model(torch.cat((ids[:, :7], torch.tensor([[2, 3]])), dim=1))[0][0]
    torch.testing.assert_close(logits[1, 3:], alone[:7], atol=1e-4, rtol=0)
    for step, token in enumerate((2, 3)):
        mask = np.concatenate((mask, np.ones((2, 1), np.int64)), axis=1)
        token = np.full((2, 1), token)
        position = np.array([[10 + step], [7 + step]])
        logits, past = feed(session, token, past, mask, position)
        torch.testing.assert_close(logits[1, 0], alone[7 + step], atol=1e-4, rtol=0)


def test_the_check_of_an_export_finds_another_model(exported, capsys):
    model, file, _ = exported
    compare_onnx(file, model, own_text(model))
    other = tiny(**vars(model.config))
    with torch.no_grad():
        other.transformer["wte"].weight[3] += 1e-2
    with pytest.raises(SystemExit):
        compare_onnx(file, other, own_text(other))
    assert "model.onnx differs from the model" in capsys.readouterr().err


# -- run by our own loop -----------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(data=st.data())
def test_the_engine_picks_the_tokens_of_pytorch(exported, data):
    """For the same seed, with the cache, without it, and past the context."""
    model, file, _ = exported
    engine = OnnxGPT(file)
    B = data.draw(st.integers(1, 3))
    T = data.draw(st.integers(1, CONTEXT))
    idx = torch.randint(len(CHARS), (B, T), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    sampling = Sampling(
        seed=data.draw(st.integers(0, 2**64 - 1)),
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=data.draw(st.sampled_from([None, 1, 5])),
        top_p=data.draw(st.sampled_from([None, 0.9])),
        overflow=data.draw(st.sampled_from(["stop", "slide"])),
        samples=[7 + row for row in range(B)],
    )
    steps = data.draw(st.integers(0, 2 * CONTEXT))
    ours = list(generate(engine, idx, steps, sampling, kv_cache=data.draw(st.booleans())))
    theirs = list(generate(model, idx, steps, sampling))
    for (token, logits), (expected, expected_logits) in zip(ours, theirs, strict=True):
        assert torch.equal(token, expected)
        torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@unix
@pytest.mark.parametrize("exported", ["post-LN"], indirect=True)
def test_onnx_runtime_tells_nobody_and_leaves_nothing_at_home(exported, tmp_path):
    """By itself it reports to its makers, keeps a number for the machine in ~/.cache, and warns where it cannot."""
    code = "import sys; from extras.interop.onnx import OnnxGPT; OnnxGPT(sys.argv[1])"
    result = ok(run("-c", code, exported[1], env={"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}))
    assert result.stderr == "" and not list(tmp_path.iterdir())
