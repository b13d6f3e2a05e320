"""A model as a Hugging Face folder, and back: the same network in a class of transformers, and its characters.

A network goes to the class that computes exactly what it does: GPT-2's for learned positions and GELU, StableLM's for
rotary positions and SwiGLU, there with or without normalized queries and keys, and with fewer key/value heads or not.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from checkpoint import write_atomically
from model import GPT, GPTConfig

# parts of our names, and what StableLM has in their place; several where ours holds theirs one below the other, and one
# for each head where theirs are all the same
STABLELM = {
    "transformer.wte": ["model.embed_tokens"],
    "transformer.ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
    "ln_1": ["input_layernorm"],
    "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_layernorm.norms.{}"],
    "attn.k_norm": ["self_attn.k_layernorm.norms.{}"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.c_proj": ["mlp.down_proj"],
}
ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}


def model_type(config):
    """The class, by transformers' name for it, that computes what `config`'s network does; ValueError if none does."""
    learned, has = config.pos_emb == "learned", {"norm_first": (True,)}
    if learned:
        has |= {"activation": ("gelu", "gelu_tanh"), "qk_norm": (False,), "n_kv_head": (None, config.n_head)}
    else:
        has |= {"activation": ("swiglu",), "bias": (False,)}
    for name, values in has.items():
        if getattr(config, name) not in values:
            nearest = "GPT-2's class, the one for learned" if learned else "StableLM's class, the one for rotary"
            raise ValueError(f"{name}={getattr(config, name)}: {nearest} positions, has only {name}={values[-1]}")
    return "gpt2" if learned else "stablelm"


def hf_config(model):
    """The transformers config to build the class from."""
    from transformers import GPT2Config, StableLmConfig

    config, hidden = model.config, model.transformer["h"][0].mlp.c_proj.in_features
    common = dict(
        vocab_size=config.vocab_size, tie_word_embeddings=config.tie_weights, bos_token_id=None, eos_token_id=None
    )
    if model_type(config) == "gpt2":
        return GPT2Config(
            n_positions=config.block_size,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_inner=hidden,
            activation_function="gelu" if config.activation == "gelu" else "gelu_new",
            **{f"{place}_pdrop": config.dropout for place in ("resid", "embd", "attn")},
            **common,
        )
    return StableLmConfig(
        max_position_embeddings=config.block_size,
        hidden_size=config.n_embd,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.kv_heads,
        intermediate_size=hidden,
        qk_layernorm=config.qk_norm,
        rope_parameters={"rope_type": "default"} | ROPE,
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        **common,
    )


def their_names(name, config):
    """Their names for our parameter `name`: one, or the several that it becomes."""
    if config.pos_emb == "learned":
        return [name]  # nanoGPT's names are GPT-2's
    module, kind = name.rsplit(".", 1)
    layer = ""
    if module.startswith("transformer.h."):
        _, _, number, module = module.split(".", 3)
        layer = f"model.layers.{number}."
    heads = {"attn.q_norm": config.n_head, "attn.k_norm": config.kv_heads}.get(module, 1)
    return [f"{layer}{theirs.format(head)}.{kind}" for theirs in STABLELM[module] for head in range(heads)]


def transposed(name, tensor):
    """Whether GPT-2's class, whose Linears are Conv1Ds, holds our parameter `name` with its axes swapped."""
    return name.startswith("transformer.h.") and tensor.dim() == 2


def to_transformers(model):
    """The model as an instance of the transformers class that computes the same, in eval mode and where the model is.

    Raises ValueError if there is none.
    """
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_config(hf_config(model))
    theirs, state = hf.state_dict(), {}
    for name, p in model.state_dict().items():
        p = p.t() if model.config.pos_emb == "learned" and transposed(name, p) else p
        names = their_names(name, model.config)
        sizes = [len(theirs[each]) for each in names]
        state |= zip(names, p.split(sizes) if sum(sizes) == len(p) else [p] * len(names))
    for name, p in theirs.items():  # a bias that ours does not have adds nothing
        if name.endswith("bias"):
            state.setdefault(name, torch.zeros_like(p))
    hf.load_state_dict(state)
    return hf.to(model.lm_head.weight.device).eval()


