"""kvgpt/export/hf.py: folders as transformers itself reads and writes them."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    StableLmConfig,
    StableLmForCausalLM,
    pipeline,
)

from helpers import CHARS, GPT2, SIZE, STABLELM, assert_one_line, assert_tells_no_paths, here, tiny, tree, unix
from kvgpt.checksums import SUMS
from kvgpt.engines.hf import HuggingFaceGPT
from kvgpt.engines.onnx import OnnxGPT
from kvgpt.export.hf import GRAPH, model_type, read_folder, write_folder
from model import GPTConfig

CONTEXT = SIZE["block_size"]
INDEX = "model.safetensors.index.json"

# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "network",
    [
        GPT2,
        dict(GPT2, bias=True, activation="gelu_tanh"),
        dict(GPT2, tie_weights=False, mlp_ratio=2.3),
        STABLELM,
        dict(STABLELM, qk_norm=True, mlp_ratio=3.3),
        dict(STABLELM, qk_norm=True, n_kv_head=2, tie_weights=False),
    ],
    ids=str,
)
def test_transformers_computes_the_same_and_the_folder_comes_back(network, tmp_path):
    """Other logits, another text or another alphabet in transformers, or in the model that comes back."""
    model = tiny(**network)
    write_folder(model, CHARS, tmp_path)
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.randint(len(CHARS), (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(hf(ids).logits, model(ids)[0], atol=1e-4, rtol=0)
    greedy = hf.generate(ids[:1, :5], max_length=CONTEXT, do_sample=False)
    assert torch.equal(greedy, model.generate(ids[:1, :5], CONTEXT, temperature=0))

    text = CHARS + CHARS[::-1] + "\n\n  \n"
    assert tokenizer(text)["input_ids"] == [CHARS.index(char) for char in text]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    with pytest.raises(Exception, match="UNK"):
        tokenizer("abZ")
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not model.config.tie_weights)

    back = read_folder(tmp_path)
    assert back.chars == CHARS and back.path == tmp_path
    with torch.no_grad():
        assert torch.equal(back.build_model().eval()(ids)[0], model(ids)[0])


def test_transformers_4_finds_its_settings_too(tmp_path):
    """Settings that version 4 reads from the top level: it would take a quarter of each head for rotary, silently."""
    write_folder(tiny(**STABLELM), CHARS, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["partial_rotary_factor"], config["rope_theta"]) == (1.0, 10000.0)
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "token_type_ids" not in tokenizer["model_input_names"]  # generate refuses them


@pytest.mark.parametrize("network", [GPT2, STABLELM], ids=str)
def test_the_ordinary_calls_of_transformers_give_the_greedy_text(network, tmp_path):
    """A text that ends early or passes the context, that newlines are missing from, or that padding changes.

    Newlines are the padding of the batches, so each of these calls has to tell padding from text.
    """
    model, prompts = tiny(**network), ["\nab\n\n", "a", "b c!"]
    write_folder(model, CHARS, tmp_path)
    hf, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    pipe = pipeline("text-generation", tmp_path)

    def greedy(prompt, length=CONTEXT):
        ids = torch.tensor([[CHARS.index(char) for char in prompt]])
        return "".join(CHARS[i] for i in model.generate(ids, length - len(prompt), temperature=0)[0].tolist())

    # one prompt
    for prompt in prompts:
        encoded = tokenizer(prompt, return_tensors="pt")
        for out in (hf.generate(**encoded), hf.generate(encoded.input_ids)):
            assert tokenizer.decode(out[0], skip_special_tokens=True) == greedy(prompt)
        assert pipe(prompt, do_sample=False)[0]["generated_text"] == greedy(prompt)
        assert len(pipe(prompt)[0]["generated_text"]) == CONTEXT  # sampled

    # a batch: without a pad token an error, not another text
    with pytest.raises(ValueError, match="pad"):
        tokenizer(prompts, padding=True)
    with pytest.raises(ValueError, match="pad"):
        pipe(prompts, batch_size=3)
    tokenizer.pad_token = pipe.tokenizer.pad_token = "\n"
    encoded = tokenizer(prompts, padding=True, return_tensors="pt")
    longest = encoded.input_ids.size(1)
    texts = tokenizer.batch_decode(hf.generate(**encoded)[:, longest:], skip_special_tokens=True)
    piped = [records[0]["generated_text"] for records in pipe(prompts, batch_size=3, do_sample=False)]
    for prompt, text, whole in zip(prompts, texts, piped, strict=True):
        assert prompt + text == whole == greedy(prompt, CONTEXT - longest + len(prompt))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of tiny(**STABLELM) with a graph, which takes seconds."""
    folder = tmp_path_factory.mktemp("written")
    write_folder(tiny(**STABLELM), CHARS, folder, graph=True)
    return folder


