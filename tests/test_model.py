"""The network against plain mathematics, its configuration, and checkpoints of other makes."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import packed_greedy_decode, textbook_logits, turned

import model as kit
from checkpoint import build_model, load_checkpoint
from model import GPT, GPTConfig, clear_kv_cache

torch.set_num_threads(1)

SHAPE = dict(block_size=16, vocab_size=23, n_layer=2, n_head=4, n_embd=32)
KINDS = [
    dict(zip(("pos_emb", "norm_first", "n_kv_head"), values))
    for values in itertools.product(("learned", "rope"), (True, False), (None, 2, 1))
]
# the modern recipe's
KINDS += [dict(pos_emb="rope", qk_norm=True, activation="swiglu", n_kv_head=n_kv_head) for n_kv_head in (None, 2)]


def lively(config, seed=0):
    """A GPT in eval mode whose weights are large enough for attention and tokens to differ from each other."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (p == 1))
    return model


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "extra", [{}, dict(bias=False, activation="gelu_tanh", tie_weights=False, mlp_ratio=2)], ids=str
)
def test_logits_are_those_of_the_textbook_loop_over_heads(kind, extra):
    model = lively(GPTConfig(**SHAPE, **(extra | kind)))
    idx = torch.randint(23, (3, 11))
    logits, loss = model(idx[:, :-1], targets=idx[:, 1:])
    expected = torch.stack([textbook_logits(model.state_dict(), vars(model.config), row[:-1].tolist()) for row in idx])
    assert logits.shape == (3, 10, 23)
    torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)
    picked = expected.log_softmax(-1).gather(-1, idx[:, 1:, None])
    assert loss.item() == pytest.approx(-picked.mean().item(), rel=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1), (2, 4), (3, 3)], ids=str)
def test_a_large_linear_multiplies_a_few_rows_as_many(bias, shape):
    """Generation takes another way to the same product there, which the small models of the other tests never meet."""
    torch.manual_seed(0)
    linear, x = kit.Linear(256, 640, bias=bias), torch.randn(*shape, 256)
    with torch.inference_mode():
        expected = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        torch.testing.assert_close(linear(x).double(), expected, atol=1e-5, rtol=1e-5)
        assert linear(x).shape == (*shape, 640)


def test_targets_of_minus_one_do_not_count():
    model, idx = lively(GPTConfig(**SHAPE)), torch.randint(23, (2, 8))
    targets = idx.roll(-1, 1)
    targets[:, 4:] = -1
    assert model(idx, targets)[1].item() == pytest.approx(model(idx[:, :4], targets[:, :4])[1].item(), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_post_ln_decoder_with_packed_weights_gives_the_same_tokens_through_the_cache(seed):
    n_head, d, vocab, num_blocks, context = 4, 32, 29, 3, 24
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randn(num_blocks, 6, d, d, generator=g)
    embedding, positions = torch.randn(vocab, d, generator=g), torch.randn(context, d, generator=g) * 3
    unembedding = torch.randn(d, vocab, generator=g) * 0.3
    config = dict(block_size=context, vocab_size=vocab, n_layer=num_blocks, n_head=n_head, n_embd=d, bias=False)
    model = GPT(GPTConfig(**config, norm_first=False, mlp_ratio=1, activation="gelu_tanh", tie_weights=False)).eval()
    state = {"transformer.wte.weight": embedding, "transformer.wpe.weight": positions, "lm_head.weight": unembedding.T}
    for i, (w_q, w_k, w_v, w_o, w_mlp1, w_mlp2) in enumerate(blocks):
        block = f"transformer.h.{i}."
        state[block + "attn.c_attn.weight"] = torch.cat((w_q, w_k, w_v), dim=1).T
        state[block + "attn.c_proj.weight"] = w_o.T
        state[block + "mlp.c_fc.weight"], state[block + "mlp.c_proj.weight"] = w_mlp1.T, w_mlp2.T
        state[block + "ln_1.weight"] = state[block + "ln_2.weight"] = torch.ones(d)
    model.load_state_dict(state)
    prompt = torch.randint(vocab, (5,), generator=g).tolist()
    expected, closest = packed_greedy_decode(embedding, positions, blocks, unembedding, n_head, prompt, context - 5)
    assert closest > 1e-4, "a near-tie: choose another seed"
    assert len(set(expected)) >= 3
    for kv_cache in (True, False):
        out = model.generate(torch.tensor([prompt]), context, temperature=0, kv_cache=kv_cache)
        assert out[0].tolist() == prompt + expected


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value",
    [
        ("block_size", 0),
        ("vocab_size", -1),
        ("n_layer", 0),
        ("n_layer", 2.0),
        ("n_head", True),
        ("n_head", 5),
        ("n_embd", 30),
        ("dropout", 1.0),
        ("dropout", math.nan),
        ("dropout", "0.1"),
        ("bias", None),
        ("n_kv_head", 3),
        ("n_kv_head", 0),
        ("mlp_ratio", 0),
        ("mlp_ratio", math.inf),
        ("activation", "relu"),
        ("pos_emb", "alibi"),
        ("norm_first", 1),
        ("tie_weights", "yes"),
    ],
)
def test_impossible_values_name_field_and_value(field, value):
    with pytest.raises(ValueError) as error:
        GPTConfig(**{**SHAPE, field: value})
    named = "n_embd" if field == "n_head" and value == 5 else field
    assert named in str(error.value)
    assert str(value) in str(error.value) or named != field


