"""The step in C: step.c, compiled for the shape of a model, with its weights in the structures that step.c reads.

The program depends on the shape and not on the weights, so we keep it beside Python's own compiled files, and the next
model of that shape starts at once.
"""

import ast
import ctypes
import inspect
import io
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tokenize
import types
import weakref
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import model as model_py
from kvgpt.decoding.ngrams import LOOK_UP_ORDER, MAX_ORDER
from kvgpt.decoding.quantize import BLOCK, quantize
from kvgpt.files import sha256

SOURCE = Path(__file__).with_name("step.c")
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared", "-pthread"]
# Multiply-adds per thread, in a step without guesses. With fewer, waiting for a thread costs more than it saves.
WORK_PER_THREAD = 2**18
# We feed a guess only if it and all before it are right with at least this probability. In a small model, whose
# weights stay in the cache of a core, a further row costs half as much as the first, and in a larger one less.
SMALL, MIN_CHANCE_SMALL, MIN_CHANCE = 2**18, 0.5, 0.15  # SMALL in parameters
# From this number of parameters on, the step reads the model's own weights and no packed copy. A step is then one read
# of the memory, which is as fast in either order.
LARGE = 2**25

# step.c is these functions of model.py rewritten in C. No comparison of numbers could promise that the two agree,
# because a difference may show only far into a text. So step.c belongs to one version of them, and after an edit we
# decode without it. When you have changed both, test_compile.py tells you the new hash.
REPEATED = (
    "KVCache.update",
    "KVCache.mask",
    "rotate",
    "CausalSelfAttention.project",
    "CausalSelfAttention.forward",
    "MLP.forward",
    "Block.forward",
    "GPT.hidden_states",
    "GPT.unembed",
    "sample_token",
    "gumbel_noise",
)
MODEL_SHA256 = "b4a9c3a5779afc6d816e8ca0aa9c3495cccc934e9ad4afc6b42edb3cf56fba83"
LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleDict, nn.ModuleList)


class CompileError(RuntimeError):
    """We cannot compile the step in C here, or it would compute a different network. The text is one line."""


