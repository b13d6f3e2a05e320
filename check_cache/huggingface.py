"""All that we need to know about transformers. What it renames cannot run, and the reason names what we looked for."""

import inspect
import re

import torch

from check_cache.report import Verdict

# the names of the cache in the arguments and the output of `forward`, newest first
CACHES = "cache past_key_values cache_params state".split()
# the settings of sliding or chunked attention
WINDOW = re.compile("(window|window_size|attention_chunk_size)$")
# the methods of a cache
METHODS = dict(crop="crop", reorder="reorder_cache", repeat="batch_repeat_interleave", select="batch_select_indices")
METHODS |= dict(reset="reset")


def is_model(model):
    return not hasattr(model, "step") and getattr(model, "get_output_embeddings", lambda: None)() is not None


def refusals(cache):
    """Return the exceptions with which a cache refuses. Those of transformers ask each layer for the method."""
    return (ValueError, AttributeError) if type(cache).__module__.startswith("transformers.") else (ValueError,)


def prepare_rollback(cache):
    """Prepare a cache for crop, as assisted generation does. Return whether it can be cropped, if it knows that yet."""
    if hasattr(cache, "activate_past_recording"):  # of a window, or of convolutions
        cache.activate_past_recording()
    return getattr(cache, "is_croppable", True)


SMALL = dict(hidden_size=64, num_attention_heads=4, head_dim=16, rotary_dim=16, intermediate_size=128, vocab_size=256)
SMALL |= dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
SMALL |= dict(vocab_size_per_layer_input=256, sliding_window=16)
SMALL |= dict(n_group=1, topk_group=1, qk_rope_head_dim=16, first_k_dense_replace=1)
SMALL |= dict(num_heads=8, mamba_num_heads=8, mamba_n_heads=8, n_mamba_heads=8, mamba_head_dim=16, mamba_d_ssm=128)
# the sizes that a config computes from others if they are not there
DERIVED = "attention_hidden_size attention_head_dim mamba_d_head mamba_headdim per_layer_config".split()


def load_model(folder, tiny):
    """Return the model in a folder, or a random one of its architecture with small sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    local = dict(local_files_only=True, trust_remote_code=False)
    if not tiny:
        return AutoModelForCausalLM.from_pretrained(folder, **local)
    config = AutoConfig.from_pretrained(folder, **local).get_text_config(decoder=True)
    settings = {name: value for name, value in config.to_dict().items() if name not in DERIVED}
    depth, kinds = config.num_hidden_layers, list(getattr(config, "layer_types", None) or ())
    layers = max([2, *(1 + kinds.index(kind) for kind in {*kinds})])  # at least one of each kind
    heads, keys = (getattr(config, f"num_{name}_heads", None) or 1 for name in ("attention", "key_value"))
    for name, size in (SMALL | dict(num_key_value_heads=max(1, 4 * keys // heads), num_hidden_layers=layers)).items():
        name = config.attribute_map.get(name, name)
        if isinstance(settings.get(name), int):
            settings[name] = min(settings[name], size)
    for name, value in settings.items():
        if isinstance(value, list) and len(value) == depth:
            settings[name] = value[:layers]
        elif name.endswith("_token_id") and isinstance(value, int):
            settings[name] = min(value, SMALL["vocab_size"] - 1)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # models this small are slower on several threads
    return AutoModelForCausalLM.from_config(type(config).from_dict(settings))


class Transformers:
    """The adapter of a causal language model of transformers. It makes the inputs of a step as generate() does."""

    def __init__(self, model):
        import transformers

        if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 4):  # those want cache_position from us
            raise ImportError(f"needs transformers 5.4 or newer, but this is {transformers.__version__}")
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.static_cache, self.parameters = transformers.StaticCache, inspect.signature(model.forward).parameters
        self.cache = next((name for name in CACHES if name in self.parameters), None)
        self.open = any(each.kind == each.VAR_KEYWORD for each in self.parameters.values())  # takes any argument
        self.prepare = getattr(model, "prepare_inputs_for_generation", None)  # of models with GenerationMixin
        self.must_run = ("decode", "chunks of mixed sizes") + (("left padding",) if self.prepare else ())
        self.vocab_size = model.get_output_embeddings().weight.size(0)
        self.context = getattr(self.config, "max_position_embeddings", None)
        self.pad = getattr(self.config, "pad_token_id", None) or 0
        settings = [value for name, value in vars(self.config).items() if WINDOW.search(name)]
        self.window = next((value for value in settings if type(value) is int and value > 0), None)

    def full(self, ids, **inputs):
        return self.model(input_ids=ids, **self.caching(False), **inputs).logits

    def caching(self, use):
        return dict(use_cache=use) if self.open or "use_cache" in self.parameters else {}

    def new(self, rows, length, kind):
        if kind == "own":
            return None  # the model makes one
        if self.cache and self.model._can_compile_fullgraph:
            return self.static_cache(config=self.config, max_cache_len=length)
        raise NotImplementedError("transformers has none for this model (_can_compile_fullgraph)")

    def step(self, ids, cache, mask, pos, **inputs):
        if self.cache is None:  # then we only see what generate() does
            raise NotImplementedError(f"forward takes no cache: none of {', '.join(CACHES)}")
        more = {self.cache: cache, **self.caching(True), **inputs}
        if mask is not None:  # without one, the model has to work out positions itself
            if "attention_mask" not in self.parameters:
                raise NotImplementedError("forward takes no attention_mask")
            more["attention_mask"] = mask
            places = "position_ids" in self.parameters
            if places:
                more["position_ids"] = pos
            if not places or getattr(cache, "is_compileable", False):  # only generate() knows what becomes of the mask
                if not self.prepare:
                    raise NotImplementedError("the model has no prepare_inputs_for_generation(), see GenerationMixin")
                made = self.prepare(ids, is_first_iteration=mask.shape == ids.shape, **more)
                kept = {key: value for key, value in made.items() if key not in (*CACHES, "logits_to_keep")}
                more = {self.cache: cache, **kept}
        output = self.model(**more | dict(input_ids=ids))
        if output.logits.shape[:2] != ids.shape:
            got = f"logits {(*output.logits.shape,)}"
            raise Verdict("wrong", f"forward returns {got} for {len(ids)} rows and {ids.size(1)} tokens")
        held = getattr(output, self.cache, None)
        if held is None:
            raise NotImplementedError(f"forward returns no {self.cache}, but {', '.join(output.keys())}")
        return output.logits, held

    def generate(self, ids, count, use_cache, mask=None, eos=None, **inputs):
        if not self.model.can_generate():
            raise NotImplementedError("the model has no generate()")
        mask = torch.ones_like(ids) if mask is None else mask  # or it hides tokens with the padding id
        end = self.vocab_size if eos is None else eos  # no token. None would mean the model's own end-of-text token
        options = dict(max_new_tokens=count, use_cache=use_cache, eos_token_id=end, pad_token_id=self.pad)
        return self.model.generate(ids, attention_mask=mask, do_sample=False, **options, **inputs)
