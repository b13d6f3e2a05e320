"""Write a model as a Hugging Face folder, of the class of transformers that computes the same."""

import json
import tempfile
from dataclasses import fields
from pathlib import Path

import torch

from extras.cli import note
from extras.formats.bpe import to_json
from extras.formats.compare import compare_with_pytorch, own_text
from extras.formats.folder import read_tree, write_tree
from extras.formats.hf_read import ACTIVATIONS, ROPE, SETTINGS, WITH_ID, known_ids, their_parts
from extras.formats.onnx import compare_onnx, write_onnx

# fields of GPTConfig that hf_settings exports; whatever is neither here nor in SETTINGS must have its default
EXPORTED = ("vocab_size", "tie_weights", "dropout", "bias", "activation", "mlp_ratio", "pos_emb")
GRAPH = "onnx/model.onnx"  # inside a folder, where transformers.js and Optimum look for it


def hf_settings(model):
    """Return the settings of config.json with which transformers computes the same as a GPT.

    Raises ValueError, with field and value, if no class of transformers does.
    """
    config = model.config
    hidden = model.transformer["h"][0].mlp.c_proj.in_features
    if config.pos_emb == "learned":
        kind = "gpt2"
        allowed = dict(norm_first=(True,), activation=("gelu_tanh", "gelu"), n_kv_head=(config.n_head,))
    else:
        kind = "stablelm"
        allowed = dict(norm_first=(True,), activation=("swiglu",), bias=(False,))
    known = {*SETTINGS[kind], *EXPORTED}
    allowed |= {field.name: (field.default,) for field in fields(config) if field.name not in known | allowed.keys()}
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            nearest = f"{kind}, the closest class of transformers, is exported with {name}={values[-1]} only"
            raise ValueError(f"{name}={getattr(config, name)}: {nearest}")

    settings = {theirs: getattr(config, ours) for ours, (theirs, _) in SETTINGS[kind].items()}
    settings |= dict(model_type=kind, vocab_size=config.vocab_size, tie_word_embeddings=config.tie_weights)
    settings |= dict(bos_token_id=None, eos_token_id=None)
    # without this entry transformers.js in a browser looks for model_quantized.onnx
    settings["transformers.js_config"] = {"dtype": "fp32"}
    if kind == "gpt2":
        settings |= {f"{place}_pdrop": config.dropout for place in ("resid", "embd", "attn")}
        theirs = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        return settings | dict(n_inner=hidden, activation_function=theirs[config.activation])
    settings |= dict(intermediate_size=hidden, hidden_dropout=config.dropout, attention_dropout=config.dropout)
    return settings | ROPE


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
    return hf.to(model.device).eval()


def write_folder(model, tokenizer, folder, special_tokens=None):
    """Write what transformers reads into an empty folder: the network, its weights and the tokenizer.

    special_tokens  those of the checkpoint
    Raises ValueError if no class of transformers computes what this model does.
    """
    block_size = model.config.block_size
    hf = to_transformers(model)
    hf.generation_config.max_length = block_size  # otherwise a pipeline adds 256 tokens to any prompt
    ids, names = known_special_tokens(special_tokens or {}, tokenizer)
    for role, value in ids.items():
        for config in (hf.config, hf.generation_config):
            setattr(config, f"{role}_token_id", value)
    if model.config.pos_emb == "rope":
        hf.config.update(ROPE)  # transformers 4 expects them here, 5 has moved them
    hf.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(to_json(tokenizer), encoding="utf-8")
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
        model_max_length=block_size,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],  # transformers 4 adds token_type_ids by default
    )
    # Characters have no special tokens, not even for padding: pipelines would remove that character from the text, and
    # servers would end the text at an eos token. A name outside the vocabulary would get an id past the last row of the
    # weights.
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | names, indent=2), encoding="utf-8")


def known_special_tokens(found, tokenizer):
    """Return (ids, names) of the special tokens in `found` that the vocabulary has. A note says what it lacks.

    found  special_tokens of a checkpoint: {"eos": id or ids, "eos_token": name, ...}
    Where the folder names an eos token, it is the bos and unk token too, as OpenAI's is: CTranslate2 needs all three.
    transformers writes id 50256 into the folder of every GPT-2 whose maker set none, whatever its vocabulary.
    """
    ids = {}
    names = {}
    size = len(tokenizer.vocab)
    special = {t["id"]: t["content"] for t in json.loads(to_json(tokenizer))["added_tokens"] if t["special"]}
    for role in WITH_ID:
        value = found.get(role, [])
        known = known_ids(value, size)
        if known:  # only eos may be several
            ids[role] = known if isinstance(value, list) and role == "eos" else known[0]
        for i in value if isinstance(value, list) else [value]:
            if i not in known:
                note(f"leaving out {role}_token_id {i!r}: an id is a whole number from 0 to {size - 1}")
        # only what the tokenizer treats as special already: an ordinary token would vanish from text
        names |= {f"{role}_token": special[i] for i in known[::-1] if i in special}
    for key, name in found.items():
        if key.endswith("_token") and name in special.values():
            names[key] = name
        elif key.endswith("_token"):
            note(f"leaving out {key} {name!r}: it is not a special token in tokenizer.json")
    if "eos_token" in names:
        names = dict.fromkeys(("bos_token", "unk_token"), names["eos_token"]) | names
    return ids, names


def export_hf(model, tokenizer, folder, special_tokens=None, with_graph=False):
    """Write the files of write_folder into `folder`, a Path, and GRAPH if with_graph is True.

    special_tokens  those of the checkpoint
    Raises ValueError, and does not touch the folder, if transformers has no class for this network, or does not compute
    what the model does.
    """
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        why = "--format hf needs transformers 5 or newer (4 can only read the folder)"
        raise ValueError(f"{why}: pip install -U transformers")
    transformers.logging.set_verbosity_error()  # it would warn about the length of text that we only tokenize
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:  # Windows cannot delete a mapped file
        # the folder of transformers
        made = Path(made)
        ids = own_text(model)
        print(f"{folder}: writing it for transformers", flush=True)
        write_folder(model, tokenizer, made, special_tokens)
        hf = transformers.AutoModelForCausalLM.from_pretrained(made).eval()
        hf.generation_config.eos_token_id = None  # for text of full length
        theirs = transformers.AutoTokenizer.from_pretrained(made)
        text = tokenizer.decode(range(len(tokenizer.vocab)))
        there = tokenizer.encode(text)
        if theirs(text)["input_ids"] != there or theirs.decode(there) != tokenizer.decode(there):
            raise ValueError(f"the tokenizer for {folder} does not encode and decode like ours")

        def greedy(prompt):  # without this mask, generate hides the pad token wherever it is in the prompt
            everything = torch.ones_like(prompt)
            return hf.generate(prompt, attention_mask=everything, max_length=ids.size(1), do_sample=False)[0].tolist()

        with torch.no_grad():
            compare_with_pytorch(f"{folder}, {type(hf).__name__}", model, ids, hf(ids).logits, greedy)

        # the graph
        if with_graph:
            print(f"{folder / GRAPH}: exporting it, which takes longest", flush=True)
            (made / GRAPH).parent.mkdir()
            write_onnx(model, tokenizer, made / GRAPH)
            compare_onnx(made / GRAPH, model, ids)
        files = read_tree(made)
    if not with_graph and (folder / GRAPH).exists():
        note(f"removing {folder / GRAPH}, the graph of an earlier export: --onnx writes a new one")
        (folder / GRAPH).unlink()
    write_tree(folder, files)
