"""check_cache: correct caches pass, and broken ones are found with their cause."""

import copy
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bugs import BUGS, LAYERS, SIZE, Attention, Cache, Decoder, copies_of, patched_update, rounded, tiny
from check_cache import Report, Result, check_cache, scenario, show_attention
from check_cache.__main__ import main
from check_cache.adapters import METHODS
from check_cache.scenarios import SCENARIOS
from test_families import family


def statuses(report, status="wrong"):
    return {result.scenario for result in report.results if result.status == status}


def whys(report, status="wrong"):
    return [result.why for result in report.results if result.status == status]


def newest(model, ids, cache):
    """The logits after the last token. With a cache, only what it lacks is fed."""
    new = ids[:, cache.lengths[0] if cache else 0 :]
    pos = torch.arange(ids.size(1) - new.size(1), ids.size(1)).expand_as(new)
    return model(new, cache, None, pos)[:, -1]


# -- broken caches -----------------------------------------------------------------------------------------------------


def assert_found(name, patch, **options):
    function, cause, caches, _ = BUGS[name]
    report = check_cache(function(patch.setattr), caches=caches, **options)
    wrong = whys(report)
    assert report.exit_code == 1 and wrong, "not found"
    named = [all(words in why for words in cause.split("|")) for why in wrong]
    # if one scenario names the cause, others may raise, find leftovers, miss a position, or compare tokens
    vague = "raises|was not empty at|in no slot|chooses different tokens"
    enough = [this or bool(re.search(vague, why)) for this, why in zip(named, wrong)]
    assert any(named) and sum(enough) >= 0.8 * len(wrong), report


QUICK = "rope_begins_at_0_in_each_step table_begins_at_0_in_each_step int8 crop_leaves_one beams_not_reordered".split()
QUICK += ["padding_is_seen"]
# what only long sequences show
LONG = "angles_end_at_64 chunk_of_more_than_thirty growth_moves_layers middle_is_dropped dropout_is_on".split()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BUGS]
)
def test_a_broken_cache_is_found_with_its_cause(name, monkeypatch):
    assert_found(name, monkeypatch, length=96 if name in LONG else 48)


# -- correct caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_correct_adapter(dtype):
    check_cache(Decoder(window=12), length=48, dtype=dtype).assert_correct(require=["decode", "around", "rollback"])


def functions(model, **more):
    """Return a decoder as the functions that check_cache accepts."""
    step = lambda ids, cache, mask, pos: model(ids, cache, mask, pos)  # noqa: E731
    return dict(full=model.full, new=lambda rows, length: Cache(), step=step, context=128, length=48) | more


def in_a_dict(model):
    """The cache is a dict, which has its own update method, and the step returns only the logits of the last token."""
    step = lambda ids, cache, pos: model(ids, cache["cache"], None, pos)[:, -1]  # noqa: E731
    return functions(model, new=lambda rows, length: {"cache": Cache()}, step=step)


def other_names(model):
    """The required arguments have different names."""
    return functions(model, new=lambda n, room: Cache(), step=lambda x, kv=None, *, pos: model(x, kv, None, pos))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [functions, in_a_dict, other_names])
def test_functions_make_an_adapter(adapter, monkeypatch):
    scenarios = ["decode", "chunks of mixed sizes", "rollback", "reorder", "reset", "prefix"]
    report = check_cache(**adapter(Decoder()), scenarios=scenarios)
    report.assert_correct()
    correct = statuses(report, "correct")
    assert "decode" in correct and ("reorder" in correct) == (adapter is not in_a_dict)
    function, cause, _, _ = BUGS["rope_begins_at_0_in_each_step"]
    function(monkeypatch.setattr)
    report = check_cache(**adapter(Decoder()), scenarios=["decode"])
    assert report.exit_code == 1 and cause.partition("|")[0] in report.results[0].why, report


def test_a_step_may_return_a_new_cache():
    """Here a tensor, which has no methods of a cache: one vector per row, the sum of all embeddings so far."""

    class Sums(torch.nn.Module):
        vocab_size = 9

        def __init__(self):
            super().__init__()
            self.wte, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9)

        def full(self, ids):
            return self.step(ids, 0)[0]

        def new(self, rows, length):
            return torch.zeros(rows, 1, 8)

        def step(self, ids, cache):
            sums = cache + self.wte(ids).cumsum(1)
            return self.head(sums.tanh()), sums[:, -1:]

    report = check_cache(Sums(), length=24)
    report.assert_correct(require=["decode", "prefix used twice", "two caches at once"])
    line = "not run  19 scenarios need what this decoder or adapter lacks: --verbose or text(verbose=True)"
    assert line in str(report)
    said = " ".join(report.text(verbose=True).split())
    assert "left padding in chunks: the step takes no mask not run" in said
    assert "reorder, reorder from one row, left padding, then reorder: the adapter has no reorder, " in said


@pytest.mark.parametrize("forgets", [False, True])
def test_your_own_search(forgets):
    """Rows change places and the cache does not follow, as once in the beam search of x-transformers."""
    model = Decoder()

    def generate(ids, count, use_cache):
        cache, order = Cache() if use_cache else None, torch.tensor([1, 0, 2])
        for _ in range(count):
            ids = torch.cat((ids, newest(model, ids, cache).argmax(-1, keepdim=True)), 1)[order]
            if use_cache and not forgets:
                cache.reorder_cache(order)
        return ids

    report = check_cache(**functions(model, generate=generate), scenarios=["generate"])
    assert report.exit_code == forgets and ("chooses different tokens" in str(report)) == forgets, report


def test_a_report_is_no_boolean():
    with pytest.raises(TypeError, match=r"write report\.assert_correct"):
        assert check_cache(**functions(Decoder()), scenarios=["batches"])


def test_what_must_have_run_is_required():
    model = Decoder()
    report = check_cache(**functions(model), scenarios=["decode", "speculative", "padding"], skip=["in chunks"])
    report.assert_correct(require=["decode", "speculative rollback"])
    report = check_cache(**functions(model, new=lambda rows, length: NoCrop()), scenarios=["decode", "rollback"])
    report.assert_correct(require="decode")
    lacks = r"the adapter has no crop, the cache no\s+crop"
    for name, why in (("speculative rollback", lacks), ("rollback", lacks), ("beams", "not in this report")):
        with pytest.raises(AssertionError, match=rf"required, but not run: {name} \({why}\)$"):
            report.assert_correct(require=name)


def test_what_is_required_must_have_run_with_each_kind_of_cache():
    class Both(Decoder):
        def new(self, rows, length, kind):
            return Cache() if kind == "own" else NoCrop(length)

    report = check_cache(Both(), length=48, scenarios=["decode", "rollback"])
    report.assert_correct(require="decode")
    with pytest.raises(AssertionError, match=r"required, but not run: speculative rollback \(the adapter has no crop"):
        report.assert_correct(require="speculative rollback")


class NoCrop(Cache):
    """A cache whose crop was renamed."""

    crop = property()


class Refuses(Cache):
    """A cache that says what it cannot do, as a full window in transformers 4."""

    def crop(self, count):
        raise ValueError("cannot crop a full window")


def test_a_refusal_is_no_mistake():
    report = check_cache(**functions(Decoder(), new=lambda rows, length: Refuses()), scenarios=["rollback", "reorder"])
    report.assert_correct()
    said = {result.scenario: (result.status, result.why) for result in report.results}
    assert said["speculative rollback"] == ("not run", "cannot crop a full window")
    assert said["reorder"] == ("correct", None)


def test_a_cache_whose_keys_are_modules():
    """As hooks keep it. A copy must not copy the modules."""
    model = Decoder()

    class Hooked(dict):
        lengths = property(lambda self: [self[block][0].size(2) if block in self else 0 for block in model.blocks])

        def update(self, key, value, layer):
            old = self.get(model.blocks[layer])
            self[model.blocks[layer]] = (key, value) if old is None else tuple(map(cat, old, (key, value)))
            return self[model.blocks[layer]]

    cat = lambda old, new: torch.cat((old, new), 2)  # noqa: E731
    report = check_cache(**functions(model, new=lambda rows, length: Hooked()), scenarios=["decode", "prefix"])
    report.assert_correct(require="prefix used twice")


