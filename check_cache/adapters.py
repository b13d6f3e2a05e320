"""What the check needs to know about a decoder: functions, or a transformers model."""

import copy
import inspect
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import nn

from check_cache.report import first_line

ROWS = 8  # sequences
NEEDED = ("full", "new", "step")
FACTS = ("vocab_size", "context", "window", "pad")
# what an adapter may do with its cache, and the method of a cache that does it otherwise
METHODS = dict(crop="crop", reorder="reorder_cache", reset="reset")
METHODS |= dict(repeat="batch_repeat_interleave", select="batch_select_indices")
TAKES = {**dict.fromkeys((*METHODS, "fork"), "cache"), "generate": "use_cache"}  # an argument of each


def adapter_of(model, parts, inputs):
    """Return the adapter of a model, or of the functions in `parts`."""
    names = (*NEEDED, *TAKES, *FACTS)
    if unknown := parts.keys() - names:
        raise TypeError(f"check_cache has no argument {', '.join(sorted(unknown))}")
    parts = {name: part for name, part in parts.items() if part is not None}
    if not parts:
        if not hasattr(model, "step") and getattr(model, "get_output_embeddings", lambda: None)() is not None:
            model = Transformers(model)
        parts = {name: getattr(model, name) for name in names if hasattr(model, name)}
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
        self.kinds = ("own", "static") if asks_for(parts["new"], "kind") else ("own",)
        self.takes_mask, self.full_takes_mask = (asks_for(parts[name], "mask") for name in ("step", "full"))
        self.takes_lengths = asks_for(parts["step"], "lengths")
        self.in_float64 = getattr(model, "in_float64", nullcontext)
        self.inputs = nn.Module()  # as buffers, they follow the dtype and device of the weights
        for name, tensor in inputs.items():
            if len(tensor) != ROWS:
                raise ValueError(f"inputs[{name!r}]: must have one entry for each of the {ROWS} sequences")
            # rows 3 to 5 begin like rows 0 to 2
            self.inputs.register_buffer(name, torch.cat((tensor[:3], tensor[:3], tensor[6:])))
        if self.modules:
            self.modules.append(self.inputs)

    @cached_property
    def vocab_size(self):
        return self.parts.get("vocab_size") or self.full(torch.zeros(1, 2, dtype=torch.long), torch.arange(1)).size(-1)

    def call(self, part, *needed, rows, **optional):
        """Pass the arguments that are needed in order, and by name the inputs and those that the function has."""
        inputs = {name: tensor[rows] for name, tensor in self.inputs.named_buffers()}
        known = {name: value for name, value in optional.items() if asks_for(self.parts[part], name)}
        return self.parts[part](*needed, **inputs, **known)

    def full(self, ids, rows, mask=None, pos=None):
        output = self.call("full", ids, rows=rows, mask=mask, pos=pos)
        return output[0] if isinstance(output, tuple) else output

    def new(self, rows, length, kind):
        return self.parts["new"](rows, length, **({"kind": kind} if len(self.kinds) > 1 else {}))

    def step(self, ids, cache, mask, pos, rows, lengths):
        return self.call("step", ids, cache, rows=rows, mask=mask, pos=pos, lengths=lengths)

    def generate(self, ids, count, use_cache, mask, rows):
        if "generate" not in self.parts:
            raise NotImplementedError("there is no generate(ids, count, use_cache)")
        if mask is not None and not asks_for(self.parts["generate"], "mask"):
            raise NotImplementedError("generate takes no mask")
        return self.call("generate", ids, count, use_cache, rows=rows, mask=mask)

    def change(self, cache, name, *args):
        """Crop, reorder, ... a cache, with the function of the adapter or the method of the cache."""
        if name in self.parts:
            return self.parts[name](cache, *args)
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
            return self.parts["fork"](cache)
        shared = {id(part): part for module in self.modules for part in (*module.modules(), *module.parameters())}
        try:
            return copy.deepcopy(cache, shared)  # modules may be keys of the cache
        except Exception as error:
            raise NotImplementedError(f"copy.deepcopy of the cache: {first_line(error)}") from None


def asks_for(function, name):
    return name in inspect.signature(function).parameters


def find_modules(*things):
    """Return the modules that we can reach: things themselves, their attributes, owners, closures and globals."""
    found = {}
    for thing in things:
        if inspect.isfunction(thing):
            outside = inspect.getclosurevars(thing)
            nearby = [*outside.nonlocals.values(), *outside.globals.values()]
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

        if kind == "own":  # None lets the model make one
            has_default = getattr(self.model, "_supports_default_dynamic_cache", lambda: True)()
            return transformers.DynamicCache(config=self.config) if has_default else None
        if kind == "static" and self.cache_name and self.model._can_compile_fullgraph:
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

    def generate(self, ids, count, use_cache, mask=None, **inputs):
        import transformers

        if getattr(type(self.model), "generate", None) is not transformers.GenerationMixin.generate:
            raise NotImplementedError("the model does not use generate() of transformers")
        mask = torch.ones_like(ids) if mask is None else mask  # or it hides tokens with the padding id
        end = self.vocab_size  # no token. None would mean the model's own end-of-text token
        greedy = transformers.GenerationConfig(
            max_new_tokens=count, use_cache=use_cache, eos_token_id=end, pad_token_id=self.pad
        )
        return self.model.generate(ids, attention_mask=mask, generation_config=greedy, **inputs)
