"""ONNX files: a GPT with its KV cache as graph inputs and outputs, written here and run by ONNX Runtime."""

import copy
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from kvgpt.checkpoint import first_line
from kvgpt.checksums import sha256
from kvgpt.cores import num_threads
from kvgpt.files import read_regular, write_atomically
from kvgpt.vocabulary import check_characters
from model import GPTConfig, Sampling, decode_tokens

# before any import of ONNX Runtime, which otherwise reports to its makers and writes to ~/.cache
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# -- writing -----------------------------------------------------------------------------------------------------------


class ConcatCache:
    """The cache inside a graph, in the place of KVCache: it appends to the past, because a graph cannot write slots.

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
        # Every query sees its own slot. A padded query would see none otherwise, and a softmax over nothing is NaN.
        mask = ((slot <= query) & (attention_mask[:, None, None] != 0)) | (slot == query)  # (B, 1, T, past + T)
        self.model.cache = cache = ConcatCache(past_key_values, mask)
        for block in self.model.transformer["h"]:
            block.attn.cache = cache
        return self.model.unembed(self.model.hidden_states(input_ids, position_ids)), cache.pairs


class GPTLogits(nn.Module):
    """A GPT without cache: (token_ids) -> logits."""

    def __init__(self, model):
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, token_ids):
        return self.model(token_ids)[0]


def weights_sha256(model):
    """Return a hash of the weights of a GPT: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_onnx(model, chars, file, cached=True):
    """Write the model to `file` atomically: one ONNX file of opset 20, dynamic in batch size and lengths.

    model   a GPT on the CPU
    chars   the vocabulary: token i is chars[i]
    file    a Path
    cached  with the KV cache as inputs `past_key_values.{i}.key|value` and outputs `present.{i}.key|value`. False:
            (token_ids) -> logits
    Inputs, outputs and axes have the names that Optimum and transformers.js use. The metadata holds the characters and
    the model_args, so the file alone is enough to generate text. Raises OSError.
    """
    # example inputs, names and dynamic axes; no example size is 1, because the exporter would take 1 for a constant
    config = model.config
    batch, length, past = "batch_size", "sequence_length", "past_sequence_length"
    ids = torch.zeros(2, 3, dtype=torch.int64)
    if cached:
        past_shape = (2, config.num_kv_heads, 5, config.head_size)
        pairs = [(torch.zeros(past_shape), torch.zeros(past_shape)) for _ in range(config.n_layer)]
        inputs = (ids, torch.ones(2, 8, dtype=torch.int64), torch.arange(5, 8).repeat(2, 1), pairs)
        names = ["input_ids", "attention_mask", "position_ids"]
        axes = [{0: batch, 1: length}, {0: batch, 1: f"{past} + {length}"}, {0: batch, 1: length}]
        axes.append([({0: batch, 2: past},) * 2] * config.n_layer)
        slots = [f"{i}.{kind}" for i in range(config.n_layer) for kind in ("key", "value")]
    else:
        inputs, names, axes, slots = (ids,), ["token_ids"], [{0: batch, 1: length}], []

    # export
    with quiet():
        proto = torch.onnx.export(
            (GPTWithPast if cached else GPTLogits)(model).eval(),
            inputs,
            input_names=names + [f"past_key_values.{slot}" for slot in slots],
            output_names=["logits"] + [f"present.{slot}" for slot in slots],
            dynamic_shapes=tuple(axes),
            opset_version=20,
            dynamo=True,
            verbose=False,
        ).model_proto

    # clear the metadata of nodes: its stack traces hold absolute paths of this machine
    for node in itertools.chain(proto.graph.node, *(function.node for function in proto.functions)):
        del node.metadata_props[:]

    # add the metadata and write
    metadata = {"chars": chars, "model_args": json.dumps(asdict(config)), "weights_sha256": weights_sha256(model)}
    for key, value in metadata.items():
        proto.metadata_props.add(key=key, value=value)
    save(proto, file)


def quantize(file, to):
    """Write the ONNX model in `file` again, to the Path `to`, atomically, with int8 weights in its matrix products."""
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, quiet():  # ONNX Runtime writes intermediate files beside its input
        copy, made = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        shutil.copy(file, copy)
        quantize_dynamic(copy, made, op_types_to_quantize=["MatMul"])
        save(onnx.load(made), to)


# The last bytes of a file are an entry "sha256" of the metadata, with a hash of all bytes before the entry. A file of
# Protocol Buffers is a sequence of fields, so an entry can be appended: field 14 of 74 bytes, with a key of 6 bytes as
# field 1 and a value of 64 bytes as field 2.
ENTRY = b"\x72\x4a\x0a\x06sha256\x12\x40"


def save(proto, file):
    """Write an ONNX model to `file` atomically, with its hash."""
    entries = [entry for entry in proto.metadata_props if entry.key != "sha256"]  # of the file that was quantized
    del proto.metadata_props[:]
    proto.metadata_props.extend(entries)
    content = proto.SerializeToString()
    write_atomically({file: content + ENTRY + sha256(content).encode()})


def read_checked(file):
    """Return the bytes of an ONNX file. Raises ValueError if they have another hash. Earlier versions wrote none."""
    content = read_regular(file)
    rest, entry, recorded = memoryview(content)[: -len(ENTRY) - 64], content[-len(ENTRY) - 64 : -64], content[-64:]
    if entry == ENTRY and sha256(rest).encode() != recorded:
        raise ValueError("it has changed since export.py wrote it: export again")
    return content


