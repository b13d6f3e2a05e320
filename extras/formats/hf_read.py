"""Read a Hugging Face folder with a GPT-2 or a StableLM as our GPT. hf_write.py writes such folders.

GPT-2's class has learned positions and GELU. StableLM's has rotary positions and SwiGLU, with or without normalized
queries and keys, and any number of key/value heads.
"""

import json
import pickle
from dataclasses import asdict

import torch
from torch.overrides import TorchFunctionMode

from extras.cli import first_line, need
from extras.formats.bpe import read_tokenizer, tokenizer_from_json
from extras.formats.unsupported import refuse_pointer
from model import GPT, GPTConfig

# Our settings: their names in config.json, and the defaults of the classes, because config.json may leave them out.
SETTINGS = {
    "gpt2": dict(
        block_size=("n_positions", 1024),
        n_layer=("n_layer", 12),
        n_head=("n_head", 12),
        n_embd=("n_embd", 768),
    ),
    "stablelm": dict(
        block_size=("max_position_embeddings", 4096),
        n_layer=("num_hidden_layers", 32),
        n_head=("num_attention_heads", 32),
        n_kv_head=("num_key_value_heads", 32),
        n_embd=("hidden_size", 2560),
        qk_norm=("qk_layernorm", False),
    ),
}
# The same defaults, and those of other settings that we read.
DEFAULTS = {kind: dict(settings.values()) for kind, settings in SETTINGS.items()}
DEFAULTS["gpt2"] |= dict(vocab_size=50257, n_inner=None, activation_function="gelu_new", tie_word_embeddings=True)
DEFAULTS["stablelm"] |= dict(vocab_size=50304, intermediate_size=6912)
DEFAULTS["stablelm"] |= dict(tie_word_embeddings=False, partial_rotary_factor=0.25)
# GPT2Config accepts the names of other classes, too.
ALIASES = {name: SETTINGS["stablelm"][ours][0] for ours, (name, _) in SETTINGS["gpt2"].items()}
ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
LARGEST = 2**20  # no size of a model that we can read is larger
# Settings of transformers that are fixed in model.py.
FIXED = {
    "gpt2": dict(layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
    "stablelm": dict(
        layer_norm_eps=1e-5,
        hidden_act="silu",
        use_parallel_residual=False,
        rope_type="default",
        type="default",
        rope_scaling=None,
        **ROPE,
    ),
}
# GPT-2's names and ours. Where several mean the same, we write the last one.
ACTIVATIONS = {"gelu_python": "gelu", "gelu": "gelu"}
TANH = ("gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_new")
ACTIVATIONS |= dict.fromkeys(TANH, "gelu_tanh")
WITH_ID = ("bos", "eos", "pad")  # the special tokens that have an id in config.json


def their_parts(model):
    """Return {name in transformers: a view of our weights}. A tied head has no entry."""
    config = model.config
    parts = {}
    if config.pos_emb == "learned":  # nanoGPT's names are GPT-2's, which transposes the matrices of its layers
        for name, p in model.state_dict().items():
            parts[name] = p.t() if name.startswith("transformer.h.") and p.dim() == 2 else p
    else:
        parts["model.embed_tokens.weight"] = model.transformer["wte"].weight
        for i, block in enumerate(model.transformer["h"]):
            kv_rows = config.n_kv_head * config.head_size
            q, k, v = block.attn.c_attn.weight.split([config.n_embd, kv_rows, kv_rows])
            gate, up = block.mlp.c_fc.weight.chunk(2)
            layer = {
                "input_layernorm": block.ln_1.weight,
                "self_attn.q_proj": q,
                "self_attn.k_proj": k,
                "self_attn.v_proj": v,
                "self_attn.o_proj": block.attn.c_proj.weight,
                "post_attention_layernorm": block.ln_2.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": block.mlp.c_proj.weight,
            }
            if config.qk_norm:  # StableLM has a norm per head, we share one, so each gets a copy
                for head in range(config.n_head):
                    layer[f"self_attn.q_layernorm.norms.{head}"] = block.attn.q_norm.weight
                for head in range(config.n_kv_head):
                    layer[f"self_attn.k_layernorm.norms.{head}"] = block.attn.k_norm.weight
            parts |= {f"model.layers.{i}.{name}.weight": p for name, p in layer.items()}
        parts["model.norm.weight"] = model.transformer["ln_f"].weight
        parts["lm_head.weight"] = model.lm_head.weight
    if config.tie_weights:
        del parts["lm_head.weight"]
    return parts


# -- reading -----------------------------------------------------------------------------------------------------------


def read_folder(folder):
    """Return the checkpoint of a folder with a GPT-2, or a StableLM as we export it: see load_checkpoint in model.py.

    We read the files without transformers. Raises ValueError, with one line that says why, for a bad folder, and for a
    network that model.py does not compute exactly.
    """
    try:
        settings = with_defaults(read_object(folder / "config.json"))
        refuse_other_networks(settings)
        tensors = read_tensors(folder)
        config = config_of(read_config(settings, tensors), len(tensors))
        weights = from_transformers(tensors, config)
        tokenizer = tokenizer_from_json(read_tokenizer(folder))
        tokenizer_state = tokenizer.state_dict()
        tokenizer_state["special_tokens"] = special_tokens(folder, settings, len(tokenizer.vocab))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a Hugging Face folder: {first_line(error)}") from None
    except KeyError as error:
        raise ValueError(f"{folder} cannot be read: {error} is missing") from None
    except Exception as error:  # a damaged file can raise nearly anything
        raise ValueError(f"{folder} cannot be read: {first_line(error)}") from None
    return dict(model=weights, model_args=asdict(config), path=folder) | tokenizer_state


def read_object(file):
    """Return the dict in a file of JSON. Raises OSError, or ValueError that names the file."""
    refuse_pointer(file)
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file.name} is not a JSON object ({first_line(error)})") from None