def test_rope_needs_pairs():
    with pytest.raises(ValueError, match="n_embd=12"):
        GPTConfig(n_embd=12, n_head=4, pos_emb="rope")


def test_the_defaults_are_gpt2():
    """A preset of ours must never leak into the defaults: old model_args dicts name only nanoGPT's seven fields."""
    args = dict(n_layer=1, n_head=2, n_embd=8, block_size=4, bias=True, vocab_size=5, dropout=0.0)
    keys = set(GPT(GPTConfig(**args)).state_dict())
    block = "ln_1.weight ln_1.bias attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight attn.c_proj.bias ln_2.weight"
    block += " ln_2.bias mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias"
    other = "transformer.wte.weight transformer.wpe.weight transformer.ln_f.weight transformer.ln_f.bias lm_head.weight"
    assert keys == {f"transformer.h.0.{key}" for key in block.split()} | set(other.split())
    model = GPT(GPTConfig(**args))
    assert model.transformer.wte.weight is model.lm_head.weight
    assert model.transformer.h[0].mlp.c_fc.weight.shape == (32, 8)


# -- checkpoints -------------------------------------------------------------------------------------------------------


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
    model = build_model(load_checkpoint(tmp_path / "ckpt.pt")).eval()
    ids = torch.randint(31, (1, 12), generator=g)
    expected = textbook_logits(state, args, ids[0].tolist())
    torch.testing.assert_close(model(ids)[0][0].double(), expected, atol=1e-4, rtol=1e-4)


def saved(obj):
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


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
        build_model(load_checkpoint(tmp_path / "ckpt.pt"))
    assert "\n" not in str(error.value)


@given(st.floats(0, 1), st.integers(0, 255))
def test_a_cut_or_altered_checkpoint_never_loads_as_something_else(tmp_path_factory, cut, byte):
    path = tmp_path_factory.mktemp("cut") / "ckpt.pt"
    whole = saved({"model": {"w": torch.arange(50.0)}, "model_args": {"n_layer": 1}})
    path.write_bytes(whole[: int(cut * (len(whole) - 1))])
    with pytest.raises(ValueError):
        load_checkpoint(path)
    altered = bytearray(whole)
    altered[int(cut * (len(whole) - 1))] ^= byte
    path.write_bytes(altered)
    try:
        load_checkpoint(path)  # may load: not every byte matters
    except ValueError as error:
        assert "\n" not in str(error)


def test_a_checkpoint_that_would_run_code_does_not(tmp_path):
    (tmp_path / "a.pt").write_bytes(saved({"model": Bomb(tmp_path / "harm"), "model_args": {}}))
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "harm"), protocol=2))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(ValueError, match="not loaded"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "harm").exists()


