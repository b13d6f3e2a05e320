"""The step in C: step.c, compiled for the shape of a model, with its weights in the order that step.c reads.

The program depends on the shape and not on the weights, so we keep it beside Python's own compiled files, and the next
model of that shape starts at once.
"""

import ast
import ctypes
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import weakref
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch.nn import functional as F

import model as model_py
from kvgpt.cores import share_cores
from kvgpt.decoding.ngrams import LOOK_UP_ORDER, MAX_ORDER
from kvgpt.files import sha256
from kvgpt.quantize import BLOCK, quantize

SOURCE = Path(__file__).with_name("step.c")
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread"]
# Multiply-adds per thread, in a step without guesses. With fewer, waiting for a thread costs more than it saves.
WORK_PER_THREAD = 2**18
# We feed a guess only if it and all before it are right with at least this probability. In a small model, whose
# weights stay in the cache of a core, a further row costs half as much as the first, and in a larger one less.
SMALL, MIN_CHANCE_SMALL, MIN_CHANCE = 2**18, 0.5, 0.15  # SMALL in parameters
# From so many parameters on, the step reads the model's own weights and no packed copy. A step is then one read of the
# memory, which is as fast in either order.
LARGE = 2**25

# step.c is model.py once more, written in C. No comparison of numbers could promise that the two agree, because a
# difference may show only far into a text. So step.c belongs to one version of model.py, and after an edit we decode
# without it. When you have changed both, test_compile.py tells you the new hash.
MODEL_SHA256 = "04e568b1dc68e71ac1006adbbbcdeb5209edd24f7f1dfc7a7b437f13da8e466d"
LAYERS = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm, torch.nn.ModuleDict, torch.nn.ModuleList)


class CompileError(RuntimeError):
    """We cannot compile the step in C here, or it would compute another network. The text is one line."""


