"""Hugging Face folders: a model written as a class of transformers that computes the same."""

import json
import tempfile
from pathlib import Path

import torch

from kvgpt.cli import fail, note, one_line_errors
from kvgpt.export.check import compare, compare_onnx, own_text
from kvgpt.export.onnx import fits_one_file, write_onnx
from kvgpt.files import read_tree, write_tree
from kvgpt.huggingface import ACTIVATIONS, ROPE, SETTINGS, their_parts

GRAPH = "onnx/model.onnx"  # inside a folder, where transformers.js and Optimum look for it


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


def write_folder(model, tokenizer, folder):
    """Write what transformers reads into an empty folder: the network, its weights and the tokenizer.

    Raises ValueError if no class of transformers computes what this model does.
    """
    block_size, hf = model.config.block_size, to_transformers(model)
    hf.generation_config.max_length = block_size  # else a pipeline adds 256 tokens to any prompt
    if model.config.pos_emb == "rope":
        hf.config.update(ROPE)  # transformers 5 has moved them elsewhere, and 4 reads them here
    hf.save_pretrained(folder)
    write_tokenizer(tokenizer, block_size, folder)


def write_tokenizer(tokenizer, block_size, folder):
    """Write the tokenizer.

    It names no pad token, because transformers would make that character special, and a pipeline leaves special tokens
    out of the text.
    """
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
        model_max_length=block_size,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 adds token_type_ids by default
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def export_hf(model, tokenizer, folder):
    """Write the files of write_folder and GRAPH into `folder`, a Path.

    Exits with one line, and leaves the folder as it was, if transformers has no class for this network, or if what it
    reads does not compute what the model does.
    """
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        fail("--format hf needs transformers 5 or newer (version 4 can read its folders): pip install -U transformers")
    transformers.logging.set_verbosity_error()  # it warns about the length of a text that we only tokenize
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:  # Windows keeps a file that is mapped
        # the folder of transformers
        made, ids = Path(made), own_text(model)
        with one_line_errors():
            write_folder(model, tokenizer, made)
        hf = transformers.AutoModelForCausalLM.from_pretrained(made).eval()
        theirs = transformers.AutoTokenizer.from_pretrained(made)
        text = tokenizer.decode(range(len(tokenizer.vocab)))
        there = tokenizer.encode(text)
        if theirs(text)["input_ids"] != there or theirs.decode(there) != tokenizer.decode(there):
            fail(f"the tokenizer for {folder} does not read and write as ours")

        def greedy(prompt):
            return hf.generate(prompt, max_length=ids.size(1), do_sample=False)[0].tolist()

        with torch.no_grad():
            compare(f"{folder}, {type(hf).__name__}", model, tokenizer, ids, hf(ids).logits, greedy)

        # the graph
        if fits_one_file(model):
            (made / GRAPH).parent.mkdir()
            write_onnx(model, tokenizer, made / GRAPH)
            compare_onnx(made / GRAPH, model, ids)
        else:
            note(f"{folder} has no {GRAPH}: one file cannot hold more than 2 GB")
        files = read_tree(made)
    write_tree(folder, files)
