"""The promise: whatever the way of decoding, the same tokens for the same seed, unless rounding turns a near-tie."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import textbook_logits
from test_model import KINDS, lively

import model as kit
from model import GPTConfig, clear_kv_cache, gumbel_noise, sample_token
from sample import context_begin, near_tie

torch.set_num_threads(1)

V, CONTEXT = 23, 16
FILTERS = [
    dict(temperature=0),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=5),
    dict(temperature=1.3, top_p=0.8),
    dict(temperature=1.0, top_k=7, top_p=0.6),
]
MODELS = {
    i: lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32, **kind), seed=i)
    for i, kind in enumerate(KINDS)
}
a_model = st.sampled_from(sorted(MODELS)).map(MODELS.get)
a_filter = st.sampled_from(FILTERS)
a_seed = st.integers(0, 2**64 - 1)


def prompts(batch, length, seed=0):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def tokens_differ(model, ours, theirs, T, samples, seed, filters):
    """Where two generations differ by more than a near-tie: the first (row, step), or None."""
    filters = dict(temperature=1.0, top_k=None, top_p=None) | filters
    for row, (a, b) in enumerate(zip(ours.tolist(), theirs.tolist(), strict=True)):
        assert len(a) == len(b)
        step = next((i for i in range(len(a) - T) if a[T + i] != b[T + i]), None)
        if step is None:
            continue
        context = a[context_begin(model.config.block_size, T, T + step) : T + step]
        if not near_tie(model, context, samples[row], step, (a[T + step], b[T + step]), seed, **filters):
            return row, step
    return None


def test_a_difference_is_told_from_a_near_tie():
    model = MODELS[sorted(MODELS)[0]]
    ours = model.generate(prompts(1, 3), CONTEXT, seed=1)
    theirs = ours.clone()
    theirs[0, 5] = (theirs[0, 5] + 1) % V
    assert tokens_differ(model, ours, ours, 3, [0], 1, {}) is None
    assert tokens_differ(model, ours, theirs, 3, [0], 1, {}) == (0, 2)


def textbook_generate(model, row, steps, sample, seed, temperature=1.0, top_k=None, top_p=None):
    """One row's tokens from the textbook's logits and an own reading of the sampling rule: argmax(probs / Exp(1)).

    It knows of no cache; beyond the context it goes on from the newest half, whenever the context has run over.
    """
    tokens, context = list(row), list(row)
    for step in range(steps):
        context += tokens[len(row) + step - 1 :] if step else []
        if len(context) > CONTEXT:
            context = context[-(CONTEXT // 2) :]
        logits = textbook_logits(model.state_dict(), vars(model.config), context)[-1]
        ranking = sorted(range(V), key=lambda i: (-logits[i].item(), i))
        if temperature == 0:
            tokens.append(ranking[0])
            continue
        ranking = ranking[:top_k]
        probs = torch.softmax(logits[ranking] / temperature, dim=0)
        if top_p is not None:
            mass, kept = 0.0, 0
            while mass < top_p and kept < len(ranking):
                mass, kept = mass + probs[kept].item(), kept + 1
            ranking, probs = ranking[:kept], probs[:kept]
        noise = torch.exp(-gumbel_noise(seed, torch.tensor([sample]), torch.tensor([step]), V)[0, 0].double())
        tokens.append(ranking[(probs / noise[ranking]).argmax().item()])
    return tokens


@settings(max_examples=60)
@given(a_model, st.integers(1, CONTEXT), st.sampled_from([1, 3]), a_filter, a_seed)
def test_cached_uncached_and_textbook_pick_the_same_tokens(model, length, batch, filters, seed):
    idx = prompts(batch, length, seed % 1000)
    cached = model.generate(idx, CONTEXT, seed=seed, **filters)
    uncached = model.generate(idx, CONTEXT, seed=seed, kv_cache=False, **filters)
    textbook = [
        textbook_generate(model, row, CONTEXT - length, i, seed, **filters) for i, row in enumerate(idx.tolist())
    ]
    assert cached.shape == (batch, CONTEXT)
    assert tokens_differ(model, cached, uncached, length, range(batch), seed, filters) is None
    assert tokens_differ(model, cached, torch.tensor(textbook), length, range(batch), seed, filters) is None


@given(a_model, st.integers(1, 3 * CONTEXT), st.integers(1, 3 * CONTEXT), a_filter, a_seed)
def test_past_the_context_the_newest_half_goes_on_with_and_without_the_cache(model, length, steps, filters, seed):
    idx, sampling = prompts(2, length, seed % 1000), dict(seed=seed, overflow="slide", **filters)
    cached = model.generate(idx, steps, **sampling)
    uncached = model.generate(idx, steps, kv_cache=False, **sampling)
    textbook = [textbook_generate(model, row, steps, i, seed, **filters) for i, row in enumerate(idx.tolist())]
    assert cached.shape == (2, length + steps)
    for other in (uncached, torch.tensor(textbook)):
        assert tokens_differ(model, cached, other, length, range(2), seed, filters) is None


def test_a_text_of_any_length_costs_one_prefill_every_half_context():
    model, widths = MODELS[0], []
    handle = model.transformer.h[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    model.generate(prompts(1, 5), 1000, overflow="slide")
    handle.remove()
    again = CONTEXT // 2  # the first time 5..16 are in the context, then 8 are kept each time it has run over
    assert widths[:13] == [5] + [1] * 11 + [again] and sum(width > 1 for width in widths) == 1 + -(-(1000 - 12) // 9)
    assert set(widths) == {1, 5, again}


@given(a_model, st.lists(st.integers(1, 6), min_size=1, max_size=CONTEXT), st.sampled_from([1, 3]), st.booleans())
def test_any_split_into_chunks_gives_the_logits_of_the_whole(model, sizes, batch, per_row):
    ends = [end for end in itertools.accumulate(sizes) if end <= CONTEXT] or [CONTEXT]
    idx = prompts(batch, ends[-1])
    expected, _ = model(idx)
    clear_kv_cache(model)
    parts = []
    for begin, end in zip([0, *ends], ends):
        pos = torch.arange(begin, end)
        parts.append(model(idx[:, begin:end], pos=pos.repeat(batch, 1) if per_row else pos)[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-5, rtol=1e-5)
    clear_kv_cache(model)


@given(a_model, st.lists(st.integers(1, CONTEXT - 5), min_size=2, max_size=4), st.data())
def test_rows_of_different_lengths_in_one_batch_see_only_their_own_tokens(model, lengths, data):
    """Padding on the right fills slots beyond a row's end; `slot <= pos` must hide them until they are overwritten."""
    batch, steps = len(lengths), 4
    idx = prompts(batch, CONTEXT, data.draw(st.integers(0, 99)))
    rows = torch.arange(batch)
    expected = [model(idx[i : i + 1, : n + steps])[0][0] for i, n in enumerate(lengths)]
    clear_kv_cache(model)
    padded = idx[:, : max(lengths)].clone()
    for i, n in enumerate(lengths):
        padded[i, n:] = 7
    logits, _ = model(padded, pos=torch.arange(max(lengths)).repeat(batch, 1))
    for i, n in enumerate(lengths):
        torch.testing.assert_close(logits[i, :n], expected[i][:n], atol=2e-5, rtol=1e-5)
    for step in range(steps):
        at = torch.tensor(lengths) + step
        logits, _ = model(idx[rows, at][:, None], pos=at[:, None])
        for i in range(batch):
            torch.testing.assert_close(logits[i, 0], expected[i][at[i]], atol=2e-5, rtol=1e-5)
    clear_kv_cache(model)


