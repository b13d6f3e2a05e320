"""The promise: whatever the way of decoding, the same tokens for the same seed, unless rounding turns a near-tie."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
    CONTEXT,
    MODELS,
    V,
    a_filter,
    a_model,
    a_seed,
    assert_train_mode_is_refused,
    heads_of,
    prompts,
    random_model,
    stream,
    tokens_differ,
)
from model import GPTConfig, clear_kv_cache, gumbel_noise
from oracles import per_head_logits


def per_head_picks(model, text, length, sample, seed, temperature=1.0, top_k=None, top_p=None):
    """The tokens of `text` from `length` on, each picked anew from what is before it, by per_head_logits.

    The sampling rule is in other words: argmax(probs / Exp(1) noise). There is no cache. Whenever the context is full,
    its newest half goes on.
    """
    picks, begin, logits = text[:length], 0, None
    for end in range(length, len(text)):
        if logits is None or end - begin > CONTEXT:
            begin = begin if end - begin <= CONTEXT else end - CONTEXT // 2
            logits = per_head_logits(model.state_dict(), vars(model.config), text[begin : begin + CONTEXT])
        row = logits[end - begin - 1]
        ranking = sorted(range(V), key=lambda i: (-row[i].item(), i))
        if temperature == 0:
            picks.append(ranking[0])
            continue
        ranking = ranking[:top_k]
        probs = torch.softmax(row[ranking] / temperature, dim=0)
        if top_p is not None:
            mass, kept = 0.0, 0
            while mass < top_p and kept < len(ranking):
                mass, kept = mass + probs[kept].item(), kept + 1
            ranking, probs = ranking[:kept], probs[:kept]
        noise = gumbel_noise(seed, torch.tensor([sample]), torch.tensor([end - length]), V)[0, 0]
        picks.append(ranking[(probs / torch.exp(-noise.double())[ranking]).argmax().item()])
    return picks


@settings(max_examples=20)
@given(a_model, st.integers(1, CONTEXT), st.sampled_from([1, 3]), a_filter, a_seed)
def test_cached_uncached_and_per_head_generate_pick_the_same_tokens(model, length, batch, filters, seed):
    idx = prompts(batch, length, seed % 1000)
    cached = model.generate(idx, CONTEXT, seed=seed, **filters)
    uncached = model.generate(idx, CONTEXT, seed=seed, kv_cache=False, **filters)
    plain = [per_head_picks(model, row, length, i, seed, **filters) for i, row in enumerate(cached.tolist())]
    assert cached.shape == (batch, CONTEXT)
    assert tokens_differ(model, cached, uncached, length, range(batch), seed, filters) is None
    assert tokens_differ(model, cached, torch.tensor(plain), length, range(batch), seed, filters) is None


@settings(max_examples=20)
@given(a_model, st.integers(1, 3 * CONTEXT), st.integers(1, 3 * CONTEXT), a_filter, a_seed)
def test_past_the_context_the_newest_half_goes_on_with_and_without_the_cache(model, length, steps, filters, seed):
    idx, sampling = prompts(2, length, seed % 1000), dict(seed=seed, overflow="slide", **filters)
    cached = model.generate(idx, steps, **sampling)
    uncached = model.generate(idx, steps, kv_cache=False, **sampling)
    plain = [per_head_picks(model, row, length, i, seed, **filters) for i, row in enumerate(cached.tolist())]
    assert cached.shape == (2, length + steps)
    for other in (uncached, torch.tensor(plain)):
        assert tokens_differ(model, cached, other, length, range(2), seed, filters) is None


@given(a_model, st.lists(st.integers(1, 6), min_size=1, max_size=CONTEXT), st.sampled_from([1, 3]))
def test_any_split_into_chunks_gives_the_logits_of_the_whole(model, sizes, batch):
    ends = [end for end in itertools.accumulate(sizes) if end <= CONTEXT] or [CONTEXT]
    idx = prompts(batch, ends[-1])
    expected, _ = model(idx)
    clear_kv_cache(model)
    parts = []
    for begin, end in zip([0, *ends], ends):
        parts.append(model(idx[:, begin:end], pos=torch.arange(begin, end))[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-5, rtol=1e-5)
    clear_kv_cache(model)


@given(a_model, st.integers(2, 8), st.integers(1, 5), st.integers(1, 5))
def test_going_back_forgets_what_came_after(model, length, back, redo):
    """A rejected draft token is overwritten; what lay beyond it must be neither visible nor taken for cached."""
    idx, other = prompts(1, length), prompts(1, 8, seed=5)
    model(idx, pos=torch.arange(length))
    start = length - min(back, length)
    model.kv_cache.length = start
    logits, _ = model(other[:, :redo], pos=torch.arange(start, start + redo), cache=model.kv_cache)
    expected, _ = model(torch.cat((idx[:, :start], other[:, :redo]), dim=1))
    torch.testing.assert_close(logits, expected[:, start:], atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=f"the cache holds {start + redo} positions"):
        model(other[:, :1], pos=torch.tensor([start + redo + 1]), cache=model.kv_cache)
    clear_kv_cache(model)


@settings(max_examples=25)
@given(a_model, st.integers(1, 10), st.sampled_from([1, 3]), a_filter, a_seed, st.data())
def test_whatever_happens_between_two_steps_changes_no_token(model, length, batch, filters, seed, data):
    """An evaluation, eval-train-eval, a cleared cache, a cached call, a generation running or abandoned."""
    idx = prompts(batch, length)
    expected = model.generate(idx, CONTEXT, seed=seed, kv_cache=False, **filters)
    others = [stream(model, prompts(2, 3, s), CONTEXT, seed=s) for s in range(2)]

    disturbances = [
        lambda: None,
        lambda: model(prompts(4, 9), targets=prompts(4, 9)),
        lambda: (model.train(), model.eval(), model(prompts(4, 9), targets=prompts(4, 9))),
        lambda: clear_kv_cache(model),
        lambda: model(prompts(batch, 5, 9), pos=torch.arange(5)),
        lambda: model.generate(prompts(1, 4), 3, seed=1),
        lambda: next(others[0], None),
        lambda: next(others[1], None),
        lambda: others[1].close(),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: clear_kv_cache(model.transformer.h[1]),
        lambda: new[-1].zero_(),
    ]
    new, got = [], []
    for block in stream(model, idx, CONTEXT, seed=seed, **filters):
        new.append(block)
        got.append(block.clone())
        data.draw(st.sampled_from(disturbances))()
    got = torch.cat((idx, *got), dim=1)
    assert tokens_differ(model, got, expected, length, range(batch), seed, filters) is None
    for other in others:
        other.close()
    clear_kv_cache(model)


@settings(max_examples=20)
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


def test_the_prefill_runs_once_and_then_one_token_a_step():
    """A prefill whose logits are thrown away feeds the last prompt token twice; a lost cache prefills again.

    Past the context there is one prefill every half context.
    """
    model, widths = MODELS[0], []
    handle = model.transformer.h[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    model.generate(prompts(2, 5), 6)
    assert widths == [5, 1, 1, 1, 1, 1]
    widths.clear()
    model.generate(prompts(1, 5), 3, kv_cache=False)
    assert widths == [5, 6, 7]
    widths.clear()
    model.generate(prompts(1, 5), 1000, overflow="slide")
    again = CONTEXT // 2  # the first time 5..16 are in the context, then 8 are kept each time it has run over
    assert widths[:13] == [5] + [1] * 11 + [again] and sum(width > 1 for width in widths) == 1 + -(-(1000 - 12) // 9)
    assert set(widths) == {1, 5, again}
    handle.remove()


def test_train_mode_is_refused_at_any_step_and_the_text_goes_on_in_eval_mode():
    assert_train_mode_is_refused(stream)


def test_a_stream_may_be_left_and_taken_up_outside_of_inference_mode():
    model, idx = MODELS[0], prompts(2, 5)
    blocks = stream(model, idx, 6, 0.8, None, None, 1)
    with torch.inference_mode():
        first = [idx, next(blocks)]
    assert torch.equal(torch.cat([*first, *blocks], dim=1), model.generate(idx, 6, seed=1))


def test_generate_leaves_its_cache_to_be_inspected_until_it_is_cleared():
    model = random_model(MODELS[0].config)
    out = model.generate(prompts(2, 5), 3, seed=1)
    shown = [(head.key_cache, head.value_cache) for head in heads_of(model)]
    assert all(key.shape == value.shape == (2, 7, 8) for key, value in shown)  # nothing has fed the last token
    model(out[:, :7], cache=model.new_cache(2))
    for (key, value), head in zip(shown, heads_of(model), strict=True):
        torch.testing.assert_close(key, head.key_cache, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(value, head.value_cache, atol=1e-5, rtol=1e-5)
    clear_kv_cache(model)
    assert model.kv_cache is None


def test_a_generation_never_goes_on_with_a_foreign_token_in_its_cache(model):
    steps = stream(model, prompts(2, 5), CONTEXT, seed=1)
    next(steps), next(steps)
    model(prompts(2, 1), cache=model.kv_cache)  # where the generation stands
    with pytest.raises(ValueError, match="0 positions"):
        next(steps)


def test_a_generation_whose_cache_was_shortened_feeds_again_what_it_lacks(model):
    expected = [new.tolist() for new in stream(model, prompts(2, 5), CONTEXT, seed=1)]
    found = []
    for new in stream(model, prompts(2, 5), CONTEXT, seed=1):
        found.append(new.tolist())
        model.kv_cache.length = 3
    assert found == expected


def test_under_autocast_the_tokens_are_those_of_a_cache_filled_anew(model):
    """Rotation and norms give float32 under autocast, and projections bfloat16."""
    text, steps = prompts(2, 5), CONTEXT - 5
    with torch.autocast("cpu", torch.bfloat16):
        text = model.generate(text, steps, seed=1, temperature=1.0)
    noise = gumbel_noise(1, torch.arange(2), torch.arange(steps), V)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        for step in range(steps):
            logits, _ = model(text[:, : 5 + step], cache=model.new_cache(2), last=True)
            score = logits.float() + noise[:, step]
            picked = score.gather(1, text[:, 5 + step, None])
            assert (score.amax(1, keepdim=True) - picked < 0.2).all()  # equal, but for bfloat16's rounding


def test_generation_stops_at_block_size_and_refuses_a_longer_prompt():
    model = MODELS[0]
    assert model.generate(prompts(1, 5), 1000).shape == (1, CONTEXT)
    full = prompts(1, CONTEXT)
    for idx, steps in ((full, 5), (prompts(2, 5), 0), (prompts(2, 5), -1)):
        assert torch.equal(model.generate(idx, steps), idx)
    for length in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"a prompt of {length} tokens"):
            model.generate(prompts(1, length), 5)


@pytest.mark.parametrize("number", [np.int64, np.uint8])
def test_numbers_of_numpy_are_numbers(number):
    """And settings may come in order, as in nanoGPT's own call."""
    expected = MODELS[0].generate(prompts(1, 3), 9, temperature=1.0, top_k=5, top_p=0.5, seed=7)
    got = MODELS[0].generate(prompts(1, 3), 9, number(1), number(5), np.float32(0.5), number(7))
    assert torch.equal(got, expected)
    expected = MODELS[0].generate(prompts(2, 3), 9, seed=7)
    for samples in (np.arange(2), torch.arange(2)):
        assert torch.equal(MODELS[0].generate(prompts(2, 3), 9, seed=7, samples=samples), expected)


