"""A model that export.py wrote as ONNX, run by ONNX Runtime: the cache goes into every call, and comes out longer.

The loop is GPT.stream's and the sampler the kit's own (model.py), so the tokens are the same for the same seed.
"""

import json
from pathlib import Path

import numpy as np
import torch

from model import GPTConfig, Sampling, sample_token, slide


class OnnxGPT:
    """model.onnx as something to generate with, on the CPU.

    chars   the vocabulary: token i is chars[i]
    config  the GPTConfig of the model that was exported
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the file.
    """

    def __init__(self, file):
        try:
            import onnxruntime
        except ImportError:
            raise ValueError("ONNX Runtime is not installed: pip install onnxruntime") from None
        if not Path(file).is_file():
            raise FileNotFoundError(f"no ONNX model at {file}: python export.py --format onnx writes one")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if Path(file).stat().st_size < 2**24:
            options.intra_op_num_threads = 1  # a step is done before another core has woken up
        options.add_session_config_entry("session.force_spinning_stop", "1")  # whoever computes next wants the cores
        try:
            self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            metadata = self.session.get_modelmeta().custom_metadata_map
            self.chars, self.config = metadata["chars"], GPTConfig(**json.loads(metadata["model_args"]))
        except KeyError as error:
            raise ValueError(f"{file} was not written by export.py: its metadata lacks {error}") from None
        except Exception as error:  # ONNX Runtime has an exception for each of a dozen ways
            raise ValueError(f"{file} cannot be read: {str(error).strip().splitlines()[0][:200]}") from None
        self.to_ort = onnxruntime.OrtValue.ortvalue_from_numpy
        self.outputs = [output.name for output in self.session.get_outputs()]
        self.cached = len(self.outputs) > 1  # export.py --cacheless writes a graph without
        self.past = None  # what the last call left behind: key and value of each layer, in turn

    def empty(self, B):
        """A past of no positions."""
        shape = (B, self.config.kv_heads, 0, self.config.head_size)
        return [self.to_ort(np.zeros(shape, np.float32)) for _ in range(2 * self.config.n_layer)]

    def __call__(self, idx, past=None):
        """Logits `(B, T, vocab_size)` float32 for idx `(B, T)` int64, numpy arrays, behind what `past` holds.

        past  `self.past` after an earlier call with these rows; None: there was none, as always without a cache
        """
        if not self.cached:
            return self.session.run(None, {"token_ids": idx})[0]
        B, T = idx.shape
        past = past or self.empty(B)
        begin = past[0].shape()[2]
        feed = {
            "input_ids": idx,
            "attention_mask": np.ones((B, begin + T), np.int64),
            "position_ids": np.tile(np.arange(begin, begin + T), (B, 1)),
        }
        feed = {name: self.to_ort(array) for name, array in feed.items()}
        feed |= {name.replace("present", "past_key_values"): value for name, value in zip(self.outputs[1:], past)}
        logits, *self.past = self.session.run_with_ort_values(self.outputs, feed)
        return logits.numpy()

    def stream(self, idx, max_new_tokens, *, kv_cache=True, **sampling):
        """Yield each step's tokens `(B,)`, as GPT.stream does: same arguments, same tokens."""
        (B, T), sampling, S = idx.shape, Sampling(**sampling), self.config.block_size
        steps, samples = sampling.steps(T, max_new_tokens, S), sampling.rows(B, idx.device)
        tokens, begin, past = idx.numpy(), 0, None
        for step, noise in enumerate(sampling.noise(samples, steps, self.config.vocab_size)):
            end = T + step
            if slide(begin, end, S) != begin:
                begin, past = slide(begin, end, S), None
            logits = self(tokens[:, end - 1 if past else begin : end], past)
            past = self.past if kv_cache else None  # which a graph without a cache never has
            new = sample_token(torch.from_numpy(logits[:, -1]), noise, *sampling.filters)
            tokens = np.concatenate((tokens, new[:, None].numpy()), axis=1)
            yield new
