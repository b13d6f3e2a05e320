"""The check itself: each scenario, for each kind of cache."""

from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from check_cache.adapters import PARTS, ROWS, Adapter
from check_cache.reference import MEDIAN, Reference, changed, find_unread, revealing
from check_cache.report import Report, Result, Verdict, as_list, describe, first_line
from check_cache.scenarios import LEAST, SCENARIOS, Scenario, Sizes, Stream


def check_cache(
    model: object = None,
    *,
    inputs: dict[str, torch.Tensor] | None = None,
    length: int | None = None,
    dtype: torch.dtype | str | None = None,
    caches: str | Iterable[str] | None = None,
    scenarios: str | Iterable[str | Scenario] | None = None,
    skip: str | Iterable[str] | None = None,
    atol: float = 0.0,
    progress: Callable[[str], object] | None = None,
    **adapter: object,
) -> Report:
    """Check the cache of a decoder, and return a Report.

    model      a transformers model, or an adapter: an object with the methods full, new and step
    adapter    or an adapter as functions and facts: full, new, step, crop, ... ADAPTERS.md describes them. If we cannot
               find the module from them, pass it as `model`: we perturb its weights and restore them afterwards
    inputs     {name: tensor (8, ...)}, what the decoder reads besides ids: an entry for each of the 8 sequences
    length     tokens per row. None: 300, or three sliding windows, and at most the context or 1024
    dtype      of weights and cache, as in torch.bfloat16 or "bfloat16". None: float32
    caches     kinds of cache: "own" or "static". None: all that the decoder has
    scenarios  only those whose name contains one of these words, or your own, made with @scenario
    skip       words: the scenarios whose name contains one do not run, and need not
    atol       for a cache that rounds on purpose: how far off a logit may be
    progress   a function that is called with a line before each scenario, such as print

    Raises TypeError or ValueError for a wrong argument. A mistake in the functions is in the report.
    """
    if unknown := [name for name in adapter if name not in PARTS]:
        known = f"an adapter has {', '.join(PARTS)}"
        raise TypeError(f"check_cache() got an unexpected keyword argument {unknown[0]!r}: {known}")
    parts = {name: value for name, value in adapter.items() if value is not None}
    decoder = Adapter(model, parts, inputs or {})
    if unknown := {*as_list(caches)} - {*decoder.kinds}:
        raise ValueError(f"caches: no {', '.join(unknown)}. This decoder has {', '.join(decoder.kinds)}")
    decoder.kinds = as_list(caches) or decoder.kinds
    most = decoder.context or length or 1024
    length = length or min(max(300, 3 * (decoder.window or 0)), most, 1024)
    if not LEAST <= length <= most:
        raise ValueError(f"length={length}: must be between {LEAST} and the context, {decoder.context or 'if given'}")
    chosen = choose(scenarios, skip)
    with prepared(decoder, dtype) as (dtype, device):
        results = run_all(decoder, chosen, Sizes(length, decoder.window), dtype, atol, progress or (lambda line: None))

    beyond = []
    if decoder.converts and decoder.returns not in (dtype, None):
        beyond.append(f"steps in {str(dtype)[6:]}: they compute in {str(decoder.returns)[6:]}")
    if not decoder.perturbed:
        lacks = decoder.unread or "we found no module with weights: pass it as model=, or its arrays as weights="
        beyond.append(f"perturbed weights and float64, because {lacks}")
    if decoder.window and length < 2 * decoder.window:
        beyond.append(f"tokens past the window of {decoder.window}, which need a length of {3 * decoder.window}")
    name = "a decoder" if model is None else type(model).__name__
    ran = f"{sum(result.status in ('correct', 'wrong') for result in results)} of {len(results)} scenarios ran"
    title = f"{name}: {ran}, {length} tokens per row, up to {ROWS} rows, {str(dtype)[6:]} on {device}"
    must_run = [one.name for one in chosen if one.name in decoder.must_run]
    facts = dict(decoder=name, length=length, rows=ROWS, dtype=str(dtype)[6:], device=str(device))
    return Report(title, results, ", ".join(beyond), tuple(must_run), facts)


