"""ONNX files: a GPT as a graph that takes its KV cache as an input and returns it longer."""

import copy
import itertools
import json
import logging
import tempfile
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

from kvgpt.engines.onnx import weights_sha256
from kvgpt.export.check import compare_onnx, own_text
from kvgpt.files import read_tree, write_tree
from kvgpt.training.data import load_dataset
from kvgpt.training.objective import evaluate

# -- the network that becomes a graph ----------------------------------------------------------------------------------


class ConcatCache:
    """The cache inside a graph, in the place of KVCache. It appends to the past, because a graph writes no slots.

    past  n_layer pairs (key, value), `(B, nkv, past, hs)` each
    """

    def __init__(self, past, mask):
        self.pairs, self.the_mask = list(past), mask

    def mask(self, pos):
        return self.the_mask

    def update(self, layer, pos, k, v):
        key, value = self.pairs[layer]
        self.pairs[layer] = torch.cat((key, k), dim=2), torch.cat((value, v), dim=2)
        return self.pairs[layer]


class GPTWithPast(nn.Module):
    """A GPT that takes the KV cache as an argument and returns it. Its layers are a copy of the model's."""

    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, input_ids, attention_mask, position_ids, past_key_values):
        """Return the logits `(B, T, V)` and n_layer pairs (key, value), `(B, nkv, past + T, hs)` each.

        input_ids        (B, T) int64
        attention_mask   (B, past + T) int64: 0 where a slot holds padding
        position_ids     (B, T) int64
        past_key_values  n_layer pairs (key, value), `(B, nkv, past, hs)` each; past may be 0
        """
        slot = torch.arange(attention_mask.size(1), device=input_ids.device)
        query = torch.arange(input_ids.size(1), device=input_ids.device)[:, None] + past_key_values[0][0].size(2)
        # A query sees its own slot even if that is padding, because a softmax over nothing is NaN.
        mask = ((slot <= query) & (attention_mask[:, None, None] != 0)) | (slot == query)  # (B, 1, T, past + T)
        self.model.cache = cache = ConcatCache(past_key_values, mask)
        for block in self.model.transformer["h"]:
            block.attn.cache = cache
        return self.model.unembed(self.model.hidden_states(input_ids, position_ids)), cache.pairs


# -- writing -----------------------------------------------------------------------------------------------------------


def write_onnx(model, chars, file):
    """Write the model as one ONNX file of opset 20, dynamic in batch size and lengths.

    model  a GPT on the CPU
    chars  the vocabulary: token i is chars[i]
    file   a Path
    The cache goes in as `past_key_values.{i}.key|value` and comes out as `present.{i}.key|value`. Inputs, outputs and
    axes have the names that Optimum and transformers.js use. The metadata holds the characters and the sizes, so the
    file alone is enough to generate text. Raises OSError.
    """
    # example inputs, names and dynamic axes; no example size is 1, because the exporter would take 1 for a constant
    config = model.config
    batch, length, past = "batch_size", "sequence_length", "past_sequence_length"
    past_shape = (2, config.num_kv_heads, 5, config.head_size)
    pairs = [(torch.zeros(past_shape), torch.zeros(past_shape)) for _ in range(config.n_layer)]
    ids, places = torch.zeros(2, 3, dtype=torch.int64), torch.arange(5, 8).repeat(2, 1)
    slots = [f"{i}.{kind}" for i in range(config.n_layer) for kind in ("key", "value")]

    # export
    with quiet():
        proto = torch.onnx.export(
            GPTWithPast(model).eval(),
            (ids, torch.ones(2, 8, dtype=torch.int64), places, pairs),
            input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{slot}" for slot in slots)],
            output_names=["logits", *(f"present.{slot}" for slot in slots)],
            dynamic_shapes=(
                {0: batch, 1: length},
                {0: batch, 1: f"{past} + {length}"},
                {0: batch, 1: length},
                [({0: batch, 2: past},) * 2] * config.n_layer,
            ),
            opset_version=20,
            dynamo=True,
            verbose=False,
        ).model_proto

    # clear the metadata of nodes: its stack traces hold absolute paths of this machine
    for node in itertools.chain(proto.graph.node, *(function.node for function in proto.functions)):
        del node.metadata_props[:]

    # add our own and write
    metadata = {"chars": chars, "model_args": json.dumps(asdict(config)), "weights_sha256": weights_sha256(model)}
    for key, value in metadata.items():
        proto.metadata_props.add(key=key, value=value)
    file.write_bytes(proto.SerializeToString())


def quantize(file, to):
    """Write the ONNX model in `file` again, to the Path `to`, with int8 weights in its matrix products."""
    from onnxruntime.quantization import quantize_dynamic

    with quiet():
        quantize_dynamic(file, to, op_types_to_quantize=["MatMul"])


@contextmanager
def quiet():
    """Silence the exporter's warnings inside the block. They address people who write graphs by hand."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def export_onnx(model, chars, folder, data_dir, int8=False):
    """Write model.onnx into `folder`, and print how large it is and how good.

    data_dir  a Path; the val losses are of its text, if that has the characters of the model
    int8      also write model_int8.onnx, a quarter of the size
    Exits with one line, and leaves the folder as it was, if a graph does not compute what the model does.
    """
    with tempfile.TemporaryDirectory() as made:
        # make
        made = Path(made)
        write_onnx(model, chars, made / "model.onnx")
        if int8:
            quantize(made / "model.onnx", made / "model_int8.onnx")

        # check
        ids, files = own_text(model), read_tree(made)
        engines = {name: compare_onnx(made / name, model, ids, exact="int8" not in name) for name in sorted(files)}

    # move into place; a graph of an earlier export may be another model's
    write_tree(folder, files, stale={"model_int8.onnx"} - files.keys())

    # report
    val = val_text(data_dir, chars, model.config.block_size)
    networks = {"PyTorch": model} | {name: WithLoss(engine) for name, engine in engines.items()}
    for name, network in networks.items():
        size = len(files[name]) if name in files else sum(p.nbytes for p in model.parameters())
        loss = ""
        if val is not None:
            loss = evaluate(network, val, model.config.block_size, torch.device("cpu"), nullcontext())
            loss = f", val loss {loss:.4f}"
        print(f"{name}: {size / 1e6:.2f} MB{loss}", flush=True)
    if val is None:
        print(f"no val loss: {data_dir} holds no text of these characters (python data/prepare.py)")


def val_text(data_dir, chars, block_size):
    """Return the ids of the val text in data_dir, or None if there is none, or one of other characters."""
    try:
        data = load_dataset(data_dir, block_size)
    except ValueError:
        return None
    return data.val if data.chars == chars else None


class WithLoss(nn.Module):
    """An OnnxGPT as `evaluate` calls a model: (x, y) -> (logits, loss)."""

    def __init__(self, onnx):
        super().__init__()
        self.onnx = onnx

    def forward(self, x, y):
        logits, _ = self.onnx(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())