@given(a_model, st.integers(2, 8), st.integers(1, 5), st.integers(1, 5))
def test_going_back_forgets_what_came_after(model, length, back, redo):
    """A rejected guess is overwritten; what lay beyond it must be neither visible nor taken for cached."""
    back = min(back, length)
    idx, other = prompts(1, length), prompts(1, 8, seed=5)
    model(idx, pos=torch.arange(length))
    start = length - back
    logits, _ = model(other[:, :redo], pos=torch.arange(start, start + redo))
    expected, _ = model(torch.cat((idx[:, :start], other[:, :redo]), dim=1))
    torch.testing.assert_close(logits, expected[:, start:], atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="prefill first"):
        model(other[:, :1], pos=torch.tensor([start + redo + 1]))
    clear_kv_cache(model)


@settings(max_examples=80)
@given(a_model, st.integers(1, 10), st.sampled_from([1, 3]), a_filter, a_seed, st.data())
def test_whatever_happens_between_two_steps_changes_no_token(model, length, batch, filters, seed, data):
    """An evaluation, eval-train-eval, a cleared cache, a foreign cached call, another generation, live or abandoned."""
    idx = prompts(batch, length)
    expected = model.generate(idx, CONTEXT, seed=seed, kv_cache=False, **filters)
    others = [model.stream(prompts(2, 3, s), CONTEXT, seed=s) for s in range(2)]

    def evaluate():
        model(prompts(4, 9), targets=prompts(4, 9))

    def eval_train_eval():
        model.train()
        model.eval()
        evaluate()

    disturbances = [
        lambda: None,
        evaluate,
        eval_train_eval,
        lambda: clear_kv_cache(model),
        lambda: model(prompts(batch, 5, 9), pos=torch.arange(5)),
        lambda: model.generate(prompts(1, 4), 3, seed=1),
        lambda: next(others[0], None),
        lambda: next(others[1], None),
        lambda: others[1].close(),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: clear_kv_cache(model.transformer.h[1]),
        lambda: clear_kv_cache(model.transformer.h[0].attn.heads),
        lambda: model.transformer.h[1].load_state_dict(model.transformer.h[1].state_dict()),
        lambda: (model.transformer.h[1].train(), model.eval()),
        lambda: new[-1].zero_(),
    ]
    new, got = [], []
    for tokens in model.stream(idx, CONTEXT, seed=seed, **filters):
        new.append(tokens)
        got.append(tokens.clone())
        data.draw(st.sampled_from(disturbances))()
    got = torch.cat((idx, torch.stack(got, dim=1)), dim=1)
    assert tokens_differ(model, got, expected, length, range(batch), seed, filters) is None
    for other in others:
        other.close()
    clear_kv_cache(model)


