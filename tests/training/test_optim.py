"""train.py's optimizers: the learning rate, the groups of parameters, and Muon."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import CPU, SMALL, here, load, ok, same
from model import GPT, GPTConfig
from train import POLYNOMIALS, configure_optimizers, lr_multiplier, make_config, orthogonalize

# -- the learning rate -------------------------------------------------------------------------------------------------


def learning_rates(steps, **settings):
    config = make_config(settings)
    return [config.learning_rate * lr_multiplier(step, config) for step in steps]


@given(
    peak=st.floats(1e-5, 1),
    share=st.floats(0, 1),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
)
def test_the_learning_rate_warms_up_falls_as_a_cosine_and_stays_at_min_lr(peak, share, warmup, length):
    end, floor = warmup + length, peak * share
    schedule = dict(warmup_iters=warmup, lr_decay_iters=end, min_lr=floor, max_iters=10, lr_decay="cosine")
    lr = learning_rates(range(end + 50), learning_rate=peak, lr_stable_frac=0.0, **schedule)
    assert lr[:warmup] == pytest.approx([peak * (i + 1) / (warmup + 1) for i in range(warmup)])
    assert lr[warmup] == pytest.approx(peak)
    cosine = [floor + (peak - floor) * math.cos(math.pi / 2 * i / length) ** 2 for i in range(length)]
    assert lr[warmup:end] == pytest.approx(cosine, abs=1e-12)
    assert lr[end:] == pytest.approx([floor] * 50)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_level_learning_rate_falls_after_its_share_of_the_steps(decay):
    schedule = dict(warmup_iters=10, lr_decay_iters=0, min_lr=0.0, max_iters=110, lr_decay=decay)
    lr = learning_rates(range(120), learning_rate=2.0, lr_stable_frac=0.4, **schedule)
    assert lr[10:51] == pytest.approx([2.0] * 41)
    assert lr[80] == pytest.approx(1.0)
    assert lr[110:] == pytest.approx([0.0] * 10)
    falls = [a - b for a, b in itertools.pairwise(lr[50:111])]
    assert all(fall > 0 for fall in falls)
    assert (max(falls) - min(falls) < 1e-9) == (decay == "linear")


@pytest.mark.parametrize("never", [dict(lr_decay="none"), dict(lr_stable_frac=1.0)])
def test_a_learning_rate_that_never_falls(never):
    """With a share of 1, nothing is left to fall in, so the formula would divide by zero."""
    lr = learning_rates(range(120), learning_rate=2.0, warmup_iters=3, max_iters=100, **never)
    assert lr == pytest.approx([0.5, 1.0, 1.5] + [2.0] * 117)


# -- the optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{}, {"bias": True}, {"tie_weights": False}, {"pos_emb": "rope"}, {"norm_first": False, "bias": True}]
)
def test_every_parameter_is_in_one_group_and_biases_and_norms_do_not_decay(change):
    model = GPT(GPTConfig(**(dict(block_size=8, vocab_size=7, n_layer=2, n_head=2, n_embd=8, bias=False) | change)))
    config = make_config(dict(optimizer="adamw", weight_decay=0.3, learning_rate=1e-3, beta1=0.8, beta2=0.95))
    (optimizer,) = configure_optimizers(model.parameters(), model, config, CPU)
    groups = optimizer.param_groups
    where = [(id(p), group["weight_decay"]) for group in groups for p in group["params"]]
    assert sorted(i for i, _ in where) == sorted({id(p) for p in model.parameters()})
    assert all(group["betas"] == (0.8, 0.95) for group in groups)
    expected = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            decays = name == "weight" and isinstance(module, (torch.nn.Linear, torch.nn.Embedding))
            expected[id(p)] = 0.3 if decays else 0.0
    assert dict(where) == expected


@given(
    rows=st.integers(1, 24),
    cols=st.integers(1, 24),
    n=st.integers(1, 3),
    size=st.floats(1e-6, 1e6),
    seed=st.integers(0, 99),
)
def test_an_orthogonalized_matrix_keeps_its_directions_and_loses_its_lengths(rows, cols, n, size, seed):
    """Compared with the singular value decomposition in float64: U S V^T becomes U p(S) V^T.

    Large singular values end near 1.
    """
    x = torch.randn(n, rows, cols, generator=torch.Generator().manual_seed(seed)) * size
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    moved = s / (1.01 * s.norm(dim=-1, keepdim=True))
    large = moved > 0.1
    for a, b, c in POLYNOMIALS:
        moved = a * moved + b * moved**3 + c * moved**5
    core = u.mT @ orthogonalize(x).double() @ vt.mT
    torch.testing.assert_close(core, torch.diag_embed(moved), atol=2e-3, rtol=0)
    assert 0.1 < moved[large].min() <= moved.max() < 1.9


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_muon_is_momentum_made_orthogonal_for_q_k_and_v_apart(kv_heads):
    """Three steps of both optimizers. Muon's step is written out here, one matrix after the other."""
    torch.manual_seed(0)
    sizes = dict(block_size=8, vocab_size=7, n_layer=2, n_head=2, n_embd=8, n_kv_head=kv_heads)
    model = GPT(GPTConfig(**sizes, qk_norm=True, activation="swiglu" if kv_heads else "gelu"))
    settings = dict(weight_decay=0.1, learning_rate=1e-2, beta1=0.9, beta2=0.95, muon_learning_rate=0.03)
    config = make_config(dict(optimizer="muon", **settings))
    optimizers = configure_optimizers(model.parameters(), model, config, CPU)
    matrices = {name: p for name, p in model.transformer.h.named_parameters() if p.dim() == 2}
    muons = {id(p) for group in optimizers[1].param_groups for p in group["params"]}
    assert muons == set(map(id, matrices.values()))
    kv = (kv_heads or 2) * 4
    expected = {name: p.detach().clone() for name, p in matrices.items()}
    momenta = {name: torch.zeros_like(p) for name, p in matrices.items()}
    for step in range(3):
        idx = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        for name, p in matrices.items():
            momenta[name] = 0.9 * momenta[name] + 0.1 * p.grad
            ahead = 0.1 * p.grad + 0.9 * momenta[name]
            sizes = [8, kv, kv] if "c_attn" in name else [len(p) // 2] * 2 if kv_heads and "c_fc" in name else [len(p)]
            new = []
            for part, update in zip(expected[name].split(sizes), ahead.split(sizes)):
                rows, cols = part.shape
                new.append(part - 0.03 * max(1, rows / cols) ** 0.5 * orthogonalize(update[None])[0])
            expected[name] = torch.cat(new)
        for optimizer in optimizers:
            optimizer.step()
        for name, p in matrices.items():
            torch.testing.assert_close(p.detach(), expected[name], atol=1e-4, rtol=1e-3)


def test_muon_leaves_frozen_matrices_alone_and_takes_an_mlp_of_your_own():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=7, n_layer=2, n_head=2, n_embd=8))
    first, second = model.transformer.h
    first.requires_grad_(False)
    second.mlp = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
    before = {name: p.detach().clone() for name, p in model.transformer.h.named_parameters() if p.dim() == 2}
    optimizers = configure_optimizers(model.parameters(), model, make_config(dict(optimizer="muon")), CPU)
    idx = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(0))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    for optimizer in optimizers:
        optimizer.step()
    changed = {
        name for name, p in model.transformer.h.named_parameters() if name in before and not same(p, before[name])
    }
    assert changed == {name for name in before if name.startswith("1.")} and "1.mlp.2.weight" in changed


def test_a_learning_rate_of_0_stops_muon_too(data_dir, tmp_path):
    """Muon has its own peak, so without care `--learning_rate 0` would change weights with the modern recipe."""
    flags = [*SMALL, "--recipe", "modern", "--learning_rate", 0, "--data_dir", data_dir]
    for steps in (1, 5):
        ok(here(*flags, "--max_iters", steps, "--out_dir", tmp_path / str(steps)))
    assert same(*(load(tmp_path / str(steps) / "last.pt")["model"] for steps in (1, 5)))
