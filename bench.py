"""Measure decoding: with and without a cache, compiled, by drafts, and beside what else a user could take.

    python bench.py                                        three shapes, weights from a fixed seed
    python bench.py --ckpt out/ckpt.pt --plot bench.png    a trained model, real prompts, drafts too
    python bench.py --shapes 6/8/256/256 --batch 16

Every variant generates to the end of the context (textbook: 200 tokens at most), from the same weights in turn,
--repeats times after a warm-up; figures are medians. The kit's own variants must give the same tokens, or the run
fails. Peers are measured where they are installed. A shape is layers/heads/width/context.
"""

import argparse
import copy
import csv
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from checkpoint import load_model
from decode import Decoder
from hf import model_type, to_transformers
from model import GPT, GPTConfig, gumbel_noise, sample_token
from onnx_gpt import OnnxGPT
from sample import OneLineParser, load_ngrams, near_tie, number, path, pick_device

VARIANTS = {
    "textbook_uncached": "a loop over Heads, no cache, as write-ups have it",
    "textbook": "the same, with a cache grown by torch.cat",
    "uncached": "GPT.generate(kv_cache=False)",
    "uncached+compile": "the same, compiled for a padded context",
    "eager": "GPT.generate, the default",
    "compile": "sample.py --compile",
    "draft": "sample.py --draft ngram",
    "compile+draft": "both",
    "onnx": "sample.py --engine onnx",
    "hf": "transformers' class for the same network, generate with its cache",
    "hf_nocache": "the same without",
    "hf_static": "the same with its static cache",
}
KEYS = (
    "shape variant batch tokens_per_s ttft_ms tpot_ms itl_p50_ms itl_p99_ms speedup_over_uncached cache_bytes"
).split()
TEXTBOOK_STEPS = 200  # the write-ups' recipe
PROMPT = 8  # characters of a real prompt; random weights start from one token
SLOW = 30.0  # seconds: an uncached run that would take longer is measured at 12 positions and integrated


# -- the write-ups' own design -----------------------------------------------------------------------------------------


class TextbookHead(nn.Module):
    """One head with its own three matrices, and a cache that grows by concatenation."""

    def __init__(self, query, key, value):
        super().__init__()
        self.query, self.key, self.value = query, key, value
        self.k_cache = self.v_cache = None

    def forward(self, x, use_cache):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if use_cache:
            if self.k_cache is not None:
                k, v = torch.cat((self.k_cache, k), dim=1), torch.cat((self.v_cache, v), dim=1)
            self.k_cache, self.v_cache = k, v
        weights = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5  # (B, T, t)
        T, t = weights.shape[-2:]
        visible = torch.ones(T, t, dtype=torch.bool, device=x.device).tril(t - T)
        return F.softmax(weights.masked_fill(~visible, float("-inf")), dim=-1) @ v


class Textbook(nn.Module):
    """The model's own weights behind a loop over Heads."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList()
        for block in model.transformer["h"]:
            attn = block.attn
            parts = zip(*(part.split(attn.head_size) for part in attn.c_attn.weight.split(model.config.n_embd)))
            biases = [None] * attn.n_head
            if attn.c_attn.bias is not None:
                biases = zip(*(part.split(attn.head_size) for part in attn.c_attn.bias.split(model.config.n_embd)))
            self.layers.append(
                nn.ModuleList(
                    TextbookHead(*(self.linear(w, None if bias is None else bias[i]) for i, w in enumerate(weights)))
                    for weights, bias in zip(parts, biases)
                )
            )

    @staticmethod
    def linear(weight, bias):
        linear = nn.Linear(weight.size(1), weight.size(0), bias=bias is not None, device=weight.device)
        linear.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().clone())
        return linear

    def forward(self, idx, start, use_cache):
        parts = self.model.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(start, start + idx.size(1), device=idx.device))
        for block, heads in zip(parts["h"], self.layers):
            normed = block.ln_1(x)
            x = x + block.attn.c_proj(torch.cat([head(normed, use_cache) for head in heads], dim=-1))
            x = x + block.mlp(block.ln_2(x))
        return self.model.lm_head(parts["ln_f"](x))

    @torch.no_grad()
    def generate(self, idx, steps, use_cache, arrive):
        for heads in self.layers:
            for head in heads:
                head.k_cache = head.v_cache = None
        for step in range(steps):
            fresh = idx[:, -1:] if use_cache and step else idx
            logits = self(fresh, idx.size(1) - fresh.size(1), use_cache)[:, -1]
            token = torch.multinomial(F.softmax(logits, dim=-1), 1)
            idx = torch.cat((idx, token), dim=1)
            arrive(token[:, 0].tolist())


# -- the variants ------------------------------------------------------------------------------------------------------


def is_gpt2(config):
    own = config.n_kv_head or config.qk_norm or config.mlp_ratio != 4
    return config.pos_emb == "learned" and config.norm_first and not own


class Arrivals:
    """When each step's tokens arrived, and how many places of the continuation they were."""

    def __init__(self, device):
        self.device = device
        self.rows, self.times, self.places = [], [], []
        self.began = self.now()

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, tokens, same_step=False):
        self.rows.append(tokens)
        if same_step:
            self.places[-1] += 1
        else:
            self.times.append(self.now() - self.began)
            self.places.append(1)