@pytest.fixture
def whole(written, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


@pytest.mark.slow
def test_the_graph_in_a_folder_is_of_the_model_beside_it(tmp_path):
    """A graph of an earlier model, which transformers.js would take for the one of config.json."""
    first, second = tiny(**STABLELM), tiny(**GPT2)
    ids = torch.arange(CONTEXT)[None] % len(CHARS)
    for model in (first, second):
        write_folder(model, CHARS, tmp_path, graph=True)
        assert_tells_no_paths((path for path in tmp_path.rglob("*") if path.is_file()), tmp_path, tempfile.gettempdir())
        with torch.no_grad():
            torch.testing.assert_close(OnnxGPT(tmp_path / GRAPH)(ids), model(ids)[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(read_folder(tmp_path).build_model().eval()(ids)[0], model(ids)[0])
    write_folder(first, CHARS, tmp_path)
    assert not (tmp_path / GRAPH).exists()


@pytest.mark.parametrize("obstacle", ["tokenizer.json", "onnx/model.onnx"])
def test_a_folder_that_cannot_be_written_leaves_the_older_one(obstacle, whole, tmp_path):
    """A folder is in the way of a new file: config, weights and graph stay those of one model."""
    (tmp_path / obstacle).unlink()
    (tmp_path / obstacle).mkdir()
    before = tree(tmp_path)
    with pytest.raises(OSError):
        write_folder(tiny(**GPT2), CHARS, tmp_path, graph=True)
    assert tree(tmp_path) == before and len(before) >= 5


# -- models that were born in transformers -----------------------------------------------------------------------------

SIZES = dict(vocab_size=len(CHARS), tie_word_embeddings=True)
GPT2_SIZES = dict(SIZES, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, activation_function="gelu")
STABLELM_SIZES = dict(
    SIZES,
    max_position_embeddings=CONTEXT,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    num_key_value_heads=2,
    qk_layernorm=True,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
)


def foreign(folder, hf):
    """A folder that transformers wrote from a model of its own, with our tokenizer."""
    write_folder(tiny(), CHARS, folder)
    for name, p in hf.named_parameters():
        if "layernorm.norms" not in name and not (isinstance(hf, StableLmForCausalLM) and name.endswith("bias")):
            torch.nn.init.normal_(p, std=0.3)
    hf.save_pretrained(folder)
    (folder / SUMS).unlink()
    return hf.eval()


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES | dict(n_inner=40, activation_function="gelu_new"))),
        lambda: StableLmForCausalLM(StableLmConfig(**STABLELM_SIZES)),
    ],
    ids=["GPT-2", "GPT-2, a narrow MLP", "StableLM"],
)
def test_a_model_that_was_born_in_transformers_comes_in(make, tmp_path):
    """A matrix transposed, split or placed otherwise than transformers means it."""
    torch.manual_seed(3)
    hf = foreign(tmp_path, make())
    ours, ids = read_folder(tmp_path).build_model().eval(), torch.arange(CONTEXT)[None] % len(CHARS)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], hf(ids).logits, atol=1e-4, rtol=0)


@unix
def test_weights_in_several_files_come_in(tmp_path):
    """Some of the files of a large model left out."""
    hf = foreign(tmp_path, StableLmForCausalLM(StableLmConfig(**STABLELM_SIZES)))
    whole = read_folder(tmp_path).weights
    (tmp_path / "model.safetensors").unlink()
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    parts = read_folder(tmp_path).weights
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_no_file_of_an_earlier_model_is_mixed_with_the_new_ones(tmp_path):
    """Split weights, which this kit and vLLM would read, or a special token, at which a pipeline would end."""
    hf, model = foreign(tmp_path, StableLmForCausalLM(StableLmConfig(**STABLELM_SIZES))), tiny(**STABLELM)
    (tmp_path / "model.safetensors").unlink()
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "a"}', encoding="utf-8")
    (tmp_path / "added_tokens.json").write_text('{"abc": 99}', encoding="utf-8")
    (tmp_path / "model-card.safetensors").write_bytes(b"a file of the user")
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "a" and (tmp_path / INDEX).is_file()
    write_folder(model, CHARS, tmp_path)
    weights = read_folder(tmp_path).weights
    assert all(torch.equal(weights[name], p) for name, p in model.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token is None and len(tokenizer) == len(CHARS)
    assert sorted(file.name for file in tmp_path.glob("*.safetensors*")) == [
        "model-card.safetensors",
        "model.safetensors",
    ]


def test_a_folder_that_fails_its_check_leaves_the_older_one(whole, tmp_path):
    before = tree(tmp_path)

    def check(made):
        assert read_folder(made).chars == CHARS  # all files but the checksums are there
        raise ValueError("another model")

    with pytest.raises(ValueError, match="another model"):
        write_folder(tiny(**GPT2), CHARS, tmp_path, check=check)
    assert tree(tmp_path) == before


# -- what is refused ---------------------------------------------------------------------------------------------------


def add_weights(folder, **tensors):
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file)