# -- the cache as an object --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_heads_hold_the_keys_and_values_of_every_position_so_far(kind):
    """key_cache and value_cache against the projections of the textbook, for each Head, growing a row a step."""
    model, idx = lively(GPTConfig(**SHAPE, **kind)), torch.randint(23, (2, 9))
    heads = [m for m in model.modules() if isinstance(m, kit.Head)]
    n_kv_head = kind["n_kv_head"] or 4
    assert len(heads) == 2 * n_kv_head
    assert all(head.key_cache is None and head.value_cache is None for head in heads)
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        model(idx[:, begin:end], pos=torch.arange(begin, end))
        assert all(head.key_cache.shape == head.value_cache.shape == (2, end, 8) for head in heads)
    attn = model.transformer.h[0].attn
    x = model.transformer.wte(idx) + (model.transformer.wpe.weight[:9] if kind["pos_emb"] == "learned" else 0)
    x = model.transformer.h[0].ln_1(x) if kind.get("norm_first", True) else x
    k, v = attn.c_attn(x)[..., 32:].split(n_kv_head * 8, dim=-1)
    for i in range(n_kv_head):
        key = k[..., i * 8 : i * 8 + 8]
        key = attn.k_norm(key) if kind.get("qk_norm") else key
        if kind["pos_emb"] == "rope":
            key = torch.stack([turned(row.detach().double()) for row in key]).float()
        torch.testing.assert_close(attn.heads[i].key_cache, key, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(attn.heads[i].value_cache, v[..., i * 8 : i * 8 + 8])
    assert len({head.key_cache.untyped_storage().data_ptr() for head in attn.heads}) == 1
    clear_kv_cache(model)
    assert all(head.key_cache is None and head.value_cache is None for head in heads)


def test_the_cache_is_no_parameter_and_no_buffer():
    model = lively(GPTConfig(**SHAPE, pos_emb="rope"))
    before = set(model.state_dict())
    model(torch.zeros(1, 5, dtype=torch.int64), pos=torch.arange(5))
    assert set(model.state_dict()) == before == {n for n, _ in model.named_parameters()} | {"lm_head.weight"}
    assert not list(model.named_buffers())


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_with_a_cache_of_its_own(copier):
    """Heads of a copy must see the copy's buffers, not the original's."""
    model, idx = lively(GPTConfig(**SHAPE)), torch.randint(23, (1, 8))
    model(idx[:, :5], pos=torch.arange(5))
    twin = copier(model)
    expected = model(idx[:, 5:], pos=torch.arange(5, 8))[0]
    clear_kv_cache(model)
    assert torch.equal(twin(idx[:, 5:], pos=torch.arange(5, 8))[0], expected)
    assert twin.transformer.h[1].attn.heads[0].key_cache.shape == (1, 8, 8)
    assert model.transformer.h[1].attn.heads[0].key_cache is None


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.train(),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16),
        lambda model: clear_kv_cache(torch.nn.Sequential(model)),
    ],
)
def test_changed_weights_never_meet_old_keys(change):
    model, idx = lively(GPTConfig(**SHAPE)), torch.randint(23, (1, 6))
    model(idx, pos=torch.arange(6))
    change(model)
    model.eval()
    assert all(m.key_cache is None for m in model.modules() if isinstance(m, kit.Head))
    with pytest.raises(ValueError, match="holds 0 positions"):
        model(idx[:, :1], pos=torch.tensor([6]))


def test_a_cached_call_keeps_no_graph_and_a_failed_one_no_keys():
    model, idx = lively(GPTConfig(**SHAPE)), torch.randint(23, (1, 6))
    model(idx, pos=torch.arange(6))  # with autograd on
    assert not model.transformer.h[0].attn.heads[0].key_cache.requires_grad
    handle = model.transformer.h[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(idx[:, :1], pos=torch.tensor([6]))
    handle.remove()
    assert all(m.key_cache is None for m in model.modules() if isinstance(m, kit.Head))


def test_a_cache_follows_the_dtype_of_a_new_prefill_and_refuses_it_within_a_sequence():
    model, idx = lively(GPTConfig(**SHAPE)), torch.randint(23, (1, 6))
    head = model.transformer.h[0].attn.heads[0]
    model(idx, pos=torch.arange(6))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"holds torch\.float32"):
            model(idx[:, :1], pos=torch.tensor([6]))
        model(idx, pos=torch.arange(6))
        assert head.key_cache.dtype == torch.bfloat16
    model(idx, pos=torch.arange(6))
    assert head.key_cache.dtype == torch.float32


