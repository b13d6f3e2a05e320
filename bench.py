"""Measure decoding: with and without a cache, compiled, with drafts, and beside other implementations.

    python bench.py                                     the model in out, or the one that comes with the code
    python bench.py --ckpt a/ckpt.pt b/ckpt.pt --plot bench.png
    python bench.py --shapes 6/8/256/256 --batch 16     random weights in the layout of train.py's default model
    python bench.py --busy                              each row again while train.py runs in another process

Every variant generates to the end of the context (per_head_loop: 200 tokens at most) with the same weights. After a
warm-up the variants run in turn, --repeats times. Figures are medians. Every variant of the kit must give the tokens
of a forward without a cache. Otherwise bench.py fails. A shape is layers/heads/width/context.
"""

if __name__ == "__main__":
    from kvgpt.guard import guard_process

    guard_process()  # before the imports, which take seconds

import copy
import csv
import io
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from kvgpt.checkpoint import load_checkpoint
from kvgpt.cli import (
    Parser,
    aligned,
    fail,
    note,
    number,
    one_line_errors,
    path,
    pick_checkpoint,
    pick_device,
    run_main,
)
from kvgpt.decoding.decode import Decoder
from kvgpt.decoding.sampling import Sampling, gumbel_noise, sample_token
from kvgpt.decoding.timing import Timing
from kvgpt.decoding.verify import near_tie
from kvgpt.engines.onnx import OnnxGPT
from kvgpt.export.onnx import write_onnx
from kvgpt.files import name_in_errors, write_atomically
from kvgpt.peers import (
    PerHeadLoop,
    llama2c_run,
    machine_rates,
    padded_stream,
    transformers_model,
    transformers_run,
)
from model import GPT, GPTConfig

VARIANTS = {
    "per_head_loop_uncached": "a Python loop over heads, no cache, as in articles",
    "per_head_loop": "the same, with a cache grown by torch.cat",
    "uncached": "GPT.generate(kv_cache=False)",
    "uncached+compile": "the same, compiled for a padded context",
    "eager": "GPT.generate, the default",
    "compile": "sample.py --compile",
    "draft": "sample.py --draft ngram",
    "compile+draft": "both",
    "onnx": "sample.py --engine onnx",
    "hf": "transformers' class for the same network, generate with its cache",
    "hf_nocache": "the same without its cache",
    "hf_static": "the same with its static cache",
    "llama2c": "llama2.c, plain C, a network of the same size; needs --llama2c",
}
PEERS = ("hf", "hf_nocache", "hf_static", "llama2c")  # they draw their own random numbers
UNCACHED = ("per_head_loop_uncached", "uncached", "uncached+compile", "hf_nocache")
OURS = ("uncached", "eager", "compile", "draft", "compile+draft", "onnx")  # the ways of sample.py
KV_CACHE = ("eager", "compile", "draft", "compile+draft")  # the variants that use the KVCache of the model
FIGURES = ("tokens_per_s", "ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms")  # see Timing.summary
COLUMNS = ("shape", "variant", "batch", *FIGURES, "speedup_over_uncached", "cache_bytes", "integrated", "busy_share")
PER_HEAD_STEPS = 200  # new tokens per run of the loop over heads: the length that articles about KV caches measure
PROMPT = 8  # characters of a real prompt; random weights start from one token
SLOW = 30.0  # seconds; see integrated_timing
NETWORKS = {  # the networks of train.py's recipes
    "modern": dict(pos_emb="rope", qk_norm=True, activation="swiglu", bias=False),
    "nanogpt": dict(activation="gelu_tanh"),
}


# -- the variants ------------------------------------------------------------------------------------------------------


