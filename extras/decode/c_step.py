"""The C backend: compiles step.c for the shape of a model, packs the weights, and runs steps.

guard.py      whether step.c and cuda_graph.py compute what this model.py computes
c_build.py    the program, compiled for one shape
c_pack.py     the shape, and the weights in the order in which step.c reads them
c_library.py  the structures and the threads that both sides share
"""

import os
import weakref
from ctypes import byref

import torch

from extras.decode.c_build import load_library
from extras.decode.c_library import (
    Cache,
    CompileError,
    Pool,
    State,
    Table,
    as_c,
    check_state,
    check_struct_sizes,
    check_table,
    model_struct,
)
from extras.decode.c_pack import MAX_TOKENS, empty_cache, int8_panels, pack_weights, panels, shape_macros
from extras.decode.guard import refuse_other_networks
from extras.threads import torch_threads
from model import KVCache

# Multiply-adds per thread in a step without draft tokens. Below this, waiting for a thread costs more than it saves.
WORK_PER_THREAD = 2**18
# From this many rows per thread on, each thread computes some of the rows: it waits for nobody, but reads all weights.
# With fewer rows, it computes some outputs of each layer. The weights of a larger model take longer to read.
MEDIUM, ROWS_PER_THREAD_SMALL, ROWS_PER_THREAD = 2**20, 8, 32  # MEDIUM in parameters
# We feed a draft token only if it and all before it are accepted with at least this probability. In a small model,
# whose weights stay in the cache of a core, each further row costs half as much as the first. In a larger one it costs
# less.
SMALL, MIN_CHANCE_SMALL, MIN_CHANCE = 2**18, 0.5, 0.15  # SMALL in parameters


def compile_step(model, num_drafts, table, weights="float32", parts=False):
    """Compile or load the step for the model's shape, and pack the model's weights for it.

    num_drafts  draft tokens per row and step, at most
    table       from ngram_table; None: there is none
    weights     "float32", or "int8" for a model from round_weights
    parts       count in bind.library.seconds where the time goes, for extras/bench/parts.py
    Returns bind(state), which returns run, and the KVCache that it fills. run(max_steps) runs up to max_steps steps,
    each of which appends tokens to the rows of `state` that are below their limits. It returns how many steps ran, and
    how many draft tokens were offered and accepted. It raises FloatingPointError if the logits of the next step are
    infinite or NaN, and ValueError for a damaged state.

    We copy all weights, so later changes to the model have no effect. Raises CompileError. bind raises TypeError unless
    each tensor of the state has the dtype and shape that BatchState says.
    """
    for p in model.parameters():
        if p.device.type != "cpu" or p.dtype != torch.float32:
            raise CompileError(f"the C backend runs in float32 on the CPU, not in {p.dtype} on {p.device}")
    refuse_other_networks(model)
    config = model.config
    if not 0 <= num_drafts < MAX_TOKENS or (num_drafts and table is None):
        raise ValueError(f"num_drafts={num_drafts}: must be 0 to {MAX_TOKENS - 1}, and above 0 it needs a table")
    if table is not None:
        check_table(table, config.vocab_size)
    num_params = sum(p.numel() for p in model.parameters())
    rows_per_thread = ROWS_PER_THREAD_SMALL if num_params < MEDIUM else ROWS_PER_THREAD
    layout = int8_panels if weights == "int8" else panels
    macros = shape_macros(model, MIN_CHANCE if num_params >= SMALL else MIN_CHANCE_SMALL, layout)
    library = load_library(macros | dict(PARTS=int(parts)))
    check_struct_sizes(library, model_struct(config.n_layer), Cache, State, Table)
    with torch_threads(1):  # torch's other threads would keep spinning on the cores that ours need next
        net = pack_weights(model, library, layout)
    table = table and Table(logits=table[0], after=table[1])
    pool = Pool(library, torch.get_num_threads())
    spare = []  # caches of finished generations, reused because touching the pages of a new one takes time

    def bind(state):
        B = len(state.end)
        shape = (B, config.n_kv_head, config.block_size, config.head_size)
        check_state(state, config)
        # NumPy compares a few numbers faster, and may do so in a daemon thread while the interpreter exits
        end, limit, cached = (x.numpy() for x in (state.end, state.limit, state.cached))
        state_in_c = State(**vars(state))
        layers = spare.pop() if spare else None
        if not layers or layers[0].values["key"].shape != shape:
            cache = iter(empty_cache(shape, 2 * config.n_layer))
            layers = [Cache(key=key, value=value) for key, value in zip(cache, cache)]
        kv_cache = KVCache([layer.values["key"] for layer in layers], [layer.values["value"] for layer in layers])
        weakref.finalize(kv_cache, spare.append, layers)  # once no run fills it and nobody looks at it any more
        layers_in_c = as_c(layers)

        def run(max_steps):
            nonlocal pool
            if pool.pid != os.getpid():  # we are in a child of os.fork(), which has none of its parent's threads
                pool = Pool(library, pool.threads)
            active = int((end < limit).sum())  # rows
            threads = min(pool.threads, max(1, num_params * active // WORK_PER_THREAD))
            by_rows = active >= rows_per_thread * pool.threads
            pointers = (byref(net), layers_in_c, byref(state_in_c), table and byref(table))
            counters = pool.run_steps(*pointers, B, threads, by_rows, max_steps, num_drafts)
            kv_cache.length = int(cached.max())
            return counters

        return run, kv_cache

    bind.library = library
    return bind