def write_folder(model, chars, folder):
    """Write config.json, model.safetensors and the tokenizer's files, made by the libraries that will read them: each
    whole or not at all, and none before all of them could be made.

    Raises ValueError if no class of transformers computes what this model does, OSError if they cannot be written.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # every character a token: no pattern but [\s\S] takes newlines too; no unk_token: an unknown character is an error
    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    hf = to_transformers(model)
    with tempfile.TemporaryDirectory() as made:
        try:
            hf.save_pretrained(made)
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=model.config.block_size
            ).save_pretrained(made)
        except Exception as error:  # a full disk has a name of its own in every library
            raise OSError(None, str(error).strip(), made) from None
        # as transformers 4 wants them, beside what 5 has written
        amend(Path(made) / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        if model.config.pos_emb == "rope":
            amend(Path(made) / "config.json", **{name: hf.config.rope_parameters[name] for name in ROPE})
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(made).iterdir(), reverse=True):  # config.json last
            write_atomically(folder / file.name, file.read_bytes())


def amend(file, **entries):
    content = json.loads(file.read_text(encoding="utf-8")) | entries
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_folder(folder):
    """A folder that write_folder wrote, or anybody: a character tokenizer and a GPT-2 or a StableLM.

    Returns a dict with the keys "model", "model_args" and "chars", as a checkpoint has them (checkpoint.build_model).
    Reads the files themselves, without transformers. Raises ValueError, with one line that says why, for a folder that
    cannot be read and for a network that is none of this kit's.
    """
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError("a Hugging Face folder needs safetensors: pip install safetensors") from None
    folder = Path(folder)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        index, files = folder / "model.safetensors.index.json", {"model.safetensors"}
        if index.is_file():  # large models come in several files
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        theirs = {}
        for name in sorted(files):
            if not (folder / name).is_file():
                raise ValueError(f"{name} is missing")
            theirs |= load_file(folder / name)
        if any(len(char) != 1 for char in vocab) or sorted(vocab.values()) != list(range(len(vocab))):
            raise ValueError("its tokenizer is not one of single characters")
        args = read_config(config, theirs)
        state, rest = {}, {name for name, tensor in theirs.items() if tensor.any()}  # zeros add nothing
        for name, ours in GPT(GPTConfig(**args)).state_dict().items():
            if name == "lm_head.weight" and args["tie_weights"]:
                rest.discard("lm_head.weight")
                continue
            parts = [theirs[each] for each in their_names(name, GPTConfig(**args))]
            rest -= set(their_names(name, GPTConfig(**args)))
            if len(parts) > 1 and ours.shape == parts[0].shape:
                if any(not torch.equal(part, parts[0]) for part in parts):
                    raise ValueError(f"{name}: every head has a norm of its own, and here a layer's heads share one")
                parts = parts[:1]
            whole = torch.cat(parts)
            state[name] = whole.t() if args["pos_emb"] == "learned" and transposed(name, ours) else whole
        rest = {name for name in rest if not name.endswith((".attn.bias", ".attn.masked_bias"))}  # GPT-2's old masks
        if rest:
            raise ValueError(f"it has {min(rest)}, which the network of its config.json has no place for")
        state.setdefault("lm_head.weight", state["transformer.wte.weight"])
        return dict(model=state, model_args=asdict(GPTConfig(**args)), chars="".join(sorted(vocab, key=vocab.get)))
    except OSError as error:
        raise ValueError(f"{folder} is no Hugging Face folder: {error.filename}: {error.strerror}") from None
    except KeyError as error:
        raise ValueError(f"{folder} cannot be read: it lacks {error}") from None
    except Exception as error:  # a damaged file can raise nearly anything
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{folder} cannot be read: {why[0]}") from None


def read_config(config, theirs):
    """The model_args of a config.json and its weights. Raises ValueError for what this kit's network does not have."""

    def require(**wanted):
        for name, value in wanted.items():
            if config.get(name, value) != value:
                raise ValueError(f"it has {name} {config[name]!r}, and this kit's network {value!r}")

    if config["model_type"] not in ("gpt2", "stablelm"):
        raise ValueError(f"it is a {config['model_type']}, and this kit reads gpt2 and stablelm")
    biased = [name for name, tensor in theirs.items() if name.endswith("bias") and tensor.any()]
    args = dict(vocab_size=config["vocab_size"], bias=False)
    if config["model_type"] == "gpt2":
        require(layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
        args |= {name: config[name] for name in ("n_layer", "n_head", "n_embd")}
        activations = {"gelu": "gelu", "gelu_new": "gelu_tanh"}
        if config["activation_function"] not in activations:
            raise ValueError(f"its activation_function {config['activation_function']!r} is neither gelu nor gelu_new")
        hidden = config.get("n_inner") or 4 * args["n_embd"]
        return args | dict(
            block_size=config["n_positions"],
            dropout=config.get("resid_pdrop", 0.0),
            activation=activations[config["activation_function"]],
            bias=bool(biased),
            mlp_ratio=4 if hidden == 4 * args["n_embd"] else (hidden + 0.5) / args["n_embd"],
            tie_weights=config.get("tie_word_embeddings", True),
            pos_emb="learned",
        )
    rope = config.get("rope_parameters") or config  # where transformers 5 has them, and 4 had them
    for name, value in ({"rope_type": "default"} | ROPE).items():
        if rope.get(name, "default" if name == "rope_type" else None) != value:
            raise ValueError(f"its {name} is {rope.get(name)!r}, and this kit's {value!r}")
    require(rope_scaling=None)
    require(layer_norm_eps=1e-5, hidden_act="silu", use_qkv_bias=False, use_parallel_residual=False)
    if biased:
        raise ValueError(f"its {biased[0]} is not zero, and this kit's network has no biases beside SwiGLU")
    return args | dict(
        block_size=config["max_position_embeddings"],
        n_layer=config["num_hidden_layers"],
        n_head=config["num_attention_heads"],
        n_kv_head=config["num_key_value_heads"],
        n_embd=config["hidden_size"],
        dropout=config.get("hidden_dropout", 0.0),
        activation="swiglu",
        mlp_ratio=(1.5 * config["intermediate_size"] - 1) / config["hidden_size"],  # see MLP
        tie_weights=config.get("tie_word_embeddings", False),
        pos_emb="rope",
        qk_norm=config.get("qk_layernorm", False),
    )
