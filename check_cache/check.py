"""The check itself: every way to feed a cache, for each kind of cache and each implementation of attention."""

import sys
from functools import partial

import torch

from check_cache.adapters import adapter_of
from check_cache.report import Report, Result, first_line
from check_cache.truth import MEDIAN, Truth, changed, normal, revealing
from check_cache.ways import PADS, SECOND, Stream, ways_for


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
    length=None,
    dtype=torch.float32,
    device=None,
    caches=None,
    modes=None,
    seed=0,
):
    """Check the cache of a decoder, and return a Report.

    model   a transformers model, a GPT of kvGPT, or an adapter: an object with the functions below as methods
    full to pad   the parts of an adapter, see check_cache.__doc__. If we cannot find the module from these functions,
                  pass it as `model`: we perturb its weights and restore them afterwards
    length  tokens per row. None: 300, or three sliding windows, and at most the context or 1024
    dtype   of weights and cache; device: where to run, None: where the model is
    caches  the kinds of cache to ask for: "own", "static", and "quantized", which rounds on purpose. None: own, static
    modes   only the ways whose name contains one of these words
    Raises TypeError for any other object, and ValueError for a length or words that do not work.
    """
    parts = dict(full=full, new=new, step=step, crop=crop, reorder=reorder, reset=reset, fork=fork, generate=generate)
    parts |= dict(vocab_size=vocab_size, context=context, window=window, pad=pad)
    decoder = adapter_of(model, parts)
    modes, caches = ([words] if isinstance(words, str) else words for words in (modes, caches))
    most = decoder.context or length or 1024
    length = length or min(max(300, 3 * (decoder.window or 0)), most, 1024)
    if not 24 <= length <= most:
        at_most = f", and at most the context, {most}" if decoder.context else ""
        raise ValueError(f"length={length}: must be at least 24{at_most}")
    for kind in caches or ():
        if kind not in (*decoder.kinds, "quantized"):
            raise ValueError(f"caches={kind!r}: this decoder has {', '.join(decoder.kinds)}, and quantized")
    ways = ways_for(decoder.window, length)
    chosen = {name: way for name, way in ways.items() if any(word in name for word in modes or [""])}
    if not chosen:
        raise ValueError(f"modes={modes!r}: the ways are {', '.join(ways)}")

    modules = decoder.modules
    device = torch.device(device or next((p.device for module in modules for p in module.parameters()), "cpu"))
    draw = torch.Generator().manual_seed(seed)

    def run(weights):
        with torch.no_grad(), device, changed(modules, weights):
            for module in modules:
                module.eval().to(device)
            return run_all(decoder, chosen, length, dtype, caches or decoder.kinds, seed)

    results, fault, packed = run(lambda tensor: revealing(tensor, dtype, draw).to(device))
    if packed:
        results, fault, _ = run(lambda tensor: tensor.data.to(device, dtype))
        note = f"the step reads a copy of {packed} made before the check, so we did not perturb the weights"
        results.append(Result("perturbed weights", "any", None, "not run", note))
    if not modules:
        note = "we found no module with the weights: pass it as model="
        results.append(Result("perturbed weights, float64", "any", None, "not run", note))
    if decoder.window and length < 2 * decoder.window:
        why = f"needs a length of {3 * decoder.window}"
        results.append(Result(f"past the window of {decoder.window}", "any", None, "not run", why))
    name = type(model).__name__ if model is not None else type(modules[0]).__name__ if modules else "a decoder"
    title = f"{name}: {length} tokens per row, up to 8 rows, {str(dtype)[6:]} on {device}"
    beyond = f"more than {length} tokens or 8 rows, other dtypes, rows of different lengths without padding"
    return Report(title, results, fault, beyond)