IMPOSSIBLE = {
    "temperature": [-0.1, float("nan"), float("inf"), 1e38],
    "top_k": [0, 2**63, float("nan")],
    "top_p": [0.0, 1.01, float("nan")],
    "seed": [-1, 2**64],
    "samples": [[1, 2], [0.5]],
    "overflow": ["wrap"],
}


@pytest.mark.parametrize("name, value", [(name, value) for name in IMPOSSIBLE for value in IMPOSSIBLE[name]])
def test_impossible_arguments_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        next(stream(MODELS[0], prompts(1, 3), 2, **{name: value}))


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


# -- whose cache it is -------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return random_model(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32))


def test_two_caches_of_one_model_hold_two_texts(model):
    ours, theirs = prompts(1, CONTEXT, 1), prompts(1, CONTEXT, 2)
    expected = [model(idx)[0] for idx in (ours, theirs)]
    caches = [model.new_cache(1) for _ in range(2)]
    for begin, end in ((0, 6), (6, 7), (7, 8), (8, CONTEXT)):
        for idx, cache, right in zip((ours, theirs), caches, expected):
            logits, _ = model(idx[:, begin:end], pos=torch.arange(begin, end), cache=cache)
            torch.testing.assert_close(logits, right[:, begin:end], atol=2e-5, rtol=1e-5)


