"""The check itself: each scenario, for each kind of cache."""

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from check_cache.adapters import PARTS, ROWS, adapter_of
from check_cache.reference import MEDIAN, Reference, changed, revealing
from check_cache.report import AdapterError, Report, Result, as_list, describe
from check_cache.scenarios import OWN_LOOP, PADDING, Found, Stream, largest_chunk, scenarios_for

LEAST = 24  # tokens per row


def check_cache(
    model: object = None,
    *,
    full: Callable[..., Tensor] | None = None,
    new: Callable[[int, int], object] | None = None,
    step: Callable[..., Tensor | tuple[Tensor, object]] | None = None,
    crop: Callable[[object, int], object] | None = None,
    reorder: Callable[[object, Tensor], object] | None = None,
    select: Callable[[object, Tensor], object] | None = None,
    repeat: Callable[[object, int], object] | None = None,
    reset: Callable[[object], object] | None = None,
    fork: Callable[[object], object] | None = None,
    generate: Callable[..., Tensor] | None = None,
    vocab_size: int | None = None,
    context: int | None = None,
    window: int | None = None,
    pad: int | None = None,
    inputs: dict[str, Tensor] | None = None,
    length: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    caches: str | list[str] | None = None,
    scenarios: str | list[str] | None = None,
    skip: str | list[str] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    seed: int = 0,
) -> Report:
    """Check the cache of a decoder, and return a Report.

    model      a transformers model, or an adapter: an object with the methods full, new and step
    full, new, step, and those up to pad
               or an adapter as functions and facts. README.md describes them. If we cannot find the module from them,
               pass it as `model`: we perturb its weights and restore them afterwards
    inputs     {name: tensor (8, ...)}, what the decoder reads besides ids: an entry for each of the 8 sequences
    length     tokens per row. None: 300, or three sliding windows, and at most the context or 1024
    dtype      of weights and cache, as in torch.bfloat16 or "bfloat16". None: float32
    device     where to run. None: where the model is
    caches     kinds of cache: "own", "dynamic" or "static". None: all that the decoder has
    scenarios  only those whose name contains one of these words; skip: not those
    atol, rtol for a cache that rounds on purpose: a logit may be off by atol + rtol * abs(logit). None: by rounding
    seed       of the sequences, the sizes of chunks, and how we perturb the weights

    Raises TypeError or ValueError for a wrong argument. A mistake in the functions is in the report.
    """
    parts = {name: value for name, value in locals().items() if name in PARTS and value is not None}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        raise ImportError(f"needs torch 2.9 or newer, but this is {torch.__version__}")
    decoder = adapter_of(model, parts, inputs or {})
    kinds = as_list(caches) or decoder.kinds
    if unknown := {*kinds} - {*decoder.kinds}:
        raise ValueError(f"caches: no {', '.join(unknown)}. This decoder has {', '.join(decoder.kinds)}")
    with prepared(decoder, dtype_of(dtype), device, seed) as (dtype, device):
        length, limited = length_for(decoder, length)
        known = scenarios_for(decoder.window, length, seed)
        chosen = choose(known, scenarios, skip)
        results = run_all(decoder, chosen, kinds, length, dtype, seed, atol, rtol)
    show("")

    if not decoder.modules:
        note = "we found no module with the weights: pass it as model="
        results.append(Result("perturbed weights, float64", "any", "not run", note))
    if decoder.window and length < 2 * decoder.window:
        why = f"needs a length of {3 * decoder.window}"
        results.append(Result(f"past the window of {decoder.window}", "any", "not run", why))
    named = decoder.modules[:1] if model is None else [model]
    name = type(named[0]).__name__ if named else "a decoder"
    title = f"{name}: {length} tokens per row, up to {ROWS} rows, {str(dtype)[6:]} on {device}"
    beyond = f"more than {length} tokens{limited} or {ROWS} rows, most chunks of more than {largest_chunk(length)}"
    beyond += ", other dtypes, scenarios combined"
    if left_out := len(known) - len(chosen):
        beyond += f", {left_out} scenarios that were left out"
    return Report(title, results, beyond)


def dtype_of(dtype):
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype={dtype!r}: must be a dtype of torch, such as 'float32', 'bfloat16' or 'float16'")
    return found


@contextmanager
def prepared(decoder, dtype, device, seed):
    """Perturb and convert the weights of a decoder for a while, and yield their dtype and device."""
    tensors = [tensor for module in decoder.modules for tensor in module.parameters()]
    device = torch.device(device or (tensors[0].device if tensors else "cpu"))
    generators = [device.index or 0] if device.type == "cuda" else []
    # a device as a context sees every call of torch, which costs a fifth of the time of a small model
    where = nullcontext() if device == torch.get_default_device() else device
    with torch.random.fork_rng(generators), torch.no_grad(), where:
        with changed(decoder.modules, lambda tensor: tensor.data.to(device)):
            logits = decoder.find_called_modules()
        if dtype and not decoder.modules:
            raise ValueError(f"dtype={dtype}: we found no module to convert, so pass it as model=")
        draw = torch.Generator().manual_seed(seed)
        dtype = dtype or (torch.float32 if decoder.modules or logits is None else logits.dtype)
        with decoder.in_float64(), changed(decoder.modules, lambda tensor: revealing(tensor, dtype, draw).to(device)):
            torch.manual_seed(seed)
            for module in decoder.modules:
                module.eval().to(device)
            yield dtype, device