def known_ids(value, size):
    """Return those of an id or a list of ids that a vocabulary of `size` tokens has, as a list."""
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int and 0 <= i < size]


def special_tokens(folder, settings, size):
    """Return the special tokens that the folder names, for a later export, which checks them.

    Ids, such as {"eos": 50256}, come from config.json and generation_config.json. The second one wins, unless the
    vocabulary of `size` tokens has none of its ids. Names, such as {"eos_token": "<|endoftext|>"}, come from
    special_tokens_map.json and tokenizer_config.json, of which the second one wins.
    """
    names = ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
    files = [folder / name for name in names]
    generation, *with_names = (read_object(file) if file.exists() else {} for file in files)
    found = {}
    for source in (settings, generation):
        for role in WITH_ID:
            ids = source.get(f"{role}_token_id")
            if ids is not None and (role not in found or known_ids(ids, size)):
                found[role] = ids
    for source in with_names:
        for key in (f"{role}_token" for role in (*WITH_ID, "unk", "sep", "cls", "mask")):
            token = source.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            found |= {key: token} if isinstance(token, str) else {}
    return found


def with_defaults(settings):
    """Return the content of config.json with the defaults of its class. Raises ValueError if it contradicts itself."""
    kind = settings["model_type"]
    if kind not in SETTINGS:
        raise ValueError(f"it is a {kind}, but model.py computes only gpt2 and stablelm; only transformers can run it")
    aliases = {name: alias for name, alias in ALIASES.items() if kind == "gpt2" and alias in settings}
    for name, alias in aliases.items():
        if settings.setdefault(name, settings[alias]) != settings[alias]:
            raise ValueError(f"its {name} is {settings[name]}, but its {alias}, the same, is {settings[alias]}")
    return DEFAULTS[kind] | rope_parameters(settings) | settings


def rope_parameters(settings):
    """Return the settings of the rotary positions, which transformers 4 has at the top level instead, or too."""
    return settings.get("rope_parameters") or {}


def refuse_other_networks(settings):
    """Raise ValueError unless model.py has the network that config.json describes."""
    kind = settings["model_type"]
    other = "only transformers can run it"
    for place in (settings, rope_parameters(settings)):
        for name, value in FIXED[kind].items():
            if place.get(name, value) != value:
                raise ValueError(f"its {name} is {place[name]!r}, but that of model.py is {value!r}; {other}")
    if kind == "gpt2" and settings["activation_function"] not in ACTIVATIONS:
        name = settings["activation_function"]
        raise ValueError(f"its activation_function {name!r} is none of {', '.join(ACTIVATIONS)}; {other}")


