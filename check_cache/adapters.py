"""What the check needs to know about a model: of transformers, or of this kit."""

import inspect

import torch
from torch import nn

from check_cache.report import first_line


class Transformers:
    """The adapter of a causal language model of transformers. It does what generate() does."""

    def __init__(self, model):
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.vocab_size = model.get_output_embeddings().weight.size(0)
        self.context = getattr(self.config, "max_position_embeddings", None)
        windows = "sliding_window", "attention_chunk_size", "window_size", "attention_window_size"
        self.window = next(filter(None, (getattr(self.config, name, None) for name in windows)), None)
        self.pad = getattr(self.config, "pad_token_id", None) or 0
        self.takes = inspect.signature(model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in self.takes else "past_key_values"

    def attentions(self):
        """Switch to each implementation of attention, and yield (its name, None or why we cannot)."""
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

    def full(self, ids, mask=None, pos=None):
        return self.model(input_ids=ids, use_cache=False, **self.placed(mask, pos)).logits

    def new(self, kind, length):
        import transformers

        if kind == "own":  # None lets the model make one
            has_default = self.model._supports_default_dynamic_cache()
            return transformers.DynamicCache(config=self.config) if has_default else None
        if kind == "static" and self.model._can_compile_fullgraph:
            return transformers.StaticCache(config=self.config, max_cache_len=length)
        if kind == "quantized":
            return transformers.QuantizedCache("fp8", config=self.config)
        raise NotImplementedError("transformers offers none for this model (_can_compile_fullgraph)")

    def step(self, ids, cache, mask, pos):
        make_mask = getattr(self.model, "create_masks_for_generate", None)
        if make_mask and mask is not None and getattr(cache, "is_compileable", False):
            mask = make_mask(self.config, self.model.get_input_embeddings()(ids), mask, cache)
        output = self.model(input_ids=ids, use_cache=True, **{self.cache_name: cache}, **self.placed(mask, pos))
        return output.logits, getattr(output, self.cache_name, None)

    def placed(self, mask, pos):
        """Return the arguments for mask and positions. Without a mask the model has to find the positions itself."""
        given = {"attention_mask": mask, "position_ids": pos} if mask is not None else {}
        return {name: value for name, value in given.items() if name in self.takes}

    def generate(self, ids, mask, count):
        """Return the logits (B, count, V) of generate(), which we make choose the last `count - 1` tokens of `ids`."""
        import transformers

        def force(seen, scores):
            place = min(seen.size(1), ids.size(1) - 1)  # the last choice has no logits that we look at
            return nn.functional.one_hot(ids[:, place], self.vocab_size).to(scores)

        end = ids.size(1) - count + 1
        no_token = self.vocab_size  # None would end a text at the token that the model itself ends at
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
        )
        return torch.stack(said.logits, 1)


class Kit:
    """The adapter of this kit's GPT, whose cache is a value that is passed along."""

    def __init__(self, model):
        self.model, self.vocab_size, self.context = model, model.config.vocab_size, model.config.block_size

    def full(self, ids):
        return self.model(ids)[0]

    def new(self, kind, length):
        if kind != "own":
            raise NotImplementedError("the cache of this GPT is static already")
        return KitCache()

    def step(self, ids, cache, mask, pos):
        if mask is not None and not mask.all():
            raise NotImplementedError("this GPT takes no mask, because it pads on the right")
        if cache.held is None:
            cache.held = self.model.new_cache(len(ids))
        cache.held.update = cache.update
        return self.model(ids, pos=pos, cache=cache.held)[0]


class KitCache:
    """A KVCache, which the first step makes, because only a step knows the batch."""

    held = None

    def update(self, *args, **kwargs):
        """The model's calls come through here, so that they can be watched as those of any cache."""
        return type(self.held).update(self.held, *args, **kwargs)

    def crop(self, count):
        """Do nothing: pos says how much of the cache is valid."""

    def reset(self):
        self.held = None  # the next step makes a new one


def adapter_of(model):
    if all(hasattr(model, name) for name in ("full", "new", "step", "vocab_size")):
        return model
    if hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None:
        return Transformers(model)
    if hasattr(model, "new_cache") and hasattr(getattr(model, "config", None), "block_size"):
        return Kit(model)
    raise TypeError(
        f"{type(model).__name__} is no causal language model of transformers, no GPT of this kit, and no adapter, "
        "which has vocab_size, full, new and step"
    )