def compile_step(model, num_drafts, table, weights="float32"):
    """Compile the step for the model's shape, or load it, and bring the model's weights into its order.

    weights  "float32", or "int8" for a model of round_weights
    Returns bind(state), which makes a cache and returns two functions:
    run(max_steps, active)          appends tokens to the rows of `state`, of which `active` are below their limits, in
                                    up to max_steps steps; returns the numbers of steps, guesses offered and accepted
    copy_slots(first, rows, slots)  copies the first slots of the cache of a row to other rows

    Below LARGE parameters we copy all weights, so later changes of the model have no effect. A larger model is read
    where it lies, apart from matrices in int8. Then `run` raises RuntimeError if a parameter has changed since. It
    cannot notice a change through `.data` or NumPy, of which PyTorch keeps no record.
    Raises CompileError.
    """
    check_model(model)
    config, num_params = model.config, sum(p.numel() for p in model.parameters())
    large = num_params >= LARGE
    layout = int8_panels if weights == "int8" else rows if large else panels
    library = load_library(shape_macros(model, MIN_CHANCE if num_params >= SMALL else MIN_CHANCE_SMALL, layout))
    struct = model_struct(config.n_layer)
    check_sizes(library, struct, Cache, State, Table)
    with one_thread():
        net = pack_weights(model, struct, partial(layout, lanes=library.lanes()), copy=not large)
    table = Table(logits=table[0], after=table[1]) if table else None
    in_use = list(model.parameters()) if large else []
    before = versions(in_use)
    pool = Pool(library, torch.get_num_threads())
    spare = []  # the caches of ended generations, used again because the pages of a new one take time

    def bind(state):
        B = len(state.end)
        shape = (B, config.num_kv_heads, config.block_size, config.head_size)
        cache = spare.pop() if spare else None
        if not cache or cache[0].shape != shape:
            cache = [torch.empty(shape) for _ in range(2 * config.n_layer)]  # key and value of every layer
        layers = as_c([Cache(key=key, value=value) for key, value in zip(cache[::2], cache[1::2])])
        inputs = (net, layers, State(**vars(state)), table)

        def run(max_steps, active=B):
            nonlocal pool
            if versions(in_use) != before:
                raise RuntimeError("the weights have changed since this Decoder was made: make a new Decoder")
            if pool.pid != os.getpid():  # we are in a child of os.fork(), which has none of its parent's threads
                pool = Pool(library, pool.threads)
            by_rows = active >= 8 * pool.threads
            threads = min(pool.threads, max(1, num_params * active // WORK_PER_THREAD))
            return pool.decode(*inputs, B, threads, by_rows, max_steps, num_drafts)

        def copy_slots(first, rows, slots):
            for keys in cache:  # or values
                keys[rows, :, :slots] = keys[first, :, :slots]

        weakref.finalize(run, spare.append, cache)
        return run, copy_slots

    return bind


@contextmanager
def one_thread():
    """Run torch on one thread inside the block, because its others would spin on, on cores that our own need next."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def versions(tensors):
    """Return what is different after somebody has written to one of the tensors or has moved it."""
    return [(x.data_ptr(), None if x.is_inference() else x._version) for x in tensors]


# -- the threads -------------------------------------------------------------------------------------------------------


class Pool:
    """The threads of a Decoder in this process. They end with it or with the interpreter, whichever comes first.

    Raises CompileError if the system does not let us start them.
    """

    def __init__(self, library, threads):
        self.library, self.threads, self.pid, self.lock = library, threads, os.getpid(), threading.Lock()
        self.address = library.start_threads(threads)
        if not self.address:
            raise CompileError("the system does not let us start the threads of the step in C")
        weakref.finalize(self, end_threads, library, self.address, self.lock, self.pid)

    def decode(self, net, cache, state, table, B, threads, by_rows, max_steps, num_drafts):
        """Call `decode` of step.c. Returns the numbers of steps, guesses offered and guesses accepted."""
        structs = (self.address, ctypes.byref(net), cache, ctypes.byref(state), table and ctypes.byref(table))
        counters = (ctypes.c_int64 * 3)()
        with self.lock:  # one call at a time has the threads
            failed = self.library.decode(*structs, B, threads, int(by_rows), max_steps, num_drafts, counters)
        if failed:
            raise MemoryError("the step in C needs more memory than there is")
        return list(counters)


def end_threads(library, address, lock, pid):
    """End the threads after the call that uses them, if any. A daemon thread may call while the interpreter ends."""
    if pid == os.getpid():  # a child of os.fork() has no such threads
        lock.acquire()  # and keep it: a later call would have no threads, so it waits until the process is gone
        library.stop_threads(address)


# -- the structures that step.c reads: the same names in the same order ------------------------------------------------


class Struct(ctypes.Structure):
    """A structure in C, made from the values of all its fields: see as_c. It keeps the tensors among them alive."""

    def __init__(self, **values):
        names = [name for name, _ in self._fields_]
        if sorted(names) != sorted(values):  # ctypes itself takes any names
            raise TypeError(f"{type(self).__name__} has the fields {names}, not {list(values)}")
        super().__init__(**{name: as_c(x) for name, x in values.items()})
        self.values = values


def as_c(x):
    """Return a tensor's address, or a list of Structs as an array. A Struct stays one, and None is NULL."""
    if isinstance(x, torch.Tensor):
        if not x.is_contiguous():
            raise TypeError("step.c knows no strides: the tensor must be contiguous")
        return x.data_ptr()
    return (type(x[0]) * len(x))(*x) if isinstance(x, list) else x


def addresses(names):
    return [(name, ctypes.c_void_p) for name in names.split()]


class Params(Struct):
    _fields_ = addresses("weight bias")


class Layer(Struct):
    _fields_ = [(name, Params) for name in "c_attn q_norm k_norm attn_proj c_fc mlp_proj".split()]


class Cache(Struct):
    _fields_ = addresses("key value")


class State(Struct):
    _fields_ = addresses("tokens end cached limit first_new sample seed temperature top_k top_p")


class Table(Struct):
    _fields_ = addresses("logits after")


@lru_cache
def model_struct(n_layer):
    class Model(Struct):
        _fields_ = [
            *addresses("wte wpe cos sin"),
            ("lm_head", Params),
            ("norm", Params * (2 * n_layer + 1)),
            ("layer", Layer * n_layer),
        ]

    return Model


def check_sizes(library, *structs):
    """Raise TypeError if our structures have other sizes than those of step.c, which would read beyond them."""
    theirs = list((ctypes.c_size_t * len(structs)).in_dll(library, "struct_sizes"))
    for struct, size in zip(structs, theirs):
        if ctypes.sizeof(struct) != size:
            raise TypeError(f"{struct.__name__} has {ctypes.sizeof(struct)} bytes in compile.py and {size} in step.c")


# -- the model.py that step.c belongs to -------------------------------------------------------------------------------


def check_model(model):
    """Raise CompileError unless step.c computes what this model computes. pack_weights checks the shapes."""
    config, blocks = model.config, model.transformer["h"]
    for p in model.parameters():
        if p.device.type != "cpu" or p.dtype != torch.float32:
            held = f"{p.dtype} on {p.device.type}"
            raise CompileError(f"the step in C runs on CPUs in float32, and this model is in {held}")
    check_modules(model)
    if len(blocks) != config.n_layer:
        raise CompileError(f"the model has {len(blocks)} layers, and its config says n_layer={config.n_layer}")
    heads = (config.n_head, config.num_kv_heads, config.head_size, config.qk_norm)
    mlp = (config.activation == "swiglu", "tanh" if config.activation == "gelu_tanh" else "none")
    for block in blocks:
        attn = block.attn
        made = (attn.n_head, attn.n_kv_head, attn.head_size, attn.qk_norm, block.mlp.gated, block.mlp.approximate)
        if made != heads + mlp or block.norm_first != config.norm_first:
            raise CompileError("the model has a layer that does not fit its config")
    if model_sha256() != MODEL_SHA256:
        raise CompileError("model.py has changed, and step.c still computes the old one")


def check_modules(model):
    """Raise CompileError for what no source tells: foreign layers, their settings, hooks and patched methods."""
    known = (model_py.GPT, model_py.Block, model_py.CausalSelfAttention, model_py.MLP, model_py.Head, *LAYERS)
    hooks = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    for module in model.modules():
        kind = type(module)
        if kind not in known:
            raise CompileError(f"step.c cannot compute {kind.__name__}, which is not in model.py")
        methods = [name for name in vars(module) if callable(getattr(kind, name, None))]
        if methods:
            raise CompileError(f"step.c cannot compute a {kind.__name__} with a {methods[0]} of its own")
        if kind is nn.LayerNorm and (module.eps != 1e-5 or module.weight is None):
            raise CompileError(f"step.c cannot compute {module}: it needs eps=1e-05 and a weight")
        if kind is nn.Embedding and module.max_norm is not None:
            raise CompileError(f"step.c cannot compute {module}: it knows no max_norm")
        hooks += [module._forward_hooks, module._forward_pre_hooks]
    if any(hooks):
        raise CompileError("step.c cannot compute a model with forward hooks")
    for kind, name in ((nn.Module, "__call__"), *((kind, "forward") for kind in LAYERS[:3])):
        if not code_of(getattr(kind, name)).co_filename.startswith(os.path.dirname(torch.__file__)):
            raise CompileError(f"step.c cannot compute {kind.__name__}, because its {name} is not PyTorch's")


def code_of(function):
    """Return the code that runs when somebody calls `function`. Raises CompileError if it is not written in Python."""
    if not isinstance(function, types.FunctionType):
        raise CompileError(f"step.c cannot compute {function!r:.100}, which has no source")
    return function.__code__  # that of a wrapper, too, where inspect.getsource shows what it wraps


def model_sha256():
    """Return the hash of what REPEATED names at this moment. Raises CompileError if some of it has no source."""
    return sha256("\n".join(source_lines(attrgetter(name)(model_py)) for name in REPEATED).encode())


def source_lines(function):
    """Return the source of a function without comments, docstrings and empty lines. Raises CompileError."""
    try:
        source = textwrap.dedent(inspect.getsource(code_of(function)))
        tree, tokens = ast.parse(source), list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, SyntaxError, tokenize.TokenError):
        raise CompileError(f"step.c cannot compute {function.__qualname__}, whose source is unknown") from None
    lines = source.split("\n")
    # We use only the places of comments, because Python 3.12 divides an f-string into other tokens than 3.11.
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    lines = [line.encode() for line in lines]  # because ast counts bytes
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            doc = node.body[0]
            rest = lines[doc.lineno - 1][: doc.col_offset] + lines[doc.end_lineno - 1][doc.end_col_offset :]
            lines[doc.lineno - 1 : doc.end_lineno] = [rest] + [b""] * (doc.end_lineno - doc.lineno)
    return b"\n".join(line.rstrip() for line in lines if line.strip()).decode()


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
    sources = [file.read_bytes() for file in sorted(SOURCE.parent.glob("*.[ch]"))]  # step.c and what it includes
    folder, key = SOURCE.parent / "__pycache__", sha256(repr((command, target, sources)).encode())
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


def pack_weights(model, struct, layout, copy):
    """Return the weights as `struct`, the Model of step.c.

    layout  for the Linear layers, see below
    copy    whether to copy all else, too
    Raises CompileError for a weight whose shape does not fit the config.
    """
    net, blocks, config = model.transformer, model.transformer["h"], model.config
    C, hs, qk_norm, hidden = config.n_embd, config.head_size, config.qk_norm, blocks[0].mlp.c_proj.in_features

    def check(x, *shape):
        if x is not None and x.shape != shape:
            raise CompileError(f"the model has a weight of {tuple(x.shape)}, and its config says {shape}")

    def own(x, *shape):
        check(x, *shape)
        if x is None:
            return None
        return x.detach().clone(memory_format=torch.contiguous_format) if copy else x.detach().contiguous()

    def linear(layer, N, K):
        check(layer.weight, N, K)
        check(layer.bias, N)
        weight, bias = layout(layer)
        return Params(weight=weight, bias=bias)

    def norm(layer, n):
        return Params(weight=own(layer.weight, n), bias=own(layer.bias, n))

    identity = Params(weight=None, bias=None)
    norms = [norm(layer, C) for block in blocks for layer in (block.ln_1, block.ln_2)]
    cos, sin = (None, None) if model.rope is None else model.rope
    return struct(
        wte=own(net["wte"].weight, config.vocab_size, C),
        wpe=own(net["wpe"].weight, config.block_size, C) if config.pos_emb == "learned" else None,
        cos=own(cos, config.block_size, hs),
        sin=own(sin, config.block_size, hs),
        lm_head=linear(model.lm_head, config.vocab_size, C),
        norm=[*norms, norm(net["ln_f"], C)] if config.norm_first else [identity, *norms],
        layer=[
            Layer(
                c_attn=linear(block.attn.c_attn, C + 2 * config.num_kv_heads * hs, C),
                q_norm=norm(block.attn.q_norm, hs) if qk_norm else identity,
                k_norm=norm(block.attn.k_norm, hs) if qk_norm else identity,
                attn_proj=linear(block.attn.c_proj, C, C),
                c_fc=linear(block.mlp.c_fc, 2 * hidden if config.activation == "swiglu" else hidden, C),
                mlp_proj=linear(block.mlp.c_proj, C, hidden),
            )
            for block in blocks
        ],
    )


# A layout returns the weight and the bias of a Linear layer as step.c reads them: see Weight there.


def rows(layer, lanes):
    return layer.weight.detach().contiguous(), None if layer.bias is None else layer.bias.detach()


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