def make_runs(model, ngrams, names, llama2c=None):
    """Return {name: run} of the variants that can be measured here. Reports on stderr why others cannot.

    llama2c  a clone of llama2.c
    run(idx, steps, seed, record) continues idx `(B, T)` by `steps` tokens per row. It calls record(block) with every
    block `(B, n)` of new tokens, as soon as the block is there.
    """
    hf = cache(partial(transformers_model, model))  # converted at the first call, for all three variants
    makers = {
        "per_head_loop_uncached": lambda: recorded(PerHeadLoop(model, kv_cache=False).stream),
        "per_head_loop": lambda: recorded(PerHeadLoop(model, kv_cache=True).stream),
        "uncached": lambda: recorded(partial(model.stream, kv_cache=False)),
        "uncached+compile": lambda: recorded(padded_stream(model)),
        "eager": lambda: recorded(model.stream),
        "compile": lambda: recorded(Decoder(model, compile=True).stream),
        "draft": lambda: recorded(draft_decoder(model, ngrams, compile=False).stream),
        "compile+draft": lambda: recorded(draft_decoder(model, ngrams, compile=True).stream),
        "onnx": lambda: recorded(onnx_stream(model)),
        "hf": lambda: transformers_run(hf()),
        "hf_nocache": lambda: transformers_run(hf(), use_cache=False),
        "hf_static": lambda: transformers_run(hf(), cache_implementation="static"),
        "llama2c": lambda: llama2c_run(model.config, llama2c),
    }
    runs, missing = {}, {}
    for name in dict.fromkeys(names):
        try:
            runs[name] = makers[name]()
        except ValueError as error:
            missing.setdefault(str(error), []).append(name)
    reasons = [f"no {', '.join(without)} rows: {reason}" for reason, without in missing.items()]
    if not runs:
        fail("; ".join(reasons))
    for reason in reasons:
        note(reason)
    return runs


def recorded(stream):
    """Return the run of a stream(idx, steps, seed=seed) that yields blocks."""

    def run(idx, steps, seed, record):
        for block in stream(idx, steps, seed=seed):
            record(block)

    return run


def draft_decoder(model, ngrams, compile):
    if ngrams is None:
        raise ValueError("drafts need the n-grams of a trained model: give a --ckpt that holds them")
    return Decoder(model, "ngram", ngrams, compile)


def onnx_stream(model):
    """Return the stream of the model as an ONNX file. Raises ValueError if a package is missing."""
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "model.onnx"
            chars = "".join(chr(0x10000 + i) for i in range(model.config.vocab_size))  # any, because no text is read
            write_onnx(copy.deepcopy(model).cpu(), chars, file)
            engine = OnnxGPT(file)
    except ImportError as error:
        raise ValueError(f"{error}: pip install onnx onnxscript onnxruntime") from None
    return lambda idx, steps, seed: engine.stream(idx.cpu(), steps, seed=seed)


def num_new_tokens(name, prompt_length, block_size):
    """Return how many tokens per row a run of the variant `name` generates."""
    steps = block_size - prompt_length
    return min(steps, PER_HEAD_STEPS) if name.startswith("per_head_loop") else steps


# -- measuring ---------------------------------------------------------------------------------------------------------


def timed(run, idx, steps, seed):
    """Run a variant once. Returns its Timing and the new tokens `(B, steps)`."""
    blocks, timing = [], Timing(idx.device)

    def record(block):
        timing.record(block.size(1))
        blocks.append(block)

    run(idx, steps, seed, record)
    return timing, torch.cat(blocks, dim=1).to(idx.device)


def measure(runs, prompts, block_size):
    """Run every variant once per prompt. Returns (timings, tokens).

    prompts  a list of idx `(B, T)`, one per repeat; the seed is the index in the list
    timings  {variant: list of Timings}
    tokens   {variant: list of new tokens `(B, n)`}
    A variant that cannot be compiled is left out. A variant that is too slow for a whole run has one Timing, from
    integrated_timing, and no entry in tokens.
    """
    T, timings, tokens = prompts[0].size(1), {}, {}

    # warm up
    for name, run in runs.items():
        steps = num_new_tokens(name, T, block_size)
        try:
            if name in UNCACHED and is_slow(run, prompts[0], steps):
                timings[name] = [integrated_timing(run, prompts[0], steps)]
                continue
            timed(run, prompts[0], steps, 0)
        except Exception as error:
            if "compile" not in name:
                raise
            # torch.compile reports a missing compiler in many ways
            note(f"no {name} row: {str(error).strip().splitlines()[0][:200]}")
            continue
        timings[name], tokens[name] = [], []

    # measure in turn, because the speed of a machine changes with time
    for seed, idx in enumerate(prompts):
        for name in tokens:
            timing, new = timed(runs[name], idx, num_new_tokens(name, T, block_size), seed)
            timings[name].append(timing)
            tokens[name].append(new)
    return timings, tokens