@given(a_model, st.integers(1, 12), st.integers(0, 2**40), a_filter, a_seed)
def test_row_k_of_a_batch_is_sample_k_alone_and_prompts_keep_their_own_tokens(model, length, sample, filters, seed):
    idx = prompts(1, length).repeat(3, 1)
    together = model.generate(idx, 6, seed=seed, samples=[0, 1, sample], **filters)
    for row, k in enumerate((0, 1, sample)):
        alone = model.generate(idx[:1], 6, seed=seed, samples=[k], **filters)
        assert tokens_differ(model, together[row : row + 1], alone, length, [k], seed, filters) is None
    different = torch.cat((prompts(1, length, 1), prompts(1, length, 2)))
    both = model.generate(different, 6, seed=seed, samples=[0, 0], **filters)
    for row in range(2):
        alone = model.generate(different[row : row + 1], 6, seed=seed, **filters)
        assert tokens_differ(model, both[row : row + 1], alone, length, [0], seed, filters) is None


def test_rows_of_a_batch_are_different_samples():
    """One sampled token broadcast to every row is a known mistake."""
    out = MODELS[0].generate(prompts(1, 3).repeat(8, 1), 10, seed=2)
    assert len({tuple(row) for row in out.tolist()}) == 8


def test_two_prompts_one_after_the_other_and_a_change_of_batch_size():
    model = MODELS[1]
    for batch, length in ((1, 5), (1, 3), (3, 4), (2, 9), (1, 1)):
        idx = prompts(batch, length, length)
        cached, uncached = (model.generate(idx, 8, seed=4, kv_cache=c) for c in (True, False))
        assert torch.equal(cached, uncached)


def heads_of(model):
    return [m for m in model.modules() if isinstance(m, kit.Head)]


def test_the_prefill_runs_once_and_then_one_token_a_step():
    """A prefill whose logits are thrown away feeds the last prompt token twice; a lost cache prefills again."""
    model, widths = MODELS[0], []
    handle = model.transformer.h[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    model.generate(prompts(2, 5), 6)
    assert widths == [5, 1, 1, 1, 1, 1]
    widths.clear()
    model.train()
    model.generate(prompts(2, 5), 6)
    assert widths == [5, 1, 1, 1, 1, 1] and model.training
    widths.clear()
    model.eval().generate(prompts(1, 5), 3, kv_cache=False)
    assert widths == [5, 6, 7]
    handle.remove()


def test_mode_and_empty_cache_are_restored_also_after_an_exception():
    model = lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32))
    for training in (True, False):
        model.train(training)
        model.generate(prompts(1, 3), 4)
        assert model.training is training and all(m.training is training for m in model.modules())
        assert all(head.key_cache is None for head in heads_of(model))

        calls = []

        def interrupt(*_, calls=calls):
            calls.append(1)
            if len(calls) == 5:
                raise KeyboardInterrupt

        handle = model.lm_head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompts(1, 3), 9)
        handle.remove()
        assert model.training is training
        assert all(head.key_cache is None for head in heads_of(model))


