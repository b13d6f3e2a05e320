"""What attention reads, seen from outside: every PyTorch decoder ends up in a few functions that we can watch."""

from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from check_cache.adapters import tensor_of

SOFTMAX = {F.softmax, torch.softmax, torch.Tensor.softmax}
MATMUL = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__}


class Read(NamedTuple):
    """One call of attention. What we could not see is None. Keys and values may have fewer heads."""

    weights: torch.Tensor  # (B, heads, T, slots), after the softmax
    query: torch.Tensor | None = None  # (B, heads, T, size)
    key: torch.Tensor | None = None  # (B, heads, slots, size)
    value: torch.Tensor | None = None


def read_of(read, index, rows, T, front):
    """Return a copy of what a row of `rows` reads, without `front` slots in front of the text: (heads, T, slots)."""
    read = read() if callable(read) else read
    skip = max(0, read.weights.size(-2) - T) if front else 0
    parts = (read.weights[..., front:], skip), (read.query, skip), (read.key, front), (read.value, front)
    parts = [x if x is None else x[..., first:, :] for x, first in parts]
    return Read(*(x if x is None else x.reshape(rows, -1, *x.shape[-2:])[index].float().clone() for x in parts))


class Interruption(Exception):
    """Stands for whatever stops a step: no memory, a refused id, Ctrl-C."""


class Watch(TorchFunctionMode):
    """Collects a Read, or a function that returns one, per call of attention. Interrupts call `stop` of torch."""

    def __init__(self, stop=None):
        super().__init__()
        self.reads, self.calls, self.stop = [], 0, stop
        self.product = None  # the operands of the newest product, and its shape

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.calls += 1
        if self.calls == self.stop:
            raise Interruption
        result = function(*args, **kwargs)
        if function is show_attention:
            with suppress(Exception):  # a tracer of jax.jit has no values
                self.reads.append(Read(*map(tensor_of, args)))
        elif function is F.scaled_dot_product_attention:
            self.reads.append(partial(read_sdpa, *args, **kwargs))  # on demand: it costs as much as the attention
        elif function in SOFTMAX:
            query, key, shape = self.product or (None, None, ())
            seen = shape[-2:] == result.shape[-2:]
            self.reads.append(Read(result, query, key.mT) if seen else Read(result))
            self.product = None
        elif (operands := operands_of(function, args)) and isinstance(result, torch.Tensor):
            self.product = (*operands, result.shape)
            newest, (weights, value) = self.reads[-1] if self.reads else None, operands
            waits = isinstance(newest, Read) and newest.key is not None and newest.value is None
            if waits and weights.shape[-2:] == newest.weights.shape[-2:]:
                self.reads[-1] = newest._replace(weights=weights, value=value)  # after dropout, if any
        return result


def show_attention(weights, query=None, key=None, value=None):
    """Show what attention reads where we cannot see it: in another framework, or a kernel of your own.

    weights (B, heads, T, slots) after the softmax, query (B, heads, T, size), key and value (B, heads, slots, size).
    Outside a check, this does nothing, so the call may stay in your code.
    """
    if has_torch_function((weights,)):  # a Watch is active, and sees the call
        handle_torch_function(show_attention, (), weights, query, key, value)


def operands_of(function, args):
    """Return the two operands of a matrix product, in the layout of torch.matmul, or None."""
    if function in MATMUL:
        return args if len(args) == 2 and min(args[0].dim(), args[1].dim()) > 1 else None
    if function is torch.einsum and len(args) == 3 and isinstance(args[0], str) and "." not in args[0]:
        terms, _, output = args[0].replace(" ", "").partition("->")
        left, right = terms.split(",")
        row, column = [x for x in left if x not in right], [x for x in right if x not in left]
        batch, summed = ([x for x in left if x in right and (x in output) == kept] for kept in (True, False))
        if len(row) == len(summed) == len(column) == 1:
            first, second = batch + row + summed, batch + summed + column
            return args[1].permute([*map(left.index, first)]), args[2].permute([*map(right.index, second)])
    return None


def read_sdpa(query, key, value, *args, **kwargs):
    """Compute the weights, which scaled_dot_product_attention returns if its values are a unit matrix."""
    unit = torch.eye(key.size(-2), dtype=key.dtype, device=key.device).expand(*key.shape[:-1], -1)
    return Read(F.scaled_dot_product_attention(query, key, unit, *args, **kwargs).nan_to_num(), query, key, value)
