"""The compiled step: decode_step as machine code, without Python between its operations.

CPU: torch.export and AOTInductor write C++ for exactly these shapes, with the weights packed into the program. CUDA:
torch.compile, replayed as a CUDA graph.
"""

import hashlib
import os
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import model as model_module
from kvgpt.decoding.speculate import DecodeState, decode_step
from model import eval_mode

KEPT_PROGRAMS = 30  # compiled programs that stay in the cache folder, the most recently used ones


class CompileError(RuntimeError):
    """A compiler is missing or has failed. The text is one line."""


def compile_step(model, state, num_drafts, table):
    """Compile decode_step for the model's weights and for states of this batch size.

    Returns bind(state, table), which returns a function that runs one step on that state. The program has caches of its
    own. bind() empties the program's caches and gives them to the model.
    Raises CompileError.
    """
    attentions = [block.attn for block in model.transformer["h"]]
    for attn in attentions:
        attn.allocate_cache(len(state.end))
    buffers = [(attn.cache.key, attn.cache.value) for attn in attentions]
    args = [list(vars(state).values()), table, [tensor for pair in buffers for tensor in pair]]
    try:
        with torch.no_grad(), eval_mode(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the compiler about itself
            start = (capture_cuda_graph if state.end.is_cuda else aot_compile)(model, num_drafts, args)
    except Exception as error:  # torch raises many types for a missing or failing compiler
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CompileError(f"the decode step cannot be compiled here ({why[:200]})") from error
    finally:
        for attn in attentions:
            attn.cache.clear()  # tracing has left its own tensors there

    def bind(state, table):
        for attn, (key, value) in zip(attentions, buffers):
            attn.cache.clear()
            attn.cache.key, attn.cache.value = key, value
        return start(state, table)

    return bind


class StepModule(torch.nn.Module):
    """decode_step as a module. Everything that a step writes is an input, as torch.export demands."""

    def __init__(self, model, num_drafts):
        super().__init__()
        self.model = model
        self.num_drafts = num_drafts

    def forward(self, state, table, buffers):
        for cache, key, value in zip(self.model.caches, buffers[::2], buffers[1::2]):
            cache.key, cache.value = key, value
        decode_step(self.model, DecodeState(*state), self.num_drafts, table)


# -- CPU ---------------------------------------------------------------------------------------------------------------


def aot_compile(model, num_drafts, args):
    """Compile the step ahead of time, or load the program of an earlier run.

    Programs are kept in the cache folder of torch's compiler ($TORCHINDUCTOR_CACHE_DIR).
    """
    from torch._inductor.codecache import cache_dir  # the import makes the folder and takes a second

    # options of the compiler
    work = sum(p.nbytes for p in model.parameters()) * args[0][0].size(0) * (num_drafts + 1)
    large = work >= 2**25  # smaller steps end before a second thread wakes up
    options = {
        "freezing": True,  # weights are constants, laid out for the loops that read them
        "max_autotune": True,
        "max_autotune_gemm_backends": "CPP",  # matrix products as C++ loops instead of library calls
        "aot_inductor.allow_stack_allocation": True,  # saves a third of a step at n_embd=64
        "cpp.threads": torch.get_num_threads() if large else 1,
        "cpp.dynamic_threads": large,  # StepThreads sets their number
    }

    # load
    path = Path(cache_dir()) / f"decode-{program_key(model, num_drafts, args, options)}.pt2"
    trial_inputs = [x.clone() for x in torch.utils._pytree.tree_leaves(args) if x is not None]
    try:
        program = load_program(path, trial_inputs)
    except RuntimeError:  # there is none, or it is damaged: compile
        with announced():
            exported = torch.export.export(StepModule(model, num_drafts), tuple(args))
            sdpa = torch.ops.aten.scaled_dot_product_attention.default
            exported = exported.run_decompositions({sdpa: decomposed_sdpa})
            write_program(exported, path, options)
        program = load_program(path, trial_inputs)

    def start(state, table):
        inputs = [x for x in (*vars(state).values(), *(table or ()), *args[2]) if x is not None]
        return lambda: program.run(inputs)

    return start


def program_key(model, num_drafts, args, options):
    """Return a hash of everything that shapes the program: torch, chip, options, shapes, weights and source code."""
    shapes = [x if x is None else (x.shape, x.dtype) for x in torch.utils._pytree.tree_leaves(args)]
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), options, num_drafts, shapes, model.config)
    key = hashlib.sha256(repr(parts).encode())
    for weight in model.parameters():
        key.update(weight.detach().contiguous().view(torch.uint8).numpy())
    # the network, and every file beside this one: a step is traced through several of them
    for file in (Path(model_module.__file__), *sorted(Path(__file__).parent.glob("*.py"))):
        key.update(file.read_bytes())
    return key.hexdigest()[:32]


