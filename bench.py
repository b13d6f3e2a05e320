"""Measure how fast each way to decode is, beside other implementations.

    python bench.py                                     the model in out, or the one that comes with the code
    python bench.py --ckpt a/ckpt.pt b/ckpt.pt --plot bench.png
    python bench.py --shapes 6/8/256/256 --batch 16     random weights; a shape is layers/heads/width/context
    python bench.py --busy                              the kit's rows again while train.py runs in another process

Every variant writes whole texts, from one token to the end of the context, one right after another. After a warm-up
the variants take turns, --repeats times, and the figures are medians. The single text that sample.py writes can be
slower, because nothing is warm when it begins. The kit's variants must give the tokens of a forward without a cache,
or bench.py fails. A variant that cannot run here is left out, and a line says why.
"""

import copy
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from kvgpt.checkpoint import first_line, load_checkpoint
from kvgpt.cli import Parser, aligned, fail, note, number, one_line_errors, path, pick_checkpoint, pick_device, run_main
from kvgpt.cores import share_cores
from kvgpt.decoding.decode import NUM_DRAFTS, Decoder
from kvgpt.decoding.timing import Timing
from kvgpt.decoding.verify import near_tie
from kvgpt.files import write_atomically
from kvgpt.peers import llama2c_run, per_head_loop, transformers_run
from model import GPT, GPTConfig, Sampling, gumbel_noise, sample_token

