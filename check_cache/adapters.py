"""What the check needs to know about a decoder: functions, or a transformers model."""

import copy
import inspect
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from check_cache.report import AdapterError, first_line

ROWS = 8  # sequences
NEEDED = ("full", "new", "step")
FACTS = ("vocab_size", "context", "window", "pad")
# what an adapter may do with its cache, and the method of a cache that does it otherwise
METHODS = dict(crop="crop", reorder="reorder_cache", reset="reset")
METHODS |= dict(repeat="batch_repeat_interleave", select="batch_select_indices")
TAKES = {**dict.fromkeys((*METHODS, "fork"), "cache"), "generate": "use_cache"}  # an argument of each
PARTS = (*NEEDED, *TAKES, *FACTS)


def adapter_of(model, parts, inputs):
    """Return the adapter of a model, or of the functions in `parts`."""
    if not parts:
        if not hasattr(model, "step") and getattr(model, "get_output_embeddings", lambda: None)() is not None:
            model = Transformers(model)
        parts = {name: getattr(model, name) for name in PARTS if hasattr(model, name)}
        # the object may use the names of optional functions for something else
        parts = {name: part for name, part in parts.items() if name not in TAKES or asks_for(part, TAKES[name])}
    if missing := [name for name in NEEDED if name not in parts]:
        needs = "needs a causal language model of transformers, or an adapter"
        raise TypeError(f"{needs}. {type(model).__name__} lacks {', '.join(missing)}")
    return Adapter(model, parts, inputs)


def copies_of(model, setup=lambda model, rows, length: None):
    """Return the function `new` for a decoder that keeps its cache inside: each cache is a copy of the module.

    setup(copy, rows, length)  prepares a copy, for example copy.setup_caches(rows, length). Copies share parameters
    """

    def new(rows, length):
        other = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        setup(other, rows, length)
        return other

    return new


