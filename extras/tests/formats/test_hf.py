"""extras/formats/hf_read.py and hf_write.py: folders as transformers itself reads and writes them."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, StableLmConfig, StableLmForCausalLM, pipeline

from extra_helpers import GPT2, STABLELM, TOKENIZER, bpe, write_gpt2
from extras.formats.checkpoint import load_checkpoint
from extras.formats.hf_write import export_hf, hf_settings, write_folder
from extras.formats.tokenizer import build_tokenizer
from helpers import CHARS, SAMPLE, SIZE, assert_one_line, here, ok, tiny, tree
from model import build_model

CONTEXT = SIZE["block_size"]


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
    model = tiny(**network)
    write_folder(model, TOKENIZER, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
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
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (not model.config.tie_weights)

    back = load_checkpoint(tmp_path)
    assert back["chars"] == CHARS and back["path"] == tmp_path
    with torch.no_grad():
        assert torch.equal(build_model(back).eval()(ids)[0], model(ids)[0])


def test_transformers_4_finds_its_settings_too(tmp_path):
    """It reads them from the top level, and would take a quarter of each head for rotary positions otherwise."""
    write_folder(tiny(**STABLELM), TOKENIZER, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["partial_rotary_factor"], config["rope_theta"]) == (1.0, 10000.0)
    tokenizer = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "token_type_ids" not in tokenizer["model_input_names"]  # generate refuses them


@pytest.mark.parametrize("network", [GPT2, STABLELM], ids=str)
def test_the_ordinary_calls_of_transformers_give_the_greedy_text(network, tmp_path):
    """Newlines are the padding of the batches, so each of these calls has to tell padding from text."""
    model = tiny(**network)
    prompts = ["\nab\n\n", "a", "b c!"]
    write_folder(model, TOKENIZER, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pipe = pipeline("text-generation", tmp_path)

    def greedy(prompt, length=CONTEXT):
        ids = torch.tensor([[CHARS.index(char) for char in prompt]])
        return "".join(CHARS[i] for i in model.generate(ids, length - len(prompt), temperature=0)[0].tolist())

    for prompt in prompts:
        encoded = tokenizer(prompt, return_tensors="pt")
        assert tokenizer.decode(hf.generate(**encoded)[0], skip_special_tokens=True) == greedy(prompt)
        assert pipe(prompt, do_sample=False)[0]["generated_text"] == greedy(prompt)

    with pytest.raises(ValueError, match="pad"):  # rather than generate different text
        tokenizer(prompts, padding=True)
    pipe.tokenizer.pad_token = "\n"
    longest = max(map(len, prompts))
    for prompt, records in zip(prompts, pipe(prompts, batch_size=3, do_sample=False), strict=True):
        assert records[0]["generated_text"] == greedy(prompt, CONTEXT - longest + len(prompt))


# -- models that were born in transformers -----------------------------------------------------------------------------

SIZES = dict(
    vocab_size=len(CHARS),
    max_position_embeddings=CONTEXT,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    num_key_value_heads=2,
    qk_layernorm=True,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0),
)


def born(folder, **settings):
    """Write the folder of a random StableLM of transformers' own, with our tokenizer. test_gpt2.py has GPT-2's."""
    torch.manual_seed(3)
    hf = StableLmForCausalLM(StableLmConfig(**SIZES | settings))
    for name, p in hf.named_parameters():
        if "layernorm.norms" not in name and not name.endswith("bias"):
            torch.nn.init.normal_(p, std=0.3)
    write_folder(tiny(), TOKENIZER, folder)
    hf.save_pretrained(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_was_born_in_transformers_comes_in(tied, tmp_path):
    born(tmp_path, tie_word_embeddings=tied)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours = build_model(load_checkpoint(tmp_path)).eval()
    ids = torch.arange(CONTEXT)[None] % len(CHARS)
    assert ours.config.tie_weights == tied
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)[0], hf(ids).logits, atol=1e-4, rtol=0)


def test_a_vocabulary_that_is_padded_is_refused(tmp_path):
    """Training would end in an IndexError at its first token without a character."""
    born(tmp_path, vocab_size=128)
    (tmp_path / "text").write_text(CHARS * 40, encoding="utf-8")
    flags = ["--input", tmp_path / "text", "--tokenizer", tmp_path, "--data_dir", tmp_path / "data"]
    ok(here(*flags, script="data/prepare.py"))
    flags = ["--data_dir", tmp_path / "data", "--out_dir", tmp_path / "out", "--block_size", 8, "--max_iters", 1]
    assert_one_line(here("--init_from", tmp_path, *flags), tmp_path, "128 tokens", code=1)
    assert not (tmp_path / "out").exists()


def test_heads_with_norms_of_their_own_are_refused(tmp_path):
    born(tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        hf.model.layers[0].self_attn.q_layernorm.norms[1].weight[0] = 2
    hf.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="each head has its own norm"):
        load_checkpoint(tmp_path)


# -- the export as a whole ---------------------------------------------------------------------------------------------


def test_an_export_that_fails_its_check_leaves_the_older_one(tmp_path):
    (tmp_path / "config.json").write_bytes(b"older")
    model = tiny(**STABLELM)
    model.transformer["h"][0].mlp.activation = F.gelu
    with pytest.raises(ValueError, match="differs from the model"):
        export_hf(model, TOKENIZER, tmp_path)
    assert tree(tmp_path) == {"config.json": b"older"}


@pytest.mark.slow
def test_special_tokens_survive_a_finetuning_and_an_export_so_that_text_ends(tmp_path):
    eos = [7, 9]
    write_gpt2(tmp_path / "first", bos_token_id=5, eos_token_id=eos, pad_token_id=3)
    prepare = ["--input", SAMPLE, "--tokenizer", tmp_path / "first", "--data_dir", tmp_path / "data"]
    ok(here(*prepare, script="data/prepare.py"))
    flags = ["--data_dir", tmp_path / "data", "--out_dir", tmp_path, "--device", "cpu", "--max_iters"]
    ok(here("--init_from", tmp_path / "first", *flags, 1))
    ok(here("--init_from", "resume", *flags, 2))
    ok(here("--format", "hf", "--out_dir", tmp_path, script="extras/export.py"))
    hf, tokenizer = (kind.from_pretrained(tmp_path / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for config in (hf.config, hf.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (5, eos, 3)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, None, None)
    ids = torch.tensor([[11, 12]])
    only = hf.generate(ids, max_length=20, prefix_allowed_tokens_fn=lambda _, ids: [11] if len(ids) < 5 else [7])
    assert only.tolist() == [[11, 12, 11, 11, 11, 7]]


def ids_in(file, **ids):
    return {file: {f"{name}_token_id": i for name, i in ids.items()}}


CONFIG, GENERATION = partial(ids_in, "config"), partial(ids_in, "generation_config")
END = {"content": "<|endoftext|>", "lstrip": False}  # as transformers writes it
SPECIAL = [  # files of a folder whose vocabulary has 512 tokens and an END; ids and names of its export; words of notes
    (CONFIG(bos=50256, eos=50256), (None, None), {}, ["bos_token_id 50256: ", "eos_token_id 50256: "]),
    (CONFIG(eos=[]), (None, None), {}, []),
    (CONFIG(eos="256", bos=True), (None, None), {}, ["eos_token_id '256': ", "bos_token_id True: "]),
    (CONFIG(eos=[3, -1, 513]), (None, [3]), {}, ["eos_token_id -1: ", "eos_token_id 513: "]),
    (CONFIG(eos=3) | GENERATION(eos=[512, 3]), (None, [512, 3]), {"eos": 512}, []),
    (CONFIG(eos=3, pad=9), (None, 3), {}, []),  # a "$" that stays an ordinary token
    (CONFIG(bos=512), (512, None), {"bos": 512}, []),
    (CONFIG(bos=[7, 3]), (7, None), {}, []),
    (CONFIG(eos=512) | GENERATION(eos=50256), (None, 512), {"eos": 512}, []),
    (CONFIG(eos=512) | GENERATION(eos=[]), (None, 512), {"eos": 512}, []),
    ({"tokenizer_config": {"eos_token": "!"}}, (None, None), {}, ["eos_token '!': it is not a special token"]),
    ({"tokenizer_config": {"eos_token": END, "pad_token": None}}, (None, None), {"eos": 512}, []),
    ({"special_tokens_map": {"eos_token": "<|endoftext|>"}}, (None, None), {"eos": 512}, []),
    ({"tokenizer_config": {"unk_token": "[UNK]"}}, (None, None), {}, ["unk_token '[UNK]'"]),
]


@pytest.mark.parametrize(["files", "ids", "names", "notes"], SPECIAL, ids=str)
def test_an_export_has_the_special_tokens_of_its_folder_that_the_vocabulary_has(
    files, ids, names, notes, tmp_path, capsys
):
    first = tmp_path / "first"
    content = Tokenizer.from_str(bpe())
    content.add_special_tokens(["<|endoftext|>"])
    write_gpt2(first, vocab_size=513)
    (first / "tokenizer.json").write_text(content.to_str(), encoding="utf-8")
    for name, settings in files.items():
        file = first / f"{name}.json"
        there = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps(there | settings), encoding="utf-8")

    checkpoint = load_checkpoint(first)
    capsys.readouterr()  # the progress bar of write_gpt2
    model = build_model(checkpoint).eval()
    export_hf(model, build_tokenizer(checkpoint), tmp_path / "hf", checkpoint["special_tokens"])
    err = capsys.readouterr().err
    assert len(err.splitlines()) == len(notes) and all(note in err for note in notes), err
    hf, tokenizer = (kind.from_pretrained(tmp_path / "hf") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for config in (hf.config, hf.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == ids
    if "eos" in names:  # CTranslate2 loads no model without the three
        names = {"bos": names["eos"], "unk": names["eos"]} | names
    for name in ("bos", "eos", "pad", "unk"):
        assert getattr(tokenizer, f"{name}_token_id") == names.get(name)
    assert tokenizer.decode([3], skip_special_tokens=True) == tokenizer.decode([3]) != ""


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
    with pytest.raises(ValueError, match=word):
        hf_settings(tiny(**network))