@pytest.mark.parametrize("how", ["function", "copy", "neither"])
def test_a_cache_that_lives_in_an_engine(how):
    """The cache is a handle, and its keys are kept elsewhere: a copy of the handle is no copy of them."""
    model, engine = Decoder(), {}

    class Handle:
        def __deepcopy__(self, memo):
            if how == "neither":
                raise TypeError("cannot pickle a handle")
            return fork(self) if how == "copy" else self

    def new(rows, length):
        handle = Handle()
        engine[handle] = Cache()
        return handle

    def fork(handle):
        copied = Handle()
        engine[copied] = copy.deepcopy(engine[handle])
        return copied

    step = lambda ids, cache, mask, pos: model(ids, engine[cache], mask, pos)  # noqa: E731
    adapter = functions(model, new=new, step=step) | (dict(fork=fork) if how == "function" else {})
    (result,) = check_cache(**adapter, scenarios=["prefix"]).results
    expected = (
        ("not run", "copy.deepcopy of the cache: cannot pickle a handle") if how == "neither" else ("correct", None)
    )
    assert (result.status, result.why) == expected, result


def test_a_generate_that_is_not_ours():
    """An adapter that is the module itself may have one with other arguments."""

    class Generates(Decoder):
        def generate(self, ids, max_new_tokens, temperature=1.0):
            raise AssertionError("called")

    (result, _) = check_cache(Generates(), length=24, scenarios=["generate"]).results
    assert (result.status, result.why) == ("not run", "there is no generate")


def test_a_step_may_overwrite_its_ids():
    model = Decoder()

    def full(ids):
        logits = model.full(ids)
        ids.zero_()
        return logits

    def generate(ids, count, use_cache):
        for _ in range(count):
            ids = torch.cat((ids, full(ids.clone())[:, -1:].argmax(-1)), 1)
        return ids[:, -count:].clone() + ids.zero_()[:, :1]

    check_cache(**functions(model, full=full, generate=generate), scenarios=["decode", "generate"]).assert_correct()


# -- arrays of any framework -------------------------------------------------------------------------------------------


class NumPy:
    """A decoder and its cache without torch, which reads nothing but NumPy arrays."""

    def __init__(self, seed=0):
        draw = np.random.default_rng(seed)
        size = dict(wte=(50, 16), wpe=(64, 16), q=(16, 16), k=(16, 16), head=(16, 50))
        self.weights = {name: draw.normal(size=shape, scale=0.3).astype("float32") for name, shape in size.items()}

    def run(self, ids, cache, pos, weights=None, shows=False):
        assert isinstance(ids, np.ndarray) and isinstance(pos, np.ndarray)
        w = self.weights if weights is None else weights
        x = w["wte"][ids] + w["wpe"][pos]
        q, k = x @ w["q"], np.concatenate((*cache, x @ w["k"]), 1)
        cache[:] = [self.keep(k)]
        T, t = q.shape[1], k.shape[1]
        scores = np.exp(np.where(np.tri(T, t, t - T, bool), q @ k.swapaxes(1, 2), -np.inf))
        scores = scores / scores.sum(-1, keepdims=True)
        if shows:
            show_attention(*(part[:, None] for part in (scores, q, k, k)))
        return (x + scores @ k) @ w["head"]

    def keep(self, keys):
        return keys

    def adapter(self, **more):
        full = lambda ids, **options: self.run(ids, [], np.arange(ids.shape[1]), **options)  # noqa: E731
        step = lambda ids, cache, pos, **options: self.run(ids, cache, pos, **options)  # noqa: E731
        if "weights" in more:
            full, step = (lambda ids, weights: self.run(ids, [], np.arange(ids.shape[1]), weights)), self.step
        return dict(full=full, new=lambda rows, length: [], step=step, context=64, length=48) | more

    def step(self, ids, cache, pos, weights):
        return self.run(ids, cache, pos, weights)


def test_a_decoder_without_torch_gets_numpy_arrays_and_its_weights_are_perturbed():
    model = NumPy()
    check_cache(**model.adapter()).assert_correct(require=["decode", "chunks that double", "two caches at once"])

    seen = set()
    full = lambda ids: seen.add(model.weights["k"].sum()) or model.run(ids, [], np.arange(ids.shape[1]))  # noqa: E731
    step = lambda ids, cache, pos: model.run(ids, cache, pos)  # noqa: E731
    before = {name: array.copy() for name, array in model.weights.items()}
    model.weights["head"][:] = 0  # hides everything before it, unless we perturb it
    report = check_cache(**model.adapter() | dict(full=full, step=step, weights=model.weights))
    report.assert_correct(require="decode")
    assert len(seen) > 1 and before["k"].sum() in seen and not model.weights["head"].any()
    assert re.match(r"a decoder: [0-9]+ of 28 scenarios ran, 48 tokens", report.title)
    assert "perturbed weights" not in report.beyond
    assert all((model.weights[name] == before[name]).all() for name in before if name != "head")


def test_a_step_that_converts_tensors_itself_cannot_be_interrupted():
    """As adapters of MLX do: the only calls of torch are those of np.asarray."""
    model = NumPy()
    full = lambda ids: model.run(np.asarray(ids), [], np.arange(ids.shape[1]))  # noqa: E731
    step = lambda ids, cache, pos: model.run(np.asarray(ids), cache, np.asarray(pos))  # noqa: E731
    report = check_cache(**model.adapter() | dict(full=full, step=step), scenarios=["decode", "exception"])
    assert [result.status for result in report.results] == ["correct", "correct", "not run"], report
    assert report.results[2].why == "the step runs outside of torch, so we cannot interrupt it"


def test_attention_without_values_has_no_cause():
    """As of a step that jax.jit compiles, whose tracers cannot become arrays. The check goes on."""

    class Tracer:
        def __array__(self, *args, **kwargs):
            raise TypeError("a tracer")

    model = NumPy()
    for late in (0, 1):

        def step(ids, cache, pos):
            show_attention(Tracer())
            return model.run(ids, cache, pos + late * (pos > 20))  # noqa: B023

        report = check_cache(**model.adapter() | dict(step=step), scenarios=["decode"], skip=["from"])
        assert report.exit_code == late, report
    assert report.results[0].why.startswith("cause unknown: without a cache, we see no attention"), report


def test_rounding_in_a_deep_decoder_whose_weights_we_do_not_know():
    """32 layers of attention without a module. With a cache, float32 rounds up to 23 times as far as we measure."""
    draw = torch.Generator().manual_seed(0)
    wte, *layers = (torch.randn(size, generator=draw) / 3.3 for size in [(300, 64)] + [(64, 192)] * 32)

    def step(ids, cache):
        x = wte[ids]
        for i, weights in enumerate(layers):
            qkv = torch.layer_norm(x, [64]) @ weights
            q, k, v = (part.unflatten(-1, (8, 8)).transpose(1, 2) for part in qkv.split(64, dim=-1))
            if i in cache:
                k, v = torch.cat((cache[i][0], k), dim=2), torch.cat((cache[i][1], v), dim=2)
            cache[i] = k, v
            mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
            x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return torch.layer_norm(x, [64]) @ wte.T / 8

    full, scenarios = (lambda ids: step(ids, {})), ["decode", "chunks of mixed sizes"]
    report = check_cache(full=full, new=lambda rows, length: {}, step=step, length=60, scenarios=scenarios)
    report.assert_correct(require=scenarios)
    lacks = "we found no module with weights: pass it as model=, or its arrays as weights="
    assert report.beyond == f"perturbed weights and float64, because {lacks}", report


def test_weights_that_cannot_be_changed_in_place_are_passed_to_functions():
    """As those of JAX."""
    model = NumPy()
    for array in model.weights.values():
        array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that cannot be written
        check_cache(**model.adapter(weights=model.weights)).assert_correct(require="decode")
    with pytest.raises(ValueError, match="read-only"):  # in the words of their framework
        check_cache(**NumPy().adapter() | dict(weights=model.weights))
    with pytest.raises(ValueError, match="we found no module to convert"):
        check_cache(**model.adapter(weights=model.weights), dtype="bfloat16")