def test_modules_in_a_mode_of_their_own_keep_it_and_the_caches_work_the_same():
    """A frozen block must not be left in train mode, nor a block that trains skip the cache."""
    model = lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32))
    for root, block in ((True, False), (False, True)):
        model.train(root)
        model.transformer.h[0].train(block)
        modes = [m.training for m in model.modules()]
        cached, uncached = (model.generate(prompts(2, 5), 9, seed=3, kv_cache=c) for c in (True, False))
        assert torch.equal(cached, uncached)
        assert [m.training for m in model.modules()] == modes


def test_under_autocast_the_cache_has_one_dtype():
    for kind in (dict(), dict(pos_emb="rope")):
        model = lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32, **kind))
        with torch.autocast("cpu", torch.bfloat16):
            assert model.generate(prompts(2, 5), CONTEXT, seed=1).shape == (2, CONTEXT)


def test_an_abandoned_stream_leaves_no_cache_and_no_mode_behind():
    model = lively(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32)).train()
    stream = model.stream(prompts(1, 3), 9)
    next(stream)
    assert model.training
    stream.close()
    assert model.training and all(head.key_cache is None for head in heads_of(model))
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


@pytest.mark.parametrize("n", [0, -1, -100])
def test_no_new_tokens_returns_idx_unchanged(n):
    idx = prompts(2, 5)
    assert torch.equal(MODELS[0].generate(idx, n), idx)


def test_generation_stops_at_block_size_and_refuses_a_longer_prompt():
    model = MODELS[0]
    assert model.generate(prompts(1, 5), 1000).shape == (1, CONTEXT)
    full = prompts(1, CONTEXT)
    assert torch.equal(model.generate(full, 5), full)
    with pytest.raises(ValueError, match="overflow"):
        model.generate(full, 5, overflow="wrap")
    for length in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"a prompt of {length} tokens"):
            model.generate(prompts(1, length), 5)


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(temperature=float("inf")),
        dict(top_k=0),
        dict(top_k=1.5),
        dict(top_p=0.0),
        dict(top_p=1.01),
        dict(top_p=float("nan")),
        dict(seed=-1),
        dict(seed=2**64),
        dict(seed=1.5),
        dict(samples=[1, 2]),
        dict(temperature=1e38),
        dict(overflow="wrap"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        MODELS[0].stream(prompts(1, 3), 2, **bad)  # at the call, not at the first token


def test_without_a_seed_torchs_generator_decides():
    model, idx = MODELS[0], prompts(1, 3)
    torch.manual_seed(5)
    first, second = model.generate(idx, 9), model.generate(idx, 9)
    torch.manual_seed(5)
    assert torch.equal(model.generate(idx, 9), first)
    assert not torch.equal(first, second)


def test_a_seed_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    MODELS[0].generate(prompts(1, 3), 9, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


# -- the sampler -------------------------------------------------------------------------------------------------------

rows_of_logits = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12)


@given(rows_of_logits, st.integers(1, 14), a_seed)
def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_id(values, k, seed):
    """`logits < kth` as a filter keeps all that tie with the k-th."""
    logits = torch.tensor([[round(v) for v in values]], dtype=torch.float32)  # many ties
    kept = sorted(range(len(values)), key=lambda i: (-logits[0, i].item(), i))[:k]
    noise = gumbel_noise(seed, torch.arange(1), torch.arange(300), len(values))[0]
    picked = sample_token(logits.repeat(300, 1), noise, temperature=9.0, top_k=k).tolist()
    assert set(picked) <= set(kept)
    assert sample_token(logits, noise[:1], temperature=0, top_k=k).item() == kept[0]


@given(rows_of_logits, st.floats(0.01, 1), a_seed)
def test_top_p_keeps_the_token_that_crosses(values, p, seed):
    logits = torch.tensor([values])
    probs = torch.softmax(logits[0].double(), 0)
    ranking = sorted(range(len(values)), key=lambda i: (-logits[0, i].item(), i))
    before = [probs[ranking[:n]].sum().item() for n in range(len(values))]
    surely = {i for i, mass in zip(ranking, before) if mass < p - 1e-5}
    possibly = {i for i, mass in zip(ranking, before) if mass < p + 1e-5}
    noise = gumbel_noise(seed, torch.arange(1), torch.arange(50), len(values))[0]
    spread = noise + 1000 * torch.eye(len(values)).repeat(50, 1)[:50]  # each token in turn is the one the noise wants
    picked = set(sample_token(logits.repeat(50, 1), spread, top_p=p).tolist())
    assert surely <= picked <= possibly


@given(rows_of_logits, st.floats(0.1, 3), a_seed)
def test_the_pick_is_that_of_multinomials_race(values, temperature, seed):
    """argmax(probs / Exp(1) noise), in another arithmetic."""
    logits = torch.tensor([values]).double().repeat(20, 1)
    noise = gumbel_noise(seed, torch.arange(1), torch.arange(20), len(values))[0]
    race = torch.softmax(logits / temperature, -1) / torch.exp(-noise.double())
    best = race.topk(2).values
    clear = best[:, 0] / best[:, 1] > 1 + 1e-5
    picked = sample_token(logits.float(), noise, temperature)
    assert torch.equal(picked[clear], race.argmax(-1)[clear])


def test_sampled_frequencies_are_the_softmax():
    """Chi-squared over 40,000 picks, with and without filters; 99.9% of fair samplers stay below these bounds."""
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3)) * 1.5
    n = 40_000
    noise = gumbel_noise(11, torch.arange(200), torch.arange(200), 20).reshape(n, 20)
    for filters, bound in ((dict(temperature=1.0), 43.8), (dict(temperature=0.8, top_k=6), 20.5)):
        expected = torch.softmax(logits[0].double() / filters["temperature"], 0)
        if "top_k" in filters:
            expected[expected < expected.topk(6).values.min()] = 0
            expected /= expected.sum()
        counts = sample_token(logits.repeat(n, 1), noise, **filters).bincount(minlength=20).double()
        live = expected > 0
        assert counts[~live].sum() == 0
        assert ((counts - n * expected)[live] ** 2 / (n * expected[live])).sum().item() < bound


