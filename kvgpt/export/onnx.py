"""ONNX files: a GPT as a graph that takes its KV cache as an input and returns it longer."""

import copy
import json
import logging
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn as nn

from kvgpt.cli import fail
from kvgpt.engines.onnx import weights_sha256
from kvgpt.export.check import compare_onnx, own_text
from kvgpt.files import write_tree

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

    def __init__(self, model, queries=False):
        super().__init__()
        self.model = copy.deepcopy(model)
        self.queries = queries

    def forward(self, input_ids, attention_mask, position_ids, past_key_values):
        """Return the logits `(B, T, V)` and n_layer pairs (key, value), `(B, nkv, past + T, hs)` each.

        With `queries`, also the n_layer queries of the last token, `(B, nh, 1, hs)` each.

        input_ids        (B, T) int64
        attention_mask   (B, past + T) int64: 0 where a slot holds padding
        position_ids     (B, T) int64
        past_key_values  n_layer pairs (key, value), `(B, nkv, past, hs)` each; past may be 0
        """
        slot = torch.arange(attention_mask.size(1), device=input_ids.device)
        query = torch.arange(input_ids.size(1), device=input_ids.device)[:, None] + past_key_values[0][0].size(2)
        # A query sees its own slot even if that is padding, because a softmax over nothing is NaN.
        mask = ((slot <= query) & (attention_mask[:, None, None] != 0)) | (slot == query)  # (B, 1, T, past + T)
        cache, queries = ConcatCache(past_key_values, mask), []
        for block in self.model.transformer["h"]:
            block.attn.project = recorded(block.attn.project, queries)
        logits = self.model.unembed(self.model.hidden_states(input_ids, position_ids, cache))
        return (logits, cache.pairs, queries) if self.queries else (logits, cache.pairs)


def recorded(project, queries):
    """Return CausalSelfAttention.project that also appends the query of the last token to `queries`."""

    def recording(x, rope=None):
        q, k, v = project(x, rope)
        queries.append(q[:, :, -1:])
        return q, k, v

    return recording


# -- writing -----------------------------------------------------------------------------------------------------------


def write_onnx(model, tokenizer, file, queries=False):
    """Write the model as one ONNX file of opset 20, dynamic in batch size and lengths.

    model    a GPT on the CPU
    file     a Path
    queries  also return each layer's query of the last token, `query.{i}`, which shows what the token looks at
    The cache goes in as `past_key_values.{i}.key|value` and comes out as `present.{i}.key|value`. Inputs, outputs and
    axes have the names that Optimum and transformers.js use. The metadata holds the vocabulary and the sizes, so the
    file alone is enough to generate text. Raises OSError.
    """
    # example inputs, names and dynamic axes; no example size is 1, because the exporter would take 1 for a constant
    config = model.config
    batch, length, past = "batch_size", "sequence_length", "past_sequence_length"
    past_shape = (2, config.num_kv_heads, 5, config.head_size)
    pairs = [(torch.zeros(past_shape), torch.zeros(past_shape)) for _ in range(config.n_layer)]
    ids, places = torch.zeros(2, 3, dtype=torch.int64), torch.arange(5, 8).repeat(2, 1)
    slots = [f"{i}.{kind}" for i in range(config.n_layer) for kind in ("key", "value")]

    # export, without the warnings for people who write graphs by hand
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(action="ignore"):
        proto = torch.onnx.export(
            GPTWithPast(model, queries).eval(),
            (ids, torch.ones(2, 8, dtype=torch.int64), places, pairs),
            input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{slot}" for slot in slots)],
            output_names=[
                "logits",
                *(f"present.{slot}" for slot in slots),
                *(f"query.{i}" for i in range(config.n_layer) if queries),
            ],
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
    logging.disable(logging.NOTSET)

    # clear the metadata of nodes: its stack traces hold absolute paths of this machine
    for node in proto.graph.node:
        del node.metadata_props[:]

    # add our own and write
    metadata = {"model_args": json.dumps(asdict(config)), "weights_sha256": weights_sha256(model)}
    for key, value in (tokenizer.state_dict() | metadata).items():
        proto.metadata_props.add(key=key, value=value)
    file.write_bytes(proto.SerializeToString())


def fits_one_file(model):
    """Return whether ONNX can write the model as one file, which cannot have more than 2 GB."""
    return sum(p.nbytes for p in model.state_dict().values()) < 2**31 - 2**24


def export_onnx(model, tokenizer, folder):
    """Write model.onnx into `folder`, a Path.

    Exits with one line, and leaves the folder as it was, if the graph does not compute what the model does.
    """
    if not fits_one_file(model):
        fail("a model of more than 2 GB does not fit into the one file of --format onnx: see --format hf")
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "model.onnx"
        write_onnx(model, tokenizer, file)
        compare_onnx(file, model, own_text(model))
        content = file.read_bytes()
    write_tree(folder, {file.name: content})
    print(f"{folder / file.name}: {len(content) / 1e6:.2f} MB")
