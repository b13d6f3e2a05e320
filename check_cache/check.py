"""The check itself: every way, with each kind of cache and each implementation of attention."""

import sys
import warnings
from functools import partial

import torch
from torch import nn

from check_cache.adapters import Transformers, adapter_of
from check_cache.report import Report, Result, first_line
from check_cache.truth import MEAN, Truth, changed, revealing
from check_cache.ways import PADS, SECOND, Stream, ways_for


def examine(truth, result, way):
    """Run a way, and set its result."""
    try:
        way(partial(Stream, truth, result))
    except NotImplementedError as reason:
        result.status, result.why = "not run", first_line(reason)
        return
    except Exception as error:
        result.status, result.why = "wrong", f"raises {type(error).__name__}: {first_line(error)}"
        return

    rows, positions, error, other = (torch.cat(column) for column in zip(*result.errors))
    result.off, result.allowed, result.argmaxes = error.max().item(), truth.limit.item(), int(other.sum())
    coarse = error.mean() > MEAN * truth.rounding[rows, positions].mean()
    if result.cache == "quantized" or not (coarse or result.off > result.allowed):
        return  # a quantized cache has other logits, but must not raise
    if "left padding" in result.way and padding_matters(truth):
        result.status, result.why = "not run", "not the cache's fault: padding changes logits without a cache, too"
        return
    first = (error > min(result.allowed, 0.99 * result.off)).int().argmax()
    result.status, result.row, result.position = "wrong", rows[first].item(), positions[first].item()
    result.why = result.why or "no logit is far off, but all of them are less precise than without a cache"


def padding_matters(truth):
    """Whether left padding changes logits even without a cache. We can only ask a model of transformers."""
    result = Result("left padding", None, None)
    if isinstance(truth.decoder, Transformers):
        Stream(truth, result, pads=PADS).feed(truth.length)
    return any((error > truth.limit).any() for _, _, error, _ in result.errors)


def check_cache(model, length=None, dtype=torch.float32, device=None, caches=("own", "static"), modes=None, seed=0):
    """Return a Report, which is true if the cache of `model` is wrong.

    model   a model of transformers, a GPT of this kit, or an adapter. Its weights are others during the check
    length  tokens per text. None: 300, or three sliding windows, and at most the context or 1024
    dtype   of weights and cache; device: where to move the model, None leaves it where it is
    caches  the kinds of cache to ask for: "own", "static" and "quantized", of which we see only whether it raises
    modes   only the ways whose name contains one of these words
    Raises TypeError for another object, and ValueError for a length or words that do not work.
    """
    decoder = adapter_of(model)
    context, window = getattr(decoder, "context", None), getattr(decoder, "window", None)
    most = context or length or 1024
    length = length or min(max(300, 3 * (window or 0)), most, 1024)
    if not 24 <= length <= most:
        raise ValueError(f"length={length}: must be at least 24, and at most the context, {most}")
    ways = ways_for(window, length)
    chosen = {name: way for name, way in ways.items() if any(word in name for word in modes or [""])}
    if not chosen:
        raise ValueError(f"modes={modes!r}: the ways are {', '.join(ways)}")

    results, fault = [], None
    not_run = partial(Result, status="not run")
    if window and length < 2 * window:
        results.append(not_run(f"past the window of {window}", "any", None, why=f"takes a length of {3 * window}"))
    modules = [part for part in (decoder, *vars(decoder).values()) if isinstance(part, nn.Module)]
    training = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval().to(device)
    device = torch.device(device or next((p.device for module in modules for p in module.parameters()), "cpu"))
    weights = partial(revealing, dtype=dtype, draw=torch.Generator().manual_seed(seed))
    with torch.no_grad(), device, changed(modules, weights):
        for attention, why_not in getattr(decoder, "attentions", lambda: [(None, None)])():
            if why_not:
                results.append(not_run("every way", "any", attention, why=why_not))
                continue
            truth = Truth(decoder, modules, length, dtype, seed)
            fault = fault or truth.fault
            for kind in () if fault else caches:
                try:
                    decoder.new(kind, length)
                except Exception as reason:
                    results.append(not_run("every way", kind, attention, why=first_line(reason)))
                    continue
                for name, way in chosen.items():
                    if sys.stderr.isatty():
                        print(f"\r\033[K{name}, {kind} cache", end="", file=sys.stderr, flush=True)
                    results.append(Result(name, kind, attention))
                    examine(truth, results[-1], way)
            chosen = {name: way for name, way in chosen.items() if name in SECOND}
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    for part, mode in training.items():
        part.training = mode
    title = f"{type(model).__name__}: texts of {length} tokens, up to 8 rows, {str(dtype)[6:]} on {device}"
    report = Report(title, results, fault)
    if report.exit_code == 2:
        warnings.warn(f"nothing could be checked: {report}", stacklevel=2)
    return report
