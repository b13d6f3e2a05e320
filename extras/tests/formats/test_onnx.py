"""extras/formats/onnx.py: the graph as onnx and ONNX Runtime see it, and run by our own loop."""

import copy
import logging
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from extra_helpers import POST_LN, STABLELM, TOKENIZER
from extras.formats.compare import compare_with_pytorch, own_text
from extras.formats.onnx import OnnxGPT, compare_onnx, write_onnx
from helpers import CHARS, SIZE, ok, run, same, tiny, unix
from model import Sampling, generate
from sample import generate_texts, verify

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
    assert logging.root.manager.disable == logging.NOTSET  # what torch logs meanwhile is kept quiet
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
    assert "IsNaN" not in {node.op_type for node in proto.graph.node}  # which MNN 3.6 cannot read
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


@pytest.mark.slow
@pytest.mark.parametrize("pos_emb", ["learned", "rope"])
def test_a_context_of_two_tokens_is_enough(pos_emb, tmp_path):
    model = tiny(block_size=2, pos_emb=pos_emb)
    write_onnx(model, TOKENIZER, tmp_path / "model.onnx")
    compare_onnx(tmp_path / "model.onnx", model, own_text(model))


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


def test_the_check_of_an_export_finds_another_model(exported):
    model, file, _ = exported
    compare_onnx(file, model, own_text(model))
    other = tiny(**vars(model.config))
    with torch.no_grad():
        other.transformer["wte"].weight[3] += 1e-2
    with pytest.raises(ValueError, match=r"^model\.onnx differs from the model by more than 0.0001: logits within"):
        compare_onnx(file, other, own_text(other))


def test_the_check_of_an_export_says_what_differs():
    model = tiny()
    ids = own_text(model)
    with torch.no_grad():
        logits = model(ids)[0]
    T = max(1, CONTEXT // 16)
    text = model.generate(ids[:1, :T], CONTEXT - T, temperature=0)[0].tolist()
    compare_with_pytorch("it", model, ids, logits, lambda prompt: text)
    other = [*text[:9], (text[9] + 1) % len(CHARS), *text[10:]]
    for logits_, text_, words in (
        (logits + 1, text, rf"logits within 1.0e\+00 of .* {CONTEXT - T} of {CONTEXT - T} tokens match$"),
        (logits, text[:9], f"logits within 0.0e.00 of .* greedy text: {9 - T} of {CONTEXT - T} tokens match$"),
        (logits, other, f"logits within 0.0e.00 of .* greedy text: .* of {CONTEXT - T} tokens match$"),
        (logits * torch.nan, text, "logits within nan of"),
    ):
        with pytest.raises(ValueError, match=words):
            compare_with_pytorch("it", model, ids, logits_, lambda prompt, text=text_: text)


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
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def test_verify_sees_one_damaged_slot_of_the_cache_that_the_run_has_left(exported, capsys):
    """As extras/tests/decode/test_run_cache.py has it for the other engines."""
    model, file, _ = exported
    engine = OnnxGPT(file)
    rows = [row for [row] in generate_texts(engine, TOKENIZER, ["abc", "cab"], 9, seed=1)]
    verify(model, rows, engine.kv_cache)
    assert "verify: OK" in capsys.readouterr().err
    value = engine.kv_cache.past[3].numpy().copy()
    value[1, 0, 9, 0] += 0.1
    engine.kv_cache.past[3] = engine.to_ort(value)
    with pytest.raises(SystemExit, match="verify: DIFFERENT at row 1: logits, keys or values"):
        verify(model, rows, engine.kv_cache)


# -- rewritten by other tools ------------------------------------------------------------------------------------------


def with_external_weights(file, folder, name="model.onnx"):
    """Save a graph as onnx does above 2 GB: with its weights in a file next to it."""
    folder.mkdir(exist_ok=True)
    onnx.save(onnx.load(file), folder / name, save_as_external_data=True, location="weights.data", size_threshold=100)
    return folder / name


@pytest.mark.parametrize("exported", [SLOW("StableLM")], indirect=True)
def test_external_weights_are_those_next_to_the_graph(exported, tmp_path, monkeypatch):
    """A file of the same name in the current folder, of another model, would change the text and nobody would know."""
    model, file, _ = exported
    first = with_external_weights(file, tmp_path / "first")
    other = tiny(**NETWORKS["StableLM"])
    with torch.no_grad():
        for p in other.parameters():
            p.neg_()
    write_onnx(other, TOKENIZER, tmp_path / "other.onnx")
    with_external_weights(tmp_path / "other.onnx", tmp_path / "second")
    monkeypatch.chdir(tmp_path / "second")
    ids = torch.arange(CONTEXT)[None] % len(CHARS)
    with torch.no_grad():
        torch.testing.assert_close(OnnxGPT(first)(ids)[0], model(ids)[0], atol=1e-4, rtol=0)
    (tmp_path / "first" / "weights.data").unlink()
    with pytest.raises(ValueError, match="cannot be read: ") as error:
        OnnxGPT(first)
    assert "\n" not in str(error.value)


def in_half_precision(proto):
    """Cast every float32 of a graph, inputs and outputs too, as converters do."""

    def half(tensor):
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))

    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            half(tensor)
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT:
                half(attribute.t)