def length_for(decoder, length):
    """Return how many tokens to feed per row, and in words why not more."""
    most = decoder.context or length or 1024
    wanted = length or min(max(300, 3 * (decoder.window or 0)), most, 1024)
    if not LEAST <= wanted <= most:
        at_most = f", and at most the context, {most}" if decoder.context else ""
        raise ValueError(f"length={wanted}: must be at least {LEAST}{at_most}")
    if length or decoder.context:
        return wanted, ""

    limit = ""
    for shorter in (wanted, 256, 128, 64, 32):  # the context is unknown, so look for it
        try:
            decoder.full(torch.zeros(1, shorter, dtype=torch.long), torch.arange(1))
        except (Exception, SystemExit) as error:
            limit = limit or f" (with {wanted}, full {describe(error)})"
        else:
            decoder.context = shorter if limit else None
            return shorter, limit
    return wanted, ""


def choose(scenarios, only, skip):
    """Return the scenarios whose names contain a word of `only`, if there are any, and none of `skip`."""

    def named(words):
        for word in words:
            if not any(word in scenario.name for scenario in scenarios):
                known = ", ".join(scenario.name for scenario in scenarios)
                raise ValueError(f"no scenario is called {word!r}. There are {known}")
        return {scenario for scenario in scenarios if any(word in scenario.name for word in words)}

    names = named(as_list(only) or [""]) - named(as_list(skip))
    return [scenario for scenario in scenarios if scenario in names]


def run_all(decoder, scenarios, kinds, length, *options):
    """Return the results. The options are those of Reference."""
    show("logits without a cache")
    try:
        reference = Reference(decoder, length, *options)
    except (Exception, SystemExit) as error:
        return [Result("every scenario", "any", status_of(error), describe(error))]
    if reference.fault:
        return [Result("every scenario", "any", "fault", reference.fault)]
    results = []
    for kind in kinds:
        try:
            decoder.new(3, length, kind)
        except (Exception, SystemExit) as error:
            results.append(Result("every scenario", kind, status_of(error), describe(error)))
            continue
        began = time.monotonic()
        mine = [scenario for scenario in scenarios if kind == kinds[0] or not scenario.tags & OWN_LOOP]
        for count, scenario in enumerate(mine):
            left = (time.monotonic() - began) / max(1, count) * (len(mine) - count)
            estimate = f", about {left:.0f} s left" if count else ""
            show(f"{kind} cache, {count + 1} of {len(mine)}: {scenario.name}{estimate}")
            results.append(run_scenario(reference, scenario, kind))
    return results


def status_of(error):
    return "error" if isinstance(error, AdapterError) else "not run"


def show(text):
    """Show progress on a terminal, in a line that the next call overwrites."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def run_scenario(reference, scenario, kind):
    """Run a scenario, and return its result."""
    found, decoder, need = Found(), reference.decoder, scenario.needs
    result = partial(Result, scenario.name, kind)
    try:
        if need == "generate" and need not in decoder.parts:
            raise NotImplementedError("there is no generate(ids, count, use_cache)")
        if need and need != "generate" and not decoder.takes("step", need):
            raise NotImplementedError(f"the step takes no {need}")
        why = scenario.run(partial(Stream, reference, kind, found))
        if scenario.tags & PADDING and reference.sees_padding:
            return result("fault", "not the cache's fault: padding changes logits even without a cache")
        if scenario.tags & OWN_LOOP:
            return result("wrong" if why else "correct", why)
        return result(**judge(reference, found))
    except (AdapterError, NotImplementedError) as error:
        return result(status_of(error), describe(error))
    except (Exception, SystemExit) as error:
        why = describe(error)
        if not found.errors and "Sizes of tensors must match" in why:
            why += ". The cache was not empty at position 0: new should return an empty one"
        return result("wrong", why + found.hint)


def judge(reference, found):
    """Return the fields of a result that follow from errors of logits."""
    if not found.errors:
        raise NotImplementedError("the steps return no logits to compare")
    rows, positions, error, differs, batch, tokens = (torch.cat(column) for column in zip(*found.errors))
    off, allowed = error.max().item(), reference.limit.item()
    typical, usual = error.median().item(), MEDIAN * reference.rounding[rows, positions].median().item()
    if off > allowed:
        rule, limit = f"logits off by {off:.2g} (allowed {allowed:.1g})", allowed
    elif typical > usual:
        rule, limit = f"half of the logits off by {typical:.2g} or more (allowed {usual:.1g})", usual
    else:  # a cause, if any, is rounding, such as of a router that chose a different expert
        return dict(status="correct", off=off)
    first = (error > limit).int().argmax().item()
    step = batch[first].item(), tokens[first].item()
    where = f"row {rows[first]}, position {positions[first]}, in a step of {step[0]} rows and {step[1]} tokens"
    why = found.cause or "no logit is far off, but most are less precise than without a cache"
    if off > allowed and not found.cause:
        why = "attention reads and sees what it should in all layers, as far as we can see: the mistake comes after it"
    return dict(
        status="wrong",
        why=why + found.hint,
        rule=f"{rule}, argmax differs at {int(differs.sum())} positions, first at {where}",
        off=off,
        position=positions[first].item(),
        step=step,
    )
