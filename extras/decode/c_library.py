"""step.c as Python sees it: its errors, the structures that it reads, and its threads."""

import ctypes
import os
import threading
import weakref
from dataclasses import fields

import torch

from extras.decode.speculate import BatchState
from model import NOT_FINITE

LARGEST = torch.finfo(torch.float32).max


class CompileError(RuntimeError):
    """--compile cannot run here, or would compute a different network. The message is one line."""


def open_library(file):
    """Return the compiled step.c with the types of its functions."""
    library = ctypes.CDLL(str(file))
    library.start_threads.restype = ctypes.c_void_p  # an int would lose half of the address
    library.stop_threads.argtypes = [ctypes.c_void_p]
    library.run_steps.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 5 + [ctypes.c_void_p]
    return library


# -- the structures: the same names in the same order as in step.c -----------------------------------------------------


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
    if isinstance(x, list):
        return (type(x[0]) * len(x))(*x)
    return x


def struct(name, *members):
    """Return a kind of Struct. A member is a name, which stands for an address, or a pair (name, type)."""
    pairs = [(member, ctypes.c_void_p) if isinstance(member, str) else member for member in members]
    return type(name, (Struct,), {"_fields_": pairs})


Params = struct("Params", "weight", "bias")
Layer = struct("Layer", *((name, Params) for name in "c_attn q_norm k_norm attn_proj c_fc mlp_proj".split()))
Cache = struct("Cache", "key", "value")
State = struct("State", *(field.name for field in fields(BatchState)))
Table = struct("Table", "logits", "after")


def model_struct(n_layer):
    norms = ("norm", Params * (2 * n_layer + 1))
    return struct("Model", "wte", "wpe", "cos", "sin", ("lm_head", Params), norms, ("layer", Layer * n_layer))


def check_struct_sizes(library, *structs):
    """Raise TypeError if a structure differs in size from its counterpart in step.c, which would read past its end."""
    theirs = list((ctypes.c_size_t * len(structs)).in_dll(library, "struct_sizes"))
    for struct, size in zip(structs, theirs):
        if ctypes.sizeof(struct) != size:
            raise TypeError(f"{struct.__name__} has {ctypes.sizeof(struct)} bytes in c_library.py and {size} in step.c")


# -- checks of what the structures hold, because step.c reads and writes wherever they say -----------------------------


def check_state(state, config):
    """Raise TypeError unless a BatchState has tensors of the dtypes and shapes that its class says.

    Their numbers change from call to call, so run_steps in step.c looks at them each time.
    """
    B = len(state.end)
    kinds = dict(
        tokens=(torch.int64, (B, config.block_size + 1)),
        seed=(torch.int64, (2,)),
        temperature=(torch.float32, ()),
        top_k=(torch.int64, ()),
        top_p=(torch.float32, ()),
    )
    for name, x in vars(state).items():
        if x is not None or name not in ("top_k", "top_p"):
            check_tensor(name, x, *kinds.get(name, (torch.int64, (B,))))


def check_table(table, vocab_size):
    """Raise TypeError or ValueError unless `table` is one of ngram_table for this vocabulary."""
    logits, after = table
    check_tensor("logits", logits, torch.float32, (len(after), vocab_size))
    check_tensor("after", after, torch.int32, (len(after), vocab_size))
    check_range("logits", logits.numpy(), -LARGEST, LARGEST)
    check_range("after", after.numpy(), 0, len(after) - 1)


def check_tensor(name, x, dtype, shape):
    """Raise TypeError unless x is a tensor of this dtype and shape on the CPU."""
    if not isinstance(x, torch.Tensor) or (x.dtype, x.shape, x.device.type) != (dtype, shape, "cpu"):
        found = f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor of {dtype} {shape} on the CPU, not {found}")


def check_range(name, x, low, high):
    if not x.size or not ((low <= x) & (x <= high)).all():
        raise ValueError(f"{name} is {x}, and step.c needs numbers from {low} to {high}")


# -- the threads -------------------------------------------------------------------------------------------------------


class Pool:
    """The threads of a Decoder in this process. They end with it or with the interpreter, whichever comes first.

    There are fewer if the system gives us fewer. Raises MemoryError.
    """

    def __init__(self, library, threads):
        self.library = library
        self.threads = threads
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.address = library.start_threads(threads)
        if not self.address:
            raise MemoryError("the C backend ran out of memory")
        weakref.finalize(self, end_threads, library, self.address, self.lock, self.pid)

    def run_steps(self, *arguments):
        """Call `run_steps` of step.c with the arguments between the pool and the counters, and return the counters.

        Raises MemoryError, ValueError for a number in the State that is out of range, and FloatingPointError if the
        first step finds logits that are infinite or NaN.
        """
        counters = (ctypes.c_int64 * 3)()
        with self.lock:  # the threads serve one call at a time
            failed = self.library.run_steps(self.address, *arguments, counters)
        if failed > 0:
            raise ValueError(f"{State._fields_[failed - 1][0]} is out of range")
        if failed == -1:
            raise MemoryError("the C backend ran out of memory")
        if failed == -2:
            raise FloatingPointError(NOT_FINITE)
        return list(counters)


def end_threads(library, address, lock, pid):
    """End the threads once no call uses them. A daemon thread may still be in a call while the interpreter exits."""
    if pid == os.getpid():  # a child of os.fork() has no such threads
        lock.acquire()  # and never release it: a later call would find no threads, so it waits until the process exits
        library.stop_threads(address)