def make_variants(model, ngrams, names, compiled_uncached):
    """{name: function(idx, steps, seed, arrivals)} of the variants that can be had for this model."""
    config, decoders, runs = model.config, {}, {}

    def kit(kv_cache):
        def run(idx, steps, seed, arrivals):
            for tokens in model.stream(idx, steps, seed=seed, kv_cache=kv_cache):
                arrivals(tokens.tolist())

        return run

    def decoder(name):
        decoders[name] = Decoder(model, "ngram" if "draft" in name else None, ngrams, compile="compile" in name)

        def run(idx, steps, seed, arrivals):
            for tokens in decoders[name].stream(idx, steps, seed=seed):
                arrivals(tokens.tolist(), same_step=decoders[name].forwards == len(arrivals.times))

        return run

    def uncached_compiled(idx, steps, seed, arrivals):
        (B, T), V = idx.shape, config.vocab_size
        window = F.pad(idx, (0, config.block_size - T))
        noise = gumbel_noise(seed, torch.arange(B, device=idx.device), torch.arange(steps, device=idx.device), V)
        with torch.no_grad():
            for step in range(steps):
                logits = compiled_uncached(window, torch.tensor(T + step - 1, device=idx.device))
                token = sample_token(logits, noise[:, step])
                if T + step < config.block_size:
                    window[:, T + step] = token
                arrivals(token.tolist())

    if "uncached" in names:
        runs["uncached"] = kit(False)
    if "uncached+compile" in names:
        runs["uncached+compile"] = uncached_compiled
    if "eager" in names:
        runs["eager"] = kit(True)
    for name in ("compile", "draft", "compile+draft"):
        if name in names and ("draft" not in name or ngrams is not None):
            runs[name] = decoder(name)
    if is_gpt2(config):
        for name in ("textbook_uncached", "textbook"):
            if name in names:
                textbook = Textbook(model)
                runs[name] = lambda idx, steps, seed, arrivals, textbook=textbook, name=name: textbook.generate(
                    idx, min(steps, TEXTBOOK_STEPS), name == "textbook", arrivals
                )
    runs |= hf_variants(model, [name for name in names if name.startswith("hf")])
    runs |= onnx_variant(model) if "onnx" in names else {}
    return {name: runs[name] for name in names if name in runs}


def hf_variants(model, names):
    if not names:
        return {}
    try:
        import transformers

        model_type(model.config)
    except ImportError:
        print("no hf rows: transformers is not installed (pip install transformers)", file=sys.stderr)
        return {}
    except ValueError as error:
        print(f"no hf rows: {error}", file=sys.stderr)
        return {}
    transformers.logging.set_verbosity_error()
    hf, config = to_transformers(model), model.config
    idx = torch.arange(min(8, config.block_size), device=model.lm_head.weight.device)[None] % config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(hf(idx).logits, model(idx)[0], atol=1e-3, rtol=1e-3)

    def variant(name):
        options = {"hf": {}, "hf_nocache": {"use_cache": False}, "hf_static": {"cache_implementation": "static"}}[name]

        def run(idx, steps, seed, arrivals):
            def arrive(ids, scores, **_):  # called after every token
                arrivals(ids[:, -1].tolist())
                return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

            torch.manual_seed(seed)
            hf.generate(
                idx,
                attention_mask=torch.ones_like(idx),
                max_new_tokens=steps,
                do_sample=True,
                top_k=0,
                stopping_criteria=transformers.StoppingCriteriaList([arrive]),
                **options,
            )

        return run

    return {name: variant(name) for name in names}


