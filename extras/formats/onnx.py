"""Write and run ONNX files: a GPT as a graph with the KV cache as input and output."""

import hashlib
import itertools
import json
import logging
import os
import shlex
import tempfile
import warnings
import zipfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from extras.cli import first_line, need
from extras.decode.explain import AttentionCalls
from extras.formats.compare import compare_with_pytorch, own_text
from extras.formats.folder import write_tree
from extras.formats.hf_read import config_of
from extras.formats.tokenizer import check_vocab_size, tokenizer_from_state
from extras.formats.unsupported import refuse_pointer
from model import Sampling, build_model, find_checkpoint, generate, load_checkpoint

# set before ONNX Runtime is imported, because it sends usage data otherwise, and writes to ~/.cache
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# -- the network that becomes a graph ----------------------------------------------------------------------------------


class ConcatCache:
    """The cache inside a graph, instead of a KVCache. It appends to the past, because a graph cannot write slots.

    past  n_layer pairs (key, value), `(B, nkv, past, hs)` each
    """

    def __init__(self, past, mask):
        self.pairs = list(past)
        self.the_mask = mask
        self.length = 0  # GPT.forward counts, and nobody reads it

    def next_positions(self, idx, pos):
        return pos

    def mask(self, pos):
        return self.the_mask

    def update(self, layer, pos, k, v):
        key, value = self.pairs[layer]
        self.pairs[layer] = (torch.cat((key, k), dim=2), torch.cat((value, v), dim=2))
        return self.pairs[layer]