class Adapter:
    """A decoder given as functions, or as an object with these methods."""

    def __init__(self, model, parts, inputs):
        self.modules, self.parts = find_modules(model, *parts.values()), parts
        self.context, self.window, self.pad = parts.get("context"), parts.get("window"), parts.get("pad") or 0
        self.kinds = getattr(model, "kinds", ("own", "static")) if asks_for(parts["new"], "kind") else ("own",)
        self.full_takes_mask = asks_for(parts["full"], "mask")
        self.in_float64 = getattr(model, "in_float64", nullcontext)
        self.inputs = nn.Module()  # as buffers, they follow the dtype and device of the weights
        for name, tensor in inputs.items():
            if len(tensor) != ROWS:
                raise ValueError(f"inputs[{name!r}]: must have one entry for each of the {ROWS} sequences")
            # rows 3 to 5 begin like rows 0 to 2
            self.inputs.register_buffer(name, torch.cat((tensor[:3], tensor[:3], tensor[6:])))

    @cached_property
    def vocab_size(self):
        return self.parts.get("vocab_size") or self.full(torch.zeros(1, 2, dtype=torch.long), torch.arange(1)).size(-1)

    def takes(self, part, name):
        return part in self.parts and asks_for(self.parts[part], name)

    def call(self, part, *needed, rows=None, **optional):
        """Pass the arguments that are needed in order, and by name the inputs and those that the function has."""
        function = self.parts[part]
        known = {name: value for name, value in optional.items() if self.takes(part, name)}
        if rows is not None:
            known |= {name: tensor[rows] for name, tensor in self.inputs.named_buffers()}
        try:
            inspect.signature(function).bind(*needed, **known)
        except TypeError as error:
            raise AdapterError(f"{part} cannot be called as README.md says: {error}{source(function)}") from None
        return function(*needed, **known)

    def complain(self, part, returns, output):
        """Raise AdapterError: a function does not return what it should."""
        if isinstance(output, torch.Tensor):
            what = f"a tensor of shape {tuple(output.shape)}"
        elif isinstance(output, tuple):
            what = f"({', '.join(type(item).__name__ for item in output)})"
        else:
            what = f"a {type(output).__name__}" + (", so return its .logits" if hasattr(output, "logits") else "")
        raise AdapterError(f"{part} must return {returns}, but returned {what}{source(self.parts[part])}")

    def full(self, ids, rows, mask=None, pos=None):
        output = self.call("full", ids, rows=rows, mask=mask, pos=pos)
        logits = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != ids.shape or logits.dim() != 3:
            B, T = ids.shape
            self.complain("full", f"the logits of all tokens, a tensor ({B}, {T}, V)", output)
        return logits

    def new(self, rows, length, kind):
        return self.call("new", rows, length, kind=kind)

    def step(self, ids, cache, mask, pos, rows, lengths):
        """Return the logits (B, T or 1, V) of the next tokens, and the cache."""
        output = self.call("step", ids, cache, rows=rows, mask=mask, pos=pos, lengths=lengths)
        logits, held = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
        if not isinstance(logits, torch.Tensor):
            self.complain("step", "logits or (logits, cache)", output)
        logits = logits[:, None] if logits.dim() == 2 else logits  # some decoders only return those of the last token
        B, T = ids.shape
        if logits.dim() != 3 or logits.shape[::2] != (B, self.vocab_size) or logits.size(1) not in (1, T):
            self.complain("step", f"logits of shape {(B, T, self.vocab_size)}", logits)
        return logits, cache if held is None else held

    def generate(self, ids, count, use_cache, mask, eos, rows):
        """Return `count` tokens or fewer per row, perhaps after the prompt."""
        if mask is not None and not self.takes("generate", "mask"):
            raise NotImplementedError("generate takes no mask")
        output = self.call("generate", ids, count, use_cache, rows=rows, mask=mask, eos=eos)
        if not isinstance(output, torch.Tensor) or output.dim() != 2 or len(output) != len(ids):
            self.complain("generate", f"a tensor of ids ({len(ids)}, T)", output)
        if output.size(1) == 0 or torch.equal(output, ids):
            self.complain("generate", f"{count} new tokens per row", output)
        return output

    def change(self, cache, name, *args):
        """Crop, reorder, ... a cache, with the function of the adapter or the method of the cache."""
        if name in self.parts:
            return self.call(name, cache, *args)
        if name == "reset" and isinstance(cache, nn.Module) and self.takes("step", "pos"):
            return None  # a cache inside the module: its next text starts at position 0
        if not hasattr(cache, METHODS[name]):
            raise NotImplementedError(f"the cache has no {METHODS[name]}")
        try:
            return getattr(cache, METHODS[name])(*args)
        except AttributeError as error:
            if type(cache).__module__.startswith("transformers."):  # it asks each of its layers
                raise NotImplementedError(first_line(error)) from None
            raise

    def fork(self, cache):
        if "fork" in self.parts:
            return self.call("fork", cache)
        shared = {id(part): part for module in self.modules for part in (*module.modules(), *module.parameters())}
        try:
            return copy.deepcopy(cache, shared)  # modules may be keys of the cache
        except Exception as error:
            raise NotImplementedError(f"copy.deepcopy of the cache: {first_line(error)}") from None

    def find_called_modules(self):
        """Add to `modules` those that `full` and `step` call, however they reach them. Return the logits of `full`."""
        called, logits, ids, row = {}, None, torch.zeros(1, 2, dtype=torch.long), torch.arange(1)
        hook = register_module_forward_pre_hook(lambda module, arguments: called.setdefault(module))
        try:
            logits = self.full(ids, row)
            self.step(ids, self.new(1, 2, self.kinds[0]), None, torch.arange(2)[None], row, None)
        except (Exception, SystemExit):
            pass  # it will raise again, where we report it
        finally:
            hook.remove()
        known = {part for module in self.modules for part in module.modules()}
        self.modules += [module for module in called if module not in known]
        if self.modules:
            self.modules.append(self.inputs)
        return logits


def asks_for(function, name):
    return name in inspect.signature(function).parameters


def source(function):
    """Return where a function of the adapter is, in words."""
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""


def find_modules(*things):
    """Return the modules among things, their attributes and owners, and what functions and their helpers refer to."""
    found, todo = {}, [*things]
    for thing in todo:  # which grows
        if inspect.isfunction(thing):
            outside = inspect.getclosurevars(thing)
            nearby = [*outside.nonlocals.values(), *outside.globals.values()]
            helpers = [part for part in nearby if inspect.isfunction(part) and part not in todo]
            todo += [part for part in helpers if part.__module__ == thing.__module__]
        else:
            nearby = [getattr(thing, "__self__", thing)]
        for owner in nearby:
            parts = [owner] if isinstance(owner, nn.Module) else [*getattr(owner, "__dict__", {}).values()]
            found |= {part: None for part in parts if isinstance(part, nn.Module)}
    return [*found]