def onnx_variant(model):
    try:
        from export import write_onnx

        with tempfile.TemporaryDirectory() as folder:
            write_onnx(copy.deepcopy(model).cpu(), "", Path(folder) / "model.onnx")
            onnx = OnnxGPT(Path(folder) / "model.onnx")
    except (ImportError, ValueError) as error:
        print(f"no onnx row: {error} (pip install onnx onnxscript onnxruntime)", file=sys.stderr)
        return {}

    def run(idx, steps, seed, arrivals):
        for tokens in onnx.stream(idx.cpu(), steps, seed=seed):
            arrivals(tokens.tolist())

    return {"onnx": run}


# -- measuring ---------------------------------------------------------------------------------------------------------


def integrated(run, idx, steps, block_size):
    """A slow variant's arrivals from 12 positions: each is one step after a prompt of so many tokens."""
    begin, end = idx.size(1), idx.size(1) + steps - 1
    positions = sorted({round(begin + i * (end - begin) / 11) for i in range(12)})
    cost = []
    for position in positions:
        arrivals = Arrivals(idx.device)
        run(idx[:, :1].repeat(1, position), 1, 0, arrivals)
        cost.append(arrivals.times[0])
    arrivals, now = Arrivals(idx.device), 0.0
    for place in range(begin, end + 1):
        after = next(i for i, position in enumerate(positions) if position >= place)
        low, high = positions[max(0, after - 1)], positions[after]
        share = (place - low) / (high - low) if high > low else 0.0
        now += cost[max(0, after - 1)] * (1 - share) + cost[after] * share
        arrivals.times.append(now)
        arrivals.places.append(1)
    return arrivals


def measure(runs, prompts, steps, repeats, block_size):
    """{name: list of Arrivals}, the variants in turn, and the names that were integrated. Prompts: one a repeat."""
    results, slow = {name: [] for name in runs}, set()
    for name in list(runs):
        device, full = prompts[0].device, prompts[0][:, :1].repeat(1, block_size - 1)
        try:
            if "uncached" in name or name == "hf_nocache":
                runs[name](full, 1, 0, Arrivals(device))
                runs[name](full, 1, 0, last := Arrivals(device))
                if last.times[0] * steps / 2 > SLOW:
                    slow.add(name)
                    results[name] = [integrated(runs[name], prompts[0], steps, block_size)]
                    continue
            runs[name](prompts[0], steps, 0, Arrivals(device))
        except Exception as error:
            if "compile" not in name:
                raise
            # torch.compile reports a missing compiler in many ways
            print(f"no {name} row: {str(error).strip().splitlines()[0][:200]}", file=sys.stderr)
            del runs[name], results[name]
    for seed in range(repeats):
        for name in runs:
            if name not in slow:
                arrivals = Arrivals(prompts[0].device)
                runs[name](prompts[seed], steps, seed, arrivals)
                results[name].append(arrivals)
    return results, slow


