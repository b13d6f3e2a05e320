"""What the check needs to know about a decoder: functions, or a transformers model."""

import copy
import inspect
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from check_cache.huggingface import METHODS, Transformers, is_model
from check_cache.report import Verdict, first_line

ROWS = 8  # the sequences that we feed
TWIN = 3  # row i + TWIN begins like row i, for i < TWIN, and differs from `fork` of Sizes on
NEEDED = ("full", "new", "step")
PARTS = (*NEEDED, *METHODS, *"fork generate vocab_size context window chunk pad weights must_run".split())


def tensor_of(array):
    """Return an array of any framework as a tensor of its own. Anything else comes back as it is."""
    if isinstance(array, torch.Tensor) or not (hasattr(array, "__array__") or hasattr(array, "__dlpack__")):
        return array
    try:
        tensor = torch.from_dlpack(array)
    except Exception:  # a variable, an array that cannot be written, or one on another device
        tensor = torch.tensor(array.__array__())
    return tensor.to(torch.get_default_device(), copy=True)


class Weights(nn.Module):
    """Arrays of another framework as parameters, so that we can perturb them. Functions take them if `passed`."""

    def __init__(self, arrays, passed):
        super().__init__()
        self.arrays, self.passed, self.copies = arrays, passed, nn.ParameterList()
        for array in arrays.values():
            self.copies.append(nn.Parameter(tensor_of(array).clone(), requires_grad=False))
        self.dtypes = [copy.dtype for copy in self.copies]

    def current(self):
        """Return {name: tensor}, or a NumPy array for what is no tensor."""
        current = {name: copy.to(dtype) for name, copy, dtype in zip(self.arrays, self.copies, self.dtypes)}
        return {k: x if isinstance(self.arrays[k], torch.Tensor) else x.numpy(force=True) for k, x in current.items()}

    def write(self):
        for name, new in self.current().items():
            array = self.arrays[name]
            array.assign(new) if hasattr(array, "assign") else array.__setitem__(..., new)


