"""The check itself: each scenario, for each kind of cache and each implementation of attention."""

import sys
import time
from contextlib import nullcontext
from functools import partial

import torch

from check_cache.adapters import ROWS, adapter_of
from check_cache.reference import LARGEST, MEDIAN, Reference, changed, revealing
from check_cache.report import Report, Result, as_list, describe, first_line
from check_cache.scenarios import PADS, SECOND, Stream, largest_chunk, scenarios_for


def check_cache(
    model=None,
    *,
    full=None,
    new=None,
    step=None,
    crop=None,
    reorder=None,
    reset=None,
    fork=None,
    generate=None,
    vocab_size=None,
    context=None,
    window=None,
    pad=None,
    inputs=None,
    length=None,
    dtype=torch.float32,
    device=None,
    caches=None,
    scenarios=None,
    skip=None,
    tolerance=None,
    seed=0,
):
    """Check the cache of a decoder, and return a Report.

    model      a transformers model, or an adapter: an object with the functions below as methods
    full to pad  the parts of an adapter, see README.md. If we cannot find the module from these functions, pass it as
               `model`: we perturb its weights and restore them afterwards
    inputs     {name: tensor (8, ...)}, what the decoder reads besides ids, such as the output of an encoder: one entry
               for each of the 8 sequences. We pass the entries of a batch by name, to full and step
    length     tokens per row. None: 300, or three sliding windows, and at most the context or 1024
    dtype      of weights and cache; device: where to run, None: where the model is
    caches     kinds of cache: "own", "static", and "quantized", which rounds on purpose. None: own and static
    scenarios  only those whose name contains one of these words; skip: not those
    tolerance  how far off a logit may be, for a cache that rounds on purpose. None: as far as rounding explains
    seed       of the sequences, the sizes of chunks, and how we perturb the weights
    Raises TypeError for any other object, ValueError for a length, inputs or words that do not work, and ImportError
    for torch before 2.9 or transformers before 5.0.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        raise ImportError(f"needs torch 2.9 or newer, but this is {torch.__version__}")
    parts = dict(full=full, new=new, step=step, crop=crop, reorder=reorder, reset=reset, fork=fork, generate=generate)
    parts |= dict(vocab_size=vocab_size, context=context, window=window, pad=pad)
    decoder = adapter_of(model, parts, inputs or {})
    most = decoder.context or length or 1024
    length = length or min(max(300, 3 * (decoder.window or 0)), most, 1024)
    if not 24 <= length <= most:
        at_most = f", and at most the context, {most}" if decoder.context else ""
        raise ValueError(f"length={length}: must be at least 24{at_most}")
    for kind in as_list(caches):
        if kind not in (*decoder.kinds, "quantized"):
            raise ValueError(f"caches={kind!r}: this decoder has {', '.join(decoder.kinds)}, and quantized")
    known = scenarios_for(decoder.window, length, seed)
    chosen = choose(known, scenarios, skip)

    modules = decoder.modules
    device = torch.device(device or next((p.device for module in modules for p in module.parameters()), "cpu"))
    draw = torch.Generator().manual_seed(seed)
    perturbed = changed(modules, lambda tensor: revealing(tensor, dtype, draw).to(device))
    generators = [device.index or 0] if device.type == "cuda" else []
    # a device as a context sees every call of torch, which costs a fifth of the time of a small model
    where = nullcontext() if device == torch.get_default_device() else device
    with torch.random.fork_rng(generators), torch.no_grad(), where, perturbed:
        torch.manual_seed(seed)
        for module in modules:
            module.eval().to(device)
        results, fault = run_all(decoder, chosen, length, dtype, as_list(caches) or decoder.kinds, tolerance, seed)

    if not modules:
        note = "we found no module with the weights: pass it as model="
        results.append(Result("perturbed weights, float64", "any", None, "not run", note))
    if decoder.window and length < 2 * decoder.window:
        why = f"needs a length of {3 * decoder.window}"
        results.append(Result(f"past the window of {decoder.window}", "any", None, "not run", why))
    name = type(model).__name__ if model is not None else type(modules[0]).__name__ if modules else "a decoder"
    title = f"{name}: {length} tokens per row, up to {ROWS} rows, {str(dtype)[6:]} on {device}"
    beyond = f"more than {length} tokens or {ROWS} rows, most chunks of more than {largest_chunk(length)}, other dtypes"
    if left_out := len(known) - len(chosen):
        beyond += f", {left_out} scenarios that were left out"
    return Report(title, results, fault, beyond)


def choose(scenarios, only, skip):
    """Return the scenarios whose names contain a word of `only`, if there are any, and none of `skip`."""
    for word in (*as_list(only), *as_list(skip)):
        if not any(word in name for name in scenarios):
            raise ValueError(f"no scenario is called {word!r}. There are {', '.join(scenarios)}")
    only, skip = as_list(only) or [""], as_list(skip)
    chosen = [name for name in scenarios if any(word in name for word in only)]
    return {name: scenarios[name] for name in chosen if not any(word in name for word in skip)}


def run_all(decoder, scenarios, length, dtype, kinds, tolerance, seed):
    """Return the results, and why no cache can be judged, or None."""
    results = []
    for attention, why_not in decoder.attentions():
        not_run = partial(Result, "every scenario", attention=attention, status="not run")
        show("logits without a cache")
        try:
            if why_not:
                raise NotImplementedError(why_not)
            reference = Reference(decoder, decoder.modules, length, dtype, seed)
        except (Exception, SystemExit) as error:
            hint = "" if decoder.context else f". If {length} tokens are too many for it, pass context= or length="
            results.append(not_run(cache="any", why=describe(error) + hint))
            continue
        if reference.fault:
            return results, reference.fault
        if tolerance:
            reference = reference.loosened(tolerance)
        for kind in kinds:
            try:
                decoder.new(3, reference.room, kind)
            except (Exception, SystemExit) as error:
                results.append(not_run(cache=kind, why=describe(error)))
                continue
            allowed = reference
            if kind == "quantized":
                plain = scenarios_for(decoder.window, length, seed)["decode"]
                allowed = measure_rounding(reference, run_scenario(reference, Result("decode", kind, attention), plain))
            began = time.monotonic()
            for count, (name, scenario) in enumerate(scenarios.items()):
                left = (time.monotonic() - began) / max(1, count) * (len(scenarios) - count)
                estimate = f", about {left:.0f} s left" if count else ""
                show(f"{kind} cache, {count + 1} of {len(scenarios)}: {name}{estimate}")
                results.append(run_scenario(allowed, Result(name, kind, attention), scenario))
        scenarios = {name: scenario for name, scenario in scenarios.items() if name in SECOND}
    show("")
    return results, None


def show(text):
    """Show progress on a terminal, in a line that the next call overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def measure_rounding(reference, plain):
    """Return the Reference for a cache that rounds on purpose. plain: the Result of decoding with it."""
    off = torch.cat([columns[2] for columns in plain.errors]) if plain.errors else reference.logits.new_zeros(1)
    if off.mean() > reference.logits.std() / 4:
        return reference  # too far off to be rounding
    return reference.loosened(LARGEST * off.max().item())


