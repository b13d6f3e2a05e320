"""ONNX Runtime, run by our own loop and sampler: sample.py --engine onnx."""

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from kvgpt.cli import first_line
from kvgpt.cores import num_threads
from kvgpt.files import check_folder
from kvgpt.tokenizer import tokenizer_from_state
from model import GPTConfig

# before any import of ONNX Runtime, which otherwise reports to its makers and writes to ~/.cache
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def weights_sha256(model):
    """Return a hash of the weights of a GPT on the CPU, which says whether a file was made from this very model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


class OnnxGPT:
    """A file of kvgpt/export/onnx.py, run by ONNX Runtime on the CPU.

    tokenizer       its tokenizer
    config          the GPTConfig of the exported model
    weights_sha256  of the exported model; None in files of the first versions
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """

    def __init__(self, file):
        try:
            import onnxruntime
        except ImportError:
            raise ValueError("ONNX Runtime is not installed: pip install onnxruntime") from None
        file = Path(file)
        if not file.is_file():
            raise FileNotFoundError(f"no ONNX model at {file}: python export.py --format onnx writes one")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # an error is raised too, and we do not want to see it twice
        # its threads sleep soon, and leave the cores to PyTorch between two calls and to other processes within one
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.intra_op.spin_duration_us", "10")
        try:
            check_folder(file.parent)
            content = file.read_bytes()
            options.intra_op_num_threads = num_threads(len(content) // 4)  # a weight is a float32
            self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            metadata = self.session.get_modelmeta().custom_metadata_map
            self.config = GPTConfig(**json.loads(metadata["model_args"]))
            self.tokenizer = tokenizer_from_state(metadata)
            self.weights_sha256 = metadata.get("weights_sha256")
        except KeyError as error:
            raise ValueError(f"{file} was not written by export.py: its metadata lacks {error}") from None
        except Exception as error:  # ONNX Runtime raises a dozen kinds of exceptions
            raise ValueError(f"{file} cannot be read: {first_line(error)[:200]}") from None
        self.tokenizer.check_weights(self.config.vocab_size, file)
        self.to_ort = onnxruntime.OrtValue.ortvalue_from_numpy
        names = [output.name for output in self.session.get_outputs()]
        self.outputs = [name for name in names if not name.startswith("query")]  # these are for the web page
        self.past_inputs = [name.replace("present", "past_key_values") for name in self.outputs[1:]]

    def __call__(self, idx, past=()):
        """Return (logits, past): float32 `(B, T, V)` for idx `(B, T)` int64, and the cache after them.

        past  what an earlier call with the same rows has returned, a list of keys and values, OrtValues
              `(B, nkv, past, hs)`; empty: idx begins the text
        """
        (B, T), config = idx.shape, self.config
        if not past:
            empty = self.to_ort(np.zeros((B, config.num_kv_heads, 0, config.head_size), np.float32))
            past = [empty] * len(self.past_inputs)
        start = past[0].shape()[2]
        inputs = {
            "input_ids": idx.numpy(),
            "attention_mask": np.ones((B, start + T), np.int64),
            "position_ids": np.arange(start, start + T)[None].repeat(B, axis=0),
        }
        inputs = {name: self.to_ort(array) for name, array in inputs.items()} | dict(zip(self.past_inputs, past))
        logits, *past = self.session.run_with_ort_values(self.outputs, inputs)
        return torch.from_numpy(logits.numpy()), past

    def new_cache(self, batch_size):
        return SimpleNamespace(past=[], length=0)

    def next_logits(self, idx, cache=None):
        """Return the logits `(B, V)` of the token after idx `(B, T)`, which is appended to the cache: see GPT."""
        logits, past = self(idx, cache.past if cache else [])
        if cache:
            cache.past, cache.length = past, cache.length + idx.size(1)
        return logits[:, -1]