def test_noise_is_gumbel_finite_and_independent_over_every_counter():
    """Neighbours in seed, sample, step and id must be uncorrelated; a hash that only adds counters is not."""
    base = gumbel_noise(1, torch.arange(40), torch.arange(50), 60)
    assert base.dtype == torch.float32 and base.shape == (40, 50, 60) and base.isfinite().all()
    flat = base.flatten().double()
    assert abs(flat.mean().item() - 0.5772) < 0.015  # Euler's constant; the standard error is 0.004
    assert abs(flat.var().item() - torch.pi**2 / 6) < 0.05
    uniform = torch.exp(-torch.exp(-flat))
    counts = torch.histc(uniform, 64, 0, 1)
    assert ((counts - len(flat) / 64) ** 2 / (len(flat) / 64)).sum().item() < 104  # 99.9% for 63 degrees of freedom
    other_seeds = [gumbel_noise(s, torch.arange(40), torch.arange(50), 60) for s in (0, 2, 1 + 2**32, 1 + 2**63)]
    neighbours = [base.roll(1, d) for d in range(3)] + other_seeds
    for neighbour in neighbours:
        correlation = torch.corrcoef(torch.stack((flat, neighbour.flatten().double())))[0, 1]
        assert abs(correlation.item()) < 0.013  # four and a half standard errors
    swapped = gumbel_noise(1, torch.arange(50), torch.arange(40), 60).transpose(0, 1)
    assert (swapped == base).float().mean() < 0.03  # sample and step are not one counter


def test_noise_is_the_same_in_any_block_order_and_batch():
    samples, steps = torch.tensor([5, 0, 2**40]), torch.tensor([3, 100, 7])
    block = gumbel_noise(99, samples, steps, 11)
    for (i, sample), (j, step) in itertools.product(enumerate(samples), enumerate(steps)):
        assert torch.equal(gumbel_noise(99, sample[None], step[None], 11)[0, 0], block[i, j])


def reference_noise(seed, sample, step, token):
    """The rule written out on Python integers: what another program, a web page say, has to compute."""

    def mix(h):
        h = ((h ^ (h >> 16)) * 0x7FEB352D) % 2**32
        h = ((h ^ (h >> 15)) * 0x846CA68B) % 2**32
        return h ^ (h >> 16)

    h = 0
    for counter in (seed % 2**32, seed // 2**32, sample, step, token):
        h = mix(h ^ mix((counter + 0x9E3779B9) % 2**32))
    return -math.log(-math.log1p(-min((h + 0.5) / 2**32, 1 - 2**-24)))


@given(a_seed, st.integers(0, 2**32 - 1), st.integers(0, 2**20), st.integers(1, 70))
def test_noise_follows_the_written_rule(seed, sample, step, vocab):
    got = gumbel_noise(seed, torch.tensor([sample]), torch.tensor([step]), vocab)[0, 0]
    expected = torch.tensor([reference_noise(seed, sample, step, token) for token in range(vocab)])
    torch.testing.assert_close(got, expected, atol=3e-6, rtol=1e-5)