VARIANTS = {
    "per_head_loop": "a Python loop over heads with a cache grown by torch.cat, as in articles",
    "uncached": "sample.py --no-kv_cache",
    "eager": "sample.py, the default",
    "compile": "sample.py --compile",
    "draft": "sample.py --draft ngram",
    "compile+draft": "both",
    "onnx": "sample.py --engine onnx",
    "hf": "transformers' class for the same network, generate with its cache",
    "llama2c": "llama2.c, plain C, another network of the same size; needs --llama2c",
}
KIT = ("uncached", "eager", "compile", "draft", "compile+draft", "onnx")  # the ways of sample.py
OWN_NOISE = ("hf", "llama2c")  # they draw their own random numbers, so we cannot compare their tokens with ours
COLUMNS = {  # of the table; the figures are those of Timing.summary
    "shape": ("shape", "{}"),
    "variant": ("variant", "{}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "ttft_ms": ("TTFT ms", "{:.3f}"),
    "tpot_ms": ("TPOT ms", "{:.3f}"),
    "itl_p50_ms": ("ITL p50", "{:.3f}"),
    "itl_p99_ms": ("ITL p99", "{:.3f}"),
    "speedup_over_uncached": ("x uncached", "{:.2f}"),
    "busy_share": ("busy", "{:.0%}"),
}
LATENCIES = ("ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms")
NETWORKS = {  # the networks of train.py's recipes
    "modern": dict(pos_emb="rope", qk_norm=True, activation="swiglu", bias=False),
    "nanogpt": dict(activation="gelu_tanh"),
}


# -- the variants ------------------------------------------------------------------------------------------------------


def warm_runs(names, model, ngrams, llama2c, idx):
    """Return {name: run} of the variants that can continue idx `(B, T)`, after each of them has done so once.

    run(idx, steps, seed, record) calls record(block) with each block `(B, n)` of new tokens as soon as it is there.
    llama2c is a clone of llama2.c.
    """
    work = len(idx) * sum(p.numel() for p in model.parameters())  # multiply-adds that torch does per fed token
    makers = {
        "per_head_loop": lambda: recorded(per_head_loop(model), work),
        "uncached": lambda: recorded(partial(model.stream, kv_cache=False), work * model.config.block_size),
        "eager": lambda: recorded(model.stream, work),
        "compile": lambda: recorded(Decoder(model, compile=True).stream),
        "draft": lambda: recorded(draft_decoder(model, ngrams).stream, work * (NUM_DRAFTS + 1)),
        "compile+draft": lambda: recorded(draft_decoder(model, ngrams, compile=True).stream),
        "onnx": lambda: recorded(onnx_stream(model)),
        "hf": lambda: transformers_run(model),
        "llama2c": lambda: llama2c_run(model.config, llama2c),
    }
    runs = {}
    for name in names:
        try:
            run = makers[name]()
            timed(run, idx, model.config.block_size - idx.size(1), seed=0)
            runs[name] = run
        except Exception as error:  # a missing package or compiler, or an edited network, can raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            note(f"no {name} row: {kind}{first_line(error)[:200]}")
    return runs


def recorded(stream, multiply_adds=0):
    """Return the run of a stream(idx, steps, seed=seed). Its threads are those of sample.py: see share_cores."""

    def run(idx, steps, seed, record):
        with share_cores(multiply_adds):
            for block in stream(idx, steps, seed=seed):
                record(block)

    return run


def draft_decoder(model, ngrams, compile=False):
    if ngrams is None:
        raise ValueError("drafts need the n-grams of a trained model: give a --ckpt that holds them")
    return Decoder(model, "ngram", ngrams, compile)


def onnx_stream(model):
    """Export the model to a temporary file and return the stream of ONNX Runtime, which runs on the CPU."""
    from kvgpt.engines.onnx import OnnxGPT
    from kvgpt.export.onnx import write_onnx

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "model.onnx"
        chars = "".join(chr(0x10000 + i) for i in range(model.config.vocab_size))  # any, because no text is read
        write_onnx(copy.deepcopy(model).cpu(), chars, file)
        engine = OnnxGPT(file)
    return lambda idx, steps, seed: engine.stream(idx.cpu(), steps, seed=seed)


# -- measuring ---------------------------------------------------------------------------------------------------------


def timed(run, idx, steps, seed):
    """Run a variant once. Returns its Timing and the new tokens `(B, steps)`."""
    blocks, timing = [], Timing(idx.device)

    def record(block):
        timing.record(block.size(1) if len(block) == 1 else (block >= 0).sum().item() / len(block))
        blocks.append(block)

    run(idx, steps, seed, record)
    new = [row[row >= 0] for row in torch.cat(blocks, dim=1).to(idx.device)]  # -1 pads a row that was slower
    if {len(row) for row in new} != {steps}:
        raise ValueError(f"rows of {sorted({len(row) for row in new})} new tokens, expected {steps}")
    return timing, torch.stack(new)


def measure(runs, idx, steps, repeats):
    """Run every variant with the seeds 0, 1, .. in turn, because the speed of a machine changes with time.

    Returns (timings, tokens): {name: list of Timings}, {name: list of new tokens `(B, steps)`}, indexed by the seed.
    """
    timings, tokens = defaultdict(list), defaultdict(list)
    for seed in range(repeats):
        for name, run in runs.items():
            timing, new = timed(run, idx, steps, seed)
            timings[name].append(timing)
            tokens[name].append(new)
    return timings, tokens


@contextmanager
def training_beside():
    """Train a model in another process inside the block, by train.py as a user would start it, on data/sample.txt."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log, data = Path(folder) / "log.txt", ["--data_dir", folder]
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


@torch.no_grad()
def check_tokens(model, idx, tokens):
    """Compare the tokens of `measure` with the picks of one forward over the whole text, which needs no cache.

    Returns remarks: the variants compared, and each pick that differs by a near-tie. Exits with one line after any
    other difference.
    """
    names, near_ties = [name for name in tokens if name not in OWN_NOISE], []
    for name in names:
        for seed, new in enumerate(tokens[name]):
            logits = model(torch.cat((idx, new), dim=1)[:, :-1])[0][:, idx.size(1) - 1 :]
            counters = (torch.arange(n, device=idx.device) for n in new.shape)
            sampling = Sampling(seed=seed)
            picks = sample_token(logits, gumbel_noise(seed, *counters, logits.size(-1)), *sampling.filters)
            for row, step in (picks != new).nonzero().tolist():
                context = [*idx[row].tolist(), *new[row, :step].tolist()]
                pair = (new[row, step].item(), picks[row, step].item())
                where = f"{name}, seed {seed}, row {row}, new token {step}"
                if not near_tie(model, context, row, step, pair, sampling):
                    fail(f"DIFFERENT from a forward without a cache: {where}")
                near_ties.append(f"near-tie: {where}")
    return [f"the same tokens as a forward without a cache: {', '.join(names)}", *near_ties] if names else []


def bench(file, model, ngrams, idx, args):
    """Measure one model, which came from `file`, with the prompts idx `(B, T)`.

    Returns (rows, remarks): a dict per variant, and lines of text.
    """
    (B, T), config = idx.shape, model.config
    shape, steps = f"{config.n_layer}/{config.n_head}/{config.n_embd}/{config.block_size}", config.block_size - T
    note(f"measuring {shape} {f'of {file} ' if file else ''}..")
    runs = warm_runs(args.variants, model, ngrams, args.llama2c, idx)
    if not runs:
        fail("nothing could be measured")
    timings, tokens = measure(runs, idx, steps, args.repeats)
    remarks, beside = check_tokens(model, idx, tokens), {}
    if args.busy:
        with training_beside():
            beside, _ = measure({name: runs[name] for name in runs if name in KIT}, idx, steps, args.repeats)
        remarks.append("busy: the speed beside a default train.py, as a share of the speed alone")

    rows = []
    for name in runs:
        row = dict(ckpt=file, shape=shape, variant=name, batch=B) | median_figures(timings[name], B)
        speed_beside = median_figures(beside[name], B)["tokens_per_s"] if name in beside else None
        row["busy_share"] = speed_beside and speed_beside / row["tokens_per_s"]
        row["ms_per_token"] = step_times(timings[name], T)
        rows.append(row)
    uncached = next((row["tokens_per_s"] for row in rows if row["variant"] == "uncached"), None)
    for row in rows:
        row["speedup_over_uncached"] = uncached and row["tokens_per_s"] / uncached
    return rows, remarks


def median_figures(timings, B):
    """Return {figure: median over the runs}. A text that comes as one block has no times of its tokens: None."""
    summaries = [timing.summary(B * sum(timing.sizes)) for timing in timings]
    figures = {key: statistics.median(each[key] for each in summaries) for key in ("tokens_per_s", *LATENCIES)}
    one_block = all(len(timing.times) == 1 for timing in timings)
    return figures | (dict.fromkeys(LATENCIES) if one_block else {})


def step_times(timings, T):
    """Return {position: median milliseconds per token of the steps that ended there}, without the prefill."""
    times = defaultdict(list)
    for timing in timings:
        position = T + timing.sizes[0]
        for began, ended, size in zip(timing.times, timing.times[1:], timing.sizes[1:]):
            position += size
            times[round(position)].append(1e3 * (ended - began) / size)  # of rows with guesses, the mean
    return {position: statistics.median(times[position]) for position in sorted(times)}


# -- the report --------------------------------------------------------------------------------------------------------


def table(rows):
    """Return the rows as aligned text. A column in which no row has a value is left out."""
    columns = {key: column for key, column in COLUMNS.items() if any(row[key] is not None for row in rows)}
    lines = [[title for title, _ in columns.values()]]
    for row in rows:
        lines.append(["" if row[key] is None else form.format(row[key]) for key, (_, form) in columns.items()])
    return aligned(lines, num_left=2)


def plot(measured, format):
    """Return a picture as bytes, with a panel per model: milliseconds per token against the position of the token.

    measured  the rows of each model; a variant whose text came as one block has no line
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(measured), figsize=(10, 5 * len(measured)), squeeze=False, layout="constrained")
    colors = dict(zip(VARIANTS, plt.get_cmap("tab10").colors))
    for axis, rows in zip(axes[:, 0], measured):
        for row in rows:
            name, curve = row["variant"], row["ms_per_token"]
            times = list(curve.values())
            smooth = [statistics.median(times[max(0, i - 4) : i + 5]) for i in range(len(times))]  # steps are noisy
            label = f"{name}: {row['tokens_per_s']:,.0f} tokens/s"
            if curve:
                axis.plot(list(curve), smooth, color=colors[name], lw=2, label=label)
        axis.set_title(f"{rows[0]['shape']}, batch {rows[0]['batch']}: milliseconds per token")
        axis.set_xlabel("position of the token")
        axis.set_ylim(bottom=0)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    picture = io.BytesIO()
    figure.savefig(picture, format=format, dpi=110, facecolor="white")
    plt.close(figure)
    return picture.getvalue()


