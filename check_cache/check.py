"""The check itself: each scenario, for each kind of cache."""

import sys
import time
from contextlib import nullcontext
from functools import partial

import torch

from check_cache.adapters import ROWS, adapter_of
from check_cache.reference import MEDIAN, Reference, changed, revealing
from check_cache.report import Report, Result, as_list, describe, first_line
from check_cache.scenarios import Stream, largest_chunk, scenarios_for


def check_cache(
    model=None,
    *,
    inputs=None,
    length=None,
    dtype=torch.float32,
    device=None,
    caches=None,
    scenarios=None,
    skip=None,
    tolerance=None,
    seed=0,
    **parts,
):
    """Check the cache of a decoder, and return a Report.

    model      a transformers model, or an adapter: an object with the methods full, new and step
    parts      or these functions as arguments, and whatever else README.md lists. If we cannot find the module from
               them, pass it as `model`: we perturb its weights and restore them afterwards
    inputs     {name: tensor (8, ...)}, what the decoder reads besides ids: an entry for each of the 8 sequences
    length     tokens per row. None: 300, or three sliding windows, and at most the context or 1024
    dtype      of weights and cache; device: where to run, None: where the model is
    caches     kinds of cache: "own" or "static". None: all that the decoder has
    scenarios  only those whose name contains one of these words; skip: not those
    tolerance  how far off a logit may be, for a cache that rounds on purpose. None: as far as rounding explains
    seed       of the sequences, the sizes of chunks, and how we perturb the weights
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        raise ImportError(f"needs torch 2.9 or newer, but this is {torch.__version__}")
    decoder = adapter_of(model, parts, inputs or {})
    most = decoder.context or length or 1024
    length = length or min(max(300, 3 * (decoder.window or 0)), most, 1024)
    if not 24 <= length <= most:
        at_most = f", and at most the context, {most}" if decoder.context else ""
        raise ValueError(f"length={length}: must be at least 24{at_most}")
    kinds = as_list(caches) or decoder.kinds
    if unknown := {*kinds} - {*decoder.kinds}:
        raise ValueError(f"caches={unknown}: this decoder has {', '.join(decoder.kinds)}")
    known = scenarios_for(decoder.window, length, seed)
    chosen = choose(known, scenarios, skip)

    modules = decoder.modules
    device = torch.device(device or next((p.device for module in modules for p in module.parameters()), "cpu"))
    draw = torch.Generator().manual_seed(seed)
    perturbed = changed(modules, lambda tensor: revealing(tensor, dtype, draw).to(device))
    generators = [device.index or 0] if device.type == "cuda" else []
    # a device as a context sees every call of torch, which costs a fifth of the time of a small model
    where = nullcontext() if device == torch.get_default_device() else device
    with torch.random.fork_rng(generators), torch.no_grad(), where, decoder.in_float64(), perturbed:
        torch.manual_seed(seed)
        for module in modules:
            module.eval().to(device)
        results = run_all(decoder, chosen, kinds, length, dtype, seed, tolerance)
    show("")

    if not modules:
        note = "we found no module with the weights: pass it as model="
        results.append(Result("perturbed weights, float64", "any", "not run", note))
    if decoder.window and length < 2 * decoder.window:
        why = f"needs a length of {3 * decoder.window}"
        results.append(Result(f"past the window of {decoder.window}", "any", "not run", why))
    name = type(model).__name__ if model is not None else type(modules[0]).__name__ if modules else "a decoder"
    title = f"{name}: {length} tokens per row, up to {ROWS} rows, {str(dtype)[6:]} on {device}"
    beyond = f"more than {length} tokens or {ROWS} rows, most chunks of more than {largest_chunk(length)}, other dtypes"
    if left_out := len(known) - len(chosen):
        beyond += f", {left_out} scenarios that were left out"
    return Report(title, results, beyond)


def choose(scenarios, only, skip):
    """Return the scenarios whose names contain a word of `only`, if there are any, and none of `skip`."""

    def named(words):
        for word in words:
            if not any(word in name for name in scenarios):
                raise ValueError(f"no scenario is called {word!r}. There are {', '.join(scenarios)}")
        return {name for name in scenarios if any(word in name for word in words)}

    names = named(as_list(only) or [""]) - named(as_list(skip))
    return {name: scenario for name, scenario in scenarios.items() if name in names}


def run_all(decoder, scenarios, kinds, *options):
    """Return the results. The options are those of Reference."""
    show("logits without a cache")
    try:
        reference = Reference(decoder, *options)
    except (Exception, SystemExit) as error:
        return [Result("every scenario", "any", "not run", describe(error))]
    if reference.fault:
        return [Result("every scenario", "any", "fault", reference.fault)]
    results = []
    for kind in kinds:
        try:
            decoder.new(3, reference.slots, kind)
        except (Exception, SystemExit) as error:
            results.append(Result("every scenario", kind, "not run", describe(error)))
            continue
        began = time.monotonic()
        names = [name for name in scenarios if kind == "own" or "generate" not in name]  # generate() makes its own
        for count, name in enumerate(names):
            left = (time.monotonic() - began) / max(1, count) * (len(names) - count)
            estimate = f", about {left:.0f} s left" if count else ""
            show(f"{kind} cache, {count + 1} of {len(names)}: {name}{estimate}")
            results.append(run_scenario(reference, Result(name, kind), scenarios[name]))
    return results


def show(text):
    """Show progress on a terminal, in a line that the next call overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def run_scenario(reference, result, scenario):
    """Run a scenario, and return its result."""
    try:
        scenario(partial(Stream, reference, result))
        judge(reference, result)
    except NotImplementedError as reason:
        result.status, result.why = "not run", first_line(reason)
    except (Exception, SystemExit) as error:
        result.status, result.why = "wrong", describe(error)
        if not result.errors and "Sizes of tensors must match" in result.why:
            result.why += ". The cache was not empty at position 0: new should return an empty one"
    return result


def judge(reference, result):
    """Set the status of a result from its errors."""
    if "left padding" in result.scenario and reference.sees_padding:
        result.status, result.why = "fault", "not the cache's fault: padding changes logits even without a cache"
        return
    if not result.errors:
        if "generate" in result.scenario:
            return  # it compared tokens
        raise NotImplementedError("the steps return no logits to compare")
    rows, positions, error, differs, batch, tokens = (torch.cat(column) for column in zip(*result.errors))
    result.off, allowed = error.max().item(), reference.limit.item()
    typical, usual = error.median().item(), MEDIAN * reference.rounding[rows, positions].median().item()
    if result.off > allowed:
        rule, limit = f"logits off by {result.off:.2g} (allowed {allowed:.1g})", allowed
    elif typical > usual:
        rule, limit = f"half of the logits off by {typical:.2g} or more (allowed {usual:.1g})", usual
    else:
        result.why = None  # rounding, such as of a router that chose a different expert
        return
    first = (error > limit).int().argmax()
    result.status, result.position = "wrong", positions[first].item()
    result.step = batch[first].item(), tokens[first].item()
    where = (
        f"row {rows[first]}, position {positions[first]}, in a step of {batch[first]} rows and {tokens[first]} tokens"
    )
    result.rule = f"{rule}, argmax differs at {int(differs.sum())} positions, first at {where}"
    result.why = result.why or "no logit is far off, but most are less precise than without a cache"