def statistics_of(arrivals, batch):
    """What one run says: tokens_per_s, ttft_ms, tpot_ms, itl_p50_ms, itl_p99_ms. ITL is between steps."""
    times, places = arrivals.times, sum(arrivals.places)
    gaps = torch.tensor(times, dtype=torch.float64).diff() * 1e3
    itl = torch.quantile(gaps, torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist() if len(gaps) else (0.0, 0.0)
    return dict(
        tokens_per_s=places * batch / times[-1],
        ttft_ms=times[0] * 1e3,
        tpot_ms=(times[-1] - times[0]) * 1e3 / max(1, places - arrivals.places[0]),
        itl_p50_ms=itl[0],
        itl_p99_ms=itl[1],
    )


def by_position(runs, T):
    """{position: median ms of a step that ended there} over the runs of a variant."""
    gaps = {}
    for arrivals in runs:
        place = T + arrivals.places[0]
        for before, after, n in zip(arrivals.times, arrivals.times[1:], arrivals.places[1:]):
            place += n
            gaps.setdefault(place, []).append((after - before) * 1e3)
    return {place: statistics.median(times) for place, times in sorted(gaps.items())}


@torch.no_grad()
def check_tokens(model, results, prompts, steps):
    """Compare every text of the kit's variants with what one forward over it, without a cache, picks at each place.

    Returns lines that say so, and about near-ties; exits if a token differs by more than rounding.
    """
    ours = [name for name in results if not name.startswith(("hf", "textbook")) and results[name][0].rows]
    notes = []
    for name in ours:
        for seed, (arrivals, idx) in enumerate(zip(results[name], prompts)):
            new = torch.tensor(arrivals.rows, device=idx.device).t()  # (B, steps)
            if new.shape != (len(idx), steps):
                sys.exit(f"bench.py: {name}, seed {seed}: a text of {tuple(new.shape)} for {(len(idx), steps)}")
            logits = model(torch.cat((idx, new), dim=1)[:, :-1])[0][:, idx.size(1) - 1 :]
            counters = (torch.arange(n, device=idx.device) for n in new.shape)
            picks = sample_token(logits, gumbel_noise(seed, *counters, logits.size(-1)))
            for row, step in (picks != new).nonzero().tolist():
                context = [*idx[row].tolist(), *new[row, :step].tolist()]
                both = new[row, step].item(), picks[row, step].item()
                where = f"{name}, seed {seed}, row {row}, new token {step}"
                if not near_tie(model, context, row, step, both, seed, 1.0, None, None):
                    sys.exit(f"bench.py: DIFFERENT from a forward without a cache: {where}")
                notes.append(f"near-tie: {where}")
    return [f"the same tokens as a forward without a cache: {', '.join(ours)}", *notes] if ours else []


def copy_bandwidth(device):
    """Bytes a second that a copy of 256 MB reads and writes."""
    source = torch.zeros(2**26, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(6):
        arrivals = Arrivals(source.device)
        target.copy_(source)
        seconds.append(arrivals.now() - arrivals.began)
    return 2 * source.nbytes / statistics.median(seconds[1:])


def bench(model, ngrams, shape, prompts, names, repeats):
    """(rows, {variant: {position: ms}}, lines of remarks) for one model."""
    config, (B, T) = model.config, prompts[0].shape
    steps = config.block_size - T
    torch._dynamo.reset()
    at_end = torch.compile(
        lambda window, at: model.lm_head(model.features(window).index_select(1, at.view(1))[:, 0]), dynamic=False
    )
    runs = make_variants(model, ngrams, names, at_end)
    if not runs:
        raise ValueError(
            f"{shape}: none of {', '.join(names)} can be measured (a draft needs n-grams in the checkpoint)"
        )
    results, slow = measure(runs, prompts, steps, repeats, config.block_size)
    remarks = check_tokens(model, results, prompts, steps)
    if "textbook" in runs or "textbook_uncached" in runs:
        remarks.append(f"textbook rows stop after {TEXTBOOK_STEPS} tokens, the recipe of the write-ups")
    if any(name.startswith("hf") for name in runs):
        remarks.append("hf and textbook rows draw their own random numbers, and nothing of theirs is compiled")
    for note in sorted(slow):
        remarks.append(f"* {note}: measured at 12 positions and integrated")

    figures = {}
    for name, runs_of in results.items():
        each = [statistics_of(arrivals, B) for arrivals in runs_of]
        figures[name] = {key: statistics.median(run[key] for run in each) for key in each[0]}
    a_token = 2 * config.n_layer * config.kv_heads * config.head_size * B
    a_token *= model.lm_head.weight.element_size()
    rows = []
    for name, figure in figures.items():
        kept = 0 if "uncached" in name or name == "hf_nocache" else T + steps - 1
        kept = T + min(steps, TEXTBOOK_STEPS) - 1 if name == "textbook" else kept
        kept = config.block_size if name in ("eager", "compile", "draft", "compile+draft", "hf_static") else kept
        uncached = figures.get("uncached", {}).get("tokens_per_s")
        speedup = figure["tokens_per_s"] / uncached if uncached else None
        row = dict(shape=shape, variant=name, batch=B, **figure, speedup_over_uncached=speedup)
        rows.append(row | dict(cache_bytes=kept * a_token, integrated=name in slow))

    exact = [row for row in rows if row["variant"] in ("eager", "compile", "draft", "compile+draft")]
    if exact:
        best = max(exact, key=lambda row: row["tokens_per_s"])
        ratios = [
            f"{best['tokens_per_s'] / figures[peer]['tokens_per_s']:.1f} times {peer}"
            for peer in ("hf", "uncached", "textbook")
            if peer in figures
        ]
        remarks.append(f"fastest with these tokens: {best['variant']}, {', '.join(ratios)}")
        curve = by_position(results[best["variant"]], T)
        early = [ms for place, ms in curve.items() if 12 <= place <= 20]
        late = [ms for place, ms in curve.items() if place > config.block_size - 8]
        if early and late and config.block_size > 28:
            early, late = statistics.median(early), statistics.median(late)
            remarks.append(
                f"a step near position 16: {early:.3f} ms, near the last: {late:.3f} ms, {late / early:.2f}x"
            )
        weights = sum(p.nbytes for p in model.parameters())
        steps_a_second = len(results[best["variant"]][0].times) / results[best["variant"]][0].times[-1]
        limit = copy_bandwidth(prompts[0].device)
        remarks.append(
            f"a step reads {weights / 1e6:.1f} MB of weights and up to {a_token * config.block_size / 1e6:.1f} MB of "
            f"cache: {weights * steps_a_second / 1e9:.1f} GB/s of weights, {weights * steps_a_second / limit:.0%} of "
            f"the {limit / 1e9:.1f} GB/s that a copy moves here (what fits in a CPU's cache can be faster)"
        )
    return rows, {name: by_position(runs_of, T) for name, runs_of in results.items()}, remarks


# -- the command line --------------------------------------------------------------------------------------------------


def shape_of(text):
    """An argparse type: layers/heads/width/context."""
    layers, heads, width, context = (int(part) for part in text.split("/"))
    if context < 2:
        raise argparse.ArgumentTypeError(f"{text}: a context of {context} has no room for a prompt and a new token")
    sizes = dict(block_size=context, vocab_size=65, n_layer=layers, n_head=heads, n_embd=width)
    try:
        return GPTConfig(**sizes, activation="gelu_tanh")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


shape_of.__name__ = "layers/heads/width/context"


def parse_args(argv=None):
    kinds = "\n".join(f"  {name:18} {text}" for name, text in VARIANTS.items())
    parser = OneLineParser(
        description=f"{__doc__}\nvariants:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shapes", nargs="+", type=shape_of, metavar="L/H/C/S", help="default: 4/4/64/32 4/4/128/256 6/6/384/256")
    add(
        "--ckpt", nargs="+", type=path, metavar="FILE", help="trained models instead, for which drafts are measured too"
    )
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME", help="default: all")
    add("--batch", type=number(int, "[1, 4096]"), default=1, help="rows (default: 1)")
    add("--repeats", type=number(int, "[1, 1000]"), default=5, help="runs of each variant, in turn (default: 5)")
    add("--device", default="auto", help="cpu, cuda; auto: cuda where there is one (default: auto)")
    add("--csv", type=path, default="out/bench.csv", metavar="FILE", help="default: out/bench.csv")
    add("--json", type=path, metavar="FILE", help="the rows as a list")
    add("--plot", type=path, metavar="FILE", help="a figure (matplotlib): a token's latency against its position")
    args = parser.parse_args(argv)
    if args.shapes and args.ckpt:
        parser.error("--shapes has random weights, --ckpt trained ones: give one of them")
    if not args.ckpt and set(args.variants) <= {"draft", "compile+draft"}:
        parser.error("a draft needs the n-grams of a trained model: give its --ckpt")
    return args


def real_prompts(chars, batch, repeats, length):
    """(batch, length) ids for each repeat: how lines of data/sample.txt begin."""
    text = Path(__file__).with_name("data").joinpath("sample.txt").read_text(encoding="utf-8")
    begins = sorted(
        {line[:length] for line in text.splitlines() if len(line) >= length and set(line[:length]) <= set(chars)}
    )
    if not begins:
        begins = [chars[:length].ljust(length, chars[0])]
    ids = [[chars.index(c) for c in begin] for begin in begins]
    return [torch.tensor([ids[(r * batch + i) % len(ids)] for i in range(batch)]) for r in range(repeats)]


def models(args, device):
    """(shape, model, ngrams, prompts) for each model to measure."""
    seen = {}
    for name in args.ckpt or ():
        model, chars = load_model(name)
        config = model.config
        shape = f"{config.n_layer}/{config.n_head}/{config.n_embd}/{config.block_size}"
        seen[shape] = seen.get(shape, 0) + 1
        shape += f" ({seen[shape]})" if seen[shape] > 1 else ""
        ngrams = load_ngrams(name, len(chars))
        if ngrams is None and any("draft" in variant for variant in args.variants):
            print(f"no draft rows: {name} holds no n-grams", file=sys.stderr)
        prompts = real_prompts(chars, args.batch, args.repeats, min(PROMPT, config.block_size // 2))
        yield shape, model.to(device), ngrams, [idx.to(device) for idx in prompts]
    for config in () if args.ckpt else args.shapes or map(shape_of, ("4/4/64/32", "4/4/128/256", "6/6/384/256")):
        torch.manual_seed(1337)
        prompts = [torch.full((args.batch, 1), seed % 65, device=device) for seed in range(args.repeats)]
        shape = f"{config.n_layer}/{config.n_head}/{config.n_embd}/{config.block_size}"
        yield shape, GPT(config).to(device).eval(), None, prompts


def table(rows):
    header = ("shape", "variant", "tokens/s", "TTFT ms", "TPOT ms", "ITL p50", "ITL p99", "x uncached", "cache KB")
    lines = [header]
    for row in rows:
        speedup = row["speedup_over_uncached"]
        lines.append(
            (row["shape"], row["variant"] + "*" * row["integrated"], f"{row['tokens_per_s']:,.0f}")
            + tuple(f"{row[key]:.3f}" for key in ("ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms"))
            + ("" if speedup is None else f"{speedup:.2f}", f"{row['cache_bytes'] / 1024:,.0f}")
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))))


def plot(file, curves, rows):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(curves), 2, figsize=(12, 4 * len(curves)), squeeze=False, layout="constrained")
    colors = dict(zip(VARIANTS, plt.get_cmap("tab20").colors))
    for (left, right), (shape, variants) in zip(axes, curves.items()):
        mine = sorted((row for row in rows if row["shape"] == shape), key=lambda row: row["tokens_per_s"])
        for name, curve in variants.items():
            style = "--" if "uncached" in name or name == "hf_nocache" else "-"
            left.plot(list(curve), list(curve.values()), style, label=name, color=colors[name], lw=1.5)
        left.set(title=f"{shape}: milliseconds of a step", xlabel="position that it ends at", yscale="log")
        left.grid(alpha=0.3)
        names, speeds = [row["variant"] for row in mine], [row["tokens_per_s"] for row in mine]
        bars = right.barh(names, speeds, color=[colors[name] for name in names])
        right.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
        right.set(
            title=f"{shape}, batch {mine[0]['batch']}: tokens/s", xscale="log", xlim=(min(speeds) / 2, max(speeds) * 2)
        )
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    figure.savefig(file, dpi=110, facecolor="white")


def main():
    args = parse_args()
    if args.plot:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            sys.exit("bench.py: --plot needs matplotlib: pip install matplotlib")
        known = Figure().canvas.get_supported_filetypes()
        if Path(args.plot).suffix.lstrip(".") not in known:
            sys.exit(f"bench.py: --plot {args.plot} must end in one of .{', .'.join(known)}")
    for file in filter(None, (args.csv, args.json, args.plot)):  # now, not after minutes of measuring
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        open(file, "ab").close()
    try:
        device = pick_device(args.device)
        rows, curves = [], {}
        for shape, model, ngrams, prompts in models(args, device):
            print(f"bench.py: measuring {shape} ..", file=sys.stderr, flush=True)
            new, curves[shape], remarks = bench(model, ngrams, shape, prompts, args.variants, args.repeats)
            rows += new
            table(new)
            print("\n".join(remarks) + "\n", flush=True)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"bench.py: {error}")
    threads = f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__} on {device} ({threads}), float32, medians of {args.repeats} runs in turn")
    with open(args.csv, "w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, [*KEYS, "integrated"])
        writer.writeheader()
        writer.writerows(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(args.plot, curves, rows)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"bench.py: cannot write {error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
