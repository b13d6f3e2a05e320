# /// script
# requires-python = ">=3.11"
# dependencies = ["onnxruntime-genai==0.18.0", "onnx==1.23.2", "numpy==2.4.6"]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# [tool.elsewhere]
# versions = ["onnxruntime-genai==0.11.4"]
# ///
"""onnxruntime-genai 0.11.4 and 0.18.0: in a batch, padding on the left is read as text.

A small decoder has learned positions, a mask and a cache. Padded on the right, a short prompt gets the greedy text
that it gets alone, on the left it does not. rewind_to is exact: the text after it is that of a fresh generator.
"""

from report import report

import json

import numpy as np
import onnx
import onnxruntime_genai as og
from onnx import TensorProto, helper, numpy_helper

V, C, T, PAD = 50, 16, 32, 48  # 49 ends a text
rng = np.random.default_rng(0)
weights = {
    "tokens": rng.normal(size=(V, C)),
    "positions": rng.normal(size=(T, C)),
    **{name: rng.normal(size=(C, C)) / 4 for name in ("query", "key", "value")},
    "head": rng.normal(size=(C, V)) * (np.arange(V) < PAD),
}


def write_model():
    """Write a layer of attention, whose text depends on the mask, the positions and the cache."""
    value, node = helper.make_tensor_value_info, helper.make_node
    ids = ("input_ids", "attention_mask", "position_ids")
    past, present = (["past_key_values.0.key", "past_key_values.0.value"], ["present.0.key", "present.0.value"])
    nodes = [
        node("Gather", ["tokens", "input_ids"], ["e"]),
        node("Gather", ["positions", "position_ids"], ["p"]),
        node("Add", ["e", "p"], ["x"]),
        *(node("MatMul", ["x", name], [f"new_{name}"]) for name in ("query", "key", "value")),
        *(node("Unsqueeze", [f"new_{name}", "one"], [f"h_{name}"]) for name in ("query", "key", "value")),
        node("Concat", [past[0], "h_key"], [present[0]], axis=2),
        node("Concat", [past[1], "h_value"], [present[1]], axis=2),
        node("Transpose", [present[0]], ["keys_t"], perm=[0, 1, 3, 2]),
        node("MatMul", ["h_query", "keys_t"], ["scores"]),
        # slots: query i of n stands at slot all - n + i, and sees the slots up to there that are not masked
        node("Shape", ["attention_mask"], ["all"], start=1),
        node("Shape", ["input_ids"], ["n"], start=1),
        node("Sub", ["all", "n"], ["old"]),
        *(node("Squeeze", [name], [f"s_{name}"]) for name in ("all", "n", "old")),
        node("Range", ["s_old", "s_all", "step"], ["rows"]),
        node("Range", ["zero", "s_all", "step"], ["columns"]),
        node("Unsqueeze", ["rows", "one"], ["rows_2d"]),
        node("LessOrEqual", ["columns", "rows_2d"], ["causal"]),
        node("Cast", ["attention_mask"], ["real"], to=TensorProto.BOOL),
        node("Unsqueeze", ["real", "axes"], ["real_4d"]),
        node("And", ["causal", "real_4d"], ["seen"]),
        node("Where", ["seen", "scores", "low"], ["masked"]),
        node("Softmax", ["masked"], ["attention"], axis=-1),
        node("MatMul", ["attention", present[1]], ["y"]),
        node("Squeeze", ["y", "one"], ["y_3d"]),
        node("Add", ["x", "y_3d"], ["z"]),
        node("MatMul", ["z", "head"], ["logits"]),
    ]
    constants = weights | {"low": -1e9}
    constants = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in constants.items()]
    integers = {"one": [1], "axes": [1, 2], "step": 1, "zero": 0}
    constants += [numpy_helper.from_array(np.array(array), name) for name, array in integers.items()]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [value(name, TensorProto.INT64, ["batch", "all" if "mask" in name else "n"]) for name in ids]
        + [value(name, TensorProto.FLOAT, ["batch", 1, "past", C]) for name in past],
        [value("logits", TensorProto.FLOAT, ["batch", "n", V])]
        + [value(name, TensorProto.FLOAT, ["batch", 1, "total", C]) for name in present],
        constants,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "model.onnx")
    names = {name: name for name in ids}
    names |= {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    outputs = {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    sizes = {"head_size": C, "hidden_size": C, "num_attention_heads": 1, "num_key_value_heads": 1}
    decoder = {"filename": "model.onnx", "num_hidden_layers": 1, "inputs": names, "outputs": outputs, **sizes}
    model = {"type": "llama", "vocab_size": V, "context_length": T, "eos_token_id": V - 1, "pad_token_id": PAD}
    search = {"max_length": T, "past_present_share_buffer": False}
    with open("genai_config.json", "w") as file:
        json.dump({"model": model | {"decoder": decoder}, "search": search}, file)


def new_tokens(prompts, count=8):
    """Return the greedy tokens after each prompt."""
    params = og.GeneratorParams(model)
    params.set_search_options(batch_size=len(prompts), max_length=T)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array(prompts, np.int32))
    for _ in range(count):
        generator.generate_next_token()
    return [np.asarray(generator.get_sequence(i))[len(prompts[0]) :].tolist() for i in range(len(prompts))]


def rewound():
    """Take tokens back, write others, and compare with a fresh generator."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=T)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([long], np.int32))
    for _ in range(6):
        generator.generate_next_token()
    generator.rewind_to(3)
    generator.append_tokens(np.array([[7, 9]], np.int32))
    for _ in range(8):
        generator.generate_next_token()
    return np.asarray(generator.get_sequence(0))[5:].tolist() == new_tokens([long[:3] + [7, 9]])[0]


write_model()
model = og.Model(".")
short, long = [5, 3, 8, 20], [4, 8, 15, 16, 23, 42, 7, 9]
pads = (len(long) - len(short)) * [PAD]
alone = new_tokens([short])[0]
report(
    {
        "padded on the left: as alone": (new_tokens([pads + short, long])[0] == alone, False),
        "padded on the right: as alone": (new_tokens([short + pads, long])[0] == alone, True),
        "rewind_to(3): as a fresh generator": (rewound(), True),
    }
)
