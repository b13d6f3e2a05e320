"""Drafts and prompts of different lengths: other ways to the same tokens."""

import contextlib
import copy
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from extra_helpers import DRAFTS, WAYS, a_draft, a_way, assert_same_as_alone, needs_compiler, without_minus_one
from extras.decode.engine import Decoder, Generation
from helpers import (
    CONTEXT,
    MODELS,
    V,
    a_filter,
    a_model,
    a_seed,
    assert_train_mode_is_refused,
    prompts,
    random_model,
    stream,
)
from model import GPTConfig, Sampling, clear_kv_cache


@settings(max_examples=20)
@given(a_model, a_way, st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4), a_filter, a_seed, st.data())
def test_prompts_of_any_lengths_get_the_tokens_that_each_gets_alone(model, draft, lengths, filters, seed, data):
    steps = data.draw(st.integers(0, CONTEXT + 3))
    samples = data.draw(st.lists(st.integers(0, 2**40), min_size=len(lengths), max_size=len(lengths)))
    ragged = [prompts(1, n, seed % 997 + n)[0] for n in lengths]
    decoder = Decoder(model, **draft)
    got = decoder.generate(ragged, steps, seed=seed, samples=samples, **filters)
    assert [len(row) for row in got] == [min(n + steps, CONTEXT) for n in lengths]
    assert_same_as_alone(model, got, ragged, steps, samples, seed, filters)


@settings(max_examples=15)
@given(a_model, a_way, st.lists(st.integers(0, 2), min_size=1, max_size=6), a_filter, a_seed)
def test_rows_of_the_same_prompt_stay_apart_from_each_other(model, draft, which, filters, seed):
    """In any order. The C backend reads a prompt once and copies its keys and values to the other rows."""
    ragged = [prompts(1, n, n)[0] for n in (1, 6, CONTEXT - 2)]
    rows = [ragged[i] for i in which]
    got = Decoder(model, **draft).generate(rows, CONTEXT, seed=seed, **filters)
    assert_same_as_alone(model, got, rows, CONTEXT, range(len(rows)), seed, filters)


@pytest.mark.slow
@settings(max_examples=20)
@given(a_model, a_way, st.integers(1, 3 * CONTEXT), st.integers(1, 3 * CONTEXT), a_filter, a_seed)
def test_past_the_context_too(model, draft, length, steps, filters, seed):
    idx = prompts(2, length, seed % 1000)
    got = Decoder(model, **draft).generate(idx, steps, seed=seed, overflow="slide", **filters)
    assert_same_as_alone(model, got, idx, steps, range(2), seed, filters, overflow="slide")


@pytest.mark.parametrize("block_size", [1, 3])
def test_contexts_smaller_than_a_chunk(block_size):
    model = random_model(GPTConfig(block_size=block_size, vocab_size=V, n_layer=1, n_head=2, n_embd=16))
    for draft in WAYS.values():
        for length in range(1, 2 * block_size + 2):
            idx = prompts(2, length, length)
            got = Decoder(model, **draft).generate(idx, 11, seed=5, overflow="slide")
            assert torch.equal(got, model.generate(idx, 11, seed=5, overflow="slide", kv_cache=False))


@settings(max_examples=25)
@given(a_model, a_way, a_filter, a_seed, st.data())
def test_whatever_happens_between_two_steps_changes_no_token(model, draft, filters, seed, data):
    ragged = [prompts(1, n, n)[0] for n in (2, 5)]
    decoder = Decoder(model, **draft)
    others = [iter(decoder.stream(prompts(2, 3, s), CONTEXT, seed=s)) for s in range(2)]
    plain = stream(model, prompts(2, 4), CONTEXT, seed=3)
    disturbances = [
        lambda: None,
        lambda: model(prompts(4, 9), targets=prompts(4, 9)),
        lambda: (model.train(), model.eval()),
        lambda: clear_kv_cache(model),
        lambda: model(prompts(2, 5, 9), pos=torch.arange(5)),
        lambda: next(others[0], None),
        lambda: next(others[1], None),
        lambda: next(plain, None),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: blocks[-1].zero_(),
    ]
    blocks, copies = [], []
    for block in decoder.stream(ragged, CONTEXT, seed=seed, **filters):
        blocks.append(block)
        copies.append(block.clone())
        data.draw(st.sampled_from(disturbances))()
    assert_same_as_alone(model, without_minus_one(ragged, copies), ragged, CONTEXT, range(2), seed, filters)
    clear_kv_cache(model)