def run_scenario(reference, result, scenario):
    """Run a scenario, and return its result."""
    try:
        scenario(partial(Stream, reference, result))
        judge(reference, result)
    except NotImplementedError as reason:
        result.status, result.why, result.layer = "not run", first_line(reason), None
    except (Exception, SystemExit) as error:
        result.status, result.why = "wrong", describe(error)
    return result


def judge(reference, result):
    """Set the status of a result from its errors."""
    if not result.errors:
        if "generate" in result.scenario:
            return  # it compared tokens
        raise NotImplementedError("the steps return no logits to compare")
    rows, positions, error, differs, batch, tokens = (torch.cat(column) for column in zip(*result.errors))
    result.off, result.allowed, result.argmaxes = error.max().item(), reference.limit.item(), int(differs.sum())
    typical, usual = error.median().item(), MEDIAN * reference.rounding[rows, positions].median().item()
    if result.off > result.allowed:
        result.rule, limit = f"logits off by {result.off:.2g} (allowed {result.allowed:.1g})", result.allowed
    elif typical > usual:
        result.rule, limit = f"half of the logits off by {typical:.2g} or more (allowed {usual:.1g})", usual
    elif result.why:
        result.rule = f"logits off by {result.off:.2g}, which rounding could explain, but attention is wrong"
        limit = min(reference.suspicious.item(), 0.99 * result.off)
    else:
        return
    if "left padding" in result.scenario and padding_matters(reference):
        result.status, result.rule = "fault", None
        result.why, result.layer = "not the cache's fault: padding changes logits even without a cache", None
        return
    if not result.why:
        result.why = "no logit is far off, but most are less precise than without a cache"
    first = (error > limit).int().argmax()
    result.status, result.row, result.position = "wrong", rows[first].item(), positions[first].item()
    result.step = batch[first].item(), tokens[first].item()


def padding_matters(reference):
    """Whether left padding changes logits even without a cache. We can only tell if `full` accepts a mask."""
    result = Result("left padding", None, None)
    if reference.decoder.full_takes_mask:
        Stream(reference, result, pads=PADS).feed(reference.length)
    return any((columns[2] > reference.limit).any() for columns in result.errors)