def test_a_decoder_without_torch_can_show_its_attention():
    class Broken(NumPy):
        def keep(self, keys):
            keys = keys.copy()
            keys[:, 7:8] = 0
            return keys

    model = Broken()
    full, step = (lambda ids: model.run(ids, [], np.arange(ids.shape[1]), shows=True)), model.run
    adapter = model.adapter() | dict(full=full, step=lambda ids, cache, pos: step(ids, cache, pos, shows=True))
    (result,) = check_cache(**adapter, scenarios="decode", skip="from").results
    assert "layer 0: slot 7 should hold the key and value of row 0, position 7, but holds zeros" in result.why, result


# -- what "correct" covers --------------------------------------------------------------------------------------------


def test_every_position_is_decoded_as_a_single_token():
    model, single = Decoder(), set()

    def step(ids, cache, mask, pos):
        if ids.size(1) == 1:
            single.update(pos[:, 0].tolist())
        return model(ids, cache, mask, pos)

    adapter = functions(model, step=step)
    check_cache(**adapter, scenarios=["decode"]).assert_correct()
    assert single == set(range(48))


class Stale(Cache):
    """A step of one token sees every slot that was ever written, such as those of rejected drafts."""

    def reset(self):
        super().reset()
        self.most, self.at = 0, [None] * LAYERS

    def update(self, key, value, layer):
        held = super().update(key, value, layer)
        self.most = max(self.most, self.lengths[layer])
        slot = torch.arange(self.room)
        claimed = torch.where(slot < self.most, slot.clamp(max=self.lengths[layer] - 1), slot)
        self.at[layer] = claimed if key.size(2) == 1 else slot
        return held


def test_a_single_token_after_a_rollback():
    report = check_cache(**functions(Decoder(), new=lambda rows, length: Stale(length)), scenarios="rollback")
    assert statuses(report) == {"speculative rollback", "rollback of several steps", "rollback, then reorder"}, report
    assert "but should not" in " ".join(str(report).split())


def test_a_mask_that_is_kept_after_a_rollback_of_several_steps(monkeypatch):
    """A rollback of the last step alone leaves the longest call as long as it was, so it cannot show this."""
    forward, visible = Attention.forward, Attention.visible

    def remembers(self, x, cache, mask, pos):
        self.__dict__["masks"] = None if cache is None or mask is not None else vars(cache).setdefault("masks", {})
        return forward(self, x, cache, mask, pos)

    def keeps(self, query, slot, mask):
        seen = visible(self, query, slot, mask)
        if self.masks is None or len(query) == 1:
            return seen
        longest = self.masks.setdefault((self.layer, len(query)), seen)
        if longest.size(-1) < seen.size(-1):
            self.masks[self.layer, len(query)] = longest = seen
        return longest[..., : seen.size(-1)]

    monkeypatch.setattr(Attention, "forward", remembers)
    report = check_cache(**functions(Decoder(), length=80), scenarios="rollback")
    report.assert_correct(require=["rollback of several steps", "speculative rollback"])
    monkeypatch.setattr(Attention, "visible", keeps)
    for length in (24, 48, 128):
        report = check_cache(**functions(Decoder(), length=length), scenarios="rollback")
        assert statuses(report) == {"rollback of several steps"}, report
        assert "but should not" in " ".join(str(report).split()), report


@pytest.mark.parametrize("left", [0, 1, 20])
def test_a_crop_that_cannot_go_back_far(left, monkeypatch):
    """A cache that only knows how to take back the newest step, or never becomes empty."""
    crop = Cache.crop

    def broken(self, count):
        crop(self, max(count, left - self.lengths[0]) if left < 20 else max(count, -5))

    monkeypatch.setattr(Cache, "crop", broken)
    report = check_cache(**functions(Decoder()), scenarios="rollback")
    assert statuses(report) == ({"rollback of several steps"} if left else set()), report


def test_a_crop_to_the_end_of_a_page(monkeypatch):
    crop = Cache.crop

    def broken(self, count):
        crop(self, count)
        if self.lengths[0] % 16 == 0:
            last = torch.arange(self.lengths[0]) % 16 == 15
            self.values = [x.masked_fill(last[:, None], 0) for x in self.values]

    monkeypatch.setattr(Cache, "crop", broken)
    report = check_cache(**functions(Decoder(), length=128), scenarios=["speculative"])
    assert "holds zeros" in report.results[0].why, report


@pytest.mark.parametrize("name, method", [(name, METHODS[name]) for name in ("reorder", "repeat", "select")])
def test_beams_begin_with_one_row(name, method, monkeypatch):
    correct = getattr(Cache, method)

    def broken(self, argument):
        one = len(self.keys[0]) == 1
        correct(self, argument)
        if one:
            self.each(lambda x: torch.cat((x[:1], x[1:].flip(-1))))

    monkeypatch.setattr(Cache, method, broken)
    report = check_cache(**functions(Decoder()), scenarios=[name])
    assert statuses(report) == {f"{name} from one row"}, report


def test_a_cache_whose_rows_are_fixed_refuses_to_grow(monkeypatch):
    monkeypatch.setattr(Cache, "reorder_cache", lambda self, rows: self.each(lambda x: x.copy_(x[rows])))
    report = check_cache(**functions(Decoder()), scenarios=["reorder"])
    report.assert_correct(require="reorder")
    assert statuses(report, "not run") == {"reorder from one row"}

    def fails(self, rows):
        raise RuntimeError("no such rows")

    monkeypatch.setattr(Cache, "reorder_cache", fails)
    report = check_cache(**functions(Decoder()), scenarios=["reorder"], skip="then")
    assert (statuses(report), statuses(report, "not run")) == ({"reorder"}, {"reorder from one row"}), report


def test_rows_with_padding_that_change_places(monkeypatch):
    visible = Attention.visible

    def broken(self, query, slot, mask):
        if mask is not None and self.cached:
            self.__dict__["first"] = first = mask if len(query) > 1 else self.first
            mask = torch.cat((first, mask[:, first.size(1) :]), 1)
        return visible(self, query, slot, mask)

    monkeypatch.setattr(Attention, "visible", broken)
    report = check_cache(**functions(Decoder()), scenarios=["padding", "reorder"])
    assert statuses(report) == {"left padding, then reorder"} and "(padding), but should not" in str(report), report


class Inside(Decoder):
    """Its only cache is inside, and `keeps` makes it survive the end of a text."""

    keeps = False

    def begin(self, ids, start):
        if not start and not (self.keeps and hasattr(self, "held")):
            self.held = Cache()
        return self(ids, self.held, None, (start + torch.arange(ids.size(1))).expand_as(ids))


@pytest.mark.parametrize("keeps, reset", [(False, False), (True, False), (True, True)])
def test_a_second_text_in_the_same_module(keeps, reset):
    model = Inside()
    model.keeps = keeps
    step = lambda ids, cache, pos: cache.begin(ids, int(pos[0, 0]))  # noqa: E731
    more = dict(reset=lambda cache: delattr(cache, "held")) if reset else {}
    report = check_cache(**functions(model, new=copies_of(model), step=step, **more), scenarios=["batches", "reset"])
    assert statuses(report) == ({"reuse after reset"} if keeps and not reset else set()), report
    assert ("not empty at position 0: see reset)" in " ".join(str(report).split())) == (keeps and not reset)


