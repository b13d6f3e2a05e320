"""Measure how fast each way to decode is, compared with other implementations.

    python -m extras.bench                                  the model in out, or the pretrained one
    python -m extras.bench --ckpt a/ckpt.pt b/ckpt.pt --plot bench.png
    python -m extras.bench --shapes 6/8/256/256 --batch 16  random weights; a shape is layers/heads/width/context
    python -m extras.bench --shapes 12/12/768/1024/50257    ... or layers/heads/width/context/vocabulary (default: 65)
    python -m extras.bench --parts --batch 64               where a step of --compile spends its time

Every variant starts from one token and fills the context. After a warm-up the variants take turns, --repeats times, and
the figures are medians. The benchmark fails unless our own variants give the tokens of a forward without a cache. If a
variant cannot run here, it is left out, and a note says why.
"""

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # for python extras/bench

from extras.bench.baselines import OpenVinoGPT, ctranslate2_run, llama2c_run, transformers_run
from extras.bench.parts import parts
from extras.cli import Parser, fail, first_line, need, note, one_line_errors, run_main
from extras.decode.cuda_graph import GraphedGPT
from extras.decode.engine import NUM_DRAFTS, Decoder
from extras.decode.quantize import round_weights
from extras.formats.checkpoint import load_checkpoint
from extras.formats.onnx import OnnxGPT, write_onnx
from extras.plot import save_pictures
from extras.threads import torch_threads
from model import (
    GPT,
    CharTokenizer,
    GPTConfig,
    Sampling,
    build_model,
    generate,
    gumbel_noise,
    near_tie,
    num_threads,
    pick_device,
    sample_token,
    write_atomically,
)

