"""What needs transformers: write a model as one of its classes, and run any of its models with our loop."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from kvgpt.checkpoint import check_finite
from kvgpt.cli import fail, first_line, need, note, one_line_errors
from kvgpt.interop.check import compare, own_text
from kvgpt.interop.checksums import check_folder, read_tree, write_tree
from kvgpt.interop.huggingface import ACTIVATIONS, ROPE, SETTINGS, their_parts
from kvgpt.interop.onnx import compare_onnx, fits_one_file, write_onnx
from kvgpt.tokenizer import tokenizer_from_json

GRAPH = "onnx/model.onnx"  # inside a folder, where transformers.js and Optimum look for it

# -- writing -----------------------------------------------------------------------------------------------------------


def hf_settings(model):
    """Return the settings of config.json with which transformers computes the same as a GPT.

    Raises ValueError, with field and value, if no class of transformers does.
    """
    config, hidden = model.config, model.transformer["h"][0].mlp.c_proj.in_features
    if config.pos_emb == "learned":
        kind, kv_heads = "gpt2", (None, config.n_head)
        allowed = dict(norm_first=(True,), activation=("gelu_tanh", "gelu"), qk_norm=(False,), n_kv_head=kv_heads)
    else:
        kind, allowed = "stablelm", dict(norm_first=(True,), activation=("swiglu",), bias=(False,))
    for name, values in allowed.items():
        if getattr(config, name) not in values:
            nearest = f"the closest class of transformers, {kind}, only has {name}={values[-1]}"
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
    hf.generation_config.max_length = block_size  # otherwise a pipeline adds 256 tokens to any prompt
    if model.config.pos_emb == "rope":
        hf.config.update(ROPE)  # transformers 4 expects them here, 5 has moved them
    hf.save_pretrained(folder)
    write_tokenizer(tokenizer, block_size, folder)


def write_tokenizer(tokenizer, block_size, folder):
    """Write the tokenizer.

    It has no pad token, because transformers would make that character special, and pipelines remove special tokens
    from the text.
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

    If transformers has no class for this network, or does not compute what the model does, it exits with one line and
    does not touch the folder.
    """
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        fail("--format hf needs transformers 5 or newer (4 can only read the folder): pip install -U transformers")
    transformers.logging.set_verbosity_error()  # it would warn about the length of text that we only tokenize
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:  # Windows cannot delete a mapped file
        # the folder of transformers
        made, ids = Path(made), own_text(model)
        print(f"{folder}: writing it for transformers", flush=True)
        with one_line_errors():
            write_folder(model, tokenizer, made)
        hf = transformers.AutoModelForCausalLM.from_pretrained(made).eval()
        theirs = transformers.AutoTokenizer.from_pretrained(made)
        text = tokenizer.decode(range(len(tokenizer.vocab)))
        there = tokenizer.encode(text)
        if theirs(text)["input_ids"] != there or theirs.decode(there) != tokenizer.decode(there):
            fail(f"the tokenizer for {folder} does not encode and decode like ours")

        def greedy(prompt):
            return hf.generate(prompt, max_length=ids.size(1), do_sample=False)[0].tolist()

        with torch.no_grad():
            compare(f"{folder}, {type(hf).__name__}", model, tokenizer, ids, hf(ids).logits, greedy)

        # the graph
        if fits_one_file(model):
            print(f"{folder / GRAPH}: exporting it, which takes longest", flush=True)
            (made / GRAPH).parent.mkdir()
            write_onnx(model, tokenizer, made / GRAPH)
            compare_onnx(made / GRAPH, model, ids)
        else:
            note(f"leaving out {GRAPH}: one file cannot hold more than 2 GB")
        files = read_tree(made)
    write_tree(folder, files)


# -- running -----------------------------------------------------------------------------------------------------------


class HuggingFaceGPT(nn.Module):
    """A causal language model in a folder of transformers, with its tokenizer.

    config     block_size and vocab_size of the model
    tokenizer  the folder's tokenizer
    Raises FileNotFoundError, or ValueError with one line that says what is wrong with the folder.
    """

    def __init__(self, folder):
        super().__init__()
        transformers = need("--engine hf", "transformers")
        if not Path(folder, "config.json").is_file():
            raise FileNotFoundError(f"{folder} has no config.json: pass the folder of a transformers model as --ckpt")
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        options = dict(local_files_only=True, trust_remote_code=False)  # refuse a model that brings its own code
        try:
            check_folder(folder)
            read = transformers.AutoModelForCausalLM.from_pretrained
            self.hf, found = read(folder, output_loading_info=True, **options)
            if found["missing_keys"]:  # transformers would fill them with random numbers
                raise ValueError(f"its weights lack {min(found['missing_keys'])}")
            self.hf.float().eval()
            theirs = transformers.AutoTokenizer.from_pretrained(folder, **options)
            self.tokenizer = tokenizer_from_json(theirs.backend_tokenizer.to_str())
        except Exception as error:  # a damaged folder can raise nearly anything
            raise ValueError(f"{folder} cannot be read: {first_line(error)[:200]}") from None
        check_finite(self.hf, folder)
        with torch.no_grad():
            output = self.hf(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True)
        if getattr(output, "past_key_values", None) is None:
            name = type(self.hf).__name__
            raise ValueError(f"{folder} has no usable cache: {name} returns no past_key_values")
        settings = self.hf.config.get_text_config()
        limits = (getattr(settings, name, None) for name in ("max_position_embeddings", "max_seq_len"))
        self.config = SimpleNamespace(
            block_size=next(filter(None, limits), 2048),  # Bloom, for example, has no limit
            vocab_size=self.hf.get_output_embeddings().weight.size(0),
        )

    def forward(self, idx):
        """Return the logits `(B, T, V)` of idx `(B, T)`, computed without a cache, and None: see GPT.forward."""
        return self.hf(input_ids=idx, attention_mask=torch.ones_like(idx), use_cache=False).logits, None

    def new_cache(self, batch_size):
        """Return an empty cache: its `length` in tokens, and the `past` that transformers returned."""
        return SimpleNamespace(length=0, past=None)

    @torch.inference_mode()
    def next_logits(self, idx, cache=None):
        """Return the logits `(B, V)` of the token after idx `(B, T)`, which continues the text in the cache.

        It is appended to the cache. Without a cache, idx is the whole text.
        """
        (B, T), start, past = idx.shape, 0, None
        if cache is not None:
            start, past = cache.length, cache.past
        mask = torch.ones(B, start + T, dtype=torch.int64)
        output = self.hf(input_ids=idx, attention_mask=mask, past_key_values=past, use_cache=cache is not None)
        if cache is not None:
            cache.length, cache.past = start + T, output.past_key_values
        return output.logits[:, -1]
