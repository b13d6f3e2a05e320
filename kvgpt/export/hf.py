"""Hugging Face folders: a model written as a class of transformers that computes the same, and read back.

GPT-2's class computes learned positions with GELU. StableLM's class computes rotary positions with SwiGLU, with or
without normalized queries and keys, and with any number of key/value heads.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from kvgpt.checkpoint import Checkpoint, first_line, network_shapes
from kvgpt.checksums import SUMS, check_folder, checksums
from kvgpt.engines.onnx import write_onnx
from kvgpt.files import read_regular, read_tree, write_tree
from kvgpt.vocabulary import check_characters
from model import GPTConfig

# Our module names and StableLM's. Several names: our matrix is theirs, stacked. "{}": one module per head, all equal.
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
GRAPH = Path("onnx", "model.onnx")  # inside a folder, where transformers.js and Optimum look for it
INDEX = "model.safetensors.index.json"  # names the files of weights that are split
SHARDS = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"  # the names that transformers gives them
SPECIAL = ("added_tokens.json", "special_tokens_map.json")  # transformers adds their tokens to those of tokenizer.json


def model_type(config):
    """Return "gpt2" or "stablelm": the class of transformers that computes the network of `config`.

    Raises ValueError, naming field and value, if no class does.
    """
    learned = config.pos_emb == "learned"
    allowed = {"norm_first": (True,)}
    if learned:
        allowed |= {"activation": ("gelu", "gelu_tanh"), "qk_norm": (False,), "n_kv_head": (None, config.n_head)}
    else:
        allowed |= {"activation": ("swiglu",), "bias": (False,)}
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            nearest = "GPT-2 for learned" if learned else "StableLM for rotary"
            raise ValueError(
                f"{name}={getattr(config, name)}: transformers has {nearest} positions, with {name}={values[-1]} only"
            )
    return "gpt2" if learned else "stablelm"


def their_names(name, config):
    """Return the names in transformers of our parameter `name`: a list of one, or of the parts that it is made of."""
    if config.pos_emb == "learned":
        return [name]  # nanoGPT's names are GPT-2's
    module, kind = name.rsplit(".", 1)
    layer = ""
    if module.startswith("transformer.h."):
        _, _, number, module = module.split(".", 3)
        layer = f"model.layers.{number}."
    heads = {"attn.q_norm": config.n_head, "attn.k_norm": config.num_kv_heads}.get(module, 1)
    return [f"{layer}{theirs.format(head)}.{kind}" for theirs in STABLELM[module] for head in range(heads)]


def transposed(name, tensor, config):
    """Return whether transformers stores our parameter `name` transposed, as GPT-2's Conv1D layers do."""
    return config.pos_emb == "learned" and name.startswith("transformer.h.") and tensor.dim() == 2


# -- writing -----------------------------------------------------------------------------------------------------------


def hf_config(model):
    """Return the transformers config of the class that computes the same."""
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
        num_key_value_heads=config.num_kv_heads,
        intermediate_size=hidden,
        qk_layernorm=config.qk_norm,
        rope_parameters={"rope_type": "default"} | ROPE,
        hidden_dropout=config.dropout,
        attention_dropout=config.dropout,
        **common,
    )


def to_transformers(model):
    """Return the model as an instance of the transformers class that computes the same, in eval mode, on its device.

    Raises ValueError if no class does.
    """
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_config(hf_config(model))
    theirs, state = hf.state_dict(), {}
    for name, p in model.state_dict().items():
        p = p.t() if transposed(name, p, model.config) else p
        names = their_names(name, model.config)
        sizes = [len(theirs[each]) for each in names]
        state |= zip(names, p.split(sizes) if sum(sizes) == len(p) else [p] * len(names))
    for name, p in theirs.items():  # our network may lack a bias of theirs, and a bias of zero adds nothing
        if name.endswith("bias"):
            state.setdefault(name, torch.zeros_like(p))
    hf.load_state_dict(state)
    return hf.to(model.lm_head.weight.device).eval()