@contextmanager
def training_beside():
    """Train a model in another process inside the block, by train.py as a user would start it, on data/sample.txt."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log.txt"
        data = ["--data_dir", folder]
        prepare = [sys.executable, here / "data" / "prepare.py", "--input", here / "data" / "sample.txt", *data]
        subprocess.run(prepare, check=True, capture_output=True)
        endless = ["--max_iters", str(10**9), "--eval_interval", str(10**9), "--out_dir", folder]
        train = [sys.executable, here / "train.py", "--device", "cpu", *data, *endless]
        with open(log, "wb") as f, subprocess.Popen(train, stdout=f, stderr=f) as process:
            try:
                while b"step" not in log.read_bytes():
                    if process.poll() is not None:
                        fail(f"--busy: train.py has ended: {log.read_text(encoding='utf-8').strip()[-200:]}")
                    time.sleep(0.1)
                yield
            finally:
                process.kill()


def is_slow(run, idx, steps):
    """Return whether an uncached run would take over SLOW seconds. A mean step costs about half of the last one."""
    longest = idx[:, :1].repeat(1, idx.size(1) + steps - 1)
    timed(run, longest, 1, 0)  # warm up
    timing, _ = timed(run, longest, 1, 0)
    return timing.times[0] * steps / 2 > SLOW


def integrated_timing(run, idx, steps):
    """Return an estimated Timing of an uncached run that is too slow for a whole measurement.

    The time of an uncached step depends on the length of its context only. Single steps are measured at 12 lengths,
    from the first context of the run to the last. Times at the lengths between are interpolated linearly. The sum of
    all steps is the time of the run.
    """
    T, timing = idx.size(1), Timing(idx.device)
    lengths = np.unique(np.linspace(T, T + steps - 1, 12).round().astype(int))
    costs = [timed(run, idx[:, :1].repeat(1, length), 1, 0)[0].times[0] for length in lengths]
    timing.times = np.interp(range(T, T + steps), lengths, costs).cumsum().tolist()
    timing.sizes = [1] * steps
    return timing


@torch.no_grad()
def check_tokens(model, tokens, prompts):
    """Compare the tokens of all variants but the PEERS with the picks of one uncached forward over the whole text.

    tokens, prompts  see measure
    Returns remarks: the variants compared, and the near-ties. Exits if tokens are missing, or if rounding cannot
    explain a difference.
    """
    names, near_ties = [name for name in tokens if name not in PEERS], []
    for name in names:
        for seed, (new, idx) in enumerate(zip(tokens[name], prompts)):
            (B, T), run = idx.shape, f"{name}, seed {seed}"
            steps = num_new_tokens(name, T, model.config.block_size)
            if new.shape != (B, steps):
                fail(f"{run}: {new.size(1)} new tokens in {len(new)} rows, expected {steps} in {B}")
            logits = model(torch.cat((idx, new), dim=1)[:, :-1])[0][:, T - 1 :]
            counters = (torch.arange(n, device=idx.device) for n in (B, steps))
            sampling = Sampling(seed=seed)
            picks = sample_token(logits, gumbel_noise(seed, *counters, logits.size(-1)), *sampling.filters)
            for row, step in (picks != new).nonzero().tolist():
                context = [*idx[row].tolist(), *new[row, :step].tolist()]
                pair, where = (new[row, step].item(), picks[row, step].item()), f"{run}, row {row}, new token {step}"
                if not near_tie(model, context, row, step, pair, sampling):
                    fail(f"DIFFERENT from a forward without a cache: {where}")
                near_ties.append(f"near-tie: {where}")
    return [f"the same tokens as a forward without a cache: {', '.join(names)}", *near_ties] if names else []


def bench(shape, model, ngrams, prompts, names, busy=False, llama2c=None):
    """Measure one model. Returns (rows, curves, remarks).

    busy    measure the kit's variants again beside a training
    llama2c see make_runs
    rows    a dict per variant: COLUMNS, and two dicts {position: milliseconds}, ms_at and limit_ms_at
    curves  {variant: token_times}
    """
    config, (B, T) = model.config, prompts[0].shape
    runs = make_runs(model, ngrams, names, llama2c)
    timings, tokens = measure(runs, prompts, config.block_size)
    if not timings:
        fail("nothing could be measured")
    rows = make_rows(shape, model, timings, B, T, integrated=timings.keys() - tokens.keys())
    if busy:
        with training_beside():
            beside, _ = measure({name: runs[name] for name in tokens if name in OURS}, prompts, config.block_size)
        for row in rows:
            runs_beside = beside.get(row["variant"], [])
            speeds = [timing.summary(B * sum(timing.sizes))["tokens_per_s"] for timing in runs_beside]
            row["busy_share"] = statistics.median(speeds) / row["tokens_per_s"] if speeds else None
    curves = {name: token_times(runs, T) for name, runs in timings.items()}
    positions = shown_positions(config.block_size)
    for row in rows:
        curve = curves[row["variant"]]
        row["ms_at"] = {position: ms_at(curve, position) for position in positions if position <= max(curve, default=0)}
        row["limit_ms_at"] = {position: limit_ms(model, B, position, prompts[0].device) for position in positions}
    remarks = check_tokens(model, tokens, prompts) + row_remarks(rows)
    exact = [row for row in rows if row["variant"] in KV_CACHE]
    if exact:
        remarks.append(compare_with_peers(rows, max(exact, key=lambda row: row["tokens_per_s"])))
    return rows, curves, remarks


# -- the report --------------------------------------------------------------------------------------------------------


def make_rows(shape, model, timings, B, T, integrated):
    """Return a dict of COLUMNS per variant. Figures are medians over the runs of the variant."""
    figures = {}
    for name, runs in timings.items():
        summaries = [timing.summary(B * sum(timing.sizes)) for timing in runs]
        figures[name] = {key: statistics.median(summary[key] for summary in summaries) for key in FIGURES}
        if all(len(timing.sizes) == 1 < timing.sizes[0] for timing in runs):  # the times of its tokens are not known
            figures[name] |= dict.fromkeys(FIGURES[1:])
    uncached = figures["uncached"]["tokens_per_s"] if "uncached" in figures else None

    rows = []
    for name, runs in timings.items():
        num_slots = T + sum(runs[0].sizes) - 1  # cached positions at the end of a run; the last token is never fed
        if name in KV_CACHE or name == "hf_static":  # the whole cache is allocated at the start
            num_slots = model.config.block_size
        row = dict(shape=shape, variant=name, batch=B, **figures[name])
        row["speedup_over_uncached"] = row["tokens_per_s"] / uncached if uncached else None
        row["cache_bytes"] = 0 if name in UNCACHED else num_slots * bytes_per_slot(model, B)
        row["integrated"] = name in integrated
        row["busy_share"] = None  # measured by --busy
        rows.append(row)
    return rows


def bytes_per_slot(model, B):
    """Return the bytes of one position's keys and values, in all layers and all B rows."""
    config = model.config
    return 2 * config.n_layer * config.num_kv_heads * config.head_size * B * model.lm_head.weight.element_size()