def edit(folder, name, change):
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "onnx/model.onnx"])
def test_a_flipped_bit_in_a_folder_is_refused(name, whole, tmp_path):
    """Another weight or another character that nobody notices."""
    read_folder(tmp_path)
    raw = bytearray((tmp_path / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / name).write_bytes(raw)
    for read in (read_folder, HuggingFaceGPT):
        with pytest.raises(ValueError, match=f"{name} has changed") as error:
            read(tmp_path)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    with contextlib.suppress(ValueError):  # a folder without checksums is not compared with any
        (tmp_path / SUMS).unlink()
        read_folder(tmp_path)


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_the_checksums_of_a_folder_are_those_of_sha256sum(whole, tmp_path):
    """A checksum of other bytes, or a file without one."""
    result = subprocess.run(["sha256sum", "-c", SUMS], cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    files = {name for name, raw in tree(tmp_path).items() if raw is not None}
    assert {line.split(": ")[0] for line in result.stdout.splitlines()} == files - {SUMS}


def test_a_vocabulary_that_is_padded_is_refused(tmp_path):
    """A training that ends in an IndexError at its first token without a character."""
    torch.manual_seed(3)
    foreign(tmp_path, GPT2LMHeadModel(GPT2Config(**GPT2_SIZES | dict(vocab_size=128))))
    with pytest.raises(ValueError, match=f"{len(CHARS)} characters and a vocab_size of 128") as error:
        read_folder(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert_one_line(here("--init_from", tmp_path, "--out_dir", tmp_path / "out"), tmp_path, "vocab_size of 128")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    """A text of one character, and a --verify that finds it the same without the cache."""
    model = tiny(**STABLELM)
    with torch.no_grad():
        model.transformer["h"][0].mlp.c_proj.weight[1, 2] = torch.nan
    write_folder(model, CHARS, tmp_path)
    for read in (lambda: read_folder(tmp_path).build_model(), lambda: HuggingFaceGPT(tmp_path)):
        with pytest.raises(ValueError, match="NaN") as error:
            read()
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_weights_outside_of_the_folder_are_not_read(tmp_path):
    """An index that names any file of the machine."""
    hf = foreign(tmp_path / "hf", StableLmForCausalLM(StableLmConfig(**STABLELM_SIZES)))
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = tmp_path / "hf" / INDEX
    for name in ("../model.safetensors", str(tmp_path / "model.safetensors"), "..", ""):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(hf.state_dict(), name)}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"not a file of the folder|is missing"):
            read_folder(tmp_path / "hf")


@unix
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", INDEX, SUMS])
def test_a_pipe_in_a_folder_does_not_block(name, tmp_path):
    write_folder(tiny(**STABLELM), CHARS, tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    if name in (SUMS, INDEX):  # files that a folder need not have
        assert read_folder(tmp_path).chars == CHARS
    else:
        with pytest.raises(ValueError, match=re.escape(name)):
            read_folder(tmp_path)


@pytest.mark.parametrize(
    ["damage", "words"],
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "model"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(model_type="llama")), "llama"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(use_parallel_residual=True)), "parallel"),
        (lambda folder: edit(folder, "config.json", lambda c: c["rope_parameters"].update(rope_theta=5e5)), "theta"),
        (lambda folder: edit(folder, "config.json", lambda c: c["rope_parameters"].update(rope_type="yarn")), "yarn"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(num_hidden_layers=3)), "2 layers instead of 3"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(num_hidden_layers=1)), "2 layers instead of 1"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(num_hidden_layers=10**7)), "of 10000000"),
        (lambda folder: add_weights(folder, extra=torch.ones(2)), "extra, which"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(qk_layernorm=True)), "layernorm"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: edit(folder, "config.json", lambda c: c.update(hidden_size=48)), "fit"),
        (lambda folder: edit(folder, "config.json", lambda c: c.pop("hidden_size")), "hidden_size"),
        (lambda folder: edit(folder, "tokenizer.json", lambda c: c["model"]["vocab"].update(the=99)), "single char"),
    ],
)
def test_a_folder_that_is_no_network_of_ours_is_refused_in_one_line(damage, words, tmp_path):
    """A network that computes something else, or a traceback."""
    write_folder(tiny(**STABLELM), CHARS, tmp_path / "hf")
    (tmp_path / "hf" / SUMS).unlink()
    damage(tmp_path / "hf")
    with pytest.raises(ValueError) as error:
        read_folder(tmp_path / "hf").build_model()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ["network", "word"],
    [
        (dict(norm_first=False), "norm_first"),
        (dict(activation="swiglu"), "activation"),
        (dict(qk_norm=True), "qk_norm"),
        (dict(n_kv_head=2), "n_kv_head"),
        (dict(pos_emb="rope"), "activation"),
        (dict(STABLELM, bias=True), "bias"),
    ],
    ids=str,
)
def test_a_network_that_no_class_computes_is_refused_by_name(network, word):
    """An export that computes something else than the model."""
    with pytest.raises(ValueError, match=word):
        model_type(GPTConfig(**(SIZE | network)))