class Transformers:
    """The adapter of a causal language model of transformers. It calls the model as generate() does."""

    def __init__(self, model):
        import transformers

        if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 4):  # those want cache_position from us
            raise ImportError(f"needs transformers 5.4 or newer, but this is {transformers.__version__}")
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.takes = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in ("cache_params", "past_key_values") if name in self.takes), None)

        def fact(name):
            return getattr(self.config, name, None)

        grows = (fact("rope_parameters") or {}).get("rope_type") == "dynamic"
        windows = map(fact, ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"))
        self.vocab_size = model.get_output_embeddings().weight.size(0)
        self.context = None if grows else fact("max_position_embeddings")
        self.window = next(filter(None, windows), None)
        self.pad = fact("pad_token_id") or 0

    @cached_property
    def kinds(self):
        """The model's own cache, the DynamicCache of generate() if that differs, and a static one."""
        if not getattr(self.model, "_supports_default_dynamic_cache", bool)():
            return "own", "static"
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.model.device)
        try:
            with torch.no_grad():
                caches = [self.step(ids, self.new(1, 2, kind), None, None)[1] for kind in ("own", "dynamic")]
        except Exception:  # the scenarios will say why
            return "own", "static"
        own, dynamic = ([type(cache), *map(type, getattr(cache, "layers", ()))] for cache in caches)
        return ("own", "static") if own == dynamic else ("own", "dynamic", "static")

    @contextmanager
    def in_float64(self):
        experts = getattr(self.config, "_experts_implementation", None)
        switch = self.model.set_experts_implementation if experts else lambda name: None
        switch("eager")  # the fast kernels have no float64
        try:
            yield
        finally:
            switch(experts)

    def full(self, ids, mask, pos, **inputs):
        return self.model(input_ids=ids, use_cache=False, **self.placed(mask, pos), **inputs).logits

    def new(self, rows, length, kind):
        import transformers

        if kind == "own":
            return None  # the model makes one
        if kind == "dynamic":
            return transformers.DynamicCache(config=self.config)
        if self.cache_name and self.model._can_compile_fullgraph:
            return transformers.StaticCache(config=self.config, max_cache_len=length)
        raise NotImplementedError("transformers has none for this model (_can_compile_fullgraph)")

    def step(self, ids, cache, mask, pos, **inputs):
        if self.cache_name is None:  # then we only see what generate() does
            raise NotImplementedError("the model takes no cache_params and no past_key_values")
        make_mask = getattr(self.model, "create_masks_for_generate", None)
        if make_mask and mask is not None and getattr(cache, "is_compileable", False):
            mask = make_mask(self.config, self.model.get_input_embeddings()(ids), mask, cache)
        more = {self.cache_name: cache, **self.placed(mask, pos), **inputs}
        output = self.model(input_ids=ids, use_cache=True, **more)
        held = getattr(output, self.cache_name, None)
        if held is None:
            raise NotImplementedError("the model returns no cache")
        return output.logits, held

    def placed(self, mask, pos):
        """Return the arguments for mask and positions. Without a mask, the model has to work out positions itself."""
        given = {"attention_mask": mask, "position_ids": pos} if mask is not None else {}
        return {name: value for name, value in given.items() if name in self.takes}

    def generate(self, ids, count, use_cache, mask=None, eos=None, **inputs):
        import transformers

        if getattr(type(self.model), "generate", None) is not transformers.GenerationMixin.generate:
            raise NotImplementedError("the model does not use generate() of transformers")
        mask = torch.ones_like(ids) if mask is None else mask  # or it hides tokens with the padding id
        end = self.vocab_size if eos is None else eos  # no token. None would mean the model's own end-of-text token
        greedy = transformers.GenerationConfig(
            max_new_tokens=count, use_cache=use_cache, eos_token_id=end, pad_token_id=self.pad
        )
        return self.model.generate(ids, attention_mask=mask, generation_config=greedy, **inputs)
