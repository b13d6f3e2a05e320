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
GRAPH = "onnx/model.onnx"  # inside a folder, where transformers.js and Optimum look for it


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
    """Return what our parameter `name` is called in transformers: a list of one name, or of the parts it is made of."""
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
    kind = model_type(config)
    settings = {theirs: getattr(config, ours) for ours, theirs in SETTINGS[kind].items()}
    settings |= dict(vocab_size=config.vocab_size, tie_word_embeddings=config.tie_weights)
    settings |= dict(bos_token_id=None, eos_token_id=None)
    if kind == "gpt2":
        settings |= {f"{place}_pdrop": config.dropout for place in ("resid", "embd", "attn")}
        activation = "gelu" if config.activation == "gelu" else "gelu_new"
        return GPT2Config(n_inner=hidden, activation_function=activation, **settings)
    settings |= dict(num_key_value_heads=config.num_kv_heads, intermediate_size=hidden)
    settings |= dict(hidden_dropout=config.dropout, attention_dropout=config.dropout)
    return StableLmConfig(rope_parameters={"rope_type": "default"} | ROPE, **settings)


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

    It names no pad token, because transformers would make that character special, and a pipeline leaves special tokens
    out of the text.
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


def write_folder(model, chars, folder):
    """Write what transformers reads into an empty folder: the network, its weights and the tokenizer.

    chars  the vocabulary: token i is chars[i]
    Raises ValueError if no class of transformers computes what this model does, and OSError.
    """
    hf, tokenizer = to_transformers(model), hf_tokenizer(chars, model.config.block_size)
    hf.generation_config.max_length = model.config.block_size  # else a pipeline adds 256 tokens to any prompt
    try:
        hf.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # each library reports a full disk in its own way
        raise OSError(None, str(error).strip(), str(folder)) from None
    # transformers 4 reads the same settings under other names
    amend(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if model.config.pos_emb == "rope":
        amend(folder / "config.json", **{name: hf.config.rope_parameters[name] for name in ROPE})


def amend(file, **entries):
    content = read_json(file) | entries
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export_hf(model, chars, folder, graph):
    """Write the files of write_folder, with GRAPH if `graph` is true, into `folder`, a Path.

    Exits with one line, and leaves the folder as it was, if transformers has no class for this network, or if what it
    reads does not compute what the model does.
    """
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        fail("--format hf needs transformers 5 or newer (version 4 can read its folders): pip install -U transformers")
    transformers.utils.logging.disable_progress_bar()
    with one_line_errors():
        model_type(model.config)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:  # Windows keeps a file that is mapped
        # make
        made = Path(made)
        write_folder(model, chars, made)
        if graph:
            from kvgpt.export.onnx import write_onnx

            # without this entry transformers.js in a browser looks for model_quantized.onnx
            amend(made / "config.json", **{"transformers.js_config": {"dtype": "fp32"}})
            (made / GRAPH).parent.mkdir()
            write_onnx(model, chars, made / GRAPH)

        # check
        ids, block_size = own_text(model), model.config.block_size
        hf = transformers.AutoModelForCausalLM.from_pretrained(made).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(made)
        if tokenizer(chars)["input_ids"] != list(range(len(chars))) or tokenizer.decode(range(len(chars))) != chars:
            fail(f"the tokenizer for {folder} does not give the characters back")

        def greedy(prompt):
            # generate raises an error if max_length leaves no room for a new token
            out = hf.generate(prompt, max_length=block_size, do_sample=False) if block_size > 1 else prompt
            return out[0].tolist()

        with torch.no_grad():
            compare(f"{folder}, {type(hf).__name__}", model, ids, hf(ids).logits, greedy)
        if graph:
            compare_onnx(made / GRAPH, model, ids)
        files = read_tree(made)

    # move into place; the graph of an earlier export may be another model's
    write_tree(folder, files, stale={GRAPH} - files.keys())


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
        tensors = load_file(folder / "model.safetensors")
        config = GPTConfig(**read_config(read_json(folder / "config.json"), tensors))
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


def read_json(file):
    return json.loads(file.read_text(encoding="utf-8"))


def read_chars(file):
    """Return the characters of a tokenizer.json in order of their ids."""
    vocab = read_json(file)["model"]["vocab"]
    if any(len(char) != 1 for char in vocab) or sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError("its tokenizer is not one of single characters")
    return "".join(sorted(vocab, key=vocab.get))


def read_config(hf_args, tensors):
    """Return the fields of GPTConfig that describe a folder's network.

    hf_args  the content of config.json
    tensors  the weights; they tell whether biases are used, and whether the head is tied
    Raises ValueError for a network that model.py does not have, KeyError for a setting that is missing.
    """
    kind = hf_args["model_type"]
    if kind not in ("gpt2", "stablelm"):
        raise ValueError(f"it is a {kind}, and this kit reads gpt2 and stablelm")
    biased = [name for name, tensor in tensors.items() if name.endswith("bias") and tensor.any()]
    embedding = tensors["transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"]
    # as in transformers, a head of its own counts more than what config.json says
    tied = hf_args.get("tie_word_embeddings", kind == "gpt2")
    tied = tied and torch.equal(tensors.get("lm_head.weight", embedding), embedding)

    # what our network has no setting for
    if kind == "gpt2":
        settings = hf_args
        fixed = dict(layer_norm_epsilon=1e-5, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    else:  # transformers 5 nests the settings of rotary positions, 4 does not
        settings = {"partial_rotary_factor": 0.25} | hf_args | (hf_args.get("rope_parameters") or {})
        fixed = dict(layer_norm_eps=1e-5, hidden_act="silu", use_qkv_bias=False, use_parallel_residual=False)
        fixed |= dict(rope_type="default", rope_scaling=None) | ROPE
        if biased:
            raise ValueError(f"its {biased[0]} is not zero, and this kit's network has no biases beside SwiGLU")
    for name, value in fixed.items():
        if settings.get(name, value) != value:
            raise ValueError(f"its {name} is {settings[name]!r}, and this kit's {value!r}")

    # what it has one for; MLP rounds down to the hidden units of GELU, and takes 2/3 of SwiGLU's and rounds up
    config = {ours: hf_args[theirs] for ours, theirs in SETTINGS[kind].items()}
    config |= dict(vocab_size=hf_args["vocab_size"], tie_weights=tied, bias=bool(biased))
    n_embd = config["n_embd"]
    if kind == "gpt2":
        activation, activations = hf_args["activation_function"], {"gelu": "gelu", "gelu_new": "gelu_tanh"}
        if activation not in activations:
            raise ValueError(f"its activation_function {activation!r} is neither gelu nor gelu_new")
        hidden = hf_args.get("n_inner") or 4 * n_embd
        mlp_ratio = 4 if hidden == 4 * n_embd else (hidden + 0.5) / n_embd
        return config | dict(activation=activations[activation], mlp_ratio=mlp_ratio)
    mlp_ratio = (1.5 * hf_args["intermediate_size"] - 1) / n_embd
    return config | dict(activation="swiglu", mlp_ratio=mlp_ratio, pos_emb="rope")


def from_transformers(tensors, config):
    """Return the state_dict of a GPT from a transformers state_dict: the inverse of to_transformers.

    Raises KeyError for a tensor that is missing, ValueError for one that the network has no place for.
    """
    state, unused = {}, {name for name, tensor in tensors.items() if tensor.any()}  # zeros add nothing
    for name, ours in GPT(config).state_dict().items():
        names = their_names(name, config)
        unused -= set(names)
        if name == "lm_head.weight" and config.tie_weights:
            continue
        parts = [tensors[each] for each in names]
        if len(parts) > 1 and ours.shape == parts[0].shape:
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
