"""What the check needs to know about a decoder: functions, or a transformers model."""

import copy
import functools
import inspect

import torch
from torch import nn

from check_cache.report import first_line

ROWS = 8  # sequences
NEEDED = ("full", "new", "step")
TAKES = {"crop": "cache", "reorder": "cache", "reset": "cache", "fork": "cache", "generate": "use_cache"}
OPTIONAL = ("vocab_size", "context", "window", "pad", *TAKES)


def adapter_of(model, parts, inputs):
    """Return the adapter of a model, or of the functions in `parts`."""
    parts = {name: part for name, part in parts.items() if part is not None}
    if not parts and model is not None:
        parts = {name: getattr(model, name) for name in (*NEEDED, *OPTIONAL) if hasattr(model, name)}
        for name, argument in TAKES.items():  # the object may use that name for something else
            if name in parts and not asks_for(parts[name], argument):
                del parts[name]
        if not {*NEEDED} <= {*parts}:
            if hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None:
                return Transformers(model, inputs)
            raise TypeError(
                f"{type(model).__name__} is neither a causal language model of transformers nor an adapter, which has "
                f"{', '.join(NEEDED)}"
            )
    if missing := [name for name in NEEDED if name not in parts]:
        raise TypeError(f"check_cache needs the functions {', '.join(NEEDED)}. Missing: {', '.join(missing)}")
    return Functions(model, parts, inputs)


def copies_of(model, setup=lambda model, rows, length: None):
    """Return the function `new` for a decoder that keeps its cache inside: each cache is a copy of the module.

    setup(copy, rows, length)  prepares a copy, for example copy.setup_caches(rows, length). Copies share parameters
    """

    def new(rows, length):
        other = fork_module(model)
        setup(other, rows, length)
        return other

    return new


def fork_module(module):
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


class Adapter:
    """What all adapters have. The cache's methods have the same names and arguments as in transformers."""

    kinds = ("own",)  # of caches
    context = window = None
    pad = 0
    takes_mask = full_takes_mask = True
    takes_lengths = False

    def __init__(self, modules, inputs):
        self.modules, self.inputs = modules, {}
        for name, tensor in inputs.items():
            if len(tensor) != ROWS:
                raise ValueError(f"inputs[{name!r}]: must have one entry for each of the {ROWS} sequences")
            self.inputs[name] = torch.cat((tensor[:3], tensor[:3], tensor[6:]))  # 3 to 5 begin like 0 to 2

    def inputs_of(self, rows):
        """Return the inputs of some rows, in the dtype and on the device of the weights."""
        if not self.inputs:
            return {}
        weights = [p for module in self.modules for p in module.parameters() if p.is_floating_point()]
        chosen = {name: tensor[rows.to(tensor.device)] for name, tensor in self.inputs.items()}
        like = weights[0] if weights else rows
        return {name: x.to(like if x.is_floating_point() and weights else like.device) for name, x in chosen.items()}

    def attentions(self):
        """Switch to each implementation of attention and yield (name, None, or why it cannot be used)."""
        yield None, None

    def crop(self, cache, length, removed):
        """Keep the first `length` tokens and drop the newest `removed`. May return a new cache, like all of these."""
        return on_cache(cache, -removed, name="crop")

    def reorder(self, cache, rows):
        return on_cache(cache, rows, name="reorder_cache")

    def reset(self, cache):
        return on_cache(cache, name="reset")

    def fork(self, cache):
        known = {id(part): part for module in self.modules for part in (*module.modules(), *module.parameters())}
        try:  # modules may be keys of the cache
            return fork_module(cache) if isinstance(cache, nn.Module) else copy.deepcopy(cache, known)
        except Exception as error:
            raise NotImplementedError(f"copy.deepcopy of the cache: {first_line(error)}") from None

    def generate(self, ids, count, use_cache):
        raise NotImplementedError("there is no generate(ids, count, use_cache)")


