"""The C backend: compiles step.c for the shape of a model, and packs its weights into the structures it reads.

The program depends on the shape and not on the weights. We keep it next to Python's own compiled files, so the next
model of the same shape starts at once.
"""

import ctypes
import hashlib
import inspect
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
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
from extras.decoding.ngrams import LOOK_UP_ORDER, MAX_ORDER
from extras.decoding.quantize import BLOCK, quantize

SOURCE = Path(__file__).with_name("step.c")
# A DLL linked with -static does not need those of MinGW.
SUFFIX, LINK = (".dll", "-static") if os.name == "nt" else (".so", "-fPIC")
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-pthread", LINK]
# GCC assumes that Windows aligns the stack for AVX, which crashes (GCC bug 54412). Its assembler can repair that.
UNALIGNED = "-Wa,-muse-unaligned-vector-move"
# Multiply-adds per thread in a step without draft tokens. Below this, waiting for a thread costs more than it saves.
WORK_PER_THREAD = 2**18
# We feed a draft token only if it and all before it are accepted with at least this probability. In a small model,
# whose weights stay in the cache of a core, each further row costs half as much as the first. In a larger one it costs
# less.
SMALL, MIN_CHANCE_SMALL, MIN_CHANCE = 2**18, 0.5, 0.15  # SMALL in parameters
# step.c is these functions of model.py rewritten in C. Comparing outputs could not prove that the two agree, because a
# difference may show only late in the text. So step.c belongs to one version of each, whose hash stands here, and if
# one has changed we decode in PyTorch. Once you have changed step.c to match, put in the hash that the message names.
REPEATED = {
    "KVCache.update": "1704ba83d2f34bc7",
    "KVCache.mask": "143f41c439fa9f92",
    "rotate": "089791afc3d00f1e",
    "CausalSelfAttention.project": "e37a9096b14542d1",
    "CausalSelfAttention.forward": "31eb1fd24097b1af",
    "MLP.forward": "c5f248b683751570",
    "Block.forward": "ef337e27c86568bd",
    "GPT.hidden_states": "b8796858ef6a6288",
    "GPT.unembed": "20fc10ad27a08b73",
    "GPT.next_logits": "604802c08f98e48c",
    "sample_token": "757f891b8e700524",
    "keep_top_k": "bffcfd1765cc076f",
    "keep_top_p": "73f3853d24614a2d",
    "gumbel_noise": "af09225b140912fd",
}
LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleDict, nn.ModuleList)


class CompileError(RuntimeError):
    """The C backend does not compile here, or would compute a different network. The message is one line."""


class NotHereError(CompileError):
    """It needs float32, a CPU and a C compiler."""


