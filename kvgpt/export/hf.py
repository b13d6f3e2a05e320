"""Hugging Face folders: a model written as a class of transformers that computes the same, and read back.

GPT-2's class computes learned positions with GELU. StableLM's computes rotary positions with SwiGLU, with or without
normalized queries and keys, and with any number of key/value heads.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from kvgpt.checkpoint import Checkpoint, first_line
from kvgpt.cli import fail, one_line_errors
from kvgpt.export.check import compare, compare_onnx, own_text
from kvgpt.export.onnx import write_onnx
from kvgpt.files import check_folder, read_tree, write_tree
from kvgpt.vocabulary import check_characters
from model import GPT, GPTConfig

# Our settings and theirs.
SETTINGS = {
    "gpt2": dict(block_size="n_positions", n_layer="n_layer", n_head="n_head", n_embd="n_embd"),
    "stablelm": dict(
        block_size="max_position_embeddings",
        n_layer="num_hidden_layers",
        n_head="num_attention_heads",
        n_kv_head="num_key_value_heads",
        n_embd="hidden_size",
        qk_norm="qk_layernorm",
    ),
}
ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
# What is a setting in transformers, and fixed in model.py.
FIXED = {
    "gpt2": dict(layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
    "stablelm": dict(
        layer_norm_eps=1e-5,
        hidden_act="silu",
        use_parallel_residual=False,
        rope_type="default",
        rope_scaling=None,
        **ROPE,
    ),
}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh"}  # GPT-2's and ours
GRAPH = "onnx/model.onnx"  # inside a folder, where transformers.js and Optimum look for it


def their_parts(model):
    """Return {name in transformers: the part of our weights that has this name, a view}. A tied head has none."""
    config, parts = model.config, {}
    if config.pos_emb == "learned":  # nanoGPT's names are GPT-2's, which transposes the matrices of its layers
        for name, p in model.state_dict().items():
            parts[name] = p.t() if name.startswith("transformer.h.") and p.dim() == 2 else p
    else:
        parts["model.embed_tokens.weight"] = model.transformer["wte"].weight
        for i, block in enumerate(model.transformer["h"]):
            kv_rows = config.num_kv_heads * config.head_size
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
            if config.qk_norm:  # StableLM has a norm per head and we have one for all heads, so each gets a copy
                for head in range(config.n_head):
                    layer[f"self_attn.q_layernorm.norms.{head}"] = block.attn.q_norm.weight
                for head in range(config.num_kv_heads):
                    layer[f"self_attn.k_layernorm.norms.{head}"] = block.attn.k_norm.weight
            parts |= {f"model.layers.{i}.{name}.weight": p for name, p in layer.items()}
        parts["model.norm.weight"] = model.transformer["ln_f"].weight
        parts["lm_head.weight"] = model.lm_head.weight
    if config.tie_weights:
        del parts["lm_head.weight"]
    return parts


# -- writing -----------------------------------------------------------------------------------------------------------


def hf_settings(model):
    """Return the settings of config.json with which transformers computes the same as a GPT.

    Raises ValueError, naming field and value, if no class of transformers does.
    """
    config, hidden = model.config, model.transformer["h"][0].mlp.c_proj.in_features
    if config.pos_emb == "learned":
        kind, kv_heads = "gpt2", (None, config.n_head)
        allowed = dict(norm_first=(True,), activation=("gelu_tanh", "gelu"), qk_norm=(False,), n_kv_head=kv_heads)
    else:
        kind, allowed = "stablelm", dict(norm_first=(True,), activation=("swiglu",), bias=(False,))
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            nearest = f"{kind} is the nearest class of transformers, and has {name}={values[-1]} only"
            raise ValueError(f"{name}={getattr(config, name)}: {nearest}")

    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS[kind].items()}
    settings |= dict(model_type=kind, vocab_size=config.vocab_size, tie_word_embeddings=config.tie_weights)
    settings |= dict(bos_token_id=None, eos_token_id=None)
    # without this entry transformers.js in a browser looks for model_quantized.onnx
    settings["transformers.js_config"] = {"dtype": "fp32"}
    if kind == "gpt2":
        settings |= {f"{place}_pdrop": config.dropout for place in ("resid", "embd", "attn")}
        theirs = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        return settings | dict(n_inner=hidden, activation_function=theirs[config.activation])
    settings |= dict(num_key_value_heads=config.num_kv_heads, intermediate_size=hidden)
    return settings | dict(hidden_dropout=config.dropout, attention_dropout=config.dropout) | ROPE


@torch.no_grad()
def to_transformers(model):
    """Return the model as an instance of the transformers class that computes the same, in eval mode, on its device.

    Raises ValueError if no class does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_settings(model)))
    theirs = hf.state_dict()
    for name, part in their_parts(model).items():
        theirs[name].copy_(part)  # a bias that our network lacks stays 0
    return hf.to(model.lm_head.weight.device).eval()


