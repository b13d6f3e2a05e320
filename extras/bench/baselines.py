"""The baselines of bench.py: transformers, OpenVINO, CTranslate2 and llama2.c."""

import ctypes
import subprocess
import tempfile
import timeit
from pathlib import Path

import numpy as np
import torch

from extras.cli import need
from extras.formats.onnx import OnnxCache, OnnxGPT
from model import Sampling

# -- transformers ------------------------------------------------------------------------------------------------------


def transformers_run(model):
    """Return run(idx, max_new_tokens, seed, record): `generate` of transformers' class for the same network.

    It draws its own random numbers. Raises ValueError if no class of transformers computes this network.
    """
    import transformers

    from extras.formats.hf_write import to_transformers

    transformers.logging.set_verbosity_error()
    hf = to_transformers(model)

    def run(idx, max_new_tokens, seed, record):
        def after_step(ids, scores, **_):  # a stopping criterion that never stops
            record(ids[:, -1:])
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        torch.manual_seed(seed)
        hf.generate(
            idx,
            attention_mask=torch.ones_like(idx),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=Sampling.temperature,
            top_k=0,
            stopping_criteria=transformers.StoppingCriteriaList([after_step]),
        )

    return run


# -- OpenVINO ----------------------------------------------------------------------------------------------------------


class OpenVinoGPT(OnnxGPT):
    """A file of write_onnx, run by OpenVINO on the CPU in float32, as `generate` of model.py runs a GPT.

    OpenVINO chooses the number of threads. Two requests take turns: one reads the cache where the other has written
    it, so that nothing is copied, which would take more time than the network. Raises ValueError if it is not
    installed.
    """

    def __init__(self, file, config):
        openvino = need("OpenVINO", "openvino")
        self.config = config
        program = openvino.Core().compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        self.requests = [program.create_infer_request(), program.create_infer_request()]
        self.slots = [f"{i}.{kind}" for i in range(config.n_layer) for kind in ("key", "value")]

    def empty_cache(self, batch_size):
        shape = (batch_size, self.config.n_kv_head, 0, self.config.head_size)
        return OnnxCache([np.zeros(shape, np.float32) for _ in self.slots])

    def run(self, ids, mask, positions, past):
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs |= {f"past_key_values.{slot}": each for slot, each in zip(self.slots, past)}
        self.requests.reverse()
        outputs = self.requests[0].infer(inputs, share_inputs=True, share_outputs=True)
        return outputs["logits"].copy(), [outputs[f"present.{slot}"] for slot in self.slots]


# -- CTranslate2 -------------------------------------------------------------------------------------------------------


