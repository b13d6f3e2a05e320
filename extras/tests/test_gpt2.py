"""GPT-2 itself, from a Hugging Face folder: on our own GPT, with our cache, and finetuned. transformers is the oracle.

The folders are real, and their weights are random, so nothing is downloaded.
"""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from extra_helpers import bpe, needs_compiler, write_gpt2
from extras.formats.bpe import BPETokenizer, read_tokenizer, tokenizer_from_json
from extras.formats.checkpoint import load_checkpoint, load_model
from helpers import SAMPLE, assert_one_line, here, load, ok, plain_val_loss, same
from model import build_model

PROMPT = "The cat sat né"
BPE = tokenizer_from_json(bpe())


def sample(folder, *flags):
    return here("--ckpt", folder, "--prompt", PROMPT, "--device", "cpu", *flags, script="sample.py")


def greedy(hf, ids, length):
    """The greedy continuation by transformers, ids (1, T) included."""
    settings = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    return hf.generate(ids, attention_mask=torch.ones_like(ids), max_length=length, **settings)


# -- the folder --------------------------------------------------------------------------------------------------------


def as_openai_has_it(folder):
    """The weights of the class without a head, and the causal masks that old files contain."""
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    n = tensors["wpe.weight"].size(0)
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, n, n).tril() for i in range(9) if f"h.{i}.ln_1.weight" in tensors}
    save_file(tensors | masks, folder / "model.safetensors")


def as_a_pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def in_shards(folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1


LAYOUTS = [lambda folder: None, as_openai_has_it, as_a_pickle, in_shards]


@pytest.mark.parametrize("seed", range(8))
def test_logits_and_greedy_text_are_those_of_transformers(seed, tmp_path):
    """Of random shapes, in every layout of the files."""
    rng = random.Random(seed)
    n_head = rng.choice([1, 2, 3, 5])
    settings = dict(
        n_layer=rng.randint(1, 4),
        n_head=n_head,
        n_embd=n_head * rng.choice([4, 7, 16]),
        n_positions=rng.choice([9, 24, 48]),
        vocab_size=512 + rng.choice([0, 64]),
        n_inner=rng.choice([None, 20, 77]),
        activation_function=rng.choice(["gelu_new", "gelu"]),
        tie_word_embeddings=seed % 5 != 3,
    )
    hf = write_gpt2(tmp_path, seed, **settings)
    LAYOUTS[seed % 4](tmp_path)
    model, tokenizer = load_model(tmp_path)
    context = settings["n_positions"]
    ids = torch.randint(512, (3, context), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        ours = model(ids)[0]
        theirs = hf(ids).logits
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    assert torch.equal(model.generate(ids[:1, :4], context, temperature=0), greedy(hf, ids[:1, :4], context))
    assert tokenizer.state_dict() == BPE.state_dict()


def test_a_model_is_in_memory_once_and_its_head_is_its_embedding(gpt2):
    checkpoint = load_checkpoint(gpt2)
    model = build_model(checkpoint)
    assert model.lm_head.weight is model.transformer["wte"].weight
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names)) == len(checkpoint["model"]) - 1
    assert all(p.data_ptr() == checkpoint["model"][name].data_ptr() for name, p in model.named_parameters())