def token_times(timings, T):
    """Return {position: median milliseconds per token of steps that ended there}, without the first step, a prefill."""
    gaps = {}
    for timing in timings:
        ends = T + np.cumsum(timing.sizes)
        for end, gap, size in zip(ends[1:].tolist(), np.diff(timing.times).tolist(), timing.sizes[1:]):
            gaps.setdefault(end, []).append(gap * 1e3 / size)
    return {end: statistics.median(times) for end, times in sorted(gaps.items())}


def row_remarks(rows):
    """Return what a reader must know about some of the rows."""
    names, remarks = [row["variant"] for row in rows], []
    if any(name.startswith("per_head_loop") for name in names):
        remarks.append(f"per_head_loop rows stop after {PER_HEAD_STEPS} new tokens and are not compiled")
    if any(name.startswith("hf") for name in names):
        remarks.append("hf rows draw their own random numbers and are not compiled")
    if "llama2c" in names:
        remarks.append("llama2c: another network of the same size with random weights; its text is one block")
    if any(row["busy_share"] for row in rows):
        remarks.append("busy: the speed beside a default train.py, as a share of the speed alone")
    remarks += [f"* {row['variant']}: measured at 12 positions and integrated" for row in rows if row["integrated"]]
    return remarks


def compare_with_peers(rows, best):
    """Return a remark that compares the fastest row with what a user could take instead."""
    speeds = {row["variant"]: row["tokens_per_s"] for row in rows}
    peers = [name for name in ("hf", "llama2c", "uncached", "per_head_loop") if name in speeds]
    ratios = [f"{best['tokens_per_s'] / speeds[name]:.1f} times {name}" for name in peers]
    return ", ".join([f"fastest with these tokens: {best['variant']}", *ratios])