@given(a_model, a_draft, st.lists(st.integers(1, CONTEXT), min_size=1, max_size=4), a_filter, a_seed)
def test_blocks_are_what_each_step_adds_and_together_the_continuation(model, draft, lengths, filters, seed):
    """A step adds up to num_drafts + 1 tokens to each row, and -1 pads the rows that got fewer."""
    decoder, ragged = Decoder(model, **draft), [prompts(1, n, n)[0] for n in lengths]
    blocks = list(decoder.stream(ragged, CONTEXT, seed=seed, **filters))
    for block in blocks:
        counts = (block >= 0).sum(1)
        assert block.dtype == torch.int64 and len(block) == len(lengths)
        assert 1 <= counts.max() == block.size(1) <= decoder.num_drafts + 1
        assert all((row[:n] >= 0).all() and (row[n:] == -1).all() for row, n in zip(block, counts))
    if blocks:
        whole = decoder.generate(ragged, CONTEXT, seed=seed, **filters)
        assert all(map(torch.equal, without_minus_one(ragged, blocks), whole))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overflow", ["stop", "slide"])
def test_a_row_that_leaves_costs_nothing_more_and_changes_no_other(way, overflow):
    decoder = Decoder(MODELS[9], **WAYS[way])
    idx, steps = prompts(3, 4), CONTEXT - 4 if overflow == "stop" else 3 * CONTEXT
    alone = decoder.generate(idx, steps, seed=1, overflow=overflow)
    for leavers in ([1], [0, 2], [0, 1, 2]):
        for when in (1, 4):
            blocks = []
            texts = [SimpleNamespace(prompt=[0], new=[], ended=False) for _ in range(3)]
            for block in Generation(decoder, list(idx), steps, Sampling(seed=1, overflow=overflow), texts):
                blocks.append(block)
                if len(blocks) == when:
                    for row in leavers:
                        texts[row].ended = True
            assert len(blocks) == when or len(leavers) < 3 or when > len(blocks)
            until = without_minus_one(idx, blocks[:when])
            for row, got in enumerate(without_minus_one(idx, blocks)):
                n = len(until[row]) if row in leavers else 4 + steps
                assert torch.equal(got, alone[row][:n])


def test_prompts_come_back_in_the_form_in_which_they_went_in():
    """Ids `(B, T)`, or a list of prompts, whose lengths may differ."""
    idx, decoder = prompts(2, 5), Decoder(MODELS[0])
    both = decoder.generate(idx, 4, seed=3)
    assert torch.equal(both, MODELS[0].generate(idx, 4, seed=3))
    assert all(map(torch.equal, decoder.generate(list(idx), 4, seed=3), both))
    assert list(map(len, decoder.generate([idx[0, :2], idx[1, :1]], 4, seed=3))) == [6, 5]