def test_a_cache_is_as_long_as_the_text(model):
    """But no longer than the context."""
    for steps, slots in ((1, 6), (4, 9), (99, CONTEXT)):
        list(stream(model, prompts(2, 5), steps, seed=1))
        cache = model.kv_cache
        assert cache.slots == slots and cache.key[0].size(2) == slots, steps
    with pytest.raises(ValueError, match="7 positions do not fit into a cache of 6 slots"):
        model(prompts(1, 7), pos=torch.arange(7), cache=model.new_cache(1, slots=6))


@pytest.mark.parametrize("place", ["transformer.wte", "transformer.h.1", "transformer.ln_f", "lm_head"])
def test_a_forward_that_fails_leaves_no_half_written_cache(place, model):
    """Ctrl-C in the second layer: the first has the new keys and the second does not."""
    idx, cache = prompts(1, 6), model.new_cache(1)

    def interrupt(*_):
        raise KeyboardInterrupt

    model(idx[:, :4], cache=cache)
    hook = model.get_submodule(place).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(idx[:, 4:5], cache=cache)
    hook.remove()
    assert cache.length == 4
    model(idx[:, 4:5], cache=cache)
    torch.testing.assert_close(model(idx[:, 5:], cache=cache, last=True)[0], model(idx, last=True)[0])


def test_a_new_cache_is_ours_even_if_another_thread_makes_one_meanwhile(model, monkeypatch):
    """model.kv_cache is only to look at: another thread may replace it at any time."""
    other = model.new_cache(1)
    replace = lambda self, name, value: torch.nn.Module.__setattr__(self, name, other if name == "kv_cache" else value)  # noqa: E731
    monkeypatch.setattr(type(model), "__setattr__", replace)
    assert model.new_cache(1) is not other and model.kv_cache is other


def test_threads_that_share_a_model_get_their_own_texts(model):
    """Each generation has its own cache."""
    jobs = [(prompts(2, 3, seed), seed) for seed in range(8)]
    expected = [model.generate(idx, CONTEXT, seed=seed, kv_cache=False) for idx, seed in jobs]
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda job: model.generate(job[0], CONTEXT, seed=job[1]), jobs)
        assert all(map(torch.equal, texts, expected))