def read_tensors(folder):
    """Return {name: tensor}, with the names of GPT2LMHeadModel or StableLmForCausalLM.

    We look for the files that transformers looks for, by name, because shards of an older model may be there, too. The
    tensors of safetensors are views of the files, so a large model is not in memory twice.
    """
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    pickled = folder / "pytorch_model.bin"
    places = None  # {tensor: the file that has it}
    if not files[0].exists() and index.exists():
        places = read_object(index)["weight_map"]
        files = [folder / name for name in sorted(set(places.values()))]
    tensors = {}
    if not files[0].exists() and places is None and pickled.exists():
        refuse_pointer(pickled)
        try:
            tensors = torch.load(pickled, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:  # torch's advice would be to load it in an unsafe way
            raise ValueError("pytorch_model.bin is damaged, or contains more than tensors") from None
    else:
        safetensors = need("it", "safetensors")
        from safetensors.torch import load_file

        found = set()
        for file in files:
            refuse_pointer(file)
            try:
                shard = load_file(file)
            except safetensors.SafetensorError as error:
                raise ValueError(f"{file.name} is damaged ({first_line(error)}): download it again") from None
            found |= {(name, file.name) for name in shard}
            tensors |= shard
        if places is not None and (wrong := sorted(found ^ places.items())):
            raise ValueError(f"{index.name} and the shards that it names disagree about {wrong[0][0]}")

    # old files contain causal masks, and OpenAI's are from the class without a head
    tensors = {name: x for name, x in tensors.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    if "wte.weight" in tensors:
        tensors = {name if name == "lm_head.weight" else f"transformer.{name}": x for name, x in tensors.items()}
    return tensors


def read_config(settings, tensors):
    """Return the fields of GPTConfig for the network in a folder.

    settings  the content of config.json
    tensors   from read_tensors; they show whether biases are used, and whether the head is tied
    Raises ValueError for settings that do not fit the tensors, and KeyError for a missing tensor.
    """
    kind = settings["model_type"]
    config = {ours: settings[theirs] for ours, (theirs, _) in SETTINGS[kind].items()}
    n_embd = config["n_embd"]
    # as in transformers, an lm_head in the file overrides tie_word_embeddings in config.json
    name = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    embedding = tensors[name]
    if embedding.shape != (settings["vocab_size"], n_embd):
        raise ValueError(f"its {name} does not fit its config.json")
    tied = "lm_head.weight" not in tensors or torch.equal(tensors["lm_head.weight"], embedding)
    if "lm_head.weight" not in tensors and not settings["tie_word_embeddings"]:
        raise ValueError(f"it lacks lm_head.weight, and its tie_word_embeddings is {settings['tie_word_embeddings']}")
    config |= dict(vocab_size=settings["vocab_size"], tie_weights=tied)
    # the ratio that gives this hidden size: MLP rounds down, but for SwiGLU it takes 2/3 and rounds up
    if kind == "stablelm":
        mlp_ratio = (1.5 * settings["intermediate_size"] - 1) / n_embd
        return config | dict(activation="swiglu", mlp_ratio=mlp_ratio, pos_emb="rope", bias=False)
    hidden = settings["n_inner"] or 4 * n_embd
    mlp_ratio = 4 if hidden == 4 * n_embd else (hidden + 0.5) / n_embd
    bias = any(x.any() for name, x in tensors.items() if name.endswith("bias"))
    activation = ACTIVATIONS[settings["activation_function"]]
    return config | dict(activation=activation, mlp_ratio=mlp_ratio, bias=bias)


def config_of(settings, num_tensors):
    """Return the GPTConfig with fields that a file names. Raises ValueError, before anything of these sizes is built.

    num_tensors  how many the file has, which is more than its layers
    """
    config = GPTConfig(**settings)
    for name, most in dict(n_layer=num_tensors, block_size=LARGEST, vocab_size=LARGEST, n_embd=LARGEST).items():
        size = getattr(config, name)
        if size > most:
            raise ValueError(f"its {name} is {size}, which is too large for a file of {num_tensors} tensors")
    return config


class SkipInit(TorchFunctionMode):
    """Skip the initialization of layers, whose random numbers take seconds for a large model that a file then fills."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


@torch.no_grad()
def from_transformers(tensors, config):
    """Return the state_dict of a GPT from the tensors of transformers: the inverse of to_transformers in hf_write.py.

    Raises KeyError for a missing tensor, ValueError for one that does not fit the network.
    """
    with SkipInit():
        model = GPT(config)
    parts = their_parts(model)
    for name, part in parts.items():
        tensor = tensors[name]
        if tensor.shape != part.shape or not tensor.is_floating_point():  # integers need a scale
            raise ValueError(f"its {name} does not fit its config.json: it is {tuple(tensor.shape)} in {tensor.dtype}")
        part.copy_(tensor)
        if "layernorm.norms" in name:
            layer, _, head = name.removesuffix(".weight").rpartition(".")
            if head != "0" and (tensor != tensors[f"{layer}.0.weight"]).any():
                raise ValueError(f"{name}: each head has its own norm, but in model.py the heads of a layer share one")
    for name in sorted(tensors.keys() - parts.keys() - {"lm_head.weight"}):  # a tied head may be in the file or not
        if tensors[name].any():  # zeros add nothing
            raise ValueError(f"it has {name}, which does not belong to the network in its config.json")
    return model.state_dict()