def on_cache(cache, *args, name):
    """Call a method that the cache may or may not have."""
    if not hasattr(cache, name):
        raise NotImplementedError(f"the cache has no {name}")
    try:
        return getattr(cache, name)(*args)
    except AttributeError as error:
        if type(cache).__module__.partition(".")[0] == "transformers":  # it asks each of its layers
            raise NotImplementedError(first_line(error)) from None
        raise


class Functions(Adapter):
    """The adapter of a decoder given as functions, or as an object with these methods."""

    def __init__(self, model, parts, inputs):
        super().__init__(find_modules(model, *parts.values()), inputs)
        self.parts = parts
        self.context, self.window, self.pad = parts.get("context"), parts.get("window"), parts.get("pad") or 0
        self.kinds = ("own", "static") if asks_for(parts["new"], "kind") else ("own",)
        self.takes_mask, self.full_takes_mask = (asks_for(parts[name], "mask") for name in ("step", "full"))
        self.takes_lengths = asks_for(parts["step"], "lengths")
        for name in ("reorder", "reset", "fork"):
            if name in parts:
                setattr(self, name, parts[name])

    @functools.cached_property
    def vocab_size(self):
        return self.parts.get("vocab_size") or self.full(torch.zeros(1, 2, dtype=torch.long), torch.arange(1)).size(-1)

    def full(self, ids, rows, mask=None, pos=None):
        output = call(self.parts["full"], dict(ids=ids), dict(mask=mask, pos=pos, **self.inputs_of(rows)))
        return output[0] if isinstance(output, tuple) else output

    def new(self, rows, length, kind):
        return call(self.parts["new"], dict(rows=rows, length=length), dict(kind=kind))

    def step(self, ids, cache, mask, pos, rows, lengths):
        more = dict(mask=mask, pos=pos, lengths=lengths, **self.inputs_of(rows))
        return call(self.parts["step"], dict(ids=ids, cache=cache), more)

    def crop(self, cache, length, removed):
        crop = self.parts.get("crop")
        return crop(cache, length) if crop else super().crop(cache, length, removed)

    def generate(self, ids, count, use_cache):
        generate = self.parts.get("generate")
        return generate(ids, count, use_cache) if generate else super().generate(ids, count, use_cache)