def test_threads_that_share_a_decoder_get_their_own_texts():
    for way in WAYS.values():
        decoder = Decoder(MODELS[9], **way)
        jobs = [(prompts(2, 3, seed), seed) for seed in range(4)]
        with ThreadPoolExecutor(3) as pool:
            texts = [pool.submit(decoder.generate, idx, CONTEXT, seed=seed) for idx, seed in jobs]
            for (idx, seed), rows in zip(jobs, (text.result() for text in texts)):
                assert torch.equal(rows, MODELS[9].generate(idx, CONTEXT, seed=seed, kv_cache=False))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (([prompts(1, 3)[0], prompts(1, 4)[0]], 5, dict(overflow="slide")), "slide together"),
        (([prompts(1, 3)[0], prompts(1, 0)[0]], 5, {}), "a prompt of 0 tokens"),
        (([prompts(1, CONTEXT + 1)[0]], 5, {}), f"a prompt of {CONTEXT + 1} tokens"),
        (([], 5, {}), "0 rows"),
        (([prompts(1, 3)[0]], 5, dict(samples=[1, 2])), "samples"),
        (([prompts(1, 3)[0]], 5, dict(samples=[1.5])), "samples"),
        (([prompts(1, 3)[0]], 5, dict(top_p=0.0)), "top_p"),
        (([torch.tensor([1, V])], 5, {}), "tokens outside"),
        (([torch.tensor([-1, 1])], 5, {}), "tokens outside"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_made(arguments, words):
    with pytest.raises(ValueError, match=words):
        Decoder(MODELS[0]).stream(*arguments[:2], **arguments[2])
    with pytest.raises(ValueError, match="draft='ngrams'"):
        Decoder(MODELS[0], draft="ngrams")
    for wrong in (dict(weights="int4", compile=True), dict(weights="int8")):
        with pytest.raises(ValueError, match="weights='int"):
            Decoder(MODELS[0], **wrong)


def test_generations_leave_nothing_behind():
    model, decoders = MODELS[3], [Decoder(MODELS[3], **way) for way in WAYS.values()]

    def tensors():
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    def generate(seed):
        model.generate(prompts(2, 3), CONTEXT, seed=seed)
        for decoder in decoders:
            decoder.generate(prompts(3, 4), CONTEXT, seed=seed)
            decoder.generate(prompts(1, 4), 40, seed=seed, overflow="slide")
            next(iter(decoder.stream(prompts(1, 4), 40, seed=seed)))  # abandoned

    generate(0)
    before = tensors()
    for seed in range(3):
        generate(seed)
    assert tensors() <= before


# -- what a stream of GPT does, too: tests/test_generation.py ----------------------------------------------------------


def test_train_mode_is_refused_as_by_a_gpt():
    assert_train_mode_is_refused(lambda model, *args: Decoder(model).stream(*args))


@needs_compiler
def test_the_c_backend_refuses_train_mode_at_its_next_call():
    model = random_model(MODELS[0].config)
    decoder = Decoder(model, compile=True)
    blocks = iter(decoder.stream(prompts(1, 3), 9, seed=1))
    next(blocks)
    model.train()
    for each in (blocks, iter(decoder.stream(prompts(1, 3), 9, seed=1))):
        with pytest.raises(RuntimeError, match=r"train mode.*model\.eval\(\)"):
            next(each)
    model.eval()
    assert torch.equal(decoder.generate(prompts(1, 3), 9, seed=1), model.generate(prompts(1, 3), 9, seed=1))


@pytest.mark.parametrize("draft", DRAFTS)
def test_logits_that_are_nan_are_an_error_after_the_tokens_before(draft):
    """From position 9 on, the embedding of the position overflows."""
    good = random_model(GPTConfig(block_size=CONTEXT, vocab_size=V, n_layer=2, n_head=4, n_embd=32))
    broken = copy.deepcopy(good)
    with torch.no_grad():
        broken.transformer["wpe"].weight[9:] = 3e38
    idx = prompts(2, 4)
    blocks = []
    with pytest.raises(FloatingPointError, match="logits are infinite or NaN"):
        for block in Decoder(broken, **DRAFTS[draft]).stream(idx, CONTEXT, seed=1):
            blocks.append(block)
    for ours, theirs in zip(without_minus_one(idx, blocks), good.generate(idx, CONTEXT, seed=1)):
        assert len(ours) > 4 and torch.equal(ours, theirs[: len(ours)])


@pytest.mark.parametrize("overflow, steps", [("stop", 11), ("slide", 3 * CONTEXT)])
@pytest.mark.parametrize("call", [1, 4, CONTEXT, CONTEXT + 2])
def test_a_generation_goes_on_after_ctrl_c(call, overflow, steps):
    """In a prefill, in a step, and in the prefill after a slide."""
    calls = itertools.count(1)

    def interrupt(*_):
        if next(calls) == call:
            raise KeyboardInterrupt

    model, idx = MODELS[0], prompts(2, 5)
    expected = model.generate(idx, steps, seed=1, overflow=overflow)
    generation, blocks = Decoder(model).stream(idx, steps, seed=1, overflow=overflow), [idx]
    handle = model.transformer.h[1].mlp.register_forward_pre_hook(interrupt)
    try:
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                for block in generation:
                    blocks.append(block)
    finally:
        handle.remove()
    assert torch.equal(torch.cat(blocks, dim=1), expected)


def test_a_decoders_stream_may_be_left_and_taken_up_outside_of_inference_mode():
    model, idx = MODELS[0], prompts(2, 5)
    stream = iter(Decoder(model).stream(idx, 6, 0.8, None, None, 1))
    with torch.inference_mode():
        blocks = [idx, next(stream)]
    assert torch.equal(torch.cat([*blocks, *stream], dim=1), model.generate(idx, 6, seed=1))