def ms_at(curve, position):
    """Return the median of the nine times nearest to a position in {position: milliseconds}."""
    nearest = sorted(curve, key=lambda end: abs(end - position))[:9]
    return statistics.median(curve[end] for end in nearest)


def shown_positions(block_size):
    """Return the positions of the table of positions: powers of 4 from 16 on, and the last."""
    return [position for position in (16, 64, 256, 1024, 4096) if position <= block_size * 3 / 4] + [block_size]


def limit_ms(model, B, position, device):
    """Return the milliseconds that this machine needs at least for a step of B rows whose newest token is at position.

    The step reads the weights, and the keys and values of all positions so far. It multiplies every row by every
    matrix, and by the keys and values. The limit is the longer of two times: of the reading, at the rate of a copy, and
    of the multiplying, at the rate of a large matrix product.
    """
    config, (copied, multiplied) = model.config, machine_rates(device)
    matrices = (
        sum(p.numel() for p in model.transformer["h"].parameters() if p.dim() == 2) + model.lm_head.weight.numel()
    )
    read = matrices * model.lm_head.weight.element_size() + position * bytes_per_slot(model, B)
    operations = 2 * B * (matrices + 2 * config.n_layer * config.n_embd * position)
    return 1e3 * max(read / copied, operations / multiplied)


def table(rows):
    """Return the rows as aligned text."""
    header = ("shape", "variant", "tokens/s", "TTFT ms", "TPOT ms", "ITL p50", "ITL p99", "x uncached", "cache KB")
    busy = any(row["busy_share"] for row in rows)
    lines = [header + ("busy",) * busy]
    for row in rows:
        speed, *latencies = (row[key] for key in FIGURES)
        speedup = row["speedup_over_uncached"]
        lines.append(
            (row["shape"], row["variant"] + "*" * row["integrated"], f"{speed:,.0f}")
            + tuple("" if latency is None else f"{latency:.3f}" for latency in latencies)
            + ("" if speedup is None else f"{speedup:.2f}", f"{row['cache_bytes'] / 1024:,.0f}")
            + (f"{row['busy_share']:.0%}" if row["busy_share"] else "",) * busy
        )
    return aligned(lines, num_left=2)


def position_table(rows):
    """Return the times at several positions as aligned text, and the limit of the machine. "" if no time is known."""
    limits = rows[0]["limit_ms_at"]
    lines = [("ms per token", *(f"at {position}" for position in limits), "limit / last")]
    timed_rows = [(row["variant"], row["ms_at"]) for row in rows if row["ms_at"]]
    for name, times in [*timed_rows, ("limit", limits)]:
        last = max(times)
        cells = [f"{times[position]:.3f}" if position in times else "" for position in limits]
        lines.append((name, *cells, f"{limits[last] / times[last]:.0%}"))
    return aligned(lines, num_left=1) if timed_rows else ""


