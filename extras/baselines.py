"""The baselines of bench.py: transformers and llama2.c."""

import ctypes
import subprocess
import tempfile
import timeit
from pathlib import Path

import torch

from model import Sampling

# -- transformers ------------------------------------------------------------------------------------------------------


def transformers_run(model):
    """Return run(idx, max_new_tokens, seed, record): `generate` of transformers' class for the same network.

    It draws its own random numbers. Raises ValueError if no class of transformers computes this network.
    """
    import transformers

    from extras.interop.hf_write import to_transformers

    transformers.logging.set_verbosity_error()
    hf = to_transformers(model)
    with torch.no_grad():  # an edited model.py may compute a different network
        idx = torch.arange(model.config.block_size, device=hf.device)[None] % model.config.vocab_size
        if not torch.allclose(hf(idx).logits, model(idx)[0], atol=1e-3, rtol=1e-3):
            raise ValueError("transformers' class computes a different network than this model.py")

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

    def seconds(threads):
        return min(timeit.repeat(lambda: generate(1, S, threads), number=1))

    threads = min({1, torch.get_num_threads()}, key=seconds)

    def run(idx, max_new_tokens, seed, record):
        if idx.numel() > 1:
            raise ValueError("llama2.c generates one sequence at a time: leave out --batch")
        record(torch.tensor([generate(idx.item(), 1 + max_new_tokens, threads)]))

    return run