class Adapter:
    def __init__(self, model, parts, inputs):
        if "step" not in parts:  # then the model is the adapter
            owner = Transformers(model) if is_model(model) else model
            theirs = {name: part for name in PARTS if (part := getattr(owner, name, None)) is not None}
            if "generate" in theirs and not asks_for(theirs["generate"], "use_cache"):
                del theirs["generate"]  # the object may have one of its own
            parts = theirs | parts
        if missing := [name for name in NEEDED if name not in parts]:
            needs = "needs a causal language model of transformers, or an adapter"
            raise TypeError(f"{needs}. {type(model).__name__} lacks {', '.join(missing)}")
        owners = [getattr(part, "__self__", part) for part in (model, *parts.values())]
        self.modules, self.parts = [*{owner: None for owner in owners if isinstance(owner, nn.Module)}], parts
        self.context, self.window, self.chunk = (parts.get(name) for name in ("context", "window", "chunk"))
        self.pad, self.must_run = parts.get("pad") or 0, parts.get("must_run") or ("decode",)
        self.kinds = ("own", "static") if asks_for(parts["new"], "kind") else ("own",)
        self.called, self.unread = [], None  # the modules that full and step call; why we must not perturb them
        self.perturbed, self.converts = [], False  # the modules whose weights we may change, and perhaps their dtype
        self.numpy, self.weights = False, None  # numpy: whether the functions want arrays of NumPy
        self.torch = True  # whether they return tensors
        self.samples = {}  # a cache of each kind, after two tokens
        self.keeps = False  # whether steps get or return a cache
        self.returns = None  # the dtype of their logits
        self.accepted = {}  # (kind, whether something had been fed): the most tokens of a step
        self.dtype = torch.float32  # of the logits
        if "weights" in parts:
            passed = all(self.takes(part, "weights") for part in ("full", "step"))
            self.weights = Weights(parts["weights"], passed)
            self.modules.append(self.weights)
        self.inputs = nn.Module()  # as buffers, they follow the dtype and device of the weights
        for name, tensor in inputs.items():
            tensor = tensor_of(tensor)
            if len(tensor) != ROWS:
                raise ValueError(f"inputs[{name!r}]: must have one entry for each of the {ROWS} sequences")
            first = tensor[:TWIN]  # of the rows that begin like these
            self.inputs.register_buffer(name, torch.cat((first, first, tensor[2 * TWIN :])))

    def demand(self, kind, part):
        """Raise NotImplementedError if this decoder lacks a part."""
        if part in METHODS and kind in self.samples:
            self.operation(self.samples[kind], part)
        if part not in METHODS and part not in self.parts:
            raise NotImplementedError(f"there is no {part}")

    @cached_property
    def vocab_size(self):
        return self.parts.get("vocab_size") or self.full(torch.zeros(1, 2, dtype=torch.long), torch.arange(1)).size(-1)

    def takes(self, part, name):
        return part in self.parts and asks_for(self.parts[part], name)

    def call(self, part, *needed, rows=None, **optional):
        """Pass the arguments that are needed in order, and by name the inputs and those that the function has."""
        function = self.parts[part]
        if self.weights:
            optional["weights"] = self.weights.current() if self.takes(part, "weights") else None
        known = {name: value for name, value in optional.items() if self.takes(part, name)}
        for name in ("mask", "lengths"):  # without these, padding would be read as text
            if optional.get(name) is not None and name not in known:
                raise NotImplementedError(f"the {part} takes no {name}")
        if rows is not None:
            known |= {name: tensor[rows] for name, tensor in self.inputs.named_buffers()}
        if self.numpy:
            array = lambda x: x.numpy(force=True) if isinstance(x, torch.Tensor) else x  # noqa: E731
            needed, known = [*map(array, needed)], {name: array(value) for name, value in known.items()}
        try:
            inspect.signature(function).bind(*needed, **known)
        except TypeError as error:
            raise Verdict("error", f"{part} cannot be called as ADAPTERS.md says: {error}{source(function)}") from None
        return function(*needed, **known)

    def complain(self, part, returns, output):
        parts = output if isinstance(output, tuple) else (output,)
        got = ", ".join(f"{type(one).__name__} {tuple(getattr(one, 'shape', ()))}" for one in parts)
        raise Verdict("error", f"{part} must return {returns}, but returned {got}{source(self.parts[part])}")

    def full(self, ids, rows):
        output = self.call("full", ids, rows=rows)
        given = output[0] if isinstance(output, tuple) and output else output
        logits = tensor_of(given)
        self.torch = logits is given
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != ids.shape or logits.dim() != 3:
            self.complain("full", f"the logits of all tokens, a tensor ({len(ids)}, {ids.size(1)}, V)", output)
        self.dtype = logits.dtype
        return logits

    def step(self, ids, cache, mask, pos, rows, lengths):
        """Return the logits (B, T or 1, V) of the next tokens, and the cache."""
        output = self.call("step", ids, cache, rows=rows, mask=mask, pos=pos, lengths=lengths)
        logits, held = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
        logits = tensor_of(logits)
        if isinstance(logits, torch.Tensor) and logits.dim() == 2:
            logits = logits[:, None]  # some decoders only return those of the last token
        B, T = ids.shape
        if getattr(logits, "shape", None) not in [(B, t, self.vocab_size) for t in (1, T)]:
            self.complain("step", f"logits {(B, T, self.vocab_size)} or (logits, cache)", output)
        self.keeps, self.returns = self.keeps or held is not None or cache is not None, logits.dtype
        return logits, cache if held is None else held

    def generate(self, ids, count, use_cache, mask, eos, rows):
        """Return `count` tokens or fewer per row, perhaps after the prompt."""
        output = tensor_of(self.call("generate", ids, count, use_cache, rows=rows, mask=mask, eos=eos))
        shaped = isinstance(output, torch.Tensor) and output.dim() == 2 and len(output) == len(ids)
        if not shaped or output.size(1) == 0 or torch.equal(output, ids):
            self.complain("generate", f"{count} new tokens per row, a tensor ({len(ids)}, {count})", output)
        return output

    def operation(self, cache, name):
        """Return what crops, reorders, ... a cache: a function of the adapter, or the method of the cache."""
        if name in self.parts:
            return partial(self.call, name, cache)
        if name == "reset" and isinstance(cache, nn.Module) and self.takes("step", "pos"):
            return lambda: None  # a cache inside the module: its next text starts at position 0
        if not hasattr(cache, METHODS[name]):
            raise NotImplementedError(f"the adapter has no {name}, the cache no {METHODS[name]}")
        return getattr(cache, METHODS[name])

    def fork(self, cache):
        if "fork" in self.parts:
            return self.call("fork", cache)
        shared = {id(part): part for module in self.modules for part in (*module.modules(), *module.parameters())}
        try:
            return copy.deepcopy(cache, shared)  # modules may be keys of the cache
        except Exception as error:
            raise NotImplementedError(f"copy.deepcopy of the cache: {first_line(error)}") from None

    def try_out(self):
        """Find the modules that are called, and whether functions want NumPy. What raises here will raise again."""
        by_full, by_step = {}, {}
        with register_module_forward_pre_hook(lambda module, arguments: by_full.setdefault(module)):
            for self.numpy in (False, True, False):
                with suppress(Exception, SystemExit):
                    self.full(torch.zeros(1, 2, dtype=torch.long), torch.arange(1))
                    break
        with register_module_forward_pre_hook(lambda module, arguments: by_step.setdefault(module)):
            for kind in self.kinds:
                with suppress(Exception, SystemExit):
                    self.try_cache(kind)
        self.called = [by_full, by_step]
        self.modules = [*dict.fromkeys((*self.modules, *by_full, *by_step))]

    def first_logits(self):
        """Return the logits of two tokens without a cache, and with one, which gets them one by one."""
        torch.manual_seed(0)
        return self.full(torch.zeros(1, 2, dtype=torch.long), torch.arange(1)), self.try_cache(self.kinds[0])

    def try_cache(self, kind):
        """Feed two single tokens to a cache, to see what it offers. Return the logits of the second."""
        cache = self.call("new", 1, 2, kind=kind)
        for at in range(2):
            ids, pos = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[at]])
            logits, cache = self.step(ids, cache, None, pos, torch.arange(1), None)
            self.accepted[kind, at > 0] = 1
        self.samples[kind] = cache
        return logits


def asks_for(function, name):
    return name in inspect.signature(function).parameters


def source(function):
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