def with_int32_ids(proto):
    """As for runtimes without int64: each integer input is cast at the door."""
    for value in proto.graph.input:
        if value.type.tensor_type.elem_type == TensorProto.INT64:
            value.type.tensor_type.elem_type = TensorProto.INT32
            for node in proto.graph.node:
                node.input[:] = [f"{name}64" if name == value.name else name for name in node.input]
            cast = onnx.helper.make_node("Cast", [value.name], [f"{value.name}64"], to=TensorProto.INT64)
            proto.graph.node.insert(0, cast)


def in_another_order(proto):
    for values in (proto.graph.input, proto.graph.output):
        turned = list(values)[::-1]
        del values[:]
        values.extend(turned)


def with_a_fixed_batch(proto):
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1


def without_the_cache(proto):
    keep = proto.graph.output[0]
    del proto.graph.output[:]
    proto.graph.output.append(keep)


def rewritten(file, change, to):
    proto = onnx.load(file)
    change(proto)
    onnx.save(proto, to)
    return to


@pytest.mark.parametrize("exported", [SLOW("StableLM")], indirect=True)
@pytest.mark.parametrize(
    ["change", "atol"],
    [(in_half_precision, 0.1), (with_int32_ids, 1e-4), (in_another_order, 1e-4)],
    ids=["half", "int32", "order"],
)
def test_a_rewritten_graph_runs_with_its_own_types_and_order(exported, change, atol, tmp_path):
    model, file, _ = exported
    engine = OnnxGPT(rewritten(file, change, tmp_path / "new.onnx"))
    ids = torch.arange(CONTEXT)[None] % len(CHARS)
    cache = engine.new_cache(1)
    logits = torch.cat([engine(ids[:, :9], cache)[0], engine(ids[:, 9:], cache)[0]], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids)[0], atol=atol, rtol=0)
    assert len(list(generate(engine, ids[:, :3], 5, Sampling(seed=1)))) == 5


@pytest.mark.parametrize("exported", [SLOW("StableLM")], indirect=True)
def test_with_8_bit_weights_the_cache_changes_nothing(exported, tmp_path):
    """As docs/interop.md shrinks them. quantize_dynamic takes one scale for all tokens of a call, so there it does."""
    _, file, _ = exported
    quantizer = MatMulNBitsQuantizer(onnx.load(file), bits=8, block_size=32)
    quantizer.process()
    onnx.save(quantizer.model.model, tmp_path / "int8.onnx")
    assert "MatMulNBits" in {node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node}
    engine = OnnxGPT(tmp_path / "int8.onnx")
    ids = torch.arange(CONTEXT)[None] % len(CHARS)
    cache = engine.new_cache(1)
    steps = [engine(ids[:, i : i + 1], cache)[0] for i in range(CONTEXT)]
    torch.testing.assert_close(torch.cat(steps, dim=1), engine(ids)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("exported", [SLOW("StableLM")], indirect=True)
@pytest.mark.parametrize(
    ["change", "words"],
    [
        (with_a_fixed_batch, "cannot be run: .*invalid dimensions"),
        (without_the_cache, "cannot be run: .*present.0.key"),
    ],
)
def test_a_graph_that_is_no_longer_ours_is_refused_in_one_line(exported, change, words, tmp_path):
    file = rewritten(exported[1], change, tmp_path / "new.onnx")
    with pytest.raises(ValueError, match=words) as error:
        OnnxGPT(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
@unix
@pytest.mark.parametrize("exported", ["post-LN"], indirect=True)
def test_onnx_runtime_tells_nobody_and_leaves_nothing_at_home(exported, tmp_path):
    """By itself it reports to its makers, keeps a number for the machine in ~/.cache, and warns where it cannot."""
    code = "import sys; from extras.formats.onnx import OnnxGPT; OnnxGPT(sys.argv[1])"
    result = ok(run("-c", code, exported[1], env={"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}))
    assert result.stderr == "" and not list(tmp_path.iterdir())