def test_a_transformers_model_that_makes_its_own_cache():
    from transformers import DynamicCache, LlamaForCausalLM

    class Own(DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            keys, values = super().update(keys, values, *args, **kwargs)
            return keys, values.roll(1, 2) if keys.size(2) > 30 else values

    class Mine(LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, use_cache=None, **kwargs):
            made = Own() if use_cache and past_key_values is None else past_key_values
            return super().forward(input_ids=input_ids, past_key_values=made, use_cache=use_cache, **kwargs)

    report = check_cache(Mine(tiny("llama").config), length=48, scenarios=["decode"])
    wrong = {result.cache: result.status for result in report.results if result.scenario == "decode"}
    assert wrong == dict(own="wrong", static="correct"), report


@pytest.mark.parametrize("forgets", [False, True])
def test_padding_in_your_own_loop(forgets):
    """The loop forgets the mask after the prompt, but only with a cache."""
    model = Decoder()

    def generate(ids, count, use_cache, mask):
        cache, mask = Cache() if use_cache else None, torch.ones_like(ids) if mask is None else mask
        for i in range(count):
            new, pos = (ids[:, -1:] if use_cache and i else ids), (mask.cumsum(1) - 1).clamp(min=0)
            seen = torch.ones_like(mask) if forgets and use_cache and i else mask
            chosen = model(new, cache, seen, pos[:, -new.size(1) :])[:, -1:].argmax(-1)
            ids, mask = torch.cat((ids, chosen), 1), torch.cat((mask, torch.ones_like(chosen)), 1)
        return ids

    report = check_cache(**functions(model, generate=generate), scenarios=["generate"])
    assert statuses(report) == ({"generate with left padding"} if forgets else set()), report
    assert len(report.results) == 2 and not statuses(report, "not run"), report


@pytest.mark.parametrize("forgets", [False, True])
def test_rows_that_end_before_others(forgets):
    """The loop drops a row that has ended, and so must the cache."""
    model = Decoder()

    def generate(ids, count, use_cache, eos=None):
        cache, texts, alive = Cache() if use_cache else None, ids.tolist(), torch.arange(len(ids))
        for _ in range(count):
            chosen = newest(model, ids, cache).argmax(-1)
            for row, token in zip(alive.tolist(), chosen.tolist()):
                texts[row].append(token)
            going = chosen != eos if eos is not None else chosen >= 0
            if use_cache:
                cache.each(lambda x: x[: going.sum()] if forgets else x[going])  # noqa: B023
            alive, ids = alive[going], torch.cat((ids, chosen[:, None]), 1)[going]
            if not len(alive):
                break
        return torch.tensor([text + [0] * (max(map(len, texts)) - len(text)) for text in texts])

    report = check_cache(**functions(model, generate=generate), scenarios=["generate"], skip="padding")
    assert report.exit_code == forgets and ("the second call" in str(report.results[0].why)) == forgets, report


@pytest.mark.parametrize("leaves", ["the length", "the cache in the module"])
def test_going_on_after_an_exception(leaves):
    model = Decoder()

    def step(ids, cache, pos):
        ahead, cache.ahead = getattr(cache, "ahead", 0), 1
        if leaves == "the length":  # it counts tokens before it has seen them
            pos = pos * (1 + ahead)
        current = model.__dict__.setdefault("current", cache) if leaves != "the length" else cache
        logits = model(ids, current, None, pos)
        cache.ahead = 0
        model.__dict__.pop("current", None)
        return logits

    report = check_cache(**functions(model, step=step), scenarios=["batches", "exception"])
    assert statuses(report) == {"going on after an exception"}, report


@pytest.mark.parametrize("ends, call", [(False, "second"), (True, "third")])
def test_what_a_call_of_generate_leaves_behind(ends, call):
    """Always, or only if an exception keeps it from its end."""
    model = Decoder()

    def generate(ids, count, use_cache):
        cache = model.__dict__.setdefault("kept", Cache()) if use_cache else None
        for i in range(count):
            new = ids[:, -1:] if use_cache and i else ids
            pos = torch.arange(ids.size(1) - new.size(1), ids.size(1)).expand_as(new)
            ids = torch.cat((ids, model(new, cache, None, pos)[:, -1:].argmax(-1)), 1)
        if ends:
            model.__dict__.pop("kept", None)
        return ids

    report = check_cache(**functions(model, generate=generate), scenarios=["generate"])
    why = report.results[0].why
    assert report.exit_code == 1 and (f"the {call} call" in why or (ends and "Sizes of tensors" in why)), report
    assert not hasattr(model, "kept")


def test_a_call_without_a_cache_in_between():
    model = Decoder()

    def full(ids):
        model.__dict__["run"] = model.__dict__.get("run", 0) + 1
        return model.full(ids)

    def step(ids, cache, pos):
        if cache.lengths[0] == 0:
            cache.run = model.run
        return model(ids, cache, None, pos + (cache.run != model.run))

    report = check_cache(**functions(model, full=full, step=step), scenarios=["batches", "two caches"])
    assert statuses(report) == {"two caches at once"}, report


def test_a_static_cache_that_is_full(monkeypatch):
    model = patched_update(
        monkeypatch.setattr, lambda self, k, v, key, layer: (k, v.roll(1, 2) if self.lengths[layer] == self.room else v)
    )
    report = check_cache(model, length=48, caches="static", scenarios=["decode", "chunks"], skip="from")
    assert statuses(report) == {"decode", "chunks that double"}, report


# -- which module ------------------------------------------------------------------------------------------------------


def test_a_module_that_functions_only_call_is_found():
    model, seen = Decoder().train(), set()
    model.wte.register_forward_hook(lambda module, ids, output: seen.add((output.dtype, module.training)))
    weight = model.wte.weight.clone()
    full = lambda ids: model.full(ids)  # noqa: E731
    report = check_cache(**functions(model, full=full), scenarios=["decode"], dtype="bfloat16")
    report.assert_correct()
    assert "bfloat16 on cpu" in report.title and {(torch.bfloat16, False), (torch.float64, False)} <= seen
    assert model.training and torch.equal(model.wte.weight, weight)


def with_copies(model, **more):
    """Return an adapter whose every call runs on a copy of the module, so that no module we can see is called twice."""
    copied = lambda: copy.deepcopy(model).eval()  # noqa: E731
    full = lambda ids: copied().full(ids)  # noqa: E731
    new = lambda rows, length: (copied(), Cache())  # noqa: E731
    step = lambda ids, cache, pos: cache[0](ids, cache[1], None, pos)  # noqa: E731
    return dict(full=full, new=new, step=step, context=128, length=120) | more


def test_weights_that_nothing_reads_are_not_perturbed():
    """If the module that we find is a copy that nobody calls again, its weights would only shrink the limit."""
    said = "full and step do not read the weights that we found: if they copy a module, pass it as model="
    options = dict(scenarios=["decode", "mixed"])
    report = check_cache(**with_copies(Decoder()), **options)
    report.assert_correct()
    assert f"perturbed weights and float64, because {said}" in report.beyond, report
    with pytest.raises(ValueError, match=rf"dtype=torch\.bfloat16: {said}$"):
        check_cache(**with_copies(Decoder()), dtype="bfloat16")
    model = Decoder()
    report = check_cache(model, **with_copies(model), **options, dtype="bfloat16")
    report.assert_correct()
    assert "bfloat16 on cpu" in report.title and not report.beyond, report


def test_a_layer_behind_zeros_is_seen_if_we_know_the_module(monkeypatch):
    """With copies alone we cannot fill the zeros, and the report says so."""
    model, update = Decoder(), Cache.update
    model.blocks[1].o.weight.data.zero_()

    def loses(self, key, value, layer):
        value = value * 0 if layer == 1 and value.size(2) == 1 else value
        return update(self, key, value, layer)

    monkeypatch.setattr(Cache, "update", loses)
    report = check_cache(**with_copies(model), scenarios=["decode"])
    assert "perturbed weights" in report.beyond, report
    assert check_cache(model, **with_copies(model), scenarios=["decode"]).exit_code == 1


def full_from_a_copy(model):
    other = copy.deepcopy(model)
    return dict(full=other.full)


def step_from_copies_of_a_copy(model):
    other = copy.deepcopy(model)
    copies = dict(new=lambda rows, length: (copy.deepcopy(other).eval(), Cache()))
    return copies | dict(step=lambda ids, cache, mask, pos: cache[0](ids, cache[1], mask, pos))


def step_with_weights_of_its_own(model):
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    step = lambda ids, cache, mask, pos: torch.func.functional_call(model, weights, (ids, cache, mask, pos))  # noqa: E731
    return dict(step=step)


@pytest.mark.parametrize(
    "apart, named",
    [
        (full_from_a_copy, False),
        (full_from_a_copy, True),
        (step_from_copies_of_a_copy, False),
        (step_with_weights_of_its_own, False),
    ],
)
def test_two_modules_with_equal_weights_are_not_perturbed(apart, named):
    """Each would get weights of its own, and no cache could be correct."""
    model = Decoder()
    adapter, given = functions(model, **apart(model)), (model,) if named else ()
    report = check_cache(*given, **adapter, scenarios=["decode", "mixed"])
    report.assert_correct()
    said = "full and step read different weights: let them share their parameters"
    assert f"perturbed weights and float64, because {said}" in report.beyond, report
    with pytest.raises(ValueError, match=said):
        check_cache(*given, **adapter, dtype="float16")


def test_modules_that_share_their_parameters_are_perturbed():
    model = Decoder()
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    report = check_cache(**functions(model, full=other.full), scenarios=["decode"])
    report.assert_correct()
    assert not report.beyond, report


def test_what_computes_in_another_dtype_is_named():
    """A copy in float32 of weights in bfloat16."""
    model = Decoder()
    new = lambda rows, length: (copy.deepcopy(model).float(), Cache())  # noqa: E731
    step = lambda ids, cache, mask, pos: cache[0](ids, cache[1], mask, pos)  # noqa: E731
    report = check_cache(model, **functions(model, new=new, step=step), scenarios=["batches"], dtype="bfloat16")
    assert report.beyond == "steps in bfloat16: they compute in float32", report
    assert not check_cache(model, **functions(model), scenarios=["batches"], dtype="bfloat16").beyond


# -- mistakes in the adapter -------------------------------------------------------------------------------------------


LOGITS = r"step must return logits \(., .*, 61\) or \(logits, cache\), but returned "
CALLED = "cannot be called as ADAPTERS.md says: "


@pytest.mark.parametrize(
    "function, message",
    [
        (dict(step=lambda ids, cache: SimpleNamespace(logits=ids)), LOGITS + "SimpleNamespace"),
        (dict(step=lambda ids, cache: (cache, ids)), LOGITS + r"Cache \(\), Tensor \("),
        (dict(step=lambda ids, cache: torch.zeros(3, 2, 7)), LOGITS + r"Tensor \(3, 2, 7\)"),
        (dict(step=lambda ids, cache, hidden: None), f"step {CALLED}missing a required argument: 'hidden'"),
        (
            dict(full=lambda ids: ids.numpy()),
            r"full must return .*, a tensor \(., 24, V\), but returned ndarray \(., 24\)",
        ),
        (dict(full=lambda ids, extra: ids), f"full {CALLED}missing a required argument: 'extra'"),
        (dict(new=lambda rows: Cache()), f"new {CALLED}too many positional arguments"),
        (dict(reorder=lambda cache: None), f"reorder {CALLED}too many positional arguments"),
        (dict(generate=lambda ids, count, use_cache: ids), "generate must return 8 new tokens per row, .* Tensor"),
    ],
)
def test_a_mistake_in_the_adapter_is_no_wrong_cache(function, message):
    report = check_cache(**functions(Decoder(), vocab_size=61) | function, scenarios=["decode", "reorder", "generate"])
    assert report.exit_code == 2 and not statuses(report), report
    said = whys(report, "error")
    assert said and all(re.search(message + r".* \(test_check_cache\.py:[0-9]+\)", why) for why in said), report


def test_a_context_that_is_too_short_is_named():
    model = Decoder("learned")
    model.context = None
    adapter = functions(model, context=None, length=None)
    (result,) = check_cache(**adapter, scenarios=["decode"]).results
    assert result.status == "error" and result.why.startswith("raises IndexError")
    assert result.scenario == "every scenario, with length=300"
    check_cache(**adapter | dict(length=128), scenarios=["decode"]).assert_correct()


def test_a_cache_that_cannot_be_made_is_an_error():
    """Here the second kind, so the scenarios with the first are correct."""

    def new(rows, length, kind):
        return Cache() if kind == "own" else Cache(length).no_such_method()

    report = check_cache(**functions(Decoder(), new=new), scenarios=["decode"])
    assert report.exit_code == 2 and statuses(report, "correct") == {"decode", "decode from 1 token"}, report
    assert re.match(r"raises AttributeError at test_check_cache\.py:[0-9]+: ", whys(report, "error")[0]), report


# -- causes ------------------------------------------------------------------------------------------------------------


class Window(Cache):
    """The first `sinks` tokens and the newest `size`, in a ring of slots. A chunk is read next to the old slots."""

    def __init__(self, sinks, size):
        super().__init__()
        self.sinks, self.size, self.at, self.kept = sinks, size, [None] * LAYERS, [None] * LAYERS

    def update(self, key, value, layer):
        T, start = key.size(2), self.lengths[layer]
        self.lengths[layer] += T
        slots, at = (key, value), torch.arange(start, start + T)
        if start:
            *old, old_at = self.kept[layer]
            slots, at = [torch.cat(pair, 2) for pair in zip(old, slots)], torch.cat((old_at, at))
        keep = ((at < self.sinks) | (at > at[-1] - self.size)).nonzero()[:, 0]
        keep = keep[(at[keep] % self.size).argsort()]
        self.kept[layer] = *(x[:, :, keep] for x in slots), at[keep]
        *slots, self.at[layer] = self.kept[layer] if T == 1 else (*slots, at)
        return slots


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("missing", [0, 1])
def test_sinks_and_slots_in_any_order(sinks, missing, monkeypatch):
    """Keys show which position is in which slot."""
    seen = lambda self, query, slot, mask: (slot <= query) & ((slot > query - 12) | (slot < sinks))  # noqa: E731
    monkeypatch.setattr(Attention, "visible", seen)
    new = lambda rows, length: Window(sinks, 12 - missing)  # noqa: E731
    report = check_cache(**functions(Decoder(), new=new), scenarios=["decode", "chunks of mixed"])
    assert report.exit_code == missing, report
    assert all(re.search("needs position [0-9]+, which is in no slot", why) for why in whys(report)), report


def first_cause(model, change, scenario="decode", **more):
    """Return the cause of the first wrong scenario, if change(ids, pos) is what reaches the model."""
    step = lambda ids, cache, mask, pos: model(*change(ids, cache, mask, pos))  # noqa: E731
    return whys(check_cache(**functions(model, step=step), scenarios=[scenario], **more))[0]


@pytest.mark.parametrize("loops", [False, True])
def test_a_step_may_feed_its_rows_one_by_one(loops):
    """And so may a run without a cache."""
    model = Decoder()
    full = lambda ids: torch.cat([model.full(row) for row in ids.split(1)]) if loops else model.full(ids)  # noqa: E731

    def step(ids, caches, pos):
        rows = zip(ids.split(1), caches, pos.split(1))
        parts = [zip(row.split(3, 1), at.split(3, 1)) for row, _, at in rows]
        return torch.cat(
            [
                torch.cat([model(part, cache, None, at + 2 * (at > 20) * (i == 1)) for part, at in row], 1)
                for i, (row, cache) in enumerate(zip(parts, caches))
            ]
        )

    new = lambda rows, length: [Cache() for _ in range(rows)]  # noqa: E731
    report = check_cache(**functions(model, full=full, step=step, new=new), scenarios=["decode", "double"])
    assert report.exit_code == 1
    line = "the new key of row 1, position 21 is wrong on arrival: its position is 23"
    assert all(line in why for why in whys(report)), report


# -- what a step refuses -----------------------------------------------------------------------------------------------


def refusing(most, error, prompts=False):
    """Return the step of a decoder that takes at most so many tokens, unless it is a prompt."""
    model = Decoder()

    def step(ids, cache, mask, pos):
        if ids.size(1) > most and not (prompts and cache.lengths[0] == 0):
            raise error(f"takes {most} tokens, got {ids.size(1)}")
        return model(ids, cache, mask, pos)

    return functions(model, step=step)


@pytest.mark.parametrize("error", [ValueError, AssertionError, NotImplementedError])
def test_a_step_that_refuses_chunks_in_words(error):
    some = ["decode", "chunks", "left padding", "reset"]
    report = check_cache(**refusing(1, error, prompts=True), scenarios=some, skip="generate")
    report.assert_correct(require=["decode", "left padding, then reorder", "reuse after reset"])
    said = {result.scenario: (result.status, result.why) for result in report.results}
    for name in ("chunks of mixed sizes", "chunks that double", "left padding in chunks"):
        assert said[name][0] == "not run" and "takes 1 tokens, got" in said[name][1], report


@pytest.mark.slow
def test_a_step_that_refuses_every_chunk_without_words():
    """It may take one token at a time, or be broken. If a chunk has worked, it is broken."""
    model = Decoder()
    hint = ". If your step takes one token at a time, pass chunk=1"

    def refusing_from(start):
        def step(ids, cache, mask, pos):
            if ids.size(1) > 1 and cache.lengths[0] >= start:
                raise AssertionError  # not an assert, to which pytest would give words
            return model(ids, cache, mask, pos)

        return functions(model, step=step)

    for start, hinted in ((1, True), (25, False)):
        report = check_cache(**refusing_from(start))
        raised = {result.scenario: result.why for result in report.results if result.status == "wrong"}
        assert "chunks that double" in raised and "decode" not in raised, report
        assert all(why.startswith("raises AssertionError at test_check_cache.py:") for why in raised.values()), report
        assert all((hint in why) == hinted for why in raised.values()), report
    check_cache(**refusing_from(1), chunk=1).assert_correct(require=["decode", "chunks that double", "reorder"])


def test_a_step_that_keeps_nothing():
    """It returns logits alone, and `new` returns None."""
    model = Decoder()
    step = lambda ids, cache, pos: model(ids, None, None, pos)  # noqa: E731
    report = check_cache(**functions(model, new=lambda rows, length: None, step=step))
    (result,) = [result for result in report.results if result.status != "not run"]
    assert (result.scenario, result.status) == ("every scenario", "error") and report.exit_code == 2, report
    assert result.why.startswith("nothing keeps the past: new returns None, and step only logits."), report


def test_rows_of_different_lengths_need_no_chunks():
    model = Decoder()

    def step(ids, cache, pos, lengths):
        if ids.size(1) > 1 and pos[:, 0].any():
            raise NotImplementedError("one token at a time")
        real = torch.arange(ids.size(1)) < lengths[:, None] if ids.size(1) > 1 else torch.ones_like(ids)
        cache.real = torch.cat((getattr(cache, "real", real[:, :0]), real.long()), 1)
        return model(ids, cache, cache.real, pos)

    report = check_cache(**functions(model, step=step), scenarios=["different"])
    assert statuses(report, "correct") == {"rows of different lengths"}, report
    assert statuses(report, "not run") == {"rows of different lengths in chunks"}, report


def test_an_exception_comes_once_and_first():
    """Also if its words differ, or the kind of cache."""

    class Broken(Decoder):
        def step(self, ids, cache, mask, pos):
            if mask is None and pos[0, 0] > 10:
                return [ids][len(ids) + 1]
            return super().step(ids, cache, mask, pos + (mask is not None) * (pos > 10))

    shown = str(check_cache(Broken(), length=48, scenarios=["decode", "chunks", "left padding"], skip="then"))
    assert shown.count("IndexError") == 1, shown
    first = shown.partition("\n")[2]
    assert first.startswith("WRONG    decode, ") and first.find("IndexError") < first.find("its position is"), shown


def test_an_exception_that_is_no_refusal():
    """A mistake in the arithmetic, and words about what the same step takes elsewhere."""
    model = Decoder()

    def arithmetic(ids, cache, mask, pos):
        np.zeros(2) + np.zeros(ids.size(1) if cache.lengths[0] and ids.size(1) > 1 else 1)  # a ValueError of NumPy
        return model(ids, cache, mask, pos)

    def sometimes(ids, cache, mask, pos):
        if mask is not None and cache.lengths[0]:
            raise ValueError("no such mask")
        return model(ids, cache, mask, pos)

    for step, name in ((arithmetic, "chunks that double"), (sometimes, "left padding")):
        report = check_cache(**functions(model, step=step), scenarios=[name, "decode"], skip="then")
        assert report.exit_code == 1 and name in statuses(report), report


def test_a_limit_on_chunks():
    """The ring has room for few new tokens. A decoder that mishandles a chunk is found in short ones."""
    some = ["decode", "left padding in chunks", "repeat", "reset"]
    for more in (dict(), dict(chunk=5)):
        report = check_cache(**refusing(5, ValueError) | more, scenarios=some)
        limited = {"left padding in chunks", "reuse after reset", "repeat"} <= statuses(report, "correct")
        assert limited == bool(more), report
    report.assert_correct()
    broken = refusing(5, ValueError)
    step = broken["step"]
    broken["step"] = lambda ids, cache, mask, pos: step(ids, cache, mask, pos - (ids.size(1) == 5) * (pos > 30).long())
    assert check_cache(**broken, chunk=5, scenarios=["decode", "chunks"]).exit_code == 1


@pytest.mark.parametrize("wrong", [lambda output: output.logits, lambda output: output[0].no_such_method()])
def test_a_mistake_in_the_first_step_is_an_error_with_its_line(wrong):
    model = Decoder()
    step = lambda ids, cache, mask, pos: wrong((model(ids, cache, mask, pos), cache))  # noqa: E731
    report = check_cache(**functions(model, step=step))
    assert report.exit_code == 2 and not statuses(report), report
    line = r"the first step, with an empty cache, raises AttributeError at test_check_cache.py:[0-9]+: "
    assert re.search(line, " ".join(str(report).split()))


def test_a_first_step_that_fails_for_some_batches_is_wrong():
    """As after a validation batch of two rows whose keys stay in the module."""
    model = Decoder()

    def step(ids, cache, mask, pos):
        if len(ids) != 2:
            raise RuntimeError("Sizes of tensors must match")
        return model(ids, cache, mask, pos)

    report = check_cache(**functions(model, step=step), scenarios=["decode", "equal pages"])
    assert report.exit_code == 1 and "decode" in statuses(report), report


def test_what_is_not_run_is_one_line_unless_verbose():
    """And if nothing has run, the report says why at once."""
    model = Decoder()
    report = check_cache(**functions(model, step=lambda ids, cache, pos: model(ids, cache, None, pos), length=24))
    assert str(report).count("not run") == 1 and "not run  9 scenarios need" in str(report), report
    assert report.text(verbose=True).count("not run") == 4 and "the step takes no mask" in report.text(verbose=True)
    report = check_cache(**other_names(model), scenarios=["left padding"], skip=["generate", "then"])
    assert "left padding, left padding in chunks: the step takes no mask" in str(report), report


def test_a_line_of_several_scenarios_says_whose_reason_it_gives():
    def result(name, why):
        return Result(name, "own", "wrong", why)

    whys = ["layer 0: slot 3 holds zeros", "layer 0: slot 4 holds zeros", "layer 1: slot 3 holds zeros"]
    shown = str(Report("title", [result(*pair) for pair in zip(("decode", "reorder", "reset"), whys)], "much"))
    assert "decode, reorder: in decode, layer 0: slot 3 holds zeros\n" in shown
    assert "WRONG    reset: layer 1: slot 3 holds zeros\n" in shown


# -- scenarios of a caller ---------------------------------------------------------------------------------------------


def test_a_scenario_of_the_caller():
    @scenario("compaction", needs={"crop"})
    def compact(start, sizes):
        stream = start(pads=(0, 1, 2)).feed(sizes.third)
        stream.crop(1)
        stream.cache.compact()
        stream.feed(*sizes.ones)

    for broken in (False, True):
        Cache.compact = lambda self: self.each(lambda x: x * 1.5 if broken else x)  # noqa: B023
        report = check_cache(**functions(Decoder()), scenarios=["decode", compact])
        assert (statuses(report), len(report.results)) == ({"compaction"} if broken else set(), 3), report
    del Cache.compact
    report = check_cache(**functions(Decoder(), new=lambda rows, length: NoCrop()), scenarios=[compact])
    assert report.results[0].why == "the adapter has no crop, the cache no crop", report


def test_a_scenario_that_compares_nothing_has_not_run():
    nothing = scenario("nothing")(lambda start, sizes: start())
    report = check_cache(**functions(Decoder()), scenarios=[nothing])
    assert report.exit_code == 2 and report.results[0].why == "it compares no logits", report


def test_the_readme_lists_the_scenarios_in_their_order():
    page = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    table = page.partition("## The scenarios")[2].partition("\n## ")[0]
    listed = [name.strip() for row in re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)[1:] for name in row.split(";")]
    assert listed == [one.name for one in SCENARIOS]


