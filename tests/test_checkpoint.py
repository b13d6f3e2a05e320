"""Checkpoints: equal to the bit after a round trip, nanoGPT's too; damaged or hostile files in one line."""

import io
import json
import math
import pickle
import warnings
import zipfile

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from helpers import (
    PROMPT,
    Bomb,
    assert_one_line,
    linux,
    lively,
    load,
    ok,
    run,
    sample,
    saved,
    texts_of,
    write_nanogpt,
)
from kvgpt.checkpoint import load_checkpoint, load_model, save_checkpoint
from model import GPTConfig
from oracles import per_head_logits

ARGS = dict(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=5, bias=False, dropout=0.0)
CONTENT = {
    "model": lively(GPTConfig(**ARGS)).state_dict(),
    "model_args": ARGS,
    "chars": "abcé\n",
    "ngrams": {"codes": torch.tensor([3, 17], dtype=torch.int32), "counts": torch.tensor([2, 9], dtype=torch.int32)},
    "best_val_loss": 1.25,
    "iter_num": 7,
    "optimizer": {"state": {0: {"exp_avg": torch.arange(3.0), "step": torch.tensor(7.0)}}},
    "config": {"learning_rate": 1e-3, "device": "cpu"},
}
WHOLE = saved(CONTENT)


def content_of(ckpt):
    """Return the content of a Checkpoint in the layout of the file."""
    named = dict(model=ckpt.weights, model_args=ckpt.model_args, chars=ckpt.chars, ngrams=ckpt.ngrams)
    return {**named, "best_val_loss": ckpt.best_val_loss, **ckpt.training}