def compile_step(model, num_drafts, table, weights="float32"):
    """Compile or load the step for the model's shape, and pack the model's weights for it.

    weights  "float32", or "int8" for a model from round_weights
    Returns bind(state), which makes a cache and returns two functions:
    run(max_steps, active)          runs up to max_steps steps, each of which appends tokens to the rows of `state`.
                                    `active` is the number of rows below their limits. Returns how many steps ran, and
                                    how many draft tokens were offered and accepted
    copy_slots(first, rows, slots)  copies the first slots of one row's cache to other rows

    We copy all weights, so later changes to the model have no effect. Raises CompileError.
    """
    check_model(model)
    config, num_params = model.config, sum(p.numel() for p in model.parameters())
    layout = int8_panels if weights == "int8" else panels
    library = load_library(shape_macros(model, MIN_CHANCE if num_params >= SMALL else MIN_CHANCE_SMALL, layout))
    struct = model_struct(config.n_layer)
    check_sizes(library, struct, Cache, State, Table)
    with one_thread():
        net = pack_weights(model, struct, partial(layout, lanes=library.lanes()))
    table = Table(logits=table[0], after=table[1]) if table else None
    pool = Pool(library, torch.get_num_threads())
    spare = []  # caches of finished generations, reused because touching the pages of a new one takes time

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
            if pool.pid != os.getpid():  # we are in a child of os.fork(), which has none of its parent's threads
                pool = Pool(library, pool.threads)
            by_rows = active >= 8 * pool.threads
            threads = min(pool.threads, max(1, num_params * active // WORK_PER_THREAD))
            return pool.run_steps(*inputs, B, threads, by_rows, max_steps, num_drafts)

        def copy_slots(first, rows, slots):
            for keys in cache:  # or values
                keys[rows, :, :slots] = keys[first, :, :slots]

        weakref.finalize(run, spare.append, cache)
        return run, copy_slots

    return bind


@contextmanager
def one_thread():
    """Run torch on one thread inside the block. Its other threads would keep spinning on cores that ours need next."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- the threads -------------------------------------------------------------------------------------------------------


class Pool:
    """The threads of a Decoder in this process. They end with it or with the interpreter, whichever comes first.

    Raises CompileError if the system does not let us start them.
    """

    def __init__(self, library, threads):
        self.library, self.threads, self.pid, self.lock = library, threads, os.getpid(), threading.Lock()
        self.address = library.start_threads(threads)
        if not self.address:
            raise CompileError("the system does not let us start the threads of the C backend")
        weakref.finalize(self, end_threads, library, self.address, self.lock, self.pid)

    def run_steps(self, net, cache, state, table, B, threads, by_rows, max_steps, num_drafts):
        """Call `run_steps` of step.c. Returns the numbers of steps, and of draft tokens offered and accepted."""
        structs = (self.address, ctypes.byref(net), cache, ctypes.byref(state), table and ctypes.byref(table))
        counters = (ctypes.c_int64 * 3)()
        with self.lock:  # the threads serve one call at a time
            failed = self.library.run_steps(*structs, B, threads, int(by_rows), max_steps, num_drafts, counters)
        if failed:
            raise MemoryError("the C backend ran out of memory")
        return list(counters)


def end_threads(library, address, lock, pid):
    """End the threads once no call uses them. A daemon thread may still be in a call while the interpreter exits."""
    if pid == os.getpid():  # a child of os.fork() has no such threads
        lock.acquire()  # and never release it: a later call would find no threads, so it waits until the process exits
        library.stop_threads(address)


# -- the structures that step.c reads: the same names in the same order ------------------------------------------------


class Struct(ctypes.Structure):
    """A structure in C, made from the values of all its fields: see as_c. Keeps the tensors among them alive."""

    def __init__(self, **values):
        names = [name for name, _ in self._fields_]
        if sorted(names) != sorted(values):  # ctypes itself accepts any names
            raise TypeError(f"{type(self).__name__} has the fields {names}, not {list(values)}")
        super().__init__(**{name: as_c(x) for name, x in values.items()})
        self.values = values


def as_c(x):
    """Return the address of a tensor, an array for a list of Structs, and anything else unchanged. None is NULL."""
    if isinstance(x, torch.Tensor):
        if not x.is_contiguous():
            raise TypeError("step.c does not know strides: the tensor must be contiguous")
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
    """Raise TypeError if a structure differs in size from its counterpart in step.c, which would read past its end."""
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
            found = f"{p.dtype} on {p.device.type}"
            raise NotHereError(f"the C backend runs in float32 on the CPU, and this model is in {found}")
    for name, expected in REPEATED.items():
        found = source_hash(attrgetter(name)(model_py))
        if found != expected:
            raise CompileError(
                f"{name} in model.py has changed, and step.c computes the old version (once step.c computes the new "
                f"one, its hash in compile.py is {found})"
            )
    check_modules(model)
    if len(blocks) != config.n_layer:
        raise CompileError(f"the model has {len(blocks)} layers, but its config says n_layer={config.n_layer}")
    heads = (config.n_head, config.num_kv_heads, config.head_size, config.qk_norm)
    mlp = (config.activation == "swiglu", "tanh" if config.activation == "gelu_tanh" else "none")
    for block in blocks:
        attn = block.attn
        made = (attn.n_head, attn.n_kv_head, attn.head_size, attn.qk_norm, block.mlp.gated, block.mlp.approximate)
        if made != heads + mlp or block.norm_first != config.norm_first:
            raise CompileError("the model has a layer that does not fit its config")


def check_modules(model):
    """Raise CompileError for what the source does not show: foreign layers, their settings, hooks, patched methods."""
    known = (model_py.GPT, model_py.Block, model_py.CausalSelfAttention, model_py.MLP, model_py.Head, *LAYERS)
    hooks = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    for module in model.modules():
        kind = type(module)
        if kind not in known:
            raise CompileError(f"step.c cannot compute {kind.__name__}, which is not in model.py")
        methods = [name for name in vars(module) if callable(getattr(kind, name, None))]
        if methods:
            raise CompileError(f"step.c cannot compute a {kind.__name__} with a patched {methods[0]}")
        if kind is nn.LayerNorm and (module.eps != 1e-5 or module.weight is None):
            raise CompileError(f"step.c cannot compute {module}: it needs eps=1e-05 and a weight")
        if kind is nn.Embedding and module.max_norm is not None:
            raise CompileError(f"step.c cannot compute {module}: it does not implement max_norm")
        hooks += [module._forward_hooks, module._forward_pre_hooks]
    if any(hooks):
        raise CompileError("step.c cannot compute a model with forward hooks")
    for kind, name in ((nn.Module, "__call__"), *((kind, "forward") for kind in LAYERS[:3])):
        if not from_torch(code_of(getattr(kind, name))):
            raise CompileError(f"step.c cannot compute {kind.__name__}, because its {name} is not PyTorch's")


def from_torch(code):
    return code.co_filename.startswith(os.path.dirname(torch.__file__))


def code_of(function):
    """Return the code that a call of `function` runs. Raises CompileError if it is not written in Python."""
    if not isinstance(function, types.FunctionType):
        raise CompileError(f"step.c cannot compute {function!r:.100}, which has no source")
    if from_torch(function.__code__) and hasattr(function, "__wrapped__"):  # by torch.inference_mode
        return code_of(function.__wrapped__)
    return function.__code__  # a wrapper's own code, while inspect.getsource shows what it wraps


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def source_hash(function):
    """Return a hash of the source of a function. Raises CompileError if it has none."""
    try:
        return sha256(inspect.getsource(code_of(function)).encode())[:16]
    except OSError:
        raise CompileError(f"step.c cannot compute {function.__qualname__}, whose source is unknown") from None


# -- the program -------------------------------------------------------------------------------------------------------


def shape_macros(model, min_chance, layout):
    """Return the macros that tell step.c the shape of the model. layout: panels or int8_panels."""
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
        INT8=int(layout is int8_panels),
        BLOCK=BLOCK,
    )


def load_library(macros):
    """Return step.c, compiled with these macros. Raises CompileError.

    The file name contains two hashes. We find the program by the hash of everything that shapes it. The hash of its
    content shows that it is whole, because a damaged program could do anything.
    """
    commands, target = find_compiler()
    flags = [*FLAGS, *(f"-D{name}={value}" for name, value in macros.items())]
    sources = [file.read_bytes() for file in sorted(SOURCE.parent.glob("*.[ch]"))]  # step.c and what it includes
    folder, key = SOURCE.parent / "__pycache__", sha256(repr((commands, target, flags, sources)).encode())
    for file in folder.glob(f"step-{key}-*{SUFFIX}"):
        with suppress(OSError):
            if file.stem.endswith(sha256(file.read_bytes())):
                return open_library(file)

    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # Windows keeps what is loaded
            made = Path(temporary) / f"step{SUFFIX}"
            for command in commands:
                command = [*command, *flags, str(SOURCE), "-o", str(made), "-lm"]
                done = subprocess.run(command, capture_output=True, timeout=120)
                if done.returncode == 0:
                    break
            else:
                lines = done.stderr.decode("utf-8", "replace").splitlines()
                why = next((line.strip() for line in lines if "error" in line.lower()), f"exit code {done.returncode}")
                raise CompileError(f"{' '.join(commands[-1])} cannot compile the C backend ({why[:200]})")
            program = made.read_bytes()
            library = open_library(made)
    except (OSError, subprocess.TimeoutExpired) as error:  # no program may run from that folder, or the compiler hangs
        raise NotHereError(f"the C backend cannot be compiled or loaded ({error})") from None
    with suppress(OSError):  # if the folder cannot be written, we compile again next time
        folder.mkdir(exist_ok=True)
        partial = folder / f"step-{key}.{os.getpid()}"
        partial.write_bytes(program)
        os.replace(partial, folder / f"step-{key}-{sha256(program)}{SUFFIX}")  # whole, as another process may read it
    print(f"--compile: compiled the C backend in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return library


def open_library(file):
    library = ctypes.CDLL(str(file))
    library.start_threads.restype = ctypes.c_void_p  # an int would lose half of the address
    library.stop_threads.argtypes = [ctypes.c_void_p]
    library.run_steps.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 5 + [ctypes.c_void_p]
    return library


@lru_cache
def find_compiler():
    """Return the commands of a C compiler, for this chip and for any, and the macros that identify chip and version.

    A compiler may accept the chip while its assembler does not, so load_library tries both commands. If $CC is set, we
    try no other compiler. Raises CompileError.
    """
    cc = os.environ.get("CC")
    names = [cc.split()] if cc else [["cc"], ["gcc"], ["clang"], [sys.executable, "-m", "ziglang", "cc"]]
    for name in names:
        for chip in (["-march=native"], ["-mcpu=native"], []):  # Clang on ARM knows the second, GCC on RISC-V neither
            command = [*name, *chip]
            try:
                target = subprocess.run([*command, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, timeout=30)
            except (OSError, subprocess.TimeoutExpired):
                break
            if target.returncode == 0:
                if b"__MINGW32__" in target.stdout and b"__clang__" not in target.stdout:
                    command.append(UNALIGNED)
                return [command, name], target.stdout
    raise NotHereError("no C compiler works here: install gcc or clang, or name one in $CC")


# -- the weights -------------------------------------------------------------------------------------------------------


def pack_weights(model, struct, layout):
    """Return the weights as `struct`, the Model of step.c. layout: for the Linear layers, see below.

    Raises CompileError for a weight whose shape does not fit the config.
    """
    net, blocks, config = model.transformer, model.transformer["h"], model.config
    C, hs, qk_norm, hidden = config.n_embd, config.head_size, config.qk_norm, blocks[0].mlp.c_proj.in_features

    def check(x, *shape):
        if x is not None and x.shape != shape:
            raise CompileError(f"the model has a weight of shape {tuple(x.shape)}, but its config says {shape}")

    # more than enough: tied weights become two matrices, and zeros fill the last panel of each
    tables = () if model.rope is None else model.rope
    place = huge_pages(4 * sum(tensor.nbytes for tensor in (*model.parameters(), *tables)) + 2**24)

    def own(x, *shape):
        check(x, *shape)
        return None if x is None else place(x.detach())

    def linear(layer, N, K):
        check(layer.weight, N, K)
        check(layer.bias, N)
        weight, bias = layout(layer)
        return Params(weight=place(weight), bias=None if bias is None else place(bias))

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


def huge_pages(size):
    """Return place(tensor), which copies tensors into `size` bytes of memory, one after the other.

    On Linux the memory has pages of 2 MB, which the chip looks up faster. Pages that nobody writes to cost nothing.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return lambda tensor: tensor.clone(memory_format=torch.contiguous_format)
    memory, end = mmap.mmap(-1, size + 2**21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0
    memory.madvise(mmap.MADV_HUGEPAGE)

    def place(tensor):
        nonlocal end
        copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=end).view(tensor.shape)
        end += -(-tensor.nbytes // 64) * 64  # a line of the cache
        return copy.copy_(tensor)

    return place


# A layout returns the weight and the bias of a Linear layer as step.c reads them; step.c describes both kinds.


def panels(layer, lanes):
    weight = whole_panels(layer.weight.detach(), lanes).transpose(1, 2)  # (panels, K, lanes)
    return weight, whole_bias(layer, lanes)


def int8_panels(layer, lanes):
    def pack(rows):
        numbers, scales = quantize(rows)
        scales = whole_panels(scales, lanes).transpose(1, 2).contiguous().view(torch.int8)
        words = whole_panels(numbers, lanes).unflatten(3, (-1, 4)).permute(0, 2, 3, 1, 4)
        return torch.cat((scales, words.flatten(2)), 2)  # (panels, blocks, bytes of a block)

    pieces = layer.weight.detach().split(4096)  # because packing needs a few times their memory
    return torch.cat([pack(rows) for rows in pieces]), whole_bias(layer, lanes)


def whole_panels(x, lanes):
    """Return x `(N, ...)` as `(panels, lanes, ...)`. Zeros fill the last panel."""
    padding = [0, 0] * (x.dim() - 1) + [0, -len(x) % lanes]
    return F.pad(x, padding).unflatten(0, (-1, lanes))


def whole_bias(layer, lanes):
    return None if layer.bias is None else whole_panels(layer.bias.detach(), lanes)