@contextmanager
def quiet():
    """Silence warnings and log messages below the level ERROR inside the block.

    The exporter's warnings address people who write graphs by hand.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


# -- running -----------------------------------------------------------------------------------------------------------


class OnnxGPT:
    """A file of write_onnx or quantize, run by ONNX Runtime on the CPU.

    chars           the vocabulary: token i is chars[i]
    config          the GPTConfig of the exported model
    weights_sha256  the hash of the exported weights; None in files of earlier versions
    cached          whether the graph has the KV cache as inputs and outputs
    past            the keys and values of all layers after the last call, OrtValues `(B, nkv, past, hs)`. Without a
                    cache the list is empty.
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """

    def __init__(self, file):
        try:
            import onnxruntime
        except ImportError:
            raise ValueError("ONNX Runtime is not installed: pip install onnxruntime") from None
        if not Path(file).is_file():
            raise FileNotFoundError(f"no ONNX model at {file}: python export.py --format onnx writes one")

        def session(threads):  # the number is fixed when a session is made
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4  # an error is raised too, and its line in the log would be a second one
            options.intra_op_num_threads = threads
            options.add_session_config_entry("session.force_spinning_stop", "1")  # leave the cores to PyTorch's threads
            return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

        try:
            content = read_checked(file)
            self.session = session(num_threads(len(content) // 4))
            metadata = self.session.get_modelmeta().custom_metadata_map
            self.chars, self.config = metadata["chars"], GPTConfig(**json.loads(metadata["model_args"]))
            self.weights_sha256 = metadata.get("weights_sha256")
        except KeyError as error:
            raise ValueError(f"{file} was not written by export.py: its metadata lacks {error}") from None
        except Exception as error:  # ONNX Runtime raises a dozen kinds of exceptions
            raise ValueError(f"{file} cannot be read: {first_line(error)[:200]}") from None
        check_characters(self.chars, file, self.config.vocab_size)
        self.to_ort = onnxruntime.OrtValue.ortvalue_from_numpy
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.past_inputs = [name.replace("present", "past_key_values") for name in self.outputs[1:]]
        self.cached = len(self.outputs) > 1
        self.past = []
        try:
            self.check_sizes()
        except Exception as error:  # ONNX Runtime's, of a graph that cannot be called so
            raise ValueError(f"{file} is damaged ({first_line(error)[:200]}): export again") from None

    def check_sizes(self):
        """Raise an error unless the graph has the sizes of `config` and computes finite logits."""
        config, session = self.config, self.session
        shapes = {each.name: each.shape for each in (*session.get_inputs(), *session.get_outputs())}
        if self.cached and len(self.outputs) != 1 + 2 * config.n_layer:
            raise ValueError(f"{len(self.outputs) // 2} layers instead of {config.n_layer}")
        sizes = {"logits": (2, config.vocab_size)}
        sizes |= dict.fromkeys(self.past_inputs, (1, config.num_kv_heads))
        for name, (axis, size) in sizes.items():
            if shapes[name][axis] != size:
                raise ValueError(f"{name} is {shapes[name]} instead of {size}")
        logits = self(torch.zeros(1, 1, dtype=torch.int64), start=config.block_size - 1)
        self.past = []
        if not logits.isfinite().all():
            raise ValueError("its logits are infinite or NaN")

    def __call__(self, idx, past=(), start=None):
        """Return the logits `(B, T, V)`, a float32 tensor, for idx `(B, T)` int64 at the positions after `past`.

        past   `self.past` after an earlier call with the same rows; empty: nothing
        start  position of the first token; None: that after `past`. A graph without a cache starts at 0
        """
        if not self.cached:
            return torch.from_numpy(self.session.run(None, {"token_ids": idx.numpy()})[0])
        (B, T), config = idx.shape, self.config
        length = past[0].shape()[2] if past else 0
        start = length if start is None else start
        if not past:
            empty = np.zeros((B, config.num_kv_heads, 0, config.head_size), np.float32)
            past = [self.to_ort(empty) for _ in range(2 * config.n_layer)]
        inputs = {
            "input_ids": idx.numpy(),
            "attention_mask": np.ones((B, length + T), np.int64),
            "position_ids": np.arange(start, start + T)[None].repeat(B, axis=0),
        }
        inputs = {name: self.to_ort(array) for name, array in inputs.items()}
        inputs |= zip(self.past_inputs, past)
        logits, *self.past = self.session.run_with_ort_values(self.outputs, inputs)
        return torch.from_numpy(logits.numpy())

    def stream(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Yield the new tokens, a block `(B, 1)` per step. Arguments and tokens are those of GPT.stream."""
        past, past_length = [], 0  # of this stream; self.past changes with every call

        def next_logits(tokens, start, end):
            nonlocal past, past_length
            # Decode feeds the newest token. Prefill feeds the whole context, also after the context has moved.
            decodes = past_length == end - 1 - start > 0
            fed = tokens[:, end - 1 if decodes else start : end]
            logits = self(fed, past if decodes else ())
            if kv_cache and self.cached:
                past, past_length = self.past, end - start
            return logits[:, -1]

        return decode_tokens(next_logits, self.config, idx, max_new_tokens, Sampling(**sampling))

    def cache_bytes(self):
        """Return (used, reserved): the bytes of `past`, twice, because the arrays are as long as their content."""
        used = sum(value.numpy().nbytes for value in self.past)
        return used, used