def names_of(function):
    """Return the names of a function's arguments, or None if we must pass them in order: a module, or *args."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    if isinstance(function, nn.Module) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]


def asks_for(function, name):
    return name in (names_of(function) or [])


def call(function, needed, optional):
    """Pass the arguments that a function has by name. The rest of `needed` fills its other arguments, in order."""
    names = names_of(function)
    if names is None:
        return function(*needed.values())
    rest = [value for name, value in needed.items() if name not in names]
    given = {name: value for name, value in {**needed, **optional}.items() if name in names}
    for name in names:
        if name not in given and rest:
            given[name] = rest.pop(0)
    return function(**given)


def find_modules(*things):
    """Return the modules that we can reach: things themselves, their attributes, owners, closures and globals."""
    found = {}
    for thing in things:
        if isinstance(thing, functools.partial):
            found |= dict.fromkeys(find_modules(thing.func, *thing.args, *thing.keywords.values()))
            continue
        if inspect.isfunction(thing):
            outside = inspect.getclosurevars(thing)
            nearby = [*outside.nonlocals.values(), *outside.globals.values()]
        else:
            nearby = [getattr(thing, "__self__", thing)]
        for owner in nearby:
            parts = [owner] if isinstance(owner, nn.Module) else [*getattr(owner, "__dict__", {}).values()]
            found |= {part: None for part in parts if isinstance(part, nn.Module)}
    return [*found]


class Transformers(Adapter):
    """The adapter of a causal language model of transformers. It calls the model as generate() does."""

    kinds = ("own", "static")

    def __init__(self, model, inputs):
        import transformers

        if int(transformers.__version__.partition(".")[0]) < 5:
            raise ImportError(f"needs transformers 5.0 or newer, but this is {transformers.__version__}")
        super().__init__([model], inputs)
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.vocab_size = model.get_output_embeddings().weight.size(0)
        grows = (getattr(self.config, "rope_parameters", None) or {}).get("rope_type") == "dynamic"
        self.context = None if grows else getattr(self.config, "max_position_embeddings", None)
        windows = "sliding_window", "attention_chunk_size", "window_size", "attention_window_size"
        self.window = next(filter(None, (getattr(self.config, name, None) for name in windows)), None)
        self.pad = getattr(self.config, "pad_token_id", None) or 0
        self.takes = inspect.signature(model.forward).parameters
        self.cache_name = next((name for name in ("cache_params", "past_key_values") if name in self.takes), None)

    def attentions(self):
        own, experts = (getattr(self.config, f"_{part}_implementation", None) for part in ("attn", "experts"))
        if experts:
            self.model.set_experts_implementation("eager")  # the fast kernels have no float64
        for name in (own, "eager" if own != "eager" else "sdpa"):
            try:
                self.model.set_attn_implementation(name)
                yield name, None
            except (ValueError, ImportError) as error:
                yield name, first_line(error)
        self.model.set_attn_implementation(own)
        if experts:
            self.model.set_experts_implementation(experts)

    def full(self, ids, rows, mask=None, pos=None):
        more = self.placed(mask, pos) | self.inputs_of(rows)
        return self.model(input_ids=ids, **({"use_cache": False} if "use_cache" in self.takes else {}), **more).logits

    def new(self, rows, length, kind):
        import transformers

        if kind == "own":  # None lets the model make one
            has_default = getattr(self.model, "_supports_default_dynamic_cache", lambda: True)()
            return transformers.DynamicCache(config=self.config) if has_default else None
        if kind == "static" and self.cache_name and self.model._can_compile_fullgraph:
            return transformers.StaticCache(config=self.config, max_cache_len=length)
        if kind == "quantized":
            return transformers.QuantizedCache("fp8", config=self.config)
        raise NotImplementedError("transformers has none for this model (_can_compile_fullgraph)")

    def step(self, ids, cache, mask, pos, rows, lengths):
        if self.cache_name is None:  # then we only see what generate() does
            raise NotImplementedError("the model takes no cache_params and no past_key_values")
        make_mask = getattr(self.model, "create_masks_for_generate", None)
        if make_mask and mask is not None and getattr(cache, "is_compileable", False):
            mask = make_mask(self.config, self.model.get_input_embeddings()(ids), mask, cache)
        more = {self.cache_name: cache, **self.placed(mask, pos), **self.inputs_of(rows)}
        output = self.model(input_ids=ids, use_cache=True, **more)
        held = getattr(output, self.cache_name, None)
        if held is None:
            raise NotImplementedError("the model returns no cache")
        return output.logits, held

    def placed(self, mask, pos):
        """Return the arguments for mask and positions. Without a mask, the model has to work out positions itself."""
        given = {"attention_mask": mask, "position_ids": pos} if mask is not None else {}
        return {name: value for name, value in given.items() if name in self.takes}

    def generated_logits(self, ids, mask, count, rows):
        """Return the logits (B, count, V) of generate(), forced to choose the last `count - 1` tokens of `ids`."""
        import transformers

        if getattr(type(self.model), "generate", None) is not transformers.GenerationMixin.generate:
            raise NotImplementedError("the model does not use generate() of transformers")

        def force(seen, scores):
            place = min(seen.size(1), ids.size(1) - 1)  # we do not look at any logits after the last choice
            return nn.functional.one_hot(ids[:, place], self.vocab_size).to(scores)

        end = ids.size(1) - count + 1
        no_token = self.vocab_size  # None would mean the model's own end-of-text token
        settings = transformers.GenerationConfig(
            max_new_tokens=count,
            eos_token_id=no_token,
            pad_token_id=self.pad,
            output_logits=True,
            return_dict_in_generate=True,
        )
        said = self.model.generate(
            ids[:, :end],
            attention_mask=mask[:, :end],
            generation_config=settings,
            logits_processor=transformers.LogitsProcessorList([force]),
            **self.inputs_of(rows),
        )
        return torch.stack(said.logits, 1)