def write_folder(model, chars, folder):
    """Write what transformers reads into an empty folder: the network, its weights and the tokenizer.

    chars  the vocabulary: token i is chars[i]
    Raises ValueError if no class of transformers computes what this model does.
    """
    block_size, hf = model.config.block_size, to_transformers(model)
    hf.generation_config.max_length = block_size  # else a pipeline adds 256 tokens to any prompt
    if model.config.pos_emb == "rope":
        hf.config.update(ROPE)  # transformers 5 has moved them elsewhere, and 4 reads them here
    hf.save_pretrained(folder)
    write_tokenizer(chars, block_size, folder)


def write_tokenizer(chars, block_size, folder):
    """Write the tokenizer that makes every character a token. An unknown character is an error.

    It names no pad token, because transformers would make that character special, and a pipeline leaves special tokens
    out of the text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}))  # no unk_token
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # "." would leave out newlines
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
        model_max_length=block_size,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 adds token_type_ids by default
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def export_hf(model, chars, folder):
    """Write the files of write_folder and GRAPH into `folder`, a Path.

    Exits with one line, and leaves the folder as it was, if transformers has no class for this network, or if what it
    reads does not compute what the model does.
    """
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        fail("--format hf needs transformers 5 or newer (version 4 can read its folders): pip install -U transformers")
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:  # Windows keeps a file that is mapped
        # the folder of transformers
        made, ids = Path(made), own_text(model)
        with one_line_errors():
            write_folder(model, chars, made)
        hf = transformers.AutoModelForCausalLM.from_pretrained(made).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(made)
        if tokenizer(chars)["input_ids"] != list(range(len(chars))) or tokenizer.decode(range(len(chars))) != chars:
            fail(f"the tokenizer for {folder} does not give the characters back")

        def greedy(prompt):
            return hf.generate(prompt, max_length=ids.size(1), do_sample=False)[0].tolist()

        with torch.no_grad():
            compare(f"{folder}, {type(hf).__name__}", model, chars, ids, hf(ids).logits, greedy)

        # the graph
        (made / GRAPH).parent.mkdir()
        write_onnx(model, chars, made / GRAPH)
        compare_onnx(made / GRAPH, model, ids)
        files = read_tree(made)
    write_tree(folder, files)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_folder(folder):
    """Return the Checkpoint of a folder that export_hf or transformers wrote: a GPT-2 or StableLM of characters.

    We read the files without transformers, so a network that model.py does not have is an error, not an approximation.
    Raises ValueError, with one line that says why, for such a network and for a folder that cannot be read.
    """
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError("a Hugging Face folder needs safetensors: pip install safetensors") from None
    folder = Path(folder)
    try:
        check_folder(folder)
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        config = GPTConfig(**read_config(settings, tensors))
        weights = from_transformers(tensors, config)
        chars = read_chars(folder / "tokenizer.json")
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is no Hugging Face folder: {first_line(error)}") from None
    except KeyError as error:
        raise ValueError(f"{folder} cannot be read: it lacks {error}") from None
    except Exception as error:  # a damaged file can raise nearly anything
        raise ValueError(f"{folder} cannot be read: {first_line(error)}") from None
    check_characters(chars, folder, config.vocab_size)
    return Checkpoint(path=folder, weights=weights, model_args=asdict(config), chars=chars)


def read_chars(file):
    """Return the characters of a tokenizer.json in order of their ids."""
    vocab = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    if any(len(char) != 1 for char in vocab) or sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError("its tokenizer is not one of single characters")
    return "".join(sorted(vocab, key=vocab.get))


def read_config(settings, tensors):
    """Return the fields of GPTConfig that describe a folder's network.

    settings  the content of config.json
    tensors   the weights; they tell whether biases are used, and whether the head is tied
    Raises ValueError for a network that model.py does not have, KeyError for a setting that is missing.
    """
    kind = settings["model_type"]
    if kind not in SETTINGS:
        raise ValueError(f"it is a {kind}, and we read only gpt2 and stablelm")
    # transformers 5 nests the settings of rotary positions, 4 does not
    flat = {"partial_rotary_factor": 0.25} | settings | (settings.get("rope_parameters") or {})
    for name, value in FIXED[kind].items():
        if flat.get(name, value) != value:
            raise ValueError(f"its {name} is {flat[name]!r}, and ours is {value!r}")

    config = {ours: settings[theirs] for ours, theirs in SETTINGS[kind].items()}
    n_embd = config["n_embd"]
    # as in transformers, an lm_head in the file counts more than tie_word_embeddings in config.json
    embedding = tensors["transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"]
    tied = torch.equal(tensors.get("lm_head.weight", embedding), embedding)
    config |= dict(vocab_size=settings["vocab_size"], tie_weights=tied)
    # the ratio from which MLP computes this hidden size: it rounds down, but takes 2/3 for SwiGLU and rounds up
    if kind == "stablelm":
        mlp_ratio = (1.5 * settings["intermediate_size"] - 1) / n_embd
        return config | dict(activation="swiglu", mlp_ratio=mlp_ratio, pos_emb="rope", bias=False)
    activation = settings["activation_function"]
    if activation not in ACTIVATIONS:
        raise ValueError(f"its activation_function {activation!r} is neither gelu nor gelu_new")
    hidden = settings.get("n_inner") or 4 * n_embd
    mlp_ratio = 4 if hidden == 4 * n_embd else (hidden + 0.5) / n_embd
    bias = any(name.endswith("bias") and tensor.any() for name, tensor in tensors.items())
    return config | dict(activation=ACTIVATIONS[activation], mlp_ratio=mlp_ratio, bias=bias)


@torch.no_grad()
def from_transformers(tensors, config):
    """Return the state_dict of a GPT from a transformers state_dict: the inverse of to_transformers.

    Raises KeyError for a tensor that is missing, ValueError for one that the network has no place for.
    """
    model = GPT(config)
    parts = their_parts(model)
    for name, part in parts.items():
        if tensors[name].shape != part.shape:
            raise ValueError(f"its {name} does not fit its config.json")
        part.copy_(tensors[name])
    for name, part in parts.items():
        if "layernorm.norms" in name and (part != tensors[name]).any():
            raise ValueError(f"{name}: every head has a norm of its own, and here a layer's heads share one")
    for name in sorted(tensors.keys() - parts.keys()):
        tied_or_mask = ("lm_head.weight", ".attn.bias", ".attn.masked_bias")  # GPT-2 once saved its masks
        if tensors[name].any() and not name.endswith(tied_or_mask):  # zeros add nothing
            raise ValueError(f"it has {name}, which the network of its config.json has no place for")
    return model.state_dict()
