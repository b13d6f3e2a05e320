"""The network against plain mathematics, its configuration, and the cache as an object."""

import copy
import math
import pickle

import pytest
import torch

from helpers import KINDS, heads_of, random_model
from model import GPT, GPTConfig, clear_kv_cache
from oracles import per_head_logits, turned

SHAPE = dict(block_size=16, vocab_size=23, n_layer=2, n_head=4, n_embd=32)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "extra", [{}, dict(bias=False, activation="gelu_tanh", tie_weights=False, mlp_ratio=2)], ids=str
)
def test_logits_are_those_of_a_plain_loop_over_heads(kind, extra):
    model = random_model(GPTConfig(**SHAPE, **(extra | kind)))
    idx = torch.randint(23, (3, 11))
    logits, loss = model(idx[:, :-1], targets=idx[:, 1:])
    expected = torch.stack([per_head_logits(model.state_dict(), vars(model.config), row[:-1].tolist()) for row in idx])
    assert logits.shape == (3, 10, 23)
    torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)
    picked = expected.log_softmax(-1).gather(-1, idx[:, 1:, None])
    assert loss.item() == pytest.approx(-picked.mean().item(), rel=1e-4)


def test_targets_of_minus_one_do_not_count():
    model, idx = random_model(GPTConfig(**SHAPE)), torch.randint(23, (2, 8))
    targets = idx.roll(-1, 1)
    targets[:, 4:] = -1
    assert model(idx, targets)[1].item() == pytest.approx(model(idx[:, :4], targets[:, :4])[1].item(), rel=1e-5)


def test_positions_without_a_cache_are_those_that_the_caller_says():
    model, idx = random_model(GPTConfig(**SHAPE)), torch.randint(23, (2, 8))
    moved = copy.deepcopy(model)
    moved.transformer.wpe.weight.data = model.transformer.wpe.weight.data.roll(-3, 0)
    torch.testing.assert_close(model.hidden_states(idx, torch.arange(3, 11)), moved.hidden_states(idx))


# -- configuration -----------------------------------------------------------------------------------------------------


IMPOSSIBLE = [("block_size", 0), ("vocab_size", -1), ("n_layer", 0), ("n_head", 5), ("n_embd", 30), ("dropout", 1.0)]
IMPOSSIBLE += [("dropout", math.nan), ("n_kv_head", 3), ("n_kv_head", -1), ("mlp_ratio", 0), ("mlp_ratio", math.inf)]
IMPOSSIBLE += [("activation", "relu"), ("pos_emb", "alibi")]


@pytest.mark.parametrize("field, value", [*IMPOSSIBLE, ("n_embd", 12)])  # rotation needs pairs
def test_impossible_values_name_field_and_value(field, value):
    with pytest.raises(ValueError) as error:
        GPTConfig(**{**SHAPE, "pos_emb": "rope", field: value})
    assert field in str(error.value) and str(value) in str(error.value)