def hf_tokenizer(chars, block_size):
    """Return the transformers tokenizer that makes every character a token. An unknown character is an error.

    It has no pad token. transformers would make a character that the folder names as pad token special, and a pipeline
    leaves special tokens out of the text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}))  # no unk_token
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # "." would leave out newlines
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=block_size,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 adds token_type_ids by default
    )


def write_folder(model, chars, folder, graph=False, check=lambda made: None):
    """Write config.json, model.safetensors, the files of the tokenizer, and SUMS: all of them, or none after an error.

    chars   the vocabulary: token i is chars[i]
    folder  a Path, made if it does not exist
    graph   also write GRAPH, by the onnx packages. False: remove an earlier export's, which may be another model's
    check   called with a temporary folder that holds the files, before `folder` changes
    Split weights and SPECIAL files of an earlier model are removed, because readers would mix them with the new ones.
    Raises ValueError if no class of transformers computes what this model does, OSError if files cannot be written.
    """
    hf, tokenizer = to_transformers(model), hf_tokenizer(chars, model.config.block_size)
    hf.generation_config.max_length = model.config.block_size  # else a pipeline adds 256 tokens to any prompt
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        # transformers and tokenizers make the files that they will read
        try:
            hf.save_pretrained(made)
            tokenizer.save_pretrained(made)
        except Exception as error:  # each library reports a full disk in its own way
            raise OSError(None, str(error).strip(), made) from None

        # transformers 4 reads the same settings under other names
        amend(Path(made) / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        if model.config.pos_emb == "rope":
            amend(Path(made) / "config.json", **{name: hf.config.rope_parameters[name] for name in ROPE})

        if graph:
            # without this entry transformers.js in a browser looks for model_quantized.onnx
            amend(Path(made) / "config.json", **{"transformers.js_config": {"dtype": "fp32"}})
            (Path(made) / GRAPH).parent.mkdir()
            write_onnx(model, chars, Path(made) / GRAPH)

        files = read_tree(Path(made))
        check(Path(made))

    # replace what the folder holds, the checksums last
    stale = [INDEX, *SPECIAL, *(file.name for file in folder.glob(SHARDS)), *([] if graph else [GRAPH])]
    write_tree(folder, files | {SUMS: checksums(files)}, stale)


def amend(file, **entries):
    content = read_json(file) | entries
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- reading -----------------------------------------------------------------------------------------------------------


def read_folder(folder):
    """Return the Checkpoint of a folder that write_folder or transformers wrote: a GPT-2 or StableLM of characters.

    The files are read without transformers. Raises ValueError, with one line that says why, for a folder that cannot be
    read, and for a network that model.py does not have.
    """
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError("a Hugging Face folder needs safetensors: pip install safetensors") from None
    folder = Path(folder)
    try:
        check_folder(folder)
        hf_args = read_json(folder / "config.json")
        chars = read_chars(folder / "tokenizer.json")
        tensors = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
        config = GPTConfig(**read_config(hf_args, tensors))
        weights = from_transformers(tensors, config)
    except OSError as error:
        raise ValueError(f"{folder} is no Hugging Face folder: {error.filename}: {error.strerror}") from None
    except KeyError as error:
        raise ValueError(f"{folder} cannot be read: it lacks {error}") from None
    except Exception as error:  # a damaged file can raise nearly anything
        raise ValueError(f"{folder} cannot be read: {first_line(error)}") from None
    check_characters(chars, folder, config.vocab_size)
    return Checkpoint(path=folder, weights=weights, model_args=asdict(config), chars=chars)


def read_json(file):
    return json.loads(read_regular(file))


def read_chars(file):
    """Return the characters of a tokenizer.json in order of their ids."""
    vocab = read_json(file)["model"]["vocab"]
    if any(len(char) != 1 for char in vocab) or sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError("its tokenizer is not one of single characters")
    return "".join(sorted(vocab, key=vocab.get))


def weight_files(folder):
    """Return the safetensors files of the folder. Large models are split into several."""
    index, names = folder / INDEX, {"model.safetensors"}
    if index.is_file():
        names = set(read_json(index)["weight_map"].values())
    for name in sorted(names):
        if Path(name).name != name:
            raise ValueError(f"{index.name} names {name!r}, which is not a file of the folder")
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
    return [folder / name for name in sorted(names)]


def read_config(hf_args, tensors):
    """Return the fields of GPTConfig that describe a folder's network.

    hf_args  the content of config.json
    tensors  the weights; they tell whether biases are used
    Raises ValueError for a network that model.py does not have, KeyError for a setting that is missing.
    """

    def require(**wanted):
        for name, value in wanted.items():
            if hf_args.get(name, value) != value:
                raise ValueError(f"it has {name} {hf_args[name]!r}, and this kit's network {value!r}")

    if hf_args["model_type"] not in ("gpt2", "stablelm"):
        raise ValueError(f"it is a {hf_args['model_type']}, and this kit reads gpt2 and stablelm")
    biased = [name for name, tensor in tensors.items() if name.endswith("bias") and tensor.any()]
    # like transformers, we do not tie a head whose weights are there and differ, whatever config.json says
    embedding = "transformer.wte.weight" if hf_args["model_type"] == "gpt2" else "model.embed_tokens.weight"
    may_tie = "lm_head.weight" not in tensors or torch.equal(tensors["lm_head.weight"], tensors[embedding])
    vocab_size = hf_args["vocab_size"]

    # GPT-2
    if hf_args["model_type"] == "gpt2":
        require(layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
        activation, activations = hf_args["activation_function"], {"gelu": "gelu", "gelu_new": "gelu_tanh"}
        if activation not in activations:
            raise ValueError(f"its activation_function {activation!r} is neither gelu nor gelu_new")
        n_embd = hf_args["n_embd"]
        hidden = hf_args.get("n_inner") or 4 * n_embd
        return dict(
            block_size=hf_args["n_positions"],
            vocab_size=vocab_size,
            n_layer=hf_args["n_layer"],
            n_head=hf_args["n_head"],
            n_embd=n_embd,
            dropout=hf_args.get("resid_pdrop", 0.0),
            bias=bool(biased),
            mlp_ratio=4 if hidden == 4 * n_embd else (hidden + 0.5) / n_embd,  # MLP rounds down to `hidden`
            activation=activations[activation],
            pos_emb="learned",
            tie_weights=may_tie and hf_args.get("tie_word_embeddings", True),
        )

    # StableLM
    rope = hf_args.get("rope_parameters") or hf_args  # transformers 5 nests the settings, 4 does not
    for name, value in ({"rope_type": "default"} | ROPE).items():
        if rope.get(name, "default" if name == "rope_type" else None) != value:
            raise ValueError(f"its {name} is {rope.get(name)!r}, and this kit's {value!r}")
    require(rope_scaling=None)
    require(layer_norm_eps=1e-5, hidden_act="silu", use_qkv_bias=False, use_parallel_residual=False)
    if biased:
        raise ValueError(f"its {biased[0]} is not zero, and this kit's network has no biases beside SwiGLU")
    return dict(
        block_size=hf_args["max_position_embeddings"],
        vocab_size=vocab_size,
        n_layer=hf_args["num_hidden_layers"],
        n_head=hf_args["num_attention_heads"],
        n_kv_head=hf_args["num_key_value_heads"],
        n_embd=hf_args["hidden_size"],
        dropout=hf_args.get("hidden_dropout", 0.0),
        bias=False,
        mlp_ratio=(1.5 * hf_args["intermediate_size"] - 1) / hf_args["hidden_size"],  # MLP takes 2/3 and rounds up
        activation="swiglu",
        pos_emb="rope",
        tie_weights=may_tie and hf_args.get("tie_word_embeddings", False),
        qk_norm=hf_args.get("qk_layernorm", False),
    )


def from_transformers(tensors, config):
    """Return the state_dict of a GPT from a transformers state_dict: the inverse of to_transformers.

    Raises KeyError for a tensor that is missing, ValueError for one that the network has no place for.
    """
    state, unused = {}, {name for name, tensor in tensors.items() if tensor.any()}  # zeros add nothing
    for name, shape in network_shapes(config, tensors).items():
        names = their_names(name, config)
        unused -= set(names)
        if name == "lm_head.weight" and config.tie_weights:
            continue
        parts = [tensors[each] for each in names]
        if len(parts) > 1 and shape == parts[0].shape:
            if any(not torch.equal(part, parts[0]) for part in parts):
                raise ValueError(f"{name}: every head has a norm of its own, and here a layer's heads share one")
            parts = parts[:1]
        whole = torch.cat(parts)
        state[name] = whole.t() if transposed(name, whole, config) else whole
    unused = {name for name in unused if not name.endswith((".attn.bias", ".attn.masked_bias"))}  # GPT-2's old masks
    if unused:
        raise ValueError(f"it has {min(unused)}, which the network of its config.json has no place for")
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    return state