def compile_step(model, num_drafts, table, weights="float32"):
    """Compile the step for the model's shape, or load it, and bring the model's weights into its order.

    weights  "float32", or "int8" for a model of round_weights
    Returns bind(state), which makes a cache and returns two functions:
    run(max_steps, active)          appends tokens to the rows of `state`, of which `active` are below their limits, in
                                    up to max_steps steps; returns the numbers of steps, guesses offered and accepted
    copy_slots(first, rows, slots)  copies the first slots of the cache of a row to other rows
    Raises CompileError.
    """
    weight = model.lm_head.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        held = f"{weight.dtype} on {weight.device.type}"
        raise CompileError(f"the step in C runs on CPUs in float32, and this model is in {held}")
    check_source(model)
    config, num_params = model.config, sum(p.numel() for p in model.parameters())
    layout = int8_panels if weights == "int8" else rows if num_params >= LARGE else panels
    library = load_library(shape_macros(model, MIN_CHANCE if num_params >= SMALL else MIN_CHANCE_SMALL, layout))
    with share_cores(0):  # on one thread: torch's others would spin on afterwards, on cores that our own need now
        linear = partial(layout, lanes=library.lanes())
        tensors, tables = Pointers(model_tensors(model, linear)), Pointers(table) if table else None
    most_threads, lock = torch.get_num_threads(), threading.Lock()
    spare = []  # the caches of ended generations, used again because the pages of a new one take time
    pool = library.start_threads(most_threads)
    if not pool:
        raise CompileError("the system does not let us start the threads of the step in C")

    def bind(state):
        B = len(state.end)
        shape = (B, config.num_kv_heads, config.block_size, config.head_size)
        cache = spare.pop() if spare else None
        if not cache or cache.tensors[0].shape != shape:
            cache = Pointers([torch.empty(shape) for _ in range(2 * config.n_layer)])  # key and value of every layer
        fields = Pointers(list(vars(state).values()))

        def run(max_steps, active=B):
            by_rows = active >= 8 * most_threads
            threads = min(most_threads, max(1, num_params * active // WORK_PER_THREAD))
            counters = (ctypes.c_int64 * 3)()
            inputs = (tensors.array, cache.array, fields.array, tables and tables.array)
            with lock:  # one call at a time has the threads
                failed = library.decode(pool, *inputs, B, threads, int(by_rows), max_steps, num_drafts, counters)
            if failed:
                raise MemoryError("the step in C needs more memory than there is")
            return list(counters)

        def copy_slots(first, rows, slots):
            for keys in cache.tensors:  # or values
                keys[rows, :, :slots] = keys[first, :, :slots]

        weakref.finalize(run, spare.append, cache)
        return run, copy_slots

    weakref.finalize(bind, library.stop_threads, pool)
    return bind


class Pointers:
    """Addresses of tensors as C reads them, NULL for None. Keeps the tensors alive."""

    def __init__(self, tensors):
        self.tensors = [x if x is None else x.detach().contiguous() for x in tensors]
        addresses = [0 if x is None else x.data_ptr() for x in self.tensors]
        self.array = (ctypes.c_void_p * len(addresses))(*addresses)


# -- the model.py that step.c belongs to -------------------------------------------------------------------------------


def check_source(model):
    """Raise CompileError unless step.c belongs to the source of this model."""
    known = (model_py.GPT, model_py.Block, model_py.CausalSelfAttention, model_py.MLP, model_py.Head, *LAYERS)
    foreign = {type(module).__name__ for module in model.modules() if type(module) not in known}
    if foreign:
        raise CompileError(f"step.c cannot compute {min(foreign)}, which is not in model.py")
    if model_sha256() != MODEL_SHA256:
        raise CompileError("model.py has changed, and step.c still computes the old one")


@lru_cache
def model_sha256():
    """Return the hash of the lines of model.py, without comments, docstrings and empty lines."""
    source = Path(model_py.__file__).read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    # We use only the places of comments, because Python 3.12 divides an f-string into other tokens than 3.11.
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return sha256("\n".join(line.rstrip() for line in lines if line.strip()).encode())


# -- the program -------------------------------------------------------------------------------------------------------


def shape_macros(model, min_chance, layout):
    """Return the macros of step.c for the shape of the model. layout: rows, panels or int8_panels."""
    config = model.config
    return dict(
        N_LAYER=config.n_layer,
        N_HEAD=config.n_head,
        N_KV_HEAD=config.num_kv_heads,
        N_EMBD=config.n_embd,
        HIDDEN=model.transformer["h"][0].mlp.c_proj.in_features,
        VOCAB_SIZE=config.vocab_size,
        BLOCK_SIZE=config.block_size,
        GATED=int(config.activation == "swiglu"),
        GELU_TANH=int(config.activation == "gelu_tanh"),
        POST_LN=int(not config.norm_first),
        MAX_ORDER=MAX_ORDER,
        LOOK_UP_ORDER=LOOK_UP_ORDER,
        MIN_CHANCE=f"{min_chance}f",
        SHARED=int(layout is rows),
        INT8=int(layout is int8_panels),
        BLOCK=BLOCK,
    )


def load_library(macros):
    """Return step.c, compiled with these macros. Raises CompileError.

    Its file name has two hashes: one of all that shapes the program, by which we find it again, and one of its content,
    because a damaged program could do anything.
    """
    command, target = find_compiler()
    command = [*command, *FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]
    folder, key = SOURCE.parent / "__pycache__", sha256(repr((command, target, SOURCE.read_bytes())).encode())
    for file in folder.glob(f"step-{key}-*.so"):
        with suppress(OSError):
            if file.stem.endswith(sha256(file.read_bytes())):
                return open_library(file)

    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            made = Path(temporary) / "step.so"
            done = subprocess.run([*command, str(SOURCE), "-o", str(made), "-lm"], capture_output=True, timeout=120)
            if done.returncode:
                lines = done.stderr.decode("utf-8", "replace").splitlines()
                why = next((line.strip() for line in lines if "error" in line), f"exit code {done.returncode}")
                raise CompileError(f"{command[0]} cannot compile the step in C ({why[:200]})")
            program = made.read_bytes()
            library = open_library(made)
    except (OSError, subprocess.TimeoutExpired) as error:  # no folder that programs may run from, or a compiler hangs
        raise CompileError(f"the step in C cannot be compiled or loaded ({error})") from None
    with suppress(OSError):  # a folder that cannot be written: compile again next time
        folder.mkdir(exist_ok=True)
        partial = folder / f"step-{key}.{os.getpid()}"
        partial.write_bytes(program)
        os.replace(partial, folder / f"step-{key}-{sha256(program)}.so")  # whole, because another process may read it
    print(f"--compile: compiled the step in C in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return library


def open_library(file):
    library = ctypes.CDLL(str(file))
    library.start_threads.restype = ctypes.c_void_p  # an int would lose half of the address
    library.stop_threads.argtypes = [ctypes.c_void_p]
    library.decode.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 5 + [ctypes.c_void_p]
    return library


@lru_cache
def find_compiler():
    """Return the command of a C compiler for this chip, and the macros that it defines, which name chip and version.

    If $CC is set, we try no other. Raises CompileError.
    """
    for name in [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]:
        for chip in ("-march=native", "-mcpu=native"):  # Clang on ARM knows the second
            command = [*name.split(), chip]
            try:
                target = subprocess.run([*command, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, timeout=30)
            except (OSError, subprocess.TimeoutExpired):
                break
            if target.returncode == 0:
                return command, target.stdout
    raise CompileError("no C compiler works here: install gcc or clang, or name one in $CC")


# -- the weights -------------------------------------------------------------------------------------------------------


def model_tensors(model, linear):
    """Return the weights in the order of `Model` in step.c. linear: a layout for the Linear layers, see below."""
    net, layers = model.transformer, model.transformer["h"]
    wpe = net["wpe"].weight if "wpe" in net else None
    rope = (None, None) if model.rope is None else model.rope
    tensors = [net["wte"].weight, wpe, *rope, *linear(model.lm_head)]
    norms = [norm for block in layers for norm in (block.ln_1, block.ln_2)]
    for norm in [*norms, net["ln_f"]] if model.config.norm_first else [None, *norms]:
        tensors += affine(norm)
    for block in layers:
        attn, mlp = block.attn, block.mlp
        q_norm, k_norm = (attn.q_norm, attn.k_norm) if attn.qk_norm else (None, None)
        tensors += [*linear(attn.c_attn), *affine(q_norm), *affine(k_norm)]
        tensors += [x for layer in (attn.c_proj, mlp.c_fc, mlp.c_proj) for x in linear(layer)]
    return tensors


def affine(norm):
    return (norm.weight, norm.bias) if norm else (None, None)


# A layout returns the weight and the bias of a Linear layer as step.c reads them: see Weight there.


def rows(layer, lanes):
    return layer.weight, layer.bias


def panels(layer, lanes):
    weight = whole_panels(layer.weight.detach(), lanes).transpose(1, 2)  # (panels, K, lanes)
    return weight.clone(memory_format=torch.contiguous_format), whole_bias(layer, lanes)


def int8_panels(layer, lanes):
    def pack(rows):
        numbers, scales = quantize(rows)
        scales = whole_panels(scales, lanes).transpose(1, 2).contiguous().view(torch.int8)
        words = whole_panels(numbers, lanes).unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4)
        return torch.cat((scales, words.flatten(2)), 2)  # (panels, blocks, bytes of a block)

    pieces = layer.weight.detach().split(4096)  # because this takes a few times their memory
    return torch.cat([pack(rows) for rows in pieces]), whole_bias(layer, lanes)


def whole_panels(x, lanes):
    """Return x `(N, ...)` as `(panels, lanes, ...)`, with zeros after it that fill the last panel."""
    padding = [0, 0] * (x.dim() - 1) + [0, -len(x) % lanes]
    return F.pad(x, padding).unflatten(0, (-1, lanes))


def whole_bias(layer, lanes):
    return None if layer.bias is None else whole_panels(layer.bias.detach(), lanes)