def distinct_tensors():
    """The tensors of CONTENT, tied weights once."""
    tensors = [leaf for leaf in tree_leaves(CONTENT) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values()


def with_bytes(content):
    """Return `content` with each tensor as (dtype, shape, bytes), so that == compares bits, NaN included."""
    if isinstance(content, torch.Tensor):
        return content.dtype, tuple(content.shape), content.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(content, dict):
        return {key: with_bytes(value) for key, value in content.items()}
    return [with_bytes(value) for value in content] if isinstance(content, (list, tuple)) else content


def test_what_is_loaded_is_equal_to_the_bit_to_what_was_saved(tmp_path):
    path = tmp_path / "ckpt.pt"
    save_checkpoint(path, CONTENT)
    ckpt = load_checkpoint(path)
    assert ckpt.path == path
    assert with_bytes(content_of(ckpt)) == with_bytes(CONTENT)
    assert with_bytes(ckpt.build_model().state_dict()) == with_bytes(CONTENT["model"])
    model, chars = load_model(path)
    assert with_bytes(model.state_dict()) == with_bytes(CONTENT["model"])
    assert chars == CONTENT["chars"] and not model.training
    assert vars(model.config) == vars(GPTConfig(**ARGS))
    assert with_bytes(ckpt.checked_ngrams()) == with_bytes(CONTENT["ngrams"])


def test_what_a_checkpoint_lacks_has_a_default(tmp_path):
    save_checkpoint(tmp_path / "ckpt.pt", {"model": CONTENT["model"], "model_args": ARGS})
    ckpt = load_checkpoint(tmp_path / "ckpt.pt")
    assert (ckpt.chars, ckpt.ngrams, ckpt.training) == (None, None, {}) and math.isnan(ckpt.best_val_loss)
    assert ckpt.checked_ngrams() is None
    with pytest.raises(ValueError, match="--meta"):
        ckpt.build_language_model()


# -- nanoGPT's ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("bias", [True, False])
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
    model = load_checkpoint(tmp_path / "ckpt.pt").build_model().eval()
    ids = torch.randint(31, (1, 12), generator=g)
    expected = per_head_logits(state, args, ids[0].tolist())
    torch.testing.assert_close(model(ids)[0][0].double(), expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def nanogpt(trained, tmp_path):
    """A folder with the model of `trained` as nanoGPT would have saved it."""
    return write_nanogpt(trained, tmp_path)


@pytest.mark.slow
def test_a_nanogpt_checkpoint_with_its_meta_gives_the_same_text(trained, nanogpt):
    flags = ["--ckpt", nanogpt / "ckpt.pt", "--meta", nanogpt / "meta.pkl"]
    assert sample(trained, *flags, "--prompt", PROMPT).stdout == texts_of(trained, PROMPT, 100)[0]
    assert_one_line(sample(trained, "--ckpt", nanogpt / "ckpt.pt"), "--meta")


def test_a_meta_that_would_run_code_does_not(nanogpt):
    for content in (pickle.dumps(Bomb(nanogpt / "harm")), pickle.dumps({"itos": Bomb(nanogpt / "harm")}), b"", b"\x80"):
        (nanogpt / "meta.pkl").write_bytes(content)
        with pytest.raises(ValueError, match=r"meta\.pkl"):
            load_model(nanogpt / "ckpt.pt", nanogpt / "meta.pkl")
    assert not (nanogpt / "harm").exists()


@pytest.mark.parametrize("meta", [{"itos": {0: "a"}}, {"itos": 3}, {}, {"itos": {0: 1}}, {"itos": {1: "a"}}], ids=str)
def test_a_meta_that_does_not_fit_is_refused(nanogpt, meta):
    (nanogpt / "meta.pkl").write_bytes(pickle.dumps(meta))
    with pytest.raises(ValueError, match=r"characters|meta"):
        load_model(nanogpt / "ckpt.pt", nanogpt / "meta.pkl")


# -- damaged and hostile files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, word",
    [
        (b"", "truncated"),
        (b"not a checkpoint at all", "damaged"),
        (b"PK\x03\x04" + bytes(100), "damaged"),
        (saved([1, 2]), "no GPT checkpoint"),
        (saved({"model": {}}), "model_args"),
        (saved({"model": {}, "model_args": {"n_layer": 1, "n_head": 1, "n_embd": 4, "vocab_size": 3}}), "weights"),
        (saved({"model": {}, "model_args": {"n_layer": 0}}), "n_layer=0"),
        (saved({"model": {}, "model_args": {"n_leyer": 2}}), "n_leyer"),
        (saved({"model": 3, "model_args": {}}), "no GPT checkpoint"),
        (saved({"model": {}, "model_args": 3}), "no GPT checkpoint"),
        (saved({"model": {"lm_head.weight": 3}, "model_args": {}}), "no GPT checkpoint"),
    ],
    ids=range(11),
)
def test_what_is_no_checkpoint_is_a_one_line_value_error(tmp_path, content, word):
    (tmp_path / "ckpt.pt").write_bytes(content)
    with pytest.raises(ValueError, match=word) as error:
        load_checkpoint(tmp_path / "ckpt.pt").build_model()
    assert "\n" not in str(error.value)


@given(st.integers(0, len(WHOLE) - 1))
@example(len(WHOLE) - 1)
def test_a_cut_checkpoint_never_loads(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("cut") / "ckpt.pt"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(ValueError) as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value) and "ckpt.pt" in str(error.value)


@settings(max_examples=400)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_checkpoint_with_an_altered_byte_loads_as_it_was_or_not_at_all(tmp_path_factory, place, change):
    """Another weight, count or setting, which torch.load takes as it comes."""
    path, altered = tmp_path_factory.mktemp("altered") / "ckpt.pt", bytearray(WHOLE)
    altered[place] ^= change
    path.write_bytes(altered)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of another pickle protocol
            got = content_of(load_checkpoint(path))
    except ValueError as error:
        assert "\n" not in str(error) and "ckpt.pt" in str(error)
    else:
        assert with_bytes(got) == with_bytes(CONTENT)


def test_a_checkpoint_without_checksums_loads(tmp_path):
    """Files of torch before 1.6, and of a torch that was told to leave the checksums out."""
    torch.save(CONTENT, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CONTENT, tmp_path / "none.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("old.pt", "none.pt"):
        assert with_bytes(content_of(load_checkpoint(tmp_path / name))) == with_bytes(CONTENT)


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, torch.Tensor.long, torch.Tensor.cfloat])
def test_weights_of_another_kind_are_refused(change, tmp_path):
    """A traceback from a sparse tensor, which has no storage, or a warning about a number that loses its other half."""
    weights = CONTENT["model"] | {"transformer.wte.weight": change(CONTENT["model"]["transformer.wte.weight"])}
    torch.save(CONTENT | {"model": weights}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=r"ckpt\.pt") as error:
        load_model(tmp_path / "ckpt.pt")
    assert "\n" not in str(error.value)


def test_a_pickle_that_is_no_checkpoint_costs_one_line(trained, tmp_path):
    """torch warns about the protocol of such a file."""
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "a"}}))
    assert_one_line(sample(trained, "--ckpt", tmp_path / "meta.pkl"), "meta.pkl", "not loaded")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CONTENT["model"])