def test_a_wrong_token_is_named():
    previous = lambda ids, *rest: (torch.cat((ids[:, :1], ids[:, :-1]), 1), *rest)  # noqa: E731
    said = first_cause(Decoder("learned"), previous, "chunks of mixed")  # no other row has that token
    assert "wrong on arrival: wrong input: the token" in said, said


def test_a_key_that_its_cache_changes_is_named(monkeypatch):
    update = Cache.update
    changed = lambda self, key, *rest: update(self, key.flip(-1) if self.lengths[0] > 20 else key, *rest)  # noqa: E731
    monkeypatch.setattr(Cache, "update", changed)
    said = first_cause(Decoder("learned"), lambda *arguments: arguments)
    assert "wrong on arrival: changed on the way into the cache or" in said, said


def test_rotary_positions_may_count_the_padding(monkeypatch):
    """Then no key is as it is without padding, and a mistake elsewhere must not be blamed on the keys."""

    def count(ids, cache, mask, pos):
        return ids, cache, mask, (cache.lengths[0] + torch.arange(ids.size(1))).expand_as(ids)

    model = Decoder()
    adapter = functions(model, step=lambda ids, cache, mask, pos: model(*count(ids, cache, mask, pos)))
    check_cache(**adapter, scenarios=["padding"], skip=["generate"]).assert_correct(require="left padding in chunks")
    monkeypatch.setattr(Attention, "scale", lambda self, T: 0.3 if T == 1 else 1 / SIZE**0.5)
    said = first_cause(model, count, "left padding")
    assert "gives slot" in said and "scale" in said, said


