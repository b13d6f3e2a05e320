"""kvgpt/engines/onnx.py: the graph as onnx and ONNX Runtime see it, and the engine against PyTorch."""

import hashlib
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import CHARS, GPT2, POST_LN, SIZE, STABLELM, assert_tells_no_paths, ok, run, tiny, unix
from kvgpt.engines.onnx import OnnxGPT, quantize, write_onnx

CONTEXT = SIZE["block_size"]
NETWORKS = {
    "GPT-2": dict(GPT2, bias=True, activation="gelu_tanh"),
    "StableLM": dict(STABLELM, qk_norm=True, n_kv_head=2, mlp_ratio=3.3),
    "post-LN": POST_LN,
}


@pytest.fixture(scope="module", params=["GPT-2", "StableLM", pytest.param("post-LN", marks=pytest.mark.slow)])
def exported(request, tmp_path_factory):
    """(model, its model.onnx)"""
    model, file = tiny(**NETWORKS[request.param]), tmp_path_factory.mktemp("onnx") / "model.onnx"
    write_onnx(model, CHARS, file)
    return model, file


def some_ids(B, T, seed):
    return torch.randint(len(CHARS), (B, T), generator=torch.Generator().manual_seed(seed))


# -- the graph, by ONNX Runtime alone ----------------------------------------------------------------------------------


def feed(session, ids, past, mask=None, positions=None):
    """One call by names, as anybody would make it who has only the file. Returns (logits, past)."""
    begin, (B, T) = past[0].shape[2], ids.shape
    mask = np.ones((B, begin + T), np.int64) if mask is None else mask
    positions = np.tile(np.arange(begin, begin + T), (B, 1)) if positions is None else positions
    names = [f"past_key_values.{i}.{kind}" for i in range(len(past) // 2) for kind in ("key", "value")]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **dict(zip(names, past))}
    logits, *past = session.run(["logits", *(name.replace("past_key_values", "present") for name in names)], inputs)
    return torch.from_numpy(logits), past


def nothing(model, B):
    """A past of no positions."""
    config = model.config
    return [np.zeros((B, config.n_kv_head or 4, 0, 8), np.float32) for _ in range(2 * config.n_layer)]


_sessions = {}


def session_of(file):
    if file not in _sessions:
        _sessions[file] = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return _sessions[file]


def test_the_graph_has_the_names_and_axes_that_others_expect(exported):
    """Names or axes that are not those of Optimum and transformers.js, which need heads and head size as numbers."""
    model, file = exported
    proto = onnx.load(file)
    onnx.checker.check_model(proto, full_check=True)
    assert [(entry.domain, entry.version) for entry in proto.opset_import if not entry.domain] == [("", 20)]
    assert not any(tensor.external_data for tensor in proto.graph.initializer)
    heads, whole = model.config.n_kv_head or 4, "past_sequence_length + sequence_length"
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


def test_a_file_tells_nothing_of_the_machine_that_wrote_it(exported, tmp_path):
    """The exporter's stack traces in the metadata of nodes: paths and a user name in a file to be shared."""
    _, file = exported
    quantize(file, tmp_path / "model_int8.onnx")
    for each in (file, tmp_path / "model_int8.onnx"):
        assert_tells_no_paths([each], file.parent, tmp_path)
        proto = onnx.load(each)
        assert not any(node.metadata_props for node in proto.graph.node)
        assert {"chars", "model_args"} <= {entry.key for entry in proto.metadata_props}


@given(data=st.data())
def test_any_split_of_any_batch_gives_the_logits_of_one_forward(exported, data):
    """A graph whose positions, mask or cache are those of the exported example, not of the call."""
    model, file = exported
    session = session_of(file)
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, CONTEXT))
    cuts = sorted(data.draw(st.sets(st.integers(1, T - 1)))) if T > 1 else []
    ids = some_ids(B, T, data.draw(st.integers(0, 99)))
    past, logits = nothing(model, B), []
    for begin, end in zip([0, *cuts], [*cuts, T]):
        some, past = feed(session, ids[:, begin:end].numpy(), past)
        logits.append(some)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(logits, 1), model(ids)[0], atol=1e-4, rtol=0)
    assert all(each.shape == (B, model.config.n_kv_head or 4, T, 8) for each in past)


def test_padding_on_the_left_changes_nothing(exported):
    """A padded batch as transformers makes it: positions count from the first real token, the mask is 0 before.

    Padding that is attended to, or that shifts the positions, changes the text of the shorter prompt.
    """
    model, file = exported
    session, ids = session_of(file), torch.arange(10)[None] % len(CHARS)
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
        token, position = np.full((2, 1), token), np.array([[10 + step], [7 + step]])
        logits, past = feed(session, token, past, mask, position)
        torch.testing.assert_close(logits[1, 0], alone[7 + step], atol=1e-4, rtol=0)


# -- damaged and hostile files -----------------------------------------------------------------------------------------


def assert_refused(file, *words):
    with pytest.raises(ValueError) as error:
        OnnxGPT(file)
    assert "\n" not in str(error.value)
    for word in (file, *words):
        assert str(word) in str(error.value)


def test_the_last_entry_of_the_metadata_is_a_hash_of_all_bytes_before_it(exported, tmp_path):
    """A hash of other bytes, or two in a file that was quantized. A file without one is read."""
    _, file = exported
    quantize(file, tmp_path / "model_int8.onnx")
    for each in (file, tmp_path / "model_int8.onnx"):
        proto, raw = onnx.load(each), each.read_bytes()
        (recorded,) = (entry.value for entry in proto.metadata_props if entry.key == "sha256")
        assert recorded == hashlib.sha256(raw[:-76]).hexdigest() and raw.endswith(recorded.encode())
        (tmp_path / "without.onnx").write_bytes(raw[:-76])
        assert OnnxGPT(tmp_path / "without.onnx").chars == CHARS