def write_program(exported, path, options):
    """Compile an exported step and write it to `path`, whole or not at all. Removes the oldest programs beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.pt2")
    # The first compilation in a process decides whether later ones get a C++ or a Python wrapper. A step compiled after
    # an ordinary torch.compile would be slower, so forget that decision.
    with suppress(AttributeError):
        torch._inductor.codegen.common.device_codegens.pop("cpu", None)
        torch._inductor.codegen.common.init_backend_registration.cache_clear()
    try:
        torch._inductor.aoti_compile_and_package(exported, package_path=str(partial), inductor_configs=options)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    programs = sorted(path.parent.glob("decode-*.pt2"), key=lambda file: file.stat().st_mtime)
    for old in programs[:-KEPT_PROGRAMS]:
        old.unlink(missing_ok=True)


def load_program(path, inputs):
    """Return the program in the file, after one run that loads it completely. Raises RuntimeError."""
    if not path.exists():
        raise RuntimeError(f"no program at {path}")
    program = torch._inductor.aoti_load_package(str(path)).loader
    program.run(inputs)
    path.touch()
    return program


def decomposed_sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Compute scaled_dot_product_attention from operations that the compiler fuses into loops.

    For a few queries the loops beat a call of the kernel: 60 us per step instead of 90 at 4 layers, 4 heads, 256 slots.
    """
    if enable_gqa:
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    score = (q[:, :, :, None] * k[:, :, None]).sum(-1) * q.size(-1) ** -0.5  # (B, nh, T, slots)
    score = score.masked_fill(~attn_mask, -1e30)
    weight = (score - score.amax(-1, keepdim=True)).exp()
    return (weight[..., None] * v[:, :, None]).sum(-2) / weight.sum(-1, keepdim=True)  # (B, nh, T, hs)


@contextmanager
def announced():
    """Say on stderr that a compilation begins and how long it took."""
    began = time.perf_counter()
    print("--compile: compiling the decode step, kept for the next run ...", file=sys.stderr, flush=True)
    yield
    print(f"--compile: done in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


# -- CUDA --------------------------------------------------------------------------------------------------------------


def capture_cuda_graph(model, num_drafts, args):
    """Compile the step for CUDA and capture it as a graph. The graph reads and writes a state of its own."""
    own = torch.utils._pytree.tree_map(lambda x: x if x is None else x.clone(), args[0])
    step = torch.compile(StepModule(model, num_drafts), fullgraph=True, dynamic=False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with announced(), torch.cuda.stream(side):
        for _ in range(3):  # compile and warm up, because a capture allows no compilation and no lazy initialization
            step(own, *args[1:])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(own, *args[1:])

    def start(state, table):
        pairs = [pair for pair in zip(own, vars(state).values()) if pair[0] is not None]

        def run():
            for mine, theirs in pairs:
                mine.copy_(theirs)
            graph.replay()
            for mine, theirs in pairs[:3]:  # tokens, end, cached
                theirs.copy_(mine)

        return run

    return start