VARIANTS = {
    "uncached": "sample.py --no-kv_cache",
    "eager": "sample.py --kv_cache",
    "draft": "sample.py --draft ngram",
    "compile": "sample.py --compile",
    "compile+draft": "sample.py --draft ngram --compile",
    "int8": "sample.py --weights int8 --compile",
    "onnx": "sample.py --engine onnx",
    "openvino": "OpenVINO",
    "hf": "transformers' generate",
    "ctranslate2": "CTranslate2",
    "llama2c": "llama2.c",
}
NETWORKS = {  # of train.py's recipes
    "modern": dict(pos_emb="rope", qk_norm=True, activation="swiglu", mlp_ratio=4.2, bias=False),
    "nanogpt": dict(bias=False),
}
FOUR_WIDE = ((6, 6, 384, 256), (4, 4, 64, 32))  # its presets gpu and lecture, which have mlp_ratio 4 in both recipes
BASELINES = ("hf", "ctranslate2", "llama2c")  # they draw their own random numbers, so their tokens differ from ours
MOST_MEMORY = 0.5  # of the machine's, for a variant; OpenVINO takes 20 GB for 64 rows of the larger shapes
COLUMNS = {  # of the table: key of a row, title and format; the figures are those of `summary`
    "shape": ("shape", "{}"),
    "variant": ("variant", "{}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "ttft_ms": ("TTFT ms", "{:.3f}"),
    "tpot_ms": ("TPOT ms", "{:.3f}"),
    "itl_p50_ms": ("ITL p50", "{:.3f}"),
    "itl_p99_ms": ("ITL p99", "{:.3f}"),
    "speedup_over_uncached": ("x uncached", "{:.2f}"),
}


# -- the variants ------------------------------------------------------------------------------------------------------


def warm_runs(names, model, llama2c, idx):
    """Return {name: run} of the variants that can continue idx `(B, T)`, after each has done so once, and the seconds.

    run(idx, steps, seed, record) calls record(block) with each block `(B, n)` of new tokens as it arrives.
    """
    B = len(idx)
    whole_context = B * model.config.block_size
    drafts = B * (NUM_DRAFTS + 1)
    makers = {
        "uncached": lambda: recorded(plain_stream(model, kv_cache=False), num_threads(model, whole_context)),
        "eager": lambda: recorded(plain_stream(model), num_threads(model, B)),
        "compile": lambda: recorded(compiled_stream(model, B)),
        "draft": lambda: recorded(Decoder(model, "ngram", model.ngrams).stream, num_threads(model, drafts)),
        "compile+draft": lambda: recorded(Decoder(model, "ngram", model.ngrams, compile=True).stream),
        "int8": lambda: recorded(Decoder(round_weights(copy.deepcopy(model)), compile=True, weights="int8").stream),
        "onnx": lambda: recorded(graph_stream(model, OnnxGPT)),
        "openvino": lambda: recorded(graph_stream(model, lambda file: OpenVinoGPT(file, model.config))),
        "hf": lambda: transformers_run(model),
        "ctranslate2": lambda: ctranslate2_run(model),
        "llama2c": lambda: llama2c_run(model.config, llama2c),
    }
    runs = {}
    seconds = 0.0
    for name in tqdm(names, "warm-up", leave=False, disable=None):
        try:
            run = makers[name]()
            times, *_ = timed(run, idx, model.config.block_size - idx.size(1), seed=0)
            runs[name] = run
            seconds += times[-1]
        except Exception as error:  # a missing package or compiler, or an edited network, may raise anything
            note(f"no {name} row: {first_line(error)}")
    return runs, seconds


def recorded(stream, threads=1):
    """Return the run of a stream(idx, steps, seed=seed), with this number of torch's threads."""

    def run(idx, steps, seed, record):
        with torch_threads(threads):
            for block in stream(idx, steps, seed=seed):
                record(block)

    return run


def plain_stream(model, kv_cache=True):
    """Return the stream of the loop in model.py, for a GPT or whatever `generate` accepts as one."""
    return lambda idx, steps, seed: generate(model, idx, steps, Sampling(seed=seed), kv_cache)


def compiled_stream(model, batch_size):
    """Return the stream of --compile: the C backend, or on a GPU a CUDA graph, recorded once for all runs."""
    if model.device.type == "cuda":
        return GraphedGPT(model, batch_size, model.config.block_size, Sampling()).stream
    return Decoder(model, compile=True).stream


def graph_stream(model, load):
    """Export the model to a temporary file and return the stream of load(file), which runs on the CPU."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "model.onnx"
        chars = "".join(chr(0x10000 + i) for i in range(model.config.vocab_size))  # any, because no text is read
        write_onnx(copy.deepcopy(model).cpu(), CharTokenizer(chars), file)
        stream = plain_stream(load(file))
    return lambda idx, steps, seed: stream(idx.cpu(), steps, seed)


# -- measuring ---------------------------------------------------------------------------------------------------------


def timed(run, idx, steps, seed):
    """Run a variant once. Returns (times, sizes, new).

    times  seconds from the start to the arrival of each block of new tokens
    sizes  new tokens per row in each block, on average over the rows
    new    the new tokens `(B, steps)`
    """
    blocks = []
    times = []

    def now():
        if idx.is_cuda:
            torch.cuda.synchronize(idx.device)
        return time.perf_counter()

    def record(block):
        times.append(now() - start)
        blocks.append(block)
        if len(blocks) % 16 == 1 and memory_share() > MOST_MEMORY:  # before the machine swaps; looking takes time, too
            raise MemoryError(f"it takes more than {MOST_MEMORY:.0%} of the memory")

    start = now()
    run(idx, steps, seed, record)
    sizes = [(block >= 0).sum().item() / len(block) for block in blocks]  # -1 pads a row that was slower
    rows = torch.cat(blocks, dim=1).to(idx.device)
    return times, sizes, torch.stack([row[row >= 0] for row in rows])


def summary(times, sizes, num_tokens):
    """Return the figures of a generation with num_tokens tokens in all rows together.

    ttft_ms                 time to first token: from the start to the end of the first step
    tpot_ms                 time per output token: mean over the tokens per row after the first step
    itl_p50_ms, itl_p99_ms  inter-token latency: median and 99th percentile of the time between blocks
    tokens_per_s            num_tokens per second, end to end
    """
    gaps = 1e3 * np.diff(times)
    p50, p99 = np.percentile(gaps, [50, 99]) if len(gaps) else (0.0, 0.0)
    return dict(
        ttft_ms=times[0] * 1e3,
        tpot_ms=(times[-1] - times[0]) * 1e3 / max(1, sum(sizes[1:])),
        itl_p50_ms=float(p50),
        itl_p99_ms=float(p99),
        tokens_per_s=num_tokens / times[-1],
    )


def memory_share():
    """Return the share of the machine's memory that this process uses, from 0 to 1. Only Linux says; elsewhere 0."""
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return resident / os.sysconf("SC_PHYS_PAGES")
    except OSError:
        return 0.0


def measure(runs, idx, steps, repeats):
    """Return {name: results of `timed` for the seeds 0, 1, ..}. A machine's speed changes, so variants take turns."""
    results = {name: [] for name in runs}
    turns = [(seed, name, run) for seed in range(repeats) for name, run in runs.items()]
    with tqdm(turns, "measure", leave=False, disable=None) as bar:
        for seed, name, run in bar:
            ready = time.perf_counter() + 0.02  # the threads of the last variant spin for a while before they sleep
            while time.perf_counter() < ready:
                run(idx, min(2, steps), seed, lambda block: None)
            results[name].append(timed(run, idx, steps, seed))
    return results


@torch.no_grad()
def compare_tokens(name, model, idx, tokens):
    """Exit with one line unless the tokens of a variant are the picks of one forward without a cache.

    tokens  the new tokens `(B, steps)` of each seed
    A near-tie, where rounding decides between two picks, is no difference.
    """
    for seed, new in enumerate(tokens):
        sampling = Sampling(seed=seed)
        logits = model(torch.cat((idx, new), dim=1)[:, :-1])[0][:, idx.size(1) - 1 :]
        samples, steps = (torch.arange(n, device=idx.device) for n in new.shape)
        noise = gumbel_noise(seed, samples, steps, logits.size(-1))
        picks = sample_token(logits, noise, sampling)
        for row, step in (picks != new).nonzero().tolist():
            if not near_tie(logits[row, step], noise[row, step], new[row, step].item(), sampling):
                fail(f"DIFFERENT from a forward without a cache: {name}, seed {seed}, row {row}, new token {step}")


def bench(file, model, idx, args):
    """Measure one model, from `file`, with the prompts idx `(B, T)`, and print the table.

    Returns its rows, a dict per variant.
    """
    B, T = idx.shape
    config = model.config
    shape = f"{config.n_layer}/{config.n_head}/{config.n_embd}/{config.block_size}"
    steps = config.block_size - T
    note(f"measuring {shape} {f'of {file} ' if file else ''}..")
    runs, seconds = warm_runs(args.variants, model, args.llama2c, idx)
    if not runs:
        fail("nothing could be measured")
    note(f"{args.repeats} runs of {len(runs)} variants, about {args.repeats * (seconds + 0.02 * len(runs)):.0f} s")
    ours = [name for name in runs if name not in BASELINES]

    rows = {}
    for name, results in measure(runs, idx, steps, args.repeats).items():
        if name in ours:
            reference = round_weights(copy.deepcopy(model)) if name == "int8" else model
            compare_tokens(name, reference, idx, [new for *_, new in results])
        rows[name] = dict(ckpt=file, shape=shape, variant=name, batch=B) | figures(results, T)
    if "uncached" in rows:
        for row in rows.values():
            row["speedup_over_uncached"] = row["tokens_per_s"] / rows["uncached"]["tokens_per_s"]

    print(table(rows.values()))
    print(f"\nthe same tokens as a forward without a cache, up to rounding: {', '.join(ours) or 'not compared'}")
    print(flush=True)
    return list(rows.values())


def figures(results, T):
    """Return the medians of results of `timed` after T tokens: the figures of `summary`, and ms_per_token.

    ms_per_token  {position: milliseconds per token of the steps that ended there}, without the prefill
    """
    found = defaultdict(list)
    for times, sizes, _ in results:
        position = T + sizes[0]
        for began, ended, size in zip(times, times[1:], sizes[1:]):
            position += size
            found[round(position)].append(1e3 * (ended - began) / size)  # with drafts, position is a mean over rows
    summaries = [summary(times, sizes, new.numel()) for times, sizes, new in results]
    medians = {key: statistics.median(each[key] for each in summaries) for key in summaries[0]}
    return medians | dict(ms_per_token={position: statistics.median(found[position]) for position in sorted(found)})


# -- the report --------------------------------------------------------------------------------------------------------


def table(rows):
    """Return the rows as aligned text. A column in which no row has a value is left out."""
    columns = {key: column for key, column in COLUMNS.items() if any(row.get(key) for row in rows)}
    lines = [[title for title, _ in columns.values()]]
    for row in rows:  # a single block has no times between blocks, so we show none instead of 0
        lines.append([form.format(row[key]) if row.get(key) else "" for key, (_, form) in columns.items()])
    return aligned(lines, num_left=2)


def aligned(rows, num_left):
    """Return rows of cells as text in columns. The first num_left columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for cells in rows:
        left = [cell.ljust(width) for cell, width in zip(cells[:num_left], widths)]
        right = [cell.rjust(width) for cell, width in zip(cells[num_left:], widths[num_left:])]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)


def plot(measured, colors):
    """Return a figure with a panel per model: milliseconds per token against the position of the token.

    measured  the rows of each model
    colors    one of THEMES in extras/plot.py
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5 * len(measured)), layout="constrained")
    for axis, rows in zip(figure.subplots(len(measured), squeeze=False)[:, 0], measured):
        ends = []  # of the lines, with their labels
        for row in rows:
            name, times = row["variant"], list(row["ms_per_token"].values())
            color = colors["off" if name == "uncached" else "on" if VARIANTS[name].startswith("sample.py") else "quiet"]
            if len(times) > 9:
                smooth = [statistics.median(times[max(0, i - 4) : i + 5]) for i in range(len(times))]  # steps are noisy
                axis.plot(list(row["ms_per_token"]), smooth, color=color, lw=2)
            else:  # llama2.c returns one block, and the C backend a few, so we only know the mean
                smooth = [1e3 / row["tokens_per_s"]]
                axis.axhline(smooth[0], color=color, lw=2, ls="--")
            ends.append((smooth[-1], f"{VARIANTS[name]}: {row['tokens_per_s']:,.0f} tokens/s", color))
        axis.set_title(f"{rows[0]['shape']}, batch {rows[0]['batch']}: milliseconds per token")
        axis.set_xlabel("position of the token")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        low, high = axis.get_ylim()
        lowest = 0
        for y, label, color in sorted(ends):
            y = max(y, lowest)
            lowest = y * (high / low) ** 0.05  # the labels do not overlap
            axis.text(1.01, y, label, color=color, va="center", transform=axis.get_yaxis_transform())
    return figure