@contextmanager
def prepared(decoder, dtype):
    """Perturb and convert the weights of a decoder for a while, and yield their dtype and device."""
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r}: must be a dtype of torch, such as 'float32', 'bfloat16' or 'float16'")
    devices = (tensor.device for module in decoder.modules for tensor in module.parameters())
    device = next(devices, torch.get_default_device())
    # a device as a context sees every call of torch, which costs a fifth of the time of a small model
    where = nullcontext() if device == torch.get_default_device() else device
    generators = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(generators), torch.no_grad(), where:
        with changed(decoder.modules):  # to restore what a forward changes
            decoder.try_out()
        decoder.unread = find_unread(decoder)
        decoder.perturbed = [] if decoder.unread or not decoder.modules else [*decoder.modules, decoder.inputs]
        decoder.converts = bool(decoder.perturbed) and not decoder.weights
        if dtype and not decoder.converts:
            lacks = decoder.unread or "we found no module to convert, so pass it as model="
            raise ValueError(f"dtype={dtype}: {lacks}")
        draw = torch.Generator().manual_seed(0)
        dtype = dtype or (torch.float32 if decoder.converts else decoder.dtype)
        perturb = lambda tensor: revealing(tensor, dtype, draw).to(device) if decoder.perturbed else tensor.data  # noqa: E731
        with changed([*decoder.modules, decoder.inputs], perturb):
            for module in decoder.modules:
                module.to(device)
            torch.manual_seed(0)
            yield dtype, device


def choose(scenarios, skip):
    """Return the scenarios whose name contains a word of `scenarios`, or that are in it, and no word of `skip`."""
    wanted, unwanted = as_list(scenarios or ""), as_list(skip)
    own = [one for one in wanted if isinstance(one, Scenario)]
    words, every = [word for word in wanted if word not in own], [*dict.fromkeys((*SCENARIOS, *own))]
    for word in words + unwanted:
        if not any(word in one.name for one in every):
            raise ValueError(f"no scenario is called {word!r}. There are {', '.join(one.name for one in every)}")
    chosen = [one for one in every if one in own or any(word in one.name for word in words)]
    return [one for one in chosen if not any(word in one.name for word in unwanted)]


def run_all(decoder, scenarios, sizes, dtype, atol, progress):
    results, kind, every = [], "any", f"every scenario, with length={sizes.length}"
    try:
        reference = Reference(decoder, sizes, dtype, atol)
        every = "every scenario"
        for kind in decoder.kinds:
            decoder.call("new", 3, sizes.length, kind=kind)
            for scenario in scenarios:
                if kind == decoder.kinds[0] or "generate" not in scenario.needs:  # which makes its own cache
                    progress(f"{len(results) + 1} of {len(scenarios) * len(decoder.kinds)}: {scenario.name:50}")
                    results.append(run_scenario(reference, scenario, kind, sizes))
    except (Exception, SystemExit) as error:
        results.append(failed(every, kind, error, "error"))
    raised = [one for one in results if one.status == "wrong" and one.why.startswith("raises")]
    compared = {one.status for one in results if "generate" not in one.scenario}
    if raised and not decoder.accepted:
        why = f"the first step, with an empty cache, {raised[0].why}"
    elif decoder.accepted and not decoder.keeps and "wrong" in compared and "correct" not in compared:
        why = "nothing keeps the past: new returns None, and step only logits. Let step return (logits, cache)"
    else:
        return results
    return [Result(every, "any", "error", why), *(one for one in results if one.status != "wrong")]


def run_scenario(reference, scenario, kind, sizes):
    found = []
    try:
        for need in scenario.needs:
            reference.decoder.demand(kind, need)
        scenario.run(partial(Stream, reference, kind, found), sizes)
        if not found:
            raise NotImplementedError("it compares no logits")
        error, rounding = (torch.cat(column) for column in zip(*found))
        typical, usual = error.median().item(), MEDIAN * rounding.median().item()
        if typical > usual:
            rule = f"half of the logits off by {typical:.2g} or more (allowed {usual:.1g})"
            why = "cause unknown: rounding can move some logits as far, but not most"
            raise Verdict("wrong", why, rule=rule, off=typical, limit=usual)
        return Result(scenario.name, kind, "correct", off=error.max().item(), limit=reference.limit.item())
    except (Exception, SystemExit) as error:
        return failed(scenario.name, kind, error, "wrong")


def failed(scenario, kind, error, status):
    if isinstance(error, Verdict):
        return Result(scenario, kind, **error.fields)
    if isinstance(error, NotImplementedError):
        return Result(scenario, kind, "not run", first_line(error))
    return Result(scenario, kind, status, describe(error))
