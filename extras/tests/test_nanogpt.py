"""For people who come from nanoGPT: its checkpoints, and its meta.pkl."""

import pickle
import shutil

import numpy as np
import pytest
import torch

from extras.formats.checkpoint import load_checkpoint, load_model
from extras.formats.nanogpt import read_meta
from helpers import CHARS, SAMPLE, assert_one_line, here, load, ok, plain_val_loss, save_model, tiny
from model import GPT, GPTConfig, build_model, save_checkpoint
from oracles import per_head_logits


def test_a_nanogpt_checkpoint_is_evaluated_and_trained_on_text_that_was_prepared_for_it(tmp_path):
    """Its seven model_args and its meta.pkl, whose characters are in another order than ours."""
    text = SAMPLE.read_text(encoding="utf-8")
    chars = "".join(sorted(set(text), reverse=True))
    args = dict(n_layer=1, n_head=2, n_embd=16, block_size=12, bias=True, vocab_size=len(chars), dropout=0.1)
    model = GPT(GPTConfig(**args)).eval()
    torch.save({"model": model.state_dict(), "model_args": args, "config": {}}, tmp_path / "ckpt.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(chars))}))
    flags = ["--init_from", tmp_path / "ckpt.pt", "--meta", tmp_path / "meta.pkl", "--data_dir", tmp_path / "data"]
    prepare = ["--input", SAMPLE, "--data_dir", tmp_path / "data"]
    ok(here(*prepare, script="data/prepare.py"))
    assert_one_line(here(*flags, "--eval_only"), f"--tokenizer {tmp_path / 'meta.pkl'}", code=1)
    ok(here(*prepare, "--tokenizer", tmp_path / "meta.pkl", script="data/prepare.py"))
    val = np.array([chars.index(c) for c in text[int(0.9 * len(text)) :]])
    loss = plain_val_loss(model, val, 12)
    assert float(ok(here(*flags, "--eval_only")).stdout.split()[2]) == pytest.approx(loss, abs=1e-4)
    still = ["--learning_rate", 0, "--weight_decay", 0, "--recipe", "nanogpt", "--max_iters", 1, "--device", "cpu"]
    ok(here(*flags, *still, "--out_dir", tmp_path / "out"))
    trained = load(tmp_path / "out" / "last.pt")
    assert trained["chars"] == chars
    result = here(*flags, "--init_from", tmp_path / "out", "--eval_only")
    assert_one_line(result, "has its own vocabulary: leave out --meta", code=1)
    assert all(torch.equal(p, trained["model"][name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize(
    "meta, size", [({"vocab_size": 300}, 300), (None, 50304), ({"itos": ["the", "a"] * 150}, 300)], ids=str
)
def test_ids_that_are_no_text_are_trained_on_and_sampled(meta, size, tmp_path):
    """nanoGPT's data folder holds whatever its user has counted: moves, notes, strokes, or the tokens of GPT-2."""
    ids = np.random.default_rng(0).integers(300 if meta else 50257, size=3000).astype("<u2")
    ids[:2700].tofile(tmp_path / "train.bin")
    ids[2700:].tofile(tmp_path / "val.bin")
    if meta:
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    tiny = "--n_layer 1 --n_head 2 --n_embd 8 --block_size 16 --ngram_targets 0 --device cpu".split()
    run = ["--data_dir", tmp_path, "--out_dir", tmp_path / "out"]
    said = ok(here(*tiny, *run, "--max_iters", 2)).stdout
    assert f"of 32 ids from {tmp_path}\n" in said
    assert "resuming" in ok(here("--init_from", "resume", "--out_dir", tmp_path / "out", "--max_iters", 3)).stdout
    assert load(tmp_path / "out" / "ckpt.pt")["model_args"]["vocab_size"] == size
    flags = ["--out_dir", tmp_path / "out", "--prompt", "5 17 3", "--max_new_tokens", 4, "--verify", "--device", "cpu"]
    written = ok(here(*flags, script="sample.py")).stdout.split()
    assert written[:3] == ["5", "17", "3"] and len(written) == 7 and all(int(word) < size for word in written)


SEED = np.random.default_rng(0)
NOT_IDS = "train.bin holds {} values, but nanoGPT's ids are np.uint16"


@pytest.mark.parametrize(
    "values, size, words",
    [
        (np.arange(200, dtype="<u2"), "300", "its vocab_size is '300'"),
        (np.arange(200, dtype="<u2"), np.int64(300), "int(size)"),
        (np.array([1, 2, 3], "<u2"), 3, "the vocabulary has 3 tokens, but the largest id is 3"),
        # read as ids of two bytes, all of these are below GPT-2's vocabulary size, or nearly so
        (np.arange(1, 200, dtype="<u4"), None, NOT_IDS.format("int32")),
        (np.arange(1, 200, dtype="<i8"), None, NOT_IDS.format("int64")),
        (np.arange(200, dtype="<f4"), None, NOT_IDS.format("float32")),
        (SEED.normal(size=200).astype("<f4"), None, NOT_IDS.format("float32")),
        (SEED.normal(size=200).astype("<f8"), None, NOT_IDS.format("float64")),
    ],
)
def test_ids_and_a_vocabulary_that_do_not_fit_are_one_line(values, size, words, tmp_path):
    for name in ("train", "val"):
        values.tofile(tmp_path / f"{name}.bin")
    if size:
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": size}))
    assert_one_line(here("--data_dir", tmp_path, "--out_dir", tmp_path / "out"), words, code=1)


def test_a_folder_that_has_lost_its_meta_json_is_not_taken_for_the_tokens_of_gpt2(data_dir, tmp_path):
    for name in ("train.bin", "val.bin"):
        shutil.copy(data_dir / name, tmp_path)
    result = here("--data_dir", tmp_path, "--out_dir", tmp_path / "out")
    assert_one_line(result, "meta.json is missing", "python data/prepare.py", code=1)


def test_a_meta_file_that_is_not_there_is_named(trained, data_dir):
    assert_one_line(here("--init_from", trained, "--meta", "no.json", "--data_dir", data_dir), "no.json", code=1)


@pytest.mark.parametrize(
    "meta, chars",
    [
        ({"itos": {0: "a", 1: "b"}}, "ab"),
        ({"itos": ["a", "b"]}, "ab"),
        ({"stoi": {"b": 1, "a": 0}}, "ab"),
        ({"itos": {0: "a", 1: "the"}}, "tokens are not characters"),
        ({"itos": {0: b"a", 1: b"b"}}, "tokens are not characters"),
        ({"vocab_size": 2}, "stoi"),
    ],
)
def test_a_meta_pkl_of_any_making_gives_its_characters_or_says_what_it_holds(meta, chars, tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    if chars == "ab":
        assert read_meta(tmp_path / "meta.pkl") == chars
    else:
        with pytest.raises(ValueError, match=chars):
            read_meta(tmp_path / "meta.pkl")


# -- the names of weights ----------------------------------------------------------------------------------------------


def test_the_weights_of_two_models_in_one_file_are_refused(tmp_path):
    """As of distillation: the last one would win, and the text be noise."""
    ours = tiny().state_dict()
    both = {f"{name}.{key}": value for name in ("student", "teacher") for key, value in ours.items()}
    torch.save({"model": both, "model_args": {}}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=r"has the weights of two models: .* comes twice, once as teacher"):
        load_checkpoint(tmp_path / "ckpt.pt")


@pytest.mark.parametrize(
    "prefix, bias",
    [
        ("", True),
        ("_orig_mod.", False),
        ("module.", True),
        ("_orig_mod.module.", True),
        ("module._orig_mod.", False),
        ("_fsdp_wrapped_module.", True),
        ("module._fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod.", False),
        ("model.", True),
        ("_forward_module.module.net.", False),
        ("student.gpt.", True),
        ("transformer.", True),
    ],
)
def test_a_nanogpt_checkpoint_loads_and_gives_nanogpts_logits(tmp_path, prefix, bias):
    """nanoGPT saves seven model_args, compiled key prefixes, tied weights twice and, before flash, mask buffers."""
    args = dict(n_layer=2, n_head=2, n_embd=16, block_size=12, bias=bias, vocab_size=31, dropout=0.1)
    g = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=g) * 0.4

    state = {"transformer.wte.weight": random(31, 16), "transformer.wpe.weight": random(12, 16)}
    for i in range(2):
        sizes = {"attn.c_attn": (48, 16), "attn.c_proj": (16, 16), "mlp.c_fc": (64, 16), "mlp.c_proj": (16, 64)}
        for name, size in {**sizes, "ln_1": (16,), "ln_2": (16,)}.items():
            state[f"transformer.h.{i}.{name}.weight"] = random(*size)
            if bias:
                state[f"transformer.h.{i}.{name}.bias"] = random(size[0])
        state[f"transformer.h.{i}.attn.bias"] = torch.tril(torch.ones(1, 1, 12, 12))
    state["transformer.ln_f.weight"] = random(16)
    if bias:
        state["transformer.ln_f.bias"] = random(16)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    ckpt = {"model": {prefix + key: value for key, value in state.items()}, "model_args": args, "iter_num": 5}
    torch.save({**ckpt, "optimizer": {}, "best_val_loss": torch.tensor(1.5), "config": {}}, tmp_path / "ckpt.pt")
    loaded = load_checkpoint(tmp_path / "ckpt.pt")
    ids = torch.randint(31, (1, 12), generator=g)
    expected = per_head_logits(state, args, ids[0].tolist())
    torch.testing.assert_close(build_model(loaded).eval()(ids)[0][0].double(), expected, atol=1e-4, rtol=1e-4)


def test_weights_whose_parts_were_wrapped_are_those_of_the_model(tmp_path):
    """The average of a model whose MLPs are wrapped."""
    network = tiny()
    averaged = torch.optim.swa_utils.AveragedModel(network)
    names = {name: name.replace(".mlp.", ".mlp._checkpoint_wrapped_module.") for name in averaged.state_dict()}
    weights = {names[name]: tensor for name, tensor in averaged.state_dict().items()}
    content = dict(model=weights, model_args=vars(network.config).copy(), chars=CHARS)
    save_checkpoint(tmp_path / "ckpt.pt", content)
    loaded = load_model(tmp_path / "ckpt.pt")[0].state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in network.state_dict().items())
    content["model"] = weights | {"transformer.submodule.x": torch.zeros(2)}
    save_checkpoint(tmp_path / "ckpt.pt", content)
    with pytest.raises(ValueError, match=r'Unexpected key.*"transformer\.submodule\.x"'):
        load_model(tmp_path / "ckpt.pt")


def test_a_checkpoint_of_a_different_network_is_told_what_it_is(tmp_path):
    """llama2.c's file has model_args too."""
    args = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=32, multiple_of=32, max_seq_len=32)
    save_checkpoint(tmp_path / "ckpt.pt", {"model": {}, "model_args": args})
    with pytest.raises(ValueError, match="unexpected keyword argument 'dim'"):
        load_checkpoint(tmp_path / "ckpt.pt")


def test_numpy_scalars_in_a_checkpoint_are_numbers(tmp_path):
    """A fork of nanoGPT saves the mean that np.mean gave as the val loss, and the size of a vocabulary as np.int64."""
    save_model(tmp_path, tiny())
    file = tmp_path / "ckpt.pt"
    expected, _ = load_model(file)
    checkpoint = load(file)
    sizes = {name: np.int64(size) for name, size in checkpoint["model_args"].items() if type(size) is int}
    numbers = dict(model_args=checkpoint["model_args"] | sizes, best_val_loss=np.float32(1.5), iter_num=np.int64(7))
    torch.save(checkpoint | numbers, file)
    model, _ = load_model(file)
    assert model.config == expected.config and model.source.endswith("step 7")
    ok(here("--ckpt", file, "--device", "cpu", script="sample.py"))