def plot(format, curves, rows):
    """Return a picture as bytes, with a panel per shape: milliseconds per token against the position.

    Each variant has a labelled line. Variants that end with the prefill have no line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(curves), figsize=(10, 5 * len(curves)), squeeze=False, layout="constrained")
    tab20 = plt.get_cmap("tab20").colors
    colors = dict(zip(VARIANTS, tab20[::2] + tab20[1::2]))  # dark ones first
    for axis, (shape, variants) in zip(axes[:, 0], curves.items()):
        speeds = {row["variant"]: row["tokens_per_s"] for row in rows if row["shape"] == shape}
        variants = {name: curve for name, curve in variants.items() if curve}
        tops = [np.quantile(list(curve.values()), 0.98) for curve in variants.values()]  # without outliers
        top = 1.05 * max(tops, default=1.0)
        last_label = -math.inf
        for name, curve in sorted(variants.items(), key=lambda item: smoothed(item[1])[-1]):
            ends, heights = list(curve), smoothed(curve)
            axis.plot(ends, heights, "--" if name in UNCACHED else "-", color=colors[name], lw=2)
            last_label = max(heights[-1], last_label + top / 24)  # labels of close lines stand above each other
            label = f" {name}: {speeds[name]:,.0f} tokens/s"
            axis.annotate(label, (ends[-1], last_label), color=colors[name], va="center", annotation_clip=False)
        title = f"{shape}, batch {rows[0]['batch']}: milliseconds per token"
        axis.set(title=title, xlabel="position of the token", ylim=(0, max(top, last_label)))
        axis.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format=format, dpi=110, facecolor="white", bbox_inches="tight")
    return picture.getvalue()


def smoothed(curve, width=9):
    """Return the running median of a {position: milliseconds}, because single steps are noisy."""
    values = list(curve.values())
    return [statistics.median(values[max(0, i - width // 2) : i + width // 2 + 1]) for i in range(len(values))]


# -- the command line --------------------------------------------------------------------------------------------------


def shape(text):
    """An argparse type: layers/heads/width/context, as four integers."""
    layers, heads, width, context = (int(part) for part in text.split("/"))
    return layers, heads, width, context


shape.__name__ = "layers/heads/width/context"  # argparse says "invalid layers/heads/width/context value"


def shape_config(shape, recipe):
    """Return the GPTConfig of a shape in the network of a recipe. Raises ValueError for a shape that it cannot have."""
    layers, heads, width, context = shape
    sizes = dict(block_size=context, vocab_size=65, n_layer=layers, n_head=heads, n_embd=width)
    try:
        config = GPTConfig(**sizes, **NETWORKS[recipe])
        require_room(config)
    except ValueError as error:
        raise ValueError(f"--shapes {'/'.join(map(str, shape))}: {error}") from None
    return config


def require_room(config):
    if config.block_size < 2:
        raise ValueError(f"a context of {config.block_size} has no room for a prompt and a new token")


def parse_args():
    variants = "\n".join(f"  {name:24} {text}" for name, text in VARIANTS.items())
    parser = Parser(f"{__doc__}\nvariants:\n{variants}")
    add = parser.add_argument
    add("--ckpt", nargs="+", type=path, metavar="FILE", help="default: out/ckpt.pt, or the model in the box")
    add("--shapes", nargs="+", type=shape, metavar="L/H/C/S", help="random weights of these shapes instead")
    add("--recipe", choices=NETWORKS, help="network of --shapes, as in train.py (default: modern)")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="default: all")
    add("--llama2c", type=path, metavar="FOLDER", help="measure llama2.c, too: a clone of its repository")
    add("--batch", type=number(int, "[1, 4096]"), default=1, help="rows (default: 1)")
    add("--repeats", type=number(int, "[1, 1000]"), default=5, help="runs of each variant (default: 5)")
    add("--busy", action="store_true", help="measure this kit's variants again beside a training")
    add("--device", default="auto", help="cpu, cuda; auto: cuda where there is one (default: auto)")
    add("--csv", type=path, default="out/bench.csv", metavar="FILE", help="default: out/bench.csv")
    add("--json", type=path, metavar="FILE", help="write the rows as a list of objects")
    add("--plot", type=path, metavar="FILE", help="draw the time per token against its position (matplotlib)")
    args = parser.parse_args()
    if "llama2c" in (args.variants or ()) and not args.llama2c:
        parser.error("the variant llama2c needs --llama2c, a clone of its repository")
    if args.llama2c and args.batch > 1:
        parser.error("--llama2c generates one text: leave out --batch")
    args.variants = args.variants or [name for name in VARIANTS if name != "llama2c"]
    args.variants += ["llama2c"] * (args.llama2c is not None)
    if args.shapes and args.ckpt:
        parser.error("--shapes has random weights, --ckpt trained ones: give one of them")
    if args.shapes and set(args.variants) <= {"draft", "compile+draft"}:
        parser.error("a draft needs the n-grams of a trained model: leave out --shapes")
    if args.recipe and not args.shapes:
        parser.error("--recipe goes with --shapes: a checkpoint has its own network")
    try:
        args.shapes = [shape_config(shape, args.recipe or "modern") for shape in args.shapes or ()]
    except ValueError as error:
        parser.error(str(error))
    return args


def is_device(file):
    """Return whether a path is a device or a pipe, such as /dev/null, which a rename would replace by a file."""
    return file.exists() and not file.is_file() and not file.is_dir()


def check_outputs(args):
    """Exit if a file cannot be written. The check comes first, because a run takes minutes."""
    outputs = [Path(file).resolve() for file in (args.csv, args.json, args.plot) if file]
    taken = [Path(file).resolve() for file in args.ckpt or ()]
    for i, file in enumerate(outputs):
        if file in outputs[:i] + taken:
            fail(f"{file} has two uses: name another file for --csv, --json or --plot")
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            fail("--plot needs matplotlib: pip install matplotlib")
        suffixes = (".png", ".svg", ".pdf", ".jpg")
        if Path(args.plot).suffix not in suffixes:
            fail(f"--plot {args.plot} must end in one of {', '.join(suffixes)}")
    for file in outputs:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not is_device(file):
            with name_in_errors(file), tempfile.TemporaryFile(dir=file.parent):  # where write_atomically writes first
                pass


def models(args, device):
    """Yield (shape, model, ngrams, prompts) per model to measure. See measure for the prompts.

    Raises FileNotFoundError or ValueError with one line.
    """
    seen = []
    for file in () if args.shapes else args.ckpt or [pick_checkpoint(None, None)]:
        checkpoint = load_checkpoint(file)
        model, chars = checkpoint.build_language_model()
        ngrams = checkpoint.checked_ngrams()
        require_room(model.config)
        prompts = real_prompts(chars, args.batch, args.repeats, min(PROMPT, model.config.block_size // 2))
        yield shape_name(model.config, seen), model.to(device), ngrams, [idx.to(device) for idx in prompts]
    for config in args.shapes:
        torch.manual_seed(1337)
        prompts = [torch.full((args.batch, 1), seed % config.vocab_size, device=device) for seed in range(args.repeats)]
        yield shape_name(config, seen), GPT(config).to(device).eval(), None, prompts


def shape_name(config, seen):
    """Return the shape as text and append it to `seen`, a list. A shape that was seen before gets a number."""
    seen.append(f"{config.n_layer}/{config.n_head}/{config.n_embd}/{config.block_size}")
    return seen[-1] + (f" ({seen.count(seen[-1])})" if seen.count(seen[-1]) > 1 else "")


def real_prompts(chars, batch, repeats, length):
    """Return ids `(batch, length)` per repeat: beginnings of lines in data/sample.txt."""
    text = Path(__file__).with_name("data").joinpath("sample.txt").read_text(encoding="utf-8")
    starts = {line[:length] for line in text.splitlines() if len(line) >= length and set(line[:length]) <= set(chars)}
    starts = sorted(starts) or [chars[:length].ljust(length, chars[0])]  # a vocabulary without these characters
    ids = torch.tensor([[chars.index(char) for char in start] for start in starts])
    return [ids[torch.arange(r * batch, (r + 1) * batch) % len(ids)] for r in range(repeats)]


def write(args, rows, curves):
    """Write the files that the flags name: all of them, or none after an error. A device or a pipe is written last."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    contents = {args.csv: text.getvalue().encode()}
    if args.json:
        contents[args.json] = (json.dumps(rows, indent=1) + "\n").encode()
    if args.plot:
        contents[args.plot] = plot(Path(args.plot).suffix[1:], curves, rows)
    contents = {Path(file).resolve(): content for file, content in contents.items()}  # a link stays a link
    write_atomically({file: content for file, content in contents.items() if not is_device(file)})
    for file in filter(is_device, contents):
        with name_in_errors(file), open(file, "wb") as f:
            f.write(contents[file])


def main():
    args = parse_args()
    check_outputs(args)
    with one_line_errors():
        device = pick_device(args.device)
        measured = list(models(args, device))  # reads every file before the first minutes pass

    # measure
    rows, curves = [], {}
    for shape, model, ngrams, prompts in measured:
        note(f"measuring {shape} ..")
        new_rows, curves[shape], remarks = bench(shape, model, ngrams, prompts, args.variants, args.busy, args.llama2c)
        rows += new_rows
        texts = [table(new_rows), position_table(new_rows), "\n".join(remarks)]
        print("\n\n".join(filter(None, texts)) + "\n", flush=True)
        write(args, rows, curves)
    threads = f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__} on {device} ({threads}), float32, medians of {args.repeats} runs in turn")


if __name__ == "__main__":
    run_main(main, memory_hint="a smaller shape or --batch would fit")