# -- the cache as an object --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_heads_hold_the_keys_and_values_of_every_position_so_far(kind):
    """key_cache and value_cache against plain projections, for each Head, growing by one slot per token."""
    model, idx = random_model(GPTConfig(**SHAPE, **kind)), torch.randint(23, (2, 9))
    n_kv_head = kind.get("n_kv_head") or 4
    assert model.kv_cache is None
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        model(idx[:, begin:end], pos=torch.arange(begin, end))
        assert len(heads_of(model)) == 2 * n_kv_head
        assert all(head.key_cache.shape == head.value_cache.shape == (2, end, 8) for head in heads_of(model))
    attn = model.transformer.h[0].attn
    x = model.transformer.wte(idx) + (model.transformer.wpe.weight[:9] if kind["pos_emb"] == "learned" else 0)
    x = model.transformer.h[0].ln_1(x) if kind.get("norm_first", True) else x
    k, v = attn.c_attn(x)[..., 32:].split(n_kv_head * 8, dim=-1)
    for i in range(n_kv_head):
        key = k[..., i * 8 : i * 8 + 8]
        key = attn.k_norm(key) if kind.get("qk_norm") else key
        if kind["pos_emb"] == "rope":
            key = torch.stack([turned(row.detach().double()) for row in key]).float()
        head = model.kv_cache.heads[0][i]
        torch.testing.assert_close(head.key_cache, key, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(head.value_cache, v[..., i * 8 : i * 8 + 8])
    clear_kv_cache(model)
    assert model.kv_cache is None


@pytest.mark.parametrize("kind", ["key_cache", "value_cache"])
def test_attention_reads_what_the_heads_show(kind):
    """A Head is no copy: what you write there changes the next logits, for every layer and head."""
    model, idx = random_model(GPTConfig(**SHAPE)), torch.randint(23, (1, 6))
    for layer in range(2):
        for i in range(4):
            cache = model.new_cache(1)
            model(idx[:, :5], cache=cache)
            expected = model(idx)[0][:, 5]
            getattr(cache.heads[layer][i], kind).zero_()
            logits = model(idx[:, 5:], cache=cache)[0][:, 0]
            assert (logits - expected).abs().max() > 1e-3


def test_the_cache_is_no_parameter_and_no_buffer():
    model = random_model(GPTConfig(**SHAPE, pos_emb="rope"))
    before = set(model.state_dict())
    model(torch.zeros(1, 5, dtype=torch.int64), pos=torch.arange(5))
    assert set(model.state_dict()) == before == {n for n, _ in model.named_parameters()} | {"lm_head.weight"}
    assert not list(model.named_buffers())


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_with_a_cache_of_its_own(copier):
    """Heads of a copy must see the copy's buffers, not the original's."""
    model, idx = random_model(GPTConfig(**SHAPE)), torch.randint(23, (1, 8))
    model(idx[:, :5], pos=torch.arange(5))
    twin = copier(model)
    expected = model(idx[:, 5:], pos=torch.arange(5, 8))[0]
    clear_kv_cache(model)
    assert torch.equal(twin(idx[:, 5:], pos=torch.arange(5, 8), cache=twin.kv_cache)[0], expected)
    assert twin.kv_cache.heads[1][0].key_cache.shape == (1, 8, 8)


def step_of_an_optimizer(model):
    model(torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int64))[1].backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


@torch.no_grad()
def edit_of_a_weight(model):
    model.transformer.h[1].mlp.c_proj.weight[0, 0] += 1


@torch.no_grad()
def swap_of_two_weights(model):
    """Their sum stays."""
    weight = model.transformer.h[0].attn.c_attn.weight
    weight[:2] = weight[:2].flip(0)


@torch.no_grad()
def shift_that_adds_nothing(model):
    """Up here and down there, through .data, which keeps the version of a weight."""
    bias = model.transformer.h[0].attn.c_attn.bias.data
    bias[0] += 1
    bias[1] -= 1


CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict(random_model(model.config, seed=1).state_dict()),
    "assign": lambda model: model.load_state_dict(random_model(model.config, seed=1).state_dict(), assign=True),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "device": lambda model: model.to("meta"),
    "there and back": lambda model: model.bfloat16().float(),
    "data": lambda model: model.transformer.h[0].attn.c_attn.weight.data.mul_(1.01),
    "optimizer": step_of_an_optimizer,
    "edit": edit_of_a_weight,
    "swap": swap_of_two_weights,
    "shift": shift_that_adds_nothing,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_never_meet_old_keys(name):
    """A call with pos and without a cache is refused until a call from 0 has filled the cache again."""
    model, idx = random_model(GPTConfig(**SHAPE)), torch.randint(23, (1, 7))
    model(idx[:, :5], pos=torch.arange(5))
    model(idx[:, 5:6], pos=torch.tensor([5]))
    CHANGES[name](model)
    with pytest.raises(ValueError, match="or the weights have changed since: start at position 0"):
        model(idx[:, 6:], pos=torch.tensor([6]))
    if name == "device":  # meta has no numbers
        return
    model(idx[:, :6], pos=torch.arange(6))
    torch.testing.assert_close(model(idx[:, 6:], pos=torch.tensor([6]))[0][:, 0], model(idx)[0][:, 6])


def test_an_evaluation_in_between_changes_nothing():
    model, idx = random_model(GPTConfig(**SHAPE)), torch.randint(23, (1, 7))
    model(idx[:, :6], pos=torch.arange(6))
    model(idx, idx)
    torch.testing.assert_close(model(idx[:, 6:], pos=torch.tensor([6]))[0][:, 0], model(idx)[0][:, 6])