# -- the command line --------------------------------------------------------------------------------------------------


def shape(text):
    """An argparse type: layers/heads/width/context, and optionally /vocabulary, which is 65 otherwise."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    sizes = [int(part) for part in text.split("/")]
    return dict(zip(names, sizes if len(sizes) == 5 else [*sizes, 65], strict=True))


def parse_args():
    variants = "\n".join(f"  {name:14} {text}" for name, text in VARIANTS.items())
    parser = Parser(f"{__doc__}\nvariants:\n{variants}")
    add = parser.add_argument
    add_model = parser.add_mutually_exclusive_group().add_argument
    add_model("--ckpt", nargs="+", metavar="FILE", help="default: out/ckpt.pt, or the pretrained model")
    add_model("--shapes", nargs="+", type=shape, metavar="L/H/C/S[/V]", help="measure random weights of these shapes")
    add("--recipe", choices=NETWORKS, help="network of --shapes, as in train.py (default: modern)")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="default: all")
    add("--llama2c", metavar="FOLDER", help="measure llama2.c too: a clone of its repository")
    add("--batch", type=int, default=1, help="rows, at most 4096 (default: 1)")
    add("--repeats", type=int, default=5, help="runs of each variant (default: 5)")
    add("--device", default="auto", help="cpu, cuda; auto: cuda if there is one (default: auto)")
    add("--parts", action="store_true", help="instead, measure the parts of a step of --compile, on the CPU")
    add("--json", metavar="FILE", help="write the rows as a list of objects")
    add("--plot", metavar="FILE", help="draw the time per token (matplotlib), and FILE-dark for a dark page")
    args = parser.parse_args()
    if "" in (args.ckpt or []):
        parser.error("--ckpt is empty")
    names = args.variants or [name for name in VARIANTS if name != "llama2c"]
    args.variants = [*names, "llama2c"] if args.llama2c else names
    if args.recipe and not args.shapes:
        parser.error("--recipe needs --shapes: a checkpoint has its own network")
    if not 1 <= args.batch <= 4096 or args.repeats < 1:
        parser.error(f"--batch {args.batch} is not from 1 to 4096, or --repeats {args.repeats} is below 1")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot {args.plot}: name a file that ends with .png, .svg or .pdf")
    return args


def network(recipe, sizes):
    """Return the GPTConfig that train.py makes for a recipe and sizes, from shape()."""
    config = GPTConfig(**NETWORKS[recipe] | sizes)
    if (config.n_layer, config.n_head, config.n_embd, config.block_size) in FOUR_WIDE:
        config.mlp_ratio = 4
    return config


def models(args):
    """Yield (file, model) for each model. Raises FileNotFoundError or ValueError with one line."""
    if args.shapes:
        for sizes in args.shapes:
            torch.manual_seed(1337)
            yield None, GPT(network(args.recipe or "modern", sizes)).eval()
    else:
        for file in args.ckpt or [None]:
            checkpoint = load_checkpoint(file)
            yield str(checkpoint["path"]), build_model(checkpoint).eval()


def main():
    args = parse_args()
    with one_line_errors():  # before measuring, so that a bad file or a missing package fails at once
        if args.plot:
            need("--plot", "matplotlib")
        found = list(models(args))
        for _, model in found:
            model.to(pick_device(args.device))

    device = found[0][1].device
    idx = torch.zeros(args.batch, 1, dtype=torch.int64, device=device)  # token 0 is usually the newline
    if args.parts:
        for _, model in found:
            print(aligned(parts(model, idx, args.repeats), num_left=1), end="\n\n")
        return
    measured = [bench(file, model, idx, args) for file, model in found]
    if args.json:
        rows = [row for rows in measured for row in rows]
        file = Path(args.json)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, [(json.dumps(rows, indent=1) + "\n").encode()])
    if args.plot:
        save_pictures(Path(args.plot), partial(plot, measured))
    print(f"torch {torch.__version__} on {device} ({torch.get_num_threads()} threads), float32")
    print(f"medians of {args.repeats} runs{'' if args.llama2c else '; --llama2c adds a row for llama2.c'}")


if __name__ == "__main__":
    run_main(main)