def write(args, measured):
    """Write the files that --json and --plot name, from the rows of each model."""
    contents = {}
    if args.json:
        rows = [row for rows in measured for row in rows]
        contents[Path(args.json)] = (json.dumps(rows, indent=1) + "\n").encode()
    if args.plot:
        contents[Path(args.plot)] = plot(measured, Path(args.plot).suffix[1:])
    for file in contents:
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(contents)


# -- the command line --------------------------------------------------------------------------------------------------


def shape(text):
    """An argparse type: layers/heads/width/context, as four integers."""
    n_layer, n_head, n_embd, block_size = (int(part) for part in text.split("/"))
    return dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size)


def parse_args():
    variants = "\n".join(f"  {name:14} {text}" for name, text in VARIANTS.items())
    parser = Parser(f"{__doc__}\nvariants:\n{variants}")
    add, add_model = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add_model("--ckpt", nargs="+", type=path, metavar="FILE", help="default: out/ckpt.pt, or the model in the box")
    add_model("--shapes", nargs="+", type=shape, metavar="L/H/C/S", help="random weights of these shapes instead")
    add("--recipe", choices=NETWORKS, help="network of --shapes, as in train.py (default: modern)")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="default: all")
    add("--llama2c", type=path, metavar="FOLDER", help="measure llama2.c, too: a clone of its repository")
    add("--batch", type=number(int, "[1, 4096]"), default=1, help="rows (default: 1)")
    add("--repeats", type=number(int, "[1, 1000]"), default=5, help="runs of each variant (default: 5)")
    add("--busy", action="store_true", help="measure this kit's variants again beside a training")
    add("--device", default="auto", help="cpu, cuda; auto: cuda where there is one (default: auto)")
    add("--json", type=path, metavar="FILE", help="write the rows as a list of objects")
    add("--plot", type=path, metavar="FILE", help="draw the time per token against its position (matplotlib)")
    args = parser.parse_args()

    if "llama2c" in (args.variants or ()) and not args.llama2c:
        parser.error("the variant llama2c needs --llama2c, a clone of its repository")
    names = args.variants or [name for name in VARIANTS if name != "llama2c"]
    args.variants = list(dict.fromkeys(names + ["llama2c"] * bool(args.llama2c)))
    if args.recipe and not args.shapes:
        parser.error("--recipe goes with --shapes: a checkpoint has its own network")
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib: pip install matplotlib")
        if Path(args.plot).suffix not in (".png", ".svg", ".pdf", ".jpg"):
            parser.error(f"--plot {args.plot} must end in .png, .svg, .pdf or .jpg")
    return args