@pytest.mark.parametrize(
    "between", [clear_kv_cache, lambda model: model.generate(torch.zeros(1, 3, dtype=torch.int64), 4, seed=1)]
)
def test_calls_with_pos_continue_only_a_cache_that_such_a_call_began(between):
    """A generation in between, even one that leaves a cache of the same length, is refused and not wrong."""
    model, idx = random_model(GPTConfig(**SHAPE)), torch.randint(23, (1, 7))
    model(idx[:, :6], pos=torch.arange(6))
    between(torch.nn.Sequential(model) if between is clear_kv_cache else model)
    with pytest.raises(ValueError, match="start at position 0"):
        model(idx[:, 6:], pos=torch.tensor([6]))


def test_a_cached_call_keeps_no_graph():
    model, idx = random_model(GPTConfig(**SHAPE)), torch.randint(23, (1, 6))
    assert not model(idx, idx, pos=torch.arange(6))[1].requires_grad and model(idx, idx)[1].requires_grad
    model(idx, pos=torch.arange(6))  # with autograd on
    assert not heads_of(model)[0].key_cache.requires_grad


def test_rotary_tables_stay_exact_through_other_dtypes_and_the_meta_device():
    config = GPTConfig(**SHAPE, pos_emb="rope")
    model, idx = random_model(config), torch.randint(23, (1, 16))
    state = copy.deepcopy(model.state_dict())
    expected = model(idx)[0]
    with torch.device("meta"):
        empty = GPT(config)
    for other in (model.bfloat16().float(), empty.to_empty(device="cpu").eval()):
        other.load_state_dict(state)
        assert torch.equal(other(idx)[0], expected)


def test_a_generation_goes_on_with_the_cache_of_the_last_one(monkeypatch):
    model = random_model(GPTConfig(**SHAPE))
    cache = model.new_cache(2)
    said = model.generate(torch.tensor([[1, 2, 3], [4, 5, 6]]), 4, seed=5, cache=cache)
    assert cache.length == 6
    asked = torch.cat((said, torch.tensor([[7, 8], [9, 10]])), dim=1)
    fed = []
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, idx, **rest: fed.append(idx.size(1)) or forward(self, idx, **rest))
    answer = model.generate(asked, 4, seed=5, cache=cache)
    assert fed == [3, 1, 1, 1]
    assert torch.equal(answer, model.generate(asked, 4, seed=5, kv_cache=False))


def test_pos_must_rise_by_one_and_stay_within_the_context():
    model = random_model(GPTConfig(**SHAPE))
    idx = torch.zeros(2, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="the cache holds 0 positions"):
        model(idx[:, :3], pos=torch.tensor([0, 2, 3]))
    model(idx[:, :6], pos=torch.arange(6))
    for pos in (*map(torch.tensor, ([7], [5], [-1], [5, 6], [[6], [6]])), torch.tensor([], dtype=torch.int64), 10):
        with pytest.raises(ValueError, match="but the cache holds 6 positions: pass the positions that follow"):
            model(idx[:, :1], pos=pos)
    model(idx[:, :9], pos=torch.arange(6, 15))
    with pytest.raises(ValueError, match="17 positions do not fit into a cache of 16 slots"):
        model(idx[:, :2], pos=torch.tensor([15, 16]))
    with pytest.raises(ValueError, match="17 positions"):
        model(idx)


def test_in_train_mode_there_is_no_cache():
    model = random_model(GPTConfig(**SHAPE)).train()
    for call in (
        lambda: model(torch.zeros(1, 3, dtype=torch.int64), pos=torch.arange(3)),
        lambda: model(torch.zeros(1, 3, dtype=torch.int64), cache=model.new_cache(1)),
        lambda: model.generate(torch.zeros(1, 3, dtype=torch.int64), 3),
        lambda: model.generate(torch.zeros(1, 3, dtype=torch.int64), 3, kv_cache=False),
    ):
        with pytest.raises(RuntimeError, match=r"train mode.*model\.eval\(\)"):
            call()
    assert model.kv_cache.length == 0