def ctranslate2_run(model):
    """Return CTranslate2's run(idx, max_new_tokens, seed, record), which records a single block.

    It draws its own random numbers. It runs on one thread or on all, whichever is faster: it splits every operation
    among OpenMP threads, and in a small model they wait for each other longer than they compute. Two threads were 10
    times as slow as one at 4/4/128/256, and over 1,000 times while other processes kept both cores busy.
    Raises ValueError if it is not installed, or does not know the network.
    """
    ctranslate2 = need("CTranslate2", "ctranslate2")
    import transformers
    from ctranslate2.converters.transformers import GPT2Loader

    from extras.formats.hf_write import to_transformers

    hf = to_transformers(model)
    if not isinstance(hf, transformers.GPT2LMHeadModel):
        raise ValueError("CTranslate2 runs the layers of GPT-2, which are those of --recipe nanogpt")
    spec = GPT2Loader().get_model_spec(hf)
    spec.register_vocabulary([str(id) for id in range(model.config.vocab_size)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        generators = {
            threads: ctranslate2.Generator(folder, compute_type="float32", intra_threads=threads)
            for threads in {1, torch.get_num_threads()}
        }

    def generate(threads, idx, max_new_tokens):
        texts = generators[threads].generate_batch(
            [[str(id) for id in row] for row in idx.tolist()],
            min_length=max_new_tokens,  # otherwise token 0 would end the text
            max_length=max_new_tokens,
            include_prompt_in_result=False,
            sampling_topk=0,
            sampling_temperature=Sampling.temperature,
        )
        return torch.tensor([text.sequences_ids[0] for text in texts])

    one_token = torch.zeros(1, 1, dtype=torch.int64)
    threads = fastest(generators, lambda threads: generate(threads, one_token, 15))

    def run(idx, max_new_tokens, seed, record):
        record(generate(threads, idx, max_new_tokens))

    return run


def fastest(numbers, generate):
    """Return the number of threads for which generate(threads) takes least time, in the best of three runs."""
    return min(numbers, key=lambda threads: min(timeit.repeat(lambda: generate(threads), number=1, repeat=3)))


# -- llama2.c ----------------------------------------------------------------------------------------------------------

# the functions of llama2.c in a loop, without its tokenizer and its printing
LLAMA2C_LOOP = """
#define TESTING
#include "run.c"
#include <omp.h>
static Transformer transformer;
static Sampler sampler;
void load(char *file, float temperature) {
    build_transformer(&transformer, file);
    build_sampler(&sampler, transformer.config.vocab_size, temperature, 1.0f, 1);
}
void run(int *tokens, int length, int threads) {
    int before = omp_get_max_threads(); /* torch uses it, too */
    omp_set_num_threads(threads);
    for (int pos = 0; pos < length - 1; pos++)
        tokens[pos + 1] = sample(&sampler, forward(&transformer, tokens[pos], pos));
    omp_set_num_threads(before);
}
"""


def llama2c_run(config, folder):
    """Return llama2.c's run(idx, max_new_tokens, seed, record): it continues one token, and records a single block.

    llama2.c computes a different network, with RMSNorm and interleaved rotary positions. So we give it random weights,
    and an MLP that matches the number of parameters of `config`. Raises ValueError if `folder` is not a clone of it.
    """
    if not folder or not Path(folder, "run.c").is_file():
        raise ValueError("--llama2c needs the folder of a clone of llama2.c, with run.c")
    C = config.n_embd
    L = config.n_layer
    V = config.vocab_size
    S = config.block_size
    kv_width = config.n_kv_head * config.head_size
    hidden = int(config.mlp_ratio * C * 2 / 3 / 8 + 0.999) * 8
    num_weights = V * C + L * (2 * C + 2 * C * C + 2 * C * kv_width + 3 * C * hidden) + C + S * config.head_size
    header = torch.tensor([C, hidden, L, config.n_head, config.n_kv_head, V, S], dtype=torch.int32)

    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "loop.c"
        compiled = Path(temporary) / "loop.o"
        program = Path(temporary) / "loop.so"
        weights = Path(temporary) / "weights.bin"
        source.write_text(LLAMA2C_LOOP, encoding="utf-8")
        flags = ["-Ofast", "-march=native", "-fopenmp", "-w", "-fPIC", f"-I{Path(folder).resolve()}"]
        subprocess.run(["cc", *flags, "-c", source, "-o", compiled], check=True)
        # link without -Ofast, which would make the whole process flush subnormal numbers to 0
        subprocess.run(["cc", "-shared", "-fopenmp", compiled, "-o", program, "-lm"], check=True)
        weights.write_bytes(header.numpy().tobytes() + (0.02 * torch.randn(num_weights)).numpy().tobytes())
        library = ctypes.CDLL(str(program))
        library.load(str(weights).encode(), ctypes.c_float(Sampling.temperature))

    def generate(first, length, threads):
        tokens = (ctypes.c_int * length)(first)
        library.run(tokens, length, threads)
        return tokens[1:]

    threads = fastest({1, torch.get_num_threads()}, lambda threads: generate(1, S, threads))

    def run(idx, max_new_tokens, seed, record):
        if idx.numel() > 1:
            raise ValueError("llama2.c generates one sequence at a time: leave out --batch")
        record(torch.tensor([generate(idx.item(), 1 + max_new_tokens, threads)]))

    return run