class GPTWithPast(nn.Module):
    """A GPT that takes the KV cache as an argument and returns it. It shares the layers of `model`."""

    def __init__(self, model, queries=False):
        super().__init__()
        self.model = model
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
        visible = ((slot <= query) & (attention_mask[:, None, None] != 0)) | (slot == query)  # (B, 1, T, past + T)
        # Added to the scores. With a boolean mask, the exporter lets every layer look for NaN, which MNN cannot do.
        mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        cache = ConcatCache(past_key_values, mask)
        queries = []
        with AttentionCalls(lambda q, *_: queries.append(q[:, :, -1:])):
            logits, _ = self.model(input_ids, pos=position_ids, cache=cache)
        return (logits, cache.pairs, queries) if self.queries else (logits, cache.pairs)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_onnx(model, tokenizer, file, queries=False):
    """Write the model as one ONNX file of opset 20, dynamic in batch size and lengths.

    model    a GPT on the CPU
    file     a Path
    queries  also return each layer's query of the last token, `query.{i}`, from which the page computes attention
    Inputs, outputs and axes have the names that Optimum and transformers.js expect: the cache is
    `past_key_values.{i}.key|value` as input and `present.{i}.key|value` as output. The metadata contains the vocabulary
    and the sizes, so the file alone is enough to generate text. Raises OSError.
    """
    # example inputs, names and dynamic axes; no example size is 1, which the exporter would treat as a constant
    config = model.config
    batch = "batch_size"
    length = "sequence_length"
    past = "past_sequence_length"
    past_shape = (2, config.n_kv_head, 5, config.head_size)
    pairs = [(torch.zeros(past_shape), torch.zeros(past_shape)) for _ in range(config.n_layer)]
    T = min(3, config.block_size)
    ids = torch.zeros(2, T, dtype=torch.int64)
    positions = torch.arange(5, 5 + T).repeat(2, 1)
    slots = [f"{i}.{kind}" for i in range(config.n_layer) for kind in ("key", "value")]

    with ExitStack() as quiet:  # without the exporter's warnings, which are for people who write graphs by hand
        quiet.enter_context(warnings.catch_warnings(action="ignore"))
        quiet.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        proto = torch.onnx.export(
            GPTWithPast(model, queries).eval(),
            (ids, torch.ones(2, 5 + T, dtype=torch.int64), positions, pairs),
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

    # clear the metadata of nodes, whose stack traces contain local paths
    for node in proto.graph.node:
        del node.metadata_props[:]

    # add our own and write
    metadata = {"model_args": json.dumps(asdict(config)), "weights_sha256": weights_sha256(model)}
    for key, value in (tokenizer.state_dict() | metadata).items():
        proto.metadata_props.add(key=key, value=value)
    file.write_bytes(proto.SerializeToString())


def weights_sha256(model):
    """Return a hash of the weights of a GPT on the CPU, to recognize the model that a file was made from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def export_onnx(model, tokenizer, folder, eos=()):
    """Write model.onnx into `folder`, a Path, and genai_config.json, with which onnxruntime-genai runs it.

    eos  ids at which text ends there; none: see genai_config
    Raises ValueError, and does not touch the folder, if the graph does not compute what the model does.
    """
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "model.onnx"
        write_onnx(model, tokenizer, file)
        ids = own_text(model)
        compare_onnx(file, model, ids)
        content = file.read_bytes()
    config = json.dumps(genai_config(model, ids, eos), indent=2)
    write_tree(folder, {file.name: content, "genai_config.json": config.encode()})
    print(f"{folder / file.name}: {len(content) / 1e6:.2f} MB")


@torch.no_grad()
def genai_config(model, ids, eos):
    """Return the content of genai_config.json for the graph of write_onnx.

    ids  own_text(model)
    eos  ids at which text ends; none: that of the token which the model expects least, because onnxruntime-genai
         insists on one
    """
    config = model.config
    eos = list(eos) or [model(ids)[0].log_softmax(-1).amax((0, 1)).argmin().item()]
    inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids")}
    inputs |= {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in ("key", "value")}
    outputs = {f"present_{kind}_names": f"present.%d.{kind}" for kind in ("key", "value")}
    decoder = dict(
        filename="model.onnx",
        session_options={"provider_options": []},
        hidden_size=config.n_embd,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head,
        head_size=config.head_size,
        inputs=inputs,
        outputs={"logits": "logits"} | outputs,
    )
    # pad tokens are masked wherever they are in a batch, so they must not be a token that prompts contain
    sizes = dict(vocab_size=config.vocab_size, context_length=config.block_size)
    tokens = dict(eos_token_id=eos, pad_token_id=eos[0])
    search = dict(max_length=config.block_size, past_present_share_buffer=False)  # our graph returns a longer cache
    return dict(model=dict(type="decoder", **sizes, **tokens, decoder=decoder), search=search)


# -- running -----------------------------------------------------------------------------------------------------------

# the types of inputs that other tools may have chosen; ONNX Runtime refuses what we feed to an input of any other type
NUMPY = {"float": np.float32, "float16": np.float16, "double": np.float64, "int64": np.int64, "int32": np.int32}


class OnnxCache:
    """The cache of an OnnxGPT. ONNX Runtime returns a new one at every step, longer by the tokens fed.

    past    keys and values in turn, an OrtValue per layer, `(B, nkv, length, hs)`
    length  positions so far
    """

    def __init__(self, past):
        self.past = past
        self.length = 0

    @property
    def key(self):
        return [torch.from_numpy(past.numpy()) for past in self.past[::2]]

    @property
    def value(self):
        return [torch.from_numpy(past.numpy()) for past in self.past[1::2]]


class OnnxGPT:
    """A file of write_onnx, run by ONNX Runtime on the CPU. `generate` of model.py takes it for a GPT.

    Another tool may have rewritten it: its numbers may be of other types, its inputs and outputs in a different order,
    its weights in a file next to it. The metadata stays, so we check that the inputs and outputs have, too.

    file            its path
    tokenizer       its tokenizer
    config          the GPTConfig of the exported model
    weights_sha256  the hash of its weights; None in files of the first versions
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """

    training = False
    device = torch.device("cpu")
    ngrams = None

    def __init__(self, file):
        file = Path(file)
        if file.suffix != ".onnx" and not file.is_file():  # a folder that export.py wrote to
            inside = file / "model.onnx"
            file = inside if inside.is_file() else file / "onnx" / "model.onnx"
        self.file = file
        self.source = str(file)
        if not file.is_file():  # before the import, because ONNX Runtime can abort a process that ends right after it
            run = file.parent.parent if file.parts[-2:] == ("onnx", "model.onnx") else "out"
            hint = f"python -m extras.export --format onnx --out_dir {shlex.quote(str(run))} writes one"
            raise FileNotFoundError(f"no ONNX model at {file}: {hint}")
        refuse_pointer(file)
        if zipfile.is_zipfile(file):
            hint = f"python -m extras.export --format onnx --ckpt {shlex.quote(str(file))} writes one"
            raise ValueError(f"{file} is a checkpoint, and --engine onnx needs an ONNX file: {hint}")
        onnxruntime = need("--engine onnx", "onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised, so it need not print them too
        # let its threads sleep early, which leaves the cores to PyTorch between calls and to other processes
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.intra_op.spin_duration_us", "10")
        try:
            # as in sample.py, a second thread does not help a small step; weights may be in model.onnx.data, say
            size = sum(part.stat().st_size for part in file.parent.iterdir() if part.name.startswith(file.stem))
            options.intra_op_num_threads = 1 if size < 2**24 else torch.get_num_threads()
            settings = dict(providers=["CPUExecutionProvider"], enable_fallback=0)  # a second try would print
            # by its path, next to which its weights may be: for bytes, ONNX Runtime looks in the current folder
            self.session = onnxruntime.InferenceSession(str(file), options, **settings)
            metadata = self.session.get_modelmeta().custom_metadata_map
            self.config = config_of(json.loads(metadata["model_args"]), len(self.session.get_inputs()))
            self.tokenizer = tokenizer_from_state(metadata)
            self.weights_sha256 = metadata.get("weights_sha256")
        except KeyError as error:
            raise ValueError(f"{file} was not written by export.py: its metadata lacks {error}") from None
        except Exception as error:  # ONNX Runtime raises a dozen kinds of exceptions
            raise ValueError(f"{file} cannot be read: {first_line(error)[:200]}") from None
        check_vocab_size(self.tokenizer, self.config.vocab_size, file)
        self.to_ort = onnxruntime.OrtValue.ortvalue_from_numpy
        slots = [f"{i}.{kind}" for i in range(self.config.n_layer) for kind in ("key", "value")]
        self.outputs = ["logits", *(f"present.{slot}" for slot in slots)]
        self.past_inputs = [f"past_key_values.{slot}" for slot in slots]
        self.dtypes = {each.name: NUMPY.get(each.type[len("tensor(") : -1]) for each in self.session.get_inputs()}
        self.check_steps()

    def check_steps(self):
        """Raise ValueError unless a prefill and a step, of two rows, give logits and a cache of the sizes of config."""
        config = self.config
        ids = np.zeros((2, 2), np.int64)
        positions = ids + config.block_size - 1
        try:
            past = self.empty_cache(2).past
            for slots in (2, 4):
                logits, past = self.run(ids, np.ones((2, slots), np.int64), positions, past)
        except Exception as error:  # ONNX Runtime raises a dozen kinds of exceptions
            why = f"{first_line(error)[:200]}; export.py wrote a different graph"
            raise ValueError(f"{self.file} cannot be run: {why}") from None
        sizes = {(2, config.n_kv_head, 4, config.head_size)}
        if logits.shape != (2, 2, config.vocab_size) or {tuple(each.shape()) for each in past} != sizes:
            raise ValueError(f"{self.file} does not have the sizes that its metadata says")
        if config.vocab_size > 1 and logits.min() == logits.max():
            raise ValueError(f"{self.file} is damaged: every token gets the logit {logits.max()}")

    def exported_from(self, path, hint="pass the folder of its ckpt.pt as --out_dir"):
        """Return the GPT of a checkpoint. Raises ValueError if this file was made from different weights."""
        model = build_model(load_checkpoint(path)).eval()
        if weights_sha256(model) != self.weights_sha256:
            raise ValueError(f"{self.file} was not exported from {path}: {hint}")
        return model

    def refuse_stale(self):
        """Raise ValueError if the run in whose folder this file is has different weights by now.

        export.py writes to onnx/ or hf/onnx/ in the folder of a run, which has ckpt.pt, or last.pt at first.
        """
        for folder in self.file.resolve().parents[:3]:
            file = find_checkpoint(folder)
            if file != folder and self.weights_sha256:
                self.exported_from(file, "export again, or move it out of the folder of that run")
                return

    def parameters(self):
        return ()  # none of torch's

    def new_cache(self, batch_size, slots=None):
        """Return an empty OnnxCache, which is also self.kv_cache. It grows, so it has no slots."""
        cache = self.empty_cache(batch_size)
        self.kv_cache = cache
        return cache

    def empty_cache(self, batch_size):
        shape = (batch_size, self.config.n_kv_head, 0, self.config.head_size)
        return OnnxCache([self.to_ort(np.zeros(shape, self.dtypes[name])) for name in self.past_inputs])

    def __call__(self, idx, cache=None, last=False):
        """Return the logits `(B, T, V)` of idx `(B, T)` int64, and None, as GPT.forward does.

        cache  the OnnxCache to continue; None: idx is the whole text
        last   return the logits of the last position only, `(B, V)`
        """
        B, T = idx.shape
        cache = cache or self.empty_cache(B)
        past = cache.past if cache.length else self.empty_cache(B).past
        end = cache.length + T
        positions = np.arange(cache.length, end)[None].repeat(B, axis=0)
        logits, cache.past = self.run(idx.numpy(), np.ones((B, end), np.int64), positions, past)
        cache.length = end
        logits = torch.from_numpy(logits).float()
        return logits[:, -1] if last else logits, None

    def run(self, ids, mask, positions, past):
        """Return the logits, a NumPy array, and the new past, for NumPy arrays and the past of an OnnxCache."""
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs = {name: self.to_ort(array.astype(self.dtypes[name])) for name, array in inputs.items()}
        logits, *past = self.session.run_with_ort_values(self.outputs, inputs | dict(zip(self.past_inputs, past)))
        return logits.numpy(), past


def open_onnx(args):
    """Return (model, tokenizer) for the flags of sample.py: an OnnxGPT that is not stale.

    With --verify, model.reference is the GPT of which it is an export. Raises OSError or ValueError.
    """
    torch_only = args.draft, args.compile, args.meta, args.dtype, args.weights, args.device in ("auto", "cpu")
    if torch_only != (None, False, None, "float32", "float32", True):
        flags = "--draft, --compile, --meta, --dtype, --weights and --device"
        raise ValueError(f"{flags} work with --engine torch, not with onnx")
    model = OnnxGPT(args.ckpt or args.out_dir or "out")
    model.refuse_stale()
    if args.verify:
        model.reference = model.exported_from(find_checkpoint(args.out_dir))
    return model, model.tokenizer


def compare_onnx(file, model, ids):
    """Run an ONNX file through its cache and compare it: a prefill, a chunk, then single tokens."""
    onnx = OnnxGPT(file)
    T = ids.size(1)
    cache = onnx.new_cache(len(ids))
    cuts = sorted({0, T // 2, *range(T * 3 // 4, T + 1)})
    logits = [onnx(ids[:, begin:end], cache)[0] for begin, end in itertools.pairwise(cuts)]

    def greedy(prompt):
        new = generate(onnx, prompt, T, Sampling(temperature=0))
        return torch.cat((prompt, *new), dim=1)[0].tolist()

    compare_with_pytorch(file.name, model, ids, torch.cat(logits, dim=1), greedy)