class Behind(Decoder):
    """The text comes behind a few slots that the model makes itself, such as those of an image."""

    def __init__(self, count):
        super().__init__()
        self.front = torch.nn.Parameter(torch.randn(count, 32))

    def forward(self, ids, cache, mask, pos):
        front, embed = self.front.expand(len(ids), -1, -1), type(self.wte).forward
        pos = pos + front.size(1)
        if cache is None or not cache.lengths[0]:
            pos = torch.cat((torch.arange(front.size(1)).expand(len(ids), -1), pos), 1)
            self.wte.forward = lambda ids: torch.cat((front, embed(self.wte, ids)), 1)
        else:
            self.wte.forward = partial(embed, self.wte)
        return super().forward(ids, cache, mask, pos)[:, -ids.size(1) :]


@pytest.mark.parametrize("count", [1, 5])
def test_slots_in_front_of_the_text(count, monkeypatch):
    model, update = Behind(count), Cache.update
    step = lambda ids, cache, pos: model(ids, cache, None, pos)  # noqa: E731
    check_cache(**functions(model, step=step), scenarios=["decode", "reorder"]).assert_correct(require=["reorder"])

    def changed(change):
        """Return the cause if change(key, value) is what goes into the cache in decode steps."""
        broken = lambda self, k, v, layer: update(self, *change(k, v) if k.size(2) == 1 else (k, v), layer)  # noqa: E731
        monkeypatch.setattr(Cache, "update", broken)
        return check_cache(**functions(model, step=step), scenarios="decode", skip="from").results[0].why

    assert "the key of row 0, position 16, but holds it rounded or scaled" in changed(lambda k, v: (k * 1.5, v))
    assert "the new value of row 0, position 16 is wrong on arrival: changed" in changed(lambda k, v: (k, v.flip(-1)))