def test_weights_that_are_not_finite_are_refused(name, number, tmp_path):
    """A text of newlines, and an export that says "within nan"."""
    weights = {key: value.clone() for key, value in CONTENT["model"].items()}
    for key in (name, "lm_head.weight") if name == "transformer.wte.weight" else (name,):  # one parameter
        weights[key].view(-1)[-1] = number
    torch.save(CONTENT | {"model": weights}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="NaN") as error:
        load_model(tmp_path / "ckpt.pt")
    assert "ckpt.pt" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(n_layer=2**23),
        dict(n_layer=2),
        dict(block_size=2**24 - 1),
        dict(vocab_size=2**24 - 1),
        dict(n_embd=2**24 - 2),
        dict(n_embd=2**24 - 2, n_head=2**23 - 1),
        dict(mlp_ratio=2**27),
    ],
    ids=str,
)
def test_sizes_that_the_weights_do_not_have_take_no_time_and_no_memory(sizes, tmp_path):
    """A network of gigabytes that is made before anybody compares its sizes with the file."""
    torch.save(CONTENT | {"model_args": ARGS | sizes}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="do not fit"):
        load_model(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("change", ["shared", "expanded"])
def test_weights_that_the_file_does_not_hold_are_refused(change, tmp_path):
    """A file of kilobytes can claim gigabytes, by names for the same numbers and by a stride of 0."""
    numbers, model = torch.zeros(max(w.numel() for w in CONTENT["model"].values())), {}
    for name, weight in CONTENT["model"].items():
        shared = numbers[: weight.numel()].view(weight.shape)
        model[name] = shared if change == "shared" else torch.zeros(1).expand(weight.shape)
    torch.save(CONTENT | {"model": model}, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match="larger than the file"):
        load_checkpoint(tmp_path / "ckpt.pt")


def test_a_loss_too_large_for_a_float_is_unknown(tmp_path):
    torch.save(CONTENT | {"best_val_loss": 10**400}, tmp_path / "ckpt.pt")
    assert math.isnan(load_checkpoint(tmp_path / "ckpt.pt").best_val_loss)


def test_a_compressed_file_is_refused(tmp_path):
    """Two megabytes would become gigabytes before anybody compares the shapes."""
    with (
        zipfile.ZipFile(io.BytesIO(WHOLE)) as old,
        zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ValueError, match="is compressed"):
        load_checkpoint(tmp_path / "a.pt")


PEAK = """
import resource, sys
from kvgpt.checkpoint import load_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_checkpoint(*sys.argv[1:]).checked_ngrams()
except ValueError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 2**10, error)
"""


@pytest.mark.slow
@linux
@pytest.mark.parametrize("name", ["n-grams", "meta.pkl"])
def test_a_small_file_takes_little_memory(name, nanogpt):
    """An n-gram count of stride 0, and a pickle of nine bytes that stores an entry of number 2^28."""
    many = torch.ones(1, dtype=torch.int32).expand(2**31)
    torch.save(CONTENT | {"ngrams": {"codes": many, "counts": many}}, nanogpt / "ngrams.pt")
    (nanogpt / "meta.pkl").write_bytes(b"\x80\x02}r\xff\xff\xff\x0f.")
    files = [nanogpt / "ngrams.pt"] if name == "n-grams" else [nanogpt / "ckpt.pt", nanogpt / "meta.pkl"]
    megabytes, message = ok(run("-c", PEAK, *files)).stdout.split(maxsplit=1)
    assert name in message and int(megabytes) < 100


@pytest.mark.parametrize("value", [None, 5, [1], torch.zeros(3), {"a": torch.zeros(2, 2)}, "\ud800bcé\n", "aacé\n"])
@pytest.mark.parametrize("entry", "model model_args chars ngrams n_layer bias dropout activation".split())
def test_any_other_value_of_an_entry_is_a_one_line_value_error(entry, value, tmp_path):
    """A traceback, or a message with a tensor of several lines in it."""
    changed = {entry: value} if entry in CONTENT else {"model_args": ARGS | {entry: value}}
    torch.save(CONTENT | changed, tmp_path / "ckpt.pt")
    try:
        ckpt = load_checkpoint(tmp_path / "ckpt.pt")
        ckpt.build_language_model()
        ckpt.checked_ngrams()
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert entry == "ngrams" and value is None


def test_a_checkpoint_that_would_run_code_does_not(tmp_path):
    (tmp_path / "a.pt").write_bytes(saved({"model": Bomb(tmp_path / "harm"), "model_args": {}}))
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "harm"), protocol=2))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(ValueError, match="not loaded"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "harm").exists()


def test_checkpoints_that_are_broken_or_malicious(trained, tmp_path):
    whole = (trained / "ckpt.pt").read_bytes()
    ckpt = load(trained / "ckpt.pt")
    torch.save({**ckpt, "config": Bomb(tmp_path / "harm")}, tmp_path / "bomb.pt")
    torch.save({**ckpt, "chars": ckpt["chars"][:-1]}, tmp_path / "vocabulary.pt")
    torch.save({**ckpt, "chars": ["ab"] * 65}, tmp_path / "chars.pt")
    torch.save({**ckpt, "chars": 65}, tmp_path / "number.pt")
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "json.pt").write_text(json.dumps({"model": 1}), encoding="utf-8")
    for name in ("bomb", "vocabulary", "chars", "number", "cut", "empty", "json"):
        with pytest.raises(ValueError) as error:
            load_model(tmp_path / f"{name}.pt")
        assert "\n" not in str(error.value) and f"{name}.pt" in str(error.value)
    assert_one_line(sample(trained, "--ckpt", tmp_path / "bomb.pt"), "bomb.pt", "not loaded")
    ckpt["model"]["lm_head.weight"].fill_(math.nan)
    torch.save(ckpt, tmp_path / "nan.pt")
    assert_one_line(sample(trained, "--ckpt", tmp_path / "nan.pt", "--verify"), "nan.pt", "NaN")
    assert not (tmp_path / "harm").exists()
