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

    Each row has a kind of work, microseconds per step, their share, and GFLOP/s or GB/s of all threads together. The
    last two are what torch takes for the products and what reading takes, between the runs. Raises CompileError.
    """
    B, T = idx.shape
    config = model.config
    steps = config.block_size - T
    decoder = Decoder(model)
    decoder.program = compile_step(model, 0, None, parts=True)
    library = decoder.program.library
    seconds = (ctypes.c_double * len(KINDS)).in_dll(library, "seconds")
    linears = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    num_weights = sum(layer.weight.numel() for layer in linears)
    threads = torch.get_num_threads()
    weights = placer(huge_pages(4 * num_weights))(torch.ones(threads, num_weights // threads))
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.read_all.restype = ctypes.c_float
    inputs = {layer.in_features: torch.randn(B, layer.in_features) for layer in linears}

    @torch.inference_mode()
    def multiply():
        for layer in linears * TIMES:
            layer(inputs[layer.in_features])

    def read():
        list(pool.map(lambda part: library.read_all(part.data_ptr(), part.numel(), TIMES), weights))

    runs = []
    with ThreadPoolExecutor(threads) as pool:
        for seed in range(repeats + 1):  # the first one warms up
            decoder.generate(idx, 1)  # so that "between calls" does not count what was between two texts
            before = list(seconds)
            decoder.generate(idx, steps, seed=seed)
            run = [(now - then) / steps for now, then in zip(seconds, before)]
            runs.append(run + [timeit.timeit(peer, number=1) / TIMES for peer in (multiply, read)])
    *spent, multiplying, reading = (1e6 * statistics.median(column) for column in zip(*runs[1:]))

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
    rows.append(("its products in torch", multiplying, f"{flops / multiplying:.0f} GFLOP/s"))
    rows.append(("reading its weights", reading, f"{4e-3 * num_weights / reading:.1f} GB/s"))
    cells = [[name, f"{us:,.0f}", f"{us / whole:.0%}", rate] for name, us, rate in rows]
    return [["part", "us per step", "share", "rate"], *cells]