# -- sample.py ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["--compile"], marks=needs_compiler),
        pytest.param(["--no-kv_cache"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_sample_py_writes_the_greedy_text_of_transformers(flags, gpt2):
    hf = AutoModelForCausalLM.from_pretrained(gpt2)
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    expected = greedy(hf, tokenizer(PROMPT, return_tensors="pt").input_ids, 48)
    result = ok(sample(gpt2, *flags, "--temperature", "0", "--verify"))
    assert result.stdout == tokenizer.decode(expected[0])
    assert "1 of 1 samples)" in result.stderr
    assert f"{48 - len(tokenizer(PROMPT).input_ids)} tokens: TTFT" in result.stderr


# -- finetuning --------------------------------------------------------------------------------------------------------

FINETUNE = "--device cpu --block_size 16 --gradient_accumulation_steps 2 --max_iters 6 --learning_rate 1e-3".split()


def test_finetuning_begins_with_the_folders_weights_and_positions(gpt2, tmp_path):
    flags = ["--init_from", gpt2, "--data_dir", gpt2 / "data", *FINETUNE]
    flags += ["--learning_rate", 0, "--weight_decay", 0, "--max_iters", 1, "--out_dir"]
    ok(here(*flags, tmp_path))
    first = load_checkpoint(gpt2)["model"]
    last = load(tmp_path / "last.pt")["model"]
    name = "transformer.wpe.weight"
    assert first[name].shape == (48, 32) and torch.equal(last[name], first[name][:16])
    assert same({k: v for k, v in last.items() if k != name}, {k: v for k, v in first.items() if k != name})


@pytest.mark.parametrize("kind", [AutoTokenizer, PreTrainedTokenizerFast])
def test_a_folder_that_transformers_has_saved_again_has_the_same_tokens(kind, gpt2, tmp_path):
    """It writes another tokenizer.json: one with a pad token, and of GPT-2's class, which adds its <|endoftext|>."""
    again = tmp_path / "again"
    shutil.copytree(gpt2, again, ignore=shutil.ignore_patterns("data"))
    (again / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}', encoding="utf-8")
    tokenizer = kind.from_pretrained(again)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(again)
    first, second = (BPETokenizer(read_tokenizer(folder)) for folder in (gpt2, again))
    assert first.state_dict() != second.state_dict() and len(second.vocab) > len(first.vocab)
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    model.resize_token_embeddings(len(second.vocab))
    model.save_pretrained(again)
    flags = ["--init_from", again, "--data_dir", gpt2 / "data", "--eval_only", "--device", "cpu"]
    loss = plain_val_loss(load_model(again)[0], np.fromfile(gpt2 / "data" / "val.bin", "<u2"), 48)
    assert float(ok(here(*flags)).stdout.split()[2]) == pytest.approx(loss, abs=1e-4)

    merges = json.loads((again / "tokenizer.json").read_text(encoding="utf-8"))
    merges["model"]["merges"] = merges["model"]["merges"][::-1]
    (again / "tokenizer.json").write_text(json.dumps(merges), encoding="utf-8")
    assert_one_line(here(*flags), "are not those of the model", code=1)
    few = ["--tokenizer", "bpe", "--vocab_size", 300, "--data_dir", tmp_path / "few"]
    ok(here("--input", SAMPLE, *few, script="data/prepare.py"))
    assert_one_line(here("--init_from", gpt2, *few[-2:], "--eval_only"), "are not those of the model", code=1)


# -- exports -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_with_a_tokenizer_goes_to_onnx_but_not_to_the_page(gpt2, tmp_path):
    ok(here("--format", "onnx", "--ckpt", gpt2, "--out_dir", tmp_path, script="extras/export.py"))
    text = ok(sample(gpt2, "--num_samples", "2")).stdout
    flags = ["--engine", "onnx", "--ckpt", tmp_path / "onnx" / "model.onnx", "--prompt", PROMPT, "--num_samples", "2"]
    assert ok(here(*flags, script="sample.py")).stdout == text
    result = here("--format", "web", "--ckpt", gpt2, "--out_dir", tmp_path, script="extras/export.py")
    assert_one_line(result, "the page needs a model whose tokens are characters")
    assert not (tmp_path / "web").exists()


def test_a_nanogpt_checkpoint_of_gpt2s_tokens_takes_the_folder_of_the_tokenizer(gpt2, tmp_path):
    """nanoGPT keeps no tokens in it, and pads 50,257 of them to 50,304."""
    model, _ = load_model(gpt2)
    args = dict(block_size=48, vocab_size=512, n_layer=2, n_head=4, n_embd=32, bias=True, dropout=0.0)
    torch.save({"model": model.state_dict(), "model_args": args}, tmp_path / "ckpt.pt")
    ours, tokenizer = load_model(tmp_path / "ckpt.pt", gpt2)
    assert tokenizer.state_dict() == BPE.state_dict() and ours.config.activation == "gelu"
    assert "--meta takes" in load_model(tmp_path / "ckpt.pt")[0].source  # without it, text is ids
    file = tmp_path / "tokenizer.json"  # the same tokenizer, written with other spaces, as OpenAI's is
    file.write_text(json.dumps(json.loads((gpt2 / file.name).read_text(encoding="utf-8")), indent=1), encoding="utf-8")
    flags = ["--init_from", tmp_path / "ckpt.pt", "--meta", file, "--data_dir", gpt2 / "data"]
    loss = plain_val_loss(model, np.fromfile(gpt2 / "data" / "val.bin", "<u2"), 48)
    assert float(ok(here(*flags, "--eval_only", "--device", "cpu")).stdout.split()[2]) == pytest.approx(loss, abs=1e-4)