def test_a_cached_call_has_no_gradient_rather_than_a_wrong_one():
    model, idx = lively(GPTConfig(**SHAPE)), torch.randint(23, (1, 6))
    assert not model(idx, idx, pos=torch.arange(6))[1].requires_grad
    assert model(idx, idx)[1].requires_grad


def test_rotary_tables_stay_exact_through_other_dtypes_and_the_meta_device():
    config = GPTConfig(**SHAPE, pos_emb="rope")
    model, idx = lively(config), torch.randint(23, (1, 16))
    state = copy.deepcopy(model.state_dict())
    expected = model(idx)[0]
    with torch.device("meta"):
        empty = GPT(config)
    for other in (model.bfloat16().float(), empty.to_empty(device="cpu").eval()):
        other.load_state_dict(state)
        assert torch.equal(other(idx)[0], expected)


def test_inference_mode_and_no_grad_share_a_cache():
    model, idx = lively(GPTConfig(**SHAPE)), torch.randint(23, (1, 6))
    expected = model(idx)[0][:, -1:]
    with torch.inference_mode():
        model(idx[:, :4], pos=torch.arange(4))
    with torch.no_grad():
        model(idx[:, 4:5], pos=torch.tensor([4]))
    torch.testing.assert_close(model(idx[:, 5:], pos=torch.tensor([5]))[0], expected)


@pytest.mark.parametrize(
    "pos, message",
    [
        (torch.tensor([7]), "starts at 7, but the cache holds 6"),
        (torch.tensor([16]), "outside 0..15"),
        (torch.tensor([-1]), "outside"),
        (torch.tensor([5, 6]), "expected int64"),
        (torch.tensor([5.0]), "expected int64"),
        (torch.tensor([[5], [5], [5]]), "expected int64"),
        (torch.tensor([[6], [7]]), "holds 6 positions of row 1"),
    ],
)
def test_an_impossible_pos_is_refused(pos, message):
    model = lively(GPTConfig(**SHAPE))
    model(torch.zeros(2, 6, dtype=torch.int64), pos=torch.arange(6))
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(2, 1, dtype=torch.int64), pos=pos)
    assert model(torch.zeros(2, 1, dtype=torch.int64), pos=torch.tensor([6]))[0].shape == (2, 1, 23)


def test_a_prefill_without_pos_leaves_nothing_to_decode_from():
    """The order of calls of one write-up: prefill by a plain forward, decode with pos. It must not pass unnoticed."""
    model = lively(GPTConfig(**SHAPE))
    model(torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="prefill first"):
        model(torch.zeros(1, 1, dtype=torch.int64), pos=torch.tensor([6]))


def test_pos_must_rise_by_one_and_no_row_may_skip():
    model = lively(GPTConfig(**SHAPE))
    with pytest.raises(ValueError, match="rise by one"):
        model(torch.zeros(1, 3, dtype=torch.int64), pos=torch.tensor([0, 2, 3]))
    with pytest.raises(ValueError, match="rise by one"):
        model(torch.zeros(2, 2, dtype=torch.int64), pos=torch.tensor([[0, 1], [0, 2]]))
    with pytest.raises(ValueError, match="of row 1"):
        model(torch.zeros(2, 2, dtype=torch.int64), pos=torch.tensor([[0, 1], [1, 2]]))


def test_a_forward_past_block_size_is_refused():
    with pytest.raises(ValueError, match="17 positions"):
        lively(GPTConfig(**SHAPE))(torch.zeros(1, 17, dtype=torch.int64))


def test_in_train_mode_pos_places_tokens_but_nothing_is_cached():
    model, idx = lively(GPTConfig(**SHAPE)), torch.randint(23, (2, 7))
    expected = model(idx)[0]
    model.train()
    torch.testing.assert_close(model(idx, pos=torch.arange(7))[0], expected)
    assert model.transformer.h[0].attn.heads[0].key_cache is None