@settings(max_examples=20)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(place=0.99999, bit=0)
def test_a_file_with_a_flipped_bit_gives_the_same_logits_or_is_refused(exported, place, bit):
    model, file = exported
    raw = bytearray(file.read_bytes())
    raw[int(place * len(raw))] ^= 1 << bit
    damaged = file.with_name("damaged.onnx")
    damaged.write_bytes(raw)
    if int(place * len(raw)) < len(raw) - 76:
        assert_refused(damaged, "has changed")
        return
    try:
        engine = OnnxGPT(damaged)
    except ValueError as error:
        assert str(damaged) in str(error) and "\n" not in str(error)
    else:
        ids = some_ids(1, CONTEXT, 0)
        with torch.no_grad():
            torch.testing.assert_close(engine(ids), model(ids)[0], atol=1e-4, rtol=0)


def change_args(**changes):
    return lambda entries: entries | {"model_args": json.dumps(json.loads(entries["model_args"]) | changes)}


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries | {"chars": CHARS[:-1]},
        lambda entries: entries | {"chars": CHARS + "x"},
        lambda entries: entries | {"chars": CHARS[:-1] + CHARS[0]},
        lambda entries: entries | {"chars": ""},
        lambda entries: entries | {"chars": CHARS + "x", **change_args(vocab_size=len(CHARS) + 1)(entries)},
        lambda entries: entries | {"model_args": "[]"},
        lambda entries: entries | {"model_args": "[" * 100_000},
        lambda entries: entries | {"model_args": ""},
        lambda entries: entries | {"model_args": "{}"},
        change_args(n_layer=1),
        change_args(n_layer=2**23),
        change_args(n_head=8),
        change_args(n_head=2, n_kv_head=1),
        change_args(n_embd=64),
        change_args(block_size=CONTEXT + 1),
        change_args(block_size=2**24 - 1),
        change_args(n_layers=2),
        change_args(n_layer="2"),
    ],
    ids=range(18),
)
def test_metadata_that_do_not_fit_the_graph_are_refused(change, exported, tmp_path):
    """A traceback at a token without a character, at the first position past the graph's, or anywhere before."""
    _, file = exported
    proto = onnx.load(file)
    entries = change({entry.key: entry.value for entry in proto.metadata_props if entry.key != "sha256"})
    del proto.metadata_props[:]
    for key, value in entries.items():
        proto.metadata_props.add(key=key, value=value)
    onnx.save(proto, tmp_path / "model.onnx")
    assert_refused(tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_a_graph_whose_weights_are_not_finite_is_refused(cached, tmp_path):
    model = tiny(**STABLELM)
    with torch.no_grad():
        model.lm_head.weight[3, 5] = torch.nan
    write_onnx(model, CHARS, tmp_path / "model.onnx", cached=cached)
    assert_refused(tmp_path / "model.onnx", "NaN")


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exported", ["GPT-2"], indirect=True)
def test_a_graph_that_needs_more_memory_than_there_is_is_one_line(exported, tmp_path, capfd):
    """ONNX Runtime writes lines of its own to stderr, in color, before it raises an error."""
    proto = onnx.load(exported[1])
    (first,) = (node for node in proto.graph.node if "logits" in node.output)
    first.output[list(first.output).index("logits")] = "computed"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2**50]), "size"))
    for name, inputs, output in (
        ("ConstantOfShape", ["size"], "huge"),
        ("ReduceSum", ["huge"], "sum"),
        ("Add", ["computed", "sum"], "logits"),
    ):
        more = dict(keepdims=0) if name == "ReduceSum" else {}
        proto.graph.node.append(onnx.helper.make_node(name, inputs, [output], **more))
    del proto.metadata_props[-1]  # the hash
    onnx.save(proto, tmp_path / "huge.onnx")
    with pytest.raises(ValueError, match="ConstantOfShape"):
        OnnxGPT(tmp_path / "huge.onnx")
    assert capfd.readouterr().err == ""


@unix
@pytest.mark.parametrize("exported", ["GPT-2"], indirect=True)
def test_onnx_runtime_tells_nobody_and_leaves_nothing_at_home(exported, tmp_path):
    """ONNX Runtime reports to its makers, keeps a number for the machine in ~/.cache, and warns where it cannot."""
    code = "import sys; from kvgpt.engines.onnx import OnnxGPT; OnnxGPT(sys.argv[1])"
    result = ok(run("-c", code, exported[1], env={"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}))
    assert result.stderr == "" and not list(tmp_path.iterdir())


@given(data=st.data())
def test_the_engine_picks_the_tokens_of_pytorch(exported, data):
    """Another text than PyTorch's for the same seed, with the cache, without it, or past the context."""
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
    """A stream that decodes from the cache of another stream, or of a call between two of its steps."""
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


def test_a_graph_without_a_cache_gets_the_whole_context_at_every_step(tmp_path):
    """kv_cache is True by default. A stream that believed it would feed the newest token alone."""
    model = tiny(**STABLELM)
    write_onnx(model, CHARS, tmp_path / "model.onnx", cached=False)
    engine, idx = OnnxGPT(tmp_path / "model.onnx"), torch.arange(3)[None]
    assert not engine.cached
    ours = torch.cat((idx, *engine.stream(idx, 9, seed=4)), dim=1)
    assert torch.equal(ours, model.generate(idx, 9, seed=4))
