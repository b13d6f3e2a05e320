"""The C backend: compiles step.c for the shape of a model, packs the weights, and runs steps.

guard.py    whether step.c and cuda_graph.py compute what this model.py computes
c_build.py    the program, compiled for one shape
c_pack.py     the weights, in the order in which step.c reads them
c_library.py  the structures and the threads that both sides share
"""

import os
import weakref
from contextlib import contextmanager
from functools import partial

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
    state_arrays,
)
from extras.decode.c_pack import empty_cache, int8_panels, pack_weights, panels
from extras.decode.guard import refuse_other_networks
from extras.decode.ngrams import MAX_ORDER
from extras.decode.quantize import BLOCK
from model import KVCache

__all__ = ["CompileError", "compile_step"]

MAX_TOKENS = 64  # per forward, so that the activations of a small model stay in the cache of a core
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
    Returns bind(state), which returns two functions and the KVCache that they fill:
    run(max_steps, active)          runs up to max_steps steps, each of which appends tokens to the rows of `state`.
                                    `active` is the number of rows below their limits. Returns how many steps ran, and
                                    how many draft tokens were offered and accepted. Raises FloatingPointError if the
                                    logits of the next step are infinite or NaN, and ValueError for a damaged state
    copy_slots(first, rows, slots)  copies the first slots of one row's cache to other rows

    We copy all weights, so later changes to the model have no effect. Raises CompileError. bind raises TypeError if a
    tensor of the state has another dtype or shape than in BatchState.
    """
    for p in model.parameters():
        if p.device.type != "cpu" or p.dtype != torch.float32:
            raise CompileError(
                f"the C backend runs in float32 on the CPU, and this model is in {p.dtype} on {p.device}"
            )
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
    library = load_library(macros | (dict(PARTS=1) if parts else {}))
    struct = model_struct(config.n_layer)
    check_struct_sizes(library, struct, Cache, State, Table)
    with one_thread():
        net = pack_weights(model, struct, partial(layout, lanes=library.lanes(), tile=library.tile_panels()))
    table = None if table is None else Table(logits=table[0], after=table[1])
    pool = Pool(library, torch.get_num_threads())
    spare = []  # caches of finished generations, reused because touching the pages of a new one takes time

    def bind(state):
        B = len(state.end)
        shape = (B, config.n_kv_head, config.block_size, config.head_size)
        arrays = state_arrays(state, config)
        state_in_c = State(**vars(state))
        cache = spare.pop() if spare else None
        if not cache or cache[0].shape != shape:
            cache = empty_cache(shape, 2 * config.n_layer)  # key and value of every layer
        kv_cache = KVCache(cache[::2], cache[1::2])
        weakref.finalize(kv_cache, spare.append, cache)  # once no run fills it and nobody looks at it any more
        layers = as_c([Cache(key=key, value=value) for key, value in zip(cache[::2], cache[1::2])])

        def run(max_steps, active=B):
            nonlocal pool
            check_state(arrays, config)
            if pool.pid != os.getpid():  # we are in a child of os.fork(), which has none of its parent's threads
                pool = Pool(library, pool.threads)
            counters = pool.run_steps(
                net=net,
                layers=layers,
                state=state_in_c,
                table=table,
                rows=B,
                threads=min(pool.threads, max(1, num_params * active // WORK_PER_THREAD)),
                by_rows=active >= rows_per_thread * pool.threads,
                max_steps=max_steps,
                num_drafts=num_drafts,
            )
            kv_cache.length = int(arrays["cached"].max())
            return counters

        def copy_slots(first, rows, slots):
            for keys in cache:  # or values
                keys[rows, :, :slots] = keys[first, :, :slots]

        return run, copy_slots, kv_cache

    bind.library = library
    return bind


def shape_macros(model, min_chance, layout):
    """Return the macros that tell step.c the shape of the model. layout: panels or int8_panels."""
    config = model.config
    return dict(
        N_LAYER=config.n_layer,
        N_HEAD=config.n_head,
        N_KV_HEAD=config.n_kv_head,
        N_EMBD=config.n_embd,
        HIDDEN=model.transformer["h"][0].mlp.c_proj.in_features,
        VOCAB_SIZE=config.vocab_size,
        BLOCK_SIZE=config.block_size,
        GATED=int(config.activation == "swiglu"),
        GELU_TANH=int(config.activation == "gelu_tanh"),
        POST_LN=int(not config.norm_first),
        MAX_ORDER=MAX_ORDER,
        MAX_TOKENS=MAX_TOKENS,
        MIN_CHANCE=f"{min_chance}f",
        INT8=int(layout is int8_panels),
        BLOCK=BLOCK,
    )


@contextmanager
def one_thread():
    """Run torch on one thread inside the block. Its other threads would keep spinning on cores that ours need next."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