def test_equal_tokens_have_equal_values(monkeypatch):
    """In layer 0, what belongs in a slot is in many slots, if the vocabulary is small."""
    only_keys = lambda self, rows: setattr(self, "keys", [x[rows] for x in self.keys])  # noqa: E731
    monkeypatch.setattr(Cache, "reorder_cache", only_keys)
    monkeypatch.setattr("bugs.V", 5)
    (result,) = check_cache(**functions(Decoder()), scenarios=["reorder"], skip=["then", "from"]).results
    held = r"slot [0-9]+ should hold the value of row [0-9], position ([0-9]+), but holds that of row 0, position \1"
    assert re.search(held, result.why), result.why


def test_heads_of_queries_in_another_order(monkeypatch):
    split = Attention.split
    blocks = lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # noqa: E731
    broken = lambda self, x: blocks(split(self, x)) if x.size(1) == 1 and x.size(2) == 32 else split(self, x)  # noqa: E731
    monkeypatch.setattr(Attention, "split", broken)
    said = first_cause(Decoder(), lambda *arguments: arguments)
    assert "mostly the query of" in said and "the order of its heads" in said, said


def test_a_state_before_attention_is_named():
    """Each token is mixed with the one before it, which a step of several tokens forgets."""
    model = Decoder()
    embed = model.wte.forward

    def run(ids, cache, pos):
        x = embed(ids)
        before = cache.before if cache and ids.size(1) == 1 and pos.max() else x[:, :1] * 0
        model.wte.forward = lambda ids: x + torch.cat((before, x[:, :-1]), 1)
        if cache:
            cache.before = x[:, -1:]
        return model(ids, cache, None, pos)

    full = lambda ids: run(ids, None, torch.arange(ids.size(1)).expand_as(ids))  # noqa: E731
    adapter = functions(model, full=full, step=lambda ids, cache, pos: run(ids, cache, pos))
    report = check_cache(**adapter, scenarios=["decode", "double"])
    assert statuses(report) == {"chunks that double"}, report
    assert "wrong on arrival: a state that earlier tokens leave before attention" in whys(report)[0], report


def test_int8_with_one_scale_is_rounding(monkeypatch):
    """The scale of a whole tensor is coarse for a head with small values."""
    model, update = Decoder(), Cache.update
    project, small = model.blocks[0].v.forward, torch.tensor([1.0] * SIZE + [0.005] * SIZE)
    model.blocks[0].v.forward = lambda x: project(x) * small.to(x)

    def broken(self, key, value, layer):
        scale = value.abs().max() / 127
        return update(self, key, (value / scale).round() * scale, layer)

    monkeypatch.setattr(Cache, "update", broken)
    said = first_cause(model, lambda *arguments: arguments)
    assert "rounded or scaled" in said, said


def test_where_attention_is_hidden_the_cause_is_unknown(monkeypatch):
    """flex_attention, for example."""
    pattern = lambda x: torch.special.softmax(x, -1)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: pattern(x))
    said = first_cause(Decoder(), lambda ids, cache, mask, pos: (ids, cache, mask, pos * 0))
    assert said.startswith("cause unknown: without a cache, we see no attention"), said


# -- what could hide a wrong cache, or make a correct one look wrong ---------------------------------------------------


class Pages(Cache):
    """Pages of 16 tokens. Rows of a reordered batch that share a past share their newest page until it is full."""

    page = None

    def reorder_cache(self, rows):
        super().reorder_cache(rows)
        self.owner = [rows.tolist().index(row) for row in rows.tolist()]
        self.page = self.lengths[0] // 16 if self.lengths[0] % 16 else None

    def update(self, key, value, layer):
        owner = self.owner if self.lengths[layer] // 16 == self.page else range(len(key))
        for row in range(len(key)):  # the last one that writes wins
            key[owner[row]], value[owner[row]] = key[row].clone(), value[row].clone()
        return super().update(key[[*owner]], value[[*owner]], layer)


def test_rows_that_share_a_past_must_not_share_their_future():
    adapter = functions(Decoder(), new=lambda rows, length: Pages(), length=96)
    report = check_cache(**adapter, scenarios=["decode", "reorder"])
    assert "reorder" in statuses(report), report


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd",
    [
        lambda B, T: T == 7,
        lambda B, T: T % 2 and T > 6,
        lambda B, T: B in (2, 4),
    ],
)
def test_what_only_some_sizes_show(odd, monkeypatch):
    update = Cache.update

    def broken(self, key, value, layer):
        wrong = odd(len(key), key.size(2))
        return update(self, key.flip(-1) if wrong else key, value, layer)

    monkeypatch.setattr(Cache, "update", broken)
    report = check_cache(**functions(Decoder()), scenarios=["mixed", "batches"])
    assert report.exit_code == 1, report
    wrong = next(result for result in report.results if result.status == "wrong")
    assert odd(*wrong.step), wrong


def test_state_that_grows_with_the_longest_sequence():
    """As the angles of dynamic NTK in transformers, which stay large once a long sequence has been seen."""
    rope = dict(rope_type="dynamic", factor=8.0, rope_theta=10000.0)
    model = tiny("llama", max_position_embeddings=32, rope_parameters=rope)
    new, step = lambda rows, length: None, lambda ids, cache: model(ids, past_key_values=cache).logits
    report = check_cache(full=lambda ids: model(ids).logits, new=new, step=step, length=96, scenarios=["decode"])
    assert report.exit_code == 2, report
    assert "change when later tokens are left out, from position" in report.results[0].why


