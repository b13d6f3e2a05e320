"""The compiled step: step.c, compiled for the shape of a model and bound to its weights.

The program holds the shape and no weights. A model of a known shape starts at once, whatever its weights are.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch
from torch.nn import functional as F

from kvgpt.decoding.ngrams import LOOK_UP_ORDER, MAX_ORDER
from kvgpt.decoding.sampling import gumbel_noise
from kvgpt.decoding.speculate import DecodeState
from model import eval_mode

SOURCE = Path(__file__).with_name("step.c")
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread"]
# Multiply-adds per step without guesses. For fewer per thread, waiting for another thread costs more than it saves.
WORK_PER_THREAD = 2**18
# A guess is fed if all guesses up to it are right with this probability at least. A further row of a small model costs
# half of the first one, because its weights stay in the cache of a core. For larger models a row costs less.
SMALL, MIN_CHANCE_SMALL, MIN_CHANCE = 2**18, 0.5, 0.15  # SMALL in parameters
# Seconds on one thread after another process has taken a core. A stall makes the pause 8 times as long, and a call
# without a stall halves it.
MIN_PAUSE, MAX_PAUSE = 0.03, 10.0


class CompileError(RuntimeError):
    """The step cannot be compiled or loaded here, or computes another network. The text is one line."""


def compile_step(model, num_drafts, table):
    """Compile the decode step for the model's shape, or load it, and give it the model's present weights.

    Returns bind(state), which empties the model's caches and returns run(max_steps). run appends tokens to the rows of
    `state` in up to max_steps steps, and returns the numbers of steps, guesses offered and guesses accepted.
    Raises CompileError.
    """
    weight = model.lm_head.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        held = f"{weight.dtype} on {weight.device.type}"
        raise CompileError(f"the compiled step computes in float32 on a CPU, and the model is in {held}")
    num_params = sum(p.numel() for p in model.parameters())
    library = load_library(shape_macros(model, MIN_CHANCE if num_params >= SMALL else MIN_CHANCE_SMALL))
    weights = Pointers(model_tensors(model, library.lanes()))
    tables = Pointers(table) if table else None
    caches, alone_until, pause = Pointers([]), 0.0, MIN_PAUSE

    def bind(state):
        nonlocal caches
        B = len(state.end)
        if not caches.tensors or len(caches.tensors[0]) != B:  # large buffers are kept, because making them takes long
            for block in model.transformer["h"]:
                block.attn.allocate_cache(B)
            caches = Pointers([x for cache in model.caches for x in (cache.key, cache.value)])
        model.clear_caches()
        for cache, key, value in zip(model.caches, caches.tensors[::2], caches.tensors[1::2]):
            cache.key, cache.value = key, value
        rows = Pointers(list(vars(state).values()))
        by_rows = B >= 8 * torch.get_num_threads()

        def run(max_steps, last_logits=None):
            nonlocal alone_until, pause
            threads = min(torch.get_num_threads(), max(1, num_params * B // WORK_PER_THREAD))
            if time.perf_counter() < alone_until and not by_rows:
                threads = 1
            counters = (ctypes.c_int64 * 3)()
            inputs = (weights.array, caches.array, rows.array, tables and tables.array)
            numbers = (B, threads, int(by_rows), max_steps, num_drafts)
            stalled = library.decode(*inputs, *numbers, counters, last_logits and ctypes.c_void_p(last_logits.array[0]))
            if stalled < 0:
                raise MemoryError("the compiled step needs more memory than there is")
            if stalled:  # wait longer each time, because a trial of several threads costs a time slice
                pause = min(8 * pause, MAX_PAUSE)
                alone_until = time.perf_counter() + pause
            elif threads > 1:
                pause = max(pause / 2, MIN_PAUSE)
            return list(counters)

        return run

    check_program(model, bind)
    return bind


class Pointers:
    """Addresses of tensors as C reads them, NULL for None. Keeps the tensors alive."""

    def __init__(self, tensors):
        self.tensors = [x if x is None else x.detach().contiguous() for x in tensors]
        addresses = [0 if x is None else x.data_ptr() for x in self.tensors]
        self.array = (ctypes.c_void_p * len(addresses))(*addresses)


# -- the program -------------------------------------------------------------------------------------------------------


def shape_macros(model, min_chance):
    """Return the macros of step.c for the shape of the model."""
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
    )


def load_library(macros):
    """Return step.c, compiled with these macros. Raises CompileError.

    The program is kept beside Python's own compiled files. Its name holds a hash of everything that shapes it, and a
    hash of its content.
    """
    command, target = find_compiler()
    command = [*command, *FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]
    folder, key = SOURCE.parent / "__pycache__", sha256(repr((command, target, SOURCE.read_bytes())).encode())
    for file in folder.glob(f"step-{key}-*.so"):
        with suppress(OSError):
            if file.stem.endswith(sha256(file.read_bytes())):  # a damaged program could do anything
                return ctypes.CDLL(str(file))

    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            made = Path(temporary) / "step.so"
            done = subprocess.run([*command, str(SOURCE), "-o", str(made), "-lm"], capture_output=True)
            if done.returncode:
                lines = done.stderr.decode("utf-8", "replace").splitlines()
                why = next((line.strip() for line in lines if "error" in line), f"exit code {done.returncode}")
                raise CompileError(f"{command[0]} cannot compile the decode step ({why[:200]})")
            program = made.read_bytes()
            library = ctypes.CDLL(str(made))
    except OSError as error:  # no folder for temporary files, or none that programs may run from
        raise CompileError(f"the decode step cannot be compiled or loaded ({error})") from None
    with suppress(OSError):  # a folder that cannot be written: compile again next time
        folder.mkdir(exist_ok=True)
        partial = folder / f"step-{key}.{os.getpid()}"
        partial.write_bytes(program)
        os.replace(partial, folder / f"step-{key}-{sha256(program)}.so")  # whole, as another process may be reading it
    print(f"--compile: compiled the decode step in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return library


def sha256(content):
    return hashlib.sha256(content).hexdigest()[:32]


@lru_cache
def find_compiler():
    """Return the command of a C compiler for this chip, and the macros that it defines, which name chip and version.

    $CC, if it is set, is the only one that is tried. Raises CompileError.
    """
    for name in [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]:
        for chip in ("-march=native", "-mcpu=native"):  # Clang on ARM knows the second
            command = [*name.split(), chip]
            try:
                target = subprocess.run([*command, "-dM", "-E", "-x", "c", os.devnull], capture_output=True)
            except OSError:
                break
            if target.returncode == 0:
                return command, target.stdout
    raise CompileError("no C compiler works here: install gcc or clang, or name one in $CC")


# -- the weights -------------------------------------------------------------------------------------------------------


def model_tensors(model, lanes):
    """Return the weights in the order of `Model` in step.c. Matrices are packed for vectors of `lanes` numbers."""
    net, layers = model.transformer, model.transformer["h"]
    wpe = net["wpe"].weight if "wpe" in net else None
    rope = (None, None) if model.rope is None else model.rope
    tensors = [net["wte"].weight, wpe, *rope, *linear(model.lm_head, lanes)]
    norms = [norm for block in layers for norm in (block.ln_1, block.ln_2)]
    for norm in [*norms, net["ln_f"]] if model.config.norm_first else [None, *norms]:
        tensors += affine(norm)
    for block in layers:
        attn, mlp = block.attn, block.mlp
        q_norm, k_norm = (attn.q_norm, attn.k_norm) if attn.qk_norm else (None, None)
        tensors += [*linear(attn.c_attn, lanes), *affine(q_norm), *affine(k_norm)]
        tensors += [x for layer in (attn.c_proj, mlp.c_fc, mlp.c_proj) for x in linear(layer, lanes)]
    return tensors


def affine(norm):
    return (None, None) if norm is None else (norm.weight, norm.bias)


def linear(layer, lanes):
    """Return the packed weight and the padded bias of a Linear layer."""
    N, K = layer.weight.shape
    pad = -N % lanes
    panels = F.pad(layer.weight.detach(), (0, 0, 0, pad)).view(-1, lanes, K).transpose(1, 2)  # (panels, K, lanes)
    return panels.contiguous(), None if layer.bias is None else F.pad(layer.bias.detach(), (0, pad))


@torch.no_grad()
def check_program(model, bind):
    """Generate a short text with the program. Raises CompileError unless `model` gives the same logits and tokens.

    step.c spells out the network of model.py once more, so an edit of model.py would otherwise go unnoticed.
    """
    block_size, V, seed = model.config.block_size, model.config.vocab_size, 1
    length, end = max(1, min(8, block_size // 2)), min(24, block_size + 1)
    tokens = torch.zeros(1, block_size + 1, dtype=torch.int64)
    tokens[0, :length] = torch.arange(length) % V
    numbers = [torch.tensor([n]) for n in (length, 0, end, length, 0)]
    state = DecodeState(tokens, *numbers, torch.tensor([seed, 0]), torch.tensor(1.0), None, None)
    last_logits = Pointers([torch.zeros(V)])
    bind(state)(end, last_logits)
    model.clear_caches()
    with eval_mode(model):
        logits = model(tokens[:, : end - 1])[0][0, length - 1 :]
    scores = logits + gumbel_noise(seed, torch.tensor([0]), torch.arange(end - length), V)[0]
    loss = scores.amax(1) - scores.gather(1, tokens[0, length:end, None])[:, 0]  # 0 where the pick is the same
    error = (logits[-1] - last_logits.tensors[0]).abs().max() / (1 + logits[-1].abs().max())
    if not bool((loss.max() < 1e-3) & (error < 1e-3)):  # NaN is not below
        raise CompileError(f"{SOURCE.name} computes another network than model.py")
