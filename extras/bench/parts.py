"""python -m extras.bench --parts: where a step of --compile spends its time, next to what this machine can do.

This compiles step.c again, with a clock between the kinds of work. The times of its first thread stand for all threads,
which do the same amount of work.
"""

import ctypes
import statistics
import timeit
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from extras.decode.c_pack import huge_pages, placer
from extras.decode.c_step import compile_step
from extras.decode.engine import Decoder

KINDS = ("products", "attention", "norms, activations", "sampling", "waiting for a thread", "between calls")
TIMES = 20  # that something is done between two looks at the clock


def parts(model, idx, repeats):
    """Return the rows of a table, the title first, for continuing idx `(B, T)` until the context is full.

    Each row has a kind of work, microseconds per step, their share, and GFLOP/s or GB/s of all threads together.
    Raises CompileError.
    """
    B, T = idx.shape
    config = model.config
    steps = config.block_size - T
    decoder = Decoder(model)
    decoder.program = compile_step(model, 0, None, parts=True)
    seconds = (ctypes.c_double * len(KINDS)).in_dll(decoder.program.library, "seconds")
    runs = []
    for seed in range(repeats + 1):  # the first one warms up
        before = list(seconds)
        decoder.generate(idx, steps, seed=seed)
        runs.append([1e6 / steps * (now - then) for now, then in zip(seconds, before)])
    spent = [statistics.median(kind) for kind in zip(*runs[1:])]

    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    num_weights = sum(layer.weight.numel() for layer in linears)
    slots = (T + config.block_size) / 2  # on average
    cache_bytes = 8 * B * config.n_layer * config.n_kv_head * config.head_size * slots
    flops = 2e-3 * B * num_weights  # of the products of a step, in thousands: per microsecond it is GFLOP/s
    rates = {
        "products": f"{flops / spent[0]:.0f} GFLOP/s, {4e-3 * num_weights / spent[0]:.1f} GB/s of weights",
        "attention": f"{1e-3 * cache_bytes / spent[1]:.1f} GB/s of keys and values",
    }
    rows = [(kind, us, rates.get(kind, "")) for kind, us in zip(KINDS, spent)]
    whole = sum(spent)
    rows.append(("the whole step", whole, f"{flops / whole:.0f} GFLOP/s"))
    us = 1e6 * torch_seconds(linears, B, repeats)
    rows.append(("its products in torch", us, f"{flops / us:.0f} GFLOP/s"))
    us = 1e6 * read_seconds(decoder.program.library, 4 * num_weights, repeats)
    rows.append(("reading its weights", us, f"{4e-3 * num_weights / us:.1f} GB/s"))
    cells = [[name, f"{us:,.0f}", f"{us / whole:.0%}", rate] for name, us, rate in rows]
    return [["part", "us per step", "share", "rate"], *cells]


@torch.inference_mode()
def torch_seconds(linears, B, repeats):
    """Return the seconds that torch takes for the Linear layers of a step of B rows, in their order."""
    inputs = {layer.in_features: torch.randn(B, layer.in_features) for layer in linears}

    def steps():
        for layer in linears * TIMES:
            layer(inputs[layer.in_features])

    return median_seconds(steps, repeats)


def read_seconds(library, num_bytes, repeats):
    """Return the seconds that all threads need to read this many bytes, and do nothing else."""
    threads = torch.get_num_threads()
    weights = placer(huge_pages(num_bytes))(torch.ones(threads, num_bytes // 4 // threads))
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.read_all.restype = ctypes.c_float

    def read(part):
        library.read_all(part.data_ptr(), part.numel(), TIMES)

    with ThreadPoolExecutor(threads) as pool:
        return median_seconds(lambda: list(pool.map(read, weights)), repeats)


def median_seconds(function, repeats):
    """Return the median of the seconds per time, of function(), which does something TIMES times."""
    seconds = timeit.repeat(function, number=1, repeat=repeats + 1)
    return statistics.median(seconds[1:]) / TIMES  # the first one warms up