def test_logits_that_are_not_finite_are_a_fault():
    """Nothing is far from a NaN."""
    model = Decoder()
    full = lambda ids: model.full(ids).log()  # noqa: E731
    step = lambda ids, cache, mask, pos: model(ids, cache, mask, pos).log()  # noqa: E731
    (result,) = check_cache(**functions(model, full=full, step=step), scenarios=["batches"]).results
    assert result.status == "fault" and "not finite" in result.why, result


def test_a_model_that_does_not_look_back_cannot_be_judged():
    table = torch.nn.Embedding(9, 9)
    report = check_cache(full=table, new=lambda rows, length: [], step=lambda ids, cache: table(ids))
    assert report.exit_code == 2 and "we cannot see the cache" in str(report)


@pytest.mark.slow
def test_a_decoder_that_refuses_float64_and_one_that_keeps_a_table(monkeypatch):
    """float64 may fail in any scenario, and nothing that a module makes in float64 may stay."""
    model, forward = Decoder(), Decoder.forward

    def picky(self, *args):
        assert self.wte.weight.dtype == torch.float32
        return forward(self, *args)

    def with_table(self, *args):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.zeros(61, dtype=self.wte.weight.dtype), persistent=False)
        assert self.table.dtype == self.wte.weight.dtype
        return forward(self, *args) + self.table

    for change in (picky, with_table):
        monkeypatch.setattr(Decoder, "forward", change)
        check_cache(**functions(model), scenarios=["decode"]).assert_correct()
    assert not hasattr(model, "table")


@pytest.mark.slow
def test_a_router_that_rounding_moves_does_not_hide_a_wrong_value(monkeypatch):
    """In bfloat16, a different expert moves a few logits more than most bugs do, but not half of them."""
    from transformers.cache_utils import DynamicLayer

    model = family("qwen3_moe")
    options = dict(length=48, dtype=torch.bfloat16, scenarios=["chunks of mixed sizes"], caches=("own",))
    check_cache(model, **options).assert_correct()
    update = DynamicLayer.update

    def broken(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        if values.size(2) > 20:
            values = values.clone()
            values[:, :, 15] = values[:, :, 9]
        return keys, values

    monkeypatch.setattr(DynamicLayer, "update", broken)
    report = check_cache(model, **options)
    assert report.exit_code == 1 and "half of the logits off by" in report.results[0].rule, report


def test_a_decoder_that_exits_is_not_correct():
    def full(ids):
        raise SystemExit(0)

    report = check_cache(**functions(Decoder(), full=full, vocab_size=61))
    assert report.exit_code == 2 and "raises SystemExit" in str(report)


def test_what_belongs_to_the_caller_comes_back():
    class Counts(Decoder):
        """Counts its calls in buffers, and has weights in 8 bits."""

        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1, dtype=torch.long))
            self.register_buffer("seen", torch.zeros(61))
            self.coarse = torch.nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, ids, *args):
            torch.rand(1)
            self.calls += 1
            self.seen += ids.flatten().bincount(minlength=61)
            return super().forward(ids, *args) + self.coarse.to(self.wte.weight.dtype).sum()

    model = Counts().train()
    before, random = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    check_cache(**functions(model), scenarios=["batches"]).assert_correct()
    assert model.training and torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor.float(), before[name].float()), name


# -- what is not the cache's fault, or cannot be run -------------------------------------------------------------------


def test_a_wrong_argument_is_named():
    with pytest.raises(TypeError, match=r"an adapter\. Linear lacks full, new, step"):
        check_cache(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'reorders': an adapter has .*, reorder, "):
        check_cache(Decoder(), reorders=None)
    with pytest.raises(ValueError, match=r"length=500.*the context, 128"):
        check_cache(Decoder(), length=500)
    with pytest.raises(ValueError, match=r"the context, 40$"):
        check_cache(Decoder(), length=48, context=40)
    with pytest.raises(ValueError, match=r"no scenario is called 'beams'\. There are decode, "):
        check_cache(Decoder(), scenarios=["beams"])
    with pytest.raises(ValueError, match=r"dtype=torch\.int8: must be a dtype of torch, such as 'float32'"):
        check_cache(Decoder(), dtype="int8")
    with pytest.raises(ValueError, match=r"caches: no paged\. This decoder has own, static"):
        check_cache(Decoder(), caches="paged")


def test_older_versions_are_refused(monkeypatch):
    """Their own modules call the same functions, so only the number has to be older."""
    model = tiny("llama")
    monkeypatch.setattr("transformers.__version__", "5.3.0")
    with pytest.raises(ImportError, match=r"or newer, but this is 5\.3\.0"):
        check_cache(model)


@pytest.mark.parametrize("mistake", ["", "forgotten", "reused"])
def test_cross_attention(mistake):
    """What the encoder said is an input besides ids. A module must not keep it for the next batch of the same size."""
    model, memory, current, kept = Decoder(), torch.randn(8, 5, 32), [None], {}
    model.cross, embed = torch.nn.MultiheadAttention(32, 4, batch_first=True), model.wte.forward

    def look(ids):
        x, memory = embed(ids), current[0]
        return x if memory is None else x + model.cross(x, memory, memory, need_weights=False)[0]

    model.wte.forward = look

    def full(ids, memory):
        current[0] = memory
        return model.full(ids)

    def step(ids, cache, pos, memory):
        current[0] = memory
        if mistake == "forgotten" and cache.lengths[0]:
            current[0] = None
        if mistake == "reused":
            current[0] = kept.setdefault(len(ids), memory)
        return model(ids, cache, None, pos)

    adapter = functions(model, full=full, step=step, inputs=dict(memory=memory))
    report = check_cache(**adapter, scenarios=["two caches", "batches"])
    assert report.exit_code == bool(mistake), report
    if mistake:
        assert "wrong on arrival: wrong input" in report.results[0].why, report
    with pytest.raises(ValueError, match=r"inputs\['memory'\]: must have one entry for each of the 8 sequences"):
        check_cache(**adapter | dict(inputs=dict(memory=memory[:3])))


@pytest.mark.slow
def test_a_tolerance(monkeypatch):
    patched_update(monkeypatch.setattr, lambda self, k, v, *_: (rounded(k), rounded(v)))
    options = dict(scenarios=["decode", "reorder"])
    report = check_cache(**functions(Decoder()), **options)
    assert report.exit_code == 1
    atol = 2 * max(result.off for result in report.results if result.off)
    check_cache(**functions(Decoder()), **options, atol=atol).assert_correct()
    assert check_cache(**functions(Decoder()), **options, atol=atol / 100).exit_code == 1
    monkeypatch.setattr(Cache, "reorder_cache", lambda self, rows: None)
    assert check_cache(**functions(Decoder()), **options, atol=atol).exit_code == 1


# -- the README ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_readme_shows_what_the_check_prints(tmp_path, monkeypatch, capsys):
    """The decoder is correct and its tests pass. With the crop of ADAPTERS.md the report is that at the top."""
    folder = Path(__file__).parent.parent
    page, adapters = ((folder / name).read_text(encoding="utf-8") for name in ("README.md", "ADAPTERS.md"))
    for text, file in ((page, "mine.py"), (page, "test_cache.py"), (adapters, "broken.py")):
        code = re.search(rf"^```python {file}\n([^`]*)^```", text, re.MULTILINE)[1]
        (tmp_path / file).write_text(code, encoding="utf-8")
    broken, correct = re.findall(r"^```text\n([^`]*)^```", page, re.MULTILINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check-cache", "mine:Decoder"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0 and capsys.readouterr().out == correct
    exec((tmp_path / "broken.py").read_text(encoding="utf-8"), {})
    said, shown = (re.sub(r"logits off by .*?\)|\s+", " ", text) for text in (capsys.readouterr().out, broken))
    assert said == shown
    sys.modules.pop("mine", None)
    env = os.environ | dict(PYTHONPATH=str(folder.parent))
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_cache.py")]
    done = subprocess.run(tests, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert re.search("^9 passed, 19 skipped", done.stdout, re.MULTILINE), done.stdout