def run_all(decoder, ways, length, dtype, kinds, seed):
    """Return the results, why no cache can be judged (or None), and which weights a step does not read (or None)."""
    results = []
    for attention, why_not in decoder.attentions():
        not_run = partial(Result, "every way", attention=attention, status="not run")
        try:
            if why_not:
                raise NotImplementedError(why_not)
            truth = Truth(decoder, decoder.modules, length, dtype, seed)
        except (Exception, SystemExit) as error:
            hint = "" if decoder.context else f". If {length} tokens are too many for it, pass context= or length="
            results.append(not_run(cache="any", why=said(error) + hint))
            continue
        if truth.fault:
            return results, truth.fault, None
        for kind in kinds:
            try:
                decoder.new(3, truth.room, kind)
            except (Exception, SystemExit) as error:
                results.append(not_run(cache=kind, why=said(error)))
                continue
            if packed := find_packed(truth, kind):
                return results, None, packed
            fair = truth
            if kind == "quantized":
                plain = ways_for(decoder.window, length)["decode"]
                fair = truth.loosened(run_way(truth, Result("decode", kind, attention), plain))
            for name, way in ways.items():
                results.append(run_way(fair, Result(name, kind, attention), way))
        ways = {name: way for name, way in ways.items() if name in SECOND}
    return results, None, None


def said(error):
    text, name = first_line(error), type(error).__name__
    if isinstance(error, NotImplementedError):
        return text
    return f"raises {name}" + (f": {text}" if text != name else "")


def run_way(truth, result, way):
    """Run a way, and return its result."""
    if sys.stderr.isatty():
        print(f"\r\033[K{result.way}, {result.cache} cache", end="", file=sys.stderr, flush=True)
    try:
        way(partial(Stream, truth, result))
        judge(truth, result)
    except NotImplementedError as reason:
        result.status, result.why, result.layer = "not run", first_line(reason), None
    except (Exception, SystemExit) as error:
        result.status, result.why = "wrong", said(error)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return result


def judge(truth, result):
    """Set the status of a result from its errors."""
    if not result.errors:
        if "generate" in result.way:
            return  # it compared tokens
        raise NotImplementedError("the steps return no logits to compare")
    rows, positions, error, differs = (torch.cat(column) for column in zip(*result.errors))
    result.off, result.allowed, result.argmaxes = error.max().item(), truth.limit.item(), int(differs.sum())
    coarse = error.median() > MEDIAN * truth.rounding[rows, positions].median()
    if not (coarse or result.why or result.off > result.allowed):
        return
    if "left padding" in result.way and padding_matters(truth):
        raise NotImplementedError("not the cache's fault: padding changes logits even without a cache")
    if not result.why:
        result.why = "no logit is far off, but most are less precise than without a cache"
    limit = result.allowed if result.off > result.allowed else min(truth.suspicious.item(), 0.99 * result.off)
    first = (error > limit).int().argmax()
    result.status, result.row, result.position = "wrong", rows[first].item(), positions[first].item()


def padding_matters(truth):
    """Whether left padding changes logits even without a cache. We can only tell if `full` accepts a mask."""
    result = Result("left padding", None, None)
    if truth.decoder.full_takes_mask:
        Stream(truth, result, pads=PADS).feed(truth.length)
    return any((error > truth.limit).any() for _, _, error, _ in result.errors)


def find_packed(truth, kind):
    """Return the name of a parameter that moves the logits of `full` but not those of a step, or None.

    Some engines pack their weights when they are built. Then a step does not use the weights that we perturb.
    """
    decoder, T, draw = truth.decoder, 24, torch.Generator().manual_seed(0)
    ids, pos = truth.ids[:3, :T], torch.arange(T).expand(3, T)

    def step():
        output = decoder.step(ids, decoder.new(3, truth.room, kind), None, pos)
        return output[0] if isinstance(output, tuple) else output

    try:
        with_cache, without = step(), decoder.full(ids)
        if not (truth.error(with_cache, slice(3), slice(T - with_cache.size(1), T)) > truth.limit).any():
            return None
        for name, parameter in (pair for module in decoder.modules for pair in module.named_parameters()):
            kept = parameter.data
            parameter.data = kept + 0.5 * normal(kept, draw)
            unread = torch.equal(step(), with_cache) and not torch.equal(decoder.full(ids), without)
            parameter.data = kept
            if unread:
                return name
    except (Exception, SystemExit):
        return None  # the ways will report it