def models(args, device):
    """Yield (file, model, ngrams, idx) per model, the first arguments of `bench`. A text begins with a newline.

    Raises FileNotFoundError or ValueError with one line.
    """

    def prompts(token):
        return torch.full((args.batch, 1), token, device=device)

    for sizes in args.shapes or ():
        torch.manual_seed(1337)
        config = GPTConfig(vocab_size=65, **sizes, **NETWORKS[args.recipe or "modern"])
        yield None, GPT(config).to(device).eval(), None, prompts(0)
    for file in () if args.shapes else args.ckpt or [pick_checkpoint(None, None)]:
        checkpoint = load_checkpoint(file)
        model, chars = checkpoint.build_language_model()
        newline = max(0, chars.find("\n"))  # or the first character, if there is none
        yield str(file), model.to(device), checkpoint.ngrams, prompts(newline)


def main():
    args = parse_args()
    with one_line_errors():
        device = pick_device(args.device)
        found = list(models(args, device))  # reads every file before the first minutes pass

    measured = []
    for file, model, ngrams, idx in found:
        rows, remarks = bench(file, model, ngrams, idx, args)
        print("\n".join([table(rows), "", *remarks]) + "\n", flush=True)
        measured.append(rows)
        write(args, measured)  # after each model, so that a long run leaves something
    print(f"torch {torch.__version__} on {device} ({torch.get_num_threads()} threads), float32")
    print(f"medians of {args.repeats} whole texts, written back to back; a single text of sample.py can be slower")


if __name__ == "__main__":
    run_main(main, memory_hint="a smaller shape or --batch would fit")
